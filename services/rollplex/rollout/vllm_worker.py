"""What a vLLM worker does for us, in its own process: it leases, maps and leaves snapshots, and gives KV memory back.

vLLM mixes this class into its worker (`worker_extension_cls`); `LLMEngine.collective_rpc` calls by name. A refusal is
returned, because vLLM gives its workers up when one of another process raises, or answers with an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from rollplex.core.errors import OutOfMemory, RollplexError
from rollplex.core.ids import actor_slab
from rollplex.rollout.shard import KeyValueAccount
from rollplex.rollout.vllm_internals import back_kv, free_kv, kv_storages
from rollplex.rollout.vllm_loader import check_placed, register

# Every worker imports this module before it loads a model. Without an installed wheel no plugin has registered the loader.
register()


@dataclass(frozen=True)
class Refusal:
    """An answer."""

    error: RollplexError


def _returning_refusals(method: Callable) -> Callable:
    @wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except RollplexError as error:
            return Refusal(error)

    return call


class ActorWorker:
    """`self` is a vLLM worker; every name is ours alone."""

    @_returning_refusals
    def rollplex_open(self, run: str) -> None:
        mapping = self.get_model().rollplex_actor.mapping
        mapping.open(actor_slab(run, mapping.device))

    @_returning_refusals
    def rollplex_bind(self, snapshot: int) -> tuple[int, str, int]:
        """(parameters on their views, the device, its slab's inode)."""
        model = self.get_model()
        mapping = model.rollplex_actor.mapping
        inode = mapping.bind(snapshot)
        return check_placed(model, mapping.views()), mapping.device, inode

    @_returning_refusals
    def rollplex_unbind(self) -> None:
        self.get_model().rollplex_actor.mapping.unbind()

    @_returning_refusals
    def rollplex_back_kv(self) -> None:
        """Keys and values may be touched from now on; the broker's ledger has them. Idempotent.

        Raises OutOfMemory when the device has no room for them. vLLM's pool is then half mapped, and the process must be
        started again.
        """
        size_bytes = sum(storage.nbytes() for storage in kv_storages(self))
        if getattr(self, "_rollplex_kv_freed", False):
            try:
                back_kv(self)
            except RuntimeError as error:
                raise OutOfMemory(f"{size_bytes:,} bytes of keys and values (rollout.vllm.kv_cache_gib) cannot be had: {error}; "
                                  "start this replica again when they can", reason="KV_NOT_BACKED",
                                  size_bytes=size_bytes) from error
            self._rollplex_kv_freed = False
        self._rollplex_account().set(size_bytes)

    @_returning_refusals
    def rollplex_release_kv(self) -> int:
        """After the prefix cache has been reset. Bytes given back, 0 when they were not held. Idempotent."""
        if not getattr(self, "_rollplex_kv_freed", False):
            free_kv(self)
            self._rollplex_kv_freed = True
        return self._rollplex_account().clear()

    def rollplex_close(self) -> None:
        actor = self.get_model().rollplex_actor
        actor.mapping.close()
        actor.session.close()

    def _rollplex_account(self) -> KeyValueAccount:
        actor = self.get_model().rollplex_actor
        if not hasattr(self, "_rollplex_keys_values"):
            self._rollplex_keys_values = KeyValueAccount(actor.session, actor.mapping.device)
        return self._rollplex_keys_values
