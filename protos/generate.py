"""Regenerates protos/gen from protos/rollplex/v1 (`python protos/generate.py [--out DIR]`)."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `out`; raises RuntimeError when protoc refuses a file."""
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in (ROOT / "rollplex" / "v1").glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}",
                 f"--grpc_python_out={out}", *sources]
    if protoc.main(arguments):
        raise RuntimeError("protoc refused the files; its message stands above")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "gen")
    generate(parser.parse_args().out)
