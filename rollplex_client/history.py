"""What a run has done, put together from its event log: the material of summaries and reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollplex_client.results import Event, Iteration, LedgerEntry, Note, PhaseSpan, Run
from rollplex_client.sync import Client

_ACCURACY = re.compile(r"rewards/[^/]+/accuracy/mean")
VALIDATION_PREFIX = "val/"


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One iteration or validation that has ended."""

    result: Iteration
    spans: tuple[PhaseSpan, ...]
    """Ended ones, in order of their start."""

    @property
    def metrics(self) -> dict[str, float]:
        """A validation's names without their "val/"."""
        return {name.removeprefix(VALIDATION_PREFIX): value for name, value in self.result.metrics.items()}

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy as the first reward with such a part measured it."""
        metrics = self.metrics
        return next((metrics[name] for name in sorted(metrics) if _ACCURACY.fullmatch(name)), None)


@dataclass(frozen=True, slots=True)
class RunHistory:
    run: Run
    iterations: tuple[IterationRecord, ...]
    """Those that were done."""
    validations: tuple[IterationRecord, ...]
    notes: tuple[Note, ...] = ()
    peaks: tuple[LedgerEntry, ...] = field(default=())
    """Largest bytes by object class and phase."""

    def values(self, metric: str) -> list[tuple[int, float]]:
        """(iteration, value) where it was measured."""
        return [(record.result.iteration, record.metrics[metric]) for record in self.iterations
                if metric in record.metrics]

    def mean(self, metric: str) -> float | None:
        return mean([value for _, value in self.values(metric)])


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def collect(run: Run, events: Iterable[Event], peaks: Sequence[LedgerEntry] = ()) -> RunHistory:
    """Puts a run's events together. Iterations without an end are left out."""
    spans: dict[tuple[bool, int], list[PhaseSpan]] = {}
    done: dict[tuple[bool, int], Iteration] = {}
    notes = []
    for event in events:
        key = (event.validation, event.iteration)
        if isinstance(event.body, PhaseSpan):
            if event.body.ended:
                spans.setdefault(key, []).append(event.body)
        elif isinstance(event.body, Iteration):
            if event.body.state == "queued":
                # Of a run that was taken back to a checkpoint, the number is used again.
                spans.pop(key, None)
                done.pop(key, None)
            elif event.body.state == "done":
                done[key] = event.body
        elif isinstance(event.body, Note):
            notes.append(event.body)
    records = [IterationRecord(result, tuple(sorted(spans.get(key, []), key=lambda span: span.start_s)))
               for key, result in sorted(done.items())]
    return RunHistory(run, tuple(record for record in records if not record.result.validation),
                      tuple(record for record in records if record.result.validation), tuple(notes), tuple(peaks))


def read_history(client: Client, name: str) -> RunHistory:
    """Reads a run's whole event log. Peaks are the mesh's, so only those of the open run are known. Raises NotFound."""
    run = client.get_run(name)
    mesh = client.mesh()
    peaks = mesh.ledger_peaks if mesh.open_run == name else ()
    return collect(run, _past(client, run), peaks)


def _past(client: Client, run: Run) -> Iterable[Event]:
    if run.last_sequence == 0:
        return
    events = client.watch(run.name)
    try:
        for event in events:
            yield event
            if event.sequence >= run.last_sequence:
                return
    finally:
        events.close()
