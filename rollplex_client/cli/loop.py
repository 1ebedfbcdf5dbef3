"""The loop of `train` and `demo`: prompts in, iterations one after another, validations between."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollplex.core.errors import Aborted, BadInput, RollplexError, Unavailable, WrongState
from rollplex.core.ids import new_id
from rollplex_client.prompts import Prompt
from rollplex_client.results import Event, Iteration, IterationHandle, Run
from rollplex_client.sync import Client


@dataclass(frozen=True, slots=True)
class Plan:
    """What to submit. The same plan submits the same prompts in the same order."""

    run: str
    prompts: Sequence[Prompt]
    heldout: Sequence[Prompt] = ()
    iterations: int = 1
    groups_per_iteration: int = 1
    validate_every: int = 0
    """0: only before the first and after the last."""
    shuffle: bool = True
    seed: int = 0
    rows: Sequence[int] = ()
    """Row number of every prompt in its file, for messages; empty: its position."""
    heldout_rows: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.prompts and self.groups_per_iteration > len(self.prompts):
            raise BadInput(f"groups_per_iteration is {self.groups_per_iteration}, but there are only "
                           f"{len(self.prompts)} usable rows", reason="TOO_FEW_ROWS", rows=len(self.prompts))

    def batch(self, iteration: int) -> list[int]:
        """Positions in `prompts` of one iteration; epochs follow on each other without a gap."""
        first = iteration * self.groups_per_iteration
        return [self._order(epoch)[place] for epoch, place in
                (divmod(position, len(self.prompts)) for position in range(first, first + self.groups_per_iteration))]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def validates_after(self, iteration: int) -> bool:
        """Whether a validation follows that iteration."""
        last = iteration == self.iterations - 1
        return bool(self.heldout) and (last or (self.validate_every > 0 and (iteration + 1) % self.validate_every == 0))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A prompt that the coordinator does not take."""

    row: str
    """As in "row 7" or "held-out row 7"."""
    reason: str


@dataclass(slots=True)
class _Source:
    """Prompts and which of them are left out."""

    prompts: Sequence[Prompt]
    rows: Sequence[int]
    title: str
    refused: dict[int, Refusal] = field(default_factory=dict)
    """By position in `prompts`."""

    def name(self, position: int) -> str:
        return f"{self.title} {self.rows[position] if self.rows else position}"


class Observer(Protocol):
    """Watches a loop, for progress and files."""

    def on_submit(self, handle: IterationHandle) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def on_result(self, result: Iteration) -> None: ...

    def on_refused(self, refusals: Sequence[Refusal]) -> None: ...

    def on_retry(self, error: RollplexError) -> None: ...


Submit = Callable[..., IterationHandle]

ATTEMPTS = 3
"""How often an iteration is handed in when a service dies under it."""
RECONNECT_S = 60.0
"""How long a coordinator or an engine may be away when an iteration is handed in."""
RETRY_PAUSE_S = 0.5


