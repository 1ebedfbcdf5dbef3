"""The trainer's prefixes: read and run pack by pack, attached to autograd, and what they keep until their suffixes are done."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.core.crash_points import crash_point
from rollplex.core.residency import Residency
from rollplex.core.work import PreparedGroup, WorkContext
from rollplex.engine import PromptReader
from rollplex.engine.prefix_stream import PrefixStream
from rollplex.engine.ready_prefixes import ReadyPrefixes
from rollplex.memory.arena import Arena
from rollplex.memory.pinned_pool import PinnedPool
from rollplex.model import VisionLanguageModel, prefix_pass
from rollplex.trainer.saved_bytes import SavedBytes

BOUNDARY = "boundary_trainer"
ACTIVATIONS = "prefix_activations"


class Prefixes:
    """`materialize` and `release_all` are the pair; what is ready is consumed by its suffixes meanwhile."""

    def __init__(self, model: VisionLanguageModel, arena: Arena, stream: PrefixStream | None = None) -> None:
        """`stream`: where blocks run; absent: where everything does."""
        self._model, self._arena, self._stream = model, arena, stream
        self.ready = ReadyPrefixes()

    @property
    def boundary_bytes(self) -> int:
        return self._arena.held_bytes(BOUNDARY)

    @property
    def saved_bytes(self) -> int:
        return self._arena.held_bytes(ACTIVATIONS)

    def materialize(self, context: WorkContext, reader: PromptReader, packs: Sequence[Sequence[PreparedGroup]], saved: str,
                    pool: PinnedPool | None) -> dict[int, str]:
        """Runs the prefixes of packs that have none; their prompts' hashes by group_index.

        `saved`: RunConfig.saved_activations. Raises OutOfMemory when the offload pool is full, DataLoss for a prompt unlike the
        coordinator's.
        """
        hashes: dict[int, str] = {}
        count = sum(map(len, packs))
        for pack in packs:
            context.check()
            found = self._run(reader, pack, saved, pool)
            for group, prompt_hash in zip(pack, found, strict=True):
                hashes[group.group_index] = prompt_hash
                crash_point("trainer.prefix.group")
                context.progress(len(hashes), count, "groups")
        if saved != "keep":
            # Only graphs that keep everything are gone back through on that stream.
            self.rest()
        return hashes

    def _run(self, reader: PromptReader, pack: Sequence[PreparedGroup], saved: str, pool: PinnedPool | None) -> list[str]:
        """Hashes of the pack's prompts, which are not held any longer than the prefix holds them."""
        inputs = [reader.read(group).with_pixels(self._model.dtype) for group in pack]
        counter = SavedBytes(self._model.parameters())
        pool_before = pool.used_bytes if pool is not None else 0
        with counter.counting():
            prefix = prefix_pass(self._model, inputs, saved=saved, offload=pool, limit=self._stream)
        # What the prefix runs again from waits where it will be needed.
        kept_bytes = counter.size_bytes + (sum(one.size_bytes for one in inputs) if saved == "from_inputs" else 0)
        holds = [self._arena.hold(BOUNDARY, Residency.HBM, prefix.size_bytes),
                 self._arena.hold(ACTIVATIONS, Residency.HBM, kept_bytes)]
        if pool is not None:
            holds.append(self._arena.hold(ACTIVATIONS, Residency.PINNED, pool.used_bytes - pool_before))
        self.ready.add([group.group_index for group in pack], inputs, prefix, holds)
        return [one.hash() for one in inputs]

    def rest(self) -> None:
        """Leaves the prefix stream's SMs to others, until the next prefix."""
        if self._stream is not None:
            self._stream.rest()

    def release_all(self) -> int:
        """Bytes released."""
        size_bytes = self.boundary_bytes + self.saved_bytes
        self.ready.release_all()
        return size_bytes
