"""A benchmark's job with TRL's GRPOTrainer and vLLM colocated: `python -m rollplex.bench.trl_run JOB.json`.

TRL takes images, no videos. Every frame pair of a video becomes one image, which gives the model as many patches and tokens; the
text is cut by the two tokens that each further image brings. What is set and patched in TRL's favour is listed in `SETTINGS`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import torch
from PIL import Image

from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()  # before transformers' model code is imported

from datasets import Dataset  # noqa: E402
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback  # noqa: E402
from transformers.image_utils import make_flat_list_of_images  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

from rollplex.model import read_model_config  # noqa: E402
from rollplex.model.vision_block import Windows, window_attention  # noqa: E402

SETTINGS = {
    "precision": "float32 weights and AdamW state, bfloat16 autocast (TRL's default): the precision of Rollplex's masters",
    "media": "one image for every frame pair of the video, from memory; TRL has no videos",
    "lengths": "every sample's prescribed length, by a SamplingParams a request; TRL itself knows one limit for all",
    "vllm_prompts": "one placeholder an image: TRL 1.16 hands over expanded ones, which vLLM expands again (TRL issue 6294)",
    "detokenize": "off in vLLM, where it costs more than decoding; TRL decodes by itself",
    "importance_sampling": "vllm_importance_sampling_correction off: it costs a forward pass that Rollplex does not make",
    "vision_attention": "variable-length flash attention in the tower, where transformers without flash-attn loops over windows",
    "attention": "sdpa in the decoder, causal and without a mask, so by flash kernels: prompts are equally long, nothing is "
                 "padded on the left, and what is padded on the right is read by nobody",
    "processor": "every image once a batch: TRL hands the processor a group's images for each of its samples, twice",
    "optimizer": "adamw_torch_fused on a GPU", "gradient_checkpointing": "on"}


TOWER_ATTENTION = "bench_flash_windows"
"""transformers hands all windows over at once only to an implementation whose name contains "flash"."""


def use_tower_attention(model: torch.nn.Module) -> None:
    """Our tower's variable-length attention, in place of a loop over every window of every image."""
    AttentionInterface.register(TOWER_ATTENTION, _tower_attention)
    # Not set_attn_implementation: it takes any name with "flash" for a kernel to download.
    model.model.visual.config._attn_implementation = TOWER_ATTENTION


def _tower_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, *, scaling: float, cu_seq_lens_q: torch.Tensor, max_length_q: Any,
                     **_: Any) -> tuple[torch.Tensor, None]:
    """[1, h, S, d] -> [1, S, h, d]. Which type and device transformers has the offsets in depends on its version."""
    offsets = cu_seq_lens_q.to(query.device, torch.int32) if query.is_cuda else cu_seq_lens_q
    each = (part[0].transpose(0, 1) for part in (query, key, value))
    return window_attention(*each, Windows(offsets, int(max_length_q)), scaling)[None], None


DECODER_ATTENTION = "bench_causal"
"""transformers makes no mask for an implementation that it does not know."""


def use_causal_attention(model: torch.nn.Module) -> None:
    """The decoder's attention by flash kernels, which take no mask. For prompts of one length: see SETTINGS."""
    AttentionInterface.register(DECODER_ATTENTION, _causal_attention)
    model.model.language_model.config._attn_implementation = DECODER_ATTENTION


def _causal_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    # The keywords are packed positions and the like, of which sdpa has no use.
    return sdpa_attention_forward(module, query, key, value, None, dropout=options["dropout"], scaling=options["scaling"])


class EachImageOnce:
    """transformers' image processor, working on each image of a call once, however often it is in there."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: Any, **options: Any) -> Any:
        flat = make_flat_list_of_images(images)
        different = list({id(image): image for image in flat}.values())
        place = {id(image): index for index, image in enumerate(different)}
        done = self._inner(different, **options)
        order = [place[id(image)] for image in flat]
        grids = torch.as_tensor(done["image_grid_thw"])
        parts = torch.as_tensor(done["pixel_values"]).split(grids.prod(-1).tolist())
        done["pixel_values"], done["image_grid_thw"] = torch.cat([parts[index] for index in order]), grids[order]
        return done


class Clock(TrainerCallback):
    """Seconds of every optimizer step, generation and media included."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.steps_s: list[float] = []
        self._last_s, self._on_step = 0.0, on_step

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last_s = self._now_s()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now_s = self._now_s()
        self.steps_s.append(now_s - self._last_s)
        self._on_step()
        self._last_s = self._now_s()

    @staticmethod
    def _now_s() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()


