"""A training loop of one's own with asyncio: text prompts, a reward served from this very process, five iterations.

    rollplex up --model DIR
    python examples/client/train_async.py .rollplex
"""

import asyncio
import sys
import time
from pathlib import Path

from rollplex_client import AsyncClient, Prompt
from rollplex_client.reward import serve_reward_async

# The mesh's own reward counts too, and scores only rows that say what kind of question they are.
SUMS = [Prompt.text(f"What is {a} + {b}? Answer with the number alone.", ground_truth=str(a + b),
                    problem_type="numerical")
        for a in range(2, 6) for b in range(3, 5)]


def right_sum(completions, ground_truth, **columns):
    """TRL's signature: one number a completion."""
    return [float(turns[0]["content"].strip() == truth) for turns, truth in zip(completions, ground_truth)]


async def train(runtime_dir: Path) -> None:
    async with AsyncClient(f"unix:{runtime_dir / 'coordinator.sock'}") as client:
        await client.register_reward("right_sum", f"unix:{runtime_dir / 'right-sum.sock'}")
        try:
            run = await client.create_run(time.strftime("sums-%H%M%S"),
                                          {"sampling": {"samples_per_group": 4, "max_response_tokens": 8}})
            for _ in range(5):
                result = await client.wait(await client.submit_iteration(run.name, SUMS))
                print(result.iteration, result.metrics.get("reward"), result.metrics.get("rewards/right_sum/mean"))
        finally:
            # A registered reward that nobody serves would leave every later sample unscored.
            await client.unregister_reward("right_sum")


async def main(runtime_dir: Path) -> None:
    reward = asyncio.create_task(serve_reward_async(right_sum, f"unix:{runtime_dir / 'right-sum.sock'}"))
    try:
        await train(runtime_dir.absolute())
    finally:
        reward.cancel()
        await asyncio.gather(reward, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).absolute()))
