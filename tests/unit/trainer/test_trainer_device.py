"""What a GPU changes in the trainer, as far as a CPU can show it: the lagging pipeline, its order of accesses, gradients that
visit the device or stay apart from it. tests/gpu/test_gpu_trainer.py runs the same on a GPU."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from stream_clocks import Clocks
from tiny_trainer import QUIET, DictBroker, make_groups, run_config, train
from update_steps import ACTOR, POINTS, Crash, crash_at, iterate, masters, open_run, order

from rollplex.core.config import OptimizerConfig
from rollplex.core.errors import BadInput, InternalError, OutOfMemory, WrongState
from rollplex.core.ids import state_slab
from rollplex.core.phases import Phase
from rollplex.engine import device_errors, use_device
from rollplex.memory.pinned_pool import PinnedPool, PoolTensor
from rollplex.memory.pool_stream import PoolStream
from rollplex.model import PromptInputs, Ranks
from rollplex.trainer import chunk_pipeline
from rollplex.trainer.chunk_pipeline import ChunkPipeline, CudaPipeline
from rollplex.trainer.host_sums import HostSums
from rollplex.trainer.optimizer_state import OptimizerState
from rollplex.trainer.update import StreamedUpdate

GRADIENTS = state_slab("run", 0, "gradients")


@pytest.fixture
def lagging(monkeypatch):
    """A GPU's order of steps, on a CPU."""
    monkeypatch.setattr("rollplex.trainer.update.pipeline_for",
                        lambda device, rows, elements, dtype, chunks: ChunkPipeline(rows, elements, dtype, device, lag=1))


@pytest.fixture
def apart(monkeypatch):
    """As if gradients lay in host memory beside a GPU: hooks add them piece by piece, the update loads them with the state."""
    monkeypatch.setattr("rollplex.trainer.gradients.lies_apart", lambda flat, device: True)
    monkeypatch.setattr("rollplex.trainer.gradients.PIECE_ELEMENTS", 500)
    monkeypatch.setattr("rollplex.trainer.host_sums.PIECE_ELEMENTS", 500)


def two_updates(engine_of, broker, dtype=torch.float32, **optimizer):
    engine = open_run(engine_of(broker, dtype), run_config(optimizer={"chunk_elements": 3000} | optimizer))
    norms = []
    for step in (1, 2):
        train(engine, *make_groups(seed=step))
        norms.append(engine.measure_gradient(QUIET).grad_norm)
        engine.quiesce(QUIET, True)
        engine.apply_update(QUIET, order(step))
        engine.bind_snapshot(QUIET, step)
    state = {name: value.numpy().tobytes() for name, value in masters(engine).items()}
    return broker.bytes_of(ACTOR), state, norms


@pytest.fixture
def expected(build_engine):
    return partial(two_updates, build_engine, DictBroker())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["lagging", "apart"])
def test_the_same_bits_in_a_gpus_order(build_engine, expected, how, dtype, request):
    before = expected(dtype)
    request.getfixturevalue(how)
    found = two_updates(build_engine, DictBroker(), dtype)
    assert found[:2] == before[:2]
    assert found[2] == pytest.approx(before[2], rel=1e-12)


@pytest.mark.parametrize("gradients", ["host", "hbm"])
@pytest.mark.parametrize("restart", [False, True], ids=["again", "restart"])
def test_crash_at_every_point_while_chunks_overlap(build_engine, lagging, restart, gradients):
    config = run_config(optimizer={"chunk_elements": 9000})
    build = partial(build_engine, gradients=gradients)

    def second_update(prepare):
        broker = DictBroker()
        engine = open_run(build(broker, torch.float32), config)
        iterate(engine, 1)
        train(engine, *make_groups(seed=2))
        engine.measure_gradient(QUIET)
        engine.quiesce(QUIET, True)
        engine = prepare(broker, engine)
        engine.apply_update(QUIET, order(2))
        state = {name: value.numpy().tobytes() for name, value in masters(engine).items()}
        return engine, broker.bytes_of(ACTOR), state

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
                    engine = build(broker, torch.float32)
                    engine.open_run(QUIET, "run", 1, config, True)
                return engine

            _, *found = second_update(crash)
            assert found == expected, (point, chunk)


