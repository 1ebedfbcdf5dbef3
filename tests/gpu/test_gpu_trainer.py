"""The trainer on a GPU against itself on a CPU: gradients, the streamed update, crashes, memory. The same tests run on a CPU,
where they compare it with itself, so that nothing but the device is new on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_session import FakeSession
from gpu_marks import NEEDS_GPU, needs_gpu
from tiny_checkpoint import PromptMaker, tensor_parallel
from tiny_trainer import QUIET, DictBroker, build_hf, gradients, make_groups, open_engine, run_config, train
from update_steps import POINTS, Crash, crash_at, flat_update, masters, open_run, order

from rollplex.core.config import AblationConfig
from rollplex.core.errors import OutOfMemory
from rollplex.core.ids import actor_slab, state_slab
from rollplex.core.phases import Phase
from rollplex.data.device_patches import DevicePatches
from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor
from rollplex.engine import PromptReader, device_errors
from rollplex.memory.pinned_pool import PinnedPool
from rollplex.memory.transfer import to_device
from rollplex.model import (
    ActorLayout,
    VisionLanguageModel,
    load_into,
    prefix_forward,
    read_model_config,
)

GPU = pytest.param("cuda", marks=NEEDS_GPU)
DEVICES = ["host", GPU]
TORCH = {"host": "cpu", "cuda": "cuda:0"}
GRADIENTS = state_slab("run", 0, "gradients")


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    with tensor_parallel():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu-trainer") / "tiny"
    build_hf(torch.float64, width=64).save_pretrained(path)
    return path


@pytest.fixture
def engine_on(checkpoint) -> Iterator:
    """engine_on(devices, broker, dtype, gradients=...) -> engine. Building another on the same broker is a restart."""
    engines = []

    def build(devices, broker, dtype=torch.float32, gradients=""):
        for engine in [engine for engine in engines if engine._session is broker]:
            engines.remove(engine)
            engine.close()
        engines.append(open_engine(broker, checkpoint, dtype, devices=devices, gradients=gradients))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def numbers(engine) -> dict[str, torch.Tensor]:
    engine._state.gradients.settle()
    return {name: value.cpu() for name, value in gradients(engine).items()}


def actor_bytes(broker, devices) -> bytes:
    return broker.bytes_of(actor_slab("run", f"{devices}:0"))


def state_bytes(engine) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in masters(engine).items()}


def filled(engine, step: int, scale: float = 1.0) -> None:
    """Known gradients in place of a backward pass, whose sums differ between devices."""
    engine.materialize_prefix(QUIET, [])
    engine.measure_gradient(QUIET)
    generator = torch.Generator().manual_seed(step)
    flat = engine._state.gradients.flat
    flat.copy_(torch.randn(flat.shape, generator=generator) * scale)


def updated(engine, step: int):
    engine.quiesce(QUIET, True)
    result = engine.apply_update(QUIET, order(step))
    engine.bind_snapshot(QUIET, step)
    return result


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_is_loaded_to_the_same_bytes(engine_on, devices, dtype):
    """A float64 file: rounded to the master's float32 first, and from there to the actor's dtype, on either device."""
    host, broker = DictBroker(), DictBroker()
    expected = open_run(engine_on("host", host, dtype), run_config())
    found = open_run(engine_on(devices, broker, dtype), run_config())
    assert actor_bytes(broker, devices) == actor_bytes(host, "host")
    assert state_bytes(found) == state_bytes(expected)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("gradients", ["hbm", "host"])
@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_float32_gradients_equal_the_cpus(engine_on, devices, gradients, saved):
    """Sums in another order: 1e-7 an operation, some hundred of them; 1e-4 of the largest entry, as test_model_cuda allows."""
    prompts, responses = make_groups(count=3)
    expected_engine = open_run(engine_on("host", DictBroker()), run_config())
    expected_metrics = train(expected_engine, prompts, responses).metrics
    expected_norm = expected_engine.measure_gradient(QUIET).grad_norm
    engine = open_run(engine_on(devices, DictBroker(), gradients=gradients), run_config(saved_activations=saved))
    metrics = train(engine, prompts, responses).metrics
    found, expected = numbers(engine), numbers(expected_engine)
    largest = max(float(value.abs().max()) for value in expected.values())
    worst = max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest
    print(f"worst gradient error on {devices}, {saved}, gradients in {gradients}: {worst:.1e} of the largest entry")
    assert worst < 1e-4
    assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-4)
    assert engine.measure_gradient(QUIET).grad_norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("micro_batch_samples", [3, 8])
@pytest.mark.parametrize("devices", DEVICES)
def test_scores_equal_the_cpus(engine_on, devices, micro_batch_samples):
    prompts, responses = make_groups(count=2)
    scored = []
    for kind in ("host", devices):
        engine = open_run(engine_on(kind, DictBroker()), run_config(suffix_micro_batch_samples=micro_batch_samples))
        engine.materialize_prefix(QUIET, prompts)
        samples = engine.score_suffix(QUIET, responses, temperature=1.0, keep_boundaries=False).samples
        scored.append([(sample.group_index, sample.sample_index, list(sample.logprobs)) for sample in samples])
    for (*which, expected), (*same, found) in zip(*scored, strict=True):
        assert which == same and found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", ["hbm", "host"])
def test_updates_are_the_cpus_bit_for_bit(engine_on, devices, dtype, gradients):
    """Not 1 ulp: AdamW is written as single operations, each correctly rounded on both devices (IEEE +, -, *, / and sqrt; no
    fused multiply-add across kernels, no division by a number), and the cast rounds to nearest even on both."""
    config = run_config(optimizer={"chunk_elements": 3000})
    host, broker = DictBroker(), DictBroker()
    expected, found = engine_on("host", host, dtype), engine_on(devices, broker, dtype, gradients)
    for engine in (expected, found):
        open_run(engine, config)
        for step in (1, 2, 3):
            filled(engine, step, 10.0 ** -step)
            updated(engine, step)
    assert state_bytes(found) == state_bytes(expected)
    assert actor_bytes(broker, devices) == actor_bytes(host, "host")


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("ablation", ["no_state_offload", "unchunked_optimizer"])
def test_where_the_state_is_and_how_it_is_cut_change_no_update(engine_on, devices, ablation):
    found = []
    for chosen in (AblationConfig(), AblationConfig(**{ablation: True})):
        broker = DictBroker()
        engine = open_run(engine_on(devices, broker), run_config(ablation=chosen))
        for step in (1, 2):
            filled(engine, step)
            updated(engine, step)
        found.append((actor_bytes(broker, devices), {name: value.cpu() for name, value in masters(engine).items()}))
    (actor, expected), (other_actor, other) = found
    assert other_actor == actor and other.keys() == expected.keys()
    assert all(torch.equal(value, other[name]) for name, value in expected.items())


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("restart", [False, True], ids=["again", "restart"])
def test_an_interrupted_update_equals_the_unbroken_one(engine_on, devices, restart):
    config = run_config(optimizer={"chunk_elements": 9000})

    def second_update(interrupt):
        broker = DictBroker()
        engine = open_run(engine_on(devices, broker, torch.bfloat16), config)
        for step in (1, 2):
            filled(engine, step)
            if step == 1:
                updated(engine, step)
        engine.quiesce(QUIET, True)
        engine = interrupt(broker, engine)
        engine.apply_update(QUIET, order(2))
        return engine, actor_bytes(broker, devices), state_bytes(engine)

    engine, *expected = second_update(lambda broker, engine: engine)
    chunk_count = len(engine._state.layout.chunks)
    assert chunk_count >= 4
    for point in POINTS:
        for chunk in (0, 1, chunk_count - 1) if point != "finish_step" else (0,):
            def crash(broker, engine, point=point, chunk=chunk):
                with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
                    crash_at(patch, point, chunk)
                    engine.apply_update(QUIET, order(2))
                if restart:
                    engine = engine_on(devices, broker, torch.bfloat16)
                    engine.open_run(QUIET, "run", 1, config, True)
                return engine

            _, *found = second_update(crash)
            assert found == expected, (point, chunk)


@pytest.mark.parametrize("devices", DEVICES)
def test_device_peak_does_not_grow_with_the_model(devices):
    device, chunk_elements = TORCH[devices], 100_000 if devices == "host" else 1 << 20
    peaks = []
    for chunks in (8, 40):
        update, state, targets = flat_update(chunks * chunk_elements, chunk_elements, device)
        if devices == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            staging = update._pipeline._buffers.nbytes
            before = torch.cuda.memory_allocated() - staging
        began = time.perf_counter()
        result = update.run(order(1))
        rate = result.state_bytes / (time.perf_counter() - began) / 1e9
        print(f"{chunks} chunks on {devices}: {rate:.1f} GB/s in and out together")
        peaks.append((result.peak_state_bytes, torch.cuda.max_memory_allocated() - before if devices == "cuda" else 0))
        assert result.chunk_count == chunks
        for name, (target,) in targets.items():
            assert torch.equal(target.cpu(), state.master(name).bfloat16())
    (reported, measured), (same, later) = peaks
    print(f"peak of the update on {devices}: reported {reported:,}, measured {measured:,} and {later:,} bytes")
    assert reported == same
    if devices == "cuda":
        assert measured == later <= reported + (1 << 20)


@pytest.mark.parametrize("devices", DEVICES)
def test_an_update_without_a_model_is_the_cpus(devices):
    """Odd sizes, so that chunks end inside parameters and rows are no multiples of anything."""
    states = []
    for kind in ("host", devices):
        update, state, targets = flat_update(300_007, 10_001, TORCH[kind])
        for step in (1, 2):
            update.run(order(step))
        states.append((state._slots.clone(), [target.cpu() for (target,) in targets.values()]))
    (expected, expected_targets), (found, found_targets) = states
    assert torch.equal(found, expected)
    assert all(torch.equal(*pair) for pair in zip(found_targets, expected_targets))


@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_are_on_the_device_only_from_suffix_to_update(engine_on, devices):
    broker = DictBroker()
    engine = open_run(engine_on(devices, broker, gradients="hbm"), run_config())
    assert GRADIENTS not in broker.slabs
    train(engine, *make_groups())
    assert broker.slabs[GRADIENTS][0].device == f"{devices}:0"
    engine.measure_gradient(QUIET)
    updated(engine, 1)
    assert GRADIENTS not in broker.slabs


@pytest.mark.parametrize("devices", DEVICES)
def test_a_killed_trainers_state_is_taken_up(engine_on, devices):
    results = []
    for restart in (False, True):
        broker = DictBroker()
        engine = open_run(engine_on(devices, broker), run_config())
        filled(engine, 1)
        if restart:
            engine = engine_on(devices, broker)
            engine.open_run(QUIET, "run", 0, run_config(), True)
        else:
            engine.quiesce(QUIET, True)
        engine.apply_update(QUIET, order(1))
        results.append((actor_bytes(broker, devices), state_bytes(engine)))
    assert results[0] == results[1]


@pytest.mark.parametrize("devices", DEVICES)
def test_offloaded_tensors_come_back_as_they_were(devices):
    pool = PinnedPool(torch.zeros(8 << 20, dtype=torch.uint8, pin_memory=devices == "cuda"))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(257, 64, generator=generator).to(TORCH[devices], dtype)
               for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)]
    tensors.append(tensors[0].t())
    kept = [tensor.clone() for tensor in tensors]
    handles = [pool.put(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for expected in reversed(kept):
        handle = handles.pop()
        found = pool.get(handle)
        assert found.device == expected.device and torch.equal(found, expected)
        handle.free()
    assert pool.used_bytes == 0
    pool.close()


class TestWithoutWaiting:
    """torch reports every operation that makes the host wait for the GPU."""

    pytestmark = NEEDS_GPU

    @pytest.fixture
    def no_waiting(self, monkeypatch):
        """From the call to the command's end, where it may wait."""
        def finish_work(device):
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(device)

        monkeypatch.setattr("rollplex.trainer.engine.finish_work", finish_work)
        yield lambda: torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
    def test_prefixes_of_text(self, engine_on, no_waiting, saved):
        engine = open_run(engine_on("cuda", DictBroker()), run_config(saved_activations=saved))
        prompts, _ = make_groups(count=3)
        engine.materialize_prefix(QUIET, prompts)
        engine.quiesce(QUIET, False)
        no_waiting()
        engine.materialize_prefix(QUIET, prompts)

    @pytest.mark.parametrize("saved", ["keep", "recompute", "from_inputs"])
    def test_prefixes_with_media(self, tiny_checkpoint, no_waiting, saved):
        """From the slab to the boundary, the vision tower included; in bfloat16, as it is trained."""
        session, config = FakeSession(), read_model_config(tiny_checkpoint)
        processor = PromptProcessor.load(tiny_checkpoint, max_prompt_tokens=2048)
        prompts, reader = PromptMaker(processor, session.add), PromptReader(session, processor, config, "cuda:0")
        layout = ActorLayout.build(config, 1, "bfloat16")
        views = layout.training_views(layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device="cuda:0")))
        load_into(tiny_checkpoint, config, views)
        model = VisionLanguageModel(config, torch.bfloat16, "cuda:0")
        model.bind(views)
        groups = [prompts.group(kind, 1) for kind in ("image", "video", "mixed")]
        for group in groups:
            prefix_forward(model, reader.read(group), saved)
        no_waiting()
        boundaries = [prefix_forward(model, reader.read(group), saved) for group in groups]
        torch.cuda.set_sync_debug_mode("default")
        assert all(k.isfinite().all() and v.isfinite().all() for boundary in boundaries for k, v in boundary.layers)
        session.close()

    def test_reading_prompts_with_media(self, tiny_checkpoint, no_waiting):
        session = FakeSession()
        processor = PromptProcessor.load(tiny_checkpoint, max_prompt_tokens=2048)
        prompts, config = PromptMaker(processor, session.add), read_model_config(tiny_checkpoint)
        reader, host = PromptReader(session, processor, config, "cuda:0"), PromptReader(session, processor, config)
        no_waiting()
        groups = [prompts.group(kind, 1) for kind in ("text", "image", "video", "mixed")]
        found = [reader.read(group) for group in groups]
        hashes = [(inputs.hash(), inputs.last_token) for inputs in found]
        torch.cuda.set_sync_debug_mode("default")
        for group, inputs, (read_hash, last_token) in zip(groups, found, hashes):
            expected = host.read(group)
            assert (read_hash, last_token) == (expected.hash(), expected.last_token)
            for name in ("token_ids", "positions", "pixel_values_images", "pixel_values_videos"):
                value = getattr(expected, name)
                assert value is None or torch.equal(getattr(inputs, name).cpu(), value)
        session.close()


