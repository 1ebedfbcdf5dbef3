"""Settings of a mesh that is never more than its supervisor and small services that only serve."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollplex_client.cli.settings import Settings, parse_settings

SERVING = """
import sys
from rollplex.core.strict import read_toml
from rollplex.rpc.server import run, serve
directory = read_toml(__import__("pathlib").Path(sys.argv[2]))["mesh"]["runtime_dir"]
run(serve("{name}", f"unix:{{directory}}/{name}.sock", lambda server: []))
"""
SMALL_MODEL = {"model_type": "qwen2_5_vl", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 203,
               "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}}


@contextmanager
def small_settings() -> Iterator[Settings]:
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "model.safetensors"):
            (model / name).touch()
        (model / "config.json").write_text(json.dumps(SMALL_MODEL))
        yield parse_settings({"mesh": {"runtime_dir": f"{folder}/rt", "drain_timeout_s": 1.0},
                              "model": {"checkpoint": f"{folder}/model"}})
