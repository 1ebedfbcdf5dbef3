"""Whole optimizer steps of a tiny trainer, and crashes in the middle of one."""

from __future__ import annotations

import torch
from tiny_trainer import QUIET, make_groups, train

from rollplex.core.ids import actor_slab
from rollplex.core.work import UpdateOrder
from rollplex.trainer.optimizer_state import OptimizerState
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
