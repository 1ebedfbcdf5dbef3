"""What ranks must agree on, and what is said when they do not. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollplex.core.errors import InternalError
from rollplex.core.replicas import Replicas
from rollplex.core.topology import Topology
from rollplex.core.work import BindResult, GradientResult, SuffixResult


def check_one_actor(topology: Topology, bound: Mapping[str, BindResult], *, shared: bool = True) -> None:
    """`bound`: by service name. Trainer ranks and rollout replicas must have bound their own devices, one file a device; where
    they share none (ablation `no_weight_sharing`), one a device and role.

    The reference has weights of its own and is not looked at. Raises InternalError, naming services, devices and inodes.
    """
    holders: dict[str, dict[str, int]] = {}
    for service, result in bound.items():
        devices = _devices_of(topology, service)
        if devices is None:
            continue
        if set(result.inodes) != set(devices):
            raise InternalError(f"{service} bound an actor on {', '.join(sorted(result.inodes)) or 'no device'}; it belongs on "
                                f"{', '.join(devices)}", reason="ACTOR_MISPLACED", service=service)
        for device, inode in result.inodes.items():
            part = device if shared else f"{device} of {service.rpartition('-')[0]}"
            holders.setdefault(part, {})[service] = inode
    for device, inodes in holders.items():
        if len(set(inodes.values())) != 1:
            raise InternalError(f"engines bound different actor slabs on {device}: inodes {inodes}", reason="ACTOR_SPLIT",
                                device=device)
    devices_of_inode: dict[int, list[str]] = {}
    for device, inodes in holders.items():
        devices_of_inode.setdefault(next(iter(inodes.values())), []).append(device)
    for inode, devices in devices_of_inode.items():
        if len(devices) > 1:
            raise InternalError(f"one actor slab, inode {inode}, is bound on several devices: {', '.join(devices)}",
                                reason="ACTOR_SPLIT")


def _devices_of(topology: Topology, service: str) -> list[str] | None:
    role, _, number = service.rpartition("-")
    if role == "trainer":
        return [topology.device_name(int(number))]
    if role == "rollout":
        return [topology.device_name(device) for device in topology.replica_devices(int(number))]
    return None


def agreed_gradient(results: Sequence[GradientResult]) -> GradientResult:
    """The one gradient of all ranks. Raises InternalError when their norms differ: they have not summed the same shards."""
    first = results[0]
    for result in results:
        same = math.isclose(result.grad_norm, first.grad_norm, rel_tol=1e-6) or not (first.finite or result.finite)
        if result.finite != first.finite or not same:
            raise InternalError(f"ranks measured different gradient norms: {[result.grad_norm for result in results]}",
                                reason="RANKS_DISAGREE")
    return first


def agreed_metrics(results: Sequence[SuffixResult], replicas: Replicas) -> list[dict[str, float]]:
    """`results`: by rank. Every rank of a replica computes the whole loss of the replica's groups: the first one's, by replica.
    Raises InternalError for another rank's other metrics."""
    return [_agreed(results, replicas.members(replica)) for replica in range(replicas.count)]


def _agreed(results: Sequence[SuffixResult], ranks: Sequence[int]) -> dict[str, float]:
    first = results[ranks[0]].metrics
    for rank in ranks:
        result = results[rank]
        unlike = [name for name in first.keys() | result.metrics.keys()
                  if not _same(first.get(name), result.metrics.get(name))]
        if unlike:
            name = min(unlike)
            raise InternalError(f"ranks {ranks[0]} and {rank} computed different losses: {name} is {first.get(name)} and "
                                f"{result.metrics.get(name)} ({len(unlike)} such metrics)", reason="RANKS_DISAGREE")
    return first


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) or not (math.isfinite(one) or math.isfinite(other))
