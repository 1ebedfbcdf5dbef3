"""Qwen2.5-VL split at the first response position. Start with README.md."""

# ruff: noqa: E402
from rollplex.torchvision_ops import ensure_torchvision

ensure_torchvision()

from rollplex.core.prompt_hash import prompt_hash
from rollplex.model.activations import HostCopies, Limit, Offload
from rollplex.model.boundary import Boundary, PrefixPass
from rollplex.model.checkpoint import load_into, save_checkpoint
from rollplex.model.config import ModelConfig, read_model_config
from rollplex.model.decode import GroupDecoder
from rollplex.model.decode_state import DecodeState
from rollplex.model.inputs import PromptInputs
from rollplex.model.layout import ActorLayout, LayoutTensor, Part
from rollplex.model.logprobs import token_logprobs
from rollplex.model.network import VisionLanguageModel, sum_replicated_gradients
from rollplex.model.packing import PackedSuffix, pack_groups, pack_responses
from rollplex.model.parallel import Seat, destroy_tensor_parallel, init_tensor_parallel, tensor_parallel_group
from rollplex.model.parameters import module_of
from rollplex.model.positions import mrope_positions
from rollplex.model.prefix import prefix_forward, prefix_pass
from rollplex.model.ranks import Ranks
from rollplex.model.shard import Shard
from rollplex.model.suffix import suffix_forward
from rollplex.model.tower_share import summed_over_ranks

__all__ = [
    "ActorLayout",
    "Boundary",
    "DecodeState",
    "GroupDecoder",
    "HostCopies",
    "LayoutTensor",
    "Limit",
    "ModelConfig",
    "Offload",
    "PackedSuffix",
    "Part",
    "PrefixPass",
    "PromptInputs",
    "Ranks",
    "Seat",
    "Shard",
    "VisionLanguageModel",
    "destroy_tensor_parallel",
    "init_tensor_parallel",
    "load_into",
    "module_of",
    "mrope_positions",
    "pack_groups",
    "pack_responses",
    "prefix_forward",
    "prefix_pass",
    "prompt_hash",
    "read_model_config",
    "save_checkpoint",
    "suffix_forward",
    "sum_replicated_gradients",
    "summed_over_ranks",
    "tensor_parallel_group",
    "token_logprobs",
]
