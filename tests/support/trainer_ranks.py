"""Trainer ranks as processes of their own, commanded together as the coordinator does, and their slabs put together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trainer_rig import TrainerClient, config, respond

from rollplex.core import work
from rollplex.core.config import RunConfig
from rollplex.core.strict import to_plain, to_toml
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, read_model_config
from rollplex.trainer.config import TrainerConfig


class TrainerRanks:
    """`start` and `stop` are the pair; `kill` and `spawn` replace one rank; `join` opens an epoch for all."""

    def __init__(self, config: TrainerConfig, session: BrokerSession, run: str, folder: Path) -> None:
        self.config, self.session, self.run = config, session, run
        self.size = config.mesh.train_tensor_parallel
        self.layout = ActorLayout.build(read_model_config(config.model.checkpoint),
                                        config.mesh.rollout_tensor_parallel, config.model.dtype, self.size)
        self._file = folder / "mesh.toml"
        self._file.write_text(to_toml(to_plain(config)))
        self.processes: dict[int, subprocess.Popen] = {}
        self.clients: dict[int, TrainerClient] = {}

    def spawn(self, rank: int) -> None:
        command = [sys.executable, "-m", "rollplex.trainer", "--config", str(self._file), "--rank", str(rank)]
        self.processes[rank] = subprocess.Popen(command)

    def connect(self) -> None:
        """Waits for the ranks that have no client yet."""
        for rank in self.processes:
            if rank not in self.clients:
                address = self.config.mesh.address(f"trainer-{rank}")
                client = TrainerClient(address, self.session, self.run, rank, devices=self.config.mesh.devices)
                if self.config.mesh.devices == "cuda":
                    # A GPU's first command compiles.
                    client.command_s = client.watch_s = 300.0
                self.clients[rank] = client

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes.pop(rank).wait(20)
        self.clients.pop(rank).channel.close()

    def stop(self) -> None:
        for client in self.clients.values():
            client.channel.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def each(self, call: Callable[[TrainerClient], Any]) -> list[Any]:
        """What `call` gives for every rank, all at once."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(call, [self.clients[rank] for rank in range(self.size)]))

    def join(self) -> None:
        epoch = TrainerClient.new_epoch()
        self.each(lambda client: client.join(epoch))

    def open(self, run_config: RunConfig, *, attach: bool = False, snapshot: int = -1, bind: bool = True) -> None:
        opened = self.each(lambda client: client.open(run_config, attach=attach, snapshot=snapshot, register=False))
        if not attach:
            self.session.register_snapshot(self.run, [result.actor_slab for result in opened], 0)
        if bind:
            self.each(lambda client: client.bind(max(snapshot, 0)))

    def iterate(self, groups, snapshot: int) -> list[work.GradientResult]:
        """k -> k + 1 of teacher-forced responses, and binds it; the norm as each rank sees it."""
        responses = respond(groups, seed=snapshot)
        self.each(lambda client: client.materialize(groups, snapshot))
        self.each(lambda client: client.train(responses, snapshot))
        measured = self.each(lambda client: client.measure())
        self.each(lambda client: client.quiesce())
        order = self.begin(snapshot, measured[0].grad_norm)
        self.each(lambda client: client.apply(order, snapshot))
        self.publish(order, snapshot)
        return measured

    def begin(self, snapshot: int, grad_norm: float) -> work.UpdateOrder:
        """UPDATE_BEGIN: from here on the snapshot is TORN."""
        epoch = self.session.begin_update(self.run, snapshot, [f"trainer-{rank}" for rank in range(self.size)])
        return work.UpdateOrder(epoch, min(1.0, 0.5 / grad_norm), 1.0, snapshot + 1)

    def publish(self, order: work.UpdateOrder, snapshot: int) -> None:
        """k -> k + 1, which every rank binds."""
        self.session.publish_snapshot(self.run, order.update_epoch, snapshot + 1)
        self.each(lambda client: client.bind(snapshot + 1))

    def replace(self, rank: int) -> None:
        """A successor of a killed rank, and an epoch for all."""
        self.spawn(rank)
        self.connect()
        self.join()

    def actor(self, snapshot: int) -> dict[str, torch.Tensor]:
        """Whole parameters by training name, put together from one device a rollout shard, without vocabulary padding.

        Devices of one shard must hold the same bytes.
        """
        layout, topology = self.layout, self.layout.topology
        raw = [self.clients[rank].actor_bytes(snapshot) for rank in range(self.size)]
        assert all(raw[device] == raw[topology.peers(device)[0]] for device in range(self.size))
        segments = [layout.segment_views(layout.views(torch.frombuffer(bytearray(raw[device]), dtype=torch.uint8)))
                    for device in range(0, self.size, topology.q)]
        return {name: shard.merge([part[name] for part in segments]) for name, shard in layout.rollout_shards.items()}


@contextmanager
def trainer_ranks(config: TrainerConfig, session: BrokerSession, run: str, folder: Path) -> Iterator[TrainerRanks]:
    """All ranks up, in one epoch."""
    ranks = TrainerRanks(config, session, run, folder)
    try:
        for rank in range(ranks.size):
            ranks.spawn(rank)
        ranks.connect()
        ranks.join()
        yield ranks
    finally:
        ranks.stop()


def three_updates(group: TrainerRanks, prompts, **fields: Any) -> tuple[dict, dict, list[float]]:
    """The actor before and after, and the gradient norms. `fields`: of RunConfig."""
    group.open(config(**fields))
    before, norms = group.actor(0), []
    for snapshot in range(3):
        measured = group.iterate(prompts, snapshot)
        assert len({result.grad_norm for result in measured}) == 1
        norms.append(measured[0].grad_norm)
    return before, group.actor(3), norms


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """||dA - dB|| / ||dA|| of two updates from the same start, over all parameters."""
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in start)
    moved = sum(float((expected[name].double() - start[name].double()).square().sum()) for name in start)
    return (difference / moved) ** 0.5
