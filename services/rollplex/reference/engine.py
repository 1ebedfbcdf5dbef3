"""Reference: detached prefixes while rollout decodes, then log-probabilities under the frozen weights."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rollplex.core import work
from rollplex.core.compatibility import Facts, digest
from rollplex.core.config import RunConfig
from rollplex.core.crash_points import crash_point
from rollplex.core.errors import BadInput, WrongState
from rollplex.core.packs import packs
from rollplex.core.phases import Phase
from rollplex.core.residency import Residency
from rollplex.core.topology import torch_device
from rollplex.engine.communicator import Communicator
from rollplex.engine.device import device_errors
from rollplex.engine.prefix_stream import PrefixStream
from rollplex.engine.prompts import PromptReader
from rollplex.engine.ready_prefixes import ReadyPrefixes
from rollplex.engine.residency import ResidencyReport
from rollplex.memory.arena import Arena
from rollplex.memory.client import BrokerSession
from rollplex.model import (
    VisionLanguageModel,
    pack_groups,
    pack_responses,
    prefix_pass,
    suffix_forward,
    token_logprobs,
)
from rollplex.reference.paging import PagedWeights
from rollplex.reference.weights import OBJECT_CLASS, ReferenceWeights

BOUNDARY = "boundary_reference"
Weights = ReferenceWeights | PagedWeights


class ReferenceEngine:
    """rollplex.rpc.phase_servicer.PhaseEngine, `materialize_prefix` and `score_suffix`.

    It takes over the session and the communicator, and closes them.
    """

    role = "reference"

    def __init__(self, session: BrokerSession, reader: PromptReader, model: VisionLanguageModel,
                 weights: Weights, communicator: Communicator, layout_facts: Facts, *, suffix_tokens: int, device: str = "host",
                 residency: str = "paged", prefix_stream: PrefixStream | None = None) -> None:
        """`layout_facts` are those of the mesh's actor, which the reference does not map: they show that all have one model.
        `device`: Topology.device_name of where it computes; the model is there. `residency`: ReferenceSection.weights."""
        self.rank, self.tensor_parallel_size = communicator.rank, communicator.size
        self._ranks = communicator.ranks
        self.layout_facts, self.layout_hash = layout_facts, digest(layout_facts)
        self.open_run_name, self.bound_snapshot = "", -1
        self._session, self._reader, self._model, self._weights = session, reader, model, weights
        self._suffix_tokens, self._prefix_stream = suffix_tokens, prefix_stream
        self.residency = {OBJECT_CLASS: residency}
        self._device = torch_device(device)
        self._arena = Arena(self.role, device)
        self._report = ResidencyReport(session, self._arena)
        self._groups_per_pass = 1
        self._ready = ReadyPrefixes()
        model.bind(weights.views())
        model.requires_grad_(False)
        self.communicator = communicator
        communicator.use_group = model.use_group

    def open_run(self, context: work.WorkContext, run: str, snapshot: int, config: RunConfig, attach: bool
                 ) -> work.OpenRunResult:
        """Loads the frozen weights, or finds them in the slab of an earlier process. The actor slab is not touched."""
        with device_errors(Phase.IDLE, "open_run", self._arena.device):
            self._weights.open()
        crash_point("reference.open.loaded")
        self._drop_boundaries()
        self.open_run_name, self._groups_per_pass = run, config.groups_per_pass
        return work.OpenRunResult(snapshot=snapshot)

    def bind_snapshot(self, context: work.WorkContext, snapshot: int) -> work.BindResult:
        """Notes the number: the reference reads no snapshot. The inode is that of its frozen weights."""
        self._check_open()
        self.bound_snapshot = snapshot
        crash_point("reference.bind.done")
        return work.BindResult(snapshot, len(self._model.layout.tensors), {self._weights.device: self._weights.inode})

    @torch.inference_mode()
    def materialize_prefix(self, context: work.WorkContext, groups: Sequence[work.PreparedGroup]) -> work.PrefixResult:
        """Keeps each group's boundary, by group_index, of several replicas each its own groups'; one that was there is replaced.

        Raises WrongState without an open run, DataLoss for a prompt that is not the coordinator's.
        """
        with self._together(Phase.OVERLAP, "materialize_prefix"):
            self._check_open()
            own, hashes = self._ranks.own(groups), {}
            with self._weights_there():
                for pack in self._ranks.own_packs(packs(groups, self._groups_per_pass)):
                    context.check()
                    found = self._run_prefix(pack)
                    for group, prompt_hash in zip(pack, found, strict=True):
                        hashes[group.group_index] = prompt_hash
                        crash_point("reference.prefix.group")
                        context.progress(len(hashes), len(own), "groups")
            self._rest()
        self._report.at_barrier()
        return work.PrefixResult(tuple(hashes[group.group_index] for group in own), self._arena.held_bytes(BOUNDARY), 0)

    @torch.inference_mode()
    def score_suffix(self, context: work.WorkContext, groups: Sequence[work.ResponseGroup], *, temperature: float,
                     keep_boundaries: bool) -> work.ScoreResult:
        """Log-probabilities of every sample's tokens at the sampling temperature, without the forbidden ids; of the
        replica's groups, from its first rank.

        Raises BadInput for a temperature of 0 or below or a group that is there twice, WrongState for one without a boundary;
        nothing is scored then.
        """
        with self._together(Phase.SUFFIX, "score_suffix"):
            self._check_open()
            own = self._ranks.own(groups)
            self._check_scorable(own, temperature)
            scored: dict[int, list[work.SampleLogprobs]] = {}
            with self._weights_there():
                for pack in self._ranks.own_packs(packs(groups, self._groups_per_pass)):
                    context.check()
                    scored |= self._score(pack, temperature)
                    if not keep_boundaries:
                        self._ready.release(group.group_index for group in pack)
                    for _ in pack:
                        crash_point("reference.score.group")
                    context.progress(len(scored), len(own), "groups")
        self._report.at_barrier()
        samples = (sample for group in own for sample in scored[group.group_index])
        return work.ScoreResult(tuple(samples) if self._ranks.tensor_rank == 0 else ())

    def quiesce(self, context: work.WorkContext, leave_snapshot: bool) -> work.QuiesceResult:
        """Drops every boundary."""
        with device_errors(Phase.IDLE, "quiesce", self._arena.device):
            released = self._drop_boundaries()
            self._rest()
        if leave_snapshot:
            self.bound_snapshot = -1
        crash_point("reference.quiesce.done")
        return work.QuiesceResult(released)

    def close(self) -> None:
        self.communicator.close()
        self._drop_boundaries()
        self._rest()
        self._weights.close()
        self._session.close()

    def _rest(self) -> None:
        if self._prefix_stream is not None:
            self._prefix_stream.rest()

    @contextmanager
    def _together(self, phase: Phase, command: str) -> Iterator[None]:
        """A command that all ranks execute; the device's errors become ours before they end the communicator."""
        with self.communicator.together(phase, command), device_errors(phase, command, self._arena.device):
            yield

    @contextmanager
    def _weights_there(self) -> Iterator[None]:
        """Around compute; the ledger has what they take of the device meanwhile."""
        with self._arena.hold(OBJECT_CLASS, Residency.HBM, self._weights.visiting_bytes), self._weights.mapped():
            yield

    def _run_prefix(self, pack: Sequence[work.PreparedGroup]) -> list[str]:
        """Hashes of the pack's prompts."""
        indices = [group.group_index for group in pack]
        self._ready.release(indices)
        inputs = [self._reader.read(group).with_pixels(self._model.dtype) for group in pack]
        prefix = prefix_pass(self._model, inputs, limit=self._prefix_stream)
        self._ready.add(indices, inputs, prefix, [self._arena.hold(BOUNDARY, Residency.HBM, prefix.size_bytes)])
        return [one.hash() for one in inputs]

    def _score(self, pack: Sequence[work.ResponseGroup], temperature: float) -> dict[int, list[work.SampleLogprobs]]:
        """By group_index."""
        ready = [self._ready.get(group.group_index) for group in pack]
        responses = [[torch.frombuffer(sample.token_ids, dtype=torch.int64) for sample in group.samples] for group in pack]
        packed = pack_groups([pack_responses(one.last_token, tokens, one.suffix_position)
                              for one, tokens in zip(ready, responses, strict=True)]).to(self._device)
        if len(pack) > 1 and packed.token_count <= self._suffix_tokens:
            parts = [([one.boundary for one in ready], packed)]
        else:
            parts = [([one.boundary], part) for one, group in zip(ready, packed.by_group(), strict=True)
                     for part in group.micro_batches(self._suffix_tokens)]
        logprobs: list[torch.Tensor] = []
        for boundaries, part in parts:
            hidden_TD = suffix_forward(self._model, boundaries, part)
            logp_T, _ = token_logprobs(self._model, hidden_TD, part.targets, temperature=temperature,
                                       forbidden=self._model.config.forbidden_token_ids)
            logprobs.append(logp_T.float())
        # The host waits for the device once a pack.
        scored = iter(packed.split(torch.cat(logprobs).cpu()))
        return {group.group_index: [
            work.SampleLogprobs(group.group_index, sample.sample_index, array("f", next(scored).numpy().tobytes()))
            for sample in group.samples] for group in pack}

    def _check_scorable(self, groups: Sequence[work.ResponseGroup], temperature: float) -> None:
        if not temperature > 0:
            raise BadInput(f"temperature is {temperature}; it must be above 0", reason="BAD_SAMPLING")
        self._ready.require(group.group_index for group in groups)

    def _check_open(self) -> None:
        if not self.open_run_name:
            raise WrongState("no run is open", reason="NO_RUN")

    def _drop_boundaries(self) -> int:
        """Bytes released."""
        released = self._arena.held_bytes(BOUNDARY)
        self._ready.release_all()
        self._report.at_barrier()
        return released
