"""HBM of a GPU and memory of a node by object class and phase, with the residency of each class chosen so that it fits.

Which class may be where in which phase comes from the residency contract; sizes come from `memory_sizes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from rollplex.core.config import SAVED_MODES, SUFFIX_MODES, AblationConfig
from rollplex.core.errors import BadInput, InternalError
from rollplex.core.memory_sizes import PlanInput, Sizes
from rollplex.core.model_layout import summarise
from rollplex.core.phases import Phase
from rollplex.core.residency import CONTRACT, RUNTIME, Holding, PlannedBytes, Residency, check, relaxed_classes

AUTO = "auto"
GRADIENTS, REFERENCE = ("hbm", "pinned"), ("pinned", "resident", "re-read")
OF_REFERENCE = frozenset({"boundary_reference", "reference_weights"})
WORKING_PHASES = (Phase.OVERLAP, Phase.SUFFIX, Phase.UPDATE)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where the classes are that may be in more than one place."""

    gradients: str = AUTO
    """`hbm` through SUFFIX and UPDATE, or `pinned`, readmitted chunk by chunk."""
    reference: str = AUTO
    """`pinned`, in HBM around reference compute; `resident` in HBM throughout; `re-read` from the checkpoint."""
    activations: str = AUTO
    """Of the trainer's prefix: run.saved_activations."""
    suffix_activations: str = AUTO
    """run.suffix_activations."""

    def __post_init__(self) -> None:
        for name, known in KNOWN.items():
            if getattr(self, name) not in (AUTO, *known):
                raise BadInput(f"{name} {getattr(self, name)!r} is none of {AUTO}, {', '.join(known)}", reason="BAD_PLAN")

    def settled(self) -> Iterator[Choice]:
        """Every choice that this one leaves open, the fastest first."""
        def of(value: str, known: tuple[str, ...]) -> tuple[str, ...]:
            return known if value == AUTO else (value,)

        # From the costliest to change to the cheapest: responses are most of the tokens that are trained on.
        order = ("suffix_activations", "activations", "gradients", "reference")
        for values in itertools.product(*(of(getattr(self, name), KNOWN[name]) for name in order)):
            yield Choice(**dict(zip(order, values)))


KNOWN = {"gradients": GRADIENTS, "reference": REFERENCE, "activations": SAVED_MODES, "suffix_activations": SUFFIX_MODES}
"""Values of each choice, the fastest first."""


@dataclass(frozen=True, slots=True)
class Column:
    """What one GPU holds at the peak of one part of an iteration."""

    name: str
    phase: Phase
    hbm: dict[str, int]
    """Object class -> bytes."""

    @property
    def total(self) -> int:
        return sum(self.hbm.values())


@dataclass(frozen=True, slots=True)
class Plan:
    given: PlanInput
    choice: Choice
    columns: tuple[Column, ...]
    host: dict[str, int]
    """Object class -> bytes of the node."""
    kv_share: float
    """Of the KV that all samples would need at once; below 1, samples wait for each other."""

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def relaxed(self) -> tuple[str, ...]:
        """Classes whose row of the contract does not hold in this run."""
        return relaxed_classes(self.given.ablation, reference_resident=self.choice.reference == "resident")

    def needs(self, phase: Phase, without: Container[str] = ()) -> dict[str, int]:
        """Object class -> bytes of one training GPU at the largest column of a phase, some classes left out; empty for IDLE."""
        columns = [{name: size for name, size in column.hbm.items() if name not in without}
                   for column in self.columns if column.phase is phase and column.name != "ROLLOUT GPU"]
        return max(columns, key=lambda held: sum(held.values()), default={})

    def planned(self, phase: Phase, without: Container[str] = ()) -> list[PlannedBytes]:
        """`needs` of every device of the plan's topology; what rollout's own devices need is not among it."""
        topology, ranks = self.given.topology, Sizes(self.given).reference_ranks
        return [PlannedBytes(name, topology.device_name(device), size) for device in range(topology.train_tp)
                for name, size in self.needs(phase, {*without, *(OF_REFERENCE if device >= ranks else ())}).items()]

    @property
    def peak(self) -> Column:
        return max(self.columns, key=lambda column: column.total)

    @property
    def hbm_over(self) -> int:
        """Bytes that are missing on a GPU."""
        return max(0, self.peak.total - self.given.hbm_bytes)

    @property
    def host_over(self) -> int:
        return max(0, self.host_total - self.given.host_bytes)

    @property
    def fits(self) -> bool:
        return not self.hbm_over and not self.host_over


def make_plan(given: PlanInput, wanted: Choice | None = None) -> Plan:
    """The first choice that fits with KV for all samples, else the one with most KV; where none fits, what lacks least."""
    plans = []
    for choice in (wanted or Choice()).settled():
        plans.append(_plan(given, choice))
        if plans[-1].fits and plans[-1].kv_share == 1:
            return plans[-1]
    fitting = [plan for plan in plans if plan.fits]
    return max(fitting, key=lambda plan: plan.kv_share) if fitting else min(plans, key=_lack)


