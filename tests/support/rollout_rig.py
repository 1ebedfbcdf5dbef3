"""A mesh around a served rollout engine, and the coordinator's side of a generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from engine_rig import Actor, Loop, broker, connect
from tiny_checkpoint import PromptMaker, frozen_model, tensor_parallel

from rollplex.core import work
from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.topology import Topology
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.model import pack_responses, prefix_forward, suffix_forward, token_logprobs
from rollplex.rpc.convert import to_proto
from rollplex.v1 import rollout_service_pb2, rollout_service_pb2_grpc, types_pb2

SAMPLING = work.Sampling(temperature=1.0, max_response_tokens=24, seed=5)


@contextmanager
def actor_mesh(checkpoint: Path, runtime_dir: Path, topology: Topology | None = None, replica: int = 0, *,
               dtype: str = "float32") -> Iterator[SimpleNamespace]:
    """A broker with the trainer's session on it, the actor at snapshot 0, and an oracle on the checkpoint's weights."""
    torch.set_num_threads(1)
    section = MeshSection(runtime_dir=runtime_dir)
    section.runtime_dir.chmod(0o700)
    loop = Loop()
    with tensor_parallel(), broker(section), connect(section, "trainer-0", "trainer") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
        actor = Actor(session, checkpoint, dtype, topology=topology, replica=replica)
        oracle = frozen_model(checkpoint, getattr(torch, dtype))
        yield SimpleNamespace(
            section=section, checkpoint=checkpoint, session=session, loop=loop, actor=actor, oracle=oracle,
            model=ModelSection(checkpoint=checkpoint, dtype=dtype), reader=PromptReader(session, processor, oracle.config),
            prompts=PromptMaker(processor, actor.depositor()))
        actor.close()


def start(client, groups, sampling=SAMPLING, **header):
    stub = rollout_service_pb2_grpc.RolloutServiceStub(client.channel)
    return client.start(stub.StartGenerate, rollout_service_pb2.StartGenerateRequest,
                        groups=[to_proto(group, types_pb2.PreparedGroup) for group in groups],
                        sampling=to_proto(sampling, rollout_service_pb2.Sampling), **header)


def generate(mesh, client, groups, sampling=SAMPLING, **header):
    outcome = client.watch(start(client, groups, sampling, **{"snapshot": mesh.actor.snapshot} | header))
    if outcome.error is not None:
        raise outcome.error
    return outcome


def tokens_of(outcome):
    return {key: sample.token_ids.tolist() for key, sample in outcome.samples.items()}


def bits_of(outcome):
    return {key: (sample.token_ids.tobytes(), sample.logprobs.tobytes()) for key, sample in outcome.samples.items()}


@torch.no_grad()
def teacher_forced(mesh, group, samples, temperature, model=None):
    """The trainer's log-probabilities of the same tokens, one array a sample; or another model's."""
    model = model or mesh.oracle
    inputs = mesh.reader.read(group)
    responses = [torch.tensor(sample.token_ids) for sample in samples]
    packed = pack_responses(inputs.last_token, responses, inputs.suffix_position)
    hidden = suffix_forward(model, [prefix_forward(model, inputs)], packed)
    logp, _ = token_logprobs(model, hidden, packed.targets, temperature=temperature,
                             forbidden=model.config.forbidden_token_ids)
    return [part.numpy() for part in packed.split(logp)]
