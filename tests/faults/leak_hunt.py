"""The leak hunt as a command: counts as JSON, status 1 for a leak or an iteration that is not DONE.

    python -m tests.faults.leak_hunt --iterations 50 --kills 20
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from faulty_mesh import FaultyMesh  # noqa: E402
from leak_hunt import hunt  # noqa: E402
from tiny_checkpoint import save_tiny  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rp-leaks-") as folder:
        mesh = FaultyMesh(save_tiny(Path(folder) / "model"), Path(folder))
        try:
            mesh.up(timeout_s=5.0, retries=6)
            found = hunt(mesh, arguments.iterations, arguments.kills, arguments.seed, lambda text: print(text, file=sys.stderr))
        finally:
            mesh.close()
    print(json.dumps(asdict(found), indent=1))
    return 0 if found.clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