class Logged(OptimizerState):
    """Flips are the host's; the state's slots are memory that streams read and write."""

    clocks: Clocks

    def flip(self, chunk, slot, optimizer_step):
        self.clocks.host_access(f"flip {chunk}", reads={("slot", self._slots[slot].data_ptr())})
        super().flip(chunk, slot, optimizer_step)


@pytest.mark.parametrize("broken", [None, "wait_written", "done", "computing", "begin"])
def test_no_two_accesses_of_one_buffer_are_unordered(build_engine, monkeypatch, broken):
    """On three streams; and the check sees it when any one of the pipeline's waits is missing."""
    clocks = Clocks()
    engine = open_run(build_engine(DictBroker(), torch.bfloat16), run_config(optimizer={"chunk_elements": 3000}))
    train(engine, *make_groups())
    engine.measure_gradient(QUIET)
    state, gradients = engine._state.optimizer, engine._state.gradients
    engine._actor.bind_for_update(1)
    state.__class__, state.clocks = Logged, clocks
    monkeypatch.setattr(chunk_pipeline.torch, "cuda", clocks)
    copy_rows, clip = chunk_pipeline._copy_rows, StreamedUpdate._compute

    def logged_copy(target, source):
        where = {"reads": {("slot", source[0].data_ptr())}, "writes": {("stage", target[0].data_ptr())}}
        if not isinstance(source, list):
            where = {"reads": {("stage", source[0].data_ptr())}, "writes": {("slot", target[0].data_ptr())}}
        clocks.access("copy", **where)
        copy_rows(target, source)

    monkeypatch.setattr(chunk_pipeline, "_copy_rows", logged_copy)
    monkeypatch.setattr("rollplex.trainer.update.adamw_", lambda *_, **__: clocks.access("adam", reads={"gradients"}))
    if broken == "computing":
        monkeypatch.setattr(CudaPipeline, "computing", lambda self, index: clocks.stream(self._computing))
    elif broken == "begin":
        monkeypatch.setattr(CudaPipeline, "begin", lambda self: None)
    elif broken:
        monkeypatch.setattr(CudaPipeline, broken, lambda self, index: None)
    monkeypatch.setattr(StreamedUpdate, "_compute", lambda self, index, work, order: _logged_stage(
        clocks, self, index, work, lambda: clip(self, index, work, order)))
    cast = StreamedUpdate._cast
    monkeypatch.setattr(StreamedUpdate, "_cast", lambda self, index, master: _logged_stage(
        clocks, self, index, master[None], lambda: cast(self, index, master)))
    monkeypatch.setattr("rollplex.trainer.update.pipeline_for",
                        lambda device, rows, elements, dtype, chunks: CudaPipeline(rows, elements, dtype, device))
    clocks.access("backward", writes={"gradients"})
    update = StreamedUpdate(state, gradients, engine._actor.targets(), OptimizerConfig(chunk_elements=3000))
    update.run(order(1))
    engine._actor.unbind()
    assert Counter(access.what for access in clocks.accesses)["copy"] == 2 * len(state.layout.chunks)
    assert bool(clocks.conflicts()) == (broken is not None), clocks.conflicts()[:3]


def _logged_stage(clocks, update, index, work, inner):
    """An access to the chunk's staging buffer on the stream that `computing` chooses."""
    pipeline = update._pipeline
    computing = type(pipeline).computing

    def logged(self, place):
        class Inside:
            def __enter__(inside):
                inside.context = computing(self, place)
                inside.context.__enter__()
                clocks.access(f"work on {place}", writes={("stage", work[0].data_ptr())})

            def __exit__(inside, *error):
                return inside.context.__exit__(*error)

        return Inside()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipeline), "computing", logged)
        return inner()


