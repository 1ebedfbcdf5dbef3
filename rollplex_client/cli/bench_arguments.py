"""The options of `rollplex bench`. Imports the standard library only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SHAPES = ("tiny", "tiny8", "3b", "7b", "32b", "32b-half")
ARMS = "serial,overlap@mps-default,overlap@mps-priority"


def add_bench(add) -> argparse.ArgumentParser:
    bench = add("bench", "bench_command:bench", "Measure one job under schedules and sharing policies in one go, against "
                "its bounds, the paper's equation 1 and other trainers.")
    job = bench.add_argument_group("the job", "random weights, real videos, response lengths drawn from the samples' seeds: "
                                   "the same in every arm")
    model = job.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, default="3b", help="Qwen2.5-VL of that size (default 3b); 32b-half: "
                       "half of its layers, for half of the GPUs; tiny8: eight heads, for eight ranks")
    model.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint that is there, instead")
    _number(job, "--prompt-tokens", 4096, "of a prompt, media included; the true number is reported")
    _number(job, "--groups", 16, "prompts of an iteration")
    _number(job, "--samples", 8, "responses of a prompt")
    _number(job, "--response-tokens", 225.0, "of a response, on average (log-normal, before clipping)", float)
    _number(job, "--max-response-tokens", 1024, "of a response, at most")
    _number(job, "--iterations", 3, "of an arm; the first is not measured")
    _number(job, "--kl-coef", 0.0, "above 0, a reference model works too", float)
    _number(job, "--seed", 0, "of weights, videos, lengths and samples")
    how = bench.add_argument_group("how it is measured")
    how.add_argument("--arms", default=None, metavar="A,B", help="schedule[@policy][:TRAINxROLLOUT[dp]], one after the other "
                     "(dp: mesh.data_parallel), neighbours that differ in their schedule only on one mesh "
                     f"(default {ARMS}; on a CPU serial,overlap). Schedules: serial, overlap, disaggregated. Policies: "
                     "time-slice, mps-default, mps-priority, thread-cap, sm-affinity, green-context")
    _number(how, "--train-tp", 1, "tensor-parallel ranks of trainer and reference, a GPU each, of an arm that names none")
    _number(how, "--rollout-tp", 1, "of a rollout replica; it divides --train-tp, and the quotient is the number of replicas")
    _number(how, "--gpus", 0, "of every arm: others are refused, and disaggregated trains on half of them; 0: as degrees need")
    _number(how, "--micro-batch-samples", 0, "samples in one suffix forward, parts of a group or several; 0: a group")
    how.add_argument("--hbm-gib", type=float, default=None, metavar="N", help="of each GPU, what all roles together may take: a "
                     "budget that the broker keeps, and that classes are placed by (default: the whole GPU)")
    how.add_argument("--host-gib", type=float, default=None, metavar="N", help="host memory that slabs may take (default: seven "
                     "eighths of the container's limit or the machine's memory, which may grow as it is used)")
    how.add_argument("--vs", choices=("trl",), help="afterwards, the same job with TRL's GRPOTrainer")
    _number(how, "--trl-batch", 4, "samples of TRL's micro-batch")
    _number(how, "--trl-vllm-share", 0.25, "of the GPU's memory for TRL's vLLM", float)
    how.add_argument("--trl-vllm", type=_options, default={}, metavar="JSON", help="further arguments of TRL's vllm.LLM, as "
                     '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}, which starts in less time')
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries every step, with no claim to speed")
    how.add_argument("--work", type=Path, default=Path("runs/bench-data"), metavar="DIR",
                     help="checkpoint and videos; what lies there is used again (default runs/bench-data)")
    how.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR",
                     help="bench.json, report.html, logs (default runs/bench)")
    _number(how, "--timeout", 300.0, "seconds in which a mesh must be up", float)
    _number(how, "--trl-timeout", 3600.0, "seconds in which TRL must be done", float)
    return bench


def _options(text: str) -> dict:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return options


def _number(group: argparse._ArgumentGroup, option: str, default: float, text: str, kind: type = int) -> None:
    group.add_argument(option, type=kind, default=default, metavar="N", help=f"{text} (default {default:g})")
