"""Which of the mesh's GPUs a process sees, and which of its own each of them is.

A process sees all of them, GPU g of the mesh as its GPU g, unless it has chosen some: vLLM's rank r takes the r-th GPU that its
process sees, and replica 1 of q does not sit on the first ones. The choice is in the environment, so that children have it too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from rollplex.core.errors import BadInput

CHOSEN = "ROLLPLEX_VISIBLE_GPUS"
"""The mesh's numbers of the GPUs that the process sees, in the order in which it sees them."""
CUDA = "CUDA_VISIBLE_DEVICES"


def see_only(gpus: Sequence[int], environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes `gpus` (the mesh's numbers) this process's GPUs 0, 1, ... Before its first CUDA call; CUDA reads the variable then.

    Raises BadInput for a GPU that the process does not see, as far as the environment tells.
    """
    shown = environment.get(CUDA)
    names = shown.split(",") if shown is not None else None
    places = [visible_ordinal(gpu, environment) for gpu in dict.fromkeys(gpus)]
    if names is not None and max(places, default=-1) >= len(names):
        raise BadInput(f"GPUs {list(gpus)} of the mesh are wanted, and {CUDA} is {shown!r}", reason="GPU_NOT_VISIBLE")
    environment[CUDA] = ",".join(names[place] if names is not None else str(place) for place in places)
    environment[CHOSEN] = ",".join(map(str, dict.fromkeys(gpus)))


def visible_ordinal(gpu: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """The process's own number of the mesh's GPU. Raises BadInput (GPU_NOT_VISIBLE) for one that it has not chosen."""
    chosen = environment.get(CHOSEN)
    if not chosen:
        return gpu
    numbers = [int(number) for number in chosen.split(",")]
    if gpu not in numbers:
        raise BadInput(f"GPU {gpu} of the mesh is not among those that this process sees: {chosen}", reason="GPU_NOT_VISIBLE",
                       gpu=gpu)
    return numbers.index(gpu)


def nvml_handle(library: Any, ordinal: int, environment: Mapping[str, str] = os.environ) -> Any:
    """NVML's handle of a process's GPU: NVML numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES leaves of them.

    `library`: pynvml, initialised; its errors pass. Raises IndexError for a GPU that the variable does not show.
    """
    shown = environment.get(CUDA)
    if shown is None:
        return library.nvmlDeviceGetHandleByIndex(ordinal)
    name = [part.strip() for part in shown.split(",") if part.strip()][ordinal]
    return library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else library.nvmlDeviceGetHandleByUUID(name)