def _lack(plan: Plan) -> float:
    return plan.hbm_over / plan.given.hbm_bytes + plan.host_over / plan.given.host_bytes


def _plan(given: PlanInput, choice: Choice) -> Plan:
    sizes = Sizes(given)
    wanted = _training_hbm(given, sizes, choice)
    columns: list[Column] = []
    kv_share = 1.0
    for name, phase, without in _columns(given.schedule, choice.reference, given.ablation):
        hbm = {object_class: size for object_class, size in wanted[phase].items() if object_class not in without and size}
        if name == "PREFIX BACKWARD":
            hbm["prefix_activations"] = hbm.get("prefix_activations", 0) + sizes.prefix_backward(choice.activations)
        if name == "ROLLOUT GPU":
            hbm = {"actor_snapshot": sizes.rollout_weights, "rollout_kv": sizes.rollout_kv, RUNTIME: given.runtime_bytes}
        if "rollout_kv" in hbm and given.ablation.rollout_resident and columns and name != "ROLLOUT GPU":
            hbm["rollout_kv"] = columns[0].hbm["rollout_kv"]
        elif "rollout_kv" in hbm and given.kv_pool_bytes:
            hbm["rollout_kv"], kv_share = given.kv_pool_bytes, min(1.0, given.kv_pool_bytes / sizes.rollout_kv)
        elif "rollout_kv" in hbm:
            room = given.hbm_bytes - sum(hbm.values()) + sizes.rollout_kv
            hbm["rollout_kv"] = max(min(sizes.rollout_kv, room), min(sizes.group_kv, sizes.rollout_kv))
            kv_share = hbm["rollout_kv"] / sizes.rollout_kv
        columns.append(Column(name, phase, hbm))
    plan = Plan(given, choice, tuple(columns), _host(given, sizes, choice), kv_share)
    _check_contract(plan)
    return plan


PREFIXES = frozenset({"boundary_trainer", "boundary_reference", "prefix_activations"})


def _columns(schedule: str, reference: str, ablation: AblationConfig) -> list[tuple[str, Phase, frozenset[str]]]:
    """Name, phase, and the classes that are not there: `serial` decodes before it computes prefixes."""
    rest = [("SUFFIX", Phase.SUFFIX, frozenset()), ("PREFIX BACKWARD", Phase.SUFFIX, frozenset({"suffix_activations"})),
            ("UPDATE", Phase.UPDATE, frozenset())]
    no_kv = frozenset() if ablation.rollout_resident else frozenset({"rollout_kv"})
    if schedule == "overlap":
        return [("OVERLAP", Phase.OVERLAP, frozenset()), *rest]
    if schedule == "serial":
        beside_decode = PREFIXES if reference == "resident" else PREFIXES | {"reference_weights"}
        return [("ROLLOUT", Phase.OVERLAP, beside_decode), ("PREFIX", Phase.OVERLAP, no_kv), *rest]
    return [("OVERLAP", Phase.OVERLAP, no_kv), *rest, ("ROLLOUT GPU", Phase.OVERLAP, frozenset())]


def _training_hbm(given: PlanInput, sizes: Sizes, choice: Choice) -> dict[Phase, dict[str, int]]:
    """Bytes of each class in the phases in which the contract lets it be in HBM."""
    waiting = sizes.prefix_waiting(choice.activations)
    spilled = choice.gradients == "pinned"
    peak = {
        "actor_snapshot": sizes.shared_snapshot,
        "rollout_kv": sizes.rollout_kv,
        "boundary_trainer": sizes.boundary,
        "boundary_reference": sizes.reference_boundary if given.reference else 0,
        "reference_weights": sizes.reference_weights if given.reference else 0,
        "prefix_activations": waiting,
        "suffix_activations": sizes.suffix_activations(choice.suffix_activations),
        "gradients": sizes.gradient_window if spilled else sizes.gradients,
        "optimizer_state": sizes.update_window,
    }
    _ablate(given, sizes, peak)
    held = {phase: {name: size for name, size in peak.items() if phase in CONTRACT[name].hot} for phase in WORKING_PHASES}
    held[Phase.OVERLAP]["prefix_activations"] += sizes.prefix_working_set
    if given.reference:
        held[Phase.OVERLAP]["boundary_reference"] += sizes.reference_prefix
    held[Phase.SUFFIX]["boundary_trainer"] += sizes.boundary_gradients
    relaxed = relaxed_classes(given.ablation, reference_resident=choice.reference == "resident")
    for name, phase in itertools.product(relaxed, WORKING_PHASES):
        held[phase][name] = peak[name]
    if given.ablation.no_state_offload:
        # The update works beside the state all the same.
        held[Phase.UPDATE]["optimizer_state"] += sizes.update_window
    for phase in WORKING_PHASES:
        held[phase][RUNTIME] = given.runtime_bytes
    return held


