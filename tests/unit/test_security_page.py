"""SECURITY.md promises tests and keys: they are there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from rollplex.core.tcp_security import TcpSecurity

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_test_that_it_names_exists():
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    named, latest = [], ""
    for line in PAGE.splitlines():
        for file, name in re.findall(r"`(?:tests/[\w/]*/)?(test_\w+\.py)?(?:::(test_\w+))?`", line):
            latest = file or latest
            if name:
                named.append((latest, name))
                assert f"def {name}(" in files[latest], (latest, name)
            elif file:
                assert file in files
    assert len(named) > 20


def test_every_path_and_fuzz_target_that_it_names_exists():
    for path in re.findall(r"`(tests/[\w/]+\.py)", PAGE):
        assert (ROOT / path).is_file(), path
    source = (ROOT / "tests" / "fuzz" / "targets.py").read_text()
    lines = [line for line in PAGE.splitlines() if "fuzz target" in line]
    targets = {name for line in lines for name in re.findall(r"`(\w+)`", line.split("fuzz target")[1])}
    assert len(targets) >= 4
    assert all(f'"{name}": {name}' in source for name in targets)


def test_every_key_about_tcp_is_named():
    for item in dataclasses.fields(TcpSecurity):
        assert item.name in PAGE
