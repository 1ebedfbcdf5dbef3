"""Arms: what is compared. An arm is a schedule and how processes share the GPU meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.core.errors import BadInput
from rollplex.core.sharing import POLICIES

SCHEDULES = ("serial", "overlap", "disaggregated")
TIME_SLICE = "time-slice"
DEFAULT_POLICY = {"serial": TIME_SLICE, "overlap": "mps-priority", "disaggregated": TIME_SLICE}
"""Under the last no two roles share a GPU at the same time, so the plainest policy does."""


@dataclass(frozen=True, slots=True)
class Arm:
    schedule: str
    policy: str

    def __str__(self) -> str:
        return f"{self.schedule}@{self.policy}"

    @property
    def gpus(self) -> int:
        return 2 if self.schedule == "disaggregated" else 1

    @property
    def run_name(self) -> str:
        """A run's name may not hold an @."""
        return f"bench-{self.schedule}-{self.policy}"


def parse_arms(text: str, device: str) -> list[Arm]:
    """`serial,overlap@mps-default,...`. Raises BadInput for what is no arm, is there twice, or cannot run on the device."""
    arms: list[Arm] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        schedule, separator, policy = item.partition("@")
        if schedule not in SCHEDULES:
            raise BadInput(f"arm {item!r}: schedule {schedule!r} is none of {', '.join(SCHEDULES)}", reason="BAD_ARM")
        if not separator:
            policy = DEFAULT_POLICY[schedule] if device == "cuda" else TIME_SLICE
        if policy not in POLICIES:
            raise BadInput(f"arm {item!r}: policy {policy!r} is none of {', '.join(POLICIES)}", reason="BAD_ARM")
        if device == "cpu" and policy != TIME_SLICE:
            raise BadInput(f"arm {item!r}: on a CPU processes share it as the kernel likes; only {TIME_SLICE} can run there",
                           reason="POLICY_NEEDS_GPU")
        arm = Arm(schedule, policy)
        if arm in arms:
            raise BadInput(f"arm {arm} is there twice", reason="BAD_ARM")
        arms.append(arm)
    if not arms:
        raise BadInput("no arms: give --arms serial,overlap@mps-priority or the like", reason="BAD_ARM")
    return arms


def check_gpus(arms: list[Arm], device: str, gpus: int) -> None:
    """Raises BadInput for an arm that needs a second GPU that is not there."""
    needy = [str(arm) for arm in arms if arm.schedule == "disaggregated"]
    if needy and device == "cuda" and gpus < 2:
        raise BadInput(f"{', '.join(needy)}: rollout needs a GPU of its own, and there is {gpus}", reason="TOO_FEW_GPUS")
