"""The streamed update: torch.optim.AdamW's numbers, any chunk size, any interruption."""

import numpy as np
import pytest
import torch
from tiny_trainer import QUIET, DictBroker, gradients, make_groups, run_config, train
from update_steps import ACTOR, POINTS, Crash, crash_at, iterate, masters, open_run, order

from rollplex.core.config import OptimizerConfig
from rollplex.core.errors import DataLoss, WrongState
from rollplex.core.ids import state_slab
from rollplex.model import Shard, module_of
from rollplex.trainer.flip_log import FlipLog, log_bytes
from rollplex.trainer.update import adamw_


def actor_weights(engine) -> dict[str, torch.Tensor]:
    return {name: view.detach().clone() for name, view in engine._model.parameters_by_name().items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch_adamw_over_three_steps(build_engine, dtype, tolerance):
    """Tolerance: float32 rounds each of about ten operations to 6e-8, and weights and updates are of order 1."""
    config = run_config(optimizer={"vision_learning_rate": 3e-3, "projector_learning_rate": 5e-3})
    engine = open_run(build_engine(DictBroker(), dtype), config)
    rates = config.optimizer.module_learning_rates()
    parameters = {name: torch.nn.Parameter(value) for name, value in actor_weights(engine).items()}
    optimizer = torch.optim.AdamW([
        {"params": [value], "lr": rates[module_of(name)] * 0.5, "weight_decay": 0.1 if value.dim() > 1 else 0.0}
        for name, value in parameters.items()], betas=(0.9, 0.999), eps=1e-8)
    for step in (1, 2, 3):
        engine.materialize_prefix(QUIET, [])
        generator = torch.Generator().manual_seed(step)
        engine._state.stage = "measured"
        engine._state.gradients.flat.copy_(torch.randn(engine._state.gradients.flat.shape, generator=generator))
        for name, gradient in gradients(engine).items():
            parameters[name].grad = gradient * 0.7
        optimizer.step()
        engine.quiesce(QUIET, True)
        engine.apply_update(QUIET, order(step))
        engine.bind_snapshot(QUIET, step)
    for name, value in actor_weights(engine).items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=tolerance, atol=tolerance)


def test_chunk_size_changes_nothing(build_engine):
    found = []
    for chunk_elements in (777, 5000, 1 << 24):
        broker = DictBroker()
        engine = open_run(build_engine(broker, torch.float32), run_config(optimizer={"chunk_elements": chunk_elements}))
        results = [iterate(engine, step) for step in (1, 2)]
        assert results[0].peak_state_bytes <= 12 * chunk_elements
        assert results[0].state_bytes == 2 * 12 * engine._state.layout.element_count
        found.append((broker.bytes_of(ACTOR), {name: value.numpy().tobytes() for name, value in masters(engine).items()}))
    assert found[0] == found[1] == found[2]


def test_adamw_rounds_alike_wherever_a_slice_begins():
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(257, generator=generator) for _ in range(4)]
    whole[2].abs_()
    parts = [tensor.clone() for tensor in whole]
    config = OptimizerConfig(weight_decay=0.1)
    adamw_(*whole, config, learning_rate=1e-3, weight_decay=0.1, step=3)
    for start, stop in ((0, 1), (1, 34), (34, 257)):
        adamw_(*(part[start:stop] for part in parts), config, learning_rate=1e-3, weight_decay=0.1, step=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


def test_adamw_rounds_every_operation_as_ieee_754_does():
    """numpy takes the processor's own operations, one at a time: what a GPU computes, too."""
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(10_000, generator=generator) for _ in range(4)]
    state[2].abs_()
    master, first, second, gradient = (tensor.numpy().copy() for tensor in state)
    config = OptimizerConfig(weight_decay=0.1)
    adamw_(*state, config, learning_rate=1e-3, weight_decay=0.1, step=3)
    master *= np.float32(1 - 1e-3 * 0.1)
    first += (gradient - first) * np.float32(1 - config.beta1)
    second *= np.float32(config.beta2)
    second += gradient * gradient * np.float32(1 - config.beta2)
    denominator = np.sqrt(second) * np.float32((1 - config.beta2**3) ** -0.5) + np.float32(config.epsilon)
    master -= first / denominator * np.float32(1e-3 / (1 - config.beta1**3))
    for expected, found in zip((master, first, second), state):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_frozen_modules_have_no_state_and_do_not_move(build_engine):
    config = run_config(optimizer={"vision_learning_rate": 0, "freeze_decoder": True, "projector_learning_rate": 1e-2})
    engine = open_run(build_engine(DictBroker()), config)
    before = actor_weights(engine)
    assert {module_of(name) for name in engine._state.gradients.views} == {"projector"}
    assert {module_of(n) for n, p in engine._model.parameters_by_name().items() if p.requires_grad} == {"projector"}
    engine.materialize_prefix(QUIET, [])
    engine._state.stage = "measured"
    engine._state.gradients.flat.fill_(1.0)
    engine.apply_update(QUIET, order(1))
    engine.bind_snapshot(QUIET, 1)
    moved = {module_of(name) for name, value in actor_weights(engine).items() if not torch.equal(value, before[name])}
    assert moved == {"projector"}


