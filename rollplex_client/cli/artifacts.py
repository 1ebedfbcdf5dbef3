"""What a training leaves in its folder: metrics.jsonl while it runs, summary.json and report.html at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rollplex_client.results import Iteration


class MetricsFile:
    """One JSON line an iteration or validation: its numbers and every metric, flushed at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a")

    def add(self, result: Iteration) -> None:
        line = {"run": result.run, "iteration": result.iteration, "validation": result.validation,
                "state": result.state, "snapshot": result.snapshot, "metrics": result.metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_summary(folder: Path, data: Mapping[str, Any]) -> Path:
    path = folder / "summary.json"
    path.write_text(json.dumps(data, indent=2, default=str) + "\n")
    return path
