"""Decoding in children: what comes out, what each bad file says, and what a dead child costs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from rollplex.core.errors import BadInput, DeadlineExceeded, Forbidden, InternalError, Unavailable
from rollplex.data.decoder import MediaDecoder
from rollplex.data.decoder import _slab as checked_slab
from rollplex.data.limits import MediaLimits
from rollplex.data.media import ALIGN_BYTES, SLAB_SEALS, MediaItem, view_frames
from rollplex.data.rows import MediaRef


def open_fds(kind: str = "") -> set[tuple[int, str]]:
    """This process's descriptors whose target starts with `kind`. Tests look at what is new: other tests' threads and garbage
    open and close descriptors at any moment, so a count says nothing."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((int(entry.name), str(entry.readlink())))
    return {(fd, target) for fd, target in found if target.startswith(kind)}


def contents(media):
    return [array.copy() for array in view_frames(media.fd, media.size_bytes, media.items)]


async def refusal(decoder, media, limits, root) -> BadInput:
    with pytest.raises(BadInput) as caught:
        (await decoder.decode([media], limits, [root])).close()
    assert caught.value.metadata["path"] == media.paths[0]
    return caught.value


async def test_one_sealed_slab_holds_all_media_of_a_prompt(decoder, clip_ref, image, small_limits, tmp_path):
    still = MediaRef("image", str(image(width=84)))
    with await decoder.decode([still, clip_ref(), still], small_limits, [tmp_path]) as media:
        assert [item.kind for item in media.items] == ["image", "video", "image"]
        assert [item.shape for item in media.items] == [(1, 56, 84, 3), (4, 56, 56, 3), (1, 56, 84, 3)]
        assert all(item.offset_bytes % ALIGN_BYTES == 0 for item in media.items)
        assert os.fstat(media.fd).st_size == media.size_bytes
        assert fcntl.fcntl(media.fd, fcntl.F_GET_SEALS) == SLAB_SEALS
        with pytest.raises(PermissionError):
            os.pwrite(media.fd, b"x", 0)
        frames = contents(media)
        assert [hashlib.sha256(array).hexdigest() for array in frames] == [item.sha256 for item in media.items]
        np.testing.assert_array_equal(frames[0][0], np.asarray(Image.open(tmp_path / "image.png")))
        assert [MediaItem.from_json(item.to_json()) for item in media.items] == list(media.items)


async def test_frames_and_timing_are_those_of_the_source(decoder, clip_ref, small_limits, tmp_path):
    with await decoder.decode([clip_ref(frames=24, rate=8)], small_limits, [tmp_path]) as media:
        (item,) = media.items
        (frames,) = contents(media)
    assert item.shape[0] == 6 and item.source_frames == 24 and item.source_duration_s == 3.0
    assert item.fps == 2.0
    kept = [0, 5, 9, 14, 18, 23]
    assert item.timestamps_s == pytest.approx([index / 8 for index in kept])
    assert np.abs(frames[:, 28, 50, 0] - 8.0 * np.array(kept)).max() <= 3


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
async def test_seeking_gives_what_reading_through_gives(decoder, video, small_limits, tmp_path, name):
    path = video(name, frames=400, rate=25, gop=12)
    wanted = {}
    with av.open(str(path)) as container:
        for index, frame in enumerate(container.decode(video=0)):
            wanted[index] = frame.to_ndarray(format="rgb24")
    with await decoder.decode([MediaRef("video", str(path))], small_limits, [tmp_path]) as media:
        (frames,) = contents(media)
    kept = [round(step * 399 / 15) for step in range(16)]
    np.testing.assert_array_equal(frames, [wanted[index] for index in kept])


async def test_a_single_frame_is_kept_twice_and_odd_counts_become_even(decoder, clip_ref, small_limits, tmp_path):
    media = [clip_ref("one.mp4", frames=1), clip_ref("three.mp4", frames=3)]
    with await decoder.decode(media, small_limits, [tmp_path]) as decoded:
        assert [item.shape[0] for item in decoded.items] == [2, 2]
        assert decoded.items[1].timestamps_s == (0.0, 0.5)


async def test_frame_files_are_a_video(decoder, image, small_limits, tmp_path):
    files = tuple(str(image(f"{index}.png", seed=index)) for index in range(3))
    with await decoder.decode([MediaRef("video", frames=files, fps=1.0)], small_limits, [tmp_path]) as media:
        (item,) = media.items
        (frames,) = contents(media)
    assert item.shape == (4, 56, 56, 3) and item.fps == 1.0 and item.timestamps_s == (0.0, 1.0, 2.0, 2.0)
    np.testing.assert_array_equal(frames[2], frames[3])


