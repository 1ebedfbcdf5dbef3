"""The prefixes that wait for their suffixes: an attached boundary a group, and what passes of groups hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.core.crash_points import crash_point
from rollplex.core.errors import WrongState
from rollplex.core.residency import Residency
from rollplex.core.work import PreparedGroup, WorkContext
from rollplex.engine import PromptReader
from rollplex.engine.prefix_stream import PrefixStream
from rollplex.memory.arena import Arena, Hold
from rollplex.memory.pinned_pool import PinnedPool
from rollplex.model import Boundary, PromptInputs, VisionLanguageModel, prefix_pass
from rollplex.trainer.saved_bytes import SavedBytes

BOUNDARY = "boundary_trainer"
ACTIVATIONS = "prefix_activations"


@dataclass(frozen=True)
class ReadyPrefix:
    """A group's boundary, and where its responses continue."""

    boundary: Boundary
    last_token: int
    suffix_position: int
    pack: tuple[int, ...]
    """Indices of the groups that went through the prefix together."""
    holds: tuple[Hold, ...]
    """Of what all of these keep."""


class Prefixes:
    """`add` and `release` are the pair: of the groups of one pass, all at once."""

    def __init__(self, model: VisionLanguageModel, arena: Arena, stream: PrefixStream | None = None) -> None:
        """`stream`: where blocks run; absent: where everything does."""
        self._model, self._arena, self._stream = model, arena, stream
        self._ready: dict[int, ReadyPrefix] = {}

    @property
    def boundary_bytes(self) -> int:
        return self._arena.held_bytes(BOUNDARY)

    @property
    def saved_bytes(self) -> int:
        return self._arena.held_bytes(ACTIVATIONS)

    def materialize(self, context: WorkContext, reader: PromptReader, packs: Sequence[Sequence[PreparedGroup]], saved: str,
                    pool: PinnedPool | None) -> tuple[str, ...]:
        """Reads and adds every group's prompt, pack after pack; their hashes. Raises as `add`, and DataLoss for a prompt unlike
        the coordinator's."""
        hashes, count = [], sum(map(len, packs))
        for pack in packs:
            context.check()
            inputs = [reader.read(group) for group in pack]
            self.add([group.group_index for group in pack], inputs, saved, pool)
            for one in inputs:
                hashes.append(one.hash())
                crash_point("trainer.prefix.group")
                context.progress(len(hashes), count, "groups")
        if saved != "keep":
            # Only graphs that keep everything are gone back through on that stream.
            self.rest()
        return tuple(hashes)

    def add(self, group_indices: Sequence[int], inputs: Sequence[PromptInputs], saved: str, pool: PinnedPool | None) -> None:
        """Runs the prefix of these groups together, attached to autograd, in place of their earlier ones.

        `saved`: RunConfig.saved_activations. Raises OutOfMemory when the offload pool is full.
        """
        for group_index in group_indices:
            self.release(group_index)
        counter = SavedBytes(self._model.parameters())
        pool_before = pool.used_bytes if pool is not None else 0
        if saved == "from_inputs":
            inputs = [one.with_pixels(self._model.dtype) for one in inputs]
        with counter.counting():
            prefix = prefix_pass(self._model, inputs, saved=saved, offload=pool, limit=self._stream)
        # What the prefix runs again from waits where it will be needed.
        kept_bytes = counter.size_bytes + (sum(one.size_bytes for one in inputs) if saved == "from_inputs" else 0)
        holds = [self._arena.hold(BOUNDARY, Residency.HBM, prefix.size_bytes),
                 self._arena.hold(ACTIVATIONS, Residency.HBM, kept_bytes)]
        if pool is not None:
            holds.append(self._arena.hold(ACTIVATIONS, Residency.PINNED, pool.used_bytes - pool_before))
        pack = tuple(group_indices)
        for index, one, boundary in zip(pack, inputs, prefix.boundaries, strict=True):
            self._ready[index] = ReadyPrefix(boundary, one.last_token, one.suffix_position, pack, tuple(holds))

    def get(self, group_index: int) -> ReadyPrefix:
        """Raises WrongState when the group has none."""
        if group_index not in self._ready:
            raise WrongState(f"group {group_index} has no boundary; materialise its prefix under the bound snapshot first",
                             reason="BOUNDARY_MISSING", group_index=group_index)
        return self._ready[group_index]

    def backward(self, group_index: int) -> None:
        """Of the group's pass, once the suffixes of all its groups are done."""
        self.get(group_index).boundary.backward()

    def release(self, group_index: int) -> None:
        """Drops boundaries, graph and saved activations of the group's pass. Idempotent."""
        ready = self._ready.get(group_index)
        if ready is None:
            return
        for index in ready.pack:
            del self._ready[index]
        ready.boundary.release()
        for hold in ready.holds:
            hold.release()

    def rest(self) -> None:
        """Leaves the prefix stream's SMs to others, until the next prefix."""
        if self._stream is not None:
            self._stream.rest()

    def release_all(self) -> int:
        """Bytes released."""
        size_bytes = self.boundary_bytes + self.saved_bytes
        for group_index in list(self._ready):
            self.release(group_index)
        return size_bytes
