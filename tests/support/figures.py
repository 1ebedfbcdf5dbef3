"""Numbers that a test is run for: printed, and a JSON line each in the file that ROLLPLEX_FIGURES names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ON_CPU = pytest.mark.skipif("ROLLPLEX_TRY_ON_CPU" not in os.environ,
                            reason="minutes, for what other tests show on CPUs: `benchmarks/gpu/prove.sh - OUT --device cpu`")
"""For what is only tried on a CPU, so that it works on a GPU."""


def figure(what: str, **values: Any) -> None:
    """What was measured, in words, and its numbers with what they depend on."""
    line = json.dumps({"what": what, "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0], **values})
    print(line)
    if path := os.environ.get("ROLLPLEX_FIGURES"):
        with Path(path).open("a") as file:
            file.write(line + "\n")
