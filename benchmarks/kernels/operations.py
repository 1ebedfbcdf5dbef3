"""How many operations torch is asked for in a group's training, by groups a pass: what the host has to launch (docs/adr/0020).

    PYTHONPATH=services:protos/gen:. python benchmarks/kernels/operations.py

As many layers as Qwen2.5-VL-3B has, of small widths, which change no count, on a CPU. A video prompt, 8 responses, layer inputs
kept. What only looks at memory otherwise is not counted. Suffix: forward and backward pass of the responses; prefix: what runs
again, and its backward pass.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from model_speed import PUBLISHED, build_model, make_prompt
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.model import (
    ModelConfig,
    destroy_tensor_parallel,
    init_tensor_parallel,
    pack_groups,
    pack_responses,
    prefix_pass,
    read_model_config,
    suffix_forward,
    token_logprobs,
)

LOOKS = {"view", "t", "transpose", "detach", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice", "split",
         "split_with_sizes", "unbind", "permute", "select", "alias", "empty", "new_empty", "as_strided", "_reshape_alias"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name.removeprefix("aten::") not in LOOKS
        return function(*args, **(kwargs or {}))


def narrow_config() -> ModelConfig:
    raw = json.loads((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    raw |= {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw["vision_config"] |= {"hidden_size": 160, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_model_config(Path(folder))


def main() -> None:
    init_tensor_parallel(0, 1)
    config = narrow_config()
    model = build_model(config, "cpu")
    inputs = make_prompt(config, 300)
    responses = [torch.arange(1000, 1008) for _ in range(8)]
    alone = None
    for groups in (1, 2, 4):
        prefix = prefix_pass(model, [inputs] * groups)
        packed = pack_groups([pack_responses(inputs.last_token, responses, inputs.suffix_position)] * groups)
        with Operations() as suffix:
            token_logprobs(model, suffix_forward(model, prefix.boundaries, packed), packed.targets)[0].sum().backward()
        with Operations() as back:
            prefix.backward()
        model.zero_grad(set_to_none=True)
        alone = alone or back.count
        print(f"{groups} a pass: suffix {suffix.count / groups:.0f} a group, prefix {back.count / groups:.0f}, "
              f"together {(suffix.count + back.count) / groups:.0f}; a prefix each: {suffix.count / groups + alone:.0f}")
    destroy_tensor_parallel()


if __name__ == "__main__":
    main()
