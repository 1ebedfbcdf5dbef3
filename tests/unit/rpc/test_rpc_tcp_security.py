"""TCP addresses: refused without TLS and token, and strangers refused where they are served."""

from __future__ import annotations

import hmac
import logging
import os
import shutil
import subprocess
from pathlib import Path

import another_user
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollplex.core.entry import load_sections
from rollplex.core.errors import BadInput, Forbidden
from rollplex.core.tcp_security import TcpSecurity, is_loopback
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.credentials import Token
from rollplex.rpc.server import start_server
from rollplex.rpc.status import error_from_rpc
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc

TOKEN = "0123456789abcdef" * 4


class Reward(reward_service_pb2_grpc.RewardServiceServicer):
    calls = 0

    async def DescribeReward(self, request, context):
        Reward.calls += 1
        return reward_service_pb2.DescribeRewardResponse(name="r")


def add(server):
    reward_service_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), server)
    return ["rollplex.v1.RewardService"]


def certificate(folder: Path, name: str = "mesh") -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-keyout", key, "-out", cert, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True)
    return cert, key


@pytest.fixture
def files(tmp_path, monkeypatch):
    """cert, key and token of a mesh, in the environment of this process."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    cert, key = certificate(tmp_path)
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    for name, path in {"TLS_CERT": cert, "TLS_KEY": key, "TLS_CA": cert, "TOKEN_FILE": token}.items():
        monkeypatch.setenv(f"ROLLPLEX_{name}", str(path))
    return tmp_path


@pytest.fixture
async def served(files):
    running = await start_server("reward", "127.0.0.1:0", add)
    await running.ready()
    yield running.address
    await running.drain(0.1)


def describe(channel, **metadata):
    return reward_service_pb2_grpc.RewardServiceStub(channel).DescribeReward(
        reward_service_pb2.DescribeRewardRequest(), timeout=5, metadata=list(metadata.items()))


async def test_a_caller_with_certificate_and_token_is_served(served):
    async with aio_channel(served) as channel:
        assert (await describe(channel)).name == "r"
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert check.status == health_pb2.HealthCheckResponse.SERVING


def tls_only(files):
    return grpc.ssl_channel_credentials((files / "mesh.pem").read_bytes())


@pytest.mark.parametrize("given", [[], [("authorization", f"Bearer {TOKEN[:-1]}0")], [("authorization", TOKEN)],
                                   [("authorization", "Bearer ")], [("authorization", f"Bearer {TOKEN}")] * 2])
async def test_without_the_token_nothing_answers_not_even_health_and_reflection(served, files, given):
    before = Reward.calls
    async with grpc.aio.secure_channel(served, tls_only(files)) as channel:
        calls = {
            "a call": lambda: reward_service_pb2_grpc.RewardServiceStub(channel).DescribeReward(
                reward_service_pb2.DescribeRewardRequest(), timeout=5, metadata=given),
            "health": lambda: health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5, metadata=given),
            "a method that is not": lambda: channel.unary_unary("/rollplex.v1.RewardService/Nothing")(
                b"", timeout=5, metadata=given),
        }
        for what, call in calls.items():
            with pytest.raises(grpc.RpcError) as refused:
                await call()
            error = error_from_rpc(refused.value)
            assert isinstance(error, Forbidden) and error.reason == "TOKEN_REFUSED", what
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5, metadata=given)
        with pytest.raises(grpc.RpcError) as refused:
            await stream.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert Reward.calls == before


async def test_plain_tcp_to_a_tls_port_and_another_ca_get_nowhere(served, files, monkeypatch):
    async with grpc.aio.insecure_channel(served) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            await describe(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    other, _ = certificate(files, "other")
    monkeypatch.setenv("ROLLPLEX_TLS_CA", str(other))
    async with aio_channel(served) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            await describe(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_token_is_in_no_log_error_or_text(served, files, caplog):
    caplog.set_level(logging.DEBUG)
    async with grpc.aio.secure_channel(served, tls_only(files)) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            await describe(channel, authorization=f"Bearer {TOKEN}x")
    assert TOKEN not in caplog.text + repr(refused.value) + repr(TcpSecurity.current()) + repr(Token(TOKEN)) + str(vars(Token))


def test_tokens_are_compared_in_constant_time(monkeypatch):
    seen = []
    monkeypatch.setattr(hmac, "compare_digest", lambda given, expected: seen.append((given, expected)) or given == expected)
    assert Token(TOKEN).accepts((("authorization", f"Bearer {TOKEN}"),))
    assert not Token(TOKEN).accepts((("authorization", b"Bearer x"),))
    assert not Token(TOKEN).accepts(None)
    assert len(seen) == 2


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0", "0.0.0.0:0", "node-7:7000"])
async def test_tcp_without_tls_and_token_is_refused_on_both_sides(address):
    with pytest.raises(BadInput, match=r"mesh\.tls_cert .*mesh\.tls_key .*mesh\.token_file .*not set"):
        await start_server("reward", address, add)
    with pytest.raises(BadInput, match=r"mesh\.tls_ca .*mesh\.token_file") as refused:
        aio_channel(address)
    assert refused.value.reason == "TCP_INSECURE"


async def test_plain_tcp_is_for_loopback_and_only_when_asked_for(monkeypatch):
    monkeypatch.setenv("ROLLPLEX_INSECURE_TCP", "1")
    with pytest.raises(BadInput, match="for loopback addresses only"):
        aio_channel("10.0.0.1:7000")
    running = await start_server("reward", "127.0.0.1:0", add)
    await running.ready()
    async with aio_channel(running.address) as channel:
        assert (await describe(channel)).name == "r"
    await running.drain(0.1)


@pytest.mark.parametrize(("address", "loopback"), [
    ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True), ("localhost.example.com:1", False),
    ("0.0.0.0:1", False), ("[::]:1", False), ("128.0.0.1:1", False), ("127.0.0.1.example.com:1", False)])
def test_loopback(address, loopback):
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(("name", "spoil", "words"), [
    ("token", lambda path: path.chmod(0o640), "chmod 600"), ("mesh.key", lambda path: path.chmod(0o604), "chmod 600"),
    ("token", lambda path: path.write_text("short"), "32 to 4096"),
    ("token", lambda path: path.write_text("ä" * 40), "32 to 4096"),
    ("token", lambda path: path.write_text("a b" * 40), "32 to 4096"), ("token", Path.unlink, "cannot be read"),
    ("mesh.pem", Path.unlink, "cannot be read")])
async def test_files_that_others_read_or_that_hold_nothing_are_refused(files, name, spoil, words):
    spoil(files / name)
    with pytest.raises(BadInput, match=words) as refused:
        await start_server("reward", "127.0.0.1:0", add)
    assert "ä" not in str(refused.value) and "a ba b" not in str(refused.value)


def test_a_configs_keys_reach_the_process_and_its_children(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(f'[mesh]\nruntime_dir = "{tmp_path}"\ntoken_file = "t"\ninsecure_tcp = true\n')
    load_sections(config, [], {})
    assert TcpSecurity.current() == TcpSecurity(token_file=Path("t").absolute(), insecure_tcp=True)
    load_sections(None, [], {})
    assert TcpSecurity.current().insecure_tcp, "what a file leaves unset stays"
    with pytest.raises(BadInput, match="insecure_tcp must be of type bool"):
        load_sections(None, ["mesh.insecure_tcp=1"], {})


async def test_unix_sockets_are_for_their_owner(tmp_path):
    running = await start_server("reward", f"unix:{tmp_path}/run/r.sock", add)
    path = tmp_path / "run" / "r.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await running.drain(0.1)


async def test_another_users_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(BadInput, match="its owner could put") as refused:
        await start_server("reward", f"unix:{tmp_path}/run/r.sock", add)
    assert refused.value.reason == "RUNTIME_DIR_FOREIGN"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("directory_mode", [0o700, 0o777])
async def test_another_user_cannot_connect(tmp_path, directory_mode):
    """By the directory, and if an owner opens that afterwards, by the socket's own mode."""
    another_user.let_through(tmp_path)
    running = await start_server("reward", f"unix:{tmp_path}/run/r.sock", add)
    (tmp_path / "run").chmod(directory_mode)
    assert another_user.connect(tmp_path / "run" / "r.sock") == b"refused"
    await running.drain(0.1)