def test_gradients_visit_the_device_from_suffix_to_update(build_engine, expected):
    before = expected()
    broker = DictBroker()
    build = partial(build_engine, gradients="hbm")
    engine = open_run(build(broker, torch.float32), run_config(optimizer={"chunk_elements": 3000}))
    assert GRADIENTS not in broker.slabs
    prompts, responses = make_groups(seed=1)
    train(engine, prompts, responses)
    assert (broker.slabs[GRADIENTS][0].device, broker.slabs[GRADIENTS][0].object_class) == ("host:0", "gradients")
    engine.materialize_prefix(QUIET, [])
    assert GRADIENTS not in broker.slabs
    assert two_updates(build, broker) == before
    assert GRADIENTS not in broker.slabs
    engine = build(broker, torch.float32)
    engine.open_run(QUIET, "run", 2, run_config(optimizer={"chunk_elements": 3000}), True)
    with pytest.raises(WrongState, match="are gone"):
        engine.apply_update(QUIET, order(3))
    repeated = engine.apply_update(QUIET, order(2))
    assert repeated.state_bytes == 0 and broker.bytes_of(ACTOR) == before[0]


def test_a_norm_of_nothing_is_zero_and_may_be_applied(build_engine):
    engine = open_run(build_engine(DictBroker(), torch.float32, gradients="hbm"), run_config())
    engine.materialize_prefix(QUIET, [])
    assert engine.measure_gradient(QUIET).grad_norm == 0
    engine.apply_update(QUIET, order(1))


def test_host_sums_zero_and_add(monkeypatch):
    monkeypatch.setattr("rollplex.trainer.host_sums.PIECE_ELEMENTS", 7)
    sums, total = torch.full((20,), 3.0), HostSums(torch.device("cpu"))
    total.zero(sums)
    for _ in range(3):
        total.add(sums, torch.arange(20, dtype=torch.bfloat16))
    total.settle()
    assert torch.equal(sums, 3 * torch.arange(20.0))


@pytest.fixture
def clocks(monkeypatch):
    """Streams that are none, and tensors that note on which they are still used when they are dropped."""
    clocks = Clocks()
    monkeypatch.setattr(torch, "cuda", clocks)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: clocks.recorded.append(stream.name))
    clocks.recorded = []
    return clocks


def test_host_sums_beside_the_backward_pass_keep_a_bounded_backlog(clocks, monkeypatch):
    monkeypatch.setattr("rollplex.trainer.host_sums._BACKLOG_BYTES", 100)
    total = HostSums(torch.device("cpu"))
    total._stream = stream = clocks.Stream()
    sums, waited = torch.zeros(20), []
    monkeypatch.setattr(type(stream.record_event()), "synchronize", lambda event: waited.append(event))
    total.zero(sums)
    for _ in range(5):
        total.add(sums, torch.ones(20, dtype=torch.bfloat16))
    assert torch.equal(sums, torch.full((20,), 5.0)) and clocks.recorded == [stream.name] * 5
    assert len(waited) == 3 and total._waiting_bytes == 80
    total.settle()
    assert total._waiting_bytes == 0 and not total._waiting


def test_the_pools_stream_is_ordered_with_the_computing_one(clocks):
    computing, copies = clocks.current_stream(), PoolStream(torch.device("cpu"))
    clocks.access("forward")
    place, tensor = torch.zeros(3), torch.arange(3.0)
    copies.send(tensor, place)
    assert copies._stream.clock[computing.name] == 1, "after what computed the tensor"
    clocks.access("backward")
    with clocks.stream(copies._stream):
        clocks.access("copy")
    fetch = copies.fetch(place)
    assert copies._stream.clock[computing.name] == 2, "after what used the memory before"
    assert torch.equal(fetch.result(), tensor) and clocks.recorded == [copies._stream.name] * 2
    assert computing.clock[copies._stream.name] == 1, "computing goes on after the copy"
    copies.close()


class _Fetched:
    def __init__(self, view, log):
        self.tensor, self.log = view.clone(), log

    def result(self):
        self.log.append(("result", float(self.tensor[0])))
        return self.tensor


