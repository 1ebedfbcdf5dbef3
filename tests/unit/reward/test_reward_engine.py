"""The engine on mixed batches, and the options of the built-in reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.core.errors import BadInput
from rollplex.reward.config import RewardConfig, load_config
from rollplex.reward.engine import RewardEngine, Sample


def response(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


def test_mixed_types_in_one_batch() -> None:
    scored = RewardEngine().score([
        Sample(response("B"), "<answer>B</answer>", "multiple choice"),
        Sample(response("3.50"), "3.5", "numerical"),
        Sample("<answer>9</answer>", "10", "regression"),
        Sample(response("STOP the light"), "STOP at the light", "OCR"),
        Sample("B", "B", "multiple choice"),
        Sample(response("ball"), "ball", "free-form"),
    ])
    assert [result.parts["accuracy"] for result in scored] == pytest.approx([1, 1, 0.9, 0.75, 0, 2 / 3])
    assert [result.parts["format"] for result in scored] == [1, 1, 0, 1, 0, 1]
    assert [result.value for result in scored] == pytest.approx([2, 2, 0.9, 1.75, 0, 5 / 3])


def test_weights_leave_the_parts_alone() -> None:
    [scored] = RewardEngine(0.9, 0.1).score([Sample(response("9"), "10", "regression")])
    assert scored.value == pytest.approx(0.9 * 0.9 + 0.1)
    assert scored.parts == {"accuracy": pytest.approx(0.9), "format": 1.0}


@pytest.mark.parametrize(("ground_truth", "problem_type", "says"), [
    ("B", "multiple-choice", "did you mean 'multiple choice'"),
    ("B", "ocr", "did you mean 'OCR'"),
    ("B", "Numeric", "did you mean 'numerical'"),
    ("B", "zzz", "known types: 'multiple choice', 'numerical', 'OCR', 'free-form', 'regression'"),
    ("B", None, "no problem_type"),
    ("B", "", "no problem_type"),
    (None, "OCR", "no ground truth"),
    ("three", "numerical", "'three'"),
])
def test_data_errors_leave_only_their_sample_unscored(ground_truth: str | None, problem_type: str | None,
                                                      says: str) -> None:
    good = Sample(response("B"), "B", "multiple choice")
    scored = RewardEngine().score([good, Sample(response("B"), ground_truth, problem_type), good])
    assert [result.value for result in scored] == [2.0, None, 2.0]
    assert says in scored[1].error
    assert scored[1].parts == {}
    assert scored[0].error == ""


def test_config_from_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\nruntime_dir = "{tmp_path}"\n[reward]\naccuracy_weight = 2\n[rollout]\nanything = 1\n')
    config = load_config(path, ["reward.format_weight=0.5"])
    assert config == RewardConfig(address=f"unix:{tmp_path}/reward.sock", accuracy_weight=2.0, format_weight=0.5,
                                  drain_timeout_s=10.0)
    assert load_config(path, [], "127.0.0.1:7001").address == "127.0.0.1:7001"
    assert load_config(None, [], "127.0.0.1:7001") == RewardConfig(address="127.0.0.1:7001")


@pytest.mark.parametrize(("overrides", "says"), [
    (["reward.format_wieght=1"], "did you mean 'format_weight'"),
    (["rewards.format_weight=1"], "did you mean 'reward'"),
    (["format_weight=1"], "format_weight"),
    (["reward.format_weight=-1"], "at least 0"),
    (["reward.format_weight=nan"], "finite"),
    (["reward.format_weight=0", "reward.accuracy_weight=0"], "both 0"),
    (["reward.format_weight=yes"], "of type float"),
    (["mesh.runtime_dri=x"], "did you mean 'runtime_dir'"),
    ([], "no address"),
])
def test_wrong_config_says_what_is_wrong(overrides: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        load_config(None, overrides)
