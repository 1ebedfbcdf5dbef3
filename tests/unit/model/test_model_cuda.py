"""The CUDA paths (FlexAttention, grouped SDPA, varlen windows, decoding) against the CPU ones."""

from __future__ import annotations

import pytest
import torch
from gpu_marks import NEEDS_GPU
from tiny_qwen import Bound, Group, make_groups, make_responses, two_stage_loss, worst_gradient_error

from rollplex.model import GroupDecoder, VisionLanguageModel, attention, pack_groups, pack_responses

pytestmark = NEEDS_GPU
KINDS, LENGTHS = ["video", "text", "one_token", "image_and_video"], [3, 1, 40]


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def on_cuda(bound: Bound, dtype: torch.dtype) -> tuple[VisionLanguageModel, dict[str, torch.Tensor]]:
    rollout = {name: view.to("cuda", dtype) for name, view in bound.rollout_views.items()}
    model = VisionLanguageModel(bound.config, dtype, "cuda")
    model.bind(bound.layout.training_views(rollout))
    return model, rollout


def to_cuda(groups: list[Group]) -> list[Group]:
    for group in groups:
        group.inputs = group.inputs.to("cuda")
        group.responses = [response.cuda() for response in group.responses]
        group.weights = [weights.cuda() for weights in group.weights]
    return groups


@pytest.mark.parametrize("groups_per_pass", [1, 3])
@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_float32_gradients(bind, saved, groups_per_pass):
    bound = bind(torch.float32)
    options = (0.7, bound.config.forbidden_token_ids)
    loss = two_stage_loss(bound.model, make_groups(bound.config, KINDS, torch.float32, LENGTHS), *options)
    model, _ = on_cuda(bound, torch.float32)
    groups = to_cuda(make_groups(bound.config, KINDS, torch.float32, LENGTHS))
    found = two_stage_loss(model, groups, *options, saved=saved, micro_batch_tokens=41, groups_per_pass=groups_per_pass)
    assert found == pytest.approx(loss, rel=1e-4, abs=1e-3)
    ours = {name: p.grad.cpu() for name, p in model.parameters_by_name().items()}
    theirs = {name: p.grad for name, p in bound.model.parameters_by_name().items()}
    error = worst_gradient_error(ours, theirs, vocab=bound.config.padded_vocab(1))
    print(f"worst relative gradient error, float32 on CUDA against CPU: {error:.1e}")
    assert error < 1e-4


@pytest.mark.parametrize("groups_per_pass", [1, 3])
def test_bfloat16_gradients_point_the_same_way(bind, groups_per_pass):
    bound = bind(torch.float32)
    two_stage_loss(bound.model, make_groups(bound.config, KINDS, torch.float32, LENGTHS), 1.0, ())
    model, _ = on_cuda(bound, torch.bfloat16)
    groups = to_cuda(make_groups(bound.config, KINDS, torch.float32, LENGTHS))
    two_stage_loss(model, groups, 1.0, (), groups_per_pass=groups_per_pass)
    cosines = {}
    for name, parameter in bound.model.parameters_by_name().items():
        found = model.parameters_by_name()[name].grad.float().cpu()
        cosines[name] = float(torch.nn.functional.cosine_similarity(found.flatten(), parameter.grad.flatten(), dim=0))
    lowest = min(cosines, key=cosines.get)
    print(f"lowest cosine of a bfloat16 gradient: {cosines[lowest]:.3f} ({lowest})")
    assert cosines[lowest] > 0.9


def test_decoding(bind):
    bound = bind(torch.float32)
    _, rollout = on_cuda(bound, torch.float32)
    prompts = [(group.inputs, 2) for group in make_groups(bound.config, ["video", "text", "image"], torch.float32, [1])]
    tokens = torch.stack(make_responses([4] * 6))
    results = []
    for device, views in (("cpu", bound.rollout_views), ("cuda", rollout)):
        decoder = GroupDecoder(bound.config, bound.layout, views)
        state = decoder.start([(inputs.to(device), n) for inputs, n in prompts], 4)
        steps = [decoder.step(state)] + [decoder.step(state, tokens[:, i].to(device)) for i in range(3)]
        results.append(torch.stack(steps)[..., : bound.config.vocab_size].cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lengths", [[100] * 7, [1] * 5, [1, 300, 17], [640]], ids=["even", "ones", "mixed", "one"])
@pytest.mark.parametrize("boundary_tokens", [0, 1, 1000])
@pytest.mark.parametrize("heads", [(28, 4), (16, 2), (5, 1)], ids=str)
def test_suffix_attention_of_the_published_head_size_in_bfloat16(boundary_tokens, lengths, heads):
    """Against float32 on the CPU, gradients of everything too: the error is bfloat16's, of a sum of rounded numbers."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, 128, device="cuda", dtype=torch.bfloat16, generator=generator)

    query_heads, kv_heads = heads
    total = sum(lengths)
    samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    inputs = [random(total, query_heads), *(random(rows, kv_heads) for rows in (boundary_tokens, boundary_tokens, total, total))]
    wanted = random(total, query_heads)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        q, k_B, v_B, k_T, v_T = leaves = [x.detach().clone().to(device, dtype).requires_grad_() for x in inputs]
        seen = attention.suffix_mask(boundary_tokens, samples.to(device), lengths, dtype, 128)
        out = attention.suffix_attention(q, (k_B, v_B), (k_T, v_T), seen)
        out.backward(wanted.to(device, dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for name, found, expected in zip(("out", "q", "k boundary", "v boundary", "k own", "v own"), *results, strict=True):
        if not expected.numel():
            continue
        # A query that sees one key has a gradient of exactly nothing, which is no measure.
        error = float((found.float().cpu() - expected).norm() / expected.norm().clamp(min=1.0))
        assert error < 0.01, f"{name}: {error:.4f}"


@pytest.mark.parametrize("boundary_tokens", [(1000, 700, 33), (1000, 0, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_groups_together_see_what_each_sees_alone(boundary_tokens, dtype):
    """Those of one call are bit for bit those of a call a group: a tile of queries belongs to one group."""
    generator = torch.Generator("cuda").manual_seed(0)
    groups = [pack_responses(1, make_responses(lengths), 5) for lengths in ([300, 17, 128], [1], [64, 500])]
    packed = pack_groups(groups).to("cuda")

    def random(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, 128, device="cuda", dtype=dtype, generator=generator)

    own = [random(packed.token_count, heads) for heads in (16, 2, 2)]
    boundaries = [(random(tokens, 2), random(tokens, 2)) for tokens in boundary_tokens]
    wanted, results = random(packed.token_count, 16), []
    counts = [group.token_count for group in groups]
    for alone in (True, False):
        leaves = [x.clone().requires_grad_() for x in (*own, *(x for pair in boundaries for x in pair))]
        q, k, v, *rest = leaves
        pairs = list(zip(rest[::2], rest[1::2]))
        if alone:
            out = torch.cat([attention.packed_attention(
                q, [pair], (k, v), attention.packed_mask([len(pair[0])], group.to("cuda"), dtype, 128))
                for q, k, v, pair, group in zip(*(x.split(counts) for x in (q, k, v)), pairs, groups, strict=True)])
        else:
            out = attention.packed_attention(q, pairs, (k, v), attention.packed_mask(boundary_tokens, packed, dtype, 128))
        out.backward(wanted)
        results.append([out.detach(), *(leaf.grad for leaf in leaves if len(leaf))])
    for found, expected in zip(*results, strict=True):
        # Backward adds in no fixed order (docs/adr/0014).
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(results[0][0], results[1][0])
