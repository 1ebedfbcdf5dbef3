"""What a benchmark does on the GPU beside the mesh: weights, the probe, TRL's tower."""

from __future__ import annotations

import pytest
import torch
from gpu_marks import NEEDS_GPU

from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: E402

from rollplex.bench.checkpoint import build_checkpoint  # noqa: E402
from rollplex.bench.probe import probe  # noqa: E402
from rollplex_client.bench.gpu_memory import watch_memory  # noqa: E402

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    build_checkpoint(folder, "tiny", seed=0, device="cuda")
    return folder


def test_weights_made_on_the_gpu_are_as_wide_as_those_of_a_cpu(checkpoint):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    layer = model.model.language_model.layers[0]
    assert float(layer.mlp.gate_proj.weight.std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(layer.mlp.down_proj.weight.std()) == pytest.approx(96**-0.5 / 2, rel=0.05)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(64))


def test_the_probe_reaches_a_part_of_what_is_stated():
    facts = probe("cuda")
    assert facts["gpus"] >= 1
    for kind in ("flops", "bandwidth"):
        if facts[f"stated_{kind}"]:
            assert 0.3 < facts[f"measured_{kind}"] / facts[f"stated_{kind}"] < 1.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trl_s_tower_computes_the_same_with_our_attention(checkpoint, dtype):
    trl_run = pytest.importorskip("rollplex.bench.trl_run", reason="needs TRL and datasets")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").cuda()
    grid = torch.tensor([[1, 12, 16]] * 2, device="cuda")
    pixels = torch.randn(2 * 12 * 16, 1176, generator=torch.Generator().manual_seed(0)).to("cuda", dtype).requires_grad_()
    outcomes = []
    for change in (lambda model: None, trl_run.use_tower_attention):
        change(model)
        features = model.model.visual(pixels, grid_thw=grid).pooler_output
        gradient, = torch.autograd.grad(features.float().square().sum(), pixels)
        outcomes.append((features, gradient))
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-3}[dtype]
    for expected, found in zip(*outcomes, strict=True):
        difference = (found - expected).float().norm() / expected.float().norm()
        assert float(difference) < tolerance


def test_memory_is_seen_where_the_driver_tells():
    with watch_memory("cuda") as watch:
        block = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9))
        torch.cuda.synchronize()
    if watch.before_bytes is None:
        pytest.skip("NVML does not tell")
    assert watch.peak_bytes - watch.before_bytes >= block.nbytes
