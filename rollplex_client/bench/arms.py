"""Arms: what is compared. An arm is a schedule, how processes share GPUs meanwhile, and the tensor-parallel degrees."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rollplex.core.errors import BadInput
from rollplex.core.sharing import POLICIES
from rollplex.core.topology import Topology

SCHEDULES = ("serial", "overlap", "disaggregated")
TIME_SLICE = "time-slice"
DEFAULT_POLICY = {"serial": TIME_SLICE, "overlap": "mps-priority", "disaggregated": TIME_SLICE}
"""Under the last no two roles share a GPU at the same time, so the plainest policy does."""
_ARM = re.compile(r"(?P<schedule>[^@:]*)(?P<at>@(?P<policy>[^:]*))?(:(?P<train>[0-9]+)x(?P<rollout>[0-9]+)(?P<shared>dp)?)?")


@dataclass(frozen=True, slots=True)
class Arm:
    schedule: str
    policy: str
    train_tp: int = 1
    rollout_tp: int = 1
    own_replicas: int = 0
    """Of rollout, on GPUs of its own."""
    data_parallel: bool = False
    """MeshSection.data_parallel."""

    def __str__(self) -> str:
        degrees = f":{self._degrees}" if self._degrees != "1x1" else ""
        return f"{self.schedule}@{self.policy}{degrees}"

    @property
    def topology(self) -> Topology:
        return Topology(self.train_tp, self.rollout_tp, self.own_replicas)

    @property
    def gpus(self) -> int:
        return self.topology.device_count

    @property
    def run_name(self) -> str:
        """A run's name may hold neither @ nor a colon."""
        return f"bench-{self.schedule}-{self.policy}-{self._degrees}"

    @property
    def _degrees(self) -> str:
        return f"{self.train_tp}x{self.rollout_tp}{'dp' * self.data_parallel}"


def parse_arms(text: str, device: str, *, train_tp: int = 1, rollout_tp: int = 1, gpus: int = 0) -> list[Arm]:
    """`serial,overlap@mps-default:2x1,...`; `dp` behind: data parallel. The degrees, TP_train x TP_rollout, are those of an
    arm that names none; of `disaggregated` then half of the GPUs train. `gpus`: of every arm; 0: each takes what its degrees
    need.

    Raises BadInput for what is no arm, is there twice, cannot run on the device, or does not take that many GPUs.
    """
    arms: list[Arm] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        found = _ARM.fullmatch(item)
        schedule, policy = (found["schedule"], found["policy"]) if found else (item, None)
        if schedule not in SCHEDULES:
            raise BadInput(f"arm {item!r}: schedule {schedule!r} is none of {', '.join(SCHEDULES)}; an arm is "
                           "schedule[@policy][:TRAINxROLLOUT[dp]], as overlap@mps-priority:2x1", reason="BAD_ARM")
        if policy is None:
            policy = DEFAULT_POLICY[schedule] if device == "cuda" else TIME_SLICE
        if policy not in POLICIES:
            raise BadInput(f"arm {item!r}: policy {policy!r} is none of {', '.join(POLICIES)}", reason="BAD_ARM")
        if device == "cpu" and policy != TIME_SLICE:
            raise BadInput(f"arm {item!r}: on a CPU processes share it as the kernel likes; only {TIME_SLICE} can run there",
                           reason="POLICY_NEEDS_GPU")
        given = (int(found["train"]), int(found["rollout"])) if found["train"] else None
        arm = _placed(schedule, policy, given, (train_tp, rollout_tp), gpus)
        arm = replace(arm, data_parallel=bool(found["shared"]))
        if arm.data_parallel and arm.topology.q == 1:
            raise BadInput(f"arm {item!r}: replicas share prompts out where TP_rollout is below TP_train; without dp it is "
                           "the same", reason="BAD_ARM")
        if gpus and arm.gpus != gpus:
            raise BadInput(f"arm {arm} takes {arm.gpus} GPUs and not {gpus}: what is compared has equally many (--gpus)",
                           reason="BAD_ARM")
        if arm in arms:
            raise BadInput(f"arm {arm} is there twice", reason="BAD_ARM")
        arms.append(arm)
    if not arms:
        raise BadInput("no arms: give --arms serial,overlap@mps-priority or the like", reason="BAD_ARM")
    return arms


def _placed(schedule: str, policy: str, given: tuple[int, int] | None, default: tuple[int, int], gpus: int) -> Arm:
    """Raises BadInput for degrees that do not nest."""
    if schedule != "disaggregated":
        arm = Arm(schedule, policy, *(given or default))
    else:
        whole = gpus or max(2, default[0])
        train, rollout = given or (max(1, whole // 2), min(default[1], max(1, whole // 2)))
        arm = Arm(schedule, policy, train, rollout, max(1, (gpus - train) // rollout) if gpus else 1)
    _ = arm.topology
    return arm


def by_mesh(arms: Sequence[Arm]) -> Iterator[list[Arm]]:
    """Neighbours that differ in their schedule only: a policy and degrees are properties of processes, a schedule is a run's."""
    for _, alike in groupby(arms, lambda arm: replace(arm, schedule="")):
        yield list(alike)


def check_gpus(arms: list[Arm], device: str, gpus: int) -> None:
    """Raises BadInput for an arm that needs more GPUs than are there."""
    needy = [f"{arm} ({arm.gpus})" for arm in arms if arm.gpus > gpus]
    if needy and device == "cuda":
        raise BadInput(f"{', '.join(needy)}: so many GPUs are needed, and there is {gpus}", reason="TOO_FEW_GPUS")
