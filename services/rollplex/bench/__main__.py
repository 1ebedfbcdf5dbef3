"""`python -m rollplex.bench --out DIR --shape 3b`: a checkpoint with random weights, and videos for its prompts.

What lies there already and was made by the same options is kept. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollplex.core.imports import uncollected

SHAPES = ("tiny", "tiny8", "3b", "7b", "32b", "32b-half")


def main() -> None:
    """Parses before torch is imported."""
    parser = argparse.ArgumentParser(prog="python -m rollplex.bench", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES, help="of a checkpoint that is made")
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="one that is there")
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N")
    parser.add_argument("--groups", type=int, default=16, metavar="N", help="videos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="makes the weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    arguments = parser.parse_args()
    print(json.dumps(build(arguments)))


def build(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    checkpoint, weight_bytes = arguments.checkpoint, 0
    if arguments.shape:
        checkpoint = arguments.out / f"checkpoint-{arguments.shape}"
        options = {"shape": arguments.shape, "seed": arguments.seed, "dtype": arguments.dtype, "device": arguments.device}

        def make_checkpoint() -> dict[str, Any]:
            with uncollected():
                from rollplex.bench.checkpoint import build_checkpoint

            return {"weight_bytes": build_checkpoint(checkpoint, **options)}

        weight_bytes = _once(checkpoint, options, make_checkpoint)["weight_bytes"]
    made_s = time.monotonic() - began
    folder = arguments.out / f"videos-{arguments.prompt_tokens}"
    options = {"checkpoint": str(checkpoint.absolute()), "prompt_tokens": arguments.prompt_tokens, "groups": arguments.groups,
               "seed": arguments.seed}

    def make_videos() -> dict[str, Any]:
        with uncollected():
            from rollplex.bench.videos import build_workload

        return build_workload(folder, checkpoint, prompt_tokens=arguments.prompt_tokens, groups=arguments.groups,
                              seed=arguments.seed)

    workload = _once(folder, options, make_videos)
    return {"checkpoint": str(checkpoint.absolute()), "weight_bytes": weight_bytes, "checkpoint_s": made_s,
            "videos_s": time.monotonic() - began - made_s, "media_root": str(folder.absolute()), "workload": workload}


def _once(folder: Path, options: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`make`'s answer, kept beside what it made. Half of something is made again."""
    stamp = folder / "made-by.json"
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if known["options"] == options:
            return known["made"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = make()
    stamp.write_text(json.dumps({"options": options, "made": made}) + "\n")
    return made


if __name__ == "__main__":
    main()
