"""Where a tensor's bytes are: a slab, an offset and a shape. Pure data; `rollplex.memory.views` turns it into a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements: (3, 4, 5) -> (20, 5, 1)."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Placement:
    """A strided tensor inside a slab."""

    slab: str
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one an axis."""
    dtype: str
    """A key of ITEM_BYTES."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        if len(self.shape) != len(self.strides):
            raise ValueError(f"{len(self.shape)} axes but {len(self.strides)} strides")
        if self.offset_bytes < 0 or self.offset_bytes % ITEM_BYTES[self.dtype]:
            raise ValueError(f"offset {self.offset_bytes} is not a multiple of {self.dtype}'s item size")

    @classmethod
    def contiguous(cls, slab: str, offset_bytes: int, shape: tuple[int, ...], dtype: str) -> Placement:
        return cls(slab, offset_bytes, shape, contiguous_strides(shape), dtype)

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.element_count * ITEM_BYTES[self.dtype]

    @property
    def end_bytes(self) -> int:
        """One past the last byte that the tensor can touch."""
        if not self.element_count:
            return self.offset_bytes
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes + (last + 1) * ITEM_BYTES[self.dtype]

    def narrow(self, axis: int, start: int, stop: int) -> Placement:
        """The placement of [start, stop) along an axis."""
        if not 0 <= start <= stop <= self.shape[axis]:
            raise ValueError(f"{start}:{stop} along axis {axis} of a tensor with {self.shape[axis]}")
        offset = self.offset_bytes + start * self.strides[axis] * ITEM_BYTES[self.dtype]
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1:])
        return Placement(self.slab, offset, shape, self.strides, self.dtype)


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment
