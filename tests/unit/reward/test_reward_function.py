"""A Python function as a reward, without a server: signatures, arguments, results."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rollplex.core.errors import BadInput, InternalError
from rollplex.v1.reward_service_pb2 import Score, ScoreItem, ScoreRequest
from rollplex_client._reward_load import load_function
from rollplex_client._reward_scores import batch_scores, sample_score
from rollplex_client._reward_signature import signature_of
from rollplex_client.reward import RewardFunction


def request(*rows: dict, iteration: int = 4) -> ScoreRequest:
    items = []
    for index, row in enumerate(rows):
        columns = {key: row[key] for key in row if key not in ("text", "ground_truth", "problem_type", "data_source")}
        own = {key: row[key] for key in ("ground_truth", "problem_type", "data_source") if key in row}
        items.append(ScoreItem(group_index=index, messages_json=json.dumps([{"role": "user", "content": f"q{index}"}]),
                               response_text=row.get("text", ""), response_token_ids=range(index + 1),
                               columns_json=json.dumps(columns), **own))
    return ScoreRequest(run="r", iteration=iteration, items=items)


def plain(scores: list[Score]) -> list[float | None]:
    return [score.value if score.HasField("value") else None for score in scores]


class Trl:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


class AsyncVerl:
    async def __call__(self, solution_str, scale=1):
        return scale


def test_signatures_are_told_apart() -> None:
    async def trl(prompts, completions, solution): ...
    def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...

    assert (signature_of(trl).kind, signature_of(trl).is_async, signature_of(trl).takes_any) == ("trl", True, False)
    assert (signature_of(verl).kind, signature_of(verl).is_async, signature_of(verl).takes_any) == ("verl", False, True)
    assert (signature_of(Trl()).kind, signature_of(Trl()).is_async) == ("trl", False)
    partial = functools.partial(AsyncVerl(), scale=3)
    assert (signature_of(AsyncVerl()).kind, signature_of(AsyncVerl()).is_async) == ("verl", True)
    assert (signature_of(partial).kind, signature_of(partial).is_async) == ("verl", True)


@pytest.mark.parametrize("fn", [
    lambda text: 0.0,
    lambda **columns: 0.0,
    lambda completions, solution_str: 0.0,
    lambda completions, /: 0.0,
    lambda item, /, completions: 0.0,
    Trl,
    len,
    "no function",
])
def test_another_signature_is_a_type_error_naming_both(fn) -> None:
    with pytest.raises(TypeError) as caught:
        signature_of(fn)
    assert "completions, completion_ids" in str(caught.value)
    assert "compute_score(data_source, solution_str" in str(caught.value)


def test_verl_function_needing_what_nobody_passes_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="needs tokenizer"):
        signature_of(lambda solution_str, tokenizer: 0.0)


def test_names() -> None:
    assert RewardFunction(Trl()).name == "Trl"
    assert RewardFunction(functools.partial(AsyncVerl(), scale=2)).name == "AsyncVerl"
    assert RewardFunction(Trl(), name="length.v2").name == "length.v2"
    for fn, name in ((lambda completions: [], None), (Trl(), "a/b")):
        with pytest.raises(BadInput, match="name="):
            RewardFunction(fn, name=name)
    with pytest.raises(BadInput, match="max_batch_size is -1"):
        RewardFunction(Trl(), max_batch_size=-1)


async def test_trl_function_gets_the_whole_batch() -> None:
    seen = {}

    def reward(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [1, None]

    scores = await RewardFunction(reward).score(request(
        {"text": "x", "ground_truth": "A", "problem_type": "OCR", "difficulty": 3},
        {"text": "y", "ground_truth": "B", "solution": "<answer>B</answer>"}))
    assert plain(scores) == [1.0, None]
    assert "None" in scores[1].error
    assert seen["prompts"] == [[{"role": "user", "content": "q0"}], [{"role": "user", "content": "q1"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]]
    assert seen["completion_ids"] == [[0], [0, 1]]
    assert seen["ground_truth"] == seen["answer"] == ["A", "B"]
    assert seen["solution"] == ["A", "<answer>B</answer>"]
    assert seen["problem_type"] == ["OCR", None]
    assert seen["difficulty"] == [3, None]
    assert seen["trainer_state"].global_step == 4
    assert "data_source" not in seen


async def test_trl_notes_become_parts() -> None:
    def reward(completions, log_extra, log_metric):
        log_extra("right", [True, False])
        log_extra("text", ["a", "b"])
        log_metric("mean", 0.5)
        return [1.0, float("nan")]

    scores = await RewardFunction(reward).score(request({}, {}))
    assert dict(scores[0].parts) == {"right": 1.0, "mean": 0.5}
    assert dict(scores[1].parts) == {}
    assert "nan" in scores[1].error


async def test_verl_arguments() -> None:
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        calls.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return 1.0

    row = {"text": "x", "ground_truth": "A", "data_source": "d", "problem_type": "OCR", "extra_info": {"index": 7}}
    await RewardFunction(compute_score, threads=1).score(request(row | {"hint": 1}, {"text": "y"}))
    extra_info = {"index": 7, "hint": 1, "problem_type": "OCR", "solution": "A", "answer": "A"}
    assert calls[0] == ("d", "x", "A", extra_info, {})
    assert calls[1] == (None, "y", None, {}, {})


async def test_async_verl_samples_run_at_once_and_fail_alone() -> None:
    together = asyncio.Barrier(3)

    async def compute_score(solution_str):
        await together.wait()
        if solution_str == "bad":
            raise KeyError("oops")
        return {"score": 2, "acc": True, "pred": "x", "nan": float("nan")}

    scores = await RewardFunction(compute_score).score(request({"text": "a"}, {"text": "bad"}, {"text": "c"}))
    assert plain(scores) == [2.0, None, 2.0]
    assert "compute_score raised KeyError: 'oops'" in scores[1].error
    assert "test_reward_function.py:" in scores[1].error
    assert dict(scores[0].parts) == {"acc": 1.0}


async def test_raising_batch_function_fails_the_call() -> None:
    def reward(completions):
        raise ValueError("no " * 1000)

    with pytest.raises(InternalError, match="reward raised ValueError: no") as caught:
        await RewardFunction(reward).score(request({}))
    assert caught.value.reason == "REWARD_RAISED"
    assert len(str(caught.value)) < 600


async def test_exit_in_a_function_is_an_error_like_others() -> None:
    scores = await RewardFunction(lambda solution_str: sys.exit(3), name="exits").score(request({}))
    assert plain(scores) == [None]
    assert "SystemExit" in scores[0].error


async def test_request_errors() -> None:
    reward = RewardFunction(Trl(), max_batch_size=2)
    with pytest.raises(BadInput, match="at least one item"):
        await reward.score(ScoreRequest())
    with pytest.raises(BadInput, match="3 items are more than the 2"):
        await reward.score(request({}, {}, {}))
    with pytest.raises(BadInput, match="item 0: columns_json must be a JSON object"):
        await reward.score(ScoreRequest(items=[ScoreItem(messages_json="[]", columns_json="[]")]))
    with pytest.raises(BadInput, match="item 0: messages_json is no JSON"):
        await reward.score(ScoreRequest(items=[ScoreItem(messages_json="")]))
    with pytest.raises(BadInput, match=r"needs the column\(s\) colour; the rows have .*shape"):
        await RewardFunction(lambda completions, colour: [], name="c").score(request({"shape": "disc"}))


@pytest.mark.parametrize(("returned", "value"), [
    (1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array([2.0]), 2.0),
    ({"score": 3}, 3.0), (-0.0, 0.0),
])
def test_numbers(returned, value: float) -> None:
    score = sample_score(returned)
    assert score.HasField("value")
    assert (score.value, score.error) == (value, "")


@pytest.mark.parametrize(("returned", "says"), [
    (None, "None"), ({"score": None}, "None"), ({"acc": 1}, 'without "score", with [\'acc\']'), ("1", "str '1'"),
    (float("inf"), "inf"), (float("nan"), "nan"), (10**400, "inf"), ([1.0], "list"), (Decimal(1), "Decimal"),
    (np.array([1.0, 2.0]), "ndarray"), (1j, "complex"),
])
def test_what_is_no_number_is_unscored(returned, says: str) -> None:
    score = sample_score(returned)
    assert not score.HasField("value")
    assert says in score.error


@pytest.mark.parametrize(("returned", "says"), [
    ([1.0], "1 scores for 2"), ([1.0] * 3, "3 scores for 2"), ([], "0 scores"), (1.0, "float 1.0"), (None, "NoneType"),
    ({"a": 1, "b": 2}, "dict"), ("ab", "str"), (np.float64(1), "float"),
])
def test_wrong_batch_result_leaves_all_unscored(returned, says: str) -> None:
    scores = batch_scores(returned, 2)
    assert plain(scores) == [None, None]
    assert all(says in score.error for score in scores)


def test_arrays_are_batches() -> None:
    assert plain(batch_scores(np.array([1, np.nan]), 2)) == [1.0, None]
    assert plain(batch_scores((0, 1), 2)) == [0.0, 1.0]


async def test_threads_are_bounded_and_a_cancelled_call_keeps_its_own() -> None:
    running, most, lock, release = 0, 0, threading.Lock(), threading.Event()

    def compute_score(solution_str):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if solution_str == "hang":
            release.wait(10)
        time.sleep(0.01)
        with lock:
            running -= 1
        return 1.0

    reward = RewardFunction(compute_score, threads=2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reward.score(request({"text": "hang"})), 0.1)
    assert plain(await reward.score(request(*[{}] * 6))) == [1.0] * 6
    assert most == 2
    release.set()


def test_load_function(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 5")
    path = tmp_path / "mine.py"
    path.write_text("from neighbour import VALUE\n"
                    "def compute_score(solution_str): return VALUE\ndef other(completions): ...\n")
    assert load_function(str(path))("") == 5
    assert load_function(f"{path}:other").__name__ == "other"
    assert load_function("json:dumps") is json.dumps
    for target, says in ((f"{path}:nope", "compute_score, other"), ("gone.py:f", "does not exist"),
                         ("no_such_module:f", "no module 'no_such_module'")):
        with pytest.raises(BadInput, match=says):
            load_function(target)


def test_import_is_light() -> None:
    code = ("import sys, rollplex_client.reward\n"
            "heavy = {'torch', 'transformers', 'numpy', 'uvloop', 'nltk', 'rollplex.rpc'} & set(sys.modules)\n"
            "sys.exit(f'imports {heavy}' if heavy else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
