"""Line charts and Gantt charts as inline SVG. Colours are the page's CSS variables, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 940
LABEL_WIDTH = 46


@dataclass(frozen=True, slots=True)
class Series:
    """One curve, or with `dots` single points joined by a thin line."""

    label: str
    colour: str
    """A CSS variable's name, as "one"."""
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One span of a Gantt row, in seconds."""

    label: str
    colour: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A named row of a Gantt chart."""

    label: str
    bars: Sequence[Bar]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that lie in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], *, x_label: str, label: str, y_low: float = 0.0, height: int = 260) -> str:
    """Curves over one pair of axes. `label` is read out instead of the picture."""
    left, right, top, bottom = 46, 16, 12, 40
    values = [y for item in series for _, y in item.points]
    places = [x for item in series for x, _ in item.points]
    y_marks = ticks(min(y_low, *values), max(values) * 1.02 or 1.0, 5)
    low, high = min(y_low, *values, *y_marks), max(*values, *y_marks)
    first, last = min(places), max(max(places), min(places) + 1)

    def at_x(x: float) -> float:
        return left + (x - first) / (last - first) * (WIDTH - left - right)

    def at_y(y: float) -> float:
        return height - bottom - (y - low) / ((high - low) or 1.0) * (height - top - bottom)

    parts = [f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{at_y(mark):.1f}" y2="{at_y(mark):.1f}"/>'
             f'<text x="{left - 8}" y="{at_y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>' for mark in y_marks]
    parts += [f'<text x="{at_x(mark):.1f}" y="{height - bottom + 18}" text-anchor="middle">{mark:g}</text>'
              for mark in ticks(first, last, 10) if mark == int(mark)]
    parts.append(f'<text x="{(left + WIDTH - right) / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>')
    for item in series:
        placed = [(at_x(x), at_y(y)) for x, y in item.points]
        parts.append(_curve(item, placed))
    return _svg(parts, height, label)


def _curve(item: Series, placed: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    style = 'stroke-width="1.2" stroke-dasharray="4 4"' if item.dots else 'stroke-width="2"'
    line = (f'<polyline points="{path}" fill="none" stroke="var(--{item.colour})" {style} '
            f'stroke-linejoin="round"/>')
    radius = 5 if item.dots else 0 if len(placed) > 60 else 2.5
    if not radius:
        return line
    return line + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var(--{item.colour})">'
                          f"<title>{escape(item.label)}: {point[1]:.3f} at {point[0]:g}</title></circle>"
                          for (x, y), point in zip(placed, item.points))


def gantt(groups: Sequence[tuple[str, Sequence[Lane]]], *, label: str) -> str:
    """Groups of lanes over one time axis, in seconds; each group has a heading."""
    left, right, lane_height, heading, axis = 130, 70, 24, 26, 34
    end_s = max((bar.start_s + bar.duration_s for _, lanes in groups for lane in lanes for bar in lane.bars),
                default=1.0) or 1.0
    height = axis + sum(heading + lane_height * len(lanes) + 8 for _, lanes in groups)

    def at_x(seconds: float) -> float:
        return left + seconds / end_s * (WIDTH - left - right)

    parts = [f'<line class="grid" x1="{at_x(mark):.1f}" x2="{at_x(mark):.1f}" y1="6" y2="{height - axis}"/>'
             f'<text x="{at_x(mark):.1f}" y="{height - axis + 18}" text-anchor="middle">{mark:g} s</text>'
             for mark in ticks(0.0, end_s, 8)]
    y = 0
    for title, lanes in groups:
        parts.append(f'<text class="strong" x="0" y="{y + 18}" font-weight="600">{escape(title)}</text>')
        y += heading
        for lane in lanes:
            parts.append(f'<text x="0" y="{y + 15}">{escape(lane.label)}</text>')
            ends = [at_x(bar.start_s) for bar in lane.bars[1:]] + [WIDTH + 1.0]
            parts += [_bar(bar, at_x, y, lane_height, next_x) for bar, next_x in zip(lane.bars, ends)]
            y += lane_height
        y += 8
    return _svg(parts, height, label)


def _bar(bar: Bar, at_x: Callable[[float], float], y: float, lane_height: float, next_x: float) -> str:
    """A bar and its seconds: behind it where there is room before the next one, else inside, else only as its title."""
    x, end = at_x(bar.start_s), at_x(bar.start_s + bar.duration_s)
    title = f"{bar.label}: {bar.duration_s:.3f} s from {bar.start_s:.3f} s"
    text = ""
    if next_x - end > LABEL_WIDTH:
        text = f'<text x="{end + 5:.1f}" y="{y + 15}">{bar.duration_s:.2f} s</text>'
    elif end - x > LABEL_WIDTH:
        text = f'<text class="inside" x="{end - 6:.1f}" y="{y + 15}" text-anchor="end">{bar.duration_s:.2f} s</text>'
    return (f'<rect x="{x:.1f}" y="{y + 3}" width="{max(end - x, 1.5):.1f}" height="{lane_height - 6}" rx="3" '
            f'fill="var(--{bar.colour})"><title>{escape(title)}</title></rect>{text}')


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>")


def legend(items: Sequence[tuple[str, str, bool]]) -> str:
    """(label, colour, round) of each entry."""
    return '<div class="legend">' + "".join(
        f'<span><i{" class=dot" if dot else ""} style="background:var(--{colour})"></i>{escape(label)}</span>'
        for label, colour, dot in items) + "</div>"
