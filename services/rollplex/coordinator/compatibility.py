"""Who may join the mesh: a service whose protos, configuration or layout differ is refused, with the difference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollplex.coordinator.ranks import Rank
from rollplex.core.compatibility import LAYOUT, Description, Facts, mismatch, unlike
from rollplex.core.errors import DeadlineExceeded, Unavailable, WrongState
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.describe import describe, own_description

TIMEOUT_S = 10.0


class Admission:
    """Compares services with this coordinator, and their layouts with each other's. Event loop only."""

    def __init__(self, subjects: Mapping[str, Facts]) -> None:
        """`subjects`: of this process beside its protos, as core.compatibility.config_facts has them."""
        self._own = own_description("coordinator", subjects)
        self._run = ""
        self._layout: Description | None = None
        """Of the run that was opened last."""

    async def admit(self, ranks: Sequence[Rank]) -> None:
        """After they joined. Raises WrongState for one that does not fit this coordinator or the other ranks."""
        for rank, found in zip(ranks, await asyncio.gather(*(_described(rank) for rank in ranks))):
            if subject := unlike(self._own, found):
                raise mismatch(subject, self._own, await _described(rank, with_facts=True))
        await self.same_layout(ranks)

    async def admit_address(self, name: str, address: str) -> None:
        """As `admit`, of a service that is no engine."""
        async with aio_channel(address) as channel:
            if subject := unlike(self._own, await describe(name, channel, TIMEOUT_S)):
                raise mismatch(subject, self._own, await describe(name, channel, TIMEOUT_S, with_facts=True))

    async def same_layout(self, ranks: Sequence[Rank], run: str = "") -> None:
        """Raises WrongState, naming what differs, where two that have joined hold different models or layouts, or all hold
        another than the slabs of the open `run` have. After a restart of the coordinator that is not known: engines check the
        sizes of what they attach to."""
        joined = [rank for rank in ranks if rank.joined is not None]
        for other in joined[1:]:
            if other.joined.layout_hash != joined[0].joined.layout_hash:
                raise await self._unlike_layouts(await _described(joined[0], with_facts=True), other)
        if joined and self._layout is not None and self._run == run \
                and joined[0].joined.layout_hash != self._layout.digests[LAYOUT]:
            raise await self._unlike_layouts(self._layout, joined[0])

    async def _unlike_layouts(self, held: Description, other: Rank) -> WrongState:
        return mismatch(LAYOUT, held, await _described(other, with_facts=True))

    async def run_opened(self, run: str, rank: Rank) -> None:
        """From now on the run's slabs are laid out as this rank has it."""
        described = await _described(rank, with_facts=True)
        self._run = run
        self._layout = Description(f"the open run {run!r}", described.pid, {LAYOUT: rank.joined.layout_hash}, described.facts)


async def _described(rank: Rank, *, with_facts: bool = False) -> Description:
    try:
        return await describe(rank.name, rank.channel, TIMEOUT_S, with_facts=with_facts)
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(f"{rank.name} joined, but does not answer: {error}", reason="ENGINE_UNREACHABLE",
                          service=rank.name) from error
