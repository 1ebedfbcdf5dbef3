"""The one place that reaches past vLLM's public interface; each touch says why. docs/vllm.md has the versions tried.

Public, and therefore used elsewhere: EngineArgs, LLMEngine, SamplingParams, register_model_loader, collective_rpc,
worker_extension_cls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
from torch import nn
from torch.nn import functional

from rollplex.model.parallel import MAX_CTAS

_MADV_DONTNEED = 4
_ALIGNMENT = 64
"""Columns."""
PATCH_FIELDS = ("pixel_values", "pixel_values_videos")


def set_environment(collective_timeout_s: float) -> None:
    """Before vLLM is first imported, which reads most of this then. A value that the user has set stays, but for the first three.

    TORCH_COMPILE_DISABLE: on a CPU vLLM's small `@torch.compile` helpers want a C++ compiler, eager mode or not.
    VLLM_CPU_OMP_THREADS_BIND: vLLM would pin threads of a process that is ours; `rollout.threads` counts them.
    VLLM_ALLREDUCE_USE_SYMM_MEM: torch's symmetric memory makes NVLink multicast objects as it starts, used or not; at these
    sizes vLLM's own all-reduce is taken anyway. NCCL_MAX_CTAS: as for our own groups, whose ranks share the GPU.
    """
    # The engine core runs on our owner thread: one process to kill, no socket between, a start of seconds.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A forked worker would inherit the broker's connection, gRPC threads and mappings.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(max(1, round(collective_timeout_s)))
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_MAX_CTAS": str(MAX_CTAS),
                "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if not torch.cuda.is_available():
        defaults |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # In this process transformers has imported dynamo, which read the variable then.
        torch._dynamo.config.disable = True
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def plain_linear_layers() -> Iterator[None]:
    """While a model is loaded on a CPU: its linear layers multiply by `weight` where it lies.

    vLLM otherwise repacks each weight into a layout of its own and leaves an empty tensor behind, which ends sharing
    without an error. On a GPU unquantised layers are neither repacked nor written, and nothing is done here.
    """
    if on_gpu():
        yield
        return
    from vllm.model_executor.layers import utils

    def keep(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def align_tower(model: nn.Module) -> None:
    """The published towers' MLPs are 3420 wide, no multiple of 16 bytes, at which a GPU's matrix units and vLLM's gate kernel are
    slow. Weights are filled up with zeros as they are used (26 MB, of S x 3420 x 1280 products); the parameters stay."""
    if not on_gpu():
        return
    for block in model.visual.blocks:
        if block.mlp.down_proj.weight.shape[1] % _ALIGNMENT:
            block.mlp.forward = partial(aligned_mlp, block.mlp)


def aligned_mlp(mlp: nn.Module, x: torch.Tensor, alignment: int = _ALIGNMENT) -> torch.Tensor:
    """Qwen2_5_VisionMLP's forward pass of a tower that is whole on its rank: columns of zeros meet rows of zeros."""
    missing = -mlp.down_proj.weight.shape[1] % alignment
    weight = functional.pad(mlp.gate_up_proj.weight.unflatten(0, (2, -1)), (0, 0, 0, missing)).flatten(0, 1)
    bias = functional.pad(mlp.gate_up_proj.bias.unflatten(0, (2, -1)), (0, missing)).flatten()
    gated = mlp.act_fn(functional.linear(x, weight, bias))
    return functional.linear(gated, functional.pad(mlp.down_proj.weight, (0, missing)), mlp.down_proj.bias)


def take_patches(model: nn.Module, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The tower is given `take(numbers)` where integers were sent in place of patches."""
    embed = model.embed_multimodal

    def embed_with_patches(**fields: Any) -> Any:
        numbers = {name: fields[name] for name in PATCH_FIELDS if name in fields and not fields[name].is_floating_point()}
        return embed(**fields | {name: take(found) for name, found in numbers.items()})

    model.embed_multimodal = embed_with_patches


def tensor_parallel_place() -> tuple[int, int]:
    """(rank, size) of this worker; a model loader is not told."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def keep_embeddings_tied() -> None:
    """A checkpoint whose config ties the embeddings may still store a head (0.32 and later look): vLLM would then build two,
    load both and compare them. Trainer and slab go by the config, so vLLM is made to."""
    from vllm.config import ModelConfig

    if hasattr(ModelConfig, "maybe_untie_word_embeddings"):
        ModelConfig.maybe_untie_word_embeddings = lambda self: None


def on_gpu() -> bool:
    """What vLLM computes on; the platform has no public name."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def kv_storages(worker: Any) -> list[torch.UntypedStorage]:
    """Of a worker's keys and values, each once; nothing public names these tensors."""
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in worker.model_runner.kv_caches}
    return list(storages.values())


