"""Weights from and to a Hugging Face checkpoint directory, tensor by tensor, any tensor-parallel size.

Read: one file or an index of shards, in the old spelling (visual.*, model.layers.*) or the new one (model.visual.*,
model.language_model.*). Written: the new one, with configuration, tokenizer and processor files of the source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollplex.core.errors import BadInput
from rollplex.model.config import ModelConfig
from rollplex.model.layout import ActorLayout
from rollplex.model.shard import Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COPIED_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".md"}

Views = Mapping[str, torch.Tensor]
Gather = Callable[[str, torch.Tensor], Sequence[torch.Tensor] | None]


def training_name(key: str) -> str | None:
    """A checkpoint's key in either spelling -> our training name; None for what is no parameter."""
    if key.endswith("rotary_emb.inv_freq"):
        return None
    for prefix, ours in (
        ("model.language_model.", "language_model."),
        ("model.visual.", "visual."),
        ("language_model.model.", "language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("visual.", "visual."),
        ("lm_head.", "lm_head."),
        ("model.", "language_model."),
    ):
        if key.startswith(prefix):
            return ours + key.removeprefix(prefix)
    return key


def disk_name(name: str) -> str:
    """Training name -> the key that we write."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def load_into(
    checkpoint: Path,
    config: ModelConfig,
    views: Views,
    tp_rank: int = 0,
    tp_size: int = 1,
    *,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Fill a rank's parameters; the checkpoint must hold exactly the model's tensors, in their shapes.

    `shards` says how they are cut, where a layout's own cuts are wanted (rollout's of a layout for TP_train > TP_rollout).
    Views on a GPU are filled in stream order; the file's dtype crosses the bus and is converted there.
    """
    shards = shards or ActorLayout.build(config, tp_size, "float32").shards
    files = _files_by_name(checkpoint, config)
    _require(f"{checkpoint} lacks", shards.keys() - files.keys())
    _require(f"{checkpoint} has unexpected tensors", files.keys() - shards.keys())
    _require("no view to load into for", shards.keys() - views.keys())
    with ExitStack() as stack, torch.no_grad():
        opened = {}
        for name, (file, key) in files.items():
            if file not in opened:
                opened[file] = stack.enter_context(_open(checkpoint / file))
            source = opened[file].get_slice(key)
            load_part(name, source, views[name], shards[name], tp_rank, config)


def load_part(name: str, source, view: torch.Tensor, shard: Shard, rank: int, config: ModelConfig) -> None:
    """A rank's part of a whole tensor, a slice of a safetensors file, with zeros where the vocabulary is padded."""
    shape = tuple(source.get_shape())
    expected = unpadded(name, shard, config)
    if shape != expected:
        raise BadInput(f"checkpoint tensor {name} has shape {shape}; expected {expected}", reason="CHECKPOINT_MISMATCH")
    if tuple(view.shape) != shard.shape:
        raise BadInput(f"view of {name} has shape {tuple(view.shape)}; expected {shard.shape}", reason="BAD_BINDING")
    if shard.axis is None:
        view.copy_(source[:], non_blocking=True)
        return
    start, stop = shard.bounds(rank)
    if shard.axis == 1:
        view.copy_(source[:, start:stop], non_blocking=True)
        return
    present = max(0, min(stop, shape[0]) - start)
    if present:
        view[:present].copy_(source[start : start + present], non_blocking=True)
    view[present:].zero_()


def unpadded(name: str, shard: Shard, config: ModelConfig) -> tuple[int, ...]:
    """The shape on disk: no vocabulary padding."""
    if name in ("language_model.embed_tokens.weight", "lm_head.weight"):
        return (config.vocab_size, *shard.full_shape[1:])
    return shard.full_shape


def _files_by_name(checkpoint: Path, config: ModelConfig) -> dict[str, tuple[str, str]]:
    """training name -> (file, key in it)"""
    if not checkpoint.is_dir():
        raise BadInput(f"checkpoint directory {checkpoint} does not exist", reason="CHECKPOINT_MISSING")
    if (checkpoint / INDEX_FILE).is_file():
        try:
            file_of = json.loads((checkpoint / INDEX_FILE).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise BadInput(f"{checkpoint / INDEX_FILE} is not a weight index", reason="CHECKPOINT_INCOMPLETE") from error
        absent = {file for file in file_of.values() if not (checkpoint / file).is_file()}
        _require(f"{checkpoint} lacks shard files", absent)
    elif (checkpoint / SINGLE_FILE).is_file():
        with _open(checkpoint / SINGLE_FILE) as file:
            file_of = dict.fromkeys(file.keys(), SINGLE_FILE)
    else:
        raise BadInput(
            f"{checkpoint} has neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to load",
            reason="CHECKPOINT_INCOMPLETE",
        )
    found = {}
    for key, file in file_of.items():
        name = training_name(key)
        if name is None or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name in found:
            raise BadInput(f"{checkpoint} holds {name} twice: {found[name][1]} and {key}", reason="CHECKPOINT_MISMATCH")
        found[name] = (file, key)
    return found


def _open(path: Path):
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is not a readable safetensors file: {error}", reason="CHECKPOINT_INCOMPLETE") from error


def _require(what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:5])
        raise BadInput(f"{what} {listed} ({len(names)} in all)", reason="CHECKPOINT_INCOMPLETE")


def save_checkpoint(
    source: Path,
    out: Path,
    config: ModelConfig,
    views: Views | Sequence[Views],
    *,
    gather: Gather | None = None,
    shards: Mapping[str, Shard] | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write `out`, which must not exist yet or be an empty directory; it appears whole or not at all.

    `views` holds one rank's parameters (TP = 1), or a list has every rank's. With `gather`, every rank calls this with
    its own: gather(name, local) returns all ranks' tensors on the rank that writes and None on the others. `shards` says how
    they were cut; absent, as ActorLayout.build cuts them for that many ranks.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} exists and is not an empty directory", reason="OUTPUT_EXISTS", path=out)
    tensors = _whole_tensors(config, views, gather, shards)
    partial = out.with_name(f".{out.name}.partial")
    file_of: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = size = 0
    for key, tensor in tensors:
        if not total:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if pending and size + tensor.nbytes > max_shard_bytes:
            _write_shard(partial, pending, file_of)
            size = 0
        pending[key] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if not pending:
        return
    dtype = next(iter(pending.values())).dtype
    _write_shard(partial, pending, file_of)
    _write_index(partial, file_of, total)
    copy_companions(source, partial, str(dtype).removeprefix("torch."))
    partial.replace(out)


def _whole_tensors(
    config: ModelConfig, views: Views | Sequence[Views], gather: Gather | None, shards: Mapping[str, Shard] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(key on disk, whole tensor without padding), one at a time; nothing on a rank that does not write."""
    by_rank = [views] if isinstance(views, Mapping) else list(views)
    for name in by_rank[0]:
        parts = [rank_views[name] for rank_views in by_rank]
        if gather is not None:
            parts = gather(name, parts[0])
            if parts is None:
                continue
        shards = shards or ActorLayout.build(config, len(parts), "float32").shards
        shard = shards[name]
        whole = shard.merge([part.detach().cpu() for part in parts])
        rows = unpadded(name, shard, config)[0]
        yield disk_name(name), whole[:rows].contiguous()


def _write_shard(folder: Path, pending: dict[str, torch.Tensor], file_of: dict[str, str]) -> None:
    name = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
    # Views of one slab share a storage, which safetensors refuses.
    save_file({key: tensor.clone() for key, tensor in pending.items()}, str(folder / name), metadata={"format": "pt"})
    file_of.update(dict.fromkeys(pending, name))
    pending.clear()


def _write_index(folder: Path, file_of: dict[str, str], total_bytes: int) -> None:
    names = sorted(set(file_of.values()))
    if len(names) == 1:
        (folder / names[0]).replace(folder / SINGLE_FILE)
        return
    final = {name: f"model-{index + 1:05d}-of-{len(names):05d}.safetensors" for index, name in enumerate(names)}
    for name, new in final.items():
        (folder / name).replace(folder / new)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {key: final[file] for key, file in file_of.items()}}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_companions(source: Path, folder: Path, dtype: str) -> None:
    """Configuration, tokenizer and processor files of the source, with the dtype that was written."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name != INDEX_FILE:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config.get("text_config"), config.get("vision_config")):
        for key in ("dtype", "torch_dtype"):
            if section and key in section:
                section[key] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
