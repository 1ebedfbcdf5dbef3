"""The result as text tables; the page shows the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rollplex_client.formatting import size_text
from rollplex_client.report.sections import TIME_LABELS

Row = tuple[str, list[str]]
NOTHING = "–"


def arm_columns(result: dict[str, Any]) -> list[str]:
    return [arm["arm"] for arm in result["arms"]] + (["TRL"] if result["trl"] else [])


def main_rows(result: dict[str, Any]) -> Iterator[Row]:
    """What arms and TRL have in common."""
    columns = [*result["arms"], *([result["trl"]] if result["trl"] else [])]
    serial = next((arm for arm in result["arms"] if arm["schedule"] == "serial"), None)
    apart = next((arm for arm in result["arms"] if arm["schedule"] == "disaggregated"), None)
    yield "GPUs", [str(column.get("gpus", 1)) for column in columns]
    yield "step, seconds", [_number(column["step_s"], 3) for column in columns]
    yield "  with the next one's media read meanwhile (wall)", [_number(column.get("wall_s"), 3) for column in columns]
    yield "  of it rollout", [_number(column["rollout"]["measured_s"], 3) for column in columns]
    if serial:
        yield f"  speedup over {serial['arm']}", [_number(serial["step_s"] / column["step_s"], 3) for column in columns]
    if apart:
        yield f"  speedup over {apart['arm']}", [_number(apart["step_s"] / column["step_s"], 3) for column in columns]
    if result["trl"]:
        slower = result["trl"]["slower_than"]
        yield "  TRL's step over it (wall)", [_number(slower.get(column.get("arm")), 2) for column in columns]
    yield "response tokens a second", [_number(column["throughput"]["response_tokens_per_s"], 0) for column in columns]
    yield "all tokens a second, as verl counts", [_number(column["throughput"]["tokens_per_s"], 0) for column in columns]
    for key, text in (("stated", "MFU, of stated peak"), ("measured", "MFU, of the product measured here")):
        yield text, [_percent(column["mfu"][f"of_{key}"]) for column in columns]
    yield "  prompts counted for every sample (stated)", [_percent(column["mfu"]["unshared_of_stated"]) for column in columns]
    yield "GPU memory in use, peak", [_size(column["gpu_memory"]["peak_bytes"]) for column in columns]


def update_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Every arm's first update begins with the same weights: of the same samples it is the same but for rounding."""
    updates = [arm["first_update"] for arm in result["arms"]]
    yield "gradient norm", [_number(update["gradient_norm"], 6) for update in updates]
    yield "  samples as in the first arm", ["yes" if update["samples_sha256"] == updates[0]["samples_sha256"] else "no"
                                            for update in updates]


def phase_rows(result: dict[str, Any]) -> Iterator[Row]:
    names = dict.fromkeys([*TIME_LABELS, *(name for arm in result["arms"] for name in arm["phase_s"])])
    for name in names:
        if any(name in arm["phase_s"] for arm in result["arms"]):
            yield TIME_LABELS.get(name, name), [_number(arm["phase_s"].get(name), 3) for arm in result["arms"]]


def bound_rows(result: dict[str, Any]) -> Iterator[Row]:
    arms = result["arms"]
    for source in ("measured", "stated"):
        yield f"rollout over its prompts' FLOPs and decode's bytes, {source}", [
            _number(arm["rollout"][f"distance_{source}"], 2) for arm in arms]
    yield "decode as the engine measured it, seconds", [_number(arm["decode"]["measured_s"], 3) for arm in arms]
    yield "  steps", [_number(arm["decode"]["token_steps"], 0) for arm in arms]
    yield "  samples in one", [_number(arm["decode"]["batch"], 1) for arm in arms]
    yield "  a step, milliseconds", [_number(1e3 * arm["decode"]["token_step_s"], 2) for arm in arms]
    for source in ("measured", "stated"):
        for kind, text in (("per_sample", "KV of every sample"), ("shared", "a prompt's KV once a group")):
            yield f"  over its bound: {text}, {source} bandwidth", [
                _number(arm["decode"][f"{kind}_distance_{source}"], 2) for arm in arms]
    for role in ("trainer", "reference"):
        if any(arm["prefix"][role] for arm in arms):
            yield f"{role}'s prefixes, TFLOP/s", [
                _number(arm["prefix"][role]["flops_per_s"] / 1e12 if arm["prefix"][role] else None, 1) for arm in arms]
            for source in ("measured", "stated"):
                yield f"  over its bound, {source} FLOP/s", [
                    _number(arm["prefix"][role][f"distance_{source}"] if arm["prefix"][role] else None, 2) for arm in arms]