class ForcedLengths(LogitsProcessor):
    """For transformers' generate: ends row b with the end token at length_B[b], and not before."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, end: Sequence[int]) -> None:
        self._lengths = torch.tensor(lengths)
        self._prompt_tokens, self._end = prompt_tokens, list(end)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        last_B = self._lengths <= input_ids.shape[1] - self._prompt_tokens + 1
        forced = scores.clone()
        forced[:, self._end] = -torch.inf
        forced[last_B] = -torch.inf
        forced[last_B, self._end[0]] = 0.0
        return forced


def frames_of(video: Path) -> list[Image.Image]:
    """Every second frame, as the tower sees frames in pairs."""
    with av.open(str(video)) as container:
        return [frame.to_image() for frame in container.decode(video=0)][::2]


def make_dataset(job: dict[str, Any]) -> Dataset:
    """Images come from memory: as a column they would be decoded again for each of a group's samples."""
    images = [frames_of(Path(video)) for video in job["videos"]]
    extra_tokens = 2 * (len(images[0]) - 1)
    texts = [text[: max(1, len(text) - extra_tokens)] for text in job["texts"]]
    rows = Dataset.from_dict({"index": list(range(len(texts))), "text": texts})

    def render(batch: dict[str, list]) -> dict[str, list]:
        return {"prompt": [[{"role": "user", "content": text}] for text in batch["text"]],
                "images": [images[index] for index in batch["index"]]}

    return rows.with_transform(render)


def no_vision_tokens(job: dict[str, Any]) -> dict[int, float]:
    """vLLM's logit_bias against them: random weights sample everything, and TRL would look for an image behind such a token."""
    return dict.fromkeys(read_model_config(Path(job["checkpoint"])).forbidden_token_ids, -100.0)


