"""Hugging Face checkpoint directories: in, out, and every way in which they can be broken."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import VOCAB, build_hf
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.core.errors import BadInput
from rollplex.model import ActorLayout, load_into, read_model_config, save_checkpoint
from rollplex.model.checkpoint import training_name


def views_of(checkpoint, tp: int = 1, rank: int = 0, dtype: str = "float64") -> dict[str, torch.Tensor]:
    config = read_model_config(checkpoint)
    layout = ActorLayout.build(config, tp, dtype)
    slab = torch.full((layout.size_bytes,), 255, dtype=torch.uint8)
    views = layout.training_views(layout.views(slab))
    load_into(checkpoint, config, views, rank, tp)
    return views


@pytest.fixture
def copy(checkpoints, tmp_path):
    """An untied checkpoint to damage."""
    return shutil.copytree(checkpoints[False], tmp_path / "copy")


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(dict(tensors)), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_through_transformers(checkpoints, tmp_path, tied):
    source = checkpoints[tied]
    (tmp_path / "source").mkdir()
    shutil.copytree(source, tmp_path / "source", dirs_exist_ok=True)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    config, views = read_model_config(source), views_of(source)
    views["language_model.layers.1.mlp.up_proj.weight"].add_(1.0)
    save_checkpoint(tmp_path / "source", tmp_path / "out", config, views)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto")
    original = build_hf(tied=tied, dtype=torch.float64).state_dict()
    assert loaded.dtype == torch.float64
    for name, tensor in loaded.state_dict().items():
        moved = 1.0 if name == "model.language_model.layers.1.mlp.up_proj.weight" else 0.0
        assert torch.equal(tensor, original[name] + moved), name
    again = views_of(tmp_path / "out")
    assert all(torch.equal(again[name], view) for name, view in views.items())


def test_several_files_and_another_dtype(checkpoints, tmp_path):
    config, views = read_model_config(checkpoints[False]), views_of(checkpoints[False], dtype="bfloat16")
    save_checkpoint(checkpoints[False], tmp_path / "out", config, views, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = views_of(tmp_path / "out", dtype="bfloat16")
    assert all(torch.equal(again[name], view) for name, view in views.items())
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize("tp", [2, 4])
def test_any_parallel_size_in_and_out(checkpoints, tmp_path, tp):
    config, whole = read_model_config(checkpoints[False]), views_of(checkpoints[False])
    ranks = [views_of(checkpoints[False], tp, rank) for rank in range(tp)]
    assert not ranks[-1]["language_model.embed_tokens.weight"][VOCAB - 256 :].any()
    save_checkpoint(checkpoints[False], tmp_path / "list", config, ranks)
    again = views_of(tmp_path / "list")
    assert all(torch.equal(again[name], view) for name, view in whole.items())
    save_checkpoint(checkpoints[False], tmp_path / "none", config, ranks[1], gather=lambda name, local: None)
    assert not (tmp_path / "none").exists()
    save_checkpoint(
        checkpoints[False], tmp_path / "gather", config, ranks[0], gather=lambda name, local: [r[name] for r in ranks]
    )
    assert (tmp_path / "gather" / "model.safetensors").read_bytes() == (tmp_path / "list" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("visual", "decoder"),
    [("visual.", "model."), ("model.visual.", "model.language_model."), ("visual.", "language_model.model.")],
)
def test_every_spelling_of_names(copy, checkpoints, visual, decoder):
    def spelled(tensors):
        ours = {training_name(key): tensor for key, tensor in tensors.items()}
        head = ours.pop("lm_head.weight")
        renamed = {
            visual + name.removeprefix("visual.")
            if name.startswith("visual.")
            else decoder + name.removeprefix("language_model."): tensor
            for name, tensor in ours.items()
        }
        return {**renamed, ("language_model." if decoder == "language_model.model." else "") + "lm_head.weight": head}

    rewrite(copy, spelled)
    expected = views_of(checkpoints[False])
    assert all(torch.equal(view, expected[name]) for name, view in views_of(copy).items())


def test_the_older_flat_config(copy, checkpoints):
    config = json.loads((copy / "config.json").read_text())
    flat = {**config, **config.pop("text_config")}
    flat.update(model_type="qwen2_5_vl", rope_theta=10000.0, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    for name in ("text_config", "rope_parameters"):
        flat.pop(name, None)
    flat["vision_config"]["model_type"] = "qwen2_5_vl"
    (copy / "config.json").write_text(json.dumps(flat))
    new, old_config = read_model_config(checkpoints[False]), read_model_config(copy)
    for name in ("hidden_size", "vocab_size", "rope_theta", "mrope_section", "eos_token_ids", "tie_word_embeddings"):
        assert getattr(old_config, name) == getattr(new, name)


def test_broken_weights_are_named(copy):
    keys = load_file(copy / "model.safetensors")
    norm = next(key for key in keys if training_name(key) == "language_model.norm.weight")
    rewrite(copy, lambda tensors: {key: t for key, t in tensors.items() if key != norm})
    with pytest.raises(BadInput, match=r"lacks language_model.norm.weight"):
        views_of(copy)
    rewrite(copy, lambda tensors: {**tensors, norm: torch.zeros(63)})
    with pytest.raises(BadInput, match=r"language_model.norm.weight has shape \(63,\); expected \(64,\)"):
        views_of(copy)
    rewrite(copy, lambda tensors: {**tensors, norm: torch.zeros(64), "model.visual.extra": torch.zeros(1)})
    with pytest.raises(BadInput, match="unexpected tensors visual.extra"):
        views_of(copy)
    (copy / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(BadInput, match="not a readable safetensors file"):
        views_of(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="no weights to load"):
        views_of(copy)


def test_broken_index_is_named(checkpoints, tmp_path):
    config, views = read_model_config(checkpoints[False]), views_of(checkpoints[False])
    save_checkpoint(checkpoints[False], tmp_path / "out", config, views, max_shard_bytes=100_000)
    absent = sorted((tmp_path / "out").glob("model-00002-*"))[0]
    absent.unlink()
    with pytest.raises(BadInput, match=f"lacks shard files {absent.name}"):
        views_of(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadInput, match="not a weight index"):
        views_of(tmp_path / "out")


def test_nothing_is_overwritten(checkpoints, tmp_path):
    config, views = read_model_config(checkpoints[False]), views_of(checkpoints[False])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(BadInput, match="exists and is not an empty directory"):
        save_checkpoint(checkpoints[False], tmp_path / "out", config, views)


def test_bad_directories_are_named(tmp_path, copy):
    with pytest.raises(BadInput, match="does not exist"):
        read_model_config(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no config\.json"):
        read_model_config(tmp_path / "empty")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(BadInput, match="'llama'; supported is 'qwen2_5_vl'"):
        read_model_config(copy)
    text = {**config["text_config"], "num_hidden_layers": 99}
    (copy / "config.json").write_text(json.dumps({**config, "text_config": text}))
    with pytest.raises(BadInput, match="num_hidden_layers"):
        read_model_config(copy)
    (copy / "config.json").write_text(json.dumps({**config, "vision_config": None}))
    with pytest.raises(BadInput, match="no vision_config"):
        read_model_config(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        read_model_config(copy)


def test_generation_config_decides_where_to_stop(copy):
    assert read_model_config(copy).eos_token_ids == (2,)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "pad_token_id": 7}))
    config = read_model_config(copy)
    assert config.eos_token_ids == (2, 7) and config.pad_token_id == 7
    assert config.forbidden_token_ids == (190, 191, 192, 193)
