"""The trainer's work: attached prefixes, suffix loss and backward, gradient norm, streamed update. No grpc, no proto."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rollplex.core import work
from rollplex.core.compatibility import digest
from rollplex.core.config import RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, WrongState
from rollplex.core.ids import state_slab
from rollplex.core.packs import packs
from rollplex.core.phases import Phase
from rollplex.core.residency import Residency
from rollplex.core.topology import is_cuda, torch_device
from rollplex.engine import Communicator, PromptReader, device_errors, finish_work, layout_facts, release_cached
from rollplex.engine.prefix_stream import PrefixStream
from rollplex.engine.residency import ResidencyReport
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession
from rollplex.memory.pinned_pool import PinnedPool
from rollplex.model import VisionLanguageModel
from rollplex.model.manifest import build_manifest, check_manifest, check_replicas, manifest_hashes
from rollplex.trainer import custody, export
from rollplex.trainer.actor_slabs import ActorSlabs
from rollplex.trainer.durable import DurableCheckpoints
from rollplex.trainer.prefixes import Prefixes
from rollplex.trainer.run_state import GradientStage, RunState
from rollplex.trainer.suffixes import SuffixRunner
from rollplex.trainer.update import StreamedUpdate


class TrainerEngine:
    """rollplex.rpc.phase_servicer.PhaseEngine and the trainer's own commands. Owner thread only.

    It takes over the session, the actor slabs and the communicator, and closes them.
    """

    role = "trainer"

    def __init__(self, session: BrokerSession, reader: PromptReader, model: VisionLanguageModel, actor: ActorSlabs,
                 checkpoint: Path, communicator: Communicator, *, logprob_chunk_tokens: int, offload_pool_bytes: int,
                 gradients: str = "host", check_hashes: bool = False, prefix_stream: PrefixStream | None = None) -> None:
        """`gradients`: where they lie, `hbm` or `host` (TrainerSection.gradients)."""
        self.rank, self.tensor_parallel_size = communicator.rank, communicator.size
        self._ranks = communicator.ranks
        self.layout_facts = layout_facts(model.config, model.layout)
        self.layout_hash = digest(self.layout_facts)
        self.open_run_name, self.bound_snapshot = "", -1
        self._session, self._reader, self._model, self._actor = session, reader, model, actor
        self._checkpoint, self._check_hashes = checkpoint, check_hashes
        self._chunk_tokens, self._pool_bytes = logprob_chunk_tokens, offload_pool_bytes
        self.residency = {"gradients": gradients}
        self._gradients_at, self._device = gradients, torch.device(torch_device(actor.device))
        self._arena = Arena(self.role, actor.device)
        self._report = ResidencyReport(session, self._arena)
        self.durable = DurableCheckpoints(model.config, model.layout, self.rank, checkpoint, self._device)
        self._prefixes = Prefixes(model, self._arena, prefix_stream)
        self._config = RunConfig()
        self._state: RunState | None = None
        self._pool: PinnedPool | None = None
        # The views keep their addresses for ever, so parameters are bound once; a bind only maps pages behind them.
        self._views = actor.shard_views() if self._ranks.replicas > 1 else actor.views()
        model.bind(self._views)
        check_manifest(build_manifest(model.layout, self.rank), actor.own.views())
        self.communicator = communicator
        communicator.use_group = model.use_group

    def open_run(self, context: work.WorkContext, run: str, snapshot: int, config: RunConfig, attach: bool
                 ) -> work.OpenRunResult:
        """Loads the checkpoint into new slabs, or with `attach` takes up those of an earlier process as they are. The actor's
        name follows from run and device.

        Raises BadInput for a bad checkpoint, NotFound when there is nothing to attach to, WrongState when it was laid out
        for another config, Aborted while others still lease an earlier run's actor.
        """
        self._close_run()
        with device_errors(Phase.IDLE, "open_run", self._actor.device):
            self._open_slabs(run, config, attach)
        self.open_run_name = run
        self._report.send()
        whole = sum(math.prod(shard.full_shape) for shard in self._model.shards.values())
        return work.OpenRunResult(self._actor.own.slab, self._model.layout.size_bytes, snapshot if attach else 0, whole)

    def _open_slabs(self, run: str, config: RunConfig, attach: bool) -> None:
        device = self._actor.device
        layout = custody.plan_state(self._model.layout, config.streamed_optimizer, self._ranks.replicas)
        if not attach:
            custody.delete_earlier(self._session, self.rank, self.tensor_parallel_size)
            custody.create_slabs(self._session, self.rank, layout, self._model.layout, device, run, self._gradients_at,
                                 device if config.ablation.no_state_offload else "host")
            crash_point("trainer.open.created")
        self._state = RunState(self._session, self._model, self._ranks, layout, run, new=not attach, device=device,
                               gradients=self._gradients_at)
        self._actor.open(run)
        self._config = config
        if not attach:
            self._actor.load(self._checkpoint, self._model.config, self._state.optimizer)
            crash_point("trainer.open.loaded")
        else:
            crash_point("trainer.attach.done")
        if config.saved_activations == "offload":
            self._pool = PinnedPool.create(self._session, state_slab(run, self.rank, "offload"), self._pool_bytes, run=run,
                                           registered=is_cuda(device))

    def bind_snapshot(self, context: work.WorkContext, snapshot: int) -> work.BindResult:
        """Maps the snapshot for reading behind the parameters; boundaries of another snapshot are dropped."""
        self.require(self.open_run_name)
        if snapshot != self.bound_snapshot:
            self.durable.wait(context)
            self._prefixes.release_all()
        inode = self._actor.own.bind(snapshot)
        self.bound_snapshot = snapshot
        if self._check_hashes:
            with self._together(Phase.UPDATE, "bind_snapshot"):
                check_replicas(self._model.layout, self.communicator.all_gather(manifest_hashes(self._actor.own.views())))
        crash_point("trainer.bind.done")
        return work.BindResult(snapshot, len(self._model.layout.tensors), {self._actor.device: inode})

    def require(self, run: str, snapshot: int | None = None) -> None:
        """Raises WrongState unless this run is open and, if given, this snapshot bound."""
        wrong = None
        if not self.open_run_name or run != self.open_run_name:
            wrong = WrongState(f"run {run!r} is not open here; {self.open_run_name or 'none'} is", reason="NO_RUN")
        elif snapshot is not None and snapshot != self.bound_snapshot:
            wrong = WrongState(f"the command reads snapshot {snapshot}; bound is {self.bound_snapshot}",
                               reason="STALE_SNAPSHOT", snapshot=self.bound_snapshot)
        if wrong is not None:
            self.communicator.fail(wrong, "a command of another run or snapshot")
            raise wrong

    def materialize_prefix(self, context: work.WorkContext, groups: Sequence[work.PreparedGroup]) -> work.PrefixResult:
        """Opens a mini-batch: drops older boundaries and gradients that were not applied, then runs every group's prefix; of
        several replicas each its own groups'.

        Raises WrongState while no snapshot is bound or an update is half applied, DataLoss for a prompt unlike the coordinator's.
        """
        with self._together(Phase.OVERLAP, "materialize_prefix"):
            state = self._require_bound()
            state.require_whole()
            own = list(self._ranks.own_packs(packs(groups, self._config.groups_per_pass)))
            self._prefixes.release_all()
            state.discard_gradients()
            hashes = self._prefixes.materialize(context, self._reader, own, self._config.saved_activations, self._pool)
            # A layer's working set of the longest pack: rollout's neighbours may need it, and no class counts it.
            self._report.at_barrier()
            return work.PrefixResult(tuple(hashes[group.group_index] for group in self._ranks.own(groups)),
                                     self._prefixes.boundary_bytes, self._prefixes.saved_bytes)

    def score_suffix(self, context: work.WorkContext, groups: Sequence[work.ResponseGroup], *, temperature: float,
                     keep_boundaries: bool) -> work.ScoreResult:
        """Log-probabilities under the bound snapshot: the old policy of several updates. In request order, of the replica's
        groups, from its first rank.

        Raises BadInput for a temperature of 0 or below, WrongState for a group without boundary, before scoring any.
        """
        with self._together(Phase.SUFFIX, "score_suffix"):
            self._require_bound()
            if not temperature > 0:
                raise BadInput(f"temperature is {temperature}; it must be above 0", reason="BAD_SAMPLING")
            runner = self._runner()
            runner.check(groups)
            samples = runner.score(context, groups, temperature, keep_boundaries=keep_boundaries)
            self._report.send()
            return work.ScoreResult(tuple(samples) if self._ranks.tensor_rank == 0 else ())

    def train_suffix(self, context: work.WorkContext, groups: Sequence[work.ResponseGroup], scale: work.LossScale
                     ) -> work.SuffixResult:
        """Adds the gradients of the replica's groups to the mini-batch's and consumes their boundaries; always in index order.

        `scale` spans the whole mini-batch (loss.py says how to count), so it may be trained in several calls. Raises, before
        touching any group, WrongState for one without boundary or once the gradient has been measured, and BadInput for
        responses that `check_responses` refuses.
        """
        with self._together(Phase.SUFFIX, "train_suffix"):
            state = self._require_bound()
            state.require_summing()
            ordered = sorted(groups, key=lambda group: group.group_index)
            runner = self._runner()
            runner.check(ordered)
            state.begin_summing()
            metrics = runner.train(context, ordered, scale)
            self._report.send()
            return work.SuffixResult(metrics.result())

    def measure_gradient(self, context: work.WorkContext) -> work.GradientResult:
        """Global L2 norm over the trainable parameters. Closes the mini-batch: nothing may be added until it is applied.

        Raises WrongState for gradients that an earlier process left unfinished.
        """
        with self._together(Phase.UPDATE, "measure_gradient"):
            norm = self._require_state().measure(check_replicas=self._check_hashes and self.tensor_parallel_size > 1)
            crash_point("trainer.norm.measured")
            return work.GradientResult(norm, math.isfinite(norm))

    def apply_update(self, context: work.WorkContext, order: work.UpdateOrder) -> work.UpdateResult:
        """Rewrites state and actor chunk by chunk, then zeroes the gradients; with `skip` only the latter.

        A checkpoint that is still read from the state is waited for.
        May be repeated with the same order after an interruption, also by a successor that attached: chunks that were
        committed stay. Boundaries are dropped, and the snapshot is left, whatever happens.
        """
        state = self._require_state()
        if order.skip:
            state.require_whole()
            state.discard_gradients()
            return work.UpdateResult(0, 0, 0)
        state.check_order(order)
        self.durable.wait(context)
        self._prefixes.release_all()
        self.bound_snapshot = -1
        self._actor.bind_for_update(order.update_epoch)
        crash_point("trainer.update.bound")

        def after_chunk(done: int, total: int) -> None:
            context.progress(done, total, "chunks")
            context.check()

        try:
            with device_errors(Phase.UPDATE, "apply_update", self._actor.device):
                update = StreamedUpdate(state.optimizer, state.gradients, self._actor.targets(), self._config.optimizer,
                                        self._device)
                with self._arena.hold("optimizer_state", Residency.HBM, update.working_bytes):
                    result = update.run(order, after_chunk)
                del update
            crash_point("trainer.update.step_finished")
        finally:
            self._actor.unbind()
        state.discard_gradients()
        release_cached(self._device)
        self._report.send()
        crash_point("trainer.update.left")
        return result

    def export_checkpoint(self, context: work.WorkContext, path: Path) -> work.CheckpointResult:
        """Writes the bound snapshot as a Hugging Face directory; every rank calls it, rank 0 writes.

        Raises BadInput when `path` exists and is not an empty directory.
        """
        with self._together(Phase.IDLE, "export_checkpoint"):
            self._require_bound()
            size_bytes = export.write(self._checkpoint, path, self._model, self._ranks, self._views)
        return work.CheckpointResult(str(path), size_bytes)

    def write_checkpoint(self, context: work.WorkContext, path: Path) -> work.CheckpointResult:
        """Begins to write this rank's part of a durable checkpoint of the bound snapshot and the state; `durable.outcome` tells
        the end. Raises WrongState while an update is half applied."""
        state = self._require_bound()
        state.require_whole()
        size_bytes = self.durable.begin(path, self._actor.views(), state.optimizer)
        crash_point("trainer.checkpoint.begun")
        return work.CheckpointResult(str(path), size_bytes)

    def restore_checkpoint(self, context: work.WorkContext, path: Path, optimizer_step: int, layout_digest: str
                           ) -> work.CheckpointResult:
        """Fills the slabs of a run that was just opened from a durable checkpoint, before its snapshot is registered."""
        state = self._require_state()
        if self.bound_snapshot >= 0 or state.stage is not GradientStage.EMPTY:
            raise WrongState("only a run that was just opened is restored", reason="RUN_NOT_NEW")
        with device_errors(Phase.IDLE, "restore_checkpoint", self._actor.device):
            size_bytes = self.durable.restore(path, self._actor, state.optimizer, optimizer_step, layout_digest)
            finish_work(self._device)
        return work.CheckpointResult(str(path), size_bytes)

    def quiesce(self, context: work.WorkContext, leave_snapshot: bool) -> work.QuiesceResult:
        """Drops boundaries and saved activations; with `leave_snapshot` unmaps the actor and drops the lease, once a checkpoint
        that is read from it is done."""
        with device_errors(Phase.IDLE, "quiesce", self._actor.device):
            released = self._prefixes.release_all()
            self._prefixes.rest()
            if leave_snapshot:
                self.durable.wait(context)
                self._actor.unbind()
                self.bound_snapshot = -1
            release_cached(self._device)
            self._report.send()
            crash_point("trainer.quiesce.done")
        return work.QuiesceResult(released)

    def close(self) -> None:
        """Slabs stay with the broker."""
        self.communicator.close()
        self._close_run()
        self._prefixes.rest()
        self._actor.close()
        self._session.close()

    def _close_run(self) -> None:
        self.durable.stop()
        self._prefixes.release_all()
        self._actor.unbind()
        self.bound_snapshot, self.open_run_name = -1, ""
        state, self._state = self._state, None
        if state is not None:
            state.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @contextmanager
    def _together(self, phase: Phase, command: str) -> Iterator[None]:
        """A command that all ranks execute; the device's errors become ours before they end the communicator."""
        with self.communicator.together(phase, command), device_errors(phase, command, self._actor.device):
            yield
            finish_work(self._device)

    def _runner(self) -> SuffixRunner:
        return SuffixRunner(self._model, self._ranks, self._arena, self._prefixes.ready, self._config.loss,
                            self._config.sampling.temperature, self._config.suffix_micro_batch_samples,
                            self._config.groups_per_pass, self._chunk_tokens, self._config.suffix_activations)

    def _require_state(self) -> RunState:
        if self._state is None:
            raise WrongState("no run is open", reason="NO_RUN")
        return self._state

    def _require_bound(self) -> RunState:
        state = self._require_state()
        if self.bound_snapshot < 0:
            raise WrongState("no snapshot is bound", reason="NO_SNAPSHOT")
        return state
