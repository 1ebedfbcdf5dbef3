"""Which files may be opened."""

from __future__ import annotations

import os

import pytest

from rollplex.core.errors import BadInput, Forbidden
from rollplex.data.limits import MediaLimits
from rollplex.data.paths import open_media, resolve_media


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"content")
    (tmp_path / "secret").write_bytes(b"secret")
    return root


def test_files_inside_a_root(root, tmp_path):
    (root / "link").symlink_to("file")
    (tmp_path / "alias").symlink_to(root)
    for path in (root / "file", root / "link", tmp_path / "alias" / "file", root / ".." / "root" / "file"):
        assert resolve_media(path, [tmp_path / "none", root]) == root / "file"
    assert resolve_media(root / "file", [tmp_path / "alias"]) == root / "file"
    fd = open_media(root / "link", [root])
    assert os.read(fd, 100) == b"content"
    os.close(fd)


@pytest.mark.parametrize("check", [resolve_media, open_media])
def test_escapes_are_forbidden(root, tmp_path, check):
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    for path in (tmp_path / "secret", root / "link", root / "folder" / "secret", f"{root}/../secret", "/etc/passwd"):
        with pytest.raises(Forbidden) as caught:
            check(path, [root])
        assert str(path) in str(caught.value) and str(root) in str(caught.value)
    with pytest.raises(Forbidden, match=r"\(none\)"):
        check(root / "file", [])
    (tmp_path / "rooted").mkdir()
    (tmp_path / "rooted" / "file").touch()
    with pytest.raises(Forbidden):
        check(tmp_path / "rooted" / "file", [root])


@pytest.mark.parametrize(("swap", "error"), [("folder", Forbidden), ("file", BadInput)])
def test_a_link_put_there_between_check_and_open(root, tmp_path, monkeypatch, swap, error):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "clip").write_text("secret")
    (root / "folder").mkdir()
    (root / "folder" / "clip").write_text("fine")
    really_open, opened = os.open, []

    def open_after_the_swap(path, *arguments):
        if swap == "folder":
            (root / "folder").rename(root / "was")
            (root / "folder").symlink_to(tmp_path / "outside")
        else:
            (root / "folder" / "clip").unlink()
            (root / "folder" / "clip").symlink_to(tmp_path / "outside" / "clip")
        opened.append(really_open(path, *arguments))
        return opened[-1]

    monkeypatch.setattr(os, "open", open_after_the_swap)
    with pytest.raises(error):
        open_media(root / "folder" / "clip", [root])
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("check", [resolve_media, open_media])
def test_what_is_no_usable_file(root, check):
    (root / "empty").touch()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to("loop")
    for name, reason in (
        ("missing", "MEDIA_MISSING"),
        ("file/below", "MEDIA_MISSING"),
        ("", "MEDIA_UNREADABLE"),
        ("pipe", "MEDIA_UNREADABLE"),
        ("loop", "MEDIA_UNREADABLE"),
        ("empty", "MEDIA_EMPTY"),
    ):
        with pytest.raises(BadInput) as caught:
            check(f"{root}/{name}", [root])
        assert caught.value.reason == reason, name
    for path in ("", "a\0b"):
        with pytest.raises(BadInput):
            check(path, [root])


def test_size_limit(root):
    with pytest.raises(BadInput, match=r"7 bytes, the limit is 6 \(max_file_bytes\)"):
        open_media(root / "file", [root], max_file_bytes=6)
    os.close(open_media(root / "file", [root], max_file_bytes=7))


@pytest.mark.parametrize(
    "bad", [{"fps": 0}, {"max_frames": 1}, {"min_frames": 20}, {"video_min_pixels": 1 << 30}, {"decode_timeout_s": -1}]
)
def test_limits_that_cannot_be(bad):
    with pytest.raises(BadInput, match=next(iter(bad))):
        MediaLimits(**bad)
