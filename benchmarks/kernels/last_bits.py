"""What last bits do to a bfloat16 gradient: one group's training, and again with a few numbers of dq off by their last bit.

    PYTHONPATH=services:protos/gen:. python benchmarks/kernels/last_bits.py

A kernel that adds in no fixed order does that to the gradients of its queries (docs/adr/0014). A decoder of few and narrow layers
with random weights, on the CPU, where everything else is the same to the bit: how far the gradient is from the undisturbed one,
and its norm, both of that norm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from model_speed import PUBLISHED, build_model

from rollplex.model import (
    ModelConfig,
    PromptInputs,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    pack_responses,
    prefix,
    prefix_forward,
    read_model_config,
    suffix,
    suffix_forward,
    token_logprobs,
)

VOCABULARY = 4096
MEDIA = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
ULP = 2.0**-8
"""Of bfloat16, relative."""
Gradients = dict[str, torch.Tensor]


def small_config(layers: int) -> ModelConfig:
    """The 3B model's, 512 wide with four heads of 128, its tower one block."""
    raw = json.loads((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    raw |= {"num_hidden_layers": layers, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1}
    raw |= {name: VOCABULARY - 1 - index for index, name in enumerate(MEDIA)}
    raw["vision_config"] |= {"depth": 1, "fullatt_block_indexes": [0], "out_hidden_size": 512}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_model_config(Path(folder))


@contextmanager
def last_bits(module: object, function: str, share: float, generator: torch.Generator) -> Iterator[None]:
    """`module.function(q, ...)` is attention; of what comes back to q this share of numbers is off by a last bit."""
    original: Callable = getattr(module, function)

    def off(gradient: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
        chosen = torch.rand(gradient.shape, generator=generator) < share
        return torch.where(chosen, gradient * (1 + ULP * signs).to(gradient.dtype), gradient)

    def attend(q: torch.Tensor, *others: object) -> torch.Tensor:
        if q.requires_grad:
            q.register_hook(off)
        return original(q, *others)

    setattr(module, function, attend)
    try:
        yield
    finally:
        setattr(module, function, original)


def group_gradients(model: VisionLanguageModel, config: ModelConfig, prompt_tokens: int) -> Gradients:
    rng = np.random.default_rng(0)
    inputs = PromptInputs.from_arrays(config, token_ids=rng.integers(10, VOCABULARY - 10, prompt_tokens))
    lengths = [int(length) for length in rng.integers(20, 150, 8)]
    responses = [torch.from_numpy(rng.integers(10, VOCABULARY - 10, length)) for length in lengths]
    packed = pack_responses(inputs.last_token, responses, inputs.suffix_position)
    advantages = torch.from_numpy(rng.normal(size=8)).float().repeat_interleave(torch.tensor(lengths))
    model.zero_grad(set_to_none=True)
    # Every activation stays, so that each attention is computed once.
    boundary = prefix_forward(model, inputs, saved="keep")
    logprobs, _ = token_logprobs(model, suffix_forward(model, [boundary], packed), packed.targets)
    (logprobs * advantages).mean().backward()
    boundary.backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def norm(gradients: Gradients) -> float:
    return float(torch.stack([value.square().sum() for value in gradients.values()]).sum()) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--share", type=float, default=2.5e-4, help="of numbers that are off")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    init_tensor_parallel(0, 1)
    try:
        config = small_config(arguments.layers)
        model = build_model(config, "cpu")
        with torch.no_grad():
            # As benchmark checkpoints have it: the residual stream keeps its size at any depth.
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.div_((2 * arguments.layers) ** 0.5)
        whole = group_gradients(model, config, arguments.prompt_tokens)
        length, generator = norm(whole), torch.Generator().manual_seed(0)
        for what, module, function in (("suffixes", suffix, "suffix_attention"), ("prompt", prefix, "causal_attention")):
            for _ in range(arguments.repeats):
                with last_bits(module, function, arguments.share, generator):
                    found = group_gradients(model, config, arguments.prompt_tokens)
                apart = norm({name: found[name] - value for name, value in whole.items()})
                print(f"last bits in the {what:9} gradient {apart / length:.1e} apart, norm {norm(found) / length - 1:+.1e}",
                      flush=True)
    finally:
        destroy_tensor_parallel()


if __name__ == "__main__":
    main()
