"""How fast the model's parts are on one GPU: prefix and suffix, forward and backward, published shapes, random weights.

    PYTHONPATH=services:protos/gen:. python benchmarks/kernels/model_speed.py --model Qwen2.5-VL-7B --out OUT.json

TFLOP/s counts two operations a multiply-add of matrices and attention (causal: half of it), forward; a backward pass counts
twice that, and recomputation is not counted. Without a GPU the same code runs on the CPU, for a small model (--layers).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rollplex.model import (
    ActorLayout,
    ModelConfig,
    PromptInputs,
    VisionLanguageModel,
    destroy_tensor_parallel,
    init_tensor_parallel,
    pack_groups,
    pack_responses,
    prefix_forward,
    prefix_pass,
    read_model_config,
    suffix_forward,
    token_logprobs,
)

PUBLISHED = Path(__file__).parents[2] / "services" / "rollplex" / "model" / "published"
TEXT_TOKENS = 96
"""Of a prompt beside its video."""
FRAME = (28 * 12, 28 * 16)
"""Height and width of a video's frames: 192 features a pair of frames."""


def load_config(name: str, layers: int | None) -> ModelConfig:
    raw = json.loads((PUBLISHED / f"{name}.json").read_text())
    if layers:
        raw.get("text_config", raw)["num_hidden_layers"] = layers
        raw["vision_config"] |= {"depth": layers, "fullatt_block_indexes": [layers - 1]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_model_config(Path(folder))


def build_model(config: ModelConfig, device: str) -> VisionLanguageModel:
    """Random weights scaled so that activations keep their size."""
    layout = ActorLayout.build(config, 1, "bfloat16")
    slab = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
    model = VisionLanguageModel(config, torch.bfloat16, device, layout=layout)
    model.bind(layout.training_views(layout.views(slab)))
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if "norm" in name or "ln_q" in name else 0.0)
            else:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return model


