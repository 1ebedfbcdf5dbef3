"""Multimodal rotary positions of a prompt, by the model's definition.

After a medium, text resumes at the maximum over all three axes + 1. transformers 5 differs: after a video it resumes at
the video's first position + max(height, width).
Legend: P prompt tokens; axes are temporal, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollplex.core.errors import BadInput
from rollplex.model.config import ModelConfig

Grids = np.ndarray | Sequence[Sequence[int]] | None


def mrope_positions(
    token_ids: np.ndarray | Sequence[int],
    config: ModelConfig,
    image_grid_thw: Grids = None,
    video_grid_thw: Grids = None,
    second_per_grid_ts: Sequence[float] | np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """positions int64 [3, P] and delta: token j of the response is at P + j + delta on every axis."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    images, videos = _as_grids(image_grid_thw), _as_grids(video_grid_thw)
    seconds = np.ones(len(videos)) if second_per_grid_ts is None else np.asarray(second_per_grid_ts, dtype=np.float64)
    check_media_counts(tokens, config, images, videos, seconds)
    media = _Media(config, iter(images), zip(videos, seconds))
    is_media = (tokens == config.image_token_id) | (tokens == config.video_token_id)
    pieces, start, resume = [], 0, 0
    for index in np.flatnonzero(is_media):
        if index < start:
            continue
        text = np.arange(index - start) + resume
        pieces.append(np.broadcast_to(text, (3, len(text))))
        resume += len(text)
        medium = media.next_positions(tokens, int(index)) + resume
        pieces.append(medium)
        start, resume = int(index) + medium.shape[1], int(medium.max()) + 1
    text = np.arange(len(tokens) - start) + resume
    pieces.append(np.broadcast_to(text, (3, len(text))))
    positions = np.concatenate(pieces, axis=1).astype(np.int64)
    return positions, int(positions.max()) + 1 - len(tokens)


def check_media_counts(
    tokens: np.ndarray, config: ModelConfig, images: np.ndarray, videos: np.ndarray, seconds: np.ndarray
) -> None:
    """As many placeholder tokens as features, and a time interval for every video."""
    for kind, token, grids in (("image", config.image_token_id, images), ("video", config.video_token_id, videos)):
        if (grids <= 0).any() or (grids[:, 1:] % config.spatial_merge_size).any():
            raise BadInput(
                f"{kind} grid {grids.tolist()}: extents must be positive, height and width multiples of "
                f"{config.spatial_merge_size}",
                reason="BAD_MEDIA_GRID",
            )
        features = int(grids.prod(axis=1).sum()) // config.spatial_merge_size**2
        count = int((tokens == token).sum())
        if count != features:
            raise BadInput(
                f"{kind} features and {kind} tokens do not match: {count} tokens, {features} features "
                f"from {len(grids)} {kind}(s)",
                reason="PLACEHOLDER_MISMATCH",
                tokens=count,
                features=features,
            )
    if seconds.shape != (len(videos),) or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise BadInput(f"second_per_grid_ts {seconds.tolist()} for {len(videos)} video(s)", reason="BAD_MEDIA_TIMING")


class _Media:
    """Hands out the grids of a prompt in the order of their placeholders."""

    def __init__(self, config: ModelConfig, images, videos) -> None:
        self.config, self.images, self.videos = config, images, videos

    def next_positions(self, tokens: np.ndarray, index: int) -> np.ndarray:
        """[3, features] of the medium whose placeholders begin at `index`, counted from 0."""
        token = tokens[index]
        if token == self.config.image_token_id:
            (frames, height, width), interval = next(self.images), (0.0, 0.0)
        else:
            (frames, height, width), seconds = next(self.videos)
            interval = (seconds, self.config.tokens_per_second)
        grid = np.indices((frames, height // self.config.spatial_merge_size, width // self.config.spatial_merge_size))
        grid = grid.reshape(3, -1)
        # float32 and this order of factors, as published: the truncation would fall differently otherwise.
        scaled = grid[0].astype(np.float32) * np.float32(interval[0]) * np.float32(interval[1])
        grid[0] = scaled.astype(np.int64)
        if (tokens[index : index + grid.shape[1]] != token).any() or index + grid.shape[1] > len(tokens):
            raise BadInput(
                f"the placeholder run at token {index} is shorter than its medium's {grid.shape[1]} features",
                reason="PLACEHOLDER_MISMATCH",
            )
        return grid


def _as_grids(grids: Grids) -> np.ndarray:
    """int64 [n, 3]"""
    if grids is None:
        return np.zeros((0, 3), dtype=np.int64)
    array = np.asarray(grids, dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 3:
        raise BadInput(f"a media grid of shape {array.shape}; expected [n, 3]", reason="BAD_MEDIA_GRID")
    return array
