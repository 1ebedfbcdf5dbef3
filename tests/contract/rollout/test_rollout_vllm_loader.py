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


@pytest.mark.parametrize("on_gpu", [False, True])
def test_this_vllm_has_every_option_that_is_asked_for(on_gpu, tmp_path):
    from vllm import EngineArgs

    from rollplex.core.config import MeshSection, ModelSection
    from rollplex.rollout.config import RolloutConfig, RolloutSection
    from rollplex.rollout.vllm_options import engine_options

    config = RolloutConfig(model=ModelSection(checkpoint=tmp_path, dtype="bfloat16"), mesh=MeshSection(runtime_dir=tmp_path),
                           rollout=RolloutSection(engine="vllm", max_rows=100))
    arguments = EngineArgs(**engine_options(config, 4096, on_gpu=on_gpu))
    assert arguments.enforce_eager is not on_gpu
    if on_gpu:
        compilation = arguments.compilation_config
        assert (int(compilation.mode), compilation.cudagraph_mode.name) == (0, "FULL_DECODE_ONLY")
        assert compilation.cudagraph_capture_sizes[-1] == 100
