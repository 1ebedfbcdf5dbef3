"""Alias classes of whole models, the paper's figures among them, and reading shapes from a config alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollplex.core.aliasing import AliasCase
from rollplex.core.errors import BadInput
from rollplex.core.model_layout import MEGATRON_FUSED, SPLIT, TRAIN_LAYOUTS, model_verdicts, summarise
from rollplex.core.placement import align_up
from rollplex.core.shapes import ModelShapes, VisionShapes, model_tensors, read_shapes, shapes_from_config
from rollplex.core.topology import Topology
from rollplex_client.cli.published import PUBLISHED, model_shapes, published_names

SMALL_VISION = VisionShapes(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=64)
SMALL = ModelShapes(64, 96, 2, 8, 4, 203, False, SMALL_VISION)
PAIRS = [(train, rollout) for train in (1, 2, 4, 8) for rollout in (1, 2, 4, 8) if train % rollout == 0]


def test_the_papers_classes_of_32b():
    found = summarise(model_shapes("Qwen2.5-VL-32B"), Topology(8, 4), MEGATRON_FUSED)
    billions = {case: found.language[case].parameters / 1e9 for case in AliasCase}
    assert billions == pytest.approx({AliasCase.IDENTICAL: 19.7, AliasCase.TRANSPOSED: 10.7, AliasCase.INCOMPATIBLE: 2.4},
                                     abs=0.06)
    assert [100 * found.share(case) for case in AliasCase] == pytest.approx([60.0, 32.8, 7.2], abs=0.1)
    assert found.rebuilt_bytes / 2**30 == pytest.approx(1.1, abs=0.05)
    assert found.vision[AliasCase.IDENTICAL] == found.vision_total


def test_our_own_layout_shares_everything():
    found = summarise(model_shapes("Qwen2.5-VL-32B"), Topology(8, 4), SPLIT)
    assert found.rebuilt_bytes == 0 and found.share(AliasCase.INCOMPATIBLE) == 0
    assert found.share(AliasCase.TRANSPOSED) == pytest.approx(0.328, abs=0.001)


@pytest.mark.parametrize(("name", "language", "tower"), [
    ("Qwen2.5-VL-3B", 3_085_938_688, 668_684_288), ("Qwen2.5-VL-7B", 7_615_616_512, 676_550_144),
    ("Qwen2.5-VL-32B", 32_763_876_352, 688_841_984), ("Qwen2.5-VL-72B", 72_706_203_648, 704_573_696)])
def test_published_models_have_their_published_sizes(name, language, tower):
    shapes = model_shapes(f"Qwen/{name}-Instruct")
    counts = [sum(tensor.element_count for tensor in model_tensors(shapes) if tensor.is_vision is vision)
              for vision in (False, True)]
    assert counts == [language, tower]
    assert counts[0] == pytest.approx(shapes.nominal_parameters, rel=0.01)


@pytest.mark.parametrize("layout", TRAIN_LAYOUTS)
@pytest.mark.parametrize(("train", "rollout"), PAIRS)
def test_shards_of_all_ranks_make_up_the_model(train, rollout, layout):
    vocab = align_up(203, 64)
    for verdict in model_verdicts(SMALL, Topology(train, rollout), layout):
        for parameter in verdict.tensor.parameters:
            rows = vocab if parameter.shape[0] == 203 else parameter.shape[0]
            for maps in ((verdict.aliasing.rollout,), verdict.aliasing.training):
                item = next(item for item in maps if parameter.name in item.names)
                held = {(row, column) for rank in range(item.tp) for run in item.runs(rank) if run.name == parameter.name
                        for row in range(run.start, run.start + run.count)
                        for column in (item.columns(rank)[0], sum(item.columns(rank)) - 1)}
                assert {row for row, _ in held} == set(range(rows))
                assert {min(c for _, c in held), max(c for _, c in held)} == {0, parameter.cols - 1}
    summary = summarise(SMALL, Topology(train, rollout), layout)
    if layout == SPLIT:
        assert not summary.rebuilt_bytes
    assert (summary.language[AliasCase.TRANSPOSED].parameters > 0) is (train > rollout)


@pytest.mark.parametrize(("shapes", "topology", "words"), [
    (SMALL, (16, 1), "8 attention heads are not divisible by training's TP 16"),
    (ModelShapes(96, 96, 1, 12, 3, 64, True, SMALL_VISION), (4, 2), "3 heads of .*k_proj.* and TP 2: neither"),
    (ModelShapes(64, 90, 1, 8, 4, 64, True, SMALL_VISION), (4, 2), "90 rows of .*gate_proj.* not divisible by TP 4"),
])
def test_what_does_not_divide_is_refused_with_the_numbers(shapes, topology, words):
    with pytest.raises(BadInput, match=words):
        summarise(shapes, Topology(*topology))


def test_an_unknown_training_layout():
    with pytest.raises(BadInput, match="'fused' is none of split, megatron-fused"):
        list(model_verdicts(SMALL, Topology(), "fused"))


def test_nested_and_flat_configs_read_the_same(tmp_path):
    flat = json.loads((PUBLISHED / "Qwen2.5-VL-7B.json").read_text())
    text = {key: flat[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                       "num_key_value_heads", "vocab_size")}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": flat["vision_config"],
              "nominal_language_parameters": flat["nominal_language_parameters"]}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_shapes(tmp_path) == read_shapes(tmp_path / "config.json") == model_shapes("qwen2.5-vl-7b")


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "llama"}, "type 'llama'; supported is 'qwen2_5_vl'"), ({"vision_config": None}, "no vision_config"),
    ({"hidden_size": "5120"}, "hidden_size is '5120'"), ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": 6}, "hidden size 3584, 6 heads and 4 kv heads"), ({"vocab_size": None}, "vocab_size is None")])
def test_bad_configs_are_named(change, words):
    raw = json.loads((PUBLISHED / "Qwen2.5-VL-7B.json").read_text()) | change
    with pytest.raises(BadInput, match=words):
        shapes_from_config(raw, "here")


def test_missing_and_broken_files(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        read_shapes(tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        read_shapes(tmp_path / "nothing.json")
    with pytest.raises(BadInput, match="none of Qwen2.5-VL-32B, Qwen2.5-VL-3B, Qwen2.5-VL-72B, Qwen2.5-VL-7B"):
        model_shapes("Qwen3")
    assert len(published_names()) == 4


def test_no_torch_is_needed():
    code = "import rollplex_client.cli.published as p; p.model_shapes('Qwen2.5-VL-3B'); import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
