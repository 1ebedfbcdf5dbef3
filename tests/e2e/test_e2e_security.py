"""A mesh whose coordinator and one reward are on TCP: who is let in, and where secrets must not be found afterwards."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from runs import iterate, new_run

from rollplex.core.errors import BadInput, Forbidden
from rollplex.core.tcp_security import TcpSecurity
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import coordinator_service_pb2 as pb
from rollplex.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from rollplex_client import Client

pytestmark = pytest.mark.slow

TOKEN_SUM = Path(__file__).parents[1] / "support" / "token_sum.py"
TOKEN = "never-in-a-log-" + "5f3a" * 10
IDS = re.compile(rb"(?:session|ticket)-[0-9a-f]{32}")


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def section(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    cert, key, token = tmp_path / "mesh.pem", tmp_path / "mesh.key", tmp_path / "token"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=mesh", "-addext",
                    "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    return {"tls_cert": cert, "tls_key": key, "tls_ca": cert, "token_file": token}


def test_tls_and_token_from_the_first_call_to_the_last_log(another_mesh, section, prompts):
    coordinator, reward = free_address(), free_address()
    TcpSecurity.use({name: str(path) for name, path in section.items()})
    with another_mesh(sizes={"addresses": (f"coordinator={coordinator}",), **section}) as mesh:
        serving = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward",
                                    f"{TOKEN_SUM}:token_sum", "--address", reward])
        try:
            with mesh.client as client:
                client.register_reward("far", reward)
                run = new_run(client)
                done = iterate(client, run, prompts[:2])
                assert done.metrics["reward/unscored_count"] == 0.0
                assert client.list_rewards()
            strangers_are_refused(coordinator, section)
            found = secrets_in(mesh.runtime_dir)
            assert found == {}
            for name in mesh.processes:
                for place in ("cmdline", "environ"):
                    assert TOKEN.encode() not in Path(f"/proc/{mesh.pid(name)}/{place}").read_bytes(), (name, place)
            logs = b"".join(path.read_bytes() for path in mesh.runtime_dir.glob("*.log"))
            assert b"TOKEN_REFUSED" in logs, "a refusal is logged, without what was given"
        finally:
            serving.terminate()
            serving.wait(10)


def strangers_are_refused(address, section):
    credentials = grpc.ssl_channel_credentials(section["tls_ca"].read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        for given in ([], [("authorization", f"Bearer {TOKEN}0")]):
            with pytest.raises(grpc.RpcError) as refused:
                CoordinatorServiceStub(channel).ListRuns(pb.ListRunsRequest(), timeout=10, metadata=given)
            error = error_from_rpc(refused.value)
            assert isinstance(error, Forbidden) and error.reason == "TOKEN_REFUSED"
    for name in ("ROLLPLEX_TOKEN_FILE", "ROLLPLEX_TLS_CA"):
        kept = os.environ.pop(name)
        with pytest.raises(BadInput, match="needs TLS and a token"):
            Client(address)
        os.environ[name] = kept


def secrets_in(runtime_dir: Path) -> dict[str, bytes]:
    """Files below the runtime directory (logs, journal and its write-ahead log) that hold the token, a session or a ticket."""
    files = [path for path in runtime_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.suffix for path in files} >= {".log", ".toml"} and any("journal" in path.name for path in files), files
    found = {}
    for path in files:
        data = path.read_bytes()
        if TOKEN.encode() in data or (match := IDS.search(data)):
            found[path.name] = TOKEN.encode() if TOKEN.encode() in data else match[0]
    return found


def test_the_search_for_secrets_finds_them(tmp_path):
    (tmp_path / "journal.sqlite").write_bytes(b"x session-" + b"0" * 32)
    (tmp_path / "a.log").write_text(f"Bearer {TOKEN}")
    (tmp_path / "mesh.toml").write_text("")
    assert secrets_in(tmp_path).keys() == {"journal.sqlite", "a.log"}