def test_fetching_one_tensor_sends_for_the_one_before_it():
    log, pool = [], PinnedPool(torch.zeros(4096, dtype=torch.uint8))

    class Stream:
        def fetch(self, view):
            log.append(("fetch", float(view[0])))
            return _Fetched(view, log)

    stream, handles = Stream(), []
    for value in range(3):
        offset = pool.allocate(16)
        view = pool._base[offset:offset + 16].view(torch.float32)
        view.fill_(value)
        handles.append(PoolTensor(pool, view, 16, offset, stream, handles[-1] if handles else None))
    for value in (2, 1, 0):
        assert torch.equal(pool.get(handles.pop()), torch.full((4,), float(value)))
    assert log == [("fetch", 2), ("fetch", 1), ("result", 2), ("fetch", 0), ("result", 1), ("result", 0)]
    assert pool.used_bytes == 0


def test_inputs_on_a_device_keep_what_the_host_reads(build_engine):
    engine = build_engine(DictBroker())
    inputs = PromptInputs.from_arrays(engine._model.config, token_ids=make_groups()[0][0].token_ids)
    moved = inputs.to("meta")
    assert moved.token_ids.is_meta and moved.positions.is_meta
    assert (moved.hash(), moved.last_token, moved.suffix_position) == (inputs.hash(), inputs.last_token, inputs.suffix_position)
    assert inputs.to("cpu").host_token_ids is None


@pytest.mark.parametrize(("error", "kind", "reason"), [
    (torch.OutOfMemoryError("Tried to allocate 2 GiB"), OutOfMemory, "OUT_OF_DEVICE_MEMORY"),
    (OSError(12, "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"), OutOfMemory, "OUT_OF_DEVICE_MEMORY"),
    (torch.AcceleratorError("an illegal memory access"), InternalError, "DEVICE_FAULT"),
], ids=["torch", "driver", "fault"])
def test_device_errors_name_device_and_phase(error, kind, reason):
    with pytest.raises(kind, match="cuda:0 .* in SUFFIX \\(train_suffix\\)") as caught, \
            device_errors(Phase.SUFFIX, "train_suffix", "cuda:0"):
        raise error
    assert (caught.value.reason, caught.value.metadata) == (reason, {"phase": "suffix", "device": "cuda:0"})


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    OSError(5, "cuMemUnmap: CUDA_ERROR_MPS_CLIENT_TERMINATED")], ids=["cublas", "triton", "driver"])
def test_whatever_is_said_where_cuda_refuses_everything_is_a_fault(monkeypatch, error, lost):
    def synchronize(device):
        assert device == torch.device("cuda:0")
        if lost:
            raise torch.AcceleratorError("MPS client terminated")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(InternalError if lost else type(error)) as caught, \
            device_errors(Phase.OVERLAP, "generate", "cuda:0"):
        raise error
    assert not lost or caught.value.reason == "DEVICE_FAULT"


def test_other_errors_pass():
    with pytest.raises(OSError, match="disk"), device_errors(Phase.IDLE, "open_run", "host:0"):
        raise OSError(5, "disk")


def test_devices_that_are_not_there_or_not_ours_to_share(monkeypatch):
    assert use_device("host:3") == torch.device("cpu")
    with pytest.raises(BadInput, match="CUDA shows"):
        use_device("cuda:77")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(BadInput) as caught:
        use_device("cuda:0")
    assert caught.value.reason == "EXPANDABLE_SEGMENTS"


def test_collectives_take_gradients_in_pieces_through_memory_that_is_not_the_buffers(monkeypatch):
    from types import SimpleNamespace

    from rollplex.trainer import gradients

    sent: list[int] = []

    def double(tensor):
        assert not flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.nbytes
        sent.append(tensor.numel())
        tensor.mul_(2)

    monkeypatch.setattr(gradients, "PIECE_ELEMENTS", 4)
    flat = torch.arange(10.0)
    buffer = SimpleNamespace(_device=torch.device("cpu"))
    gradients.GradientBuffer._through_device(buffer, flat, double)
    assert sent == [4, 4, 2]
    assert flat.tolist() == [2.0 * index for index in range(10)]


TOWER, NORM, HEAD, KEYS = "visual.merger.ln_q.weight", "language_model.norm.weight", "lm_head.weight", "k_proj.weight"


