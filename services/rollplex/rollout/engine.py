"""Rollout's part that is the same whatever decodes: runs, snapshots, seeds, the stream of finished samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rollplex.core import work
from rollplex.core.compatibility import Facts, digest
from rollplex.core.config import AblationConfig, RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import Aborted, BadInput, InternalError, WrongState
from rollplex.core.ids import sample_seed
from rollplex.rollout.copies import SnapshotCopies


class ReplicaBroken(Aborted):
    """A rank was lost, or the ranks are not in one state. Nothing is bound any more; the next bind makes a new group."""

    default_reason = "RANK_LOST"


@dataclass(frozen=True, slots=True)
class SeededGroup:
    """A prompt and what decides its samples."""

    group: work.PreparedGroup
    seeds: np.ndarray
    """uint64 [N], one a sample."""


@dataclass
class Tally:
    """What a generation has come to; the token engine reports here, and asks here whether to go on."""

    context: work.WorkContext
    groups: Sequence[work.PreparedGroup]
    prompt_hashes: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    response_tokens: int = 0
    seconds: Counter = field(default_factory=Counter)
    decode_steps: int = 0
    decode_rows: int = 0
    _missing: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._missing = {group.group_index: group.sample_count for group in self.groups}

    def check(self) -> None:
        """Raises Aborted or DeadlineExceeded when the work should end."""
        self.context.check()

    def prompt(self, group: work.PreparedGroup, prompt_hash: str) -> None:
        """A prompt was read and its hash recomputed."""
        self.prompt_hashes[group.group_index] = prompt_hash
        self.prompt_tokens += len(group.token_ids)

    def finish(self, samples: Sequence[work.FinishedSample]) -> None:
        """Hands samples on; reports progress when that completes groups."""
        if not samples:
            return
        self.context.samples(samples)
        crash_point("rollout.samples.handed_on")
        before = self.done_count
        for sample in samples:
            self.response_tokens += len(sample.token_ids)
            self._missing[sample.group_index] -= sample.finish_reason != "aborted"
        if self.done_count > before:
            self.context.progress(self.done_count, len(self.groups), "groups")

    @property
    def done_count(self) -> int:
        """Groups whose samples have all finished."""
        return sum(not missing for missing in self._missing.values())

    @contextmanager
    def timed(self, what: Literal["prefill", "decode"]) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - started

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Around one step that only decodes, `rows` samples of it."""
        self.decode_steps += 1
        self.decode_rows += rows
        with self.timed("decode"):
            yield


class TokenEngine(Protocol):
    """What decodes: the `torch` engine, or vLLM. Owner thread only; tests/contract/rollout is its contract."""

    layout_facts: Facts

    def open(self, run: str) -> None:
        """Chooses the run whose snapshots are bound, from the slabs of the engine's own devices."""

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        """Binds every parameter to that snapshot's bytes and drops caches of older ones; (bound parameters, inode by device)."""

    def unbind(self) -> None:
        """Unmaps the snapshot and drops the lease. Idempotent."""

    def generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        """Samples every group. When `tally.check` raises, in-flight samples are handed on as `aborted` first. Keys and values may
        be left; `release_kv` follows."""

    def release_kv(self) -> int:
        """Gives back what is left of keys and values; bytes. Idempotent."""

    def close(self) -> None: ...


