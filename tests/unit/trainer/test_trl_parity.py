"""TRL's GRPOTrainer, really run, as the oracle: same weights, completions and rewards give the same gradients.

TRL's trainer generates (patched to return our completions), computes advantages from a reward function, shuffles, and its
`training_step` does forward, loss and backward on transformers' own model, one padded row a sample. Ours goes through the
engine's prefix and suffix. The model is Qwen2.5-VL with text prompts; vision tokens lie above the vocabulary, so that no token
is forbidden on our side.

Tolerance: TRL projects to log-probabilities in float32 whatever the model's dtype (trl/kernels/chunked_logprob.py), so both
sides run in float32. A gradient entry is a sum of some 10^3 products, each rounded to 2^-24 = 6e-8, in another order: an error
of about sqrt(10^3) * 6e-8 = 2e-6 of the largest intermediate, times the condition of the layers above it. 2e-5 of the largest
entry of each parameter leaves a factor of ten.
"""

from __future__ import annotations

import itertools
import math
from array import array

import numpy as np
import pytest
import torch
from tiny_trainer import QUIET, VOCAB, DictBroker, build_hf, gradients, run_config

from rollplex.core import work
from rollplex.core.advantages import advantages as our_advantages
from rollplex.core.config import SamplingConfig

# isort: split
# After rollplex.model, which makes torchvision importable.
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 12
TOLERANCE = 2e-5
PROMPTS = ["red", "blue square"]
LENGTHS = [[3, 12, 1, 7], [5, 2, 9, 4]]
REWARDS = [[1.0, 0.25, None, 0.0], [0.9, 1.3, 0.1, 0.7]]


@pytest.fixture(scope="module")
def tokenizer():
    """Words "0" to "159" with their own ids; TRL needs one to pad and to show completions."""
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token="1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="1", eos_token="2")


@pytest.fixture(scope="module")
def completions() -> list[list[list[int]]]:
    rng = np.random.default_rng(3)
    return [[rng.integers(5, VOCAB, length).tolist() for length in lengths] for lengths in LENGTHS]