@pytest.mark.parametrize(("device", "place", "expected"), [
    ("cpu", (0, 1, 1), [(KEYS, "one sum")]), ("cuda", (0, 1, 1), [(KEYS, "one sum")]),
    ("cpu", (0, 2, 2), [(TOWER, "all_reduce", "world"), (KEYS, "one sum")]),
    ("cuda", (0, 2, 2), [(TOWER, "all_reduce", "world"), (NORM, "broadcast", "world"), (KEYS, "one sum")]),
    ("cpu", (0, 2, 1), [(TOWER, "all_reduce", "world"), (NORM, "all_reduce", "data"),
                        ("part 0", "reduce to 0", "data"), ("part 1", "reduce to 1", "data"), (KEYS, "one sum")]),
    ("cuda", (3, 4, 2), [(TOWER, "all_reduce", "world"), (NORM, "all_reduce", "data"), (NORM, "broadcast", "world"),
                         ("part 0", "reduce to 0", "data"), ("part 1", "reduce to 1", "data"), (KEYS, "one sum")])])
def test_a_mini_batchs_gradients_are_summed_over_those_who_have_a_part_of_them(device, place, expected, monkeypatch):
    """A replica's ranks compute parts of the tower's; of other parameters that they hold whole each has the whole gradient, which
    on a GPU may differ in its last bits. Replicas have those of their groups, of what each rank has the state of; what several
    ranks have the state of is summed once for all of them."""
    from types import SimpleNamespace

    from rollplex.trainer import gradients

    done = []
    monkeypatch.setattr(gradients.dist, "all_reduce", lambda name, group: done.append((name, "all_reduce", group)))
    monkeypatch.setattr(gradients.dist, "broadcast", lambda name, group, group_src: done.append((name, "broadcast", group)))
    monkeypatch.setattr(gradients.dist, "reduce",
                        lambda name, group, group_dst: done.append((name, f"reduce to {group_dst}", group)))
    monkeypatch.setattr(Ranks, "world", "world")
    ranks = Ranks(*place)
    ranks.data = "data"
    whole, cut = SimpleNamespace(axis=None, replicated=True), SimpleNamespace(axis=0, replicated=False)
    shards = {TOWER: whole, NORM: whole, HEAD: cut, KEYS: SimpleNamespace(axis=0, replicated=True)}
    buffer = object.__new__(gradients.GradientBuffer)
    buffer._shards, buffer._ranks, buffer._device = shards, ranks, torch.device(device)
    buffer._model, buffer._flat_of = SimpleNamespace(shards=shards), {name: name for name in shards}
    buffer._parts_of = {HEAD: [f"part {replica}" for replica in range(ranks.replicas)]}
    monkeypatch.setattr(buffer, "_through_device", lambda name, collective: collective(name))
    monkeypatch.setattr(buffer, "_sum_heads", lambda name, shard: done.append((name, "one sum")))
    buffer.sum_over_ranks()
    assert done == expected


def test_an_export_receives_contiguous_copies(monkeypatch, tmp_path):
    """A transposed shard's bytes are not in its own order, and NCCL moves bytes."""
    from types import SimpleNamespace

    from rollplex.trainer import export

    gathered = []

    def gather(tensor, parts, *, group, group_dst):
        assert tensor.is_contiguous() and all(part.is_contiguous() for part in parts)
        for part in parts:
            part.copy_(tensor)
        gathered.append(tensor)

    def save(source, path, config, views, *, gather, shards):
        shard = torch.arange(6.0).view(2, 3).t()
        assert all(torch.equal(part, shard) for part in gather("weight", shard))
        path.mkdir()

    monkeypatch.setattr(export.dist, "gather", gather)
    monkeypatch.setattr(export, "save_checkpoint", save)
    model = SimpleNamespace(tp_rank=0, tp_size=2, group=None, config=None, shards=None)
    assert export.write(tmp_path, tmp_path / "out", model, Ranks(1, 4, 2), {}) == 0
    assert not gathered, "another replica's rank"
    assert export.write(tmp_path, tmp_path / "out", model, Ranks(0, 4, 2), {}) == 0
    assert len(gathered) == 1
