"""Two (and four, with shared kv heads) gloo processes give the gradients of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensor_parallel_worker import measure

from rollplex.core.errors import BadInput
from rollplex.model import ActorLayout, init_tensor_parallel, read_model_config

WORKER = Path(__file__).parents[2] / "support" / "tensor_parallel_worker.py"


def run_ranks(checkpoints: list[Path], folder: Path, size: int, groups_per_pass: int) -> list[list[dict]]:
    """Per rank, one result a checkpoint."""
    commands = [[sys.executable, str(WORKER), str(folder), str(rank), str(size), str(groups_per_pass), *map(str, checkpoints)]
                for rank in range(size)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ties", "groups_per_pass"), [
    (2, [False, True], 1), (4, [False], 1), (2, [False], 3), (4, [False], 4)])
def test_gradients_equal_one_ranks(bind, exact, checkpoints, tmp_path, size, ties, groups_per_pass):
    """Alone, and a group a pass."""
    by_rank = run_ranks([checkpoints[tied] for tied in ties], tmp_path, size, groups_per_pass)
    for index, tied in enumerate(ties):
        alone = measure(bind(tied=tied), "keep")
        layout = ActorLayout.build(read_model_config(checkpoints[tied]), size, "float64")
        worst = 0.0
        for rank, results in enumerate(by_rank):
            found = results[index]
            for name, expected in alone["gradients"].items():
                error = (found["gradients"][name] - layout.shards[name].take(expected, rank)).norm() / expected.norm()
                worst = max(worst, float(error))
            for name, expected in alone["tower"].items():
                worst = max(worst, float((found["tower"][name] - expected).norm() / expected.norm()))
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
            torch.testing.assert_close(found["logp"], alone["logp"], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["entropy"], alone["entropy"], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["decoded"], alone["decoded"], rtol=1e-11, atol=1e-11)
            assert torch.equal(found["decoded"], by_rank[0][index]["decoded"])
        print(f"worst relative gradient error at TP {size}, tied {tied}: {worst:.1e}")
        assert worst < 1e-12


def test_a_group_needs_a_store():
    with pytest.raises(BadInput, match="needs a store"):
        init_tensor_parallel(0, 2)
    with pytest.raises(BadInput, match="no file"):
        init_tensor_parallel(0, 2, store="tcp://127.0.0.1:1")
    with pytest.raises(BadInput, match="rank 2 of 2"):
        init_tensor_parallel(2, 2, store="nowhere")
