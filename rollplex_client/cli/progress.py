"""Live progress of a training: phase, samples, tokens per second, reward, accuracy, time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollplex.core.errors import RollplexError
from rollplex_client.cli.loop import Refusal
from rollplex_client.history import IterationRecord
from rollplex_client.results import Event, Iteration, IterationHandle, Note, PhaseSpan
from rollplex_client.results import Progress as SampleProgress


class LiveProgress:
    """A context manager and an `Observer`. On a console that is no terminal it prints one line an iteration."""

    def __init__(self, console: Console, title: str, iterations: int) -> None:
        self._console, self._title, self._total = console, title, iterations
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(bar_width=8), MofNCompleteColumn(),
                              TextColumn("{task.fields[facts]}"), TimeRemainingColumn(compact=True), console=console,
                              disable=not console.is_terminal)
        self._overall = self._bars.add_task(title, total=iterations, facts="")
        self._samples = self._bars.add_task("samples", total=None, facts="")
        self._phase, self._begun = "", time.monotonic()

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bars.stop()

    def on_submit(self, handle: IterationHandle) -> None:
        self._begun, self._phase = time.monotonic(), "queued"
        what = "validation" if handle.validation else "iteration"
        self._bars.reset(self._samples, total=None, description=f"{what} {handle.iteration}", facts=self._phase)

    def on_event(self, event: Event) -> None:
        body = event.body
        if isinstance(body, PhaseSpan):
            if not body.ended:
                self._phase = body.span
                self._bars.update(self._samples, facts=body.span)
        elif isinstance(body, SampleProgress):
            tokens_per_s = body.response_tokens / max(time.monotonic() - self._begun, 1e-3)
            reward = "" if body.reward_mean is None else f" reward {body.reward_mean:.3f}"
            self._bars.update(self._samples, completed=body.samples_done, total=body.samples_total,
                              facts=f"{self._phase} {tokens_per_s:.0f} tokens/s{reward}")
        elif isinstance(body, Note) and body.level != "info":
            self._console.print(f"{body.level}: {body.message} [{body.reason}]", markup=False, soft_wrap=True)

    def on_result(self, result: Iteration) -> None:
        facts = result_facts(result)
        if not result.validation:
            self._bars.update(self._overall, completed=result.iteration + 1, facts=facts)
        if result.validation or not self._console.is_terminal:
            what = "validation" if result.validation else f"{self._title}: iteration"
            self._console.print(f"{what} {result.iteration} {result.state}: {facts}", markup=False, soft_wrap=True)

    def on_refused(self, refusals: Sequence[Refusal]) -> None:
        for item in refusals:
            self._console.print(f"left out: {item.row}: {item.reason}", markup=False, soft_wrap=True)

    def on_retry(self, error: RollplexError) -> None:
        self._console.print(f"again, after: {error} [{error.reason}]", markup=False, soft_wrap=True)


def result_facts(result: Iteration) -> str:
    """As in "reward 1.23 accuracy 0.41 in 1.2 s"."""
    record = IterationRecord(result, ())
    facts = [f"{name} {value:.3f}" for name, value in (("reward", record.metrics.get("reward")),
                                                       ("accuracy", record.accuracy)) if value is not None]
    if "timing_s/step" in record.metrics:
        facts.append(f"in {record.metrics['timing_s/step']:.2f} s")
    return " ".join(facts)


class Silent:
    """An `Observer` for --json."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def on_submit(self, handle: IterationHandle) -> None:
        """Nothing is shown."""

    def on_event(self, event: Event) -> None:
        """Nothing is shown."""

    def on_result(self, result: Iteration) -> None:
        """Nothing is shown."""

    def on_refused(self, refusals: Sequence[Refusal]) -> None:
        """The command's result lists them."""

    def on_retry(self, error: RollplexError) -> None:
        """Nothing is shown."""
