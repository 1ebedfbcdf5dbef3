"""Follows a run's events from the beginning, through restarts of the coordinator.

    python examples/client/watch_run.py unix:$PWD/.rollplex/coordinator.sock my-run
"""

import sys

from rollplex_client import Client, Iteration, Note, PhaseSpan


def main(address: str, run: str) -> None:
    with Client(address) as client:
        for event in client.watch(run):
            if isinstance(event.body, PhaseSpan) and event.body.ended:
                print(f"{event.iteration:4d}  {event.body.span:18s} {event.body.duration_s:8.3f} s")
            elif isinstance(event.body, Iteration) and event.body.state == "done":
                print(f"{event.iteration:4d}  reward {event.body.metrics.get('reward', float('nan')):.3f}")
            elif isinstance(event.body, Note):
                print(f"      {event.body.level}: {event.body.message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
