"""o_proj and down_proj bound to transposed storage: the same gradients, into buffers that lie as the weights do."""

from __future__ import annotations

import torch
from tiny_qwen import make_groups, two_stage_loss

ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def test_gradients_of_transposed_weights(bind, exact):
    bound = bind()
    groups = make_groups(bound.config, ["image", "text"], torch.float64, [3, 1, 4])

    def gradients() -> dict[str, torch.Tensor]:
        two_stage_loss(bound.model, groups, 0.7, bound.config.forbidden_token_ids)
        return {name: parameter.grad for name, parameter in bound.model.parameters_by_name().items()}

    expected = {name: grad.clone() for name, grad in gradients().items()}
    views = {name: view.t().contiguous().t() if name.startswith("language_model") and name.endswith(ROW_PARALLEL) else view
             for name, view in bound.layout.training_views(bound.rollout_views).items()}
    assert sum(not view.is_contiguous() for view in views.values()) == 2 * bound.config.layer_count
    bound.model.bind(views)
    buffers = {name: torch.zeros_like(view) for name, view in views.items()}
    for name, parameter in bound.model.parameters_by_name().items():
        parameter.grad = buffers[name]
    for name, found in gradients().items():
        assert found is buffers[name] and found.stride() == views[name].stride()
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)
