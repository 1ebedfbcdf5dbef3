"""The client of Rollplex: submit iterations, watch them, register rewards. Imports no torch and no numpy.

    from rollplex_client import Client, Prompt

    with Client("unix:/run/rollplex/coordinator.sock") as client:
        client.create_run("my-run", {"schedule": "overlap"})
        result = client.wait(client.submit_iteration("my-run", [Prompt.text("2 + 2?", ground_truth="4")]))
        print(result.metrics["reward"])

Names are loaded at first use, so that `rollplex --help` costs no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollplex_client.aio import AsyncClient
    from rollplex_client.prompts import Media, Prompt, prompt_from_row
    from rollplex_client.results import (
        Event,
        Export,
        Iteration,
        IterationHandle,
        LedgerEntry,
        Mesh,
        Note,
        PhaseSpan,
        Progress,
        Reward,
        Run,
        Sample,
        Service,
    )
    from rollplex_client.sync import Client

_HOMES = {"AsyncClient": "aio", "Client": "sync", "Media": "prompts", "Prompt": "prompts", "prompt_from_row": "prompts"}

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "Export",
    "Iteration",
    "IterationHandle",
    "LedgerEntry",
    "Media",
    "Mesh",
    "Note",
    "PhaseSpan",
    "Progress",
    "Prompt",
    "Reward",
    "Run",
    "Sample",
    "Service",
    "prompt_from_row",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'results')}"), name)