class RolloutEngine:
    """rollplex.rpc.phase_servicer.PhaseEngine, and `generate`."""

    role, rank = "rollout", 0

    def __init__(self, tokens: TokenEngine, tensor_parallel_size: int = 1, copies: SnapshotCopies | None = None,
                 kv_pool_bytes: int = 0) -> None:
        """One process to the mesh, whatever ranks `tokens` has behind it. `copies`: for when it does not share the trainer's
        slabs. `kv_pool_bytes`: of a device, what `tokens` sets aside for keys and values; 0: what the samples need."""
        self.layout_facts, self.tensor_parallel_size = tokens.layout_facts, tensor_parallel_size
        self.layout_hash = digest(self.layout_facts)
        self.open_run_name, self.bound_snapshot = "", -1
        self._tokens, self._copies = tokens, copies
        self.kv_pool_bytes, self._ablation = kv_pool_bytes, AblationConfig()

    def open_run(self, context: work.WorkContext, run: str, snapshot: int, config: RunConfig, attach: bool
                 ) -> work.OpenRunResult:
        """Chooses the run's actor slab; nothing is mapped before `bind_snapshot`."""
        if self._ablation.rollout_resident:
            # Of the former run's: this one may not have them.
            self._tokens.release_kv()
        self._leave()
        place = run
        if self._copies is not None:
            place = self._copies.open(run, wanted=self._copies.elsewhere or config.ablation.no_weight_sharing)
        self._tokens.open(place)
        self.open_run_name, self._ablation = run, config.ablation
        return work.OpenRunResult(snapshot=snapshot)

    def bind_snapshot(self, context: work.WorkContext, snapshot: int) -> work.BindResult:
        """Raises WrongState when no run is open or the slab holds another snapshot."""
        if not self.open_run_name:
            raise WrongState("no run is open", reason="NO_RUN")
        copied_bytes = self._bring(context, snapshot)
        with self._left_when_broken():
            bound, inodes = self._tokens.bind(snapshot)
        self.bound_snapshot = snapshot
        crash_point("rollout.bind.done")
        return work.BindResult(snapshot, bound, inodes, copied_bytes)

    def generate(self, context: work.WorkContext, groups: Sequence[work.PreparedGroup], sampling: work.Sampling, *,
                 snapshot: int, iteration: int) -> work.GenerateResult:
        """Samples every group under `snapshot`, streaming finished samples through `context`.

        Raises WrongState for another snapshot than the bound one, BadInput for a request that cannot be sampled,
        DataLoss for a prompt that is not the coordinator's; Aborted and DeadlineExceeded after handing out the tokens
        so far.
        """
        if snapshot != self.bound_snapshot or snapshot < 0:
            raise WrongState(f"rollout is bound to snapshot {self.bound_snapshot}, not {snapshot}",
                             reason="STALE_SNAPSHOT", bound=self.bound_snapshot, expected=snapshot)
        _check_groups(groups)
        tally = Tally(context, groups)
        with self._left_when_broken(), self._kv_released():
            self._tokens.generate([_seeded(group, sampling.seed, iteration) for group in groups], sampling, tally)
        crash_point("rollout.kv.released")
        hashes = tuple(tally.prompt_hashes[group.group_index] for group in groups)
        return work.GenerateResult(tally.prompt_tokens, tally.response_tokens, tally.seconds["prefill"],
                                   tally.seconds["decode"], hashes, tally.decode_steps, tally.decode_rows)

    def quiesce(self, context: work.WorkContext, leave_snapshot: bool) -> work.QuiesceResult:
        """No command runs any more: the owner thread is here."""
        with self._left_when_broken():
            released = self._release_kv()
        if leave_snapshot:
            self._leave()
        crash_point("rollout.quiesce.done")
        return work.QuiesceResult(released)

    def close(self) -> None:
        self._tokens.close()

    @contextmanager
    def _kv_released(self) -> Iterator[None]:
        """Afterwards, unless the device has failed: CUDA refuses everything then, and the error is the one to be told."""
        failed = False
        try:
            yield
        except InternalError as error:
            failed = error.reason == "DEVICE_FAULT"
            raise
        finally:
            if not failed:
                self._release_kv()

    def _release_kv(self) -> int:
        return 0 if self._ablation.rollout_resident else self._tokens.release_kv()

    def _bring(self, context: work.WorkContext, snapshot: int) -> int:
        """Bytes copied to devices of its own; 0 where they are the trainer's."""
        if self._copies is None or not self._copies.opened or snapshot == self.bound_snapshot:
            return 0
        self._leave()
        return self._copies.bring(context, snapshot)

    @contextmanager
    def _left_when_broken(self) -> Iterator[None]:
        try:
            yield
        except ReplicaBroken:
            self._leave()
            raise

    def _leave(self) -> None:
        self._tokens.unbind()
        self.bound_snapshot = -1


def _check_groups(groups: Sequence[work.PreparedGroup]) -> None:
    seen = Counter(group.group_index for group in groups)
    for group in groups:
        if group.sample_count < 1 or seen[group.group_index] > 1:
            raise BadInput(f"group {group.group_index}: asked for {group.sample_count} samples, "
                           f"{seen[group.group_index]} time(s) in one request", reason="BAD_GROUP",
                           group_index=group.group_index)


def _seeded(group: work.PreparedGroup, run_seed: int, iteration: int) -> SeededGroup:
    seeds = [sample_seed(run_seed, iteration, group.prompt_ordinal, index) for index in range(group.sample_count)]
    return SeededGroup(group, np.array(seeds, dtype=np.uint64))
