"""Whole optimizer steps of a tiny trainer, and crashes in the middle of one."""

from __future__ import annotations

import torch
from tiny_trainer import QUIET, make_groups, train

from rollplex.core.config import OptimizerConfig
from rollplex.core.ids import actor_slab
from rollplex.core.work import UpdateOrder
from rollplex.trainer.flip_log import FlipLog, log_bytes
from rollplex.trainer.optimizer_state import OptimizerState, StateLayout
from rollplex.trainer.update import StreamedUpdate

ACTOR = actor_slab("run", "host:0")


def order(step: int, **changes) -> UpdateOrder:
    fields = {"update_epoch": step, "clip_coefficient": 0.7, "learning_rate_factor": 0.5, "optimizer_step": step}
    return UpdateOrder(**(fields | changes))


def open_run(engine, config):
    engine.open_run(QUIET, "run", -1, config, False)
    engine.bind_snapshot(QUIET, 0)
    return engine


def iterate(engine, step: int, *, seed: int | None = None):
    train(engine, *make_groups(seed=step if seed is None else seed))
    engine.measure_gradient(QUIET)
    engine.quiesce(QUIET, True)
    result = engine.apply_update(QUIET, order(step))
    engine.bind_snapshot(QUIET, step)
    return result


def masters(engine) -> dict[str, torch.Tensor]:
    state = engine._state
    return {name: state.optimizer.master(name).view_as(view) for name, view in state.gradients.views.items()}


class Crash(Exception):
    pass


POINTS = ("_load", "_compute", "_write_back", "flip", "flipped", "_cast", "finish_step")


def crash_at(monkeypatch, point: str, chunk: int) -> None:
    """Raises in the middle of the update: before `point` of that chunk, or after its flip for `flipped`."""
    owner = StreamedUpdate if point.startswith("_") else OptimizerState
    name = "flip" if point == "flipped" else point
    original = getattr(owner, name)

    def patched(self, index, *rest):
        if point == "flipped" and index == chunk:
            original(self, index, *rest)
        if index == chunk or point == "finish_step":
            raise Crash
        return original(self, index, *rest)

    monkeypatch.setattr(owner, name, patched)


class FlatGradients:
    """A gradient buffer of no model: parameters of one axis, on `device`."""

    apart = False

    def __init__(self, layout: StateLayout, device: str) -> None:
        self._layout = layout
        generator = torch.Generator().manual_seed(1)
        self.flat = torch.randn(layout.element_count, generator=generator).to(device)
        self.views = dict(zip((name for name, _ in layout.element_counts),
                              self.flat.split([count for _, count in layout.element_counts])))

    def chunk(self, index: int) -> torch.Tensor:
        start = self._layout.chunk_starts[index]
        return self.flat[start:start + self._layout.chunks[index].element_count]


def flat_update(element_count: int, chunk_elements: int, device: str) -> tuple[StreamedUpdate, OptimizerState, dict]:
    """An update of so many parameters without a model around them, its state and its bfloat16 targets by name."""
    sizes = [element_count // 2 + 1, element_count // 3, element_count - element_count // 2 - 1 - element_count // 3]
    layout = StateLayout(tuple((f"language_model.layers.{i}.w", size) for i, size in enumerate(sizes)), chunk_elements, "float32")
    pinned = device != "cpu"
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8, pin_memory=pinned)
    log = FlipLog(torch.zeros(log_bytes(len(layout.chunks)), dtype=torch.uint8), len(layout.chunks))
    state = OptimizerState(layout, slab, log, new=True)
    generator = torch.Generator().manual_seed(0)
    for name, size in layout.element_counts:
        state.set_master(name, torch.randn(size, generator=generator))
    state.finish_step(0)
    targets = {name: [torch.zeros(size, dtype=torch.bfloat16, device=device)] for name, size in layout.element_counts}
    config = OptimizerConfig(learning_rate=1e-3, chunk_elements=chunk_elements)
    return StreamedUpdate(state, FlatGradients(layout, device), targets, config, device), state, targets
