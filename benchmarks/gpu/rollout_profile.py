"""Where rollout's time goes on vLLM: one process, no mesh, a published shape, dummy weights, prompts that are mostly video.

    PYTHONPATH=services:protos/gen:. python benchmarks/gpu/rollout_profile.py --shape 3b
    PYTHONPATH=services:protos/gen:. python benchmarks/gpu/rollout_profile.py \\
        --shape tiny --prompt-tokens 300 --groups 4 --responses 8:16

Prefill and decode, each three times: as it is (time, steps, tokens a step, samples a step, media that the tower computed), under
cProfile (the host by function), under torch's profiler (how long the device was busy, its time by kernel). Frames, requests,
scheduling, sampling and the way back are the engine's own code; only the slab is not there.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from fake_session import FakeSession  # noqa: E402
from tiny_checkpoint import MEDIA, PromptMaker  # noqa: E402

from rollplex.bench.checkpoint import SHAPES, SMALL, TINY, describe_checkpoint  # noqa: E402
from rollplex.bench.videos import LEAST_TEXT, choose_clips, fill_text  # noqa: E402
from rollplex.core import work  # noqa: E402
from rollplex.core.config import MeshSection, ModelSection  # noqa: E402
from rollplex.core.ids import sample_seed  # noqa: E402
from rollplex.data.processor import PromptProcessor  # noqa: E402
from rollplex.engine.prompts import PromptReader  # noqa: E402
from rollplex.model import read_model_config  # noqa: E402
from rollplex.rollout import vllm_internals  # noqa: E402
from rollplex.rollout.config import RolloutConfig, RolloutSection, VllmSection  # noqa: E402
from rollplex.rollout.engine import SeededGroup, Tally  # noqa: E402

vllm_internals.set_environment(300)
from vllm import EngineArgs  # noqa: E402

from rollplex.rollout import vllm_engine  # noqa: E402
from rollplex.rollout.vllm_options import engine_options  # noqa: E402

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
# vLLM's attention on a CPU has no heads of 16.
SMALL["tiny"] = TINY | {"num_attention_heads": 2, "num_key_value_heads": 1,
                        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}


class Alone(vllm_engine.VllmEngine):
    """Keys and values stay, and no broker is asked."""

    def unbind(self) -> None:
        """Nothing is mapped."""

    def release_kv(self) -> int:
        self._drop_caches()
        return 0

    def _start(self) -> None:
        self._group.start()
        self._group.engine.apply_model(vllm_internals.align_tower)
        self._kv_backed = True

    def _back_kv(self) -> None:
        """They are."""


def dummy_arguments(config: RolloutConfig, replica: int, max_tokens: int) -> EngineArgs:
    vllm_internals.keep_embeddings_tied()
    options = engine_options(config, max_tokens, on_gpu=ON_GPU) | vllm_internals.pixels_as_given()
    return EngineArgs(**options, load_format="dummy")


class Context:
    """work.WorkContext of a generation that nobody watches."""

    aborted = False

    def progress(self, done_count: int, total_count: int, unit: str) -> None: ...

    def samples(self, samples: Sequence[work.FinishedSample]) -> None: ...

    def check(self) -> None: ...


class Watched(Tally):
    """Calls `entered(what)` and `left(what, seconds)` around prefill's and decode's steps."""

    entered: Callable[[str], None] = staticmethod(lambda what: None)
    left: Callable[[str, float], None] = staticmethod(lambda what, seconds: None)

    @contextmanager
    def timed(self, what: Any) -> Iterator[None]:
        self.entered(what)
        began = time.perf_counter()
        try:
            with super().timed(what):
                yield
        finally:
            self.left(what, time.perf_counter() - began)


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        describe_checkpoint(folder, options.shape, dtype=DTYPE)
        mean, self.longest = (int(part) for part in options.responses.split(":"))
        self.lengths = f"lognormal:{mean}:{self.longest}"
        limit = options.prompt_tokens + self.longest + 64
        settings = VllmSection(kv_cache_gib=options.kv_cache_gib, max_num_batched_tokens=options.step_tokens,
                               max_model_len=options.max_model_len or limit)
        config = RolloutConfig(
            model=ModelSection(checkpoint=folder, dtype=DTYPE),
            mesh=MeshSection(runtime_dir=folder, devices="cuda" if ON_GPU else "host"),
            rollout=RolloutSection(engine="vllm", max_rows=options.max_rows, vllm=settings))
        model = read_model_config(folder)
        self.session = FakeSession()
        processor = PromptProcessor.load(folder, max_prompt_tokens=2 * options.prompt_tokens + 4096)
        vllm_engine.engine_args = dummy_arguments
        reader = PromptReader(self.session, processor, model, "cuda:0" if ON_GPU else "cpu")
        self.engine = Alone(self.session, reader, model, config, 0)
        self.steps: list[tuple[int, int, int]] = []
        self._count_steps()
        self.groups = self._prompts(processor)

    def _prompts(self, processor: PromptProcessor) -> list[SeededGroup]:
        wanted, maker = self.options.prompt_tokens, PromptMaker(processor, self.session.add)
        MEDIA["profile"] = (("video", (2, 2 * processor.factor, 2 * processor.factor)),)
        fixed = len(maker.group("profile", text="x").token_ids) - 4
        clips = choose_clips(wanted - fixed - LEAST_TEXT, processor.factor)
        MEDIA["profile"] = (("video", (clips.frames, clips.height, clips.width)),)
        text = fill_text(lambda candidate: len(maker.group("profile", text=candidate).token_ids), wanted)
        made = []
        for index in range(self.options.groups):
            group = maker.group("profile", index, text=text.replace("0000", f"{index:04d}", 1), samples=self.options.samples)
            seeds = [sample_seed(0, 0, index, sample) for sample in range(self.options.samples)]
            made.append(SeededGroup(group, np.array(seeds, dtype=np.uint64)))
        media = sum(token == processor.video_token_id for token in made[0].group.token_ids)
        print(f"{len(made)} prompts of {len(made[0].group.token_ids)} tokens, {media} of them video, "
              f"{self.options.samples} samples each", flush=True)
        return made

    def _count_steps(self) -> None:
        scheduler = self.engine._group.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any) -> Any:
            output = schedule(*args)
            self.steps.append((output.total_num_scheduled_tokens, len(output.num_scheduled_tokens),
                               sum(map(len, output.scheduled_encoder_inputs.values()))))
            return output

        scheduler.schedule = counted

    def generate(self, responses: str, tally: Watched | None = None, groups: int = 0) -> Watched:
        chosen = self.groups[:groups or None]
        if responses == "prefill":
            sampling = work.Sampling(1.0, 1)
        else:
            sampling = work.Sampling(1.0, self.longest, length_distribution=self.lengths)
        tally = tally or Watched(Context(), [seeded.group for seeded in chosen])
        self.steps.clear()
        self.engine.generate(chosen, sampling, tally)
        self.engine.release_kv()
        return tally

    def watched(self) -> Watched:
        return Watched(Context(), [seeded.group for seeded in self.groups])

    def as_it_is(self) -> None:
        spent: dict[str, list[float]] = defaultdict(list)
        tally = self.watched()
        tally.left = lambda what, seconds: spent[what].append(seconds)
        self.generate("all", tally)
        prompt = sum(len(seeded.group.token_ids) for seeded in self.groups)
        prefill = [step for step in self.steps if step[0] > step[1]]
        decode = [step for step in self.steps if step[0] and step[0] == step[1]]
        print(f"\nprefill {tally.seconds['prefill']:.3f} s: {prompt} tokens of prompts; "
              f"scheduled {sum(step[0] for step in prefill)} tokens in {len(prefill)} steps, "
              f"media computed {sum(step[2] for step in self.steps)} times")
        print("  tokens, samples, media of each: " + ", ".join("/".join(map(str, step)) for step in prefill))
        count, seconds = max(1, tally.decode_steps), tally.seconds["decode"]
        print(f"decode {seconds:.3f} s: {tally.decode_steps} steps, {1e3 * seconds / count:.2f} ms each "
              f"(median {1e3 * statistics.median(spent['decode'] or [0.0]):.2f}), {tally.decode_rows / count:.1f} rows; "
              f"{len(decode)} steps were scheduled without prompt tokens", flush=True)

    def host(self) -> None:
        """cProfile slows Python down several times: shares count, not seconds."""
        profiles = {"prefill": cProfile.Profile(), "decode": cProfile.Profile()}
        tally = self.watched()
        tally.entered = lambda what: profiles[what].enable()
        tally.left = lambda what, seconds: profiles[what].disable()
        self.generate("all", tally)
        for what, profile in profiles.items():
            for order, lines in (("tottime", 40), ("cumulative", 40)):
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats(order).print_stats(lines)
                print(f"\n--- host, {what}, by {order}")
                print("\n".join(shortened(line) for line in text.getvalue().splitlines() if line.strip())[-9000:], flush=True)

    def device(self) -> None:
        activity = torch.profiler.ProfilerActivity.CUDA if ON_GPU else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            began = time.perf_counter()
            self.generate("prefill")
            wall = synchronized(began)
        report("prefill", profiler, wall, len(self.steps))
        tally, profiler, marks = self.watched(), torch.profiler.profile(activities=[activity]), []

        def entered(what: str) -> None:
            if what == "decode" and not marks:
                profiler.start()
                marks.append(time.perf_counter())

        def left(what: str, seconds: float) -> None:
            if what == "decode" and tally.decode_steps == self.options.device_steps:
                marks.append(synchronized(marks[0]))
                profiler.stop()

        tally.entered, tally.left = entered, left
        self.generate("all", tally)
        if len(marks) == 1:
            marks.append(synchronized(marks[0]))
            profiler.stop()
        report("decode", profiler, marks[1], min(self.options.device_steps, tally.decode_steps))


def synchronized(began: float) -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def shortened(line: str) -> str:
    for part in ("site-packages/", "services/"):
        before, found, after = line.partition(part)
        if found:
            return before[: before.rfind(" ") + 1] + after
    return line[:170]


def report(what: str, profiler: Any, wall: float, steps: int) -> None:
    """How long the device did anything at all, and what."""
    kind = torch.autograd.DeviceType.CUDA if ON_GPU else torch.autograd.DeviceType.CPU
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                   if event.device_type == kind and event.time_range.end > event.time_range.start)
    busy, until, total, count = 0.0, -1.0, Counter(), Counter()
    for start, end, name in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        total[name] += end - start
        count[name] += 1
    print(f"\n--- device, {what}: busy {busy / 1e6:.3f} s of {wall:.3f} s ({busy / 1e4 / wall:.0f}%), {steps} steps, "
          f"{len(spans)} kernels and copies; ms a step {busy / 1e3 / max(1, steps):.2f} of {1e3 * wall / max(1, steps):.2f}")
    for name, microseconds in total.most_common(40):
        print(f"{microseconds / 1e3:9.2f} ms {count[name]:7d} x {microseconds / count[name]:9.1f} us  {name[:120]}")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--responses", default="225:1024", metavar="MEAN:MAX")
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=0, help="0: a prompt and the longest response")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0 if ON_GPU else 0.25)
    parser.add_argument("--device-steps", type=int, default=60, help="decode steps under torch's profiler")
    parser.add_argument("--parts", default="as_it_is,host,device", help="in this order")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
        bench.generate("prefill")
        bench.generate("all", groups=3)
        print(f"warm after {time.perf_counter() - began:.1f} s", flush=True)
        for part in options.parts.split(","):
            getattr(bench, part)()
            print(f"[{time.perf_counter() - began:.1f} s]", flush=True)
        bench.engine._group.stop()
        bench.session.close()


if __name__ == "__main__":
    main()
