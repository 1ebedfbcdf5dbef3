"""Options of `rollplex chaos`. Imports argparse only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

DEFAULT_CELLS = 20
DEFAULT_OUT = Path("runs/chaos")


def add_chaos(add: Callable[..., argparse.ArgumentParser]) -> None:
    chaos = add("chaos", "chaos_command:chaos",
                "Start a small mesh, kill and stop its processes at every point of an iteration, and compare what it learns.")
    chaos.add_argument("--cells", type=_count, default=DEFAULT_CELLS, metavar="N|all",
                       help=f"how many cells, drawn by the seed (default {DEFAULT_CELLS})")
    chaos.add_argument("--seed", type=int, default=0, help="of the draw, and of a soak")
    chaos.add_argument("--processes", type=_names, default=(), metavar="A,B", help="victims (default: all services)")
    chaos.add_argument("--points", type=_names, default=(), metavar="A,B", help="crash points, or patterns as 'trainer.update.*'")
    chaos.add_argument("--actions", type=_names, default=("kill",), metavar="A,B", help="kill, stop (default: kill)")
    chaos.add_argument("--list", action="store_true", help="only print the crash points")
    chaos.add_argument("--soak", type=float, metavar="MINUTES", help="instead of cells: kills at random times for so long")
    chaos.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR",
                       help=f"report.json, and the ends of the logs of what failed (default {DEFAULT_OUT})")


def _count(text: str) -> int | None:
    """None: all."""
    if text == "all":
        return None
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} cells; give 1 or more, or `all`")
    return count


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)