def test_bfloat16_actor_is_the_rounded_float32_master(build_engine):
    engine = open_run(build_engine(DictBroker(), torch.bfloat16), run_config())
    before = masters(engine)
    iterate(engine, 1)
    assert engine._state.gradients.flat.dtype == torch.float32
    for name, master in masters(engine).items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), actor_weights(engine)[name])
    assert any(not torch.equal(before[name], value) for name, value in masters(engine).items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters(engine).values())


def test_bfloat16_gradients_are_summed_in_float32(build_engine):
    engine = open_run(build_engine(DictBroker(), torch.bfloat16), run_config())
    prompts, responses = make_groups()
    train(engine, prompts, responses)
    both = gradients(engine)
    name = "language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(both[name], both[name].bfloat16().float())
    assert all(parameter.grad is None for parameter in engine._model.parameters())


@pytest.mark.parametrize("restart", [False, True], ids=["again", "restart"])
def test_crash_at_every_point_of_every_chunk(build_engine, restart):
    """The second update is broken off; applied again it ends bit-identical to an unbroken run."""
    config = run_config(optimizer={"chunk_elements": 9000})
    names = [ACTOR, state_slab("run", 0, "gradients")]

    def second_update(prepare):
        broker = DictBroker()
        engine = open_run(build_engine(broker, torch.float32), config)
        iterate(engine, 1)
        train(engine, *make_groups(seed=2))
        engine.measure_gradient(QUIET)
        engine.quiesce(QUIET, True)
        engine = prepare(broker, engine)
        engine.apply_update(QUIET, order(2))
        state = {name: value.numpy().tobytes() for name, value in masters(engine).items()}
        return engine, [broker.bytes_of(name) for name in names], state

    engine, *expected = second_update(lambda broker, engine: engine)
    chunk_count = len(engine._state.layout.chunks)
    assert chunk_count >= 3
    for point in POINTS:
        for chunk in range(chunk_count if point != "finish_step" else 1):
            def crash(broker, engine, point=point, chunk=chunk):
                with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
                    crash_at(patch, point, chunk)
                    engine.apply_update(QUIET, order(2))
                if restart:
                    engine = build_engine(broker, torch.float32)
                    engine.open_run(QUIET, "run", 1, config, True)
                return engine

            _, *found = second_update(crash)
            assert found == expected, (point, chunk)


def test_repeating_a_finished_update_changes_nothing(build_engine):
    broker = DictBroker()
    engine = open_run(build_engine(broker, torch.float32), run_config())
    iterate(engine, 1)
    before = broker.bytes_of(ACTOR)
    again = engine.apply_update(QUIET, order(1))
    assert again.state_bytes == 0 and broker.bytes_of(ACTOR) == before
    with pytest.raises(WrongState, match="optimizer step 3"):
        engine._state.stage = "measured"
        engine.apply_update(QUIET, order(3))


def test_spare_slots_rotate_and_none_is_lost(build_engine):
    engine = open_run(build_engine(DictBroker(), torch.float32), run_config())
    for step in (1, 2, 3):
        iterate(engine, step)
    state = engine._state.optimizer
    used = {flip.slot for flip in state._log.flips}
    assert len(used) == len(state.layout.chunks)
    assert used.isdisjoint(state._free) and len(state._free) == 3


def test_attach_refuses_another_layout(build_engine):
    broker = DictBroker()
    open_run(build_engine(broker), run_config())
    engine = build_engine(broker)
    with pytest.raises(WrongState, match="laid out"):
        engine.open_run(QUIET, "run", 0, run_config(optimizer={"vision_learning_rate": 0}), True)
    engine.open_run(QUIET, "run", 0, run_config(), True)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("shard", [(None, 1), (0, 2), (0, 8)], ids=str)
def test_every_piece_counts_once_in_the_norm(tp, shard):
    """Replicated parameters on one rank; kv heads held by several ranks on the first of them."""
    axis, pieces = shard
    pieces = min(pieces, tp)
    cut = Shard((8, 4), axis, pieces, tp)
    counted = [rank for rank in range(tp) if cut.first_holder(rank)]
    assert [cut.piece_of(rank) for rank in counted] == list(range(pieces))


def test_flip_log_survives_a_torn_record():
    slab = torch.zeros(log_bytes(2), dtype=torch.uint8)
    log = FlipLog(slab, 2)
    log.record(0, 2, 1)
    log.record(1, 0, 1)
    log.record(0, 1, 2)
    assert [(flip.slot, flip.optimizer_step) for flip in FlipLog(slab, 2).flips] == [(1, 2), (0, 1)]
    slab[3] ^= 1  # chunk 0's newer record lies in its other cell
    assert FlipLog(slab, 2).flips[0].slot in (1, 2)
    newest = next(cell for cell in (0, 1) if slab[cell * 32 + 20] == 1)
    slab[3] ^= 1
    slab[newest * 32 + 8] ^= 1
    assert (FlipLog(slab, 2).flips[0].slot, FlipLog(slab, 2).flips[0].optimizer_step) == (2, 1)


def test_flip_log_with_a_slot_claimed_twice_is_data_loss():
    slab = torch.zeros(log_bytes(2), dtype=torch.uint8)
    FlipLog(slab, 2).record(0, 1, 1)
    with pytest.raises(DataLoss, match="one slot"):
        FlipLog(slab, 2)