EQUATION = {
    "serial_s": "serial step, measured", "decode_s": "rollout alone, T_D", "prefix_s": "prefixes alone, T_P",
    "post_s": "the rest, T_post", "predicted_s": "predicted, max(T_D, T_P) + T_post",
    "decode_slowdown_s": "rollout slower beside prefixes, d_D", "prefix_slowdown_s": "prefixes slower beside rollout, d_P",
    "predicted_with_slowdown_s": "predicted with both slowdowns", "measured_s": "measured", "speedup": "serial over measured"}


def equation_table(result: dict[str, Any]) -> Iterator[Row]:
    for key, text in EQUATION.items():
        yield text, [_number(row[key], 3) for row in result["equation"].values()]


def memory_rows(result: dict[str, Any]) -> Iterator[Row]:
    """By device and class, from the broker's ledger; devices of which all is alike are one row."""
    peaks = [arm["hbm_peak_bytes"] for arm in result["arms"]]
    alike: dict[str, list[str]] = {}
    for device in sorted({device for of_arm in peaks for device in of_arm}):
        alike.setdefault(repr([sorted(of_arm.get(device, {}).items()) for of_arm in peaks]), []).append(device)
    for devices in alike.values():
        names = {name for of_arm in peaks for name in of_arm.get(devices[0], {})}
        label = ", ".join([devices[0], *(device.rpartition(":")[2] for device in devices[1:])])
        for name in sorted(names, key=lambda name: (name == "all", name)):
            text = "largest phase, all classes" if name == "all" else name
            yield f"{label}: {text}", [_size(of_arm.get(devices[0], {}).get(name)) for of_arm in peaks]


def summary_lines(result: dict[str, Any]) -> list[str]:
    """For a console. Plain lines: a table fitted to a pipe's 80 columns cannot be read."""
    arms = [arm["arm"] for arm in result["arms"]]
    lines = []
    if arms or result["trl"]:
        lines += _text_table("", arm_columns(result), main_rows(result))
    if arms:
        lines += _text_table("seconds of", arms, phase_rows(result)) + _text_table("bounds", arms, bound_rows(result))
    if result["equation"]:
        lines += _text_table("equation 1, seconds", list(result["equation"]), equation_table(result))
    if arms:
        lines += _text_table("first update", arms, update_rows(result))
        lines += _text_table("ledger, peak", arms, memory_rows(result))
    return [*lines, *(f"FAILED {item['what']}: {item['message']} [{item['reason']}]" for item in result["failed"])]


def _text_table(corner: str, heads: list[str], rows: Iterable[Row]) -> list[str]:
    cells = [(corner, heads), *known(rows)]
    first = max(len(text) for text, _ in cells)
    widths = [max(len(row[index]) for _, row in cells) for index in range(len(heads))]
    return ["", *(f"{text:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
                  for text, row in cells)]


def known(rows: Iterable[Row]) -> Iterator[Row]:
    """Without those of which nobody measured anything."""
    return (row for row in rows if set(row[1]) != {NOTHING})


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}%"


def _size(value: int | None) -> str:
    return NOTHING if value is None else size_text(value)
