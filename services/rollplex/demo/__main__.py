"""`python -m rollplex.demo --out DIR`: makes the demo's videos and its warm-started checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rollplex.core.imports import uncollected


def main() -> None:
    """Parse before torch is imported, so that --help and a typo answer at once."""
    parser = argparse.ArgumentParser(prog="python -m rollplex.demo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of clips, weights and warm start (default 0)")
    parser.add_argument("--blank-videos", action="store_true", help="control: nothing but noise in any clip")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1; a model this small gains little)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line and nothing else")
    arguments = parser.parse_args()
    if arguments.seed < 0 or arguments.threads < 1:
        parser.error("--seed must be 0 or more, --threads 1 or more")

    with uncollected():
        import torch
        import transformers
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        from rollplex.demo.build import build_demo

    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    console = Console(stderr=True, quiet=arguments.json)
    with Progress(*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"), console=console) as bars:
        tasks: dict[str, object] = {}

        def show(part: str, done: int, total: int, loss: float) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(f"warm start: {part}", total=total, loss=loss)
            bars.update(tasks[part], completed=done, loss=loss)

        console.print(f"rendering and encoding videos under {arguments.out} ...")
        built = build_demo(arguments.out, seed=arguments.seed, blank=arguments.blank_videos, progress=show)
    print(json.dumps(built.to_json()))


if __name__ == "__main__":
    main()
