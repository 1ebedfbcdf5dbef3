"""The mesh's MPS daemon as a process: start, quit, crash, fault; engines that hold on to it. A script is the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_mps import daemon_of, install

from rollplex.core.config import MeshSection
from rollplex.core.errors import BadInput, Unavailable, WrongState
from rollplex.core.strict import to_plain, to_toml
from rollplex.rpc.last_words import EXIT_STATUS
from rollplex.rpc.mps_link import hold_daemon
from rollplex_client.cli import mesh as mesh_module
from rollplex_client.cli.mps_control import ControlDaemon, find_control
from rollplex_client.cli.settings import parse_settings
from rollplex_client.cli.supervision import listener_pid

WAIT_S = 30.0


@pytest.fixture
def mesh(monkeypatch) -> Iterator[MeshSection]:
    """A mesh on GPUs, with the stand-in on PATH."""
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        install(Path(folder) / "bin")
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        (Path(folder) / "rt").mkdir(mode=0o700)
        section = MeshSection(runtime_dir=Path(folder) / "rt", devices="cuda")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(section.mps_pipe_dir))
        yield section


def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def service(mesh: MeshSection, **environment: str) -> Iterator[subprocess.Popen]:
    """The service's process, once it serves."""
    config = mesh.runtime_dir / "effective.toml"
    config.write_text(to_toml({"mesh": to_plain(mesh)}))
    process = subprocess.Popen([sys.executable, "-m", "rollplex_client.cli.mps_service", "--config", str(config)],
                               env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: listener_pid(mesh.mps_socket) is not None or process.poll() is not None)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def control_pid(mesh: MeshSection) -> int:
    return daemon_of(listener_pid(mesh.mps_socket))


def server_pid(mesh: MeshSection) -> int:
    return int((mesh.mps_log_dir / "servers").read_text().split()[0])


def say(mesh: MeshSection, status: str) -> None:
    """What the daemon says of its server from now on; nothing: it is gone."""
    (mesh.mps_log_dir / "servers").write_text(status and f"{server_pid(mesh)} {status}\n")


def held(mesh: MeshSection, *, wait_s: float = WAIT_S) -> threading.Event:
    """Set once the engine that holds the daemon would end."""
    ended = threading.Event()
    hold_daemon(mesh, wait_s=wait_s, end=ended.set)
    return ended


def test_start_and_quit(mesh):
    with service(mesh) as process:
        assert listener_pid(mesh.mps_socket) == process.pid
        daemon, server = control_pid(mesh), server_pid(mesh)
        for path in (mesh.mps_pipe_dir, mesh.mps_log_dir):
            assert path.stat().st_mode & 0o777 == 0o700
        ended = held(mesh)
        assert not ended.is_set()
    assert ended.wait(WAIT_S)
    assert process.returncode == 0
    assert (mesh.mps_log_dir / "commands").read_text().splitlines()[-1] == "quit"
    assert not alive(daemon) and not alive(server)
    assert not mesh.mps_socket.exists() and not mesh.mps_pipe_dir.exists()


