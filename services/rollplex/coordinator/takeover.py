"""What a coordinator finds in the journal of the one before it, and how the interrupted iteration goes on. No grpc, no proto."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollplex.coordinator.intake import Prompt
from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import Iteration, IterationState, Note, SampleRecord, UpdateRecord
from rollplex.coordinator.update import roll_forward
from rollplex.coordinator.work import IterationWork


@dataclass(slots=True)
class Kept:
    """Of an iteration that an earlier coordinator was in."""

    samples: list[SampleRecord] = field(default_factory=list)
    published: list[UpdateRecord] = field(default_factory=list)
    """Its updates, in order, that are behind it."""
    open_update: UpdateRecord | None = None
    """One that was begun: it is rolled forward before anything else."""

    @property
    def updates(self) -> list[UpdateRecord]:
        """All that will be behind it when it goes on."""
        return [*self.published, *([self.open_update] if self.open_update else [])]

    @property
    def all_updated(self) -> bool:
        """Whether no mini-batch is left."""
        return bool(self.updates) and self.updates[-1].mini_batch == self.updates[-1].mini_batch_count - 1


@dataclass(slots=True)
class Job:
    """A queued iteration with its prepared prompts; `kept` where it is not new."""

    iteration: Iteration
    prompts: list[Prompt]
    kept: Kept | None = None


async def read_kept(journal: Journal, iteration: Iteration) -> Kept | None:
    """None for an iteration that had not begun."""
    if iteration.state is not IterationState.RUNNING:
        return None
    key, kept = iteration.key, Kept(await journal.samples(iteration.key))
    if not key.validation:
        kept.published = await journal.published_updates(key.run, key.iteration)
        record = await journal.open_update(key.run)
        kept.open_update = record if record is not None and record.iteration == key.iteration else None
    return kept


def take_up(work: IterationWork, kept: Kept) -> None:
    """Begins where the journal ends."""
    work.resumed = True
    work.samples = {(sample.group_index, sample.sample_index): sample for sample in kept.samples}
    work.update_begun = kept.open_update is not None
    _count_updates(work, kept.published)
    scored = sum(sample.scored for sample in kept.samples)
    work.emit(Note("info", "RESUMED", f"the coordinator was restarted; of {work.key} {len(kept.samples)} samples, {scored} of "
                                      f"them scored, and {len(kept.updates)} updates are kept, the rest is done again"))


async def finish_update(work: IterationWork, kept: Kept) -> None:
    """Rolls the interrupted update forward, if there is one."""
    if kept.open_update is not None:
        await roll_forward(work.mesh, work.journal, work.run, work.config, kept.open_update, work.emit)
        _count_updates(work, kept.updates)
        work.update_begun = False


def _count_updates(work: IterationWork, updates: list[UpdateRecord]) -> None:
    if updates:
        last = updates[-1]
        work.batch_count, work.updates_published = last.mini_batch_count, last.mini_batch + 1
        work.metrics = dict(last.metrics)
