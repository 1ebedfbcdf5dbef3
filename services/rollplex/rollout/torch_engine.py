"""The `torch` engine: batched decoding on the actor slabs' own bytes, sampled by the replica's leader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from rollplex.core import work
from rollplex.core.errors import Aborted, DeadlineExceeded
from rollplex.core.phases import Phase
from rollplex.engine.device import device_errors
from rollplex.engine.layout_hash import layout_facts
from rollplex.engine.prompts import PromptReader
from rollplex.model import ModelConfig, PromptInputs
from rollplex.rollout.admission import admitted_count
from rollplex.rollout.batch import Batch
from rollplex.rollout.engine import SeededGroup, Tally
from rollplex.rollout.replica import Replica
from rollplex.rollout.sampling import TokenSampler


class TorchEngine:
    """rollplex.rollout.engine.TokenEngine. It closes the replica."""

    def __init__(self, replica: Replica, reader: PromptReader, config: ModelConfig, *, max_rows: int) -> None:
        self.layout_facts = layout_facts(config, replica.shard.layout)
        self._replica, self._config, self._reader, self._max_rows = replica, config, reader, max_rows

    def open(self, run: str) -> None:
        self._replica.open(run)

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        return self._replica.bind(snapshot)

    def unbind(self) -> None:
        self._replica.unbind()

    def generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        with device_errors(Phase.OVERLAP, "generate", self._replica.shard.device):
            self._generate(groups, sampling, tally)

    def release_kv(self) -> int:
        return self._replica.drop()

    def close(self) -> None:
        self._replica.close()

    def _generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        sampler = TokenSampler(sampling, self._config.forbidden_token_ids)
        waiting, batches = deque(groups), []
        try:
            while waiting or batches:
                tally.check()
                with tally.timed("prefill"):
                    self._admit(waiting, batches, sampler, tally, sampling.deterministic)
                finished = []
                for batch in batches:
                    with tally.decoding(batch.row_count):
                        finished += batch.step()
                if finished:
                    tally.finish(finished)
                    batches[:] = [batch for batch in batches if batch.row_count]
                    self._account(batches)
        except (Aborted, DeadlineExceeded):
            tally.finish([sample for batch in batches for sample in batch.unfinished()])
            raise
        finally:
            for batch in batches:
                batch.release()

    def _admit(self, waiting: deque[SeededGroup], batches: list[Batch], sampler: TokenSampler, tally: Tally,
               deterministic: bool) -> None:
        """Starts a batch with the groups for which there is room."""
        rows = [seeded.group.sample_count for seeded in waiting]
        busy = sum(batch.row_count for batch in batches)
        count = admitted_count(rows, busy, self._max_rows, deterministic=deterministic)
        members = [waiting.popleft() for _ in range(count)]
        if members:
            pad, inputs = self._config.pad_token_id or 0, self._read(members, tally)
            batches.append(Batch(self._replica.decoder, sampler, self._config.eos_token_ids, pad, members, inputs))
            self._account(batches)

    def _read(self, members: Sequence[SeededGroup], tally: Tally) -> Iterator[PromptInputs]:
        """Prompts one at a time: pixel patches are far larger than what prefill leaves of them."""
        for seeded in members:
            tally.check()
            inputs = self._reader.read(seeded.group)
            tally.prompt(seeded.group, inputs.hash())
            yield inputs

    def _account(self, batches: Sequence[Batch]) -> None:
        self._replica.shard.keys_values.set(sum(batch.size_bytes for batch in batches))
