"""Floating-point operations and bytes that an iteration needs at least: what MFU and distances from bounds are taken against.

A multiply-add counts 2. Matrix products and attention count, as in the PaLM paper's MFU (arXiv 2204.02311, appendix B);
norms, activations, softmax and the optimizer do not. Recomputation of activations never counts. Attention is counted causal:
query i of a sequence sees i + 1 keys. A backward pass takes twice its forward.

Legend: P prompt tokens, R response tokens, D hidden, I intermediate, H query heads, K kv heads, d head size, L layers,
V vocabulary, W vision width, S patches of a frame pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.core.shapes import ModelShapes


@dataclass(frozen=True, slots=True)
class PromptSize:
    """A prompt as the model sees it."""

    tokens: int
    """P, media included."""
    grids: tuple[tuple[int, int, int], ...] = ()
    """(frame pairs, patches down, patches across) of every video; an image has one frame pair."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One prompt and the lengths of its responses."""

    prompt: PromptSize
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Of one model; FLOPs of a forward pass unless a name says otherwise."""

    shapes: ModelShapes

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one decoder layer: D (H + 2K) d + H d D + 3 D I."""
        shapes = self.shapes
        heads = shapes.head_count + 2 * shapes.kv_head_count
        attention = shapes.hidden_size * shapes.head_size * (heads + shapes.head_count)
        return attention + 3 * shapes.hidden_size * shapes.intermediate_size

    @property
    def head(self) -> int:
        """Logits of one token: 2 D V."""
        return 2 * self.shapes.hidden_size * self.shapes.vocab_size

    def decoder(self, new: int, before: int = 0) -> int:
        """`new` tokens after `before` ones whose keys and values are there: 2 a parameter and token, and 4 H d for every
        query and key that it sees, in each layer. Logits apart."""
        shapes = self.shapes
        pairs = new * before + new * (new + 1) // 2
        attention = 4 * shapes.head_count * shapes.head_size * pairs
        return shapes.layer_count * (2 * self.layer_parameters * new + attention)

    def vision(self, grids: Sequence[tuple[int, int, int]]) -> int:
        """Tower and merger. Windows at a frame's edge count as whole ones; full-attention blocks see a frame pair."""
        vision = self.shapes.vision
        width, unit = vision.hidden_size, vision.spatial_merge_size**2
        block = 4 * width * width + 3 * width * vision.intermediate_size
        patch = 2 * (width * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 + vision.depth * block)
        merger = 2 * (width * unit) ** 2 + 2 * width * unit * vision.out_hidden_size
        full = sum(index < vision.depth for index in vision.fullatt_block_indexes)
        total = 0
        for pairs, down, across in grids:
            patches = down * across
            seen = full * patches + (vision.depth - full) * min(vision.window_patches, patches)
            total += pairs * (patches * patch + patches // unit * merger + 4 * width * patches * seen)
        return total

    def prefix(self, prompt: PromptSize) -> int:
        """Vision and prompt, no logits: what a role's prefix computes once a group."""
        return self.vision(prompt.grids) + self.decoder(prompt.tokens)

    def suffix(self, prompt: PromptSize, length: int) -> int:
        """One response after its prompt, logits of every token included."""
        return self.decoder(length, prompt.tokens) + length * self.head

    def step(self, groups: Sequence[GroupWork], *, reference: bool, shared: bool = True) -> int:
        """Everything one iteration needs: rollout, reference (forward) and trainer (forward and backward).

        `shared`: prompts are computed once a group by every role, else reference and trainer compute them for every sample, as
        trainers without prefix sharing do.
        """
        scored = 3 + reference  # forward passes' worth: the trainer's forward and backward, the reference's forward
        total = 0
        for group in groups:
            prefix = self.prefix(group.prompt)
            responses = sum(self.suffix(group.prompt, length) for length in group.lengths)
            total += prefix + self.head + responses  # rollout
            total += scored * (prefix * (1 if shared else len(group.lengths)) + responses)
        return total

    def kv_token_bytes(self, item_bytes: int, tp: int = 1) -> int:
        """Keys and values of one token, all layers: 2 L K d items; on one of `tp` ranks, which have a head at least."""
        shapes = self.shapes
        return 2 * shapes.layer_count * max(1, shapes.kv_head_count // tp) * shapes.head_size * item_bytes

    def decode_weight_bytes(self, item_bytes: int) -> int:
        """Read in every token step: the layers' matrices and the head. Rows of the embedding are not worth counting."""
        shapes = self.shapes
        return (shapes.layer_count * self.layer_parameters + shapes.hidden_size * shapes.vocab_size) * item_bytes

    def kv_read_bytes(self, groups: Sequence[GroupWork], item_bytes: int, *, shared: bool) -> int:
        """Keys and values that decoding reads: each sample's context at every step, or with `shared` the prompt's once a group
        and step. A response's first token comes from prefill."""
        tokens = 0
        for group in groups:
            own = [length - 1 for length in group.lengths]
            tokens += sum(count * (count + 1) // 2 for count in own)
            tokens += group.prompt.tokens * (max(own, default=0) if shared else sum(own))
        return tokens * self.kv_token_bytes(item_bytes)

    def decode_bytes(self, groups: Sequence[GroupWork], item_bytes: int, *, shared: bool, replicas: int = 1) -> int:
        """What decoding must read when all samples decode at once: weights in every step, and keys and values; of these one of
        `replicas` reads its part."""
        steps = max((length for group in groups for length in group.lengths), default=1) - 1
        keys_values = self.kv_read_bytes(groups, item_bytes, shared=shared) // replicas
        return steps * self.decode_weight_bytes(item_bytes) + keys_values


def tokens_of(groups: Sequence[GroupWork]) -> tuple[int, int]:
    """(prompt tokens, a prompt counted once a group; response tokens)."""
    return sum(group.prompt.tokens for group in groups), sum(sum(group.lengths) for group in groups)
