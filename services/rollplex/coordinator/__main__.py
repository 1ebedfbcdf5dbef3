"""`python -m rollplex.coordinator`: drives iterations; clients talk to it."""

from __future__ import annotations

import sys

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.entry import arguments, load_sections, run_service
from rollplex.core.imports import uncollected


def main() -> None:
    from rollplex.coordinator.config import CoordinatorConfig

    options = arguments("coordinator", __doc__).parse_args()
    sections = load_sections(options.config, options.overrides,
                             {"mesh": MeshSection, "model": ModelSection, "coordinator": CoordinatorConfig})
    with uncollected():
        from rollplex.coordinator.server import serve_forever
        from rollplex.data.processor import import_transformers

        import_transformers()

    serve_forever(sections["mesh"], sections["model"], sections["coordinator"])


if __name__ == "__main__":
    sys.exit(run_service(main))
