"""What vLLM is handed is what its own processor would have made of the prompt."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image

from rollplex.engine.prompts import data_media_item

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")


pytestmark = pytest.mark.parametrize("engine_name", ["vllm"], indirect=True, scope="module")


def vllms_own(mesh, engine, group):
    """Through vLLM's renderer: one placeholder a medium, frames, and their timing where each version looks for it."""
    processor, config = mesh.reader._processor, mesh.oracle.config
    tokens_P = np.frombuffer(group.token_ids, dtype=np.int64)
    repeated = np.isin(tokens_P[1:], (config.image_token_id, config.video_token_id)) & (tokens_P[1:] == tokens_P[:-1])
    prompt = {"prompt_token_ids": tokens_P[np.concatenate([[True], ~repeated])].tolist()}
    if group.media:
        items, data, told = [data_media_item(item) for item in group.media], {}, []
        with mesh.reader.frames(group.media) as frames:
            for item, array in zip(items, frames):
                if item.kind == "image":
                    data.setdefault("image", []).append(Image.fromarray(np.array(array[0])))
                    continue
                told.append(processor.video_metadata(item))
                more = {"duration": item.shape[0] / item.fps, "video_backend": "test", "do_sample_frames": False}
                data.setdefault("video", []).append((np.array(array), told[-1] | more))
            frames.clear()
        options = {**processor.video_options(), "fps": told[0]["fps"]} if told else {}
        if told and not engine.renderer.get_mm_processor().data_parser.video_needs_metadata:
            options["video_metadata"] = told
        prompt |= {"multi_modal_data": data, "mm_processor_kwargs": options}
    (made,) = engine.renderer.render_cmpl([prompt])
    return made


@pytest.mark.parametrize(("kind", "fps"), [("text", 2.0), ("image", 2.0), ("video", 2.0), ("video", 0.7), ("mixed", 4.0)])
def test_vllms_own_processor_makes_the_same(mesh, bound, kind, fps):
    engine, prompts = bound.engine._tokens._group.engine, bound.engine._tokens._prompts
    group = mesh.prompts.group(kind, 3, fps=fps)
    ours, found = prompts.read(engine, group)
    theirs = vllms_own(mesh, engine, group)
    assert found == group.prompt_hash
    assert ours["type"] == theirs["type"] and ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert ours.get("mm_placeholders", {}) == theirs.get("mm_placeholders", {})
    assert sorted(ours.get("mm_hashes", {})) == sorted(theirs.get("mm_hashes", {}))
    assert sorted(ours.get("mm_kwargs", {})) == sorted(theirs.get("mm_kwargs", {})) == {
        "text": [], "mixed": ["image", "video"]}.get(kind, [kind])
    for modality, items in theirs.get("mm_kwargs", {}).items():
        for expected, item in zip(items, ours["mm_kwargs"][modality], strict=True):
            assert expected.keys() == item.keys()
            for name, element in expected.items():
                left, right = element.data, item[name].data
                assert element.field.keep_on_cpu == item[name].field.keep_on_cpu
                assert left.dtype == right.dtype and torch.equal(left, right), (modality, name)


@pytest.mark.parametrize("kind", ["text", "image", "video", "mixed"])
def test_workers_of_other_processes_are_sent_numbers_of_the_same_patches(mesh, bound, kind):
    from rollplex.rollout.vllm_patches import PatchReader
    from rollplex.rollout.vllm_prompts import VllmPrompts

    engine, prompts = bound.engine._tokens._group.engine, bound.engine._tokens._prompts
    shared = VllmPrompts(mesh.reader, mesh.oracle.config, prompts._dtype, shared=True)
    reader = PatchReader(os.getpid(), mesh.oracle.config.patch_width, prompts._dtype, torch.device("cpu"))
    group = mesh.prompts.group(kind, 3)
    (expected, _), (found, _) = prompts.read(engine, group), shared.read(engine, group)
    assert found.keys() == expected.keys() and found["prompt_token_ids"] == expected["prompt_token_ids"]
    taken = 0
    for modality, items in expected.get("mm_kwargs", {}).items():
        for theirs, ours in zip(items, found["mm_kwargs"][modality], strict=True):
            for name, element in theirs.items():
                data = ours[name].data
                if name.startswith("pixel_values"):
                    assert data.nbytes < element.data.nbytes and ours[name].field.keep_on_cpu
                    data, taken = reader.take(data), taken + 1
                assert torch.equal(data, element.data)
    assert taken == {"text": 0, "mixed": 2}.get(kind, 1)
    shared.forget()


def test_media_of_one_generation_have_names_of_their_own(mesh, bound):
    """vLLM's caches go by them."""
    engine, prompts = bound.engine._tokens._group.engine, bound.engine._tokens._prompts
    groups = [mesh.prompts.group(kind, index) for index in range(2) for kind in ("image", "video", "mixed")]
    names = [name for group in groups for found in prompts.read(engine, group)[0]["mm_hashes"].values() for name in found]
    assert len(names) == len(set(names)) == 8
