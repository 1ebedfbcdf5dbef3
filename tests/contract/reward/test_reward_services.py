"""Rewards over real Unix sockets: the built-in service, and served functions of both signatures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.core.errors import BadInput, InternalError
from rollplex.reward.config import RewardConfig
from rollplex.reward.server import serve_rewards
from rollplex.rpc.channel import aio_channel
from rollplex.rpc.status import error_from_rpc
from rollplex.v1.reward_service_pb2 import DescribeRewardRequest, ScoreItem, ScoreRequest, ScoreResponse
from rollplex.v1.reward_service_pb2_grpc import RewardServiceStub
from rollplex_client.reward import serve_reward_async

REPOSITORY = Path(__file__).parents[3]


def item(text: str, **fields) -> ScoreItem:
    return ScoreItem(messages_json=json.dumps([{"role": "user", "content": "q"}]), response_text=text,
                     response_token_ids=range(len(text)), columns_json="{}", **fields)


def values(response: ScoreResponse) -> list[float | None]:
    return [score.value if score.HasField("value") else None for score in response.scores]


async def wait_until_healthy(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    updates = health.Watch(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
    async for update in updates:
        if update.status == health_pb2.HealthCheckResponse.SERVING:
            updates.cancel()
            return


@contextlib.asynccontextmanager
async def serving(server, address: str) -> AsyncIterator[RewardServiceStub]:
    """The stub of a server that runs as a task, once it is healthy; the task is cancelled at the end."""
    task = asyncio.create_task(server)
    async with aio_channel(address) as channel:
        await wait_until_healthy(channel)
        try:
            yield RewardServiceStub(channel)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def served(fn, tmp_path: Path, **options) -> AsyncIterator[RewardServiceStub]:
    address = f"unix:{tmp_path}/r.sock"
    async with serving(serve_reward_async(fn, address, drain_timeout_s=0.1, **options), address) as stub:
        yield stub


async def failure(call) -> Exception:
    """The domain error of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_built_in_service_scores_mixed_types(tmp_path: Path) -> None:
    config = RewardConfig(address=f"unix:{tmp_path}/r.sock", format_weight=0.5)
    async with serving(serve_rewards(config), config.address) as stub:
        described = await stub.DescribeReward(DescribeRewardRequest(), timeout=5)
        response = await stub.Score(ScoreRequest(items=[
            item("<think>t</think><answer>A</answer>", ground_truth="A", problem_type="multiple choice"),
            item("<answer>9</answer>", ground_truth="10", problem_type="regression"),
            item("<answer>9</answer>", ground_truth="10", problem_type="regresion"),
            item("<answer>9</answer>", problem_type="numerical"),
            item("<answer>a b</answer>", ground_truth="a b", problem_type="free-form"),
            item("gibberish", ground_truth="3", problem_type="numerical"),
        ]), timeout=10)
        empty = await failure(stub.Score(ScoreRequest(), timeout=5))
    assert (described.name, described.max_batch_size) == ("video_r1", 0)
    assert values(response) == [1.5, pytest.approx(0.9), None, None, 1.0, 0.0]
    assert dict(response.scores[0].parts) == {"accuracy": 1.0, "format": 1.0}
    assert "did you mean 'regression'" in response.scores[2].error
    assert "no ground truth" in response.scores[3].error
    assert isinstance(empty, BadInput)


def trl(prompts, completions, completion_ids, ground_truth, **columns):
    return [float(c[0]["content"] == t) if c[0]["content"] else None for c, t in zip(completions, ground_truth)]


async def trl_async(completions, ground_truth):
    await asyncio.sleep(0)
    return trl(None, completions, None, ground_truth)


def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)} if solution_str else None


async def verl_async(solution_str, ground_truth):
    await asyncio.sleep(0)
    return verl(None, solution_str, ground_truth)


@pytest.mark.parametrize("fn", [trl, trl_async, verl, verl_async])
async def test_served_function_scores_in_order(fn, tmp_path: Path) -> None:
    items = [item(text, ground_truth=truth) for text, truth in (("A", "A"), ("B", "A"), ("", "A"), ("C", "C"))]
    async with served(fn, tmp_path, max_batch_size=4) as stub:
        described = await stub.DescribeReward(DescribeRewardRequest(), timeout=5)
        response = await stub.Score(ScoreRequest(items=items), timeout=10)
        too_many = await failure(stub.Score(ScoreRequest(items=items + items), timeout=5))
    assert (described.name, described.max_batch_size) == (fn.__name__, 4)
    assert values(response) == [1.0, 0.0, None, 1.0]
    assert "None" in response.scores[2].error
    assert dict(response.scores[3].parts) == ({"length": 1.0} if "verl" in fn.__name__ else {})
    assert too_many.reason == "BATCH_TOO_LARGE"


