"""Frozen weights that lie in host memory and visit a GPU: pages behind fixed addresses, filled when something is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollplex.core.placement import Placement
from rollplex.memory.device_pages import DevicePages
from rollplex.memory.driver import Driver
from rollplex.memory.host_registration import HostRegistration
from rollplex.reference.weights import ReferenceWeights

PIECE_BYTES = 1 << 30
"""Of one copy: large enough for the bus, small enough that the first layers' weights do not wait for the last's."""


class PagedWeights:
    """The same methods as ReferenceWeights, whose `source` is a slab in plain host memory. Owner thread only."""

    def __init__(self, source: ReferenceWeights, driver: Driver) -> None:
        """`driver`: of the device that computes."""
        self._source, self._pages = source, DevicePages(driver, source.layout.size_bytes)
        self._registration: HostRegistration | None = None
        self._rollout_views = {name: self._pages.tensor(place) for name, place in source.layout.placements("").items()}
        everything = Placement.contiguous("", 0, (source.layout.size_bytes,), "uint8")
        self._pieces = list(zip(source.weight_bytes().split(PIECE_BYTES), self._pages.tensor(everything).split(PIECE_BYTES),
                                strict=True))
        """Of the host slab, and where each goes."""

    @property
    def was_loaded(self) -> bool:
        return self._source.was_loaded

    @property
    def device(self) -> str:
        """Where the slab is."""
        return self._source.device

    @property
    def inode(self) -> int:
        return self._source.inode

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    @property
    def visiting_bytes(self) -> int:
        """Device memory while `mapped`."""
        return self._pages.size_bytes

    def views(self) -> dict[str, torch.Tensor]:
        """By training name: the same tensors for ever, readable inside `mapped` only."""
        return self._source.layout.training_views(self._rollout_views)

    def open(self) -> None:
        """As the source's; then the slab is mapped and pinned for as long as this process lives."""
        if self._source.held and self._registration is not None:
            return
        self._unpin()
        self._source.open()
        self._pin()

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """The pages are on the device inside, their contents on the way there in the order of the current stream.

        Raises WrongState before `open`, OSError when the device has no room.
        """
        if not self._source.held or self._registration is None:
            # The broker was restarted and could not give the lease back.
            self._unpin()
            self._pin()
        self._pages.back()
        try:
            for source, target in self._pieces:
                target.copy_(source, non_blocking=True)
            yield
        finally:
            # Unmapping waits for what still computes from the pages.
            self._pages.drop()

    def close(self) -> None:
        self._unpin()
        self._pages.close()
        self._source.close()

    def _pin(self) -> None:
        self._source.hold()
        self._registration = HostRegistration(self._source.address, self._source.size_bytes)

    def _unpin(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()
