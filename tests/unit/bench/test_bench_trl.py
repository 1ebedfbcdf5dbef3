"""TRL's path through colocated vLLM, with a vLLM that answers at once: what it is asked is what a GPU will be asked."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState

from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

import trl.generation.vllm_generation as vllm_generation  # noqa: E402

from rollplex.bench import trl_run  # noqa: E402
from rollplex.bench.checkpoint import build_checkpoint  # noqa: E402
from rollplex.bench.videos import build_workload  # noqa: E402

pytestmark = pytest.mark.slow

VIDEO_PAIRS = 8
LENGTHS = [[[3, 1], [5, 8]], [[2, 2], [7, 4]]]
IMAGE_PAD = 312


class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

    def clone(self):
        return SamplingParams(**self.__dict__)


class FakeLlm:
    """Remembers what it was asked; a response is as many 7s as its limit allows."""

    asked: list[tuple[list, list]] = []
    slept = 0

    def __init__(self, **options):
        FakeLlm.options, FakeLlm.asked, FakeLlm.slept = options, [], 0
        model = SimpleNamespace(load_weights=list)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level):
        FakeLlm.slept += 1

    def wake_up(self, tags):
        """Nothing sleeps here."""

    def reset_prefix_cache(self):
        """There is none."""

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        FakeLlm.asked.append((prompts, sampling_params))
        logprob = {7: SimpleNamespace(logprob=-1.0, rank=1)}
        return [SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[SimpleNamespace(
            token_ids=[7] * options.max_tokens, logprobs=[logprob] * options.max_tokens)])
            for prompt, options in zip(prompts, sampling_params, strict=True)]


@pytest.fixture(autouse=True)
def as_before():
    """Colocated, TRL names this process a rank in its environment, and accelerate then opens a process group: neither is to
    reach the next test."""
    environment, open_before = dict(os.environ), dist.is_initialized()
    yield
    os.environ.clear()
    os.environ.update(environment)
    if dist.is_initialized() and not open_before:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def job(tmp_path, monkeypatch):
    build_checkpoint(tmp_path / "checkpoint", "tiny", seed=0, device="cpu")
    workload = build_workload(tmp_path / "videos", tmp_path / "checkpoint", prompt_tokens=200, groups=2, seed=0)
    real = trl_run.GRPOConfig
    monkeypatch.setattr(trl_run, "GRPOConfig", lambda **options: real(**options | {
        "bf16": False, "use_cpu": True, "optim": "adamw_torch"}))
    monkeypatch.setattr(vllm_generation, "LLM", FakeLlm, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *_: True)
    return {"device": "cuda", "checkpoint": str(tmp_path / "checkpoint"), "videos": workload["videos"],
            "texts": workload["texts"], "samples": 2, "iterations": 2, "lengths": LENGTHS, "max_response": 12,
            "prompt_tokens": 200, "kl_coef": 0.0, "seed": 0, "learning_rate": 1e-6, "batch": 2, "vllm_share": 0.35,
            "vllm_options": {"enforce_eager": True},
            "reward": "rollplex_client.bench.reward:count_reward", "out": str(tmp_path / "out")}


def test_vllm_is_asked_for_every_sample_s_length_and_expands_placeholders_itself(job):
    result = trl_run.run(job)
    assert FakeLlm.options["gpu_memory_utilization"] == 0.35
    assert FakeLlm.options["enable_sleep_mode"] is FakeLlm.options["enforce_eager"] is True
    assert FakeLlm.slept >= 2
    assert len(FakeLlm.asked) == 2
    for (prompts, options), lengths in zip(FakeLlm.asked, LENGTHS, strict=True):
        assert [item.max_tokens for item in options] == [length for row in lengths for length in row]
        assert all(item.ignore_eos and not item.detokenize for item in options)
        assert [prompt["prompt_token_ids"].count(IMAGE_PAD) for prompt in prompts] == [
            len(prompt["multi_modal_data"]["image"]) for prompt in prompts] == [VIDEO_PAIRS] * 4
    assert len(result["steps_s"]) == len(result["generate_s"]) == 2
    assert all(norm > 0 for norm in result["grad_norms"])
    assert result["weights_dtype"] == "torch.float32"


def test_what_is_known_is_kept_after_every_step(job):
    kept = []
    trl_run.run(job | {"kl_coef": 0.04}, lambda result: kept.append(len(result["steps_s"])))
    assert kept == [1, 2]


def test_a_forward_pass_without_images_is_an_error():
    """TRL may go on without them where tokens and images do not match."""
    with pytest.raises(RuntimeError, match="dropped the images"):
        trl_run.Rollout._with_images(lambda **inputs: None, pixel_values=None)


def test_a_trainer_with_other_lengths_is_found_out(job, monkeypatch):
    monkeypatch.setattr(trl_run.Rollout, "_lengths", lambda self: [3, 1, 5, 9])
    with pytest.raises(RuntimeError, match=r"not of \[3, 1, 5, 8\]"):
        trl_run.run(job)


def test_samples_that_no_micro_batch_divides_are_refused(job):
    with pytest.raises(ValueError, match="no multiple of the micro-batch of 3"):
        trl_run.make_config(job | {"batch": 3})
