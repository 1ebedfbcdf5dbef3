"""Whether matrix products are right in a process that may use a part of the GPU's SMs only (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE).

cuBLAS of CUDA 13.0 leaves tiles unwritten on an H200 for many numbers of SMs, in kernels whose thread-block clusters have four
blocks or more, and says nothing. Of 528 products of the published models' shapes none was wrong at 25, 50, 90 and 100% of 132
SMs; 42 to 413 were at 20, 30, 33, 40, 45 and all that was tried from 55 to 85 (benchmarks/results). So a capped process asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import sqrt

import torch

from rollplex.core.errors import BadInput
from rollplex.core.sharing import PERCENT_VARIABLE

WIDTHS = ((256, 2048), (2560, 2048), (2048, 2048), (11008, 2048), (2048, 11008), (512, 3584), (3584, 3584), (18944, 3584),
          (3840, 1280), (3456, 1280), (1280, 3456), (5120, 5120), (151936, 2048))
"""Outputs and inputs of linear layers of the published 3B and 7B models, fused as training and vLLM have them; of one rank."""
TOKENS = (16, 64, 200, 512, 1000, 4096)
_MOST_ELEMENTS = 1 << 28
"""Of a layer's outputs, here in one piece: those of a chunk of logits (trainer.logprob_chunk_tokens), not of a whole prompt's."""
_PIECE_ELEMENTS = 1 << 26
"""Of a matrix, in float32 at once."""
_ROUNDING = 8.0
"""Times what bfloat16's rounding of a row's elements, with random signs, adds up to."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_products(device: torch.device) -> None:
    """Nothing in a process that is not capped. Raises BadInput (CAP_COMPUTES_WRONGLY), whose message says what may be set.

    `device`: with its index, since another thread asks: vLLM loads models with the pool of its sleep mode current on the thread,
    and there cuBLAS's workspace would stay, to be copied and unmapped with the weights at every sleep.
    """
    percent = os.environ.get(PERCENT_VARIABLE)
    if percent is None or device.type != "cuda":
        return
    with ThreadPoolExecutor(1) as other:
        wrong = other.submit(_wrong_products_alone, device).result()
    if wrong:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        raise BadInput(
            f"with {percent}% of the GPU's threads ({sms} SMs) cuBLAS computes wrongly here: {wrong[0]}, and {len(wrong) - 1} "
            "other products. On an H200 mesh.prefix_sm_percent = 50 is right for both sides; mesh.sharing = \"mps-priority\" "
            "caps nobody (docs/adr/0009-sharing-policies.md)", reason="CAP_COMPUTES_WRONGLY", percent=percent, sm_count=sms)


def _wrong_products_alone(device: torch.device) -> list[str]:
    """Leaves nothing in torch's cache: vLLM would keep it there."""
    wrong = wrong_products(device)
    torch.cuda.empty_cache()
    return wrong


def wrong_products(device: torch.device, *, widths: tuple[tuple[int, int], ...] = WIDTHS, tokens: tuple[int, ...] = TOKENS,
                   multiply: Product = torch.matmul) -> list[str]:
    """Names of the products that `multiply` gets wrong: forward, input's and weight's gradient of every layer, in bfloat16; and
    of layers with a bias, which has kernels of its own."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    asked, worst = [], []
    for outputs, inputs in widths:
        w_OI = random(outputs, inputs)
        for count in (count for count in tokens if count * outputs <= _MOST_ELEMENTS):
            x_TI, y_TO = random(count, inputs), random(count, outputs)
            for name, a, b, product in (
                    ("forward", x_TI, w_OI.T, multiply), ("forward with bias", x_TI, w_OI.T, _with_bias),
                    ("input gradient", y_TO, w_OI, multiply), ("weight gradient", y_TO.T, x_TI, multiply)):
                asked.append(f"{name} of {count} x {inputs} -> {outputs}")
                worst.append(_largest_error(a, b, product(a, b), generator))
    # One wait for all. A comparison is false for what is no number.
    right = torch.stack(worst).le(1.0).tolist()
    return [name for name, well in zip(asked, right, strict=True) if not well]


def _with_bias(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b_KN.new_zeros(b_KN.shape[1]), a_MK, b_KN)


def _largest_error(a_MK: torch.Tensor, b_KN: torch.Tensor, c_MN: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of c = a b, over what rounding allows: rows of c and of a (b r) for one vector r of random signs, by kernels that are no
    matrix products (Freivalds 1977)."""
    # Not from the process's generator, from which vLLM samples.
    signs_N = torch.randint(0, 2, (c_MN.shape[1],), generator=generator, device=c_MN.device).mul(2).sub(1).float()
    error_M = (_rows_times(c_MN, signs_N) - _rows_times(a_MK, _rows_times(b_KN, signs_N))).abs()
    # Elements have a standard deviation of sqrt(K), and are rounded to 8 bits.
    allowed = _ROUNDING * sqrt(b_KN.shape[0]) * 2**-9 * sqrt(c_MN.shape[1])
    return error_M.max() / allowed


def _rows_times(x_MN: torch.Tensor, r_N: torch.Tensor) -> torch.Tensor:
    """x r [M] in float32, some rows at a time."""
    rows = max(1, _PIECE_ELEMENTS // x_MN.shape[1])
    return torch.cat([(piece.float() * r_N).sum(1) for piece in x_MN.split(rows)])
