"""The client stays light: no torch, and a help text that is there at once."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "megatron", "numpy", "pyarrow", "av")


def loaded_after(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
                          capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_client_loads_nothing_heavy():
    names = "Client, AsyncClient, Prompt, Media, prompt_from_row, Run, Event, Iteration"
    loaded = loaded_after(f"import rollplex_client\nfrom rollplex_client import {names}\nimport rollplex_client.report")
    assert not loaded.intersection(HEAVY)
    assert "grpc" in loaded


def test_the_commands_load_nothing_heavy():
    modules = ("mesh_commands", "train_command", "demo_command", "run_commands", "reward_commands", "config_command",
               "logs_command", "layout_command", "plan_command", "restart_command")
    loaded = loaded_after("\n".join(f"import rollplex_client.cli.{module}" for module in modules))
    assert not loaded.intersection(HEAVY)


def test_help_needs_no_grpc():
    loaded = loaded_after("from rollplex_client.cli.arguments import build_parser\nbuild_parser().format_help()")
    assert not loaded.intersection((*HEAVY, "grpc", "rich"))
