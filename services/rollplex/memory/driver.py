"""The driver interface: address ranges and physical memory apart, joined by map and unmap.

`reserve / free` own addresses, `create / release` own pages, `export / import_fd` carry pages between processes as file
descriptors, `map / unmap` put pages behind addresses. The shape is CUDA's virtual memory management (cuMemAddressReserve,
cuMemCreate, cuMemExportToShareableHandle, cuMemMap + cuMemSetAccess, ...); the host driver does it with mmap and memfd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range of addresses, multiples of the driver's granularity. Nothing is behind it until something is mapped."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Handle:
    """Physical memory, in this process's hands until released."""

    number: int
    """Owned by the handle: a file descriptor on the host, an allocation handle with CUDA."""
    size_bytes: int
    """Exact; a mapping covers it rounded up to the granularity."""


class Driver(Protocol):
    """Every method raises OSError with the system's reason, or ValueError for sizes that do not fit."""

    @property
    def device(self) -> str:
        """`host`, `cuda:0`, ..."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Alignment of reservations, offsets and mapped sizes."""
        ...

    def reserve(self, size_bytes: int) -> Reservation:
        """Addresses for at least `size_bytes`; touching them is a fault until `map`."""
        ...

    def free(self, reservation: Reservation) -> None:
        """Gives the addresses back, with whatever is mapped there."""
        ...

    def create(self, size_bytes: int, name: str) -> Handle:
        """New zero-filled memory whose size can never change; `name` is for people only."""
        ...

    def export(self, handle: Handle) -> int:
        """A new file descriptor of the memory, CLOEXEC; the caller closes it."""
        ...

    def import_fd(self, fd: int, size_bytes: int) -> Handle:
        """Memory that another process created; `fd` stays the caller's. Raises ValueError when it is smaller."""
        ...

    def map(self, reservation: Reservation, handle: Handle, *, writable: bool, offset_bytes: int = 0) -> None:
        """Puts the memory at `offset_bytes` of the range, in place of what is there."""
        ...

    def map_zeros(self, reservation: Reservation) -> None:
        """The whole range reads as zeros and holds (next to) no memory; nobody may write. In place of what is there."""
        ...

    def unmap(self, reservation: Reservation, *, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Takes memory from the range (the whole by default); the addresses stay reserved."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Bytes of a mapped slab into this driver's mapped one, both uint8 [n] and mapped in this process; may still run when it
        returns, and `unmap` and `free` wait for it."""
        ...

    def release(self, handle: Handle) -> None:
        """Drops this process's hold; pages live on while mapped or held elsewhere."""
        ...
