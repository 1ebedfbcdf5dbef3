"""The reward of a mesh that is there to be broken: random weights earn it, and it tells samples apart.

It has the built-in reward's servicer, so that it has its crash points, and its place in the mesh.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

from rollplex.core.entry import arguments, run_service
from rollplex.reward.config import load_config
from rollplex.reward.engine import Sample, Scored
from rollplex.reward.server import serve_with
from rollplex.rpc.server import configure_logging, run

LEVELS = 7


class TextHash:
    """The response's CRC, in steps."""

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        return [Scored(zlib.crc32(sample.response.encode()) % LEVELS / LEVELS) for sample in samples]


def main() -> None:
    given = arguments("chaos.reward", "A reward that random weights earn.").parse_args()
    configure_logging("reward")
    run(serve_with(TextHash(), load_config(given.config, given.overrides)))


if __name__ == "__main__":
    sys.exit(run_service(main))
