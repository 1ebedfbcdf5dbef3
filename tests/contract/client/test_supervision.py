"""A real supervisord with small services: up, restart, a service that does not start, directories in use."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from fake_coordinator import FakeCoordinator
from small_services import SERVING, small_settings

from rollplex.core.errors import BadInput, DeadlineExceeded, NotFound, Unavailable, WrongState
from rollplex.v1 import types_pb2
from rollplex_client.cli import mesh, programs
from rollplex_client.cli.mesh import bring_up, stop_timeout_s, wait_until_serving
from rollplex_client.cli.output import Output
from rollplex_client.cli.programs import Program, service_config, supervisor_config, write_files
from rollplex_client.cli.restart_command import restart
from rollplex_client.cli.settings import Settings, merged, parse_settings
from rollplex_client.cli.supervision import Supervisor, claimed, listener_pid


@pytest.fixture
def settings() -> Iterator[Settings]:
    with small_settings() as settings:
        yield settings


@pytest.fixture
def small_mesh(settings, tmp_path, monkeypatch) -> Settings:
    """Two services, "broker" and "trainer-0", that do nothing but serve."""
    names = {"broker": "fake_service_broker", "trainer-0": "fake_service_trainer"}
    for name, module in names.items():
        (tmp_path / f"{module}.py").write_text(SERVING.format(name=name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    wanted = [Program(name, module, "broker") for name, module in names.items()]
    monkeypatch.setattr(programs, "CUSTODY", ("broker",))
    for module in (programs, mesh):
        monkeypatch.setattr(module, "programs", lambda settings: wanted)
    return settings


def test_up_restart_and_down(small_mesh):
    supervisor = bring_up(small_mesh, timeout_s=60)
    try:
        before = {item.name: item.pid for item in supervisor.processes()}
        assert set(before) == {"broker", "trainer-0"}
        runtime_dir = small_mesh.mesh.runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700
        with pytest.raises(BadInput, match=f"process {before['broker']} listens on broker.sock"):
            bring_up(small_mesh, timeout_s=60)
        supervisor.restart("trainer-0")
        wait_until_serving(small_mesh, supervisor, timeout_s=60, only="trainer-0")
        after = {item.name: item.pid for item in supervisor.processes()}
        assert after["broker"] == before["broker"]
        assert after["trainer-0"] != before["trainer-0"]
        with pytest.raises(NotFound, match="trainer-0"):
            supervisor.restart("trainer-9")
    finally:
        supervisor.shut_down(30.0)
    with pytest.raises(Unavailable, match="rollplex up"):
        supervisor.pid()


OTHER = """
import sys
from rollplex.core.strict import read_toml
from rollplex.rpc.server import run, serve
directory = read_toml(__import__("pathlib").Path(sys.argv[2]))["mesh"]["runtime_dir"]
run(serve("trainer-0", f"unix:{directory}/trainer-0.sock", lambda server: [], subjects={subjects}))
"""


class Updating(FakeCoordinator):
    """In UPDATE until the test says otherwise."""

    phase = types_pb2.PHASE_UPDATE

    def GetMesh(self, request, context):
        answer = super().GetMesh(request, context)
        answer.phase = self.phase
        return answer


def restart_arguments(settings, **changes):
    return argparse.Namespace(**{"config": None, "overrides": [], "runtime_dir": settings.mesh.runtime_dir,
                                 "service": "trainer-0", "force": False, "timeout": 60.0, **changes})


def test_edited_code_is_swapped_in_and_refused_with_what_differs(small_mesh, tmp_path):
    code, output = tmp_path / "fake_service_trainer.py", Output(json=True, debug=False)
    (tmp_path / "fake_service_broker.py").write_text(
        OTHER.replace("{subjects}", "{'config.mesh': {'mesh.devices': 'host'}}").replace("trainer-0", "broker"))
    supervisor = bring_up(small_mesh, timeout_s=60)
    try:
        code.write_text(OTHER.replace("{subjects}", "{'config.mesh': {'mesh.devices': 'cuda'}}"))
        with pytest.raises(WrongState, match="mesh.devices: host in broker, cuda in trainer-0") as refused:
            restart(restart_arguments(small_mesh), output)
        assert refused.value.reason == "CONFIG_MISMATCH"
        code.write_text(OTHER.replace("{subjects}", "{'protos': {'rollplex.v1.Slab.name': 'int32 = 1'}}"))
        with pytest.raises(WrongState, match=r"rollplex.v1.Slab.name: string = 1 in broker, int32 = 1 in trainer-0|and \d+ more"):
            restart(restart_arguments(small_mesh), output)
        code.write_text(OTHER.replace("{subjects}", "{'config.mesh': {'mesh.devices': 'host'}}"))
        restart(restart_arguments(small_mesh), output)
        with pytest.raises(NotFound, match="trainer-0"):
            restart(restart_arguments(small_mesh, service="trainer-9"), output)
    finally:
        supervisor.shut_down(30.0)


def test_a_restart_waits_for_an_update_unless_forced(small_mesh):
    output = Output(json=True, debug=False)
    supervisor = bring_up(small_mesh, timeout_s=60)
    coordinator = Updating(small_mesh.mesh.runtime_dir / "coordinator.sock")
    try:
        def pid():
            return next(item.pid for item in supervisor.processes() if item.name == "trainer-0")

        before = pid()
        with pytest.raises(DeadlineExceeded, match="--force") as refused:
            restart(restart_arguments(small_mesh, timeout=0.5), output)
        assert (refused.value.reason, pid()) == ("UPDATE_RUNS", before)
        threading.Timer(0.5, setattr, (coordinator, "phase", types_pb2.PHASE_IDLE)).start()
        restart(restart_arguments(small_mesh), output)
        between = pid()
        assert between != before
        coordinator.phase = types_pb2.PHASE_UPDATE
        restart(restart_arguments(small_mesh, force=True), output)
        assert pid() != between
    finally:
        coordinator.stop()
        supervisor.shut_down(30.0)


def test_a_service_that_ends_while_it_starts_is_named_with_its_log(small_mesh, monkeypatch, tmp_path):
    (tmp_path / "fake_service_trainer.py").write_text("raise SystemExit('error: out of luck')")
    with pytest.raises(Unavailable, match="(?s)trainer-0 ended while it started.*out of luck"):
        bring_up(small_mesh, timeout_s=60)
    assert not Supervisor(small_mesh.mesh.runtime_dir).is_up()


def test_a_service_that_never_serves_runs_into_the_timeout(small_mesh, tmp_path):
    (tmp_path / "fake_service_trainer.py").write_text("import time; time.sleep(600)")
    with pytest.raises(DeadlineExceeded, match="trainer-0 not serving after 3 s"):
        bring_up(small_mesh, timeout_s=3)


def test_listeners_are_named_and_dead_sockets_are_cleaned(settings):
    runtime_dir = settings.mesh.runtime_dir
    mesh.prepare_runtime_dir(runtime_dir)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        path = runtime_dir / f"{kind.name}.sock"
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(str(path))
            listener.listen()
            assert listener_pid(path) == os.getpid()
            with pytest.raises(BadInput, match=f"process {os.getpid()}"), claimed(runtime_dir):
                pass
        assert path.exists()
        with claimed(runtime_dir):
            assert not path.exists()


def test_two_ups_at_once_are_refused(settings):
    mesh.prepare_runtime_dir(settings.mesh.runtime_dir)
    refused = pytest.raises(BadInput, match="another `rollplex up`")
    with claimed(settings.mesh.runtime_dir), refused, claimed(settings.mesh.runtime_dir):
        pass


def test_an_open_or_long_directory_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match="mode 755"):
        mesh.prepare_runtime_dir(tmp_path)
    with pytest.raises(BadInput, match="107 bytes"):
        mesh.prepare_runtime_dir(tmp_path / ("x" * 100))


def test_no_model_or_no_checkpoint_is_refused_before_anything_starts(settings, tmp_path):
    for data, words in (({}, "no model"), ({"model": {"checkpoint": str(tmp_path)}}, "config.json")):
        with pytest.raises(BadInput, match=words):
            bring_up(parse_settings(data | {"mesh": {"runtime_dir": str(tmp_path / "rt")}}), timeout_s=1)
    assert not (tmp_path / "rt").exists()


def test_an_incomplete_checkpoint_or_another_model_is_refused_before_anything_starts(settings):
    model = settings.sections["model"].checkpoint
    for name, content, words in (("config.json", '{"model_type": "llava"}', "llava"), ("model.safetensors", None, "safetensors"),
                                 ("tokenizer.json", None, "tokenizer.json"),
                                 ("model.safetensors.index.json", '{"weight_map": {"a": "1.safetensors"}}', "1.safetensors")):
        before = (model / name).read_text() if (model / name).exists() else None
        (model / name).unlink() if content is None else (model / name).write_text(content)
        with pytest.raises(BadInput, match=words):
            bring_up(settings, timeout_s=1)
        (model / name).unlink(missing_ok=True) if before is None else (model / name).write_text(before)
    assert not settings.mesh.runtime_dir.exists()


def test_a_port_in_use_is_named_before_anything_starts(settings):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        busy = merged(settings, {"mesh": {"addresses": [f"trainer-0={address}"], "insecure_tcp": True}})
        with pytest.raises(BadInput, match=f"trainer-0 cannot listen on {address}") as refused:
            bring_up(busy, timeout_s=1)
        assert refused.value.reason == "ADDRESS_IN_USE"
    mesh.check_ports(busy)


def test_the_supervisor_runs_every_rank_with_this_interpreter(monkeypatch):
    for name in programs.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings = parse_settings({
        "mesh": {"runtime_dir": "/run/100%", "train_tensor_parallel": 2, "reference_tensor_parallel": 2},
        "trainer": {"threads": 3}})
    text = supervisor_config(settings)
    assert f"command={sys.executable} -m rollplex.trainer --config /run/100%%/effective.toml --rank 1\n" in text
    assert "rollplex.reference --config /run/100%%/effective.toml --rank 1\n" in text
    assert "rollplex.rollout --config /run/100%%/effective.toml --replica 1\n" in text
    assert 'OMP_NUM_THREADS="3"' in text
    assert stop_timeout_s(settings) > 30


@pytest.mark.parametrize("data", [
    {"mesh": {"train_tensor_parallel": 3, "rollout_tensor_parallel": 2}}, {"reward": {"address": "127.0.0.1:9"}}])
def test_sections_that_contradict_each_other_are_refused(data):
    with pytest.raises(BadInput):
        service_config(parse_settings(data))


def test_commands_see_the_mesh_as_it_was_started(tmp_path):
    """`status` and `restart` need not be told again how many ranks there are."""
    told = parse_settings({"mesh": {"runtime_dir": str(tmp_path)}, "model": {"checkpoint": "m"}})
    assert mesh.as_running(told) is told
    started = parse_settings({"mesh": {"runtime_dir": str(tmp_path), "train_tensor_parallel": 2}, "model": {"checkpoint": "m"},
                              "coordinator": {"builtin_reward": ""}})
    write_files(started)
    names = [program.name for program in programs.programs(mesh.as_running(told))]
    assert names == [program.name for program in programs.programs(started)]
    assert "trainer-1" in names and "reward" not in names
