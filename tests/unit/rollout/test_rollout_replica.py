"""Prompts on their way to workers, and a bind that only some ranks are granted."""

from __future__ import annotations

import os
from dataclasses import fields

import numpy as np
import pytest
import torch

from rollplex.core.config import MeshSection
from rollplex.core.errors import WrongState
from rollplex.model import PromptInputs
from rollplex.rollout.engine import ReplicaBroken
from rollplex.rollout.prompt_frames import pack_prompt, unpack_prompt
from rollplex.rollout.replica import Replica


@pytest.mark.parametrize("with_video", [False, True])
def test_a_prompt_arrives_as_it_was_sent(with_video):
    rng = np.random.default_rng(0)
    media = {"pixel_values_videos": torch.from_numpy(rng.standard_normal((24, 7), dtype=np.float32)),
             "video_grid_thw": torch.tensor([[1, 4, 6]]), "second_per_grid_ts": torch.tensor([0.5])} if with_video else {}
    sent = PromptInputs(torch.arange(9), torch.arange(27).view(3, 9), -4, **media)
    frame, fd = pack_prompt(sent)
    found = unpack_prompt(frame, os.dup(fd))
    os.close(fd)
    for name in (item.name for item in fields(PromptInputs)):
        expected, got = getattr(sent, name), getattr(found, name)
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected
        assert not isinstance(expected, torch.Tensor) or got.dtype == expected.dtype


class Shard:
    device, bound = "host:0", False

    def join(self):
        pass

    def open(self, run):
        self.run = run

    def bind(self, snapshot):
        self.bound = True
        return 12, 99

    def unbind(self):
        self.bound = False


class Workers:
    """One worker, which answers a bind with `answers`, one after the other."""

    whole = True

    def __init__(self, *answers):
        self.answers, self.starts = list(answers), 0

    def ask(self, message, phase):
        if message["op"] != "bind":
            return [{}]
        answer = self.answers.pop(0)
        if isinstance(answer, ReplicaBroken):
            raise answer
        return [answer]

    def start(self):
        self.starts += 1

    def kill(self):
        pass


@pytest.fixture
def replica(monkeypatch, tmp_path):
    monkeypatch.setattr("rollplex.rollout.replica.destroy_tensor_parallel", lambda: None)

    def build(*answers):
        made = Replica(Shard(), Workers(*answers), MeshSection(runtime_dir=tmp_path), "rollout-0")
        made.open("run")
        return made

    return build


def test_a_bind_is_of_every_rank(replica):
    assert replica({"device": "host:1", "inode": 7}).bind(3) == (12, {"host:0": 99, "host:1": 7})


def test_a_rank_found_dead_at_a_bind_is_started_again(replica):
    made = replica(ReplicaBroken("gone"), {"device": "host:1", "inode": 7})
    assert made.bind(3) == (12, {"host:0": 99, "host:1": 7})
    assert made._workers.starts == 1


def test_a_bind_that_only_the_leader_is_granted_binds_nothing(replica):
    made = replica(*[WrongState("another snapshot", reason="STALE_SNAPSHOT")] * 2)
    with pytest.raises(ReplicaBroken, match="rank 1 cannot bind snapshot 3") as caught:
        made.bind(3)
    assert caught.value.reason == "REPLICA_SPLIT"
    assert not made.shard.bound
