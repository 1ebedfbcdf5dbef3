"""Who may join the mesh: a service whose protos, configuration or layout differ is refused, with the difference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from grpc import aio

from rollplex.coordinator.ranks import Rank
from rollplex.core.compatibility import LAYOUT, Description, Facts, mismatch, unlike
from rollplex.core.errors import WrongState
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.describe import describe, own_description

TIMEOUT_S = 10.0


class Admission:
    """Compares services with this coordinator, and their layouts with each other's. Event loop only."""

    def __init__(self, subjects: Mapping[str, Facts]) -> None:
        """`subjects`: of this process beside its protos, as core.compatibility.config_facts has them."""
        self._own = own_description("coordinator", subjects)
        self._run, self._layout = "", None
        """The open run, and what laid out its slabs."""

    async def admit(self, ranks: Sequence[Rank]) -> None:
        """After they joined. Raises WrongState for one that does not fit this coordinator or the other ranks."""
        await asyncio.gather(*(self.admit_service(rank.name, rank.channel) for rank in ranks))
        await self.same_layout(ranks)

    async def admit_service(self, name: str, channel: aio.Channel) -> None:
        found = await describe(name, channel, TIMEOUT_S)
        if subject := unlike(self._own, found):
            raise mismatch(subject, self._own, await describe(name, channel, TIMEOUT_S, with_facts=True))

    async def admit_address(self, name: str, address: str) -> None:
        async with aio_channel(address) as channel:
            await self.admit_service(name, channel)

    async def same_layout(self, ranks: Sequence[Rank]) -> None:
        """Raises WrongState, naming what differs, where two hold different models or layouts."""
        first, *others = (rank for rank in ranks if rank.joined is not None)
        for other in others:
            if other.joined.layout_hash != first.joined.layout_hash:
                raise await self._unlike_layouts(await _facts(first), other)

    async def _unlike_layouts(self, held: Description, other: Rank) -> WrongState:
        return mismatch(LAYOUT, held, await _facts(other))

    async def run_opened(self, run: str, rank: Rank) -> None:
        """From now on the run's slabs are laid out as this rank has it."""
        described = await _facts(rank)
        self._run = run
        self._layout = Description(f"the open run {run!r}", described.pid, {LAYOUT: rank.joined.layout_hash}, described.facts)

    async def fits_run(self, run: str, rank: Rank) -> None:
        """Raises WrongState when all engines were replaced by ones of another layout than the run's slabs have. After a restart
        of the coordinator that is not known: engines check the sizes of what they attach to."""
        if self._run == run and rank.joined.layout_hash != self._layout.digests[LAYOUT]:
            raise await self._unlike_layouts(self._layout, rank)


async def _facts(rank: Rank) -> Description:
    return await describe(rank.name, rank.channel, TIMEOUT_S, with_facts=True)
