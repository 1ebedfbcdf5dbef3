"""What it costs to make an updated actor visible to rollout: shared slabs against a full copy.

    python benchmarks/publish/publish.py [--hidden 256 512 1024] [--pairs 1:1 2:1 4:2] [--repeats 3] [--out FILE]
    python benchmarks/publish/publish.py --device cuda --shape 3b 7b --pairs 2:1 2:2

Both start from the same FP32 master weights, cut into the training ranks' shards and chunks, and end with bfloat16 weights
in every rollout replica. `shared` is the trainer's own path: each chunk is cast into its rank's slab and into those of the
q - 1 peers. `copy` is what engines with separate weights do: cast into the rank's own training shard, gather every
parameter whole (above one rank), fuse and cut it to rollout's layout, load it into each replica. Ranks run one after the
other, so seconds are of one core; bytes are those written, reads left out. `extra` is what remains when the cast of the
update itself is left out; `second_weights_bytes` what the copy keeps beside rollout's weights.

With `--device cuda` rank r is a thread on GPU r and all work at once. Masters lie in HBM: what the streamed update brings over
the bus is left out on both sides. A gather is a copy from the peer's memory, whole parameters on every GPU, as loaders of rollout
engines want them; the ranks of real engines, processes over NCCL, are no faster than that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch  # noqa: E402
from tiny_trainer import DictBroker, tiny_config  # noqa: E402
from transformers import Qwen2_5_VLConfig  # noqa: E402

from rollplex.bench.checkpoint import HALVED, PUBLISHED, raw_config  # noqa: E402
from rollplex.core.chunks import split_chunks  # noqa: E402
from rollplex.core.ids import actor_slab  # noqa: E402
from rollplex.core.topology import Topology  # noqa: E402
from rollplex.model import ActorLayout, ModelConfig  # noqa: E402
from rollplex.model.config import _from_hf  # noqa: E402
from rollplex.trainer.actor_slabs import ActorSlabs  # noqa: E402

DTYPE, ITEM = "bfloat16", 2
CHUNK_ELEMENTS = {"host": 1 << 22, "cuda": 1 << 24}


def published_config(shape: str) -> ModelConfig:
    return _from_hf(Qwen2_5_VLConfig.from_dict(raw_config(shape)), None, None)


def model_config(hidden: int, layers: int = 4) -> ModelConfig:
    """Qwen2.5's proportions, with a small vocabulary and tower."""
    config = tiny_config()
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = hidden, hidden * 11 // 4 // 32 * 32, layers
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = hidden // 64, max(1, hidden // 256), 8192
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    vision.out_hidden_size = hidden
    return _from_hf(config, None, None)


class Ranks:
    """The training ranks of a topology over slabs, with master weights."""

    def __init__(self, config: ModelConfig, train_tp: int, rollout_tp: int, kind: str) -> None:
        self.layout = layout = ActorLayout.build(config, rollout_tp, DTYPE, train_tp)
        self.kind, topology = kind, Topology(train_tp, rollout_tp, device_kind=kind)
        self._broker = broker = DictBroker()
        for device in map(topology.device_name, range(train_tp)):
            broker.create(actor_slab("bench", device), object_class="actor_snapshot", device=device,
                          size_bytes=layout.size_bytes, run="bench")
        self.counts = [(name, torch.Size(shard.shape).numel()) for name, shard in layout.shards.items()]
        self.chunks = split_chunks(self.counts, CHUNK_ELEMENTS[kind])
        self.slabs, self.targets, self.masters = [], [], []
        for rank in range(train_tp):
            # A mapping is for the GPU that is current while it is made.
            with self.on(rank):
                slabs = ActorSlabs(broker, layout, topology, rank)
                slabs.open("bench")
                slabs.bind_for_update(1)
                self.slabs.append(slabs)
                self.targets.append(slabs.targets())
                # Of host ranks one for all: only bytes and time are asked for.
                first = kind == "host" and rank > 0
                self.masters.append(self.masters[0] if first else torch.randn(
                    sum(count for _, count in self.counts), device=self.torch_device(rank)))

    def torch_device(self, rank: int) -> str:
        return f"cuda:{rank}" if self.kind == "cuda" else "cpu"

    def on(self, rank: int):
        return torch.cuda.device(rank) if self.kind == "cuda" else nullcontext()

    def each(self, work: Callable[[int], int]) -> int:
        """What all ranks write; on GPUs at the same time, to the end."""
        ranks = range(len(self.slabs))
        if self.kind == "host":
            return sum(map(work, ranks))

        def on_its_gpu(rank: int) -> int:
            with self.on(rank):
                written = work(rank)
                torch.cuda.synchronize(rank)
                return written

        with ThreadPoolExecutor(len(self.slabs)) as pool:
            return sum(pool.map(on_its_gpu, ranks))

    def cast(self, rank: int, targets: dict[str, list[torch.Tensor]]) -> int:
        """StreamedUpdate._cast over all chunks of one rank; bytes written."""
        written = start = 0
        master = self.masters[rank]
        for chunk in self.chunks:
            for span in chunk.spans:
                size = span.stop - span.start
                for target in targets[span.name]:
                    target[span.start:span.stop].copy_(master[start:start + size], non_blocking=True)
                    written += size * ITEM
                start += size
        return written

    def close(self) -> None:
        self.targets.clear()
        for rank, slabs in enumerate(self.slabs):
            with self.on(rank):
                slabs.unbind()
                slabs.close()
        for slab in self._broker.list_slabs():
            self._broker.delete(slab.name)


