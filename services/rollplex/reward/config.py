"""The options of the built-in reward, and where they are read from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.entry import load_sections
from rollplex.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """[reward]. The value of a sample is accuracy_weight * accuracy + format_weight * format."""

    address: str | None = None
    """`unix:/path` or `host:port`; absent: the mesh's address of the service "reward"."""
    name: str = "video_r1"
    """What the reward calls itself when it is registered."""
    accuracy_weight: float = 1.0
    """Finite, at least 0; Video-R1 has 1."""
    format_weight: float = 1.0
    """Finite, at least 0; Video-R1 has 1. The two must not both be 0."""
    drain_timeout_s: float | None = None
    """How long running calls may take after SIGTERM; absent: the mesh's, or 10 when the address is not the mesh's."""

    def __post_init__(self) -> None:
        for name in ("accuracy_weight", "format_weight", "drain_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")
        if self.accuracy_weight == 0 and self.format_weight == 0:
            raise ValueError("accuracy_weight and format_weight are both 0; every reward would be 0")
        if not self.name:
            raise ValueError("name is empty; metrics are called after it")


def load_config(path: Path | None, overrides: Sequence[str] = (), address: str | None = None) -> RewardConfig:
    """[reward] of the mesh's file, the address from `address`, [reward] or [mesh], in this order.

    Raises BadInput for a file, section or key that is wrong, and without any address.
    """
    config = load_sections(path, list(overrides), {"reward": RewardConfig})["reward"]
    if address:
        config = replace(config, address=address)
    if config.address is not None:
        return config
    if path is None and not any(override.startswith("mesh.") for override in overrides):
        raise BadInput("no address: give --address, or reward.address or mesh.runtime_dir in the config",
                       reason="ADDRESS_MISSING")
    mesh = load_sections(path, list(overrides), {"mesh": MeshSection})["mesh"]
    drain_timeout_s = mesh.drain_timeout_s if config.drain_timeout_s is None else config.drain_timeout_s
    return replace(config, address=mesh.address("reward"), drain_timeout_s=drain_timeout_s)
