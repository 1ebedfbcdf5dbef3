"""checkpoint list, checkpoint verify: durable checkpoints on disk. No mesh is needed."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from rollplex.core import checkpoints
from rollplex.core.checkpoints import Manifest
from rollplex.core.errors import BadInput, DataLoss
from rollplex_client.cli.output import Output
from rollplex_client.cli.settings import load
from rollplex_client.formatting import seconds_text, size_text


def list_all(arguments: argparse.Namespace, output: Output) -> None:
    """By run, newest first. Manifests are checked, the other files are not read."""
    from rich.table import Table

    settings = load(arguments)
    root = settings.sections["coordinator"].checkpoints or settings.mesh.checkpoints_dir
    if arguments.run:
        folders = [checkpoints.run_folder(root, arguments.run)]
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    found = [_described(path) for folder in folders for path in checkpoints.list_checkpoints(folder)]
    table = Table("run", "checkpoint", "iterations", "snapshot", "size", "written (UTC)", box=None, pad_edge=False)
    for item in found:
        name = Path(item["path"]).name
        if item["error"]:
            table.add_row(item["run"], name, item["error"])
            continue
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(item["create_time_s"]))
        table.add_row(item["run"], name, str(item["next_iteration"]), str(item["snapshot"]), size_text(item["size_bytes"]),
                      written)
    output.result({"checkpoints": found}, *([f"in {root}:", table] if found else [f"no checkpoints in {root}"]))


def verify(arguments: argparse.Namespace, output: Output) -> None:
    """Raises DataLoss naming the file that is damaged."""
    began = time.monotonic()
    path: Path = arguments.path.absolute()
    manifest = checkpoints.verify(path)
    seconds = time.monotonic() - began
    found = {**_summary(path, manifest), "files": len(manifest.files), "seconds": seconds, "config": manifest.config}
    output.result(found, f"{path} is intact: {len(manifest.files)} files, {size_text(found['size_bytes'])}, read in "
                         f"{seconds_text(seconds)}; run {manifest.run} after {manifest.next_iteration} iterations, snapshot "
                         f"{manifest.snapshot}")


def _described(path: Path) -> dict[str, Any]:
    try:
        return {**_summary(path, checkpoints.read_manifest(path)), "error": ""}
    except (DataLoss, BadInput) as error:
        return {"path": str(path), "run": path.parent.name, "error": str(error)}


def _summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    plain = dataclasses.asdict(manifest)
    kept = ("run", "next_iteration", "snapshot", "optimizer_step", "prompts_consumed", "learning_rate_factor", "seed", "dtype",
            "state_dtype", "layout_digest", "tensor_parallel", "create_time_s")
    return {"path": str(path), **{name: plain[name] for name in kept},
            "size_bytes": sum(entry.size_bytes for entry in manifest.files.values())}