def make_prompt(config: ModelConfig, prompt_tokens: int) -> PromptInputs:
    """A video of as many frames as come nearest to `prompt_tokens`, between two stretches of text."""
    unit = config.spatial_merge_size
    height, width = (side // config.vision.patch_size for side in FRAME)
    features = height * width // unit**2
    steps = max(1, round((prompt_tokens - TEXT_TOKENS - 2) / features))
    rng = np.random.default_rng(0)
    half = rng.integers(1000, 20000, TEXT_TOKENS // 2)
    video = [config.vision_start_token_id, *[config.video_token_id] * (steps * features), config.vision_end_token_id]
    patches = steps * height * width
    pixels = rng.standard_normal((patches, 3 * config.vision.temporal_patch_size * config.vision.patch_size**2), dtype=np.float32)
    return PromptInputs.from_arrays(config, token_ids=np.concatenate([half, video, half]), pixel_values_videos=pixels,
                                    video_grid_thw=np.array([[steps, height, width]]), second_per_grid_ts=np.ones(1))


def decoder_flop(config: ModelConfig, tokens: int, pairs: float, *, head: bool) -> float:
    """Forward, `pairs` = (query, key) pairs that attention looks at; without the last layer's part after its keys and values
    when there is no head: a prefix stops there."""
    hidden, size = config.hidden_size, config.head_size
    keys_values = 2 * hidden * config.kv_head_count * size
    rest = 2 * hidden * config.head_count * size + 3 * hidden * config.intermediate_size
    layers = config.layer_count - (not head)
    matrices = config.layer_count * keys_values + layers * rest
    logits = hidden * config.vocab_size if head else 0
    return 2 * tokens * (matrices + logits) + layers * 4 * pairs * config.head_count * size


def tower_flop(config: ModelConfig, grid: np.ndarray) -> float:
    """Windows and full attention over whole frames, patch embedding and merger included."""
    vision = config.vision
    frames, height, width = grid
    patches, width_V, unit = int(frames * height * width), vision.hidden_size, config.spatial_merge_size**2
    block = 2 * patches * (4 * width_V**2 + 3 * width_V * vision.intermediate_size)
    window = (vision.window_size // vision.patch_size) ** 2
    full = len(vision.fullatt_block_indexes)
    attention = 4 * width_V * patches * (full * height * width + (vision.depth - full) * min(window, height * width))
    embed = 2 * patches * width_V * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merged = width_V * unit
    merger = 2 * (patches // unit) * (merged * merged + merged * vision.out_hidden_size)
    return vision.depth * block + attention + embed + merger


class Clock:
    """Seconds of one call, mean of `repeats` after warm-up, the device idle before and after."""

    def __init__(self, device: str, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def __call__(self, work: Callable[[], object], warmups: int = 2) -> float:
        for _ in range(warmups):
            work()
        self._wait()
        started = time.perf_counter()
        for _ in range(self._repeats):
            work()
        self._wait()
        return (time.perf_counter() - started) / self._repeats

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def host_waits(work: Callable[[], object]) -> list[str]:
    """Where the host waits for the GPU during `work`, by torch's own warnings."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{Path(item.filename).name}:{item.lineno}" for item in seen if "synchroniz" in str(item.message)})


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = Clock(device, arguments.repeats)
    config = load_config(arguments.model, arguments.layers)
    model = build_model(config, device)
    inputs = make_prompt(config, arguments.prompt_tokens).to(device)
    boundary_tokens = inputs.token_count - 1
    drawn = np.random.default_rng(1).lognormal(np.log(arguments.response_tokens), 0.6, arguments.samples)
    lengths = np.clip(drawn.astype(int), 1, arguments.max_response_tokens).tolist()
    responses = [torch.randint(1000, 20000, (length,), device=device) for length in lengths]
    packed = pack_responses(inputs.last_token, responses, inputs.suffix_position)
    total = sum(lengths)
    grid = inputs.video_grid_thw[0].numpy()
    prefix_flop = decoder_flop(config, boundary_tokens, boundary_tokens**2 / 2, head=False)
    vision_flop = tower_flop(config, grid)
    suffix_flop = decoder_flop(config, total, total * boundary_tokens + sum(n * n / 2 for n in lengths), head=True)
    found: dict[str, object] = {
        "model": arguments.model, "layers": config.layer_count, "prompt_tokens": inputs.token_count,
        "video_grid": grid.tolist(), "response_tokens": lengths, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }

    def report(name: str, seconds: float, flop: float) -> None:
        found[name] = {"seconds": round(seconds, 5), "tflops": round(flop / seconds / 1e12, 1)}
        print(f"{name:34} {seconds * 1e3:9.1f} ms {flop / seconds / 1e12:8.1f} TFLOP/s", flush=True)

    pixels = inputs.pixel_values_videos
    on_device = PromptInputs(**{**vars(inputs), "pixel_values_videos": pixels.to(device, torch.bfloat16)})
    with torch.no_grad():
        report("prefix forward, pixels on device", clock(lambda: prefix_forward(model, on_device)), prefix_flop + vision_flop)
        report("prefix forward, pixels on host", clock(lambda: prefix_forward(model, inputs)), prefix_flop + vision_flop)
        text = PromptInputs.from_arrays(config, token_ids=np.arange(1000, 1000 + inputs.token_count)).to(device)
        report("prefix forward, text alone", clock(lambda: prefix_forward(model, text)), prefix_flop)
        boundary = prefix_forward(model, on_device)
        report("suffix scoring", clock(lambda: token_logprobs(model, suffix_forward(model, [boundary], packed), packed.targets)),
               suffix_flop)
    if device == "cuda":
        with torch.no_grad():
            found["host_waits_prefix"] = host_waits(lambda: prefix_forward(model, on_device))
        print("the prefix's host waits:", found["host_waits_prefix"])

    def profiled(work: Callable[[], object], name: str) -> None:
        """What takes most of `work`, on stdout: kernels; and operations on the host, in a second pass, which this slows."""
        if not arguments.profile or device == "cpu":
            return
        kinds = torch.profiler.ProfilerActivity
        for activities, column in (([kinds.CUDA], "cuda_time_total"), ([kinds.CPU, kinds.CUDA], "self_cpu_time_total")):
            with torch.profiler.profile(activities=activities) as profile:
                work()
                torch.cuda.synchronize()
            print(name, column, profile.key_averages().table(sort_by=column, row_limit=18, max_name_column_width=70), sep="\n")

    with torch.no_grad():
        profiled(lambda: prefix_forward(model, on_device), "prefix forward")
        profiled(lambda: token_logprobs(model, suffix_forward(model, [boundary], packed), packed.targets), "suffix scoring")

    def backward(saved: str, groups: int = 1) -> None:
        attached = prefix_pass(model, [on_device] * groups, saved=saved)
        together = pack_groups([packed] * groups)
        hidden = suffix_forward(model, attached.boundaries, together)
        token_logprobs(model, hidden, together.targets)[0].sum().backward()
        attached.backward()

    def train(saved: str, groups: int = 1) -> None:
        backward(saved, groups)
        model.zero_grad(set_to_none=True)

    def repeated() -> dict[str, float]:
        """How far the gradients of two passes over the same numbers are apart, of their norm, and how many are equal."""
        passes: list[dict[str, torch.Tensor]] = []
        for _ in range(2):
            backward("recompute")
            passes.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad(set_to_none=True)
        first, second = passes
        squares = [((first[name] - second[name]).double().square().sum(), first[name].double().square().sum()) for name in first]
        apart, whole = (float(torch.stack(column).sum()) ** 0.5 for column in zip(*squares))
        return {"relative_difference": apart / whole, "parameters": len(first),
                "equal": sum(torch.equal(first[name], second[name]) for name in first)}

    def peak_gib(work: Callable[[], object]) -> float | None:
        if device == "cpu":
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)

    model.requires_grad_(True)
    for saved in ("recompute", "offload", "from_inputs") if arguments.all_modes else ("recompute",):
        for groups in arguments.groups_per_pass:
            work = partial(train, saved, groups)
            which = saved if groups == 1 else f"{saved}, {groups} a pass"
            seconds = clock(work, warmups=1) / groups
            report(f"one group's training, {which}", seconds, 3 * (prefix_flop + vision_flop + suffix_flop))
            found[f"peak_gib_{which}"] = peak_gib(work)
    found["repeated_gradients"] = repeated()
    print("gradients of two passes:", found["repeated_gradients"], flush=True)
    profiled(lambda: train("recompute"), "one group's training")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen2.5-VL-7B", help="a name in services/rollplex/model/published")
    parser.add_argument("--layers", type=int, help="of decoder and tower, instead of the published numbers")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=225, help="median of a log-normal distribution")
    parser.add_argument("--max-response-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups-per-pass", type=int, nargs="+", default=[1], help="train with so many groups in one pass")
    parser.add_argument("--all-modes", action="store_true", help="train with every way of saving activations")
    parser.add_argument("--profile", action="store_true", help="also print the slowest kernels and host operations")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    init_tensor_parallel(0, 1)
    try:
        found = measure(arguments)
    finally:
        destroy_tensor_parallel()
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
