"""The `vllm` engine: vLLM in this process, its model's parameters on the actor slab. docs/vllm.md has the versions."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence

import torch
from vllm import EngineArgs

from rollplex.core import work
from rollplex.core.errors import Aborted, BadInput, DeadlineExceeded, InternalError
from rollplex.core.phases import Phase
from rollplex.engine.device import device_errors
from rollplex.engine.layout_hash import layout_facts
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, ModelConfig
from rollplex.rollout import vllm_internals, vllm_loader
from rollplex.rollout.config import RolloutConfig
from rollplex.rollout.engine import ReplicaBroken, SeededGroup, Tally
from rollplex.rollout.vllm_flight import Flight
from rollplex.rollout.vllm_group import VllmGroup
from rollplex.rollout.vllm_options import engine_options, step_tokens, worker_processes
from rollplex.rollout.vllm_prompts import VllmPrompts
from rollplex.rollout.workers import process_name

log = logging.getLogger(__name__)

STEPS_OF_MEDIA = 3
"""Two steps are under way when a third is made, whose media vLLM's encoder cache must hold beside theirs."""


class VllmEngine:
    """rollplex.rollout.engine.TokenEngine. It takes over the session, which is for media; workers lease the actor themselves."""

    def __init__(self, session: BrokerSession, reader: PromptReader, model: ModelConfig, config: RolloutConfig,
                 replica: int) -> None:
        topology = config.mesh.topology
        layout = ActorLayout.build(model, topology.rollout_tp, config.model.dtype, topology.train_tp)
        self.layout_facts = layout_facts(model, layout)
        self._session, self._model, self._max_rows = session, model, config.rollout.max_rows
        self._sample_generators = config.rollout.vllm.sample_generators
        self._max_tokens = config.rollout.vllm.max_model_len or model.max_positions
        self._step_tokens = step_tokens(config, self._max_tokens, on_gpu=vllm_internals.on_gpu())
        self._group = VllmGroup(engine_args(config, replica, self._max_tokens), process_name(replica, 0),
                                config.mesh.collective_timeout_s, STEPS_OF_MEDIA * self._step_tokens)
        self._prompts = VllmPrompts(reader, model, getattr(torch, config.model.dtype), shared=worker_processes(config))
        self._run, self._device = "", topology.device_name(topology.replica_devices(replica)[0])
        self._start()

    def open(self, run: str) -> None:
        """A group that is started again hears of it then."""
        self._run = run
        if self._group.running:
            self._group.ask("rollplex_open", run)

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        """On every rank, or on none. Starts vLLM anew when a worker is lost."""
        if self._group.running:
            try:
                return self._bind(snapshot)
            except ReplicaBroken as error:
                log.warning("%s; vLLM starts again", error)
        self._start()
        return self._bind(snapshot)

    def unbind(self) -> None:
        if self._group.running:
            self._group.ask("rollplex_unbind")

    def generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        with device_errors(Phase.OVERLAP, "generate", self._device):
            self._generate(groups, sampling, tally)

    def release_kv(self) -> int:
        if not self._group.running or not self._kv_backed:
            return 0
        self._drop_caches()
        released = sum(self._group.ask("rollplex_release_kv"))
        self._kv_backed = False
        return released

    def close(self) -> None:
        if self._group.running:
            self._group.ask("rollplex_close")
        self._group.stop()
        self._session.close()

    def _generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        flight = Flight(vllm_internals.Requests(self._group.engine), sampling, self._model.eos_token_ids,
                        self._model.forbidden_token_ids, sample_generators=self._sample_generators)
        self._check_lengths(groups, sampling)
        waiting = deque(groups)
        self._back_kv()
        try:
            while waiting or flight:
                tally.check()
                with tally.timed("prefill"):
                    self._admit(waiting, flight, tally, sampling.deterministic)
                rows = min(len(flight), self._max_rows)
                # A step that has prompt tokens decodes beside them; its time is prefill's.
                timed = tally.timed("prefill") if flight.prefills(self._max_rows) else tally.decoding(rows)
                with timed, self._group.together("decode"):
                    finished = flight.step()
                tally.finish(finished)
                self._prompts.forget({sample.group_index for sample in finished} - flight.groups())
        except (Aborted, DeadlineExceeded):
            tally.finish(flight.unfinished())
            raise
        finally:
            try:
                if self._group.running:
                    flight.abort()
                    with self._group.together("decode"):
                        vllm_internals.settle(self._group.engine)
            finally:
                self._prompts.forget()

    def _start(self) -> None:
        self._group.start()
        # vLLM may have computed with zeros while it started; nothing is mapped before a bind.
        self.unbind()
        self._kv_backed = True
        self.release_kv()
        if self._run:
            self.open(self._run)

    def _bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        bound = self._group.ask("rollplex_bind", snapshot)
        self._drop_caches()
        return bound[0][0], {device: inode for _, device, inode in bound}

    def _back_kv(self) -> None:
        self._group.ask("rollplex_back_kv")
        self._kv_backed = True

    def _admit(self, waiting: deque[SeededGroup], flight: Flight, tally: Tally, deterministic: bool) -> None:
        """Starts groups while rows are free, up to a step's worth of prompts: media of the next ones are read while vLLM works
        on these. vLLM queues what is over max_rows, so one group may be.

        Deterministic: a group has vLLM for itself, and no cache knows of the one before.
        """
        admitted = 0
        while (waiting and admitted < self._step_tokens
               and (not flight if deterministic else len(flight) < self._max_rows)):
            tally.check()
            if deterministic:
                self._drop_caches()
            seeded = waiting.popleft()
            rendered, prompt_hash = self._prompts.read(self._group.engine, seeded.group)
            tally.prompt(seeded.group, prompt_hash)
            flight.add(seeded, rendered)
            admitted += len(seeded.group.token_ids)

    def _check_lengths(self, groups: Sequence[SeededGroup], sampling: work.Sampling) -> None:
        """vLLM would end a response early, as if it had reached the limit that was asked for."""
        for group in (seeded.group for seeded in groups):
            wanted = len(group.token_ids) + sampling.max_response_tokens
            if wanted > self._max_tokens:
                raise BadInput(f"group {group.group_index}: {len(group.token_ids)} prompt tokens and up to "
                               f"{sampling.max_response_tokens} of response are more than the {self._max_tokens} that rollout "
                               "is configured for (rollout.vllm.max_model_len)", reason="RESPONSE_TOO_LONG",
                               group_index=group.group_index, tokens=wanted, limit=self._max_tokens)

    def _drop_caches(self) -> None:
        with self._group.together("drop_caches"):
            dropped = vllm_internals.drop_caches(self._group.engine)
        if not dropped:
            raise InternalError("vLLM's prefix cache is in use, yet no request is in flight")


def engine_args(config: RolloutConfig, replica: int, max_tokens: int) -> EngineArgs:
    """Raises BadInput for a type that vLLM does not compute in."""
    # Of a plugin that is not installed (a source tree on PYTHONPATH), too.
    vllm_loader.register()
    vllm_internals.keep_embeddings_tied()
    topology = config.mesh.topology
    source = vllm_loader.SlabSource(
        config.mesh.address("broker"), str(config.mesh.handle_socket), process_name(replica, 0), str(config.model.checkpoint),
        config.model.dtype, topology.train_tp, tuple(map(topology.device_name, topology.replica_devices(replica))), os.getpid())
    return EngineArgs(**engine_options(config, max_tokens, on_gpu=vllm_internals.on_gpu()), **vllm_internals.pixels_as_given(),
                      load_format=vllm_loader.LOAD_FORMAT,
                      model_loader_extra_config=source.as_config(),
                      worker_extension_cls="rollplex.rollout.vllm_worker.ActorWorker")
