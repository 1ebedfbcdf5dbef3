"""The coordinator's side of the reference, and what its scores should be."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from engine_rig import EngineClient

from rollplex.core import work
from rollplex.model import pack_responses, prefix_forward, suffix_forward, token_logprobs
from rollplex.rpc.convert import to_proto
from rollplex.v1 import reference_service_pb2, reference_service_pb2_grpc, types_pb2


def materialize(client: EngineClient, groups) -> work.PrefixResult:
    stub = reference_service_pb2_grpc.ReferenceServiceStub(client.channel)
    command = client.start(stub.StartMaterializePrefix, reference_service_pb2.StartReferencePrefixRequest,
                           groups=[to_proto(group, types_pb2.PreparedGroup) for group in groups])
    return client.watch(command).value("prefix", work.PrefixResult)


def score(client: EngineClient, responses, *, temperature=0.8, keep=False) -> work.ScoreResult:
    return client.watch(start_score(client, responses, temperature=temperature, keep=keep)).value("score", work.ScoreResult)


def start_score(client: EngineClient, responses, *, temperature=0.8, keep=False) -> str:
    stub = reference_service_pb2_grpc.ReferenceServiceStub(client.channel)
    groups = [to_proto(group, reference_service_pb2.ResponseGroup) for group in responses]
    return client.start(stub.StartScoreSuffix, reference_service_pb2.StartScoreSuffixRequest, groups=groups,
                        temperature=temperature, keep_boundaries=keep)


def respond(group, lengths=(3, 17, 1, 9)) -> work.ResponseGroup:
    rng = np.random.default_rng(group.group_index)
    return work.ResponseGroup(group.group_index, tuple(
        work.ResponseSample(index, array("q", rng.integers(0, 300, length).tolist()))
        for index, length in enumerate(lengths)))


@torch.no_grad()
def expected(mesh, group, response, temperature=0.8):
    inputs = mesh.reader.read(group)
    tokens = [torch.tensor(sample.token_ids) for sample in response.samples]
    packed = pack_responses(inputs.last_token, tokens, inputs.suffix_position)
    hidden = suffix_forward(mesh.oracle, [prefix_forward(mesh.oracle, inputs)], packed)
    logp, _ = token_logprobs(mesh.oracle, hidden, packed.targets, temperature=temperature,
                             forbidden=mesh.oracle.config.forbidden_token_ids)
    return [part.numpy() for part in packed.split(logp)]
