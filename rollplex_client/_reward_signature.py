"""Which of the two known signatures a reward function has, told from its parameter names as TRL and verl pass them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TRL_FORM = "f(prompts, completions, completion_ids, **columns) -> list[float | None]   (TRL; `completions` at least)"
VERL_FORM = ("compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict   "
             "(verl; `solution_str` at least)")

VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


@dataclass(frozen=True, slots=True)
class Signature:
    """How a function wants to be called. All arguments go by keyword, as TRL and verl do it."""

    kind: Literal["trl", "verl"]
    """`trl` scores a whole batch in one call, `verl` one sample."""
    accepted: frozenset[str]
    required: tuple[str, ...]
    takes_any: bool
    """It has **kwargs."""
    is_async: bool

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `arguments` that the function takes."""
        return {name: value for name, value in arguments.items() if self.takes_any or name in self.accepted}


def signature_of(fn: Callable[..., Any]) -> Signature:
    """Raises TypeError, naming both signatures, for a function of neither."""
    if inspect.isclass(fn):
        raise TypeError(f"{fn.__name__} is a class; give an instance, or a function with one of:{_forms()}")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{fn!r} has no readable signature; it must be one of:{_forms()}") from error
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = frozenset(p.name for p in by_keyword)
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    is_trl, is_verl = "completions" in names, "solution_str" in names
    if is_trl == is_verl or unnamed:
        raise TypeError(f"{name_of(fn)}{inspect.signature(fn)} has neither signature that can be served:{_forms()}")
    required = tuple(p.name for p in by_keyword if p.default is p.empty)
    unknown = [name for name in required if name not in VERL_ARGUMENTS]
    if is_verl and unknown:
        raise TypeError(f"{name_of(fn)} needs {', '.join(unknown)}, which nobody passes to it; bind it with "
                        f"functools.partial or give it a default. The signature is:\n  {VERL_FORM}")
    return Signature(kind="trl" if is_trl else "verl", accepted=names, required=required,
                     takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters), is_async=_is_async(fn))


def name_of(fn: Callable[..., Any]) -> str:
    """The function's name; of a partial, that of its function; of an object, that of its class."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__name__", type(fn).__name__)


def _is_async(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, functools.partial):
        return _is_async(fn.func)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _forms() -> str:
    return f"\n  {TRL_FORM}\n  {VERL_FORM}"
