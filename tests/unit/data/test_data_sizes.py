"""Frame choice and frame size, against transformers' own function and qwen-vl-utils' rules worked out by hand."""

from __future__ import annotations

import pytest

from rollplex.data.sizes import frame_indices, smart_resize, video_frame_size
from rollplex.torchvision_ops import ensure_torchvision


def test_smart_resize_is_transformers_own():
    ensure_torchvision()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as reference

    for height in (1, 27, 28, 41, 42, 43, 56, 100, 199, 480, 1080):
        for width in (14, 28, 30, 70, 77, 640, 1920):
            if max(height, width) > 200 * min(height, width):
                continue
            for low, high in ((784, 784), (3136, 200704), (100352, 105369), (100352, 602112)):
                expected = reference(height, width, 28, low, high)
                assert smart_resize(height, width, 28, low, high) == expected


@pytest.mark.parametrize(("height", "width"), [(0, 28), (1, 201), (28, 5601)])
def test_shapes_that_have_no_size(height, width):
    with pytest.raises(ValueError, match="too narrow"):
        smart_resize(height, width, 28, 784, 7840)


@pytest.mark.parametrize(
    ("total", "rate", "count"),
    [(8, 4, 4), (300, 30, 16), (90, 30, 6), (3, 4, 2), (2, 4, 2), (5, 30, 4), (100, 30, 6), (16, 1, 16), (15, 1, 14)],
)
def test_frame_counts(total, rate, count):
    indices = frame_indices(total, rate, fps=2.0, min_frames=4, max_frames=16)
    assert len(indices) == count and indices[0] == 0 and indices[-1] == total - 1
    assert indices == sorted(set(indices))


def test_one_frame_is_kept_twice():
    assert frame_indices(1, 30, fps=2.0, min_frames=4, max_frames=16) == [0, 0]


def test_a_whole_video_has_a_ceiling_but_a_size_exists_always():
    size = {"factor": 28, "min_pixels": 4 * 784, "max_pixels": 64 * 784}
    assert video_frame_size(280, 280, 4, **size, total_pixels=1 << 30) == (224, 224)
    assert video_frame_size(280, 280, 4, **size, total_pixels=32 * 784) == (112, 112)
    assert video_frame_size(280, 280, 400, **size, total_pixels=32 * 784) == (56, 56)
