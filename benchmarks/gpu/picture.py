"""The timelines of several bench.json as one SVG file: what ran when in the last iteration of every arm.

    PYTHONPATH=services:protos/gen:. python benchmarks/gpu/picture.py benchmarks/results/A.json B.json --out C.svg
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollplex_client.bench.page import LEGEND, arm_lanes
from rollplex_client.report.svg import WIDTH, gantt

LEGEND_HEIGHT = 30


def picture(results: list[dict[str, Any]]) -> str:
    groups = [(f"{arm['arm']}: {arm['step_s']:.2f} s", arm_lanes(arm)) for result in results for arm in result["arms"]]
    chart = gantt(groups, label="What ran when in one iteration of every arm")
    height = int(re.search(rf'viewBox="0 0 {WIDTH} (\d+)"', chart)[1])
    # The page's colours, light and dark; what else is in there selects nothing here.
    style = files("rollplex_client.report").joinpath("style.css").read_text(encoding="utf-8").replace(":root", "svg")
    keys, x = "", 0.0
    for label, colour, _ in LEGEND:
        keys += (f'<rect x="{x:.0f}" y="4" width="12" height="12" fill="var(--{colour})"/>'
                 f'<text x="{x + 17:.0f}" y="15">{label}</text>')
        x += 36 + 7 * len(label)  # of 12 pixels, a letter is 7 wide at most, on average
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {WIDTH + 16} {height + LEGEND_HEIGHT}"><style>{style}</style>'
            f'<rect x="-8" width="{WIDTH + 16}" height="{height + LEGEND_HEIGHT}" fill="var(--card)"/>{keys}'
            f'<svg y="{LEGEND_HEIGHT}" width="{WIDTH}" height="{height}"{chart.removeprefix("<svg")}</svg>\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    arguments.out.write_text(picture([json.loads(path.read_text()) for path in arguments.results]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
