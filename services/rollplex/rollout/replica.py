"""A replica as the `torch` engine sees it: one shard here, the others in workers that follow, everything in one order.

With one rank there is no worker: the decoder is that of the only shard.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence

import torch

from rollplex.core.config import MeshSection
from rollplex.core.errors import RollplexError
from rollplex.core.ids import new_id
from rollplex.core.topology import torch_device
from rollplex.model import DecodeState, GroupDecoder, PromptInputs, destroy_tensor_parallel, init_tensor_parallel
from rollplex.rollout.engine import ReplicaBroken
from rollplex.rollout.prompt_frames import pack_prompt
from rollplex.rollout.shard import RankShard
from rollplex.rollout.workers import Workers

log = logging.getLogger(__name__)


class Replica:
    """The leader, rank 0. Owner thread only."""

    def __init__(self, shard: RankShard, workers: Workers, mesh: MeshSection, name: str) -> None:
        """`workers` have been started. With one rank this process has joined a group of one already."""
        self.shard, self.tensor_parallel_size = shard, mesh.rollout_tensor_parallel
        self._workers, self._timeout_s = workers, mesh.collective_timeout_s
        self._rendezvous = mesh.rendezvous_dir / name
        self._run = ""
        self._meet()

    @property
    def decoder(self) -> GroupDecoder | ReplicaDecoder:
        return self.shard.decoder if self.tensor_parallel_size == 1 else ReplicaDecoder(self.shard.decoder, self._workers)

    def open(self, run: str) -> None:
        """Workers hear of it at the next bind."""
        self._run = run
        self.shard.open(run)

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        """Every rank, or none: (parameters bound on each, inodes by device). Makes the group anew when a rank is lost.

        Raises WrongState when the snapshot is not to be had, with what was bound before still bound; ReplicaBroken, and nothing
        is bound, when only a worker was refused.
        """
        if self._workers.whole:
            try:
                return self._bind(snapshot)
            except ReplicaBroken as error:
                log.warning("%s; the ranks start again", error)
        self._restart()
        return self._bind(snapshot)

    def unbind(self) -> None:
        """A worker that is gone has left its slab too."""
        self.shard.unbind()
        try:
            self._workers.ask({"op": "unbind"}, "quiesce")
        except ReplicaBroken:
            return

    def drop(self) -> int:
        """Releases every decode state; bytes of keys and values that were still held, on all ranks."""
        released = self.shard.drop()
        return released + sum(answer["released"] for answer in self._workers.ask({"op": "drop"}, "release"))

    def close(self) -> None:
        self._workers.stop()
        self.shard.close()

    def _bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        bound, inode = self.shard.bind(snapshot)
        inodes = {self.shard.device: inode}
        answers = self._workers.ask({"op": "bind", "run": self._run, "snapshot": snapshot}, "bind_snapshot")
        for rank, answer in enumerate(answers, start=1):
            if isinstance(answer, RollplexError):
                self.unbind()
                raise ReplicaBroken(f"rank {rank} cannot bind snapshot {snapshot}, which rank 0 has: {answer}",
                                    reason="REPLICA_SPLIT", rank=rank) from answer
            inodes[answer["device"]] = answer["inode"]
        return bound, inodes

    def _restart(self) -> None:
        self._workers.kill()
        self.shard.unbind()
        self._workers.start()
        destroy_tensor_parallel()
        self._meet()

    def _meet(self) -> None:
        size = self.tensor_parallel_size
        if size > 1:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
            self._rendezvous.mkdir(mode=0o700, parents=True)
            path = self._rendezvous / new_id("store")
            self._workers.meet(f"file://{path}")
            with self._workers.together("start"):
                init_tensor_parallel(0, size, store=f"file://{path}", timeout_s=self._timeout_s,
                                     device=torch_device(self.shard.device))
        self.shard.join()


class ReplicaDecoder:
    """GroupDecoder's `start` and `step`, done by every rank."""

    _numbers = itertools.count()

    def __init__(self, decoder: GroupDecoder, workers: Workers) -> None:
        self.config = decoder.config
        self._decoder, self._workers = decoder, workers

    def start(self, groups: Iterable[tuple[PromptInputs, int]], max_new_tokens: int) -> ReplicaState:
        number = next(self._numbers)
        self._workers.post({"op": "start", "state": number, "limit": max_new_tokens}, "prefill")
        with self._workers.together("prefill"):
            state = self._decoder.start(self._mirrored(groups), max_new_tokens)
        return ReplicaState(state, number, self._workers)

    def step(self, state: ReplicaState, tokens_B: torch.Tensor | None = None) -> torch.Tensor:
        tokens = None if tokens_B is None else tokens_B.tolist()
        self._workers.post({"op": "step", "state": state.number, "tokens": tokens}, "decode")
        with self._workers.together("decode"):
            return self._decoder.step(state.own, tokens_B)

    def _mirrored(self, groups: Iterable[tuple[PromptInputs, int]]) -> Iterator[tuple[PromptInputs, int]]:
        """Each prompt goes to the workers just before it is prefilled here."""
        prompts = iter(groups)
        while True:
            try:
                inputs, count = next(prompts)
            except StopIteration:
                break
            except Exception:
                self._workers.post({"op": "cancel"}, "prefill")
                raise
            frame, fd = pack_prompt(inputs)
            try:
                self._workers.post({"op": "prompt", "count": count} | frame, "prefill", fd)
            finally:
                os.close(fd)
            yield inputs, count
        self._workers.post({"op": "started"}, "prefill")


class ReplicaState:
    """A DecodeState of every rank; this rank's answers for all."""

    def __init__(self, own: DecodeState, number: int, workers: Workers) -> None:
        self.own, self.number = own, number
        self._workers = workers

    @property
    def step(self) -> int:
        return self.own.step

    @property
    def size_bytes(self) -> int:
        """Of this rank."""
        return self.own.size_bytes

    def keep_groups(self, kept: Sequence[bool]) -> torch.Tensor:
        self._workers.post({"op": "keep", "state": self.number, "kept": list(kept)}, "decode")
        return self.own.keep_groups(kept)

    def release(self) -> None:
        self.own.release()
        self._workers.post({"op": "release", "state": self.number}, "decode")