class TrainingLoop:
    """Runs a plan. With `filter_bad`, prompts that the coordinator refuses by index are left out and reported."""

    def __init__(self, client: Client, plan: Plan, observer: Observer, *, filter_bad: bool = False) -> None:
        self._client, self._plan, self._observer, self._filter_bad = client, plan, observer, filter_bad
        self._train = _Source(plan.prompts, plan.rows, "row")
        self._heldout = _Source(plan.heldout, plan.heldout_rows, "held-out row")

    def train(self, run: Run) -> None:
        """From the run's next iteration to the plan's last. An interrupt cancels what is under way, then is raised."""
        plan = self._plan
        if run.next_iteration == 0 and plan.heldout:
            self._validate()
        for iteration in range(run.next_iteration, plan.iterations):
            self._step(iteration)
            if plan.validates_after(iteration):
                self._validate()

    def _step(self, iteration: int) -> None:
        # Where every prompt of a batch is left out, the batches after it stand in.
        batches = -(-2 * len(self._plan.prompts) // self._plan.groups_per_iteration)
        ahead = [self._plan.batch(iteration + number) for number in range(batches)]
        self._carry_out(lambda: self._submit(self._client.submit_iteration, self._train, ahead))

    def _validate(self) -> None:
        rows = list(range(len(self._plan.heldout)))
        self._carry_out(lambda: self._submit(self._client.submit_validation, self._heldout, [rows]))

    def _carry_out(self, submit: Callable[[], IterationHandle]) -> None:
        """Submits and follows; again when a service was lost and the snapshot is as it was."""
        for left in range(ATTEMPTS - 1, -1, -1):
            try:
                self._follow(submit())
                return
            except RollplexError as error:
                if not left or not isinstance(error, Aborted | Unavailable):
                    raise
                self._observer.on_retry(error)

    def _submit(self, submit: Submit, source: _Source, batches: Iterable[Sequence[int]]) -> IterationHandle:
        """The first batch of which something can be used. Raises BadInput, naming rows, for what may not be left out."""
        for batch in batches:
            while positions := [position for position in batch if position not in source.refused]:
                try:
                    return self._hand_in(submit, [source.prompts[position] for position in positions])
                except BadInput as error:
                    refused = {positions[index]: reason for index, reason in refused_groups(error).items()
                               if index < len(positions)}
                    if not refused:
                        raise
                    refusals = {position: Refusal(source.name(position), reason) for position, reason in refused.items()}
                    if not self._filter_bad:
                        raise BadInput("; ".join(f"{item.row}: {item.reason}" for item in refusals.values()),
                                       reason=error.reason, rows=",".join(item.row for item in refusals.values())
                                       ) from error
                    source.refused |= refusals
                    self._observer.on_refused(list(refusals.values()))
        first = next(iter(source.refused.values()))
        raise BadInput(f"no usable row is left, {len(source.refused)} are refused; {first.row}: {first.reason}",
                       reason="EMPTY_DATASET")

    def _hand_in(self, submit: Submit, groups: Sequence[Prompt]) -> IterationHandle:
        """With one request id, so that an answer that was lost does not make a second iteration."""
        request_id, deadline = new_id("request"), time.monotonic() + RECONNECT_S
        while True:
            try:
                return submit(self._plan.run, groups, request_id=request_id)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_PAUSE_S)

    def _follow(self, handle: IterationHandle) -> None:
        self._observer.on_submit(handle)
        try:
            self._observer.on_result(self._client.wait(handle, on_event=self._observer.on_event))
        except KeyboardInterrupt:
            # Past the beginning of UPDATE it cannot be cancelled; the update then ends by itself.
            with contextlib.suppress(RollplexError):
                self._client.cancel(handle)
            raise


class ReplayLoop(TrainingLoop):
    """Replays the recorded iterations that are left, at most the plan's number of them."""

    def train(self, run: Run) -> None:
        if run.next_iteration == 0 and self._plan.heldout:
            self._validate()
        for iteration in range(self._plan.iterations):
            try:
                self._carry_out(lambda: self._hand_in(self._replay, []))
            except WrongState as error:
                if error.reason != "REPLAY_ENDED":
                    raise
                return
            if self._plan.validates_after(iteration):
                self._validate()

    def _replay(self, run: str, groups: Sequence[Prompt], request_id: str) -> IterationHandle:
        return self._client.replay_iteration(run, request_id=request_id)


_EXPLAINED = re.compile(r"(?:^|[.;] )prompt (\d+): ")


def refused_groups(error: RollplexError) -> dict[int, str]:
    """Why, by index, of the groups that a refusal names in its metadata; its text spells out the first of them."""
    _, *parts = _EXPLAINED.split(str(error))
    reasons = dict(zip(parts[::2], parts[1::2]))
    indices = [part for part in error.metadata.get("indices", "").split(",") if part.isdigit()]
    return {int(index): reasons.get(index, f"refused as others are ({error.reason})") for index in indices}
