"""The frozen weights in a slab of their own: loaded once, found after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rollplex.core.errors import WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.engine.layout_hash import layout_hash
from rollplex.memory.client import BrokerSession, SlabLease
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.model import ActorLayout, ModelConfig, Ranks, load_into

OBJECT_CLASS = "reference_weights"
SEAL_BYTES = 32
"""Behind the weights: a sha256 of what they are, written last, so that a half-loaded slab has none."""


class ReferenceWeights:
    """One rank's slab, computed from where it lies: `open` once; then `mapped` around each use. Owner thread only.

    On `host` that is a CPU's way; on a device of its own the weights are resident there. `paging.PagedWeights` brings those of
    a host slab to a GPU.
    """

    visiting_bytes = 0
    """Device memory beside the slab while `mapped`."""

    def __init__(self, session: BrokerSession, config: ModelConfig, layout: ActorLayout,
                 checkpoint: Path, ranks: Ranks | None = None, *, device: str = "host") -> None:
        """`ranks`: absent for a reference of one rank."""
        ranks = ranks or Ranks(0, 1, 1)
        self.name = f"reference/weights/{device}" + (f"/{ranks.rank}" if ranks.size > 1 else "")
        self.layout, self.size_bytes = layout, layout.size_bytes + SEAL_BYTES
        self.was_loaded = False
        """Whether `open` read the checkpoint, rather than finding the slab of an earlier process."""
        self._session, self._config = session, config
        self.device = device
        """Where the slab is."""
        self._checkpoint, self._rank = checkpoint, ranks.tensor_rank
        self._mapped = MappedSlab(driver_of(device), self.size_bytes)
        self._lease: SlabLease | None = None
        self._rollout_views = {name: self._mapped.tensor(place) for name, place in layout.placements("").items()}
        self._seal = self._mapped.tensor(Placement.contiguous("", layout.size_bytes, (SEAL_BYTES,), "uint8"))

    @property
    def inode(self) -> int:
        """Of the slab's file; 0 before `open`."""
        return self._lease.slab.inode if self._lease else 0

    @property
    def address(self) -> int:
        """First byte of the mapping, page-aligned."""
        return self._mapped.address

    def views(self) -> dict[str, torch.Tensor]:
        """By training name: the same tensors for ever, readable inside `mapped` only."""
        return self.layout.training_views(self._rollout_views)

    def weight_bytes(self) -> torch.Tensor:
        """uint8 [layout.size_bytes]: all of them; readable inside `mapped`, or while `held`."""
        return self._mapped.tensor(Placement.contiguous("", 0, (self.layout.size_bytes,), "uint8"))

    def open(self) -> None:
        """Attaches to a slab with these weights, or creates and fills one. Raises BadInput for a bad checkpoint, OutOfMemory when
        the broker has no room."""
        if self._lease is not None and not self._lease.lost:
            return
        fingerprint = self._fingerprint()
        self._ensure_slab()
        self._lease = self._session.lease(self.name, LeaseMode.READ)
        with self.mapped():
            self.was_loaded = self._seal.cpu().numpy().tobytes() != fingerprint
        if not self.was_loaded:
            return
        self._release()
        self._load(fingerprint)
        self._lease = self._session.lease(self.name, LeaseMode.READ)

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """The weights are readable inside. Raises WrongState before `open`."""
        if self._lease is None:
            raise WrongState("the reference weights are not open; open a run first", reason="NO_RUN")
        if self._lease.lost:
            self._lease = self._session.lease(self.name, LeaseMode.READ)
        self._mapped.bind(self._lease)
        try:
            yield
        finally:
            self._mapped.unbind()

    def hold(self) -> None:
        """Maps the slab until `close`, instead of around each use. After `open`, which raises WrongState otherwise.

        Writable, although nobody writes: memory that is to be pinned must be.
        """
        if self._lease is None:
            raise WrongState("the reference weights are not open; open a run first", reason="NO_RUN")
        self._mapped.unbind()
        # Before the old one goes: a lease that is refused leaves this process with the one that it had.
        lease = self._session.lease(self.name, LeaseMode.WRITE)
        self._release()
        self._lease = lease
        self._mapped.bind(lease, writable=True)

    @property
    def held(self) -> bool:
        """Whether what `hold` mapped is there, and not lost with the broker."""
        return self._mapped.bound and self._lease is not None and not self._lease.lost

    def close(self) -> None:
        """Drops the lease and the addresses; the slab stays with the broker."""
        self._mapped.close()
        self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _ensure_slab(self) -> None:
        found = {slab.name: slab for slab in self._session.list_slabs(self.name)}.get(self.name)
        if found is not None and found.size_bytes != self.size_bytes:
            self._session.delete(self.name)
            found = None
        if found is None:
            self._session.create(self.name, object_class=OBJECT_CLASS, device=self.device, size_bytes=self.size_bytes)

    def _load(self, fingerprint: bytes) -> None:
        with self._session.lease(self.name, LeaseMode.WRITE) as lease:
            self._mapped.bind(lease, writable=True)
            try:
                self._seal.zero_()
                load_into(self._checkpoint, self._config, self.views(), self._rank, self.layout.tp)
                self._seal.copy_(torch.from_numpy(np.frombuffer(fingerprint, dtype=np.uint8).copy()))
            finally:
                self._mapped.unbind()

    def _fingerprint(self) -> bytes:
        """sha256 over layout, rank and the checkpoint's weight files (path, size, time of change)."""
        digest = hashlib.sha256(f"{layout_hash(self._config, self.layout)}/{self._rank}".encode())
        for file in sorted(self._checkpoint.resolve().glob("*.safetensors")):
            status = file.stat()
            digest.update(f"{file}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        return digest.digest()
