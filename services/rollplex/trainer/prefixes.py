"""The prefixes that wait for their suffixes: one attached boundary a group, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.core.errors import WrongState
from rollplex.core.residency import Residency
from rollplex.memory.arena import Arena, Hold
from rollplex.memory.pinned_pool import PinnedPool
from rollplex.model import Boundary, Limit, PromptInputs, VisionLanguageModel, prefix_forward
from rollplex.trainer.saved_bytes import SavedBytes

BOUNDARY = "boundary_trainer"
ACTIVATIONS = "prefix_activations"


@dataclass(frozen=True)
class ReadyPrefix:
    """A group's boundary, and where its responses continue."""

    boundary: Boundary
    last_token: int
    suffix_position: int
    holds: tuple[Hold, ...]


class Prefixes:
    """`add` and `release` are the pair, by group_index."""

    def __init__(self, model: VisionLanguageModel, arena: Arena, limit: Limit | None = None) -> None:
        """`limit`: rollplex.model.prefix_forward's."""
        self._model, self._arena, self._limit = model, arena, limit
        self._ready: dict[int, ReadyPrefix] = {}

    @property
    def boundary_bytes(self) -> int:
        return self._arena.held_bytes(BOUNDARY)

    @property
    def saved_bytes(self) -> int:
        return self._arena.held_bytes(ACTIVATIONS)

    def add(self, group_index: int, inputs: PromptInputs, saved: str, pool: PinnedPool | None) -> None:
        """Runs a prefix, attached to autograd, in place of the group's earlier one.

        `saved`: RunConfig.saved_activations. Raises OutOfMemory when the offload pool is full.
        """
        self.release(group_index)
        counter = SavedBytes(self._model.parameters())
        pool_before = pool.used_bytes if pool is not None else 0
        if saved == "from_inputs":
            inputs = inputs.with_pixels(self._model.dtype)
        with counter.counting():
            boundary = prefix_forward(self._model, inputs, saved=saved, offload=pool, limit=self._limit)
        # What the prefix runs again from waits where it will be needed.
        kept_bytes = counter.size_bytes + (inputs.size_bytes if saved == "from_inputs" else 0)
        holds = [self._arena.hold(BOUNDARY, Residency.HBM, boundary.size_bytes),
                 self._arena.hold(ACTIVATIONS, Residency.HBM, kept_bytes)]
        if pool is not None:
            holds.append(self._arena.hold(ACTIVATIONS, Residency.PINNED, pool.used_bytes - pool_before))
        self._ready[group_index] = ReadyPrefix(boundary, inputs.last_token, inputs.suffix_position, tuple(holds))

    def get(self, group_index: int) -> ReadyPrefix:
        """Raises WrongState when the group has none."""
        if group_index not in self._ready:
            raise WrongState(f"group {group_index} has no boundary; materialise its prefix under the bound snapshot first",
                             reason="BOUNDARY_MISSING", group_index=group_index)
        return self._ready[group_index]

    def release(self, group_index: int) -> None:
        """Drops boundary, graph and saved activations. Idempotent."""
        ready = self._ready.pop(group_index, None)
        if ready is None:
            return
        ready.boundary.release()
        for hold in ready.holds:
            hold.release()

    def release_all(self) -> int:
        """Bytes released."""
        size_bytes = self.boundary_bytes + self.saved_bytes
        for group_index in list(self._ready):
            self.release(group_index)
        return size_bytes