@pytest.mark.parametrize("devices", DEVICES)
def test_pixels_of_a_device_are_the_processors(tiny_checkpoint, devices):
    processor = PromptProcessor.load(tiny_checkpoint, max_prompt_tokens=2048)
    patches = DevicePatches(processor, lambda array: to_device(torch.from_numpy(array.copy()), TORCH[devices]))
    assert patches.exact == {"image": True, "video": True}
    rng = np.random.default_rng(0)
    items = [MediaItem("video", 0, (7, 112, 140, 3), 2.0, (), 7, None, ""),
             MediaItem("image", 0, (1, 84, 196, 3), None, (), 1, None, "")]
    frames = [rng.integers(0, 256, item.shape, np.uint8) for item in items]
    found, expected = patches.pixels(items, frames), processor.pixels(items, frames)
    for name in ("pixel_values_images", "pixel_values_videos"):
        assert torch.equal(getattr(found, name).cpu(), torch.from_numpy(getattr(expected, name)))


@needs_gpu
def test_a_full_device_is_our_error_and_leaves_the_process_usable():
    with pytest.raises(OutOfMemory, match=r"cuda:0 has no memory left in OVERLAP"), \
            device_errors(Phase.OVERLAP, "materialize_prefix", "cuda:0"):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0")
    assert torch.ones(3, device="cuda:0").sum() == 3
