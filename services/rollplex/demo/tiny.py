"""`python -m rollplex.demo.tiny --out DIR`: a checkpoint of random weights and two stills, for meshes that are only there to be
broken (`rollplex chaos`). DIR/checkpoint, DIR/media/still-N.png."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollplex.core.imports import uncollected

STILLS = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollplex.demo.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    build(given.out, given.seed)


def build(directory: Path, seed: int) -> None:
    with uncollected():
        import torch
        from PIL import Image

        from rollplex.demo.checkpoint import VOCAB_SIZE, build_config, build_model, save_checkpoint
        from rollplex.demo.prompts import corpus
        from rollplex.demo.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(corpus(), VOCAB_SIZE)
    model = build_model(build_config(tokenizer), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Nothing of an update is hidden by a zero.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_checkpoint(directory / "checkpoint", model, tokenizer)
    media = directory / "media"
    media.mkdir()
    for index in range(STILLS):
        Image.new("RGB", (56, 56), (200 - 90 * index, 30, 40 + 90 * index)).save(media / f"still-{index}.png")


if __name__ == "__main__":
    main()