def free_kv(worker: Any) -> None:
    """Keys and values lose their memory and keep their addresses. After the prefix cache has been reset.

    On a GPU by vLLM's sleep mode, one level below `LLMEngine.sleep`: that asserts that the device has more free memory than
    before, which is not so when a neighbour took some meanwhile, and leaves the scheduler paused. What else is in vLLM's
    pools (rotary tables, a few MiB; our weights never are) waits in host memory.
    """
    if on_gpu():
        torch.cuda.synchronize()
        _memory_pools().sleep(offload_tags=("weights",))
    else:
        for storage in kv_storages(worker):
            give_pages_back(storage)


def back_kv(worker: Any) -> None:
    """The counterpart; what they hold is undefined. On a CPU pages come as they are touched."""
    if on_gpu():
        worker.wake_up()


def _memory_pools() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def give_pages_back(storage: torch.UntypedStorage) -> None:
    """The whole pages inside it go back to the system and read as zeros when next touched."""
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    stop = (storage.data_ptr() + storage.nbytes()) // page * page
    if stop > start and _libc.madvise(start, stop - start, _MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise of {stop - start} bytes: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def pixels_as_given() -> dict[str, Any]:
    """Arguments of EngineArgs with which the tower takes normalised pixels. 0.32's own processor leaves that to the tower."""
    from vllm import EngineArgs

    name = "mm_device_do_normalize"
    return {name: False} if name in EngineArgs.__dataclass_fields__ else {}


def start_engine(arguments: Any, encoder_cache_tokens: int) -> Any:
    """`encoder_cache_tokens`: features of media that are kept, at least; there is no argument for it. vLLM's own limit is the
    tokens of a step or of its largest medium, which media of steps under way fill: those of the next one then wait."""
    from vllm.v1.engine.llm_engine import LLMEngine

    config = arguments.create_engine_config()
    config.scheduler_config.encoder_cache_size = encoder_cache_tokens
    return LLMEngine.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)


def engine_input(engine: Any, token_ids: list[int], fields: dict[str, torch.Tensor], media: Mapping[str, Any],
                 on_host: Collection[str] = ()) -> dict[str, Any]:
    """What `add_request` takes any number of times, as vLLM's processor would have made it, by the model's own list of fields.

    `token_ids`: placeholders expanded. `fields`: by the names of the model's forward pass, all media of a kind in one. `media`:
    kind -> (name, first placeholder, placeholders) of each; the name is the key of vLLM's caches. `on_host`: fields that workers
    shall not bring to their device.
    """
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    if not media:
        return tokens_input(token_ids)
    layout = dict(engine.renderer.get_mm_processor()._get_mm_fields_config(fields, {}))
    layout |= {name: replace(layout[name], field=replace(layout[name].field, keep_on_cpu=True)) for name in on_host}
    return mm_input(
        token_ids, MultiModalKwargsItems.from_hf_inputs(fields, layout),
        {kind: [name for name, _, _ in items] for kind, items in media.items()},
        {kind: [PlaceholderRange(offset=first, length=length) for _, first, length in items] for kind, items in media.items()})


class Requests:
    """The way in and out of vLLM's engine core past its output processor, which makes objects for each token that a user of
    LLMEngine might want: 1.2 ms of a step of 120 samples, at which the host is decode's limit. Texts, statistics, stop strings
    and several samples a request are what that is for."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._core = engine, engine.engine_core

    def add(self, name: str, prompt: Mapping[str, Any], params: Any) -> None:
        """`name`: no other request's, ever."""
        process = self._engine.input_processor.process_inputs
        self._core.add_request(process(name, prompt, params, supported_tasks=self._engine.get_supported_tasks()))

    def step(self) -> list[tuple[str, list[int], list[float], str]]:
        """(name, new tokens, their log-probabilities, why it ended or nothing) of every request that has grown or ended."""
        grown = []
        for output in self._core.get_output().outputs:
            logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            reason = "" if output.finish_reason is None else str(output.finish_reason)
            grown.append((output.request_id, output.new_token_ids, logprobs, reason))
        return grown

    def abort(self, names: list[str]) -> None:
        self._core.abort_requests(names)


def drop_caches(engine: Any) -> bool:
    """Prefix, encoder and multimodal processor caches; False when requests still hold prefix blocks.

    The encoder cache is keyed by the media's hash and holds embeddings made by the weights of its time: the prefix
    cache's reset leaves it, and `LLM` has no call for it.
    """
    engine.reset_encoder_cache()
    engine.reset_mm_cache()
    return engine.reset_prefix_cache()


def settle(engine: Any) -> None:
    """No step is under way afterwards: asynchronous scheduling is one ahead, also of an abort. Outputs are dropped."""
    while getattr(engine.engine_core.engine_core, "batch_queue", None):
        engine.engine_core.get_output()


def worker_processes(engine: Any) -> list[Any]:
    """multiprocessing's, by rank; none where the only worker is this process. Only these tell which one died."""
    return [handle.proc for handle in getattr(engine.model_executor, "workers", None) or ()]


def shut_down(engine: Any) -> None:
    """Ends workers. LLMEngine leaves it to the garbage collector."""
    engine.engine_core.shutdown()
