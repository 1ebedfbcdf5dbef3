"""Declares torchvision's operators when torchvision is first imported, in any process of an environment.

vLLM inspects models in a subprocess that imports torchvision before any plugin of ours, so `rollplex.torchvision_ops`
would come too late there. `deploy/vllm-cpu/torchvision_shim.pth`, copied into site-packages, imports this module at the
start of every Python; until torchvision is wanted it costs nothing.
"""

from __future__ import annotations

import sys
from typing import Any


class BeforeTorchvision:
    """A meta path finder that finds nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from rollplex.torchvision_ops import ensure_torchvision

            ensure_torchvision()


sys.meta_path.insert(0, BeforeTorchvision())
