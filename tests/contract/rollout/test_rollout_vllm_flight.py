"""What is a step of prefill, what an abort leaves, whose memory goes: with stand-ins for vLLM's engine and its memory pools."""

from __future__ import annotations

from array import array
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollplex.core import work

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs this")


class Engine:
    """vllm_internals.Requests of an engine that answers a step late, as asynchronous scheduling does. `rows` of its requests
    grow at once, each `length` tokens long."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.waiting, self.running, self.pending = deque(), {}, None
        self.params = []

    def add(self, request, prompt, params):
        self.waiting.append(request)
        self.params.append(params)

    def abort(self, requests):
        self.aborted = requests

    def step(self):
        while self.waiting and len(self.running) < self.rows:
            self.running[self.waiting.popleft()] = 0
        answers, self.pending = self.pending or [], [self._grow(request) for request in list(self.running)]
        return answers

    def _grow(self, request):
        self.running[request] += 1
        finished = self.running[request] == self.length
        if finished:
            del self.running[request]
        return request, [7], [-1.0], "length" if finished else ""


SAMPLING = work.Sampling(1.0, 9)


def flight_of(engine, samples, sampling=SAMPLING, **options):
    from rollplex.rollout.engine import SeededGroup
    from rollplex.rollout.vllm_flight import Flight

    flight = Flight(engine, sampling, [2], [], **options)
    group = work.PreparedGroup(0, array("q", [1, 2]), sample_count=samples)
    flight.add(SeededGroup(group, np.arange(samples, dtype=np.uint64)), {})
    return flight


def kinds(flight, rows):
    found = []
    while flight:
        found.append(flight.prefills(rows))
        flight.step()
    return found


def test_steps_are_prefill_until_every_sample_has_a_token():
    # The first step is only scheduled, the second brings the first sample's token; the same again for the other samples.
    assert kinds(flight_of(Engine(4, 3), 4), 4) == [True, True, True, True, False, False]


def test_a_group_follows_its_first_sample():
    engine = Engine(8, 3)
    flight = flight_of(engine, 4)
    assert len(flight) == 4
    flight.step()
    assert len(engine.params) == 1
    flight.step()
    assert len(engine.params) == 4


@pytest.mark.parametrize("samples", [1, 3])
def test_a_first_sample_of_one_token_keeps_none_of_its_group_waiting(samples):
    flight = flight_of(Engine(8, 1), samples)
    ended = []
    while flight:
        ended += flight.step()
    assert sorted(sample.sample_index for sample in ended) == list(range(samples))


def test_samples_that_wait_for_a_row_do_not_make_a_step_prefill():
    found = kinds(flight_of(Engine(4, 5), 6), 4)
    # Two of the six start when others have ended, and that is a prefill again.
    assert found == [*[True] * 4, False, False, True, False, True, *[False] * 4]


def test_after_an_abort_nothing_is_prefilled():
    engine = Engine(4, 3)
    flight = flight_of(engine, 4)
    flight.step()
    flight.step()
    flight.abort()
    assert not flight
    assert not flight.prefills(4)
    assert len(engine.aborted) == 4


def test_an_abort_names_only_what_vllm_has():
    engine = Engine(4, 3)
    flight = flight_of(engine, 4)
    flight.abort()
    assert not flight
    assert engine.aborted == list(engine.waiting)
    assert len(engine.aborted) == 1


def test_a_step_that_is_under_way_is_taken_in():
    from rollplex.rollout.vllm_internals import settle

    queue = deque([1, 2])
    core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=queue), get_output=queue.pop)
    settle(SimpleNamespace(engine_core=core))
    assert not queue
    settle(SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))))


@pytest.fixture
def worker(monkeypatch):
    """Of a GPU, as far as can be seen."""
    from rollplex.rollout import vllm_internals
    from rollplex.rollout.vllm_worker import ActorWorker

    log, reports = [], []
    monkeypatch.setattr(vllm_internals, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(vllm_internals, "_memory_pools",
                        lambda: SimpleNamespace(sleep=lambda offload_tags: log.append(("sleep", offload_tags))))

    class Worker(ActorWorker):
        def get_model(self):
            session = SimpleNamespace(report_residency=lambda entries: reports.append(sum(entry.size_bytes for entry in entries)))
            return SimpleNamespace(rollplex_actor=SimpleNamespace(session=session, mapping=SimpleNamespace(device="cuda:0")))

        def wake_up(self):
            log.append("wake_up")

    made = Worker()
    made.log, made.reports = log, reports
    shared = torch.zeros(96, dtype=torch.uint8)
    made.model_runner = SimpleNamespace(kv_caches=[shared, shared[:32], torch.zeros(32, dtype=torch.uint8)])
    return made


def test_keys_and_values_leave_a_gpu_and_come_back_once(worker):
    worker.rollplex_back_kv()
    assert worker.log == []
    assert [worker.rollplex_release_kv(), worker.rollplex_release_kv()] == [128, 0]
    # Our weights are in no pool of vLLM's; what is tagged as weights there is kept.
    assert worker.log == ["synchronize", ("sleep", ("weights",))]
    for _ in range(2):
        worker.rollplex_back_kv()
    assert worker.log[2:] == ["wake_up"]
    assert worker.reports == [128, 0, 0, 128]
    assert worker.rollplex_release_kv() == 128


def test_a_device_that_has_no_room_for_them_is_reported(worker):
    from rollplex.rollout.vllm_worker import Refusal

    def wake_up():
        raise RuntimeError("CUDA Error: out of memory")

    worker.rollplex_release_kv()
    worker.wake_up = wake_up
    answer = worker.rollplex_back_kv()
    assert isinstance(answer, Refusal)
    assert (answer.error.reason, answer.error.metadata["size_bytes"]) == ("KV_NOT_BACKED", "128")
    assert worker.rollplex_release_kv() == 0


@pytest.mark.parametrize(("options", "deterministic", "seeds"), [
    ({}, False, [0, 1]), ({"sample_generators": False}, False, [None, None]), ({"sample_generators": False}, True, [0, 1])])
def test_samples_have_generators_of_their_own_unless_they_are_told_to_share(options, deterministic, seeds):
    engine = Engine(4, 3)
    flight = flight_of(engine, 4, work.Sampling(1.0, 9, deterministic=deterministic), **options)
    flight.step()
    flight.step()
    assert [params.seed for params in engine.params][::2] == seeds
