"""vLLM and its workers as one thing that is whole or not there; a lost worker ends it, and the next start makes it anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from rollplex.core.errors import RollplexError
from rollplex.rollout import vllm_internals
from rollplex.rollout.engine import ReplicaBroken
from rollplex.rollout.vllm_worker import Refusal


class VllmGroup:
    """`start` and `stop`; in between `engine` is there. Owner thread only."""

    def __init__(self, arguments: EngineArgs, name: str, timeout_s: float, encoder_cache_tokens: int) -> None:
        """`name`: of the rollout process, in messages."""
        self._arguments, self._name, self._timeout_s = arguments, name, timeout_s
        self._encoder_cache_tokens = encoder_cache_tokens
        self._engine: LLMEngine | None = None
        self._processes: list[Any] = []

    @property
    def running(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> LLMEngine:
        if self._engine is None:
            raise ReplicaBroken(f"{self._name} has no vLLM until the next bind", process=self._name)
        return self._engine

    def start(self) -> None:
        self._engine = vllm_internals.start_engine(self._arguments, self._encoder_cache_tokens)
        self._processes = vllm_internals.worker_processes(self._engine)

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Every worker's answer, by rank. Raises the refusal on which all agree; ReplicaBroken when only some refuse."""
        with self.together(method.removeprefix("rollplex_")):
            answers = self.engine.collective_rpc(method, timeout=self._timeout_s, args=args)
        refused = [(rank, answer.error) for rank, answer in enumerate(answers) if isinstance(answer, Refusal)]
        if not refused:
            return answers
        rank, error = refused[0]
        if len(refused) == len(answers):
            raise error
        self.stop()
        raise ReplicaBroken(f"{self._name}.w{rank} (rank {rank} of {len(answers)}) refused what others did: {error}",
                            process=self._name, rank=rank, phase=method.removeprefix("rollplex_")) from error

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Around what workers in other processes do: whatever vLLM raises then is a lost rank. Raises ReplicaBroken."""
        try:
            yield
        except RollplexError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM says RuntimeError, TimeoutError, CancelledError, ... and is of no more use
            if not self._processes:
                raise
            rank, what = self._culprit(error)
            self.stop()
            raise ReplicaBroken(f"{self._name}.w{rank} (rank {rank} of {len(self._processes)}) {what} during {phase}",
                                process=self._name, rank=rank, phase=phase) from error

    def stop(self) -> None:
        """Idempotent. Afterwards no worker is left, and none of them holds a lease."""
        engine, self._engine = self._engine, None
        if engine is not None:
            vllm_internals.shut_down(engine)
        for process in self._processes:
            process.kill()
            process.join()

    def _culprit(self, error: Exception) -> tuple[int, str]:
        """vLLM ends the others with SIGTERM when one has died."""
        codes = [process.exitcode for process in self._processes]
        for rank, code in enumerate(codes):
            if code not in (None, 0, -signal.SIGTERM):
                return rank, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return 0, f"failed with {type(error).__name__}: {error}"
