"""What a prompt's prefix leaves for its samples: keys and values of every layer, and the way back through the prefix.

Legend: B = P - 1 boundary tokens, K kv heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollplex.core.errors import WrongState

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class Boundary:
    """One prompt's (k, v) [B, K, d] a layer, k already rotated. `backward` and `release` are its pass's."""

    def __init__(self, whole: PrefixPass, layers: KeysValues) -> None:
        self._pass = whole
        self._layers: KeysValues | None = layers
        self._leaves: KeysValues | None = None
        self.token_count = layers[0][0].shape[0]
        self.size_bytes = sum(x.numel() * x.element_size() for pair in layers for x in pair)

    @property
    def attached(self) -> bool:
        """`backward` reaches the prefix's parameters."""
        return self._pass.attached

    @property
    def layers(self) -> KeysValues:
        """Cut from the prefix."""
        if self._layers is None:
            raise WrongState("the boundary was released", reason="BOUNDARY_RELEASED")
        return self._layers

    def leaves(self) -> KeysValues:
        """The same values; suffix backwards accumulate into their .grad."""
        if self._leaves is None:
            self._leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.layers]
        return self._leaves

    def take_leaves(self) -> KeysValues | None:
        """Gives them up; None where no suffix took any."""
        leaves, self._leaves = self._leaves, None
        return leaves

    def backward(self) -> None:
        self._pass.backward()

    def release(self) -> None:
        self._pass.release()

    def drop(self) -> None:
        """Keys and values; of the pass, for its boundaries."""
        self._layers = self._leaves = None


class PrefixPass:
    """Prompts that went through the prefix together: a boundary each, and one way back for all of them."""

    def __init__(self, layers: KeysValues, token_counts: Sequence[int] = (), *, rebuild: Callable[[], KeysValues] | None = None
                 ) -> None:
        """`layers` of all prompts, one after the other, of `token_counts` each; none: there is one prompt. `rebuild` makes them
        anew, attached."""
        self._layers: KeysValues | None = layers
        self._rebuild = rebuild
        self.attached = rebuild is not None or any(x.requires_grad for pair in layers for x in pair)
        cut = [(k.detach(), v.detach()) for k, v in layers]
        self.boundaries = [Boundary(self, one) for one in ([cut] if len(token_counts) < 2 else _split(cut, token_counts))]
        self.size_bytes = sum(boundary.size_bytes for boundary in self.boundaries)

    def backward(self) -> None:
        """Carries the gradients of all boundaries' leaves through the prefix, once, and frees its graph. A prompt that no suffix
        has given a gradient adds none."""
        taken = [boundary.take_leaves() for boundary in self.boundaries]
        if not any(taken) or not self.attached:
            return
        prefix, rebuild = self._layers, self._rebuild
        self._let_go()
        if rebuild is not None:
            with torch.enable_grad():
                prefix = rebuild()
        pairs = []
        for layer, tensors in enumerate(prefix):
            for which, tensor in enumerate(tensors):
                gradient = _joined([boundary.layers[layer][which] for boundary in self.boundaries],
                                   [None if leaves is None else leaves[layer][which] for leaves in taken])
                if gradient is not None and tensor.requires_grad:
                    pairs.append((tensor, gradient))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))

    def release(self) -> None:
        """Drops keys, values and graph."""
        self._let_go()
        for boundary in self.boundaries:
            boundary.drop()

    def _let_go(self) -> None:
        self._layers = self._rebuild = None
        self.attached = False


def _split(layers: KeysValues, token_counts: Sequence[int]) -> list[KeysValues]:
    """By prompt, without a copy."""
    parts = [list(zip(k.split(list(token_counts)), v.split(list(token_counts)), strict=True)) for k, v in layers]
    return [list(one) for one in zip(*parts, strict=True)]


def _joined(values: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradients of one layer's keys (or values), which their leaves give up: beside both there is one layer's at a time."""
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    if all(gradient is None for gradient in gradients):
        return None
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    if len(gradients) == 1:
        return gradients[0]
    return torch.cat([torch.zeros_like(value) if gradient is None else gradient
                      for value, gradient in zip(values, gradients, strict=True)])
