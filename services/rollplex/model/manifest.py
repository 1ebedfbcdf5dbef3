"""What a device's slab holds, parameter by parameter: how each is shared, where it lies, which training rank writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from rollplex.core.aliasing import AliasCase
from rollplex.core.errors import BadInput, DataLoss
from rollplex.core.placement import Placement
from rollplex.model.layout import ActorLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """A training parameter's bytes in the slab that one rank writes."""

    name: str
    owner: int
    """Training rank."""
    placement: Placement


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One rollout parameter."""

    name: str
    alias_case: AliasCase
    """Never INCOMPATIBLE: training holds every parameter split."""
    placement: Placement
    pieces: tuple[Piece, ...]
    """Disjoint; together they are the parameter."""


def build_manifest(layout: ActorLayout, device: int, slab: str = "") -> tuple[ManifestEntry, ...]:
    """Of a device's slab, in slab order."""
    topology = layout.topology
    part_here, first = topology.part(device), topology.peers(device)[0]
    by_part = [layout.training_placements(slab, part) for part in range(topology.q)]
    entries = []
    for name, tensor in layout.tensors.items():
        pieces = tuple(Piece(segment.name, first + part, by_part[part][segment.name])
                       for segment in tensor.parts for part in range(topology.q)
                       if part_here in layout.destinations(segment.name, part))
        case = AliasCase.TRANSPOSED if tensor.transposed else AliasCase.IDENTICAL
        entries.append(ManifestEntry(name, case, tensor.placement(slab), pieces))
    return tuple(entries)


def check_manifest(entries: Collection[ManifestEntry], parameters: Collection[str]) -> None:
    """Raises BadInput unless the manifest lists exactly an engine's parameters and the pieces of each make it up."""
    listed = {entry.name for entry in entries}
    if len(entries) != len(parameters) or listed != set(parameters):
        odd = sorted(listed ^ set(parameters))[:5]
        raise BadInput(f"the manifest lists {len(entries)} parameters, the engine has {len(parameters)}: {', '.join(odd)}",
                       reason="MANIFEST_MISMATCH")
    for entry in entries:
        covered = sum(piece.placement.element_count for piece in entry.pieces)
        if covered != entry.placement.element_count:
            raise BadInput(f"{entry.name}: pieces of {covered} elements in a parameter of {entry.placement.element_count}",
                           reason="MANIFEST_MISMATCH")


def manifest_hashes(views: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of every tensor's values in logical order: equal whatever the strides."""
    return {name: hashlib.sha256(view.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, view in views.items()}


def check_replicas(layout: ActorLayout, hashes_by_device: Collection[Mapping[str, str]]) -> None:
    """Raises DataLoss, naming tensors and devices, where two devices that should hold the same bytes do not.

    Devices of one rollout shard share all of it, all devices what tensor parallelism does not cut.
    """
    whole = {name for name, tensor in layout.tensors.items()
             if all(layout.shards[part.name].axis is None for part in tensor.parts)}
    by_device = list(hashes_by_device)
    for device, hashes in enumerate(by_device):
        twin = layout.topology.peers(device)[0]
        differing = [name for name, found in hashes.items() if found != by_device[0 if name in whole else twin][name]]
        if differing:
            raise DataLoss(f"after the publish {len(differing)} tensors on device {device} differ from those of "
                           f"device {twin}: {', '.join(differing[:5])}", reason="SNAPSHOT_SPLIT", device=device)