async def test_the_rows_own_options_win_within_the_limits(decoder, clip_ref, small_limits, tmp_path):
    media = replace(clip_ref(frames=16), fps=4.0, max_frames=6, min_pixels=4 * 56 * 56, max_pixels=5 * 56 * 56)
    with await decoder.decode([media], small_limits, [tmp_path]) as decoded:
        assert decoded.items[0].shape == (6, 112, 112, 3)
    error = await refusal(decoder, replace(media, max_frames=17), small_limits, tmp_path)
    assert error.metadata["asked"] == "17" and error.metadata["limit"] == "16"


async def test_sizes_are_multiples_of_the_factor(decoder, image, tmp_path):
    media = MediaRef("image", str(image(width=200, height=100)))
    with await decoder.decode([media], MediaLimits(), [tmp_path], factor=32) as decoded:
        assert decoded.items[0].shape == (1, 96, 192, 3)


async def test_transparency_and_rotation(decoder, tmp_path, small_limits):
    clear = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    turned = Image.new("RGB", (84, 56))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    media = [MediaRef("image", str(tmp_path / name)) for name in ("clear.png", "turned.jpg")]
    with await decoder.decode(media, small_limits, [tmp_path]) as decoded:
        assert contents(decoded)[0].min() == 255
        assert decoded.items[1].shape == (1, 84, 56, 3)


async def test_a_video_filmed_upright_stays_upright(decoder, video, small_limits, tmp_path):
    path = video(width=84, height=56)
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 44
    quarter_turn_clockwise = (0, 1 << 16, 0, -1 << 16, 0, 0)
    data[matrix : matrix + 24] = struct.pack(">6i", *quarter_turn_clockwise)
    path.write_bytes(data)
    with await decoder.decode([MediaRef("video", str(path))], small_limits, [tmp_path]) as media:
        (frames,) = contents(media)
    assert frames.shape == (4, 84, 56, 3)
    assert frames[0, 20].mean() > frames[0, 60].mean() + 30, "the bright left half is now on top"


