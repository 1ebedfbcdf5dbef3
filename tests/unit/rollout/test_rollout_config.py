import subprocess
import sys

import pytest

from rollplex.core.errors import BadInput
from rollplex.rollout.config import load_config

FILE = """
[model]
checkpoint = "/tmp/model"
[mesh]
runtime_dir = "/tmp/mesh"
[rollout]
max_rows = 64
[trainer]
anything = 1
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text(FILE)
    return file


def test_file_overrides_and_defaults(path):
    config = load_config(path, ["rollout.threads=2"])
    assert (config.rollout.engine, config.rollout.threads, config.rollout.max_rows) == ("torch", 2, 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_row=3", "max_rows"),
        ("rollout.max_rows=0", "at least 1"),
        ("rollout.engine=tensorrt", "torch"),
        ("model.dtype=int8", "bfloat16"),
    ],
)
def test_mistakes_are_named(path, override, words):
    with pytest.raises(BadInput, match=words):
        load_config(path, [override])


def test_config_is_checked_before_torch_is_imported(path):
    code = (
        "import sys; sys.argv=['x','--config',sys.argv[1],'--set','rollout.max_rows=no'];"
        "from rollplex.core.entry import run_service; from rollplex.rollout.__main__ import main; status = run_service(main);"
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "rollout.max_rows" in done.stderr
