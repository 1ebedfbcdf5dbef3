"""The MPS daemon under a real supervisord: its place among the services, their environment, `status`, and a crash."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_mps import daemon_of, install

from rollplex.core.crash_points import process_state
from rollplex_client.cli import main, mesh_commands
from rollplex_client.cli import mesh as mesh_module
from rollplex_client.cli import programs as programs_module
from rollplex_client.cli.mesh import wait_until_serving
from rollplex_client.cli.programs import MPS, Program, programs, supervisor_config, write_files
from rollplex_client.cli.settings import Settings, merged, parse_settings
from rollplex_client.cli.supervision import Process, Supervisor, start

ENGINE = """
import os, sys
from pathlib import Path
from rollplex.core.crash_points import process_state
from rollplex.core.config import MeshSection
from rollplex.core.strict import parse, read_toml
from rollplex.rpc.mps_link import hold_daemon
mesh = parse(MeshSection, read_toml(Path(sys.argv[2]))["mesh"])
hold_daemon(mesh)
found = os.environ["CUDA_MPS_CLIENT_PRIORITY"] + os.environ.get("CUDA_MPS_LOG_DIRECTORY", "")
(mesh.runtime_dir / "priority").write_text(found)
from rollplex.rpc.server import run, serve
run(serve("trainer-0", mesh.address("trainer-0"), lambda server: []))
"""


@pytest.fixture
def settings(monkeypatch) -> Iterator[Settings]:
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        install(Path(folder) / "bin")
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        (Path(folder) / "rt").mkdir(mode=0o700)
        yield parse_settings({"mesh": {"runtime_dir": f"{folder}/rt", "devices": "cuda", "drain_timeout_s": 1.0}})


@pytest.fixture
def small_mesh(settings, tmp_path, monkeypatch) -> Settings:
    """The MPS service, and a "trainer-0" that holds it and does nothing but serve."""
    (tmp_path / "fake_mps_trainer.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # What the user's shell says of another daemon is not for this mesh.
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
    wanted = [next(program for program in programs(settings) if program.name == MPS),
              Program("trainer-0", "fake_mps_trainer", "trainer")]
    for module in (programs_module, mesh_module):
        monkeypatch.setattr(module, "programs", lambda settings: wanted)
    return settings


def pids(supervisor: Supervisor) -> dict[str, int]:
    return {item.name: item.pid for item in supervisor.processes()}


def control_pid(supervisor: Supervisor) -> int:
    return daemon_of(pids(supervisor)[MPS])


def test_a_killed_daemon_restarts_every_engine_and_down_ends_the_next_one(small_mesh):
    runtime_dir = small_mesh.mesh.runtime_dir
    start(runtime_dir, write_files(small_mesh))
    supervisor = Supervisor(runtime_dir)
    try:
        wait_until_serving(small_mesh, supervisor, timeout_s=60)
        assert (runtime_dir / "priority").read_text() == "1"
        before = pids(supervisor)
        os.kill(control_pid(supervisor), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while 0 in pids(supervisor).values() or set(pids(supervisor).items()) & set(before.items()):
            assert time.monotonic() < deadline, f"{before} and {pids(supervisor)}"
            time.sleep(0.1)
        wait_until_serving(small_mesh, supervisor, timeout_s=60)
        daemon = control_pid(supervisor)
    finally:
        supervisor.shut_down(60.0)
    # Ended, though perhaps not yet reaped by whoever inherited it.
    assert process_state(daemon) in ("", "Z", "X"), (small_mesh.mesh.mps_log_dir / "commands").read_text()
    assert (small_mesh.mesh.mps_log_dir / "commands").read_text().splitlines()[-1] == "quit"
    log = (runtime_dir / "logs" / "trainer-0.log").read_text()
    assert log.count("has a fault or is gone") == 1, log


def sections(settings) -> dict[str, dict[str, str]]:
    """supervisord.conf by section."""
    found: dict[str, dict[str, str]] = {}
    for line in supervisor_config(settings).splitlines():
        if line.startswith("["):
            current = found.setdefault(line.strip("[]"), {})
        elif line:
            current[line.partition("=")[0]] = line.partition("=")[2]
    return found


def test_the_supervisor_sets_each_roles_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    config = sections(parse_settings({"mesh": {"runtime_dir": "/run/m", "devices": "cuda", "sharing": "thread-cap",
                                               "prefix_sm_percent": 60}}))
    pipe = 'CUDA_MPS_PIPE_DIRECTORY="/run/m/mps"'
    capped = 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="60"'
    for name, expected in {
            "trainer-0": (pipe, 'CUDA_MPS_CLIENT_PRIORITY="1"', capped, 'OMP_NUM_THREADS="5"'),
            "reference-0": (pipe, 'CUDA_MPS_CLIENT_PRIORITY="1"', capped),
            "rollout-0": (pipe, 'CUDA_MPS_CLIENT_PRIORITY="0"')}.items():
        variables = config[f"program:{name}"]["environment"].split(",")
        assert set(expected) <= set(variables), name
        assert sum("CUDA_MPS" in variable for variable in variables) == len([x for x in expected if "CUDA_MPS" in x]), name
    for name in ("broker", "coordinator", "mps"):
        assert "CUDA_MPS" not in config[f"program:{name}"]["environment"], name
    # Engines stop before the daemon does: the groups stop one after the other, the highest priority first.
    assert config["group:custody"]["programs"] == "keeper,broker,mps"
    assert int(config["group:custody"]["priority"]) < int(config["group:work"]["priority"])


@pytest.mark.parametrize(("values", "expected", "words"), [
    ({}, {"policy": "mps-priority", "prefix_sm_percent": 50, "daemon": "UNREACHABLE"}, "mps-priority, MPS daemon UNREACHABLE"),
    ({"sharing": "time-slice"}, {"policy": "time-slice", "prefix_sm_percent": 50, "daemon": None}, "MPS daemon not used"),
    ({"devices": "host"}, None, "")])
def test_status_shows_the_policy_and_whether_its_daemon_lives(settings, monkeypatch, capsys, values, expected, words):
    running = merged(settings, {"mesh": values})
    write_files(running)
    rows = [Process(program.name, "RUNNING", 1, 1.0, 0, "") for program in programs(running)]
    monkeypatch.setattr(mesh_commands, "Supervisor", lambda runtime_dir: SimpleNamespace(processes=lambda: rows))
    for shown in (("--json",), ()):
        assert main([*shown, "--runtime-dir", str(settings.mesh.runtime_dir), "status"]) == 1
        printed = capsys.readouterr().out
        if shown:
            assert json.loads(printed)["sharing"] == expected
        elif words:
            assert words in printed
        else:
            assert "GPU sharing" not in printed


@pytest.mark.parametrize("values", [{"devices": "host"}, {"devices": "cuda", "sharing": "time-slice"}])
def test_no_daemon_where_none_is_needed(values):
    settings = parse_settings({"mesh": {"runtime_dir": "/run/m"} | values})
    assert "mps" not in [program.name for program in programs(settings)]
    has_directory = "CUDA_MPS_PIPE_DIRECTORY" in sections(settings)["program:trainer-0"]["environment"]
    # With a directory that holds no daemon, one of the machine's is not joined by accident.
    assert has_directory == (values["devices"] == "cuda")
