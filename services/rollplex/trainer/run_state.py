"""An open run: its optimizer state and gradients, and what may be done with these.

Gradients are in host memory for as long as the run is open, or on the device from the first suffix to the end of the update.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from rollplex.core.errors import BadInput, WrongState
from rollplex.core.ids import state_slab
from rollplex.core.topology import is_cuda
from rollplex.core.work import UpdateOrder
from rollplex.memory.client import BrokerSession
from rollplex.model import Ranks, VisionLanguageModel
from rollplex.trainer.custody import HeldSlab, VisitingSlab, slab_sizes
from rollplex.trainer.flip_log import FlipLog
from rollplex.trainer.gradients import GradientBuffer
from rollplex.trainer.optimizer_state import OptimizerState, StateLayout

Held = TypeVar("Held", HeldSlab, VisitingSlab)


class GradientStage(StrEnum):
    """What the gradient buffer holds; README.md has the table."""

    EMPTY = "empty"
    SUMMING = "summing"
    MEASURED = "measured"
    INHERITED = "inherited"
    """Left by an earlier process: of use to an update that had begun, to nothing else."""


class RunState:
    """An open run's optimizer state and gradient buffer. `stage` is what the buffer holds; README.md says what may follow."""

    def __init__(self, session: BrokerSession, model: VisionLanguageModel, ranks: Ranks, layout: StateLayout, run: str, *,
                 new: bool, device: str = "host", gradients: str = "host") -> None:
        """`device`: the rank's. `gradients`: TrainerSection.gradients, `hbm` or `host`."""
        self.layout = layout
        self.stage = GradientStage.EMPTY if new else GradientStage.INHERITED
        sizes, on_gpu = slab_sizes(layout), is_cuda(device)
        names = {what: state_slab(run, ranks.rank, what) for what in sizes}
        self._held: list[HeldSlab | VisitingSlab] = []
        self._visiting: VisitingSlab | None = None
        try:
            state = self._hold(HeldSlab(session, names["optimizer"], sizes["optimizer"], registered=on_gpu)).bytes
            flips = self._hold(HeldSlab(session, names["flips"], sizes["flips"])).bytes
            if gradients == "hbm":
                self._visiting = VisitingSlab(session, names["gradients"], "gradients", sizes["gradients"], device, run)
                flat = self._hold(self._visiting).bytes
            else:
                flat = self._hold(HeldSlab(session, names["gradients"], sizes["gradients"], registered=on_gpu)).bytes
            self.optimizer = OptimizerState(layout, state, FlipLog(flips, len(layout.chunks)), new=new)
            self.gradients = GradientBuffer(layout, flat, model, ranks)
        except BaseException:
            self._release()
            raise
        self.gradients.attach()

    def require_whole(self) -> None:
        """The gradients of an update that has begun are not to be thrown away: the run can only roll forward."""
        if self.optimizer.interrupted:
            raise WrongState("an update is half applied; order it again", reason="UPDATE_INTERRUPTED")

    def require_summing(self) -> None:
        """Raises WrongState once the gradient has been measured, or is an earlier process's."""
        if self.stage not in (GradientStage.EMPTY, GradientStage.SUMMING):
            raise self._wrong_stage(f"the gradient buffer is {self.stage}; a prefix opens the next mini-batch")

    def begin_summing(self) -> None:
        """The gradient buffer is there, zero if it was not before. Raises OutOfMemory with the ledger's table."""
        self._admit_gradients()
        self.stage = GradientStage.SUMMING

    def measure(self, *, check_replicas: bool) -> float:
        """Global L2 norm; nothing may be added from here on. Raises WrongState for gradients that an earlier process left
        unfinished, DataLoss with `check_replicas` where ranks differ in what all of them hold whole."""
        if self.stage is GradientStage.INHERITED:
            raise self._wrong_stage("the gradients of an earlier process may be incomplete; redo the prefixes and suffixes")
        self._admit_gradients()
        self.gradients.settle()
        if self.stage is GradientStage.SUMMING:
            self.gradients.sum_over_ranks()
            if check_replicas:
                self.gradients.check_replicas()
        self.stage = GradientStage.MEASURED
        return self.gradients.norm()

    def check_order(self, order: UpdateOrder) -> None:
        """Raises BadInput for a clip coefficient outside (0, 1], WrongState for gradients that were not measured or are gone;
        a step that the state is already at needs none."""
        if not 0 < order.clip_coefficient <= 1:
            raise BadInput(f"clip_coefficient is {order.clip_coefficient}; it must be in (0, 1]", reason="BAD_UPDATE")
        if order.optimizer_step == self.optimizer.optimizer_step:
            return
        if self.stage not in (GradientStage.MEASURED, GradientStage.INHERITED):
            raise self._wrong_stage(f"the gradient buffer is {self.stage}; measure it before the update")
        if self._visiting is not None and not self._visiting.backed:
            raise self._wrong_stage("the gradients of an earlier process are gone; redo the prefixes and suffixes")

    def discard_gradients(self) -> None:
        """What was summed is gone, and the device's memory with it."""
        if self.stage is GradientStage.EMPTY:
            return
        if self._visiting is not None:
            self._visiting.drop()
        else:
            self.gradients.zero()
        self.stage = GradientStage.EMPTY

    def close(self) -> None:
        self.gradients.detach()
        self._release()

    def _admit_gradients(self) -> None:
        if self._visiting is not None:
            self._visiting.back()

    def _wrong_stage(self, message: str) -> WrongState:
        return WrongState(message, reason="GRADIENT_STAGE", stage=self.stage.value)

    def _hold(self, slab: Held) -> Held:
        self._held.append(slab)
        return slab

    def _release(self) -> None:
        while self._held:
            self._held.pop().close()