class FullCopy:
    """Training shards and rollout replicas with weights of their own."""

    def __init__(self, ranks: Ranks) -> None:
        layout, dtype = ranks.layout, getattr(torch, DTYPE)
        self.ranks, self.layout = ranks, layout
        devices = [ranks.torch_device(rank) for rank in range(layout.topology.train_tp)]
        self.train = [{name: torch.empty(shard.shape, dtype=dtype, device=device) for name, shard in layout.shards.items()}
                      for device in devices]
        self.rollout = [{name: torch.empty(tensor.shape, dtype=dtype, device=device)
                         for name, tensor in layout.tensors.items()} for device in devices]
        self._flat = [{name: [value.view(-1)] for name, value in shard.items()} for shard in self.train]

    def cast(self) -> int:
        return self.ranks.each(lambda rank: self.ranks.cast(rank, self._flat[rank]))

    def bring(self, device: int) -> int:
        """Gather, reshard, load on one GPU; bytes written there."""
        layout, written = self.layout, 0
        rank, place = layout.topology.rollout_shard(device), self.ranks.torch_device(device)
        for name, tensor in layout.tensors.items():
            cuts = []
            for part in tensor.parts:
                shard = layout.shards[part.name]
                whole = self.train[device][part.name]
                if shard.axis is not None and len(self.train) > 1:
                    whole = shard.merge([held[part.name].to(place, non_blocking=True) for held in self.train])
                    written += whole.nbytes
                cuts.append(layout.rollout_shards[part.name].take(whole, rank))
            fused = torch.cat(cuts) if len(cuts) > 1 else cuts[0]
            written += (len(cuts) > 1) * fused.nbytes
            self.rollout[device][name].copy_(fused, non_blocking=True)
            written += fused.nbytes
        return written

    def copy(self) -> int:
        """Gather, reshard, load; bytes written. In host memory every parameter is gathered once for all."""
        if self.ranks.kind == "cuda":
            return self.ranks.each(self.bring)
        layout, topology, written = self.layout, self.layout.topology, 0
        for name, tensor in layout.tensors.items():
            wholes = {}
            for part in tensor.parts:
                locals_ = [shard[part.name] for shard in self.train]
                gathered = layout.shards[part.name].axis is not None and len(locals_) > 1
                wholes[part.name] = layout.shards[part.name].merge(locals_) if gathered else locals_[0]
                written += gathered * wholes[part.name].nbytes
            for rank in range(topology.rollout_tp):
                cuts = [layout.rollout_shards[part].take(whole, rank) for part, whole in wholes.items()]
                fused = torch.cat(cuts) if len(cuts) > 1 else cuts[0]
                written += (len(cuts) > 1) * fused.nbytes
                for device in range(rank * topology.q, (rank + 1) * topology.q):
                    self.rollout[device][name].copy_(fused)
                    written += fused.nbytes
        return written


def seconds_of(work, repeats: int) -> tuple[float, int]:
    """Median seconds, after one run that touches the pages."""
    written, taken = work(), []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken), written


def measure(config: ModelConfig, train_tp: int, rollout_tp: int, repeats: int, kind: str) -> dict[str, object]:
    ranks = Ranks(config, train_tp, rollout_tp, kind)
    parameters = sum(torch.Size(shard.full_shape).numel() for shard in ranks.layout.shards.values())
    shared_s, shared_bytes = seconds_of(lambda: ranks.each(lambda rank: ranks.cast(rank, ranks.targets[rank])), repeats)
    full = FullCopy(ranks)
    cast_s, cast_bytes = seconds_of(full.cast, repeats)
    copy_s, copy_bytes = seconds_of(full.copy, repeats)
    second = sum(value.nbytes for shard in full.train for value in shard.values())
    ranks.close()
    return {"parameters": parameters, "train_tp": train_tp, "rollout_tp": rollout_tp,
            "shared": {"seconds": shared_s, "bytes": shared_bytes, "extra_seconds": max(0.0, shared_s - cast_s),
                       "extra_bytes": shared_bytes - cast_bytes, "second_weights_bytes": 0},
            "copy": {"seconds": cast_s + copy_s, "bytes": cast_bytes + copy_bytes, "extra_seconds": copy_s,
                     "extra_bytes": copy_bytes, "second_weights_bytes": second}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--shape", nargs="+", choices=(*PUBLISHED, *HALVED), default=[],
                        help="published sizes, instead of --hidden")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pairs", nargs="+", default=["1:1", "2:1", "4:2"], help="TP_train:TP_rollout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON, after every row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for make, size in [(published_config, shape) for shape in options.shape] or [(model_config, size) for size in options.hidden]:
        for pair in options.pairs:
            train_tp, rollout_tp = map(int, pair.split(":"))
            rows.append({"size": size} | measure(make(size), train_tp, rollout_tp, options.repeats, options.device))
            if options.device == "cuda":
                torch.cuda.empty_cache()
            shared, copy = rows[-1]["shared"], rows[-1]["copy"]
            print(f"{rows[-1]['parameters'] / 1e6:7.1f} M, {pair}: shared {shared['bytes'] / 2**20:6.0f} MiB "
                  f"{1e3 * shared['seconds']:6.1f} ms, copy {copy['bytes'] / 2**20:6.0f} MiB {1e3 * copy['seconds']:6.1f} ms",
                  flush=True)
            _write(options, rows)


def _write(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    figures = {"rows": rows, "dtype": DTYPE, "repeats": options.repeats, "date": time.strftime("%Y-%m-%d"),
               "python": platform.python_version(), "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)),
               "load_average": os.getloadavg()[0], "device": options.device,
               "command": "python benchmarks/publish/publish.py " + " ".join(sys.argv[1:])}
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
