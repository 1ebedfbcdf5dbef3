"""Servers: health, reflection, deadlines, rich errors, drain, addresses, runtime directories."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.core import errors
from rollplex.rpc.channel import aio_channel, check_address
from rollplex.rpc.runtime_dir import prepare_runtime_dir
from rollplex.rpc.server import start_server
from rollplex.rpc.status import CODES, error_from_rpc, from_detail, to_detail
from rollplex.v1 import reward_service_pb2, reward_service_pb2_grpc


class Reward(reward_service_pb2_grpc.RewardServiceServicer):
    def __init__(self):
        self.release = asyncio.Event()

    async def DescribeReward(self, request, context):
        await self.release.wait()
        return reward_service_pb2.DescribeRewardResponse(name="slow")

    async def Score(self, request, context):
        if request.run == "bug":
            raise KeyError("lost")
        raise errors.WrongState("not now", reason="NOT_NOW", phase="update")


@pytest.fixture
async def server(tmp_path):
    reward = Reward()

    def add(grpc_server):
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(reward, grpc_server)
        return ["rollplex.v1.RewardService"]

    running = await start_server("reward", f"unix:{tmp_path}/run/reward.sock", add)
    running.reward = reward
    await running.ready()
    yield running
    reward.release.set()
    await running.drain(0.1)


def stub_of(running):
    return reward_service_pb2_grpc.RewardServiceStub(aio_channel(running.address))


async def test_errors_arrive_with_kind_reason_and_numbers(server):
    with pytest.raises(grpc.RpcError) as failure:
        await stub_of(server).Score(reward_service_pb2.ScoreRequest(), timeout=5)
    error = error_from_rpc(failure.value)
    assert isinstance(error, errors.WrongState)
    assert (error.reason, error.metadata, str(error)) == ("NOT_NOW", {"phase": "update"}, "not now")


async def test_a_bug_is_internal_and_keeps_its_name(server):
    with pytest.raises(grpc.RpcError) as failure:
        await stub_of(server).Score(reward_service_pb2.ScoreRequest(run="bug"), timeout=5)
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert "KeyError" in failure.value.details()


async def test_a_call_without_deadline_is_refused(server):
    with pytest.raises(grpc.RpcError) as failure:
        await stub_of(server).Score(reward_service_pb2.ScoreRequest())
    assert error_from_rpc(failure.value).reason == "DEADLINE_REQUIRED"


async def test_until_it_is_ready_a_server_says_so_and_answers_nothing(tmp_path):
    def add(grpc_server):
        reward_service_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), grpc_server)
        return ["rollplex.v1.RewardService"]

    running = await start_server("reward", f"unix:{tmp_path}/run/reward.sock", add)
    health = health_pb2_grpc.HealthStub(aio_channel(running.address))
    request = health_pb2.HealthCheckRequest(service="rollplex.v1.RewardService")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as failure:
        await stub_of(running).Score(reward_service_pb2.ScoreRequest(), timeout=5)
    assert error_from_rpc(failure.value).reason == "LOADING"
    await running.ready()
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await running.drain(0.1)


async def test_drain_lets_running_calls_end_and_refuses_new_ones(server):
    stub = stub_of(server)
    running_call = asyncio.ensure_future(stub.DescribeReward(reward_service_pb2.DescribeRewardRequest(), timeout=5))
    await asyncio.sleep(0.1)
    draining = asyncio.create_task(server.drain(5))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.RpcError) as failure:
        await stub.Score(reward_service_pb2.ScoreRequest(), timeout=1)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    server.reward.release.set()
    assert (await running_call).name == "slow"
    await draining


async def test_an_address_in_use_is_a_clear_error(server):
    with pytest.raises(errors.BadInput, match="in use"):
        await start_server("reward", server.address, lambda _: [])


async def test_tcp_works_too(monkeypatch):
    monkeypatch.setenv("ROLLPLEX_INSECURE_TCP", "1")
    running = await start_server("reward", "127.0.0.1:0", lambda _: [])
    await running.ready()
    health = health_pb2_grpc.HealthStub(aio_channel(running.address))
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(errors.BadInput, match="cannot listen"):
        await start_server("reward", running.address, lambda _: [])
    await running.drain(0.1)


@pytest.mark.parametrize("address", ["", "unix:relative", "host", "host:port", ":80", "host:70000", "unix:/" + "a" * 120])
def test_bad_addresses(address):
    with pytest.raises(errors.BadInput):
        check_address(address)


def test_a_runtime_directory_open_to_others_is_refused(tmp_path):
    made = prepare_runtime_dir(tmp_path / "fresh")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    with pytest.raises(errors.BadInput, match="mode 755"):
        prepare_runtime_dir(made)


@pytest.mark.parametrize("kind", list(CODES))
def test_every_kind_survives_a_stream(kind):
    error = from_detail(to_detail(kind("why", reason="SOME_REASON", number=3)))
    assert type(error) is kind
    assert (str(error), error.reason, error.metadata) == ("why", "SOME_REASON", {"number": "3"})
