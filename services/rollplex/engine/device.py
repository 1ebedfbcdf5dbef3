"""An engine's GPU: chosen once, its errors told in our terms, its cached memory given back. On a host there is nothing to do."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollplex.core.errors import BadInput, InternalError, OutOfMemory, RollplexError
from rollplex.core.phases import Phase
from rollplex.core.topology import torch_device
from rollplex.engine.products import check_products

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_device(name: str) -> torch.device:
    """Topology.device_name -> where the calling thread's engine computes from now on, in full float32.

    Raises BadInput (NO_DEVICE) without such a GPU, (CAP_COMPUTES_WRONGLY) in a process that is capped to a part of one for which
    cuBLAS does not work, and (EXPANDABLE_SEGMENTS) where torch's allocator was told to use them: they
    are mapped and unmapped by the same driver calls as our slabs, vLLM's sleep mode refuses them, and one environment serves all
    roles of a mesh. Fragmentation, which they are for, ends with `release_cached` at every barrier.
    """
    device = torch.device(torch_device(name))
    if device.type != "cuda":
        return device
    for variable in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(variable, "").lower().replace(" ", ""):
            raise BadInput(f"{variable} has expandable_segments on; engines that share slabs run without",
                           reason="EXPANDABLE_SEGMENTS")
    if device.index >= torch.cuda.device_count():
        raise BadInput(f"device {name}: CUDA shows {torch.cuda.device_count()} devices", reason="NO_DEVICE", device=name)
    torch.cuda.set_device(device)
    # float32 means float32: TF32 keeps 10 bits of the mantissa. cuDNN's own switch is on by default.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    check_products(device)
    release_cached(device)
    return device


def release_cached(device: torch.device) -> None:
    """What torch's allocator keeps for later goes back to the GPU, where another role may need it. Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def finish_work(device: torch.device) -> None:
    """Waits for everything ordered on the GPU, so that a command's time and its errors are its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def device_errors(phase: Phase, command: str, device: str) -> Iterator[None]:
    """Errors of the device as ours, with the phase: OutOfMemory (OUT_OF_DEVICE_MEMORY) leaves the process usable; after
    InternalError (DEVICE_FAULT) CUDA refuses everything, and the process must be replaced."""
    where, about = f"{phase.value.upper()} ({command})", {"phase": phase.value, "device": device}
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The frames that failed hold tensors, and the error would keep them until nobody remembers it.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        raise OutOfMemory(f"{device} has no memory left in {where}: {error}", reason="OUT_OF_DEVICE_MEMORY", **about) from None
    except RollplexError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise OutOfMemory(f"{device} has no memory left in {where}: {error}", reason="OUT_OF_DEVICE_MEMORY",
                              **about) from error
        if not isinstance(error, torch.AcceleratorError) and not _lost(device):
            raise
        raise InternalError(f"{device} failed in {where}: {error}; this process must be replaced", reason="DEVICE_FAULT",
                            **about) from error


def _lost(device: str) -> bool:
    """Whether CUDA refuses everything: libraries say in words of their own that a launch failed."""
    where = torch.device(torch_device(device))
    if where.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(where)
    except RuntimeError:
        return True
    return False
