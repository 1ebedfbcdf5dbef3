"""The `vllm` engine: vLLM in this process, its model's parameters on the actor slab. docs/vllm.md has the versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from rollplex.core import work
from rollplex.core.errors import Aborted, BadInput, DeadlineExceeded, InternalError, RollplexError
from rollplex.core.topology import device_name
from rollplex.data.processor import PromptProcessor
from rollplex.engine.layout_hash import layout_hash
from rollplex.engine.prompts import PromptReader
from rollplex.memory.client import BrokerSession
from rollplex.model import ActorLayout, ModelConfig
from rollplex.rollout import vllm_internals, vllm_loader
from rollplex.rollout.config import RolloutConfig, VllmSection
from rollplex.rollout.engine import SeededGroup, Tally
from rollplex.rollout.vllm_flight import Flight
from rollplex.rollout.vllm_prompts import VllmPrompts
from rollplex.rollout.workers import process_name

GIB = 1 << 30
CPU_BLOCK_TOKENS = 32
"""vLLM's own default of 128 lets no short prompt hit the prefix cache."""
CPU_STEP_TOKENS = 8192
"""At least; and never less than the longest sequence."""


class VllmEngine:
    """rollplex.rollout.engine.TokenEngine. It takes over the session, which is for media; workers lease the actor themselves."""

    def __init__(self, session: BrokerSession, reader: PromptReader, processor: PromptProcessor, model: ModelConfig,
                 config: RolloutConfig, replica: int) -> None:
        topology = config.mesh.topology
        layout = ActorLayout.build(model, topology.rollout_tp, config.model.dtype, topology.train_tp)
        self.layout_hash = layout_hash(model, layout)
        self._session, self._model, self._max_rows = session, model, config.rollout.max_rows
        self._max_tokens = config.rollout.vllm.max_model_len or model.max_positions
        self._engine = start_engine(config, replica, self._max_tokens)
        self._prompts = VllmPrompts(self._engine, reader, processor, model)
        # The warm-up has read zeros; nothing is mapped before the first bind.
        self.unbind()
        self._kv_backed = True
        self.release_kv()

    def open(self, run: str) -> None:
        self._workers("rollplex_open", run)

    def bind(self, snapshot: int) -> tuple[int, dict[str, int]]:
        bound = self._workers("rollplex_bind", snapshot)
        self._drop_caches()
        return bound[0][0], {device: inode for _, device, inode in bound}

    def unbind(self) -> None:
        self._workers("rollplex_unbind")

    def generate(self, groups: Sequence[SeededGroup], sampling: work.Sampling, tally: Tally) -> None:
        flight = Flight(self._engine, sampling, self._model.eos_token_ids, self._model.forbidden_token_ids)
        self._check_lengths(groups, sampling)
        waiting = deque(groups)
        self._back_kv()
        try:
            while waiting or flight:
                tally.check()
                with tally.timed("prefill"):
                    started = self._admit(waiting, flight, tally, sampling.deterministic)
                with tally.timed("prefill" if started else "decode"):
                    finished = flight.step()
                tally.finish(finished)
        except (Aborted, DeadlineExceeded):
            tally.finish(flight.unfinished())
            raise
        finally:
            flight.abort()
            self.release_kv()

    def release_kv(self) -> int:
        if not self._kv_backed:
            return 0
        self._kv_backed = False
        self._drop_caches()
        if vllm_internals.has_sleep_mode():
            self._engine.sleep(1)
        return sum(self._workers("rollplex_release_kv"))

    def close(self) -> None:
        self._workers("rollplex_close")
        vllm_internals.shut_down(self._engine)
        self._session.close()

    def _back_kv(self) -> None:
        if vllm_internals.has_sleep_mode():
            self._engine.wake_up()
        self._workers("rollplex_back_kv")
        self._kv_backed = True

    def _admit(self, waiting: deque[SeededGroup], flight: Flight, tally: Tally, deterministic: bool) -> int:
        """Starts groups while rows are free; how many. vLLM queues what is over max_rows, so one group may be.

        Deterministic: a group has vLLM for itself, and no cache knows of the one before.
        """
        started = 0
        while waiting and (not flight if deterministic else len(flight) < self._max_rows):
            tally.check()
            if deterministic:
                self._drop_caches()
            seeded = waiting.popleft()
            rendered, prompt_hash = self._prompts.read(seeded.group)
            tally.prompt(seeded.group, prompt_hash)
            flight.add(seeded, rendered)
            started += 1
        return started

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
        if not vllm_internals.drop_caches(self._engine):
            raise InternalError("vLLM's prefix cache is in use, yet no request is in flight")

    def _workers(self, method: str, *args: Any) -> list[Any]:
        """One answer a worker; raises the first refusal."""
        answers = self._engine.collective_rpc(method, args=args)
        for answer in answers:
            if isinstance(answer, RollplexError):
                raise answer
        return answers


def start_engine(config: RolloutConfig, replica: int, max_tokens: int) -> LLMEngine:
    """Raises BadInput for a type that vLLM does not compute in."""
    if config.model.dtype == "float64":
        raise BadInput("vLLM does not compute in float64; use model.dtype bfloat16 or float32, or rollout.engine torch",
                       reason="BAD_CONFIG")
    # Of a plugin that is not installed (a source tree on PYTHONPATH), too.
    vllm_loader.register()
    vllm_internals.keep_embeddings_tied()
    return LLMEngine.from_engine_args(_engine_args(config, config.rollout.vllm, replica, max_tokens))


def _engine_args(config: RolloutConfig, options: VllmSection, replica: int, max_tokens: int) -> EngineArgs:
    topology = config.mesh.topology
    source = vllm_loader.SlabSource(
        config.mesh.address("broker"), str(config.mesh.handle_socket), process_name(replica, 0), str(config.model.checkpoint),
        config.model.dtype, topology.train_tp, tuple(map(device_name, topology.replica_devices(replica))))
    on_gpu = vllm_internals.has_sleep_mode()
    # A prompt that is computed in parts draws from its generator before it should; vLLM then sets the generator back, which
    # a CPU's cannot do: "CPU Generator does not use offset". There a prompt is computed whole.
    whole = {} if on_gpu else {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_STEP_TOKENS, max_tokens),
                               "block_size": CPU_BLOCK_TOKENS}
    return EngineArgs(
        **whole, model=str(config.model.checkpoint), dtype=config.model.dtype, seed=0, tensor_parallel_size=topology.rollout_tp,
        load_format=vllm_loader.LOAD_FORMAT, model_loader_extra_config=source.as_config(),
        worker_extension_cls="rollplex.rollout.vllm_worker.ActorWorker",
        max_model_len=max_tokens, max_num_seqs=config.rollout.max_rows,
        kv_cache_memory_bytes=int(options.kv_cache_gib * GIB), gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=True,
        enforce_eager=options.enforce_eager or not on_gpu, enable_sleep_mode=on_gpu,
        # The tower whole on every rank, as the slab has it; each medium is processed once, so nothing is worth caching.
        mm_encoder_tp_mode="data", mm_processor_cache_gb=0, skip_mm_profiling=True,
        # The log-probability of what was sampled: after temperature and forbidden tokens.
        logprobs_mode="processed_logprobs",
        # No sampling defaults from the checkpoint.
        generation_config="vllm", disable_log_stats=True)
