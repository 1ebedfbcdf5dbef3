"""What a prompt's prefix leaves for its samples: keys and values of every layer, and the way back through the prefix.

Legend: B = P - 1 boundary tokens, K kv heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollplex.core.errors import WrongState

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]


class PrefixPass:
    """Prompts that went through the prefix together: a boundary each, and one way back for all of them."""

    def __init__(self, layers: KeysValues, token_counts: Sequence[int], *, rebuild: Callable[[], KeysValues] | None = None
                 ) -> None:
        """`layers` of all prompts, one after the other, of `token_counts` each. `rebuild` makes them anew, attached."""
        self._prefix: KeysValues | None = layers
        self._rebuild = rebuild
        self.attached = rebuild is not None or any(x.requires_grad for pair in layers for x in pair)
        self.token_counts = tuple(token_counts)
        self.size_bytes = sum(x.numel() * x.element_size() for pair in layers for x in pair)
        self._layers: list[KeysValues] | None = _split([(k.detach(), v.detach()) for k, v in layers], self.token_counts)
        self._leaves: dict[int, KeysValues] = {}

    @property
    def boundaries(self) -> list[Boundary]:
        return [Boundary(self, place) for place in range(len(self.token_counts))]

    def layers_of(self, place: int) -> KeysValues:
        """Of one prompt, cut from the prefix. Raises WrongState once `backward` or `release` has consumed them."""
        if self._layers is None:
            raise WrongState("the boundary was released", reason="BOUNDARY_RELEASED")
        return self._layers[place]

    def leaves_of(self, place: int) -> KeysValues:
        """The same values; suffix backwards accumulate into their .grad."""
        if place not in self._leaves:
            self._leaves[place] = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.layers_of(place)]
        return self._leaves[place]

    def backward(self) -> None:
        """Carries the gradients of all leaves through the prefix, once, and consumes boundaries and graph. A prompt that no
        suffix has given a gradient adds none. Nothing happens before any suffix has taken leaves."""
        if not self.attached or not self._leaves:
            return
        gradients = [_gradients(self._leaves.get(place)) for place in range(len(self.token_counts))]
        prefix, rebuild = self._prefix, self._rebuild
        # What runs again would have its keys and values beside these.
        self.release()
        if rebuild is not None:
            with torch.enable_grad():
                prefix = rebuild()
        pairs = []
        for layer, tensors in enumerate(prefix):
            for which, tensor in enumerate(tensors):
                # Given up one by one: beside those of all prompts there is one layer's joined.
                taken = [None if mine is None else mine.pop((layer, which), None) for mine in gradients]
                if tensor.requires_grad and any(gradient is not None for gradient in taken):
                    pairs.append((tensor, _joined(taken, tensor, self.token_counts)))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))

    def release(self) -> None:
        """Drops keys, values and graph."""
        self._prefix = self._rebuild = self._layers = None
        self._leaves.clear()
        self.attached = False


class Boundary:
    """One prompt's part of a pass: (k, v) [B, K, d] a layer, k already rotated. It holds nothing itself."""

    def __init__(self, whole: PrefixPass, place: int) -> None:
        self._pass, self._place = whole, place
        self.token_count = whole.token_counts[place]

    @property
    def attached(self) -> bool:
        """`backward` reaches the prefix's parameters."""
        return self._pass.attached

    @property
    def layers(self) -> KeysValues:
        return self._pass.layers_of(self._place)

    def leaves(self) -> KeysValues:
        return self._pass.leaves_of(self._place)

    def backward(self) -> None:
        """Of the whole pass."""
        self._pass.backward()

    def release(self) -> None:
        """Of the whole pass."""
        self._pass.release()


def _split(layers: KeysValues, token_counts: Sequence[int]) -> list[KeysValues]:
    """By prompt, without a copy."""
    if len(token_counts) == 1:
        return [layers]
    parts = [list(zip(k.split(list(token_counts)), v.split(list(token_counts)), strict=True)) for k, v in layers]
    return [list(one) for one in zip(*parts, strict=True)]


def _gradients(leaves: KeysValues | None) -> dict[tuple[int, int], torch.Tensor] | None:
    """By layer and whether of keys or values."""
    if leaves is None:
        return None
    return {(layer, which): leaf.grad for layer, pair in enumerate(leaves) for which, leaf in enumerate(pair)
            if leaf.grad is not None}


def _joined(gradients: Sequence[torch.Tensor | None], tensor: torch.Tensor, token_counts: Sequence[int]) -> torch.Tensor:
    """As `tensor`; zeros for prompts without one."""
    if len(gradients) == 1:
        return gradients[0]
    return torch.cat([tensor.new_zeros(count, *tensor.shape[1:]) if gradient is None else gradient
                      for gradient, count in zip(gradients, token_counts, strict=True)])
