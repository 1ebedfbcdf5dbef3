"""Tensors over mapped memory: a uint8 base over the address range, then dtype, shape and strides of the placement."""

from __future__ import annotations

import ctypes

import torch

from rollplex.core.errors import InternalError
from rollplex.core.placement import ITEM_BYTES, Placement
from rollplex.core.topology import is_host, torch_device
from rollplex.memory.driver import Driver, Reservation

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


def reserved_tensor(driver: Driver, reservation: Reservation, size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes] over a reservation with nothing behind it, on the driver's device; owns nothing."""
    if is_host(driver.device):
        return base_tensor(reservation.address, size_bytes, driver.device)
    # CUDA tells torch whose memory an address is only while there is some; one granule will do.
    granule = driver.create(driver.granularity_bytes, "granule")
    try:
        driver.map(reservation, granule, writable=False)
        return base_tensor(reservation.address, size_bytes, driver.device)
    finally:
        driver.unmap(reservation)
        driver.release(granule)


def base_tensor(address: int, size_bytes: int, device: str = "host") -> torch.Tensor:
    """uint8 [size_bytes] over memory at `address`; reads nothing, owns nothing. A GPU's must be mapped meanwhile."""
    if is_host(device):
        window = (ctypes.c_char * size_bytes).from_address(address)
        return torch.frombuffer(window, dtype=torch.uint8)
    tensor = torch.as_tensor(_CudaArray(address, size_bytes), device=torch_device(device))
    if tensor.data_ptr() != address:
        # torch copies what it takes for another device's memory, and writes would go nowhere.
        raise InternalError(f"torch does not take address {address:#x} for memory of {device}", reason="NOT_ALIASED",
                            device=device)
    return tensor


def tensor(base: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The placement's tensor inside `base`. Raises ValueError when it reaches past the end."""
    if placement.end_bytes > base.numel():
        raise ValueError(f"placement ends at byte {placement.end_bytes} of slab {placement.slab}, "
                         f"which has {base.numel()} bytes")
    item = ITEM_BYTES[placement.dtype]
    whole = base[: base.numel() // item * item].view(DTYPES[placement.dtype])
    return whole.as_strided(placement.shape, placement.strides, placement.offset_bytes // item)


class _CudaArray:
    """Device memory as numba's CUDA array interface, version 2, names it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
