"""--model of `layout` and `plan`: a checkpoint, its config.json alone, or the name of a published model."""

from __future__ import annotations

from pathlib import Path

import rollplex.core
from rollplex.core.errors import BadInput
from rollplex.core.shapes import ModelShapes, read_shapes

PUBLISHED = Path(rollplex.core.__file__).parents[1] / "model" / "published"
"""Next to `rollplex.model` and found as a path: importing that package would import torch."""


def published_names() -> list[str]:
    return sorted(file.stem for file in PUBLISHED.glob("*.json"))


def model_shapes(model: str) -> ModelShapes:
    """A path wins over a name; "Qwen/" in front and "-Instruct" behind a name do not matter. Raises BadInput."""
    path = Path(model)
    if path.exists():
        return read_shapes(path)
    wanted = model.lower().removeprefix("qwen/").removesuffix("-instruct")
    for name in published_names():
        if name.lower() == wanted:
            return read_shapes(PUBLISHED / f"{name}.json")
    raise BadInput(f"--model {model}: no such file or folder, and none of {', '.join(published_names())}",
                   reason="UNKNOWN_MODEL", model=model)
