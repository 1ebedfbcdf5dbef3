"""Boundaries that wait for their suffixes, in a trainer or a reference: by group, given up pass by pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollplex.core.errors import WrongState
from rollplex.memory.arena import Hold
from rollplex.model import Boundary, PrefixPass, PromptInputs


@dataclass(frozen=True, slots=True)
class ReadyPrefix:
    """A group's boundary, and where its responses continue."""

    boundary: Boundary
    last_token: int
    suffix_position: int
    pack: tuple[int, ...]
    """Indices of the groups that went through the prefix together."""
    holds: tuple[Hold, ...]
    """Of what all of these keep."""


class ReadyPrefixes:
    """`add` and `release` are the pair. Owner thread only."""

    def __init__(self) -> None:
        self._ready: dict[int, ReadyPrefix] = {}
        """By group_index."""

    def add(self, group_indices: Iterable[int], inputs: Sequence[PromptInputs], prefix: PrefixPass, holds: Iterable[Hold]
            ) -> None:
        """The groups whose prompts went through `prefix`, in its order. `holds` account for all that it keeps."""
        pack, holds = tuple(group_indices), tuple(holds)
        for index, one, boundary in zip(pack, inputs, prefix.boundaries, strict=True):
            self._ready[index] = ReadyPrefix(boundary, one.last_token, one.suffix_position, pack, holds)

    def require(self, group_indices: Iterable[int]) -> None:
        """Raises WrongState unless each of these groups has one."""
        missing = [index for index in group_indices if index not in self._ready]
        if missing:
            raise WrongState(f"no boundary of groups {missing[:8]} ({len(missing)} in all): materialise their prefixes first, "
                             "under the bound snapshot", reason="BOUNDARY_MISSING", groups=missing[:8])

    def get(self, group_index: int) -> ReadyPrefix:
        """Raises WrongState when the group has none."""
        self.require([group_index])
        return self._ready[group_index]

    def backward(self, group_indices: Iterable[int]) -> None:
        """Once through each pass of these groups, whose suffixes are all done."""
        for index in group_indices:
            self.get(index).boundary.backward()

    def release(self, group_indices: Iterable[int]) -> None:
        """Drops the passes of these groups: boundaries, also of others that went with them, graphs, saved activations.
        Idempotent."""
        for index in group_indices:
            ready = self._ready.get(index)
            if ready is None:
                continue
            for one in ready.pack:
                self._ready.pop(one, None)
            ready.boundary.release()
            for hold in ready.holds:
                hold.release()

    def release_all(self) -> None:
        self.release(list(self._ready))
