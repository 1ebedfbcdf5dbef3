"""`path/to/file.py:function` or `package.module:function` -> the function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollplex.core.errors import BadInput

DEFAULT_FUNCTION = "compute_score"
"""verl's default for `custom_reward_function.name`."""


def load_function(target: str) -> Callable[..., Any]:
    """Raises BadInput when the file, module or function is not there; what the module itself raises passes."""
    place, _, name = target.partition(":")
    name = name or DEFAULT_FUNCTION
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_by_name(place)
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = sorted(key for key, value in vars(module).items() if not key.startswith("_")
                 and callable(value) and getattr(value, "__module__", None) == module.__name__)
    raise BadInput(f"{place} has no function {name!r}; it has {', '.join(own) or 'none'}", reason="REWARD_NOT_FOUND")


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"reward file {path} does not exist", reason="REWARD_NOT_FOUND")
    # As with `python path/to/file.py`, the file may import its neighbours.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"rollplex_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _module_by_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise BadInput(f"there is no module {name!r}; a file is given as path/to/file.py:function",
                           reason="REWARD_NOT_FOUND") from error
        raise
