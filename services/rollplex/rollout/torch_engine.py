"""The `torch` engine: batched decoding in this process, on the actor slab's own bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from rollplex.core import work
from rollplex.core.errors import Aborted, DeadlineExceeded, InternalError
from rollplex.core.ids import actor_slab
from rollplex.core.residency import Residency
from rollplex.core.topology import device_name
from rollplex.engine.actor import ActorMapping
from rollplex.engine.layout_hash import layout_hash
from rollplex.engine.prompts import PromptReader
from rollplex.engine.residency import ResidencyReport
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession
from rollplex.memory.driver import Driver
from rollplex.model import ActorLayout, GroupDecoder, ModelConfig, PromptInputs
from rollplex.rollout.admission import admitted_count
from rollplex.rollout.batch import Batch
from rollplex.rollout.engine import SeededGroup, Tally
from rollplex.rollout.sampling import TokenSampler

KV = "rollout_kv"


class TorchEngine:
    """rollplex.rollout.engine.TokenEngine. The decoder is built once: snapshots change behind its tensors' addresses.

    It takes over the session and closes it.
    """

    def __init__(self, session: BrokerSession, driver: Driver, reader: PromptReader, config: ModelConfig, dtype: str, *,
                 max_rows: int) -> None:
        layout = ActorLayout.build(config, 1, dtype)
        self.layout_hash = layout_hash(config, layout)
        self._session, self._config, self._reader, self._max_rows = session, config, reader, max_rows
        self._actor = ActorMapping(session, driver, layout, device_name(0))
        self._decoder = GroupDecoder(config, layout, self._actor.views())
        self._arena = Arena("rollout", self._actor.device)
        self._report = ResidencyReport(session, self._arena)
        self._reported_bytes = 0

    def open(self, run: str) -> None:
        self._actor.open(actor_slab(run, self._actor.device))

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        inode = self._actor.bind(snapshot)
        return self._bound_parameters(), {self._actor.device: inode}

    def unbind(self) -> None:
        self._actor.unbind()

    def generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        sampler = TokenSampler(sampling, self._config.forbidden_token_ids)
        waiting, batches = deque(groups), []
        try:
            while waiting or batches:
                tally.check()
                with tally.timed("prefill"):
                    self._admit(waiting, batches, sampler, tally, sampling.deterministic)
                with tally.timed("decode"):
                    finished = [sample for batch in batches for sample in batch.step()]
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
            self._account([])
            self._reported_bytes = 0
            self._report.send()

    def release_kv(self) -> int:
        return self._arena.release_class(KV)

    def close(self) -> None:
        self._actor.close()
        self._session.close()

    def _admit(self, waiting: deque[SeededGroup], batches: list[Batch], sampler: TokenSampler, tally: Tally,
               deterministic: bool) -> None:
        """Starts a batch with the groups for which there is room."""
        rows = [seeded.group.sample_count for seeded in waiting]
        busy = sum(batch.row_count for batch in batches)
        count = admitted_count(rows, busy, self._max_rows, deterministic=deterministic)
        members = [waiting.popleft() for _ in range(count)]
        if members:
            pad, inputs = self._config.pad_token_id or 0, self._read(members, tally)
            batches.append(Batch(self._decoder, sampler, self._config.eos_token_ids, pad, members, inputs))
            self._account(batches)

    def _read(self, members: Sequence[SeededGroup], tally: Tally) -> Iterator[PromptInputs]:
        """Prompts one at a time: pixel patches are far larger than what prefill leaves of them."""
        for seeded in members:
            tally.check()
            inputs = self._reader.read(seeded.group)
            tally.prompt(seeded.group, inputs.hash())
            yield inputs

    def _account(self, batches: Sequence[Batch]) -> None:
        """Brings the arena's rollout_kv to what the batches hold; the broker hears of growth at once."""
        self._arena.release_class(KV)
        size_bytes = sum(batch.size_bytes for batch in batches)
        if size_bytes:
            self._arena.hold(KV, Residency.HBM, size_bytes)
        if size_bytes > self._reported_bytes:
            self._reported_bytes = size_bytes
            self._report.send()

    def _bound_parameters(self) -> int:
        """Weights of the decoder that lie where the layout has them in the slab. InternalError unless all do."""
        tensors, weights = self._actor.layout.tensors, self._decoder.weights
        astray = [name for name, tensor in tensors.items()
                  if weights[name].data_ptr() != self._actor.address + tensor.offset_bytes]
        if astray:
            raise InternalError(f"parameters outside the actor slab: {', '.join(astray[:5])} ({len(astray)} in all)")
        return len(tensors)
