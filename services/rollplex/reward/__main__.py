"""`python -m rollplex.reward`: the built-in reward, alone or as part of a mesh."""

from __future__ import annotations

import sys

from rollplex.core.entry import arguments, run_service
from rollplex.reward.config import load_config


def main() -> None:
    parser = arguments("reward", "The built-in reward: Video-R1's rules, by the problem type of every sample.")
    parser.add_argument("--address", help="unix:/path or host:port; overrides the file")
    given = parser.parse_args()
    config = load_config(given.config, given.overrides, given.address)
    from rollplex.reward.server import serve_forever

    serve_forever(config)


if __name__ == "__main__":
    sys.exit(run_service(main))