def cut(path, share=0.6):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.mp4", b"", "MEDIA_EMPTY"),
        ("text.mp4", b"this is no video" * 50, "MEDIA_UNREADABLE"),
        ("list.mp4", b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n", "MEDIA_UNREADABLE"),
        ("list.ffconcat", b"ffconcat version 1.0\nfile other.mp4\n", "MEDIA_UNREADABLE"),
    ],
)
async def test_what_is_no_video(decoder, small_limits, tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    pids = decoder.pids
    error = await refusal(decoder, MediaRef("video", str(tmp_path / name)), small_limits, tmp_path)
    assert error.reason == reason and decoder.pids == pids


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv"])
async def test_a_truncated_video(decoder, video, small_limits, tmp_path, name):
    path = video(name, frames=200, rate=25, codec="mpeg4")
    if name.endswith("mp4"):
        # The index of a plain mp4 is at its end; with it in front, a cut is harder to see.
        fast = tmp_path / "fast.mp4"
        with av.open(str(path)) as source, av.open(str(fast), "w", options={"movflags": "faststart"}) as target:
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    target.mux(packet)
        assert (await refusal(decoder, MediaRef("video", str(cut(path))), small_limits, tmp_path)).reason
        path = fast
    error = await refusal(decoder, MediaRef("video", str(cut(path))), small_limits, tmp_path)
    assert error.reason == "MEDIA_TRUNCATED" and "cut off" in str(error)


async def test_videos_without_a_frame(decoder, small_limits, tmp_path):
    sound = tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    error = await refusal(decoder, MediaRef("video", str(sound)), small_limits, tmp_path)
    assert error.reason == "MEDIA_NO_FRAMES" and "no video stream" in str(error)
    for name in ("nothing.mkv", "nothing.avi", "nothing.mp4"):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("mpeg4", rate=4)
            stream.width = stream.height = 56
            stream.pix_fmt = "yuv420p"
            container.start_encoding()
        error = await refusal(decoder, MediaRef("video", str(tmp_path / name)), small_limits, tmp_path)
        assert error.reason == "MEDIA_NO_FRAMES"


@pytest.mark.parametrize(
    ("limit", "value"),
    [("max_file_bytes", 100), ("max_source_frames", 7), ("max_source_pixels", 56 * 55), ("max_slab_bytes", 9000)],
)
async def test_a_huge_video(decoder, clip_ref, small_limits, tmp_path, limit, value):
    error = await refusal(decoder, clip_ref(), replace(small_limits, **{limit: value}), tmp_path)
    assert error.reason == "MEDIA_TOO_LARGE" and limit in str(error) and str(value) in str(error)


async def test_too_many_media_or_frame_files(decoder, image, small_limits, tmp_path):
    still = MediaRef("image", str(image()))
    with pytest.raises(BadInput, match=r"3 media, the limit is 2 \(max_items\)"):
        await decoder.decode([still] * 3, replace(small_limits, max_items=2), [tmp_path])
    frames = MediaRef("video", frames=(still.path,) * 17)
    assert "17 frame files" in str(await refusal(decoder, frames, small_limits, tmp_path))
    with pytest.raises(BadInput, match="no media"):
        await decoder.decode([], small_limits, [tmp_path])


async def test_unreadable_images(decoder, image, small_limits, tmp_path):
    (tmp_path / "text.png").write_bytes(b"this is no image")
    for path in (tmp_path / "text.png", cut(image("cut.png"))):
        error = await refusal(decoder, MediaRef("image", str(path)), small_limits, tmp_path)
        assert error.reason == "MEDIA_UNREADABLE"
    narrow = image("narrow.png", width=600, height=2)
    assert "too narrow" in str(await refusal(decoder, MediaRef("image", str(narrow)), small_limits, tmp_path))


async def test_the_bad_one_of_several_is_named(decoder, image, small_limits, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no")
    good, bad = MediaRef("image", str(image())), MediaRef("image", str(tmp_path / "bad.png"))
    frames = MediaRef("video", frames=(good.path, bad.path))
    for media in ([good, bad], [good, frames]):
        with pytest.raises(BadInput) as caught:
            await decoder.decode(media, small_limits, [tmp_path])
        assert caught.value.metadata["path"] == bad.path


async def test_paths_outside_the_roots(decoder, image, small_limits, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.png").symlink_to(image())
    for path in (image(), inside / "link.png", inside / ".." / "image.png"):
        with pytest.raises(Forbidden) as caught:
            await decoder.decode([MediaRef("image", str(path))], small_limits, [inside])
        assert str(path) in str(caught.value) and str(inside) in str(caught.value)


async def test_memory_limit(decoder, tmp_path, clip_ref, small_limits):
    Image.new("RGB", (7000, 7000)).save(tmp_path / "large.png")
    tight = replace(small_limits, child_memory_bytes=400 << 20)
    error = await refusal(decoder, MediaRef("image", str(tmp_path / "large.png")), tight, tmp_path)
    assert error.reason == "MEDIA_MEMORY" and str(400 << 20) in str(error)
    (await decoder.decode([clip_ref()], tight, [tmp_path])).close()


async def stopped(decoder, *args):
    """A decode that hangs: the only child is stopped, as if it were deep in a decoder."""
    (pid,) = decoder.pids
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.ensure_future(decoder.decode(*args))
    await asyncio.sleep(0.1)
    return pid, task


async def test_a_killed_child_costs_one_prompt(decoder, clip_ref, small_limits, tmp_path):
    media = clip_ref()
    pid, task = await stopped(decoder, [media], small_limits, [tmp_path])
    waiting = asyncio.ensure_future(decoder.decode([media], small_limits, [tmp_path]))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BadInput) as caught:
        await task
    assert caught.value.reason == "MEDIA_CRASHED" and "SIGKILL" in str(caught.value) and media.path in str(caught.value)
    (await waiting).close()
    assert pid not in decoder.pids and len(decoder.pids) == 1


async def test_a_child_that_died_idle_costs_nothing(decoder, clip_ref, small_limits, tmp_path):
    os.kill(decoder.pids[0], signal.SIGKILL)
    await asyncio.sleep(0.1)
    (await decoder.decode([clip_ref()], small_limits, [tmp_path])).close()


async def test_timeout(decoder, clip_ref, small_limits, tmp_path):
    media = clip_ref()
    pid, task = await stopped(decoder, [media], replace(small_limits, decode_timeout_s=0.3), [tmp_path])
    with pytest.raises(DeadlineExceeded, match=r"0.3 s \(decode_timeout_s\)") as caught:
        await task
    assert caught.value.metadata["path"] == media.path
    (await decoder.decode([media], small_limits, [tmp_path])).close()
    assert pid not in decoder.pids


async def test_cancellation_replaces_the_child(decoder, clip_ref, small_limits, tmp_path):
    pid, task = await stopped(decoder, [clip_ref()], small_limits, [tmp_path])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (await decoder.decode([clip_ref()], small_limits, [tmp_path])).close()
    assert pid not in decoder.pids


async def test_no_fd_and_no_child_is_left(clip_ref, small_limits, tmp_path):
    before = open_fds()
    decoder = MediaDecoder(workers=2)
    await decoder.start()
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    good, bad = clip_ref(), MediaRef("video", str(tmp_path / "bad.mp4"))
    running = open_fds()
    links = {target for _, target in running - before if target.startswith("socket:")}
    assert links, "the children's sockets"
    outcomes = await asyncio.gather(
        *(decoder.decode([media], small_limits, [tmp_path]) for media in [good, bad] * 20), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, BadInput) or outcome.close() is None
    assert not open_fds("/memfd:") - before
    os.kill(decoder.pids[0], signal.SIGSTOP)
    hanging = asyncio.gather(
        *(decoder.decode([good], replace(small_limits, decode_timeout_s=0.3), [tmp_path]) for _ in range(3)),
        return_exceptions=True,
    )
    for outcome in await hanging:
        assert isinstance(outcome, DeadlineExceeded) or outcome.close() is None
    pids = decoder.pids
    await decoder.close()
    assert not open_fds("/memfd:") - before
    assert not links & {target for _, target in open_fds("socket:")}
    assert not set(pids) & {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


async def test_closing_fails_what_runs_and_what_waits(clip_ref, small_limits, tmp_path):
    decoder = MediaDecoder(workers=1)
    await decoder.start()
    _, running = await stopped(decoder, [clip_ref()], small_limits, [tmp_path])
    waiting = asyncio.ensure_future(decoder.decode([clip_ref()], small_limits, [tmp_path]))
    await asyncio.sleep(0.1)
    await decoder.close()
    for task in (running, waiting):
        with pytest.raises(Unavailable):
            await task
    with pytest.raises(Unavailable):
        await decoder.decode([clip_ref()], small_limits, [tmp_path])


@pytest.mark.parametrize(
    "change",
    [
        {"offset_bytes": 64},
        {"offset_bytes": -64},
        {"shape": [1, 4, 16, 4]},
        {"shape": [-1, -4, 16, 3]},
        {"kind": "video"},
        {"unknown": 1},
    ],
)
def test_a_childs_answer_is_not_taken_on_trust(change):
    item = MediaItem("image", 0, (1, 4, 16, 3), None, (), 1, None, "").to_json()
    request = {"items": [{"kind": "image"}], "max_slab_bytes": 1000}

    def slab(seals=SLAB_SEALS, size=192):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.truncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    checked_slab({"items": [item]}, [slab()], request).close()
    for reply, fds in (
        ({"items": [item | change]}, [slab()]),
        ({"items": [item]}, [slab(seals=0)]),
        ({"items": [item]}, [slab(size=191)]),
        ({"items": [item]}, []),
        ({"items": [item]}, [slab(), slab()]),
        ({"items": []}, [slab()]),
        ({}, [slab()]),
    ):
        with pytest.raises(InternalError, match="cannot be right"):
            checked_slab(reply, fds, request)
    assert not open_fds("/memfd:test")


def test_the_coordinator_loads_no_torch_and_no_decoder():
    modules = ", ".join(f"rollplex.data.{name}" for name in ("decoder", "datasets", "rows", "paths", "limits", "media"))
    code = f"import sys, {modules}; print(sorted({{'torch', 'numpy', 'av', 'PIL', 'pyarrow'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


async def test_sixty_clips_at_once_are_each_its_own(video, small_limits, tmp_path):
    """How fast: benchmarks/media/decoding.py."""
    media = [MediaRef("video", str(video(f"{n}.mp4", frames=2 + n % 7, width=28, height=28))) for n in range(60)]
    async with MediaDecoder(workers=2) as decoder:
        decoded = await asyncio.gather(*(decoder.decode([entry], small_limits, [tmp_path]) for entry in media))
        for entry, found in zip(media[::7], decoded[::7]):
            with found, await decoder.decode([entry], small_limits, [tmp_path]) as again:
                assert found.items == again.items
                assert os.pread(found.fd, found.size_bytes, 0) == os.pread(again.fd, again.size_bytes, 0)
    for entry in decoded:
        entry.close()
