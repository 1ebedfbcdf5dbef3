"""Tiny clips that the sandboxed decoder reads a second, start of its workers included.

    PYTHONPATH=services:protos/gen:. python benchmarks/media/decoding.py [--clips 300] [--workers 2]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from rollplex.data.decoder import MediaDecoder
from rollplex.data.limits import MediaLimits
from rollplex.data.rows import MediaRef
from rollplex.demo.videos import encode

SIDE = 56


async def measure(clips: int, workers: int) -> float:
    limits = MediaLimits(video_min_pixels=28 * 28, image_min_pixels=28 * 28)
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.mp4" for number in range(clips)]
        for number, path in enumerate(paths):
            with path.open("wb") as file:
                encode(generator.integers(0, 255, (2 + number % 7, SIDE, SIDE, 3), dtype=np.uint8), file)
        began = time.monotonic()
        async with MediaDecoder(workers=workers) as decoder:
            for decoded in await asyncio.gather(*(
                    decoder.decode([MediaRef("video", str(path))], limits, [Path(folder)]) for path in paths)):
                decoded.close()
            return clips / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clips", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{asyncio.run(measure(arguments.clips, arguments.workers)):.0f} clips a second, {arguments.workers} workers")


if __name__ == "__main__":
    main()
