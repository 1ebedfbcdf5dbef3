"""What one rank of a replica holds: its device's actor slab, a decoder on it, and the account of its keys and values."""

from __future__ import annotations

from rollplex.core.errors import InternalError
from rollplex.core.ids import actor_slab
from rollplex.core.residency import Residency
from rollplex.engine.actor import ActorMapping
from rollplex.engine.device import release_cached, use_device
from rollplex.engine.residency import ResidencyReport
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, GroupDecoder, ModelConfig

KV = "rollout_kv"


class RankShard:
    """The decoder is built once a group of ranks: snapshots change behind its tensors' addresses.

    It takes over the session and closes it. Owner thread only.
    """

    def __init__(self, session: BrokerSession, config: ModelConfig, layout: ActorLayout, device: str) -> None:
        self._computes_on = use_device(device)
        self.layout, self.device = layout, device
        self.session, self.keys_values = session, KeyValueAccount(session, device)
        self.decoder: GroupDecoder
        """There from the first `join` on."""
        self._config = config
        self._actor = ActorMapping(session, layout, device)

    def join(self) -> None:
        """Builds the decoder for the tensor-parallel group that this process has joined."""
        self.decoder = GroupDecoder(self._config, self.layout, self._actor.views())

    def open(self, run: str) -> None:
        self._actor.open(actor_slab(run, self.device))

    def bind(self, snapshot: int) -> tuple[int, int]:
        """(bound parameters, inode). InternalError unless every parameter is a view of the slab, where the layout has it."""
        inode = self._actor.bind(snapshot)
        tensors, weights = self.layout.tensors, self.decoder.weights
        astray = [name for name, tensor in tensors.items()
                  if weights[name].data_ptr() != self._actor.address + tensor.offset_bytes]
        if astray:
            raise InternalError(f"parameters outside the actor slab: {', '.join(astray[:5])} ({len(astray)} in all)")
        return len(tensors), inode

    def unbind(self) -> None:
        self._actor.unbind()

    def drop(self) -> int:
        """After the decode states have gone: their memory is the device's again, not this process's to keep for later ones.
        Bytes of keys and values that were still in the account."""
        release_cached(self._computes_on)
        return self.keys_values.clear()

    def close(self) -> None:
        self._actor.close()
        self.session.close()


class KeyValueAccount:
    """A rank's rollout_kv in the broker's ledger."""

    def __init__(self, session: BrokerSession, device: str) -> None:
        self._arena = Arena("rollout", device)
        self._report = ResidencyReport(session, self._arena)
        self._reported_bytes = 0

    def set(self, size_bytes: int) -> None:
        """The broker hears of growth at once, of the rest at `clear`."""
        self._arena.release_class(KV)
        if size_bytes:
            self._arena.hold(KV, Residency.HBM, size_bytes)
        if size_bytes > self._reported_bytes:
            self._reported_bytes = size_bytes
            self._report.send()

    def clear(self) -> int:
        """Nothing is held any more; the bytes that were."""
        released = self._arena.release_class(KV)
        self._reported_bytes = 0
        self._report.send()
        return released
