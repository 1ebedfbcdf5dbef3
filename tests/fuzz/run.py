"""`python tests/fuzz/run.py TARGET --seconds N --corpus DIR`: coverage-guided fuzzing of one target with atheris.

Prints `TARGET EXECUTIONS SECONDS` at the end; libFuzzer leaves a crash-* file with the input that failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rollplex", "targets", "json"]):
    from targets import TARGETS, run_one

from seeds import dictionary, seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that inputs are added to")
    options = parser.parse_args()
    folder = options.corpus / options.target
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(options.target)):
        (folder / f"seed-{number}").write_bytes(data)
    words = options.corpus / f"{options.target}.dict"
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in dictionary(options.target)))
    logging.disable(logging.CRITICAL)
    target = TARGETS[options.target]
    target(b"")  # what is made once
    atheris.Setup([sys.argv[0], str(folder), f"-max_total_time={options.seconds}", f"-artifact_prefix={options.corpus}/",
                   f"-dict={words}",
                   "-max_len=4096", "-timeout=20", "-rss_limit_mb=3072", "-print_final_stats=1", "-verbosity=1"],
                  lambda data: run_one(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
