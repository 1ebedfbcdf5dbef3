"""A trainer over its socket, with the real broker: whole iterations, refusals, the ledger."""

from dataclasses import replace

import pytest
import torch
from engine_rig import ledger_bytes
from trainer_rig import config, respond, scale_of

from rollplex.core import work
from rollplex.core.errors import Aborted, BadInput, DataLoss, WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.phases import Phase


def test_a_whole_iteration(serve, mesh, groups, run):
    with serve() as (client, engine):
        assert client.joined.role == "trainer" and len(client.joined.layout_hash) == 64
        opened = client.open(config())
        bound = client.bind(0)
        slab = next(slab for slab in mesh.session.list_slabs("runs/") if slab.name == opened.actor_slab)
        assert bound.inodes == {"host:0": slab.inode} and slab.inode > 0 and slab.size_bytes == opened.actor_bytes
        assert bound.bound_parameters == len(engine._model.layout.tensors)
        before = client.actor_bytes(0)
        result = client.iterate(groups, 0)
        assert result.prefix.prompt_hashes == tuple(group.prompt_hash for group in groups)
        assert result.gradient.finite and result.gradient.grad_norm > 0
        assert result.update.chunk_count == len(engine._state.layout.chunks) > 3
        assert result.update.peak_state_bytes <= 12 * 60_000
        metrics = result.suffix.metrics
        assert metrics["actor/sample_count"] == 15 and metrics["actor/token_count"] == 4 * 22 - 7
        assert metrics["actor/ppo_kl"] == 0 and metrics["actor/entropy"] > 0
        after = client.actor_bytes(1)
        assert after != before and len(after) == len(before)
        for name, parameter in engine._model.parameters_by_name().items():
            assert torch.equal(parameter.detach(), engine._state.optimizer.master(name).view_as(parameter)), name
        again = client.iterate(groups, 1)
        assert again.gradient.grad_norm != result.gradient.grad_norm


def test_parameters_are_the_slab_that_a_reader_maps(serve, groups):
    with serve() as (client, engine):
        client.open(config())
        client.bind(0)
        base = engine._actor.own.address
        whole = client.actor_bytes(0)
        for name, place in engine._model.layout.training_placements("").items():
            parameter = engine._model.parameters_by_name()[name]
            assert parameter.data_ptr() == base + place.offset_bytes, name
            assert parameter.detach().numpy().tobytes() == whole[place.offset_bytes:place.end_bytes], name


@pytest.mark.parametrize("fields", [{"saved_activations": "recompute"}, {"saved_activations": "offload"},
                                    {"suffix_micro_batch_samples": 1}, {"suffix_micro_batch_samples": 100}], ids=str)
def test_ways_of_computing_agree_on_media_prompts(serve, groups, fields):
    """Same kernels on the same shapes are bit-identical; with one sample, or all, at a time float32 sums change their order."""
    found = []
    with serve() as (client, engine):
        for index, run_config in enumerate((config(), config(**fields))):
            client.run, client.slab = f"{client.run}-{index}", f"runs/{client.run}-{index}/actor/host:0"
            client.open(run_config)
            client.bind(0)
            client.materialize(groups, 0)
            client.train(respond(groups), 0)
            found.append(engine._state.gradients.flat.clone())
            client.quiesce()
    if "saved_activations" in fields:
        assert torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5 * float(found[0].abs().max()))


def test_old_log_probabilities_scored_over_the_wire_give_ratio_one(serve, groups):
    with serve() as (client, _):
        client.open(config())
        client.bind(0)
        client.materialize(groups, 0)
        responses = respond(groups)
        scored = iter(client.score(responses, 0, temperature=0.9, keep=True).samples)
        old = [replace(group, samples=tuple(replace(sample, old_logprobs=next(scored).logprobs)
                                            for sample in group.samples)) for group in responses]
        assert client.train(old, 0).metrics["actor/ppo_kl"] == 0


def test_the_ledger_follows_and_the_contract_holds(serve, mesh, groups, run):
    with serve() as (client, _):
        opened = client.open(config(saved_activations="offload"))
        client.bind(0)
        mesh.session.enter_phase(run, 0, Phase.OVERLAP)
        prefix = client.materialize(groups, 0)
        assert ledger_bytes(mesh.session, "actor_snapshot") == opened.actor_bytes
        assert ledger_bytes(mesh.session, "boundary_trainer") == prefix.boundary_bytes > 0
        assert ledger_bytes(mesh.session, "prefix_activations") == prefix.saved_bytes > 0
        assert mesh.session.enter_phase(run, 0, Phase.SUFFIX) == ()
        client.train(respond(groups), 0)
        assert ledger_bytes(mesh.session, "boundary_trainer") == ledger_bytes(mesh.session, "prefix_activations") == 0
        client.measure()
        client.quiesce()
        assert mesh.session.enter_phase(run, 0, Phase.UPDATE) == ()
        assert mesh.session.enter_phase("", -1, Phase.IDLE) == ()


def test_skip_leaves_the_snapshot(serve, groups):
    with serve() as (client, engine):
        client.open(config())
        client.bind(0)
        before = client.actor_bytes(0)
        client.materialize(groups[:1], 0)
        client.train(respond(groups[:1]), 0)
        engine._state.gradients.flat[0] = float("inf")
        assert not client.measure().finite
        client.apply(work.UpdateOrder(0, 1.0, 1.0, 1, skip=True), 0)
        assert client.actor_bytes(0) == before
        client.materialize(groups[:1], 0)
        client.train(respond(groups[:1]), 0)
        assert client.measure().finite


def test_refusals(serve, mesh, groups, run):
    with serve() as (client, _):
        with pytest.raises(WrongState, match="not open"):
            client.materialize(groups, 0)
        client.open(config())
        with pytest.raises(WrongState, match="bound is -1"):
            client.materialize(groups, 0)
        client.bind(0)
        with pytest.raises(WrongState, match="reads snapshot 1; bound is 0"):
            client.materialize(groups, 1)
        wrong = replace(groups[1], prompt_hash="0" * 64)
        with pytest.raises(DataLoss) as caught:
            client.materialize([groups[0], wrong], 0)
        assert caught.value.reason == "PROMPT_MISMATCH" and caught.value.metadata["group_index"] == "1"
        client.materialize(groups[:1], 0)
        responses = respond(groups[:1])
        bad = replace(responses[0].samples[0], token_ids=type(responses[0].samples[0].token_ids)("q", [443, 1, 2]))
        with pytest.raises(BadInput) as caught:
            client.train([replace(responses[0], samples=(bad, *responses[0].samples[1:]))], 0)
        assert caught.value.reason == "BAD_RESPONSE"
        assert client.train(responses, 0).metrics
        with pytest.raises(Aborted), mesh.session.lease(client.slab, LeaseMode.READ, snapshot=0):
            client.quiesce()
            client.begin(0)


def test_a_new_run_frees_the_slabs_of_the_one_before(serve, mesh, run):
    with serve() as (client, _):
        client.open(config())
        first = {slab.name for slab in mesh.session.list_slabs(f"runs/{run}/")}
        assert len(first) == 4
        client.run, client.slab = f"{run}-next", f"runs/{run}-next/actor/host:0"
        client.open(config())
        assert not mesh.session.list_slabs(f"runs/{run}/")


def test_scale_counts_unscored_samples(groups):
    assert scale_of(respond(groups)).sample_count == 16
