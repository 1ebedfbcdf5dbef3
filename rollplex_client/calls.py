"""Every unary call once: its request, and how its answer is read. `Client` and `AsyncClient` only send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollplex.core.config import RunConfig
from rollplex.core.errors import BadInput
from rollplex.core.ids import check_run_name, new_id
from rollplex.core.strict import parse, to_plain
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex_client import parsing, results
from rollplex_client.prompts import Prompt, to_group

R = TypeVar("R")

QUICK_S = 30.0
"""Deadline of calls that read the journal or the mesh."""
SLOW_S = 1800.0
"""Deadline of calls behind which engines load or files are written."""


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One RPC, ready to be sent."""

    method: str
    request: Any
    parse: Callable[[Any], R]
    timeout_s: float = QUICK_S


def create_run(name: str, config: RunConfig | Mapping[str, Any] | None = None, *, resume: str | Path = "never",
               timeout_s: float = SLOW_S) -> Call[results.Run]:
    """Opens a run; returns when the engines have loaded the actor. Idempotent by name and config.

    `resume`: "auto" goes on with a run that is there, else from its newest intact durable checkpoint, if it has one; a path is
    that of a durable checkpoint, to which a run that is there is taken back. Raises DataLoss for a damaged one, WrongState
    (RUN_LOST) when nothing is left of a run that has begun.
    What a mapping leaves out takes its default, or with `replay` the recorded run's value. Raises BadInput for a bad name or
    config, AlreadyExists for the name with another config, WrongState while another run is busy.
    """
    if isinstance(config, RunConfig):
        given = to_plain(config)
    else:
        given = dict(config or {})
        parse(RunConfig, given, "run")
    request = pb.CreateRunRequest(name=check_run_name(name), config_json=json.dumps(given),
                                  resume=resume if resume in ("auto", "never") else str(Path(resume).absolute()))
    return Call("CreateRun", request, lambda answer: parsing.run(answer.run), timeout_s)


def get_run(name: str) -> Call[results.Run]:
    """One run. Raises NotFound."""
    return Call("GetRun", pb.GetRunRequest(name=name), lambda answer: parsing.run(answer.run))


def list_runs() -> Call[list[results.Run]]:
    """All runs of the journal, newest first."""
    return Call("ListRuns", pb.ListRunsRequest(), lambda answer: [parsing.run(item) for item in answer.runs])


def submit_iteration(run: str, groups: Sequence[Prompt], *, request_id: str | None = None,
                     timeout_s: float = SLOW_S) -> Call[results.IterationHandle]:
    """Hands in the prompt groups of one update; returns when they are checked and queued.

    The same `request_id` again gives the same iteration. Raises BadInput, naming bad groups by index, before any work.
    """
    return Call("SubmitIteration", pb.SubmitIterationRequest(**_submission(run, groups, request_id)), parsing.handle,
                timeout_s)


def replay_iteration(run: str, *, request_id: str | None = None, timeout_s: float = SLOW_S
                     ) -> Call[results.IterationHandle]:
    """Replays the next recorded iteration of a run that was created with `replay`. Raises WrongState (REPLAY_ENDED) after
    the last."""
    request = pb.SubmitIterationRequest(run=run, request_id=request_id or new_id("request"))
    return Call("SubmitIteration", request, parsing.handle, timeout_s)


def submit_validation(run: str, groups: Sequence[Prompt], *, request_id: str | None = None,
                      timeout_s: float = SLOW_S) -> Call[results.IterationHandle]:
    """Greedy responses and rewards of held-out prompts; no update. As `submit_iteration` otherwise."""
    return Call("SubmitValidation", pb.SubmitValidationRequest(**_submission(run, groups, request_id)),
                parsing.handle, timeout_s)


def _submission(run: str, groups: Sequence[Prompt], request_id: str | None) -> dict[str, Any]:
    if not groups:
        raise BadInput("an iteration needs at least one prompt group", reason="NO_GROUPS")
    return {"run": run, "groups": [to_group(group) for group in groups], "request_id": request_id or new_id("request")}


def get_iteration(handle: results.IterationHandle) -> Call[results.Iteration]:
    """The iteration as the journal has it now."""
    request = pb.GetIterationRequest(run=handle.run, iteration=handle.iteration, validation=handle.validation)
    return Call("GetIteration", request, lambda answer: parsing.iteration(answer.iteration))


def cancel(handle: results.IterationHandle) -> Call[str]:
    """Stops an iteration and returns its state. Raises WrongState once its UPDATE has begun."""
    request = pb.CancelIterationRequest(run=handle.run, iteration=handle.iteration, validation=handle.validation)
    return Call("CancelIteration", request,
                lambda answer: pb.IterationState.Name(answer.state).removeprefix("ITERATION_STATE_").lower())


def list_samples(run: str, iteration: int, *, validation: bool = False) -> Call[list[results.Sample]]:
    """Texts, rewards and advantages, in group and sample order. Raises NotFound."""
    request = pb.ListSamplesRequest(run=run, iteration=iteration, validation=validation)
    return Call("ListSamples", request, lambda answer: [parsing.sample(item) for item in answer.samples])


def register_reward(name: str, address: str, *, weight: float = 1.0, timeout_s: float = 30.0,
                    retries: int = 6) -> Call[results.Reward]:
    """Adds or replaces a reward; it counts from the next iteration. `timeout_s` is one request's. Raises BadInput."""
    reward = pb.RewardRegistration(name=name, address=address, weight=weight, timeout_s=timeout_s, retries=retries)
    return Call("RegisterReward", pb.RegisterRewardRequest(reward=reward),
                lambda answer: parsing.reward(answer.reward))


def unregister_reward(name: str) -> Call[None]:
    """Takes a reward out. Raises NotFound."""
    return Call("UnregisterReward", pb.UnregisterRewardRequest(name=name), lambda answer: None)


def list_rewards() -> Call[list[results.Reward]]:
    """Registered rewards and whether they answer now."""
    return Call("ListRewards", pb.ListRewardsRequest(),
                lambda answer: [parsing.reward_health(item) for item in answer.rewards])


def export_checkpoint(run: str, path: str | Path, *, timeout_s: float = SLOW_S) -> Call[results.Export]:
    """Writes the current snapshot as a Hugging Face directory, which must be new or empty. Raises WrongState, BadInput."""
    directory = str(Path(path).absolute())
    return Call("ExportCheckpoint", pb.ExportCheckpointRequest(run=run, path=directory),
                lambda answer: results.Export(directory, answer.size_bytes), timeout_s)


def durable_checkpoint(run: str, *, timeout_s: float = SLOW_S) -> Call[results.DurableCheckpoint]:
    """The newest durable checkpoint, after the one that is being written, if any. Raises NotFound when there is none."""
    return Call("GetDurableCheckpoint", pb.GetDurableCheckpointRequest(run=run),
                lambda answer: results.DurableCheckpoint(answer.path, answer.next_iteration, answer.snapshot), timeout_s)


def mesh(*, timeout_s: float = QUICK_S) -> Call[results.Mesh]:
    """Services, open run, phase, and the broker's ledger."""
    return Call("GetMesh", pb.GetMeshRequest(), parsing.mesh, timeout_s)
