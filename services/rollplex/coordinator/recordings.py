"""Recorded runs, for teacher-forced replay: prompts, responses and rewards of iterations that were done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollplex.coordinator.journal import Journal
from rollplex.coordinator.records import Iteration, IterationKey, IterationState, Run, SampleRecord
from rollplex.core.errors import BadInput, NotFound, WrongState


class Recordings:
    """Looks runs up in the mesh's own journal, then in another mesh's."""

    def __init__(self, own: Journal, other: Journal | None = None) -> None:
        self._journals = [own] if other is None else [own, other]

    @classmethod
    def open(cls, own: Journal, other: Path | None) -> Recordings:
        """Raises BadInput when `other` is no file."""
        if other is not None and not other.is_file():
            raise BadInput(f"coordinator.replay_journal {other} does not exist", reason="JOURNAL_MISSING", path=other)
        return cls(own, Journal(other) if other is not None else None)

    async def close(self) -> None:
        """The own journal is its owner's."""
        for journal in self._journals[1:]:
            await journal.close()

    async def config(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded run's options, with those that are given in their place."""
        run, _ = await self._find(name)
        return _merged(json.loads(run.config_json), given)

    async def count(self, name: str) -> int:
        """Iterations that can be replayed."""
        return len(await self._done(name))

    async def next_after(self, past: Sequence[Iteration], name: str) -> IterationKey:
        """What a replay with these iterations of its own takes next: the first that is neither replayed nor queued."""
        held = [item for item in past if not item.key.validation and (_updated(item) or not item.state.ended)]
        return await self._at(name, len(held))

    async def samples_for(self, key: IterationKey, recorded: IterationKey) -> list[SampleRecord]:
        """What iteration `key` of a replay trains on. Token ids, log-probabilities and rewards as they were; advantages are
        computed anew.

        Raises WrongState when an iteration that was queued before this one has failed meanwhile.
        """
        done = sum(_updated(item) and not item.key.validation for item in await self._journals[0].iterations(key.run))
        if await self._at(recorded.run, done) != recorded:
            raise WrongState(f"{key} replays {recorded}, but one before it has failed; submit again",
                             reason="REPLAY_OUT_OF_ORDER")
        _, journal = await self._find(recorded.run)
        samples = await journal.samples(recorded)
        for sample in samples:
            sample.advantage = sample.reference_logprobs = sample.old_logprobs = None
        return samples

    async def _at(self, name: str, position: int) -> IterationKey:
        """The iteration at a position among those that were done. Raises WrongState (REPLAY_ENDED) after the last."""
        done = await self._done(name)
        if position >= len(done):
            raise WrongState(f"run {name!r} has {len(done)} iterations that were done; all of them are replayed",
                             reason="REPLAY_ENDED", count=len(done))
        return done[position].key

    async def prompts(self, key: IterationKey) -> list[dict[str, Any]]:
        _, journal = await self._find(key.run)
        return await journal.prompts(key)

    async def _done(self, name: str) -> list[Iteration]:
        _, journal = await self._find(name)
        iterations = [item for item in await journal.iterations(name)
                      if _updated(item) and not item.key.validation]
        return sorted(iterations, key=lambda item: item.key.iteration)

    async def _find(self, name: str) -> tuple[Run, Journal]:
        for journal in self._journals:
            for run in await journal.runs():
                if run.name == name:
                    return run, journal
        raise NotFound(f"no recorded run {name!r}; a run of another mesh is found through coordinator.replay_journal",
                       reason="RUN_NOT_FOUND", run=name)


def _updated(iteration: Iteration) -> bool:
    """Whether the weights are as after the iteration: also of one that broke off when its update had been published."""
    return iteration.state is IterationState.DONE or (iteration.error is not None
                                                      and iteration.error.reason == "UPDATED_IN_PART")


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged
