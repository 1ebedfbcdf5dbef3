"""What only the `vllm` engine shows: memory of its process, caches of vLLM, and the loader's refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from replica_rig import mapped_ranges
from rollout_rig import SAMPLING, generate, tokens_of

from rollplex.core.errors import BadInput

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


@pytest.mark.parametrize("changes", [{"max_response_tokens": 2048}, {"temperature": 0.001}])
def test_what_vllm_would_change_silently_is_refused(mesh, bound, changes):
    with pytest.raises(BadInput):
        generate(mesh, bound, [mesh.prompts.group("text")], dataclasses.replace(SAMPLING, **changes))
