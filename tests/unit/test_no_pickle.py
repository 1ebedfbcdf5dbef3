"""Nothing of ours unpickles: bytes from a file, a socket or another rank must not be able to run code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("services", "rollplex_client", "examples", "protos", "benchmarks")
                 for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing"}
"""multiprocessing: its queues, pipes and managers pickle."""
CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
         "recv_object_list", "read_pickle", "to_pickle", "eval", "exec", "yaml.load", "allow_pickle"}
LOADS = {"torch.load", "torch.save", "torch.jit.load", "torch.package", "np.load", "numpy.load"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if isinstance(node.func, ast.Name) and name in CALLS or name in LOADS | CALLS or name.split(".")[-1] in CALLS - {
                    "eval", "exec"}:
                found.append(name)
            found += [word.arg for word in node.keywords if word.arg == "allow_pickle" and ast.unparse(word.value) != "False"]
    return found


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import multiprocessing.connection", "import torch\ntorch.load('x')",
    "np.load(p, allow_pickle=True)", "dist.all_gather_object(a, b)", "eval(x)", "import cloudpickle as c", "pd.read_pickle(x)"])
def test_the_scan_sees_it(source):
    assert offences(source)


@pytest.mark.parametrize("source", ["model.eval()", "json.loads(x)", "safetensors.load(x)", "dist.all_gather(a, b)"])
def test_the_scan_lets_pass(source):
    assert offences(source) == []


def test_no_source_of_ours_pickles():
    assert len(SOURCES) > 200
    found = {str(path.relative_to(ROOT)): what for path in SOURCES if (what := offences(path.read_text()))}
    assert found == {}
