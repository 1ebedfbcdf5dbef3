"""A reward that differs from sample to sample and answers only while no file GATE_FILE is there; it notes who waits beside it."""

import os
import time
from pathlib import Path

GATE = Path(os.environ.get("GATE_FILE", "/nonexistent"))


def token_sum(prompts, completions, completion_ids, **columns):
    if GATE.exists():
        GATE.with_suffix(".asked").touch()
    while GATE.exists():
        time.sleep(0.02)
    return [sum(ids) % 7 / 7 for ids in completion_ids]
