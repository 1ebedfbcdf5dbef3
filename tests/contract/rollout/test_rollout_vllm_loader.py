"""What vLLM's model loader refuses, and what it never allocates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollplex.core.errors import InternalError

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")


def test_a_model_that_is_not_the_layout_is_refused():
    from rollplex.rollout.vllm_loader import place_parameters

    model = nn.Linear(3, 2)
    views = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    place_parameters(model, views)
    assert model.weight.data_ptr() == views["weight"].data_ptr()
    for wrong in ({"weight": views["weight"]}, views | {"more": torch.zeros(1)}, views | {"weight": torch.zeros(4, 3)},
                  views | {"bias": torch.zeros(2, dtype=torch.bfloat16)}):
        with pytest.raises(InternalError) as caught:
            place_parameters(model, wrong)
        assert caught.value.reason == "LAYOUT_MISMATCH"


def test_modules_are_built_without_their_memory():
    from rollplex.rollout.vllm_loader import parameters_without_memory

    with parameters_without_memory():
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(torch.empty(1000, 1000)))
    assert module.weight.shape == (1000, 1000)
    assert module.weight.untyped_storage().nbytes() == 4
