"""A safetensors file of whole tensors that all ranks write together: each its parts, at the places that every rank computes.

No rank needs another one's bytes or word, so that the file can be written beside the ranks' collectives; and what it holds does
not depend on their number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rollplex.core.placement import ITEM_BYTES
from rollplex.model.shard import Shard

PIECE_BYTES = 32 << 20
"""Written between two looks at whether to go on."""
_NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}


class WholeFile:
    """`open` (the constructor) and `close` are the pair; `write` puts a part where it belongs."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, *, first: bool,
                 check: Callable[[], None] = lambda: None) -> None:
        """`shapes`: of the whole tensors, by key, in file order; `first`: the rank that writes the header. `check` may raise
        between pieces. Raises OSError, now and in every method."""
        self._shapes, self._item, self._check = dict(shapes), ITEM_BYTES[dtype], check
        header, self._starts, end = {"__metadata__": {"format": "pt"}}, {}, 0
        for key, shape in self._shapes.items():
            self._starts[key], start = end, end
            end += math.prod(shape) * self._item
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        self._data = len(head)
        self.written_bytes = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._descriptor, self._data + end)
            if first:
                self._put(0, memoryview(head))
        except BaseException:
            self.close()
            raise

    def write(self, key: str, shard: Shard, rank: int, start: int, values: torch.Tensor) -> None:
        """Elements [start, start + len) of the rank's part in row-major order; `values`: flat, contiguous, on the host, in the
        file's dtype. The vocabulary's padding is left out."""
        data = memoryview(values.detach().view(torch.uint8).numpy())
        whole = self._shapes[key]
        base = self._data + self._starts[key]
        if shard.axis is None or shard.axis == 0:
            first = start + (0 if shard.axis is None else shard.bounds(rank)[0] * math.prod(whole[1:]))
            room = max(0, math.prod(whole) - first)
            self._put(base + first * self._item, data[:room * self._item])
            return
        # A part of columns: row by row.
        column, stop = shard.bounds(rank)
        width, done = stop - column, 0
        while done < len(values):
            row, offset = divmod(start + done, width)
            count = min(width - offset, len(values) - done)
            self._put(base + (row * whole[1] + column + offset) * self._item,
                      data[done * self._item:(done + count) * self._item])
            done += count

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _put(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            self._check()
            done += os.pwrite(self._descriptor, data[done:done + PIECE_BYTES], offset + done)
        self.written_bytes += done
