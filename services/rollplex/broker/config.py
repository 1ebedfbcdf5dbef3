"""Options of the broker: [broker], and where it listens: [mesh]."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rollplex.core.config import MeshSection
from rollplex.core.entry import load_sections


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSection:
    host_limit_bytes: int | None = None
    """Host memory that slabs may take in all; absent: the container's limit (or the machine's memory) less an eighth;
    0: no limit."""
    ticket_lifetime_s: float = 30.0
    fence_timeout_s: float = 5.0
    """How long the death of a killed process may take to be seen."""
    reconnect_grace_s: float = 10.0
    """How long a restarted broker waits for processes that held leases before it kills them for a writer."""
    keeper: bool = True
    """False: slabs end with the broker's process."""
    keeper_timeout_s: float = 10.0
    """How long the keeper may take to appear, and to answer."""

    unexplained_slack_gib: float = 4.0
    """By how much a GPU's memory that no object class explains (contexts, CUDA graphs, allocator caches) may grow in a phase over
    what it was when that phase of the run's first iteration ended."""

    def __post_init__(self) -> None:
        for name in ("ticket_lifetime_s", "fence_timeout_s", "keeper_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("reconnect_grace_s", "unexplained_slack_gib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.host_limit_bytes is not None and self.host_limit_bytes < 0:
            raise ValueError(f"host_limit_bytes is {self.host_limit_bytes}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    mesh: MeshSection
    broker: BrokerSection = field(default_factory=BrokerSection)


def load(path: Path | None, overrides: list[str]) -> BrokerConfig:
    """The broker's two sections of the mesh's file."""
    return BrokerConfig(**load_sections(path, overrides, {"mesh": MeshSection, "broker": BrokerSection}))
