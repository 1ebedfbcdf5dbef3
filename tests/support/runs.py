"""Runs over a hand-started mesh: created, iterated, exported, and where an actor is mapped."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rollplex_client import Media, Prompt
from rollplex_client.results import PhaseSpan

numbers = itertools.count()
BASE = {"sampling": {"samples_per_group": 4, "max_response_tokens": 8},
        "optimizer": {"learning_rate": 1e-3}, "loss": {"kl_coef": 0.05}, "phase_timeout_s": 60.0}


def new_run(client, **changes):
    config = {**BASE, **{key: {**BASE.get(key, {}), **value} if isinstance(value, dict) else value
                         for key, value in changes.items()}}
    return client.create_run(f"run-{next(numbers)}", config).name


def iterate(client, run, prompts, count=1):
    return [client.wait(client.submit_iteration(run, prompts)) for _ in range(count)][-1]


def weights_of(client, run, directory: Path):
    client.export_checkpoint(run, directory)
    weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


def distance(found, expected, start):
    """||dA - dB|| / ||dA|| over all parameters."""
    difference = sum(float(np.square(found[name].astype("f8") - expected[name]).sum()) for name in start)
    moved = sum(float(np.square(expected[name].astype("f8") - start[name]).sum()) for name in start)
    assert moved > 0
    return (difference / moved) ** 0.5


def mixed(prompts, image):
    return [*prompts[:2], Prompt.text("Which colour?", Media("image", image), ground_truth="A",
                                      problem_type="multiple choice"),
            Prompt.text("How many?", ground_truth="2", problem_type="numerical")]


def actor_mappings(pid: int) -> set[tuple[int, int, int]]:
    """(inode, offset, length) of the actor slab's mappings in a process."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+)\s+/memfd:.*actor", line)
        if match:
            start, end, offset = (int(match[index], 16) for index in (1, 2, 3))
            found.add((int(match[4]), offset, end - start))
    return found


def run_two(mesh, client, config, prompts, name="", span=""):
    """Two iterations; `name` is killed where `span` begins for the second time in the run, and started again."""
    run, seen, killed = new_run(client, **config), [], []

    def kill(event):
        if isinstance(event.body, PhaseSpan) and event.body.span == span and not event.body.ended:
            seen.append(event.sequence)
            if len(seen) == 2 and not killed:
                killed.append(name)
                mesh.kill(name)
                mesh.start(name)

    for _ in range(2):
        done = client.wait(client.submit_iteration(run, prompts), on_event=kill)
        assert done.state == "done"
    assert killed == ([name] if name else [])
    return run
