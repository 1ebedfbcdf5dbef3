"""The command line of `rollplex`. Imports argparse only, so that --help is instant."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollplex_client.cli.bench_arguments import add_bench
from rollplex_client.cli.chaos_arguments import add_chaos

SCHEDULES = ("serial", "overlap", "disaggregated")
ABLATIONS = ("no_state_offload", "rollout_resident", "unchunked_optimizer", "no_weight_sharing")
DEMO_SCHEDULES = ("serial", "overlap")
"""The demo compares the two."""
TRAIN_LAYOUTS = ("split", "megatron-fused")
CONTROLS = ("shuffle-rewards", "blank-videos")


def build_parser() -> argparse.ArgumentParser:
    shared = _shared("later_overrides", argparse.SUPPRESS)
    parser = argparse.ArgumentParser(
        prog="rollplex", parents=[_shared("overrides")],
        description="Post-train vision-language models with on-policy GRPO on one group of GPUs (or CPUs).")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, handler: str, summary: str, into: argparse._SubParsersAction = commands,
            ) -> argparse.ArgumentParser:
        command = into.add_parser(name, help=summary, description=summary, parents=[shared])
        command.set_defaults(handler=handler)
        return command

    _add_mesh_commands(add)
    _add_training_commands(add)
    _add_run_commands(add)
    _add_planning_commands(add)
    add_bench(add)
    add_chaos(add)
    config = add("config", "config_command:show", "Print the effective configuration.")
    what = config.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only check it")
    what.add_argument("--defaults", action="store_true", help="print every section with its defaults")
    what.add_argument("--reference", action="store_true", help="print docs/config.md: every section and key")
    checkpoint = commands.add_parser("checkpoint", help="List durable checkpoints, or check one.",
                                     parents=[_shared("middle_overrides", argparse.SUPPRESS)])
    actions = checkpoint.add_subparsers(metavar="ACTION", required=True)
    listed = add("list", "checkpoint_commands:list_all", "List durable checkpoints; no mesh is needed.", into=actions)
    listed.add_argument("run", nargs="?", metavar="RUN", help="default: all runs")
    verify = add("verify", "checkpoint_commands:verify", "Read every byte of a durable checkpoint.", into=actions)
    verify.add_argument("path", type=Path, metavar="PATH", help="its folder")
    reward = commands.add_parser("reward", help="Add, remove or list rewards, also while a run goes on.",
                                 parents=[_shared("middle_overrides", argparse.SUPPRESS)])
    _add_reward_commands(reward.add_subparsers(metavar="ACTION", required=True), add)
    return parser


def _shared(overrides: str, default: object = None) -> argparse.ArgumentParser:
    """Options that may stand before or after the command (or its action); after it, they must not reset what stood before.

    `overrides`: where what is --set there goes; argparse would let the last place replace the others.
    """
    def or_suppressed(value: object) -> object:
        return argparse.SUPPRESS if default is argparse.SUPPRESS else value

    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("everywhere")
    group.add_argument("--config", type=Path, metavar="FILE", default=or_suppressed(None),
                       help="TOML configuration (default: ./rollplex.toml if it exists)")
    group.add_argument("--set", action="append", metavar="A.B=C", default=or_suppressed([]),
                       dest=overrides,
                       help="override a key, as in run.optimizer.learning_rate=1e-6; may be repeated")
    group.add_argument("--runtime-dir", type=Path, metavar="DIR", default=or_suppressed(None),
                       help="sockets, logs and the journal (default: mesh.runtime_dir, else ./.rollplex)")
    group.add_argument("--json", action="store_true", default=or_suppressed(False), help="one JSON object on stdout")
    group.add_argument("--debug", action="store_true", default=or_suppressed(False), help="tracebacks with errors")
    return shared


def _add_mesh_commands(add) -> None:
    up = add("up", "mesh_commands:up", "Start every service and wait until all serve.")
    _model(up)
    _timeout(up)
    add("down", "mesh_commands:down", "Stop every service.")
    add("status", "mesh_commands:status", "Services, phase and memory ledger.")
    logs = add("logs", "logs_command:logs", "Print the services' logs.")
    logs.add_argument("service", nargs="?", metavar="SERVICE", help="default: all")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as lines are written")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines of each log (default 50)")
    restart = add("restart", "restart_command:restart",
                  "Restart one service, once no UPDATE runs, and wait until it serves and fits the mesh.")
    restart.add_argument("service", metavar="SERVICE", help="its name in `rollplex status`, as trainer-0")
    restart.add_argument("--force", action="store_true", help="inside an UPDATE too, which is then rolled forward")
    _timeout(restart)


def _model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint (model.checkpoint)")


def _timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default 300")


def _add_training_commands(add) -> None:
    train = add("train", "train_command:train", "Train a model on a data file; starts the mesh if it is down.")
    _model(train)
    train.add_argument("--data", type=Path, metavar="FILE", help="Video-R1 JSON, verl parquet/jsonl or TRL-style rows")
    train.add_argument("--heldout", type=Path, metavar="FILE", help="rows for validations")
    train.add_argument("--media-root", type=Path, metavar="DIR", help="goes before relative media paths")
    train.add_argument("--run", metavar="NAME", help="name of the run (default: made from the time)")
    train.add_argument("--iterations", type=int, metavar="N")
    train.add_argument("--groups-per-iteration", type=int, metavar="G", help="prompts of an iteration")
    train.add_argument("--validate-every", type=int, metavar="M", help="iterations; 0: only before and after")
    train.add_argument("--out", type=Path, metavar="DIR", help="summary, metrics and report (default runs/NAME)")
    train.add_argument("--schedule", choices=SCHEDULES)
    train.add_argument("--replay", metavar="RUN", help="train on the recorded prompts, responses and rewards of that run again; "
                       "options that are not given are its own")
    train.add_argument("--replay-journal", type=Path, metavar="FILE", help="journal of another mesh that recorded it")
    train.add_argument("--export", type=Path, metavar="DIR", help="write the trained checkpoint there")
    train.add_argument("--checkpoint-every", type=int, metavar="N", help="iterations between durable checkpoints; 0: none")
    train.add_argument("--resume", metavar="auto|never|PATH", help="auto (default): go on with the run of that name, else from "
                       "its newest intact checkpoint; never: no checkpoint; the folder of a checkpoint: from that one")
    train.add_argument("--filter-bad-rows", action="store_true", default=None,
                       help="leave out rows that cannot be used, counted and listed")
    train.add_argument("--keep-up", action="store_true", help="leave the mesh up that this command started")
    _timeout(train)
    demo = add("demo", "demo_command:demo", "Make data and a small model, train it for real, and report.")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--control", choices=CONTROLS, help="a run in which nothing can be learned")
    demo.add_argument("--schedule", choices=DEMO_SCHEDULES, default="overlap")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    demo.add_argument("--iterations", type=int, metavar="N", help="default: the recipe's")
    demo.add_argument("--keep-up", action="store_true", help="leave the mesh up afterwards")
    _timeout(demo)


def _add_run_commands(add) -> None:
    add("runs", "run_commands:runs", "List the runs of the journal.")
    samples = add("samples", "run_commands:samples", "Print the samples of an iteration.")
    samples.add_argument("run", metavar="RUN")
    samples.add_argument("iteration", type=int, metavar="ITERATION")
    samples.add_argument("--validation", action="store_true", help="of a validation of that number")
    report = add("report", "run_commands:report", "Write a run's HTML report.")
    report.add_argument("run", metavar="RUN")
    report.add_argument("--out", type=Path, required=True, metavar="FILE")
    export = add("export", "run_commands:export", "Write a run's current snapshot as a Hugging Face checkpoint.")
    export.add_argument("run", metavar="RUN")
    export.add_argument("directory", type=Path, metavar="DIR")


def _add_planning_commands(add) -> None:
    layout = add("layout", "layout_command:layout", "Which parameters training and rollout share, from a config alone.")
    plan = add("plan", "plan_command:plan", "HBM per GPU and host memory per node, by object class and phase.")
    for command in (layout, plan):
        command.add_argument("--model", required=True, metavar="MODEL",
                             help="checkpoint folder, config.json, or a published name as Qwen2.5-VL-32B")
        command.add_argument("--train-tp", type=int, required=True, metavar="N", help="training's tensor-parallel size")
        command.add_argument("--rollout-tp", type=int, required=True, metavar="N", help="rollout's; divides --train-tp")
        command.add_argument("--train-layout", choices=TRAIN_LAYOUTS, default="split",
                             help="how training fuses its weights (default split, as Rollplex trains)")
    layout.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    _add_plan_options(plan)


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    def number(option: str, default: float | None, text: str, kind: type = int) -> None:
        plan.add_argument(option, type=kind, default=default, metavar="N",
                          help=text if default is None else f"{text} (default {default:g})")

    plan.add_argument("--schedule", choices=SCHEDULES, default="overlap")
    number("--gpus", 8, "GPUs of a node")
    number("--rollout-gpus", None, "GPUs of the rollout node, disaggregated only (default: --gpus)")
    number("--hbm-gib", 80.0, "memory of a GPU", float)
    number("--host-gib", None, "memory of a node (default: what this process may use)", float)
    number("--groups", 32, "prompts of an iteration")
    number("--samples", 8, "responses of a prompt")
    number("--prompt-tokens", 8192, "of one prompt, media included")
    number("--response-tokens", 2048, "of one response")
    number("--micro-batch-samples", 8, "responses in one suffix forward; of several groups prompts go through one prefix, too")
    number("--runtime-gib", 4.0, "of a GPU, for contexts, NCCL and engine buffers", float)
    number("--chunk-elements", 1 << 24, "of the streamed update (run.optimizer.chunk_elements)")
    plan.add_argument("--data-parallel", action="store_true", help="replicas share prompts out instead of computing each "
                      "together (mesh.data_parallel); no effect at equal degrees")
    plan.add_argument("--no-reference", action="store_true", help="kl_coef is 0")
    plan.add_argument("--freeze-vision", action="store_true", help="no gradients and optimizer state for the tower")
    plan.add_argument("--moments", choices=("float32", "bfloat16"), default="float32",
                      help="of Adam; bfloat16 only ever by this option")
    for option, choices in (("--gradients", ("hbm", "pinned")), ("--reference", ("pinned", "resident", "re-read")),
                            ("--activations", ("keep", "recompute", "offload", "from_inputs")),
                            ("--suffix-activations", ("keep", "recompute"))):
        plan.add_argument(option, choices=("auto", *choices), default="auto", help="where they are (default: planned)")
    plan.add_argument("--ablate", choices=ABLATIONS, action="append", default=[], metavar="NAME",
                      help=f"as if run.ablation.NAME were true: {', '.join(ABLATIONS)}; may be repeated")
    plan.add_argument("--toml", action="store_true",
                      help="print the configuration keys under which the engines hold what is planned")


def _add_reward_commands(actions: argparse._SubParsersAction, add) -> None:
    new = add("add", "reward_commands:add", "Register a reward service, or replace the one of that name.", actions)
    new.add_argument("name", metavar="NAME")
    new.add_argument("address", metavar="ADDRESS", help="unix:/path or host:port")
    new.add_argument("--weight", type=float, default=1.0)
    new.add_argument("--reward-timeout", type=float, default=30.0, metavar="SECONDS", help="of one request")
    new.add_argument("--retries", type=int, default=6)
    add("remove", "reward_commands:remove", "Take a reward out.", actions).add_argument("name", metavar="NAME")
    add("list", "reward_commands:list_rewards", "Registered rewards and whether they answer.", actions)