def test_the_daemon_has_directories_of_its_own_and_every_gpu(mesh):
    with service(mesh, CUDA_VISIBLE_DEVICES="1", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10"):
        lines = (mesh.mps_log_dir / "environment").read_text().splitlines()
    assert f"CUDA_MPS_PIPE_DIRECTORY={mesh.mps_pipe_dir}" in lines
    assert f"CUDA_MPS_LOG_DIRECTORY={mesh.mps_log_dir}" in lines
    assert not any(line.startswith(("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE")) for line in lines)


def test_a_daemon_that_does_not_quit_is_ended(mesh):
    with service(mesh, FAKE_MPS="never quits"):
        daemon, server = control_pid(mesh), server_pid(mesh)
    assert not alive(daemon) and not alive(server)


def test_a_killed_daemon_ends_the_service_and_every_engine(mesh):
    with service(mesh) as process:
        first, second = held(mesh), held(mesh)
        server = server_pid(mesh)
        os.kill(control_pid(mesh), signal.SIGKILL)
        assert process.wait(WAIT_S) == 2
        assert "MPS_DOWN" in process.stderr.read()
        assert first.wait(WAIT_S) and second.wait(WAIT_S)
        assert not alive(server)
    with service(mesh):
        held(mesh)


def test_the_daemon_dies_with_a_killed_service(mesh):
    with service(mesh) as process:
        daemon, server = control_pid(mesh), server_pid(mesh)
        ended = held(mesh)
        process.kill()
        eventually(lambda: not alive(daemon))
        assert ended.wait(WAIT_S)
        os.kill(server, signal.SIGKILL)
    with service(mesh):
        held(mesh)


@pytest.mark.parametrize("status", ["FAULT", ""])
def test_a_server_that_faults_or_goes_restarts_every_engine(mesh, status):
    with service(mesh) as process:
        ended = held(mesh)
        pid = server_pid(mesh)
        say(mesh, status)
        assert ended.wait(WAIT_S)
        if status:
            # The server takes nobody until the clients of before are gone.
            with pytest.raises(Unavailable, match="no MPS daemon took this client"):
                held(mesh, wait_s=2.5)
            say(mesh, "ACTIVE")
        again = held(mesh)
        assert not again.is_set() and process.poll() is None
        os.kill(pid, signal.SIGKILL)


def test_a_daemon_that_fails_as_it_starts_is_one_line(mesh):
    with service(mesh, FAKE_MPS="fails") as process:
        assert process.wait(WAIT_S) == 2
        error = process.stderr.read()
    assert "ended with status 3" in error and str(mesh.mps_log_dir) in error


def test_without_the_command_the_policy_and_the_alternative_are_named(mesh, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="'mps-priority'.*time-slice") as raised:
        find_control(mesh.sharing)
    assert raised.value.reason == "MPS_MISSING"


def test_up_refuses_before_anything_starts(mesh, monkeypatch):
    settings = parse_settings({"mesh": to_plain(mesh)})
    mesh_module.check_sharing(settings)
    with pytest.raises(BadInput, match="107 bytes"):
        mesh_module.check_sharing(parse_settings({"mesh": {"devices": "cuda", "runtime_dir": "/run/" + "x" * 85}}))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="nvidia-cuda-mps-control"):
        mesh_module.check_sharing(settings)
    for without in ({"sharing": "time-slice"}, {"devices": "host"}):
        mesh_module.check_sharing(parse_settings({"mesh": to_plain(mesh) | without}))


def test_an_engine_without_the_policys_environment_is_refused(mesh, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    with pytest.raises(WrongState, match="rollplex up") as raised:
        hold_daemon(mesh)
    assert raised.value.reason == "MPS_ENVIRONMENT"


def test_an_engine_waits_for_the_daemon_only_where_there_is_one(mesh):
    for values in ({"sharing": "time-slice"}, {"devices": "host"}):
        hold_daemon(parse_settings({"mesh": to_plain(mesh) | values}).mesh, wait_s=0)
    with pytest.raises(Unavailable, match="rollplex up"):
        hold_daemon(mesh, wait_s=0.1)


def test_an_engine_process_ends_with_the_daemon(mesh):
    code = ("import sys, time; from pathlib import Path; from rollplex.core.config import MeshSection; "
            "from rollplex.rpc.mps_link import hold_daemon; "
            "hold_daemon(MeshSection(runtime_dir=Path(sys.argv[1]), devices='cuda')); print('held', flush=True); "
            "time.sleep(99)")
    with service(mesh):
        engine = subprocess.Popen([sys.executable, "-c", code, str(mesh.runtime_dir)], stdout=subprocess.PIPE, text=True)
        assert engine.stdout.readline() == "held\n"
    assert engine.wait(WAIT_S) == EXIT_STATUS
    engine.stdout.close()


@pytest.mark.parametrize("role", ["trainer", "reference", "rollout"])
def test_every_gpu_role_asks_for_the_daemon_before_it_imports_anything_of_cuda(mesh, role):
    config = mesh.runtime_dir / "effective.toml"
    config.write_text(to_toml({"mesh": to_plain(mesh), "model": {"checkpoint": "m"}}))
    code = ("import sys; from rollplex.core.entry import run_service; import rollplex.rpc.mps_link as link; "
            f"link.hold_daemon.__kwdefaults__['wait_s'] = 0.1; from rollplex.{role}.__main__ import main; "
            f"sys.argv = ['x', '--config', {str(config)!r}]; print(run_service(main), 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "MPS_DOWN" in done.stderr


def test_a_control_command_that_hangs_is_given_up(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    daemon = ControlDaemon(str(slow), tmp_path / "pipe", tmp_path / "log")
    with pytest.raises(Unavailable, match="within 0 s"):
        daemon.ask("get_server_list", timeout_s=0.2)
    daemon.stop(1.0)


def test_status_sees_a_daemon_that_lives(mesh):
    probe = mesh_module.HealthProbe(parse_settings({"mesh": to_plain(mesh)}))
    with service(mesh):
        assert probe.ask()["mps"] == "SERVING"
    assert probe.ask()["mps"] == "UNREACHABLE"
    probe.close()
