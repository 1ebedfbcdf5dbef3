from pathlib import Path

import pytest

from rollplex_client.bench.job import Job
from rollplex_client.cli.published import PUBLISHED


@pytest.fixture
def job(tmp_path) -> Job:
    """3B, four prompts of 4096 tokens, on a GPU; no file but the config is there."""
    (tmp_path / "config.json").write_text((PUBLISHED / "Qwen2.5-VL-3B.json").read_text())
    workload = {"videos": [f"{number}.mp4" for number in range(4)], "texts": ["x"] * 4, "prompt_tokens": 4096,
                "media_tokens": 3888, "grid_thw": [8, 36, 54], "clips": {"frames": 16, "height": 504, "width": 756},
                "media": {"fps": 2.0, "min_frames": 16, "max_frames": 16, "video_min_pixels": 381024,
                          "video_max_pixels": 381024, "total_pixels": 6096384}}
    return Job("cuda", Path(tmp_path), tmp_path, workload, 8, 3, 225, 1024, 0.0, 0)
