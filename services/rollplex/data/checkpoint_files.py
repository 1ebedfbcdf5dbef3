"""Which files a Hugging Face checkpoint directory must have: for the prompt side alone, and for the whole mesh."""

from __future__ import annotations

import json
from pathlib import Path

from rollplex.core.errors import BadInput

MODEL_TYPE = "qwen2_5_vl"

# Each entry: any one of the alternatives will do; an alternative is a set of files.
REQUIRED = (
    (("config.json",),),
    (("tokenizer.json",), ("vocab.json", "merges.txt")),
    (("tokenizer_config.json",),),
    (("preprocessor_config.json",), ("processor_config.json",)),
)

WEIGHTS, WEIGHT_INDEX = "model.safetensors", "model.safetensors.index.json"


def check_checkpoint(checkpoint: Path) -> None:
    """As `check_processor_files`, and the weights must be there; only names are looked at, no tensor is read."""
    check_processor_files(checkpoint)
    missing = _missing_weights(checkpoint)
    if missing:
        raise BadInput(
            f"checkpoint {checkpoint} is incomplete, it lacks: {', '.join(missing)}",
            reason="INCOMPLETE_CHECKPOINT",
            path=checkpoint,
            missing=missing,
        )


def _missing_weights(checkpoint: Path) -> list[str]:
    index = checkpoint / WEIGHT_INDEX
    if not index.is_file():
        return [] if (checkpoint / WEIGHTS).is_file() else [f"{WEIGHTS} or {WEIGHT_INDEX}"]
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"checkpoint {checkpoint}: {WEIGHT_INDEX} is no weight index", reason="BAD_CHECKPOINT") from error
    return sorted(str(file) for file in files if not (checkpoint / str(file)).is_file())


def check_processor_files(checkpoint: Path) -> None:
    """Raises BadInput naming the missing files, or the architecture when it is another one."""
    if not checkpoint.is_dir():
        raise BadInput(f"checkpoint {checkpoint} is not a directory", reason="BAD_CHECKPOINT", path=checkpoint)
    missing = [
        " or ".join(" + ".join(files) for files in alternatives)
        for alternatives in REQUIRED
        if not any(all((checkpoint / file).is_file() for file in files) for files in alternatives)
    ]
    if missing:
        raise BadInput(
            f"checkpoint {checkpoint} is incomplete, it lacks: {', '.join(missing)}",
            reason="INCOMPLETE_CHECKPOINT",
            path=checkpoint,
            missing=missing,
        )
    try:
        model_type = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise BadInput(f"checkpoint {checkpoint}: config.json is no JSON object: {error}", reason="BAD_CHECKPOINT") from error
    if model_type != MODEL_TYPE:
        raise BadInput(
            f"checkpoint {checkpoint} is of model_type {model_type!r}; {MODEL_TYPE!r} is what runs here",
            reason="OTHER_ARCHITECTURE",
            path=checkpoint,
            model_type=model_type,
        )
