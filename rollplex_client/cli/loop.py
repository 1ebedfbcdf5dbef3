"""The loop of `train` and `demo`: prompts in, iterations one after another, validations between."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


class Observer(Protocol):
    """Watches a loop, for progress and files."""

    def on_submit(self, handle: IterationHandle) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def on_result(self, result: Iteration) -> None: ...

    def on_refused(self, error: RollplexError, dropped: Sequence[int]) -> None: ...

    def on_retry(self, error: RollplexError) -> None: ...


Submit = Callable[..., IterationHandle]

ATTEMPTS = 3
"""How often an iteration is handed in when a service dies under it."""
LOST_REASONS = ("COORDINATOR_RESTARTED", "ENGINE_RESTARTED")
RECONNECT_S = 60.0
"""How long a coordinator or an engine may be away when an iteration is handed in."""
RETRY_PAUSE_S = 0.5


class TrainingLoop:
    """Runs a plan. With `filter_bad`, prompts that the coordinator refuses by index are left out and reported."""

    def __init__(self, client: Client, plan: Plan, observer: Observer, *, filter_bad: bool = False) -> None:
        self._client, self._plan, self._observer, self._filter_bad = client, plan, observer, filter_bad
        self._bad: set[int] = set()

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
        positions = [position for position in self._plan.batch(iteration) if position not in self._bad]
        self._carry_out(self._client.submit_iteration, self._plan.prompts, positions)

    def _validate(self) -> None:
        self._carry_out(self._client.submit_validation, self._plan.heldout, list(range(len(self._plan.heldout))))

    def _carry_out(self, submit: Submit, prompts: Sequence[Prompt], positions: list[int]) -> None:
        """Submits and follows; again when a service was lost, which leaves the snapshot as it was."""
        for left in range(ATTEMPTS - 1, -1, -1):
            try:
                self._follow(self._submit(submit, prompts, positions))
                return
            except RollplexError as error:
                lost = isinstance(error, Aborted | Unavailable) or error.reason in LOST_REASONS
                if not left or not lost:
                    raise
                self._observer.on_retry(error)

    def _submit(self, submit: Submit, prompts: Sequence[Prompt], positions: list[int]) -> IterationHandle:
        while True:
            try:
                return self._hand_in(submit, [prompts[position] for position in positions])
            except BadInput as error:
                refused = refused_groups(error)
                if not self._filter_bad or not refused or len(refused) >= len(positions):
                    raise
                dropped = [positions[index] for index in refused if index < len(positions)]
                if prompts is self._plan.prompts:
                    self._bad.update(dropped)
                self._observer.on_refused(error, dropped)
                positions = [position for position in positions if position not in dropped]

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
                self._carry_out(self._replay, [], [])
            except WrongState as error:
                if error.reason != "REPLAY_ENDED":
                    raise
                return
            if self._plan.validates_after(iteration):
                self._validate()

    def _replay(self, run: str, groups: Sequence[Prompt], request_id: str) -> IterationHandle:
        return self._client.replay_iteration(run, request_id=request_id)


def refused_groups(error: RollplexError) -> list[int]:
    """Indices of the groups that a refusal names, in its metadata."""
    return [int(part) for part in error.metadata.get("indices", "").split(",") if part.isdigit()]
