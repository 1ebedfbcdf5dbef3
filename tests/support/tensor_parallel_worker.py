"""One rank of test_model_tensor_parallel.py, as a script; the test itself measures the single rank."""

from __future__ import annotations

import sys
from pathlib import Path

from rollplex.core.imports import uncollected

with uncollected():
    import torch
    import torch.distributed as dist
    from tiny_qwen import Bound, bind_model, exact_float64, make_groups, make_prompt, two_stage_loss

    from rollplex.model import (
        GroupDecoder,
        destroy_tensor_parallel,
        init_tensor_parallel,
        pack_responses,
        prefix_forward,
        suffix_forward,
        sum_replicated_gradients,
        token_logprobs,
    )

KINDS, LENGTHS = ["video", "text", "one_token", "two_images"], [3, 1, 4]


def measure(bound: Bound, saved: str, groups_per_pass: int = 1) -> dict:
    """Loss, gradients by training name, log-probabilities of the first group, and logits of decoding."""
    groups = make_groups(bound.config, KINDS, torch.float64, LENGTHS)
    loss = two_stage_loss(bound.model, groups, 0.7, bound.config.forbidden_token_ids, saved=saved, micro_batch_tokens=4,
                          groups_per_pass=groups_per_pass)
    sum_replicated_gradients(bound.model)
    with torch.no_grad():
        inputs = groups[0].inputs
        packed = pack_responses(inputs.last_token, groups[0].responses, inputs.suffix_position)
        hidden = suffix_forward(bound.model, [prefix_forward(bound.model, inputs)], packed)
        logp, entropy = token_logprobs(bound.model, hidden, packed.targets, with_entropy=True)
    gradients = {name: parameter.grad for name, parameter in bound.model.parameters_by_name().items()}
    return {"loss": loss, "gradients": gradients, "logp": logp, "entropy": entropy, "decoded": decode(bound),
            "tower": tower_gradients(bound, saved, groups_per_pass)}


def tower_gradients(bound: Bound, saved: str, groups_per_pass: int) -> dict[str, torch.Tensor]:
    """With a frozen decoder, of an image, which one rank computes, and of a video."""
    parameters = bound.model.parameters_by_name()
    for name, parameter in parameters.items():
        parameter.grad = None
        parameter.requires_grad_(name.startswith("visual."))
    groups = make_groups(bound.config, ["image", "video"], torch.float64, LENGTHS)
    two_stage_loss(bound.model, groups, 0.7, bound.config.forbidden_token_ids, saved=saved, groups_per_pass=groups_per_pass)
    sum_replicated_gradients(bound.model)
    found = {name: parameter.grad for name, parameter in parameters.items() if parameter.requires_grad}
    bound.model.requires_grad_(True)
    return found


def decode(bound: Bound) -> torch.Tensor:
    """[steps, B, V]; above one rank with o_proj and down_proj stored as where q > 1. One group leaves on the way."""
    views = dict(bound.rollout_views)
    for name, view in views.items():
        if bound.layout.tp > 1 and name.startswith("language_model") and name.endswith(("o_proj.weight", "down_proj.weight")):
            views[name] = view.T.contiguous().T
    decoder = GroupDecoder(bound.config, bound.layout, views)
    prompts = [make_prompt(bound.config, kind, seed) for seed, kind in enumerate(["video", "one_token", "two_images"])]
    state = decoder.start(zip(prompts, (2, 3, 2)), 4)
    logits = [decoder.step(state)]
    tokens_B = torch.tensor([5, 60, 100, 7, 150, 180, 202])
    logits.append(decoder.step(state, tokens_B))
    kept = state.keep_groups([True, False, True])
    logits.append(decoder.step(state, tokens_B.flip(0)[kept]))
    return torch.cat(logits)


def refuse_strided(name: str) -> None:
    """As NCCL does, or should: gloo takes any dense tensor, NCCL moves bytes in order."""
    original = getattr(dist, name)

    def call(*args, **kwargs):
        for tensor in (item for part in args[:2] for item in (part if isinstance(part, list) else [part])):
            assert not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(), f"{name} of strides {tensor.stride()}"
        return original(*args, **kwargs)

    setattr(dist, name, call)


def main(folder: str, rank: int, size: int, groups_per_pass: int, checkpoints: list[str]) -> None:
    torch.set_num_threads(1)
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "gather", "broadcast"):
        refuse_strided(name)
    exact_float64(setattr)
    init_tensor_parallel(rank, size, store=f"file://{folder}/store", timeout_s=60)
    bounds = [bind_model(Path(checkpoint), torch.float64, tp=size, rank=rank) for checkpoint in checkpoints]
    torch.save([measure(bound, "recompute", groups_per_pass) for bound in bounds], f"{folder}/rank{rank}.pt")
    destroy_tensor_parallel()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5:])
