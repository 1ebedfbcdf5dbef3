"""Gradients of ranks and replicas, summed: every rank of a mesh as a thread, its collectives as a GPU's might add up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rollplex.core.config import OptimizerConfig
from rollplex.model import ActorLayout, Ranks, Seat, VisionLanguageModel, read_model_config, summed_over_ranks
from rollplex.trainer import custody, gradients
from rollplex.trainer.gradients import GradientBuffer

EPSILON = torch.finfo(torch.float32).eps
NOW = threading.local()
"""Which rank the thread is."""


class Group:
    """Sums go round a ring that ends at a root, or begins at another member for another group: another order, other bits."""

    def __init__(self, members: list[int], number: int) -> None:
        self.members, self.number = members, number
        self._barrier, self._given = threading.Barrier(len(members), timeout=60), {}

    def sum(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        self._given[NOW.rank] = tensor.clone()
        self._barrier.wait()
        count = len(self.members)
        total = torch.zeros_like(tensor)
        for index in range(count):
            total += self._given[self.members[(start + index) % count]]
        self._barrier.wait()
        return total

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> None:
        tensor.copy_(group.sum(tensor, group.number))

    def reduce(self, tensor: torch.Tensor, *, group: Group, group_dst: int) -> None:
        total = group.sum(tensor, group_dst + 1)
        tensor.copy_(total if group.members[group_dst] == NOW.rank else torch.full_like(total, torch.nan))


@pytest.fixture
def world(monkeypatch):
    """Ranks of a mesh whose collectives are in this process."""
    def build(size: int, tensor_size: int) -> list[Ranks]:
        everybody = [Ranks(rank, size, tensor_size) for rank in range(size)]
        whole = Group(list(range(size)), 0)
        monkeypatch.setattr(Ranks, "world", whole)
        for name in ("all_reduce", "reduce"):
            monkeypatch.setattr(gradients.dist, name, getattr(whole, name))
        for kind, same in (("tensor", "replica"), ("data", "tensor_rank")):
            for number in {getattr(ranks, same) for ranks in everybody}:
                members = [ranks for ranks in everybody if getattr(ranks, same) == number]
                group = Group([ranks.rank for ranks in members], number)
                for ranks in members:
                    setattr(ranks, kind, group)
        return everybody

    return build


@pytest.mark.parametrize(("size", "tensor_size"), [(2, 2), (2, 1), (4, 2), (4, 1), (8, 4), (8, 2)], ids=str)
def test_ranks_get_the_sum_of_what_all_computed(world, checkpoint, single_rank, size, tensor_size):
    """Replicas have gradients of other groups; a replica's ranks have a part each of the tower's, and of a kv head that several
    hold. Ranks with the state of one piece have one sum of it, to the bit."""
    config = replace(read_model_config(checkpoint), head_count=8, kv_head_count=2)
    layout = ActorLayout.build(config, tensor_size, "float32", size)
    everybody, generator = world(size, tensor_size), torch.Generator().manual_seed(size)
    truth = {name: torch.randn(everybody[0].replicas, *shard.full_shape, generator=generator)
             for name, shard in layout.shards.items()}

    def part_of(name: str, ranks: Ranks, model: VisionLanguageModel) -> torch.Tensor:
        """What this rank's backward passes gave."""
        shard = model.shards[name]
        mine = shard.take(truth[name][ranks.replica], ranks.tensor_rank)
        sharing = 1
        if summed_over_ranks(name):
            sharing = tensor_size
        elif shard.axis is not None:
            sharing = tensor_size // shard.pieces
        share = ranks.tensor_rank % sharing
        # Unequal parts that add up.
        return mine * (share + 1) / (sharing * (sharing + 1) / 2)

    def run(ranks: Ranks) -> dict[str, torch.Tensor]:
        NOW.rank = ranks.rank
        model = VisionLanguageModel(config, torch.float32, layout=layout, group=Seat(ranks.tensor_rank, tensor_size))
        views = layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8))
        model.bind(layout.segment_views(views) if ranks.replicas > 1 else layout.training_views(views))
        state = custody.plan_state(layout, OptimizerConfig(chunk_elements=1000), ranks.replicas)
        buffer = GradientBuffer(state, torch.zeros(state.gradient_bytes, dtype=torch.uint8), model, ranks)
        buffer.attach()
        for scale in (0.25, 0.75):
            sum((parameter * part_of(name, ranks, model) * scale).sum()
                for name, parameter in model.parameters_by_name().items()).backward()
        buffer.sum_over_ranks()
        return {name: view.clone() for name, view in buffer.views.items()}

    # Half an epsilon each, of all that is summed: three products, a sum of steps, one over ranks, and the truth's.
    roundings = (3 + 1 + (size - 1) + (everybody[0].replicas - 1)) / 2
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, everybody))
    for name, shard in layout.shards.items():
        holders: dict[int, list[torch.Tensor]] = {}
        for rank, views in enumerate(found):
            holders.setdefault(0 if shard.axis is None else shard.piece_of(rank), []).append(views[name])
            error = (views[name] - shard.take(truth[name].sum(0), rank)).abs()
            assert bool((error <= shard.take(roundings * EPSILON * truth[name].abs().sum(0), rank)).all()), (name, rank)
        by_broadcast = shard.axis is None and not summed_over_ranks(name)
        if not by_broadcast:
            assert all(torch.equal(view, same[0]) for same in holders.values() for view in same), f"{name} drifts apart"