def make_config(job: dict[str, Any]) -> GRPOConfig:
    """One generation and one optimizer step an iteration."""
    on_gpu = job["device"] == "cuda"
    rows = len(job["videos"]) * job["samples"]
    batch = min(job["batch"], rows)
    if rows % batch:
        raise ValueError(f"{rows} samples an iteration are no multiple of the micro-batch of {batch}")
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": job["vllm_share"],
            "vllm_max_model_length": job["prompt_tokens"] + job["max_response"] + 64,
            "vllm_importance_sampling_correction": False,
            "generation_kwargs": {"ignore_eos": True, "detokenize": False, "logit_bias": no_vision_tokens(job)},
            } if on_gpu else {"use_vllm": False}
    return GRPOConfig(
        output_dir=job["out"], max_steps=job["iterations"], per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch, steps_per_generation=rows // batch, num_generations=job["samples"],
        max_completion_length=job["max_response"], temperature=1.0, top_p=1.0, top_k=0, beta=job["kl_coef"],
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch", bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=True,
        shuffle_dataset=False, seed=job["seed"], report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        log_multimodal=False, model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"}, **vllm)


def checked_reward(job: dict[str, Any], trainer_of: Callable[[], GRPOTrainer]) -> Callable[..., list[float]]:
    """The job's reward. Raises RuntimeError unless responses have their lengths."""
    module, _, name = job["reward"].partition(":")
    function = getattr(importlib.import_module(module), name)

    def reward(completions: Any, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        wanted = [length for row in job["lengths"][trainer_of().state.global_step] for length in row]
        if [len(ids) for ids in completion_ids] != wanted:
            raise RuntimeError(f"responses of {[len(ids) for ids in completion_ids]} tokens, not of {wanted}")
        return function(completions=completions, completion_ids=completion_ids)

    return reward


class Rollout:
    """Wraps what generates: prescribed lengths, prompts as vLLM takes them, and seconds."""

    def __init__(self, job: dict[str, Any], trainer: GRPOTrainer) -> None:
        self.generate_s: list[float] = []
        self.prompt_tokens: list[int] = []
        self._job, self._trainer = job, trainer
        self._wrap(trainer, "_get_per_token_logps_and_entropies", self._with_images)
        if job["device"] == "cuda":
            self._wrap(trainer.vllm_generation.llm, "generate", self._vllm)
            self._time(trainer.vllm_generation)
        else:
            self._wrap(trainer.model, "generate", self._transformers)
            self._time(trainer.model)

    @staticmethod
    def _with_images(inner: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """TRL goes on without any image where tokens and images do not match, and says nothing."""
        if inputs.get("pixel_values") is None:
            raise RuntimeError("TRL has dropped the images: the prompts' image tokens are not those of the images")
        return inner(*args, **inputs)

    def _note_prompts(self, counts: list[int]) -> None:
        self.prompt_tokens += counts
        if len(set(self.prompt_tokens)) > 1:
            raise RuntimeError(f"prompts of {sorted(set(self.prompt_tokens))} tokens; attention without a mask needs one length")

    def _lengths(self) -> list[int]:
        return [length for row in self._job["lengths"][self._trainer.state.global_step] for length in row]

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        setattr(owner, name, functools.partial(around, getattr(owner, name)))

    def _time(self, owner: Any) -> None:
        def timed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._measured():
                return inner(*args, **kwargs)

        self._wrap(owner, "generate", timed)

    @contextmanager
    def _measured(self):
        began = time.monotonic()
        yield
        self.generate_s.append(time.monotonic() - began)

    def _vllm(self, inner: Callable[..., Any], prompts: list[dict[str, Any]], *, sampling_params: Any, **options: Any) -> Any:
        image = self._trainer._image_pad_token_id
        for prompt in prompts:
            prompt["prompt_token_ids"] = collapsed(prompt["prompt_token_ids"], image)
        each = []
        for length in self._lengths():
            each.append(sampling_params.clone())
            each[-1].max_tokens = length
        outputs = inner(prompts, sampling_params=each, **options)
        self._note_prompts([len(output.prompt_token_ids) for output in outputs])
        return outputs

    def _transformers(self, inner: Callable[..., Any], **inputs: Any) -> Any:
        prompt_tokens = inputs["input_ids"].shape[1]
        self._note_prompts(inputs["attention_mask"].sum(1).tolist())
        forced = ForcedLengths(self._lengths(), prompt_tokens, self._trainer.eos_token_ids)
        return inner(**inputs, logits_processor=LogitsProcessorList([forced]))


def collapsed(token_ids: Sequence[int], placeholder: int) -> list[int]:
    """One placeholder for every run of them: vLLM repeats it by itself."""
    return [token for index, token in enumerate(token_ids)
            if token != placeholder or index == 0 or token_ids[index - 1] != placeholder]


def run(job: dict[str, Any], keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """`keep` gets what is known after every step: a time limit may end this process."""
    torch.set_num_threads(job.get("threads") or torch.get_num_threads())
    holder, config = [], make_config(job)
    clock = Clock(lambda: keep(known()))
    if job["vllm_options"]:
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **job["vllm_options"])
    trainer = GRPOTrainer(model=job["checkpoint"], reward_funcs=checked_reward(job, lambda: holder[0]), args=config,
                          train_dataset=make_dataset(job), callbacks=[clock])
    holder.append(trainer)
    for model in filter(None, (trainer.model, trainer.ref_model)):
        use_tower_attention(model)
        use_causal_attention(model)
    trainer.processing_class.image_processor = EachImageOnce(trainer.processing_class.image_processor)
    rollout = Rollout(job, trainer)

    def known() -> dict[str, Any]:
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {"steps_s": clock.steps_s, "generate_s": rollout.generate_s, "prompt_tokens": sorted(set(rollout.prompt_tokens)),
                "torch_peak_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
                "settings": SETTINGS, "vllm_options": job["vllm_options"], "micro_batch": config.per_device_train_batch_size,
                "weights_dtype": str(next(trainer.model.parameters()).dtype),
                "grad_norms": [entry["grad_norm"] for entry in logged], "rewards": [entry["reward"] for entry in logged],
                "config": json.loads(config.to_json_string())}

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return known()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())

    def keep(result: dict[str, Any]) -> None:
        new = Path(job["answer"]).with_suffix(".new")
        new.write_text(json.dumps(result) + "\n")
        new.replace(job["answer"])

    keep(run(job, keep))


if __name__ == "__main__":
    main()
