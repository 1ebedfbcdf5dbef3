"""A tiny text-only Qwen2.5-VL, a broker that is a dict, and the real trainer engine over both.

The dict outlives engines, as the real broker does: building a second engine is a restart.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rollplex.core import work
from rollplex.core.config import LossConfig, OptimizerConfig, RunConfig, SamplingConfig
from rollplex.core.errors import NotFound, WrongState
from rollplex.core.leases import LeaseMode
from rollplex.core.placement import Placement
from rollplex.core.topology import Topology, is_host
from rollplex.engine import Communicator, use_device
from rollplex.memory.drivers import driver_of
from rollplex.memory.mapping import MappedSlab
from rollplex.memory.slab import Slab
from rollplex.model import PromptInputs, VisionLanguageModel, read_model_config
from rollplex.trainer.actor_slabs import ActorSlabs
from rollplex.trainer.config import TrainerSection
from rollplex.trainer.engine import TrainerEngine

# isort: split
# After rollplex.model, which makes torchvision importable.
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCAB = 160
"""Vision tokens lie above it: none is forbidden, and the softmax is TRL's."""


def tiny_config(width: int = 32) -> Qwen2_5_VLConfig:
    """`width`: 4 heads' of the decoder; FlexAttention wants heads of 16 at least."""
    sections = [width // 32, width // 32, width // 16]
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [0],
            "out_hidden_size": width, "tokens_per_second": 2,
        },
        image_token_id=1000, video_token_id=1001, vision_start_token_id=1002, vision_end_token_id=1003,
        tie_word_embeddings=False,
    )  # fmt: skip


def build_hf(dtype: torch.dtype, width: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(tiny_config(width)).to(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if "norm" in name or "ln_q" in name else noise)
    return model.to(dtype)


@dataclass
class DictLease:
    slab: Slab
    mode: LeaseMode
    fd: int
    lost: bool = False

    def release(self) -> None:
        """The dict keeps the fd."""


@dataclass
class DictBroker:
    """Slabs by name; what a BrokerSession offers a trainer, without leases that conflict."""

    slabs: dict[str, tuple[Slab, int]] = field(default_factory=dict)
    reported: tuple[work.ResidencyEntry, ...] = ()

    def create(self, name, *, object_class, device="host", size_bytes, run=""):
        driver = driver_of(device)
        handle = driver.create(size_bytes, name)
        fd = driver.export(handle)
        driver.release(handle)
        self.slabs[name] = (Slab(name, object_class, "trainer", device, size_bytes, 1, len(self.slabs) + 1, run), fd)
        return self.slabs[name][0]

    def lease(self, slab, mode, *, snapshot=None, update_epoch=None):
        if slab not in self.slabs:
            raise NotFound(f"no slab {slab}")
        if update_epoch == 0:
            raise WrongState("no update is open")
        return DictLease(self.slabs[slab][0], mode, self.slabs[slab][1])

    def list_slabs(self, prefix=""):
        return tuple(slab for name, (slab, _) in sorted(self.slabs.items()) if name.startswith(prefix))

    def delete(self, name):
        slab, fd = self.slabs.pop(name)
        os.close(fd)
        return slab.size_bytes

    def report_residency(self, entries):
        self.reported = tuple(entries)

    def close(self):
        """Slabs stay."""

    def bytes_of(self, name: str) -> bytes:
        slab, fd = self.slabs[name]
        if not is_host(slab.device):
            mapped = MappedSlab(driver_of(slab.device), slab.size_bytes)
            try:
                mapped.bind(DictLease(slab, LeaseMode.READ, fd))
                whole = mapped.tensor(Placement.contiguous(name, 0, (slab.size_bytes,), "uint8"))
                return whole.cpu().numpy().tobytes()
            finally:
                mapped.close()
        return Path(f"/proc/self/fd/{fd}").open("rb").read(slab.size_bytes)


class TextReader:
    """Token ids alone make a prompt."""

    def __init__(self, config, device="cpu") -> None:
        self._config, self._device = config, device

    def read(self, group: work.PreparedGroup) -> PromptInputs:
        return PromptInputs.from_arrays(self._config, token_ids=np.array(group.token_ids)).to(self._device)


class Quiet:
    """A WorkContext that nobody watches."""

    aborted = False

    def progress(self, done_count, total_count, unit): ...

    def samples(self, samples): ...

    def check(self): ...


QUIET = Quiet()


def run_config(*, loss: dict | None = None, optimizer: dict | None = None, **fields) -> RunConfig:
    sampling = fields.pop("sampling", SamplingConfig(samples_per_group=4, max_response_tokens=16))
    rates = {"learning_rate": 1e-2, "weight_decay": 0.1, "chunk_elements": 3000}
    return RunConfig(sampling=sampling, loss=LossConfig(**(loss or {})),
                     optimizer=OptimizerConfig(**(rates | (optimizer or {}))), **fields)


def open_engine(broker: DictBroker, checkpoint: Path, dtype: torch.dtype, *, devices: str = "host", gradients: str = "",
                **options) -> TrainerEngine:
    """As a new process would have it, on `devices` (MeshSection.devices) 0. Needs a tensor-parallel group."""
    config, topology = read_model_config(checkpoint), Topology(device_kind=devices)
    device = use_device(topology.device_name(0))
    model = VisionLanguageModel(config, dtype, device)
    actor = ActorSlabs(broker, model.layout, topology, 0)
    alone = Communicator("trainer", 0, 1, Path(), timeout_s=1.0)
    section = TrainerSection(logprob_chunk_tokens=7, offload_pool_bytes=1 << 20, gradients=gradients)
    return TrainerEngine(broker, TextReader(config, device), model, actor, checkpoint, alone,
                         logprob_chunk_tokens=section.logprob_chunk_tokens, offload_pool_bytes=section.offload_pool_bytes,
                         gradients=section.gradient_place(devices), **options)


def make_groups(*, count: int = 2, samples: int = 4, seed: int = 0) -> tuple[list, list]:
    """PreparedGroups and ResponseGroups of unequal lengths, with advantages and rollout log-probabilities."""
    rng = np.random.default_rng(seed)
    prompts, responses = [], []
    for index in range(count):
        tokens = rng.integers(3, VOCAB, 5 + 2 * index)
        prompts.append(work.PreparedGroup(index, array("q", tokens.tolist()), sample_count=samples))
        made = []
        for sample in range(samples):
            length = int(rng.integers(2, 9))
            made.append(work.ResponseSample(
                sample, array("q", rng.integers(3, VOCAB, length).tolist()),
                rollout_logprobs=array("f", (-5 + rng.random(length)).tolist()), advantage=float(rng.normal())))
        responses.append(work.ResponseGroup(index, tuple(made)))
    return prompts, responses


def scale_of(groups) -> work.LossScale:
    samples = [sample for group in groups for sample in group.samples]
    return work.LossScale(len(samples), sum(len(sample.token_ids) for sample in samples), 16)


def train(engine: TrainerEngine, prompts, responses) -> work.SuffixResult:
    engine.materialize_prefix(QUIET, prompts)
    return engine.train_suffix(QUIET, responses, scale_of(responses))


def gradients(engine: TrainerEngine) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in engine._state.gradients.views.items()}
