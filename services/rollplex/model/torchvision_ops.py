"""transformers' model code imports torchvision, and PyPI's torchvision does not import beside a CPU-only torch.

Its extension, built for the CUDA torch, fails to load, and then registering fake kernels for two operators that the
extension defines raises. Nothing here needs them: they are declared without a kernel, and calling one stays an error.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A Library takes its operators with it when it is collected.
_declared: list[torch.library.Library] = []


def declare_torchvision_ops() -> None:
    """Call before transformers' modelling code is imported."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or "torchvision" in sys.modules:
        return
    for extension in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(extension)
        except OSError:
            continue
    absent = [schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if absent:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in absent:
            library.define(schema)
        _declared.append(library)
