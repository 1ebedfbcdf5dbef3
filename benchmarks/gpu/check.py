"""Which modules a benchmark needs and this interpreter lacks: all at once, before minutes are spent. Exit status 3 if any."""

from __future__ import annotations

import importlib.util
import sys

ALWAYS = {
    "torch": "torch", "transformers": "transformers", "tokenizers": "tokenizers", "safetensors": "safetensors", "numpy": "numpy",
    "grpc": "grpcio", "grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection",
    "google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos", "uvloop": "uvloop", "supervisor": "supervisor",
    "rich": "rich", "jinja2": "jinja2", "av": "av", "PIL": "pillow", "pyarrow": "pyarrow", "megatron.core": "megatron-core"}
GPU = {"vllm": "vllm", "cuda.bindings": "cuda-bindings", "pynvml": "nvidia-ml-py"}
TRL = {"trl": "trl", "datasets": "datasets", "accelerate": "accelerate"}


def main(options: list[str]) -> int:
    words = " ".join(options).replace("=", " ").split()
    if {"-h", "--help"} & set(words):
        return 0
    needed = dict(ALWAYS)
    needed |= {} if "cpu" in words else GPU
    needed |= TRL if "trl" in words else {}
    missing = sorted(package for module, package in needed.items() if not _there(module))
    if missing:
        print(f"this interpreter ({sys.executable}) lacks: {', '.join(missing)}", file=sys.stderr)
        return 3
    return 0


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