async def test_bad_results_are_unscored_never_zero(tmp_path: Path) -> None:
    results = {"nan": [1.0, float("nan"), float("inf")], "few": [1.0], "text": ["1", 1.0, 1.0], "none": None}

    def reward(completions):
        return results[completions[0][0]["content"]]

    async with served(reward, tmp_path) as stub:
        answers = {key: await stub.Score(ScoreRequest(items=[item(key)] * 3), timeout=5) for key in results}
    assert values(answers["nan"]) == [1.0, None, None]
    assert values(answers["few"]) == [None, None, None]
    assert values(answers["text"]) == [None, 1.0, 1.0]
    assert values(answers["none"]) == [None, None, None]
    assert "1 scores for 3 samples" in answers["few"].scores[2].error
    for response in answers.values():
        assert all(score.HasField("value") != bool(score.error) for score in response.scores)


async def test_raising_batch_function_fails_the_call_and_the_next_one_works(tmp_path: Path) -> None:
    def reward(completions):
        if completions[0][0]["content"] == "bad":
            raise ValueError("kaputt: " + "ü" * 5000)
        return [1.0]

    async with served(reward, tmp_path) as stub:
        error = await failure(stub.Score(ScoreRequest(items=[item("bad")]), timeout=5))
        assert values(await stub.Score(ScoreRequest(items=[item("good")]), timeout=5)) == [1.0]
    assert isinstance(error, InternalError)
    assert error.reason == "REWARD_RAISED"
    assert "reward raised ValueError: kaputt" in str(error)


async def test_raising_sample_function_fails_its_sample(tmp_path: Path) -> None:
    def compute_score(solution_str):
        return 1 / len(solution_str)

    async with served(compute_score, tmp_path) as stub:
        response = await stub.Score(ScoreRequest(items=[item("ab"), item("")]), timeout=5)
    assert values(response) == [0.5, None]
    assert "ZeroDivisionError" in response.scores[1].error


@pytest.mark.parametrize("is_async", [False, True])
async def test_slow_function_meets_its_deadline_and_delays_nobody(is_async: bool, tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    def slow(completions):
        if completions[0][0]["content"] == "slow":
            time.sleep(3)
        return [1.0]

    async def slow_async(completions):
        if completions[0][0]["content"] == "slow":
            try:
                await asyncio.sleep(30)
            finally:
                cancelled.set()
        return [1.0]

    async with served(slow_async if is_async else slow, tmp_path) as stub:
        waiting = asyncio.create_task(failure(stub.Score(ScoreRequest(items=[item("slow")]), timeout=0.7)))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        assert values(await stub.Score(ScoreRequest(items=[item("fast")]), timeout=5)) == [1.0]
        assert time.monotonic() - started < 0.5
        assert (await waiting).default_reason == "DEADLINE_EXCEEDED"
        if is_async:
            await asyncio.wait_for(cancelled.wait(), 5)


@pytest.mark.parametrize("command", [
    ["-m", "rollplex.reward", "--address"],
    ["-m", "rollplex_client.reward", "examples/rewards/exact_match.py", "--name", "exact_match", "--address"],
    ["examples/rewards/length_penalty.py"],
])
async def test_processes_serve_and_drain_on_sigterm(command: list[str], tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/r.sock"
    process = await asyncio.create_subprocess_exec(sys.executable, *command, address, cwd=REPOSITORY)
    try:
        async with aio_channel(address) as channel:
            await wait_until_healthy(channel)
            response = await RewardServiceStub(channel).Score(ScoreRequest(items=[
                item("<answer>Red  ball</answer>" + " " * 422, ground_truth="red ball", problem_type="multiple choice"),
            ]), timeout=10)
        # 448 tokens: half of the way from 384 to 512.
        expected = {"rollplex.reward": 0.0, "rollplex_client.reward": 1.0}.get(command[1] if command[1:] else "", -0.5)
        assert values(response) == [expected]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
    assert not (tmp_path / "r.sock").exists()


def test_hanging_function_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    path = tmp_path / "hangs.py"
    path.write_text("import sys, threading, time\n"
                    "def compute_score(solution_str):\n    print('called', flush=True)\n    time.sleep(600)\n"
                    "from rollplex_client.reward import serve_reward\n"
                    "serve_reward(compute_score, sys.argv[1], drain_timeout_s=0.2)\n")
    address = f"unix:{tmp_path}/r.sock"
    process = subprocess.Popen([sys.executable, str(path), address], stdout=subprocess.PIPE)

    async def call() -> Exception:
        async with aio_channel(address) as channel:
            await wait_until_healthy(channel)
            return await failure(RewardServiceStub(channel).Score(ScoreRequest(items=[item("x")]), timeout=0.5))

    try:
        assert asyncio.run(call()).default_reason == "DEADLINE_EXCEEDED"
        assert process.stdout.readline() == b"called\n"
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("command", "says"), [
    (["-m", "rollplex.reward", "--address", "nonsense"], "unix:/path or host:port"),
    (["-m", "rollplex.reward"], "no address"),
    (["-m", "rollplex_client.reward", "json:dumps", "--address", "127.0.0.1:0"], "compute_score(data_source"),
    (["-m", "rollplex_client.reward", "gone.py", "--address", "127.0.0.1:0"], "gone.py does not exist"),
])
def test_a_wrong_start_says_why(command: list[str], says: str) -> None:
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
