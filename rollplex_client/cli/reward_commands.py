"""reward add, remove, list."""

from __future__ import annotations

import argparse
import dataclasses

from rollplex_client.cli.output import Output
from rollplex_client.cli.run_commands import coordinator


def add(arguments: argparse.Namespace, output: Output) -> None:
    with coordinator(arguments) as client:
        reward = client.register_reward(arguments.name, arguments.address, weight=arguments.weight,
                                        timeout_s=arguments.reward_timeout, retries=arguments.retries)
    output.result(dataclasses.asdict(reward), f"{reward.name} at {reward.address} counts from the next iteration")


def remove(arguments: argparse.Namespace, output: Output) -> None:
    with coordinator(arguments) as client:
        client.unregister_reward(arguments.name)
    output.result({"removed": arguments.name}, f"{arguments.name} is out")


def list_rewards(arguments: argparse.Namespace, output: Output) -> int:
    """Exit status 1 when one does not answer."""
    from rich.table import Table

    with coordinator(arguments) as client:
        rewards = client.list_rewards()
    table = Table("reward", "address", "weight", "timeout", "retries", "answers", box=None, pad_edge=False)
    for reward in rewards:
        table.add_row(reward.name, reward.address, f"{reward.weight:g}", f"{reward.timeout_s:g} s",
                      str(reward.retries), "yes" if reward.reachable else f"no: {reward.error}")
    output.result({"rewards": [dataclasses.asdict(reward) for reward in rewards]},
                  table if rewards else "no rewards are registered")
    return 0 if all(reward.reachable for reward in rewards) else 1
