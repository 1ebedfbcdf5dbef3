"""Which groups go through one suffix forward together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollplex.core.work import ResponseGroup


def packs(groups: Sequence[ResponseGroup], micro_batch_samples: int) -> Iterator[list[ResponseGroup]]:
    """In order: as many whole groups as have `micro_batch_samples` (RunConfig.suffix_micro_batch_samples) at most, or one."""
    pack: list[ResponseGroup] = []
    for group in groups:
        if pack and sum(len(one.samples) for one in [*pack, group]) > micro_batch_samples:
            yield pack
            pack = []
        pack.append(group)
    if pack:
        yield pack
