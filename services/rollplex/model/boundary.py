"""What a prompt's prefix leaves for its samples: keys and values of every layer, and the way back through the prefix.

Legend: B = P - 1 boundary tokens, K kv heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollplex.core.errors import WrongState

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class Boundary:
    """One (k, v) [B, K, d] a layer, k already rotated. Attached: `backward` reaches the prefix's parameters."""

    def __init__(self, layers: KeysValues, *, rebuild: Callable[[], KeysValues] | None = None) -> None:
        self._layers: KeysValues | None = layers
        self._rebuild = rebuild
        self._leaves: KeysValues | None = None
        self.attached = rebuild is not None or any(x.requires_grad for pair in layers for x in pair)
        self.token_count = layers[0][0].shape[0]
        self.size_bytes = sum(x.numel() * x.element_size() for pair in layers for x in pair)

    @property
    def layers(self) -> KeysValues:
        if self._layers is None:
            raise WrongState("the boundary was released", reason="BOUNDARY_RELEASED")
        return self._layers

    def leaves(self) -> KeysValues:
        """The same values cut from the prefix; suffix backwards accumulate into their .grad."""
        if self._leaves is None:
            self._leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.layers]
        return self._leaves

    def backward(self) -> None:
        """Carry the leaves' gradients through the prefix, once, and free its graph."""
        if self._leaves is None:
            return
        leaves, self._leaves = self._leaves, None
        prefix = self.layers
        self._layers = [(k.detach(), v.detach()) for k, v in leaves]
        if not self.attached:
            return
        self.attached = False
        if self._rebuild is not None:
            rebuild, self._rebuild = self._rebuild, None
            with torch.enable_grad():
                prefix = rebuild()
        pairs = [
            (tensor, leaf.grad)
            for tensors, cut in zip(prefix, leaves)
            for tensor, leaf in zip(tensors, cut)
            if leaf.grad is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))

    def release(self) -> None:
        """Drop keys, values and graph."""
        self._layers = self._leaves = self._rebuild = None
        self.attached = False
