import dataclasses

import numpy as np
import pytest
from fake_session import FakeSession
from tiny_checkpoint import PromptMaker

from rollplex.core import work
from rollplex.core.errors import BadInput, DataLoss
from rollplex.core.placement import Placement
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader, data_media_item
from rollplex.model import read_model_config


@pytest.fixture
def session():
    session = FakeSession()
    yield session
    session.close()


@pytest.fixture
def prompts(tiny, session):
    return PromptMaker(PromptProcessor.load(tiny, max_prompt_tokens=2048), session.add)


@pytest.fixture
def reader(tiny, session, prompts):
    return PromptReader(session, prompts.processor, read_model_config(tiny))


@pytest.mark.parametrize(("kind", "images", "videos"), [("text", 0, 0), ("image", 1, 0), ("video", 0, 1), ("mixed", 1, 1)])
def test_reads_what_the_coordinator_prepared(session, prompts, reader, kind, images, videos):
    group = prompts.group(kind, 3)
    inputs = reader.read(group)
    assert inputs.hash() == group.prompt_hash
    assert inputs.token_ids.tolist() == group.token_ids.tolist()
    assert (0 if inputs.image_grid_thw is None else len(inputs.image_grid_thw)) == images
    assert (0 if inputs.second_per_grid_ts is None else len(inputs.second_per_grid_ts)) == videos
    assert session.leases == []


def test_pixels_are_the_frames_of_the_slab(prompts, reader):
    first, second = reader.read(prompts.group("image", 1)), reader.read(prompts.group("image", 2))
    again = reader.read(prompts.group("image", 1))
    assert np.array_equal(first.pixel_values_images, again.pixel_values_images)
    assert not np.array_equal(first.pixel_values_images, second.pixel_values_images)


@pytest.mark.parametrize("change", ["hash", "fps", "token"])
def test_a_difference_is_refused_with_both_hashes(session, prompts, reader, change):
    group = prompts.group("video", 4)
    if change == "hash":
        group = dataclasses.replace(group, prompt_hash="0" * 64)
    elif change == "fps":
        group = dataclasses.replace(group, media=(dataclasses.replace(group.media[0], fps=3.0),))
    else:
        group.token_ids[0] += 1
    with pytest.raises(DataLoss) as caught:
        reader.read(group)
    assert caught.value.reason == "PROMPT_MISMATCH"
    assert caught.value.metadata["group_index"] == "4"
    assert caught.value.metadata["expected"] == group.prompt_hash
    assert caught.value.metadata["found"] in str(caught.value)
    assert session.leases == []


def test_media_that_do_not_fit_the_tokens_name_the_group(session, prompts, reader):
    group = dataclasses.replace(prompts.group("image", 6), media=())
    with pytest.raises(BadInput) as caught:
        reader.read(group)
    assert caught.value.reason == "PLACEHOLDER_MISMATCH"
    assert caught.value.metadata["group_index"] == "6"
    assert "group 6" in str(caught.value)


def test_media_in_two_slabs_are_refused(prompts, reader):
    one, two = prompts.group("image", 0), prompts.group("image", 1)
    with pytest.raises(BadInput, match="2 slabs"):
        reader.read(dataclasses.replace(one, media=one.media + two.media))


def test_frames_outside_the_slab_are_refused_and_the_lease_goes(session, prompts, reader):
    group = prompts.group("image", 0)
    far = dataclasses.replace(group.media[0].frames, offset_bytes=64)
    with pytest.raises(BadInput, match="slab"):
        reader.read(dataclasses.replace(group, media=(dataclasses.replace(group.media[0], frames=far),)))
    assert session.leases == []


def frames(**changes) -> Placement:
    values = {"slab": "s", "offset_bytes": 0, "shape": (4, 28, 28, 3), "strides": (2352, 84, 3, 1), "dtype": "uint8"}
    return Placement(**(values | changes))


def test_conversion_keeps_what_the_processor_needs():
    item = data_media_item(work.MediaItem("video", frames(), 2.5, "ab"))
    assert (item.kind, item.shape, item.fps, item.sha256) == ("video", (4, 28, 28, 3), 2.5, "ab")
    assert data_media_item(work.MediaItem("image", frames(), 0.0)).fps is None


@pytest.mark.parametrize(
    "item",
    [
        work.MediaItem("audio", frames(), 1.0),
        work.MediaItem("video", frames(), 0.0),
        work.MediaItem("image", frames(dtype="float32")),
        work.MediaItem("image", frames(shape=(28, 28, 3), strides=(84, 3, 1))),
        work.MediaItem("image", frames(shape=(0, 28, 28, 3))),
        work.MediaItem("image", frames(strides=(2352, 84, 1, 28))),
    ],
)
def test_conversion_refuses(item):
    with pytest.raises(BadInput):
        data_media_item(item)
