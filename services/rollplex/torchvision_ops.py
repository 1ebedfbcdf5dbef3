"""Makes torchvision importable beside a torch that it was not built for.

PyPI's torchvision is compiled against the CUDA build of torch. Beside a CPU torch its extension does not load, and
importing it then fails while registering fake kernels for `torchvision::nms` and `torchvision::qnms`, operators which
the extension would have defined. The image and video processors of transformers need only torchvision's pure-Python
resize, so the two operators are declared here, without a kernel: calling one of them is still an error.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A torch.library.Library takes its operators with it when it is collected.
_declared: list[torch.library.Library] = []


def ensure_torchvision() -> None:
    """Call before anything imports torchvision. Does nothing when its compiled operators load, or when it is absent."""
    if _declared or "torchvision" in sys.modules:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _extension_loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)


def _extension_loads(package: Path) -> bool:
    for extension in sorted(package.glob("_C*.so")):
        try:
            torch.ops.load_library(extension)
        except OSError:
            continue
        if all(hasattr(torch.ops.torchvision, name) for name in _SCHEMAS):
            return True
    return False
