"""The slabs in custody: descriptors, never mappings. `announce`, `accept`, `part_with` and `freed` keep the account of their
bytes."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollplex.core.errors import AlreadyExists, BadInput, DataLoss, NotFound
from rollplex.core.residency import CONTRACT
from rollplex.core.topology import is_cuda, is_host
from rollplex.memory.slab import Slab

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_WRITE_SEALS = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


def check_announced(slab: Slab) -> None:
    """Raises BadInput for a name, class, device or size that cannot be."""
    parts = slab.name.split("/")
    if not slab.name.isprintable() or len(slab.name) > 255 or not all(parts):
        raise BadInput(f"slab name {slab.name!r} must be 1-255 printable characters, without empty parts",
                       reason="BAD_SLAB_NAME")
    if slab.object_class not in CONTRACT:
        raise BadInput(f"object class {slab.object_class!r} is none of {', '.join(CONTRACT)}",
                       reason="BAD_OBJECT_CLASS")
    if not (is_host(slab.device) or is_cuda(slab.device)):
        raise BadInput(f"slab {slab.name} on device {slab.device!r}, which is neither host, host:N nor cuda:N",
                       reason="NO_DRIVER", device=slab.device)
    if slab.size_bytes < 1:
        raise BadInput(f"slab {slab.name} of {slab.size_bytes} bytes; it must have at least 1", reason="BAD_SLAB_SIZE")


def check_memfd(slab: Slab, fd: int) -> int:
    """The inode of a sealed memfd of the slab's size. Raises BadInput naming what does not fit."""
    def refuse(what: str) -> BadInput:
        return BadInput(f"slab {slab.name}: {what}", reason="BAD_DESCRIPTOR", slab=slab.name)

    # The name first: asking a pipe or socket for its seals is an error, not an answer.
    if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:"):
        raise refuse("the descriptor is no memfd")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise refuse("the memfd is not sealed against shrinking and growing")
    # Decoded frames come final, sealed by the child that made them; every other class is written to.
    if seals & _WRITE_SEALS and slab.object_class != "media":
        raise refuse("the memfd is sealed against writing")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise refuse("the descriptor is not open for reading and writing")
    stat = os.fstat(fd)
    if stat.st_size != slab.size_bytes:
        raise refuse(f"the memfd has {stat.st_size} bytes, {slab.size_bytes} were announced")
    return stat.st_ino


def check_cuda_fd(slab: Slab, fd: int) -> None:
    """What an exported CUDA allocation shows of itself: a descriptor of the driver's. Its size is known to whoever maps it.

    Raises BadInput for anything else.
    """
    target = str(Path(f"/proc/self/fd/{fd}").readlink())
    if not target.startswith(("/dev/nvidia", "anon_inode:")):
        raise BadInput(f"slab {slab.name}: the descriptor is no CUDA allocation but {target.partition(':')[0]}",
                       reason="BAD_DESCRIPTOR", slab=slab.name)


@dataclass(slots=True)
class SlabStore:
    fds: dict[str, int] = field(default_factory=dict)
    by_name: dict[str, Slab] = field(default_factory=dict)
    announced: dict[str, Slab] = field(default_factory=dict)
    generation: int = 0
    device_bytes: Counter[str] = field(default_factory=Counter)
    """By device: of all slabs, announced ones included."""

    @property
    def host_bytes(self) -> int:
        """In host memory, whatever host device it belongs to."""
        return sum(size for device, size in self.device_bytes.items() if is_host(device))

    def get(self, name: str) -> Slab:
        slab = self.by_name.get(name)
        if slab is None:
            raise NotFound(f"no slab {name!r}", reason="SLAB_NOT_FOUND", slab=name)
        return slab

    def announce(self, slab: Slab) -> None:
        if slab.name in self.by_name or slab.name in self.announced:
            raise AlreadyExists(f"slab {slab.name} exists", reason="SLAB_EXISTS", slab=slab.name)
        self.announced[slab.name] = slab
        self.device_bytes[slab.device] += slab.size_bytes

    def retract(self, name: str) -> None:
        """Forgets an announcement whose descriptor will not come. Idempotent."""
        slab = self.announced.pop(name, None)
        if slab is not None:
            self.device_bytes[slab.device] -= slab.size_bytes

    def stamp(self, name: str, fd: int) -> Slab:
        """The announced slab as it will be, checked against its descriptor. Nothing changes but the generation."""
        slab = self.announced[name]
        identity = self._identify(slab, fd)
        self.generation += 1
        inode = self.generation if identity is None else identity
        return replace(slab, inode=inode, generation=self.generation)

    def accept(self, slab: Slab, fd: int) -> None:
        """Takes an announced slab and its descriptor into custody."""
        del self.announced[slab.name]
        self.by_name[slab.name] = slab
        self.fds[slab.name] = fd

    def restore(self, slab: Slab, fd: int) -> None:
        """Takes back what the keeper kept. Raises DataLoss when the descriptor is not the slab that it is said to be."""
        try:
            identity = self._identify(slab, fd)
            inode = slab.generation if identity is None else identity
        except BadInput as error:
            raise DataLoss(f"the keeper's descriptor is not the slab: {error}", reason="KEEPER_MISMATCH") from error
        if inode != slab.inode or slab.generation < 1:
            raise DataLoss(f"slab {slab.name}: inode {inode}, generation {slab.generation}; inode {slab.inode} was kept",
                           reason="KEEPER_MISMATCH")
        self.announce(slab)
        self.accept(slab, fd)
        self.generation = max(self.generation, slab.generation)

    def open_for(self, name: str, *, writable: bool) -> int:
        """A new descriptor for a lease holder, read-only unless `writable`; the caller closes it."""
        # A GPU's descriptor has no read-only form; the reader's mapping is read-only instead.
        if writable or is_cuda(self.by_name[name].device):
            return fcntl.fcntl(self.fds[name], fcntl.F_DUPFD_CLOEXEC, 0)
        return os.open(f"/proc/self/fd/{self.fds[name]}", os.O_RDONLY | os.O_CLOEXEC)

    def part_with(self, name: str) -> tuple[Slab, int]:
        """The slab and its descriptor, which is the caller's now. Its bytes count until they are `freed`."""
        return self.by_name.pop(name), self.fds.pop(name)

    def freed(self, slab: Slab) -> None:
        self.device_bytes[slab.device] -= slab.size_bytes

    def _identify(self, slab: Slab, fd: int) -> int | None:
        """The inode; None for CUDA allocations, whose descriptors have none: their generation stands for it."""
        if is_host(slab.device):
            return check_memfd(slab, fd)
        check_cuda_fd(slab, fd)
        return None

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
