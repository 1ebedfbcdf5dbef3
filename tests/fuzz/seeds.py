"""Inputs to begin with, one list a target, made in code: nothing binary is checked in."""

from __future__ import annotations

import io
import json
import random
import re

import av
import numpy as np
from PIL import Image

from rollplex.core.config import RunConfig
from rollplex.core.strict import to_plain
from rollplex.v1 import coordinator_service_pb2 as pb

TOKENS = (b"[", b"{", b'"', b"null", b"-1", b"1e999", b"NaN", b"\x00", b"\xff" * 4, b"[[]]", b"{}")


def seeds(target: str) -> list[bytes]:
    return _MAKERS[target]()


def dictionary(target: str) -> list[bytes]:
    """Words that a fuzzer should not have to guess: the strings of the seeds, and JSON's own."""
    texts = [] if target == "media_headers" else seeds(target)
    words = {word for data in texts for word in re.findall(rb'"[^"]{1,40}"', data)}
    return sorted(words | {*TOKENS, b":", b",", b"true", b"[{}]", b'{"a":1}', b"1.5"})


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to four small changes: a bit, a cut, a repeat, an insertion, a number at its edge."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:at + rng.randrange(1, 16)]
            case 2:
                out[at:at] = out[at:at + rng.randrange(1, 16)]
            case 3:
                out[at:at] = rng.choice(TOKENS)
            case 4:
                out[at:at + 4] = rng.choice((b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"0000"))
    return bytes(out)


def _frames() -> list[bytes]:
    messages = ({"op": "hello", "process": "trainer-0", "role": "trainer"}, {"op": "redeem", "ticket": "ticket-00"},
                {"op": "deposit", "ticket": "ticket-00"}, {"op": "ping"}, {"op": "bye"},
                {"error": {"kind": 5, "metadata": {"a": 1e300}}},
                {"error": {"kind": "Forbidden", "reason": "PEER_UID", "message": "no", "metadata": {"uid": "5"}}})
    return [flag + json.dumps(message).encode() for message in messages for flag in (b"\0", b"\1")]


def _keeper() -> list[bytes]:
    messages = ({"op": "put", "name": "slab/a", "metadata": {"size": 5}}, {"op": "drop", "name": "slab/a"}, {"op": "take_all"},
                {"op": "refill"}, {"op": "refilled"}, {"op": "put", "name": [], "metadata": {}},
                {"op": "put", "name": "a", "metadata": 5})
    lines = [flag + json.dumps(message).encode() for message in messages for flag in (b"0", b"1")]
    return [*lines, b"\n".join(lines[:4]), b"\n".join(lines[4:8])]


def _tickets() -> list[bytes]:
    return [bytes((0, 0, 1, 0, 1, 0)), bytes((0, 3, 3, 255, 1, 3, 4, 0)), bytes((0, 1, 0, 2, 2, 1, 4, 129, 6, 2))]


def _configs() -> list[bytes]:
    plain = to_plain(RunConfig())
    parts = [{key: value} for key, value in plain.items()]
    return [json.dumps(item).encode() for item in ({}, plain, *parts)]


def _rows() -> list[bytes]:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    rows = (
        {"problem": "p", "path": "a.mp4", "data_type": "video", "problem_type": "multiple choice", "options": ["A"],
         "solution": "A"},
        {"prompt": [{"role": "user", "content": "<image> q"}], "images": ["a.png"], "reward_model": {"ground_truth": "1"},
         "extra_info": {"problem_type": "numerical"}},
        {"messages": messages, "images": [{"path": "a.png", "max_pixels": 1000}], "answer": "x"},
        {"messages": [{"role": "user", "content": 1000}], "answer": "x"},
        {"prompt": "q", "reward_model": {}, "problem_type": ["OCR"]},
        {"prompt": "q", "videos": [{"video": ["1.png", "2.png"], "fps": 2.0}], "ground_truth": 5},
    )
    group = pb.PromptGroup(messages_json=json.dumps(messages), media=[pb.MediaSource(kind="image", path="/a.png")],
                           ground_truth="x")
    return [*(json.dumps(row).encode() for row in rows), group.SerializeToString()]


def _media() -> list[bytes]:
    found = []
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        file = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(file, kind)
        found.append(b"\0" + file.getvalue())
    for name, codec in (("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg")):
        file = io.BytesIO()
        with av.open(file, "w", format=name) as out:
            stream = out.add_stream(codec, rate=8, width=32, height=32, pix_fmt="yuvj420p" if codec == "mjpeg" else "yuv420p")
            for shade in range(4):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade * 60, np.uint8), format="rgb24")
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
        found.append(b"\1" + file.getvalue())
    return found


_MAKERS = {"handle_frames": _frames, "keeper_frames": _keeper, "tickets": _tickets, "run_config": _configs, "prompt_rows": _rows,
           "media_headers": _media}
