"""The checked-in generated code is what the protos give, and every field is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = sorted((ROOT / "protos" / "rollplex" / "v1").glob("*.proto"))


def test_generated_code_is_current(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    import sys

    sys.path.insert(0, str(ROOT / "protos"))
    try:
        from generate import generate
    finally:
        sys.path.pop(0)
    generate(tmp_path)
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    kept = {path.relative_to(ROOT / "protos" / "gen"): path.read_bytes()
            for path in (ROOT / "protos" / "gen").rglob("*.py*") if path.suffix in (".py", ".pyi")}
    assert sorted(fresh) == sorted(kept)
    assert [str(path) for path in fresh if fresh[path] != kept[path]] == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_field_rpc_and_value_is_documented(path):
    lines = path.read_text().splitlines()
    member = re.compile(r"^\s+((repeated|optional)\s+)?[\w.]+(<.*>)?\s+\w+\s*=\s*\d+;|^\s+rpc |^\s+[A-Z_0-9]+ = [1-9]\d*;")
    bare = [f"{path.name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1)
            if member.match(line) and not lines[number - 2].strip().startswith("//")]
    assert bare == []
