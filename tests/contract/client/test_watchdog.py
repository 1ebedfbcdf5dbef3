"""The watchdog: what it takes for stopped or silent, whom it signals, and a supervised mesh in which it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_services import SERVING, small_settings

from rollplex.core.config import MeshSection
from rollplex.core.crash_points import process_state
from rollplex_client.cli import mesh, programs, watchdog
from rollplex_client.cli.mesh import bring_up
from rollplex_client.cli.programs import Program
from rollplex_client.cli.settings import Settings, merged, parse_settings
from rollplex_client.cli.supervision import Supervisor
from rollplex_client.cli.watchdog import Seen, Silences, Stalls, Watchdog, descendants, kill, parse_stat, read_stat

CHILD = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('up', flush=True); sys.stdin.read()"


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def seen(pid: int, state: str = "S", parent: int = 1, start: int = 5) -> Seen:
    return Seen(pid, parent, state, start)


def test_stat_lines_of_commands_with_any_name():
    fields = " ".join(str(index) for index in range(3, 22))
    assert parse_stat(f"77 (a b) c)) T 12 {fields} 4242") == Seen(77, 12, "T", int(fields.split()[17]))
    own = read_stat(os.getpid())
    assert (own.pid, own.parent) == (os.getpid(), os.getppid())
    assert own.state == "R"


def test_descendants_are_children_and_theirs():
    found = {process.pid: process for process in (seen(1, parent=0), seen(2), seen(3, parent=2), seen(4, parent=3), seen(5))}
    assert sorted(process.pid for process in descendants(2, found)) == [3, 4]


def test_stopped_for_long_is_overdue_and_traced_is_not():
    stalls = Stalls(3.0)
    stopped, traced, running = seen(2, "T"), seen(3, "t"), seen(4, "R")
    assert stalls.overdue([stopped, traced, running], 10.0) == []
    assert stalls.overdue([stopped, traced, running], 12.9) == []
    assert stalls.overdue([stopped, traced, running], 13.0) == [stopped]


def test_a_process_that_was_continued_or_replaced_begins_anew():
    stalls = Stalls(3.0)
    stalls.overdue([seen(2, "T"), seen(3, "T")], 0.0)
    stalls.overdue([seen(2, "S"), seen(3, "T", start=9)], 2.0)
    assert stalls.overdue([seen(2, "T"), seen(3, "T", start=9)], 4.0) == []
    assert stalls.overdue([seen(2, "T"), seen(3, "T", start=9)], 5.0) == [seen(3, "T", start=9)]


def test_without_a_timeout_nothing_is_overdue():
    stalls, silences = Stalls(0.0), Silences(0.0)
    assert all(not stalls.overdue([seen(2, "T")], now) for now in (0.0, 1e6))
    assert all(not silences.overdue({(2, 5): now == 0}, now) for now in (0.0, 1e6))


def test_only_who_has_answered_can_fall_silent():
    silences = Silences(10.0)
    silences.overdue({(2, 5): False, (3, 5): True}, 0.0)
    assert silences.overdue({(2, 5): False, (3, 5): False}, 9.0) == []
    assert silences.overdue({(2, 5): False, (3, 5): False}, 10.0) == [(3, 5)]
    assert silences.overdue({(3, 6): False}, 30.0) == []


def test_only_the_very_process_is_signalled():
    victim = subprocess.Popen(["sleep", "60"])
    try:
        identity = read_stat(victim.pid).identity
        assert not kill((identity[0], identity[1] + 1))
        assert victim.poll() is None
        assert kill(identity)
        assert victim.wait(10) == -signal.SIGKILL
        assert not kill(identity)
    finally:
        victim.kill()
        victim.wait()


def test_a_stopped_grandchild_is_killed_and_a_stopped_root_goes_on():
    """As a rank worker below its service, below the supervisor."""
    root = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert root.stdout.readline() == "up\n"
        section = MeshSection(runtime_dir=Path("/nowhere"), stall_timeout_s=0.2, hang_timeout_s=0.0)
        dog = Watchdog(section, root.pid, lambda: {})
        child = descendants(root.pid, watchdog.all_processes())[0]
        for pid in (child.pid, root.pid):
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda pid=pid: process_state(pid) == "T")
        dog.look(1.0)
        assert {process_state(pid) for pid in (child.pid, root.pid)} == {"T"}
        dog.look(1.3)
        eventually(lambda: process_state(child.pid) in ("Z", "") and process_state(root.pid) not in ("T", ""))
    finally:
        root.stdin.close()
        root.wait(30)


def test_a_stopped_keeper_goes_on():
    root = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert root.stdout.readline() == "up\n"
        section = MeshSection(runtime_dir=Path("/nowhere"), stall_timeout_s=0.2, hang_timeout_s=0.0)
        keeper = descendants(root.pid, watchdog.all_processes())[0]
        dog = Watchdog(section, root.pid, lambda: {keeper.pid: "keeper"})
        os.kill(keeper.pid, signal.SIGSTOP)
        eventually(lambda: process_state(keeper.pid) == "T")
        dog.look(1.0)
        assert process_state(keeper.pid) == "T"
        dog.look(1.3)
        eventually(lambda: process_state(keeper.pid) != "T")
        assert process_state(keeper.pid) not in ("Z", "")
    finally:
        root.stdin.close()
        root.wait(30)


@pytest.fixture
def settings() -> Iterator[Settings]:
    with small_settings() as settings:
        yield settings


@pytest.fixture
def watched_mesh(settings, tmp_path, monkeypatch) -> Iterator[Supervisor]:
    """Two services that do nothing but serve, and a watchdog of short patience."""
    for name in ("broker", "trainer-0"):
        (tmp_path / f"watched_{name.partition('-')[0]}.py").write_text(SERVING.format(name=name))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    settings = merged(settings, {"mesh": {"stall_timeout_s": 0.5, "hang_timeout_s": 0.0}})
    wanted = [Program("broker", "watched_broker", "broker"), Program("trainer-0", "watched_trainer", "trainer"),
              Program("watchdog", "rollplex_client.cli.watchdog", "mesh", serves_grpc=False)]
    monkeypatch.setattr(programs, "CUSTODY", ("broker",))
    for module in (programs, mesh):
        monkeypatch.setattr(module, "programs", lambda settings: wanted)
    supervisor = bring_up(settings, timeout_s=60)
    yield supervisor
    supervisor.shut_down(30.0)


def pids(supervisor: Supervisor) -> dict[str, int]:
    return {process.name: process.pid for process in supervisor.processes() if process.state == "RUNNING"}


def test_a_stopped_service_is_killed_and_started_again(watched_mesh):
    eventually(lambda: len(pids(watched_mesh)) == 3)
    before = pids(watched_mesh)
    os.kill(before["trainer-0"], signal.SIGSTOP)
    eventually(lambda: pids(watched_mesh).get("trainer-0", before["trainer-0"]) != before["trainer-0"])
    assert process_state(before["trainer-0"]) == ""
    assert pids(watched_mesh)["broker"] == before["broker"]


def test_a_killed_watchdog_is_there_again_and_watches(watched_mesh):
    eventually(lambda: len(pids(watched_mesh)) == 3)
    before = pids(watched_mesh)
    os.kill(before["watchdog"], signal.SIGKILL)
    eventually(lambda: pids(watched_mesh).get("watchdog", before["watchdog"]) != before["watchdog"])
    os.kill(before["broker"], signal.SIGSTOP)
    eventually(lambda: pids(watched_mesh).get("broker", before["broker"]) != before["broker"])


def test_the_mesh_has_one_unless_both_timeouts_are_off(settings):
    names = [program.name for program in programs.programs(settings)]
    assert names[-2:] == ["coordinator", "watchdog"]
    off = merged(settings, {"mesh": {"stall_timeout_s": 0, "hang_timeout_s": 0}})
    assert "watchdog" not in [program.name for program in programs.programs(off)]


HUNG = """
import sys, time
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
class Late(health_pb2_grpc.HealthServicer):
    def Check(self, request, context):
        if Path(sys.argv[2]).exists():
            time.sleep(600)
        return servicer.Check(request, context)
health_pb2_grpc.add_HealthServicer_to_server(Late(), server)
server.add_insecure_port("unix:" + sys.argv[1])
server.start()
print("up", flush=True)
time.sleep(600)
"""


def test_a_service_that_answers_no_more_is_killed():
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        section = parse_settings({"mesh": {"runtime_dir": folder, "stall_timeout_s": 0, "hang_timeout_s": 2}}).mesh
        service = subprocess.Popen([sys.executable, "-c", HUNG, f"{folder}/trainer-0.sock", f"{folder}/hang"],
                                   stdout=subprocess.PIPE, text=True)
        try:
            assert service.stdout.readline() == "up\n"
            dog = Watchdog(section, os.getpid(), lambda: {service.pid: "trainer-0"})
            began = time.monotonic()
            while time.monotonic() - began < 4:  # longer than the patience, and it answers
                dog.look(time.monotonic())
                time.sleep(0.2)
            assert service.poll() is None
            Path(folder, "hang").touch()

            def gone() -> bool:
                dog.look(time.monotonic())
                return service.poll() is not None

            eventually(gone)
            assert service.returncode == -signal.SIGKILL
        finally:
            service.kill()
            service.wait()