@pytest.fixture
def trl_trainer(tokenizer, completions, tmp_path):
    """build(old, **grpo) -> (trainer, dataset rows); `old` [group][sample]: old log-probabilities to be used, or None."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    flat = [ids for group in completions for ids in group]
    rewards = [reward for group in REWARDS for reward in group]

    def reward_by_completion(completion_ids, **_):
        return [rewards[flat.index(list(ids))] for ids in completion_ids]

    class Replaying(GRPOTrainer):
        """Completions and, where given, old log-probabilities come from the test."""

        old = None

        def _tokenize_prompts(self, prompts):
            return [prompt_ids(prompt) for prompt in prompts], None, {}

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            return [list(ids) for ids in flat], None

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.scored_advantages = output["advantages"].clone()
            if self.old is not None:
                padded = torch.zeros(output["completion_ids"].shape)
                for row, values in enumerate(value for group in self.old for value in group):
                    padded[row, :len(values)] = torch.tensor(values)
                output["old_per_token_logps"] = padded
            return output

    def build(old=None, **options):
        arguments = GRPOConfig(
            output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=1,
            max_completion_length=MAX_TOKENS, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_dropout=True, **options)
        rows = [{"prompt": prompt} for prompt in PROMPTS]
        trainer = Replaying(build_hf(torch.float32), reward_by_completion, arguments, processing_class=tokenizer,
                            train_dataset=Dataset.from_list(rows))
        trainer.old = old
        trainer.current_gradient_accumulation_steps = 1
        return trainer, [row for row in rows for _ in range(4)]

    return build


def prompt_ids(prompt: str) -> list[int]:
    """Any ids below the tiny vocabulary, of unequal lengths, so that TRL pads."""
    return [3 + ord(letter) % (VOCAB - 3) for letter in prompt]


def trl_gradients(trainer, rows) -> dict[str, torch.Tensor]:
    trainer.model.train()
    trainer.training_step(trainer.model, rows, None)
    return {name.removeprefix("model."): parameter.grad for name, parameter in trainer.model.named_parameters()}


def our_gradients(build_engine, completions, advantages, *, old=None, temperature=1.0, **loss) -> dict[str, torch.Tensor]:
    config = run_config(loss=loss, sampling=SamplingConfig(samples_per_group=4, max_response_tokens=MAX_TOKENS,
                                                           temperature=temperature))
    engine = build_engine(DictBroker(), torch.float32)
    engine.open_run(QUIET, "run", -1, config, False)
    engine.bind_snapshot(QUIET, 0)
    prompts, groups = [], []
    for index, prompt in enumerate(PROMPTS):
        prompts.append(work.PreparedGroup(index, array("q", prompt_ids(prompt)), sample_count=4))
        groups.append(work.ResponseGroup(index, tuple(
            work.ResponseSample(sample, array("q", ids), advantage=advantages[index][sample],
                                old_logprobs=None if old is None else array("f", old[index][sample]),
                                scored=REWARDS[index][sample] is not None)
            for sample, ids in enumerate(completions[index]))))
    count = sum(len(ids) for group in completions for ids in group)
    engine.materialize_prefix(QUIET, prompts)
    engine.train_suffix(QUIET, groups, work.LossScale(8, count, MAX_TOKENS))
    return gradients(engine)


def assert_equal_gradients(ours, theirs):
    compared = 0
    for name, found in ours.items():
        expected = theirs[name]
        if expected is None:
            assert not found.any(), name
            continue
        rows = expected.shape[0] if name.endswith(("embed_tokens.weight", "lm_head.weight")) else found.shape[0]
        assert not found[rows:].any(), f"{name}: padding"
        largest = float(expected.abs().max())
        torch.testing.assert_close(found[:rows], expected, rtol=0, atol=TOLERANCE * max(largest, 1e-6),
                                   msg=lambda message, name=name: f"{name}: {message}")
        compared += largest > 1e-6
    assert compared >= 2 * 9 + 3, "every decoder parameter but biases of keys must have been compared"


AGGREGATIONS = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def old_logprobs(completions, ratios, *, temperature: float = 1.0):
    """The model's own log-probabilities less the log of `ratios`, taken in turn."""
    model, turn = build_hf(torch.float64), itertools.cycle(ratios)
    old = []
    for prompt, group in zip(PROMPTS, completions):
        head = prompt_ids(prompt)
        old.append([])
        for ids in group:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([head + ids])).logits[0, len(head) - 1:-1] / temperature
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            old[-1].append([float(value) - math.log(next(turn)) for value in logp])
    return old


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("ratio", ["one", "forced"])
def test_gradients(trl_trainer, build_engine, completions, loss_type, ratio):
    """Unequal lengths and one None reward throughout. `dr_grpo` goes with TRL's scale_rewards=False."""
    old = old_logprobs(completions, (0.6, 0.75, 0.9, 1.1, 1.24, 1.3, 2.0)) if ratio == "forced" else None
    estimator = "dr_grpo" if loss_type == "dr_grpo" else "grpo"
    trainer, rows = trl_trainer(old, loss_type=loss_type, beta=0.0, epsilon=0.2, epsilon_high=0.28,
                                scale_rewards=estimator == "grpo")
    theirs = trl_gradients(trainer, rows)
    advantages = [our_advantages(rewards, estimator) for rewards in REWARDS]
    torch.testing.assert_close(torch.tensor(advantages).flatten(), trainer.scored_advantages, rtol=1e-5, atol=1e-6)
    ours = our_gradients(build_engine, completions, advantages, old=old, aggregation=AGGREGATIONS[loss_type],
                         clip_high=0.28)
    assert_equal_gradients(ours, theirs)


def test_sequence_ratio_and_temperature(trl_trainer, build_engine, completions):
    old = old_logprobs(completions, (0.8, 1.1, 1.3, 1.9, 1.4), temperature=0.7)
    trainer, rows = trl_trainer(old, loss_type="grpo", beta=0.0, importance_sampling_level="sequence", epsilon=0.2,
                                temperature=0.7)
    theirs = trl_gradients(trainer, rows)
    advantages = [our_advantages(rewards) for rewards in REWARDS]
    ours = our_gradients(build_engine, completions, advantages, old=old, aggregation="seq-mean-token-mean",
                         ratio_level="sequence", clip_low=0.2, clip_high=0.2, temperature=0.7)
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("rewards", [
    [1.0, 0.0, 0.5, 0.25], [1.0, None, 0.5, 0.25], [None, None, 1.0, 0.0], [None, None, 1.0, None], [None] * 4, [0.5] * 4,
], ids=str)
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_advantages_are_those_of_trl(rewards, estimator):
    """TRL's own lines (sum_then_normalize, one reward function) with its nanstd, whose n / (n - 1) is a float32: 6e-8."""
    from trl.trainer.utils import nanstd

    values = torch.tensor([[float("nan") if reward is None else reward for reward in rewards]], dtype=torch.float64)
    expected = values - torch.nanmean(values, dim=1, keepdim=True)
    if estimator == "grpo":
        expected = expected / (nanstd(values, dim=1, keepdim=True) + 1e-4)
    expected = torch.nan_to_num(expected, nan=0.0)[0]
    torch.testing.assert_close(torch.tensor(our_advantages(rewards, estimator), dtype=torch.float64), expected,
                               rtol=6e-8, atol=1e-12)
