"""What only the `vllm` engine shows: memory of its process, caches of vLLM, and the loader's refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from replica_rig import mapped_ranges
from rollout_rig import SAMPLING, generate, tokens_of

from rollplex.core.errors import BadInput
from rollplex.rollout.vllm_options import CPU_BLOCK_TOKENS

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")


pytestmark = pytest.mark.parametrize("engine_name", ["vllm"], indirect=True, scope="module")


def addresses(client) -> dict[str, int]:
    """Of vLLM's parameters. Not the tensors: pytest would print them, and nothing need be mapped there."""
    (found,) = client.engine._tokens._group.engine.apply_model(
        lambda model: {name: parameter.data_ptr() for name, parameter in model.named_parameters()})
    return found


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """Of the mappings that hold it."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            inside = start < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < stop
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    return resident


def test_every_parameter_lies_at_its_offset_in_the_read_only_mapping(mesh, bound):
    ((start, _, permissions),) = mapped_ranges(mesh.actor.inode)
    assert permissions == "r--s"
    offsets = {name: address - start for name, address in addresses(bound).items()}
    assert offsets == {name: tensor.offset_bytes for name, tensor in mesh.actor.layout.tensors.items()}


def test_a_tower_of_an_even_width_computes_the_same(mesh, bound):
    """What a GPU does with the published towers, on the tiny one: 128 columns filled up to 192."""
    from rollplex.rollout.vllm_internals import aligned_mlp

    def both(model):
        mlp = model.visual.blocks[0].mlp
        assert mlp.down_proj.weight.shape[1] == 128
        x = torch.randn(9, 1, mlp.down_proj.weight.shape[0], generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            return mlp(x), aligned_mlp(mlp, x, 96)

    ((plain, aligned),) = bound.engine._tokens._group.engine.apply_model(both)
    assert plain.abs().max() > 1e-3
    torch.testing.assert_close(aligned, plain)


def test_addresses_survive_and_nothing_is_mapped_after_quiesce(mesh, bound):
    before = addresses(bound)
    bound.quiesce()
    assert mapped_ranges(mesh.actor.inode) == []
    bound.bind(mesh.actor.publish(lambda views: None))
    assert addresses(bound) == before
    assert len(mapped_ranges(mesh.actor.inode)) == 1


def test_keys_and_values_leave_memory(mesh, bound):
    from rollplex.rollout.vllm_internals import kv_storages

    (storages,) = bound.engine._tokens._group.engine.collective_rpc(kv_storages)
    groups = [mesh.prompts.group("text", index, samples=8) for index in range(2)]
    seen = []
    for sample_batch in generate(mesh, bound, groups).batches:
        seen += sample_batch
    assert len(seen) == 16
    size = sum(storage.nbytes() for storage in storages)
    assert size == 1 << 26
    assert sum(map(resident_bytes, storages)) < size / 8
    assert bound.quiesce(leave=False).released_bytes == 0


def test_a_new_tower_reads_a_known_video_anew(mesh, bound):
    """vLLM keeps the embeddings of media that it has seen, keyed by their pixels."""
    group = mesh.prompts.group("video", samples=1)
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    before = tokens_of(generate(mesh, bound, [group], greedy))
    bound.quiesce()
    name = "visual.merger.mlp.2.weight"

    def negate(views):
        views[name].neg_()

    bound.bind(mesh.actor.publish(negate))
    assert tokens_of(generate(mesh, bound, [group], greedy)) != before
    bound.quiesce()
    bound.bind(mesh.actor.publish(negate))
    assert tokens_of(generate(mesh, bound, [group], greedy)) == before


@pytest.mark.parametrize("fps", [0.7, 1.0, 4.0])
def test_videos_of_any_rate_hash_as_ours_do(mesh, bound, fps):
    group = mesh.prompts.group("video", fps=fps, samples=1)
    assert len(generate(mesh, bound, [group]).samples) == 1


def test_more_prompt_tokens_than_a_step_computes(mesh, bound):
    """vLLM would compute a prompt in parts and set its generator back, which a CPU's cannot do."""
    step_tokens = bound.engine._tokens._step_tokens
    text = " ".join(f"Which shape moves {index}?" for index in range(120))
    groups = [mesh.prompts.group("video", index, text=f"{index} {text}", samples=1) for index in range(12)]
    assert sum(len(group.token_ids) for group in groups) > step_tokens
    first = tokens_of(generate(mesh, bound, groups))
    assert len(first) == 12
    assert tokens_of(generate(mesh, bound, groups[:1])) == {key: first[key] for key in [(0, 0)]}


def test_a_prompt_is_computed_once_for_its_group_when_media_wait_for_room(mesh, bound, monkeypatch):
    """Media of one prompt fill the encoder cache: what precedes those of the next is computed beside it."""
    scheduler = bound.engine._tokens._group.engine.engine_core.engine_core.scheduler
    groups = [mesh.prompts.group("video", index, samples=4, text="Which shape moves? " * 20) for index in range(3)]
    cache, tokens, schedule = scheduler.encoder_cache_manager, [], scheduler.schedule
    largest = max(group.token_ids.tolist().count(mesh.oracle.config.video_token_id) for group in groups)
    monkeypatch.setattr(cache, "cache_size", largest)
    monkeypatch.setattr(cache, "num_free_slots", largest)
    monkeypatch.setattr(cache, "num_freeable_slots", largest)

    def counted(*args):
        output = schedule(*args)
        tokens.append(sum(count for count in output.num_scheduled_tokens.values() if count > 1))
        return output

    monkeypatch.setattr(scheduler, "schedule", counted)
    # Greedy: a CPU has no generator for a prompt that is computed in parts.
    assert len(generate(mesh, bound, groups, dataclasses.replace(SAMPLING, greedy=True)).samples) == 12
    # Of what a prompt has beyond whole blocks every sample computes its own.
    assert len(groups[0].token_ids) > 4 * CPU_BLOCK_TOKENS
    assert sum(tokens) <= sum(len(group.token_ids) for group in groups) + 9 * CPU_BLOCK_TOKENS


@pytest.mark.parametrize("changes", [{"max_response_tokens": 2048}, {"temperature": 0.001}])
def test_what_vllm_would_change_silently_is_refused(mesh, bound, changes):
    with pytest.raises(BadInput):
        generate(mesh, bound, [mesh.prompts.group("text")], dataclasses.replace(SAMPLING, **changes))
