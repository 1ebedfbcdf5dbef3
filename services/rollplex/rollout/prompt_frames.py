"""A prompt on its way from the leader to a replica's workers: arrays in a memfd, their places in a frame.

The leader alone reads media and computes pixels; its workers map what it wrote, so that a replica pays for a prompt's media once.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import fields
from typing import Any

import torch

from rollplex.core.placement import align_up
from rollplex.memory.host_driver import sealed_memfd
from rollplex.model import PromptInputs

_ALIGNMENT_BYTES = 64


def pack_prompt(inputs: PromptInputs) -> tuple[dict[str, Any], int]:
    """(what the frame says, a memfd that the caller closes)."""
    arrays = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    delta = arrays.pop("delta")
    places, end = {}, 0
    for name, tensor in arrays.items():
        if tensor is not None:
            places[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end]
            end = align_up(end + tensor.nbytes, _ALIGNMENT_BYTES)
    fd = sealed_memfd("prompt", end)
    try:
        with mmap.mmap(fd, end) as memory:
            for name, place in places.items():
                _view(memory, place).copy_(arrays[name])
    except BaseException:
        os.close(fd)
        raise
    return {"delta": delta, "arrays": places}, fd


def unpack_prompt(message: dict[str, Any], fd: int) -> PromptInputs:
    """The arrays where they lie; takes over `fd`."""
    try:
        # A private mapping: torch has no read-only tensors and would warn of a read-only buffer.
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    arrays = {name: _view(memory, place) for name, place in message["arrays"].items()}
    return PromptInputs(delta=message["delta"], **arrays)


def _view(memory: mmap.mmap, place: list[Any]) -> torch.Tensor:
    dtype, shape, offset = place
    count = 1
    for extent in shape:
        count *= extent
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)
