"""A tokenised prompt with its media, checked, as the model takes it.

Legend: P prompt tokens, n media, S patches of all images (or videos), C channels, T temporal patch, p patch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rollplex.core.errors import BadInput
from rollplex.core.prompt_hash import prompt_hash
from rollplex.memory.transfer import to_device
from rollplex.model.config import ModelConfig
from rollplex.model.positions import mrope_positions


@dataclass(frozen=True)
class PromptInputs:
    """Everything that the prefix is computed from; no array is modified afterwards."""

    token_ids: torch.Tensor
    """int64 [P]"""
    positions: torch.Tensor
    """int64 [3, P]"""
    delta: int
    """Response token j is at position P + j + delta."""
    pixel_values_images: torch.Tensor | None = None
    """float [S, C*T*p*p]"""
    image_grid_thw: torch.Tensor | None = None
    """int64 [n, 3] in patches"""
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thw: torch.Tensor | None = None
    second_per_grid_ts: torch.Tensor | None = None
    """float [n]"""
    host_token_ids: torch.Tensor | None = None
    """`token_ids` on the host, once those are elsewhere."""

    @classmethod
    def from_arrays(
        cls,
        config: ModelConfig,
        *,
        token_ids: np.ndarray,
        pixel_values_images: np.ndarray | torch.Tensor | None = None,
        image_grid_thw: np.ndarray | None = None,
        pixel_values_videos: np.ndarray | torch.Tensor | None = None,
        video_grid_thw: np.ndarray | None = None,
        second_per_grid_ts: np.ndarray | None = None,
    ) -> PromptInputs:
        """Check shapes, token range and placeholder counts, and compute positions; float arrays are not copied.

        Pixels may be on a device already; everything else is host memory.
        """
        tokens = np.asarray(token_ids, dtype=np.int64)
        _check_tokens(tokens, config)
        _check_pixels("image", config, pixel_values_images, image_grid_thw)
        _check_pixels("video", config, pixel_values_videos, video_grid_thw)
        positions, delta = mrope_positions(tokens, config, image_grid_thw, video_grid_thw, second_per_grid_ts)
        if tokens[-1] in (config.image_token_id, config.video_token_id):
            raise BadInput("the prompt ends inside a medium: its last token must be text", reason="BAD_PROMPT")
        return cls(
            token_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            delta=delta,
            pixel_values_images=_tensor(pixel_values_images),
            image_grid_thw=_tensor(image_grid_thw, np.int64),
            pixel_values_videos=_tensor(pixel_values_videos),
            video_grid_thw=_tensor(video_grid_thw, np.int64),
            second_per_grid_ts=_tensor(second_per_grid_ts, np.float32),
        )

    @property
    def token_count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def last_token(self) -> int:
        return int(self._host_tokens[-1])

    @property
    def suffix_position(self) -> int:
        """Position of the last prompt token, where every sample's suffix starts (the same on all axes)."""
        return self.token_count - 1 + self.delta

    @property
    def size_bytes(self) -> int:
        """Of what is on the model's device."""
        tensors = (self.token_ids, self.positions, self.pixel_values_images, self.pixel_values_videos)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device | str) -> PromptInputs:
        """Tokens, positions and pixels on `device`, without waiting for it; what the host reads later (tokens, grids, timing)
        stays there too."""
        moved = {name: None if (tensor := getattr(self, name)) is None else to_device(tensor, device)
                 for name in ("token_ids", "positions", "pixel_values_images", "pixel_values_videos")}
        host = self._host_tokens
        return replace(self, **moved, host_token_ids=None if moved["token_ids"] is host else host)

    def with_pixels(self, dtype: torch.dtype) -> PromptInputs:
        """Pixels in the type that the tower computes in, which casts them anyway: half as large while they wait."""
        cast = {name: None if (tensor := getattr(self, name)) is None else tensor.to(dtype)
                for name in ("pixel_values_images", "pixel_values_videos")}
        return replace(self, **cast)

    def places_of(self, token: int, count: int) -> torch.Tensor:
        """int64 [n] on the host: where `token` stands among the first `count`."""
        return (self._host_tokens[:count] == token).nonzero()[:, 0]

    def hash(self) -> str:
        """Of host data alone."""
        arrays = (self._host_tokens, self.image_grid_thw, self.video_grid_thw, self.second_per_grid_ts)
        return prompt_hash(*arrays)

    @property
    def _host_tokens(self) -> torch.Tensor:
        return self.token_ids if self.host_token_ids is None else self.host_token_ids


def _check_tokens(tokens: np.ndarray, config: ModelConfig) -> None:
    if tokens.ndim != 1 or not len(tokens):
        raise BadInput(f"a prompt of token shape {tokens.shape}; expected at least one token", reason="EMPTY_PROMPT")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab_size:
        raise BadInput(
            f"token id {low if low < 0 else high} lies outside the vocabulary of {config.vocab_size}",
            reason="BAD_TOKEN_ID",
        )


def _check_pixels(
    kind: str, config: ModelConfig, pixels: np.ndarray | torch.Tensor | None, grids: np.ndarray | None
) -> None:
    if (pixels is None) != (grids is None):
        raise BadInput(f"{kind} pixels and {kind} grid come together or not at all", reason="BAD_MEDIA_GRID")
    if pixels is None:
        return
    patches = int(np.asarray(grids, dtype=np.int64).prod(axis=-1).sum())
    if tuple(pixels.shape) != (patches, config.patch_width):
        raise BadInput(
            f"{kind} pixels of shape {tuple(pixels.shape)}; the grid {np.asarray(grids).tolist()} needs "
            f"{(patches, config.patch_width)}",
            reason="BAD_MEDIA_GRID",
        )


def _tensor(array: np.ndarray | torch.Tensor | None, dtype: type | None = None) -> torch.Tensor | None:
    """Shares the array's memory where numpy and torch agree."""
    if array is None or isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
