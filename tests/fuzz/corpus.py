"""`python tests/fuzz/corpus.py TARGET`: a target on its seeds and on seeded changes of them, in a process of its own, where
nobody else opens and closes descriptors. Exit status 1, with the input, when one does harm."""

from __future__ import annotations

import logging
import random
import sys

from seeds import mutated, seeds
from targets import TARGETS, run_one

MUTATIONS = {"handle_frames": 4000, "keeper_frames": 2000, "tickets": 4000,
             "run_config": 2000, "prompt_rows": 4000, "media_headers": 200}


def main(name: str) -> None:
    logging.disable(logging.CRITICAL)
    target, rng, inputs = TARGETS[name], random.Random(11), seeds(name)
    target(b"")  # what is made once
    changed = (mutated(rng.choice(inputs), rng) for _ in range(MUTATIONS[name]))
    count = 0
    for data in (*inputs, *changed):
        try:
            run_one(target, data)
        except Exception as error:
            raise AssertionError(f"{name}, input {count}: {data!r}") from error
        count += 1
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