def _ablate(given: PlanInput, sizes: Sizes, peak: dict[str, int]) -> None:
    """`unchunked_optimizer` is in the sizes already."""
    if given.ablation.no_state_offload:
        peak["optimizer_state"] = sizes.master + sizes.moments + sizes.spare_slots
    if given.ablation.no_weight_sharing and given.schedule != "disaggregated":
        peak["actor_snapshot"] += sizes.rollout_weights
    if given.schedule == "disaggregated":
        # Rollout's is on devices of its own.
        peak["rollout_kv"] = 0


def _host(given: PlanInput, sizes: Sizes, choice: Choice) -> dict[str, int]:
    of_a_gpu = {
        "optimizer_state": 0 if given.ablation.no_state_offload else sizes.master + sizes.moments + sizes.spare_slots,
        "gradients": sizes.gradients if choice.gradients == "pinned" else 0,
        "pinned_pool": sizes.layer_inputs if choice.activations == "offload" else 0,
    }
    host = {name: size * given.gpus for name, size in of_a_gpu.items()} | {"media": sizes.media}
    if given.reference and choice.reference == "pinned":
        host["reference_weights"] = sizes.reference_weights * sizes.reference_ranks * (given.gpus // given.topology.train_tp)
    return {name: size for name, size in host.items() if size}


def _check_contract(plan: Plan) -> None:
    """The plan keeps to the contract that the arena and the ledger enforce, but for what its configuration relaxes."""
    for column in plan.columns:
        held = [Holding(name, sorted(CONTRACT[name].roles)[0], "gpu", Residency.HBM, size)
                for name, size in column.hbm.items() if name != RUNTIME]
        held += [Holding(name, sorted(CONTRACT[name].roles)[0], "host", Residency.PINNED, size)
                 for name, size in plan.host.items()]
        wrong = check(column.phase, held, plan.relaxed)
        if wrong:
            raise InternalError("; ".join(wrong), reason="PLAN_AGAINST_CONTRACT")


def advice(plan: Plan, wanted: Choice | None = None) -> list[str]:
    """What to change where the plan does not fit: single changes that suffice, else what each one saves."""
    if plan.fits:
        return []
    enough, helps = [], []
    for text, given in _changes(plan.given):
        changed = make_plan(given, wanted)
        if changed.fits:
            enough.append(f"{text}: fits")
        elif _lack(changed) < _lack(plan):
            helps.append((_lack(changed), f"{text}: still lacks {_gib(changed.hbm_over)} a GPU and "
                                          f"{_gib(changed.host_over)} a node"))
    fewer = _most_groups(plan.given, wanted)
    if fewer:
        enough.append(f"--groups {fewer}: fits")
    if wanted and wanted != Choice() and make_plan(plan.given).fits:
        enough.append("--gradients, --reference, --activations and --suffix-activations at auto: fits")
    return enough or [text for _, text in sorted(helps)] or ["no single change is enough: take a smaller model or more GPUs"]


def _changes(given: PlanInput) -> Iterator[tuple[str, PlanInput]]:
    if given.moments_dtype != "bfloat16":
        yield "--moments bfloat16", replace(given, moments_dtype="bfloat16")
    if not given.freeze_vision:
        yield "--freeze-vision", replace(given, freeze_vision=True)
    if given.reference:
        yield "--no-reference (kl_coef 0)", replace(given, reference=False)
    fewer = given.work.micro_batch_samples // 2
    if fewer:
        yield f"--micro-batch-samples {fewer}", replace(given, work=replace(given.work, micro_batch_samples=fewer))
    for train, roll in ((given.topology.train_tp * 2, given.topology.rollout_tp),
                        (given.topology.train_tp, given.topology.rollout_tp * 2)):
        try:
            changed = replace(given, topology=replace(given.topology, train_tp=train, rollout_tp=roll))
            summarise(changed.shapes, changed.topology, changed.train_layout, changed.dtype)
        except BadInput:
            continue
        yield f"--train-tp {train} --rollout-tp {roll}", changed
    if given.data_parallel and given.topology.q > 1:
        yield "no --data-parallel (mesh.data_parallel = false)", replace(given, data_parallel=False)
    if given.schedule == "overlap":
        yield "--schedule serial", replace(given, schedule="serial")


def _most_groups(given: PlanInput, wanted: Choice | None) -> int:
    """The largest number of prompts an iteration that fits; 0 where one does not."""
    low, high = 0, given.work.groups
    while high - low > 1:
        middle = (low + high) // 2
        fits = make_plan(replace(given, work=replace(given.work, groups=middle)), wanted).fits
        low, high = (middle, high) if fits else (low, middle)
    return low


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
