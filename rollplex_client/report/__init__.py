"""The HTML report of a run: one self-contained file, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollplex_client.history import RunHistory
from rollplex_client.report.page import render

__all__ = ["write_report"]


def write_report(path: Path, history: RunHistory, facts: Mapping[str, Any], baseline: RunHistory | None = None) -> Path:
    """Writes the report and returns its path.

    `facts` is what summary.json holds; `baseline` a `serial` run of the same prompts, whose first iterations are set
    beside this run's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(history, facts, baseline), encoding="utf-8")
    return path
