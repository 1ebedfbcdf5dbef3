"""The options of a run and of a mesh. Services add their own section in their config.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollplex.core.advantages import ESTIMATORS
from rollplex.core.errors import BadInput
from rollplex.core.response_lengths import parse_lengths
from rollplex.core.sharing import POLICIES, Policy
from rollplex.core.topology import Topology

SCHEDULES = ("serial", "overlap", "disaggregated")
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")
SAVED_MODES = ("keep", "recompute", "offload", "from_inputs")
ONE_CHUNK = 1 << 40
"""Elements; more than any model has."""
SUFFIX_MODES = ("keep", "recompute")
ENGINE_ROLES = ("trainer", "reference", "rollout")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite and at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    samples_per_group: int = 8
    """N, at least 2: a group of one has no advantage."""
    temperature: float = 1.0
    """Softmax temperature, > 0; applied by rollout and trainer alike."""
    max_response_tokens: int = 512
    top_p: float = 1.0
    """Must be 1: truncated sampling biases the ratio unless it is masked on both sides."""
    top_k: int = 0
    """Must be 0, for the same reason."""
    length_distribution: str = ""
    """For benchmarks with random weights, which never end a response: `lognormal:MEAN:MAX` gives every sample a length of its
    own, drawn from its seed, and end tokens do not end it. Empty: responses end as they do. Validations are not affected."""

    def __post_init__(self) -> None:
        _at_least("samples_per_group", self.samples_per_group, 2)
        _at_least("max_response_tokens", self.max_response_tokens, 1)
        parse_lengths(self.length_distribution, self.max_response_tokens)
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(f"top_p {self.top_p} and top_k {self.top_k} truncate the distribution that is trained "
                             "on; use top_p = 1 and top_k = 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    advantage: str = "grpo"
    """`grpo`, `dr_grpo` or `rloo`."""
    aggregation: str = "token-mean"
    """`seq-mean-token-mean` (GRPO), `token-mean` (DAPO) or `seq-mean-token-sum-norm` (Dr. GRPO)."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """Bound c > 1 of -A c for negative advantages; 0: off."""
    ratio_level: str = "token"
    """`token`, or `sequence` for GSPO's length-normalised ratio."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0: no reference work at all."""
    kl_estimator: str = "k3"
    importance_correction: str = "off"
    """Truncated importance weights against rollout's log-probabilities: `off`, `token` or `sequence`."""
    importance_cap: float = 2.0
    """Upper bound of those weights."""

    def __post_init__(self) -> None:
        _one_of("advantage", self.advantage, ESTIMATORS)
        _one_of("aggregation", self.aggregation, AGGREGATIONS)
        _one_of("ratio_level", self.ratio_level, ("token", "sequence"))
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("importance_correction", self.importance_correction, ("off", "token", "sequence"))
        for name in ("clip_low", "clip_high", "dual_clip", "kl_coef"):
            _at_least(name, getattr(self, name), 0)
        if not 0 < self.importance_cap < math.inf:
            raise ValueError(f"importance_cap is {self.importance_cap}; it must be finite and above 0")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; it must be 0 (off) or above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    """Of the decoder."""
    vision_learning_rate: float | None = None
    """Of the vision tower; absent: as the decoder. 0 freezes it (no graph is built through it)."""
    projector_learning_rate: float | None = None
    """Of the merger between tower and decoder; absent: as the decoder. 0 freezes it."""
    freeze_decoder: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled (AdamW); not applied to biases and norms."""
    max_grad_norm: float = 1.0
    """Global L2 clip; 0: off."""
    schedule: str = "constant"
    """`constant`, `linear` or `cosine` to 0 over total_steps, after warmup_steps from 0."""
    warmup_steps: int = 0
    total_steps: int = 0
    """Needed by `linear` and `cosine`."""
    updates_per_iteration: int = 1
    """Mini-batches of groups a rollout; above 1 the ratio is taken against stored log-probabilities."""
    chunk_elements: int = 1 << 24
    """Elements of a chunk of the streamed update."""

    def __post_init__(self) -> None:
        _one_of("schedule", self.schedule, ("constant", "linear", "cosine"))
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "total_steps"):
            _at_least(name, getattr(self, name), 0)
        for name in ("vision_learning_rate", "projector_learning_rate"):
            _at_least(name, getattr(self, name) or 0, 0)
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon is {self.epsilon}; it must be finite and above 0")
        _at_least("updates_per_iteration", self.updates_per_iteration, 1)
        _at_least("chunk_elements", self.chunk_elements, 1)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps above warmup_steps "
                             f"({self.total_steps} <= {self.warmup_steps})")

    def module_learning_rates(self) -> dict[str, float]:
        """Learning rate by module: "vision", "projector", "decoder"; 0 means frozen."""
        def or_default(rate: float | None) -> float:
            return self.learning_rate if rate is None else rate

        return {"vision": or_default(self.vision_learning_rate),
                "projector": or_default(self.projector_learning_rate),
                "decoder": 0.0 if self.freeze_decoder else self.learning_rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    """What residency costs when one part of it is taken away (the paper's Figure 8). For measuring only; nothing is computed
    differently."""

    no_state_offload: bool = False
    """FP32 master weights and Adam moments stay in HBM."""
    rollout_resident: bool = False
    """Rollout keeps its keys and values after generation."""
    unchunked_optimizer: bool = False
    """The update takes all parameters as one chunk."""
    no_weight_sharing: bool = False
    """Rollout reads a copy of the snapshot of its own, on the same device."""

    @property
    def any(self) -> bool:
        return self != AblationConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run computes. The same config and prompts give the same updates."""

    schedule: str = "overlap"
    """The same update in another order: `serial`, phases one after the other; `overlap`, prefixes beside decode;
    `disaggregated`, as serial with rollout on devices of its own (mesh.own_replicas)."""
    deterministic: bool = False
    """Groups one at a time, in index order: on CPU, iterations of the same numbers and prompts give bit-identical snapshots
    under any schedule, whatever was restarted between them."""
    seed: int = 0
    saved_activations: str = "keep"
    """What the trainer's prefix leaves for backward: `keep` (every activation), `recompute` (layer inputs), `offload` (layer
    inputs, in the host pool) or `from_inputs` (nothing but the prompt, from which the prefix runs again)."""
    suffix_activations: str = "keep"
    """What a suffix forward leaves for its backward: `keep` (every activation) or `recompute` (layer inputs). The gradients are
    the same to the last bit."""
    replay: str = ""
    """Name of a recorded run: its prompts, responses (token ids) and rewards are trained on again, iteration by iteration, and
    rollout generates nothing. Options that are not given are those of the recorded run."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal (DAPO's dynamic sampling without refill); counted either way."""
    suffix_micro_batch_samples: int = 0
    """Samples of a group in one suffix forward; 0: all."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ablation: AblationConfig = field(default_factory=AblationConfig)
    phase_timeout_s: float = 1800.0
    """Deadline of each phase, and of writing a checkpoint. Where a service was lost, counted again from when it is back."""
    recovery_timeout_s: float = 300.0
    """How long an iteration waits for a service that was lost before it ends; after UPDATE_BEGIN it waits until it is back."""
    checkpoint_every: int = 0
    """Iterations between durable checkpoints (docs/checkpoints.md), written while the next iteration runs; 0: none."""
    checkpoint_keep: int = 2
    """Checkpoints of the run that stay; older ones are deleted."""

    def __post_init__(self) -> None:
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("saved_activations", self.saved_activations, SAVED_MODES)
        _one_of("suffix_activations", self.suffix_activations, SUFFIX_MODES)
        _at_least("suffix_micro_batch_samples", self.suffix_micro_batch_samples, 0)
        _at_least("checkpoint_every", self.checkpoint_every, 0)
        _at_least("checkpoint_keep", self.checkpoint_keep, 1)
        for name in ("phase_timeout_s", "recovery_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def streamed_optimizer(self) -> OptimizerConfig:
        """`optimizer` as the update takes it: cut into chunks, unless that is ablated."""
        return replace(self.optimizer, chunk_elements=ONE_CHUNK) if self.ablation.unchunked_optimizer else self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]: shared by all engines and the coordinator."""

    checkpoint: Path
    """Hugging Face directory of a Qwen2.5-VL model."""
    dtype: str = "float32"
    """Of the actor snapshot: `bfloat16`, `float32` or `float64` (tests)."""
    max_prompt_tokens: int = 16384
    """A longer prompt is refused, never truncated."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("bfloat16", "float32", "float64"))
        _at_least("max_prompt_tokens", self.max_prompt_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSection:
    """[mesh]: where the services of one node meet, and how many ranks each role has."""

    runtime_dir: Path
    """Holds sockets, logs and the journal; created with mode 0700."""
    addresses: tuple[str, ...] = ()
    """`service=address` pairs that replace the default Unix sockets, as in "coordinator=127.0.0.1:7070"."""
    tls_cert: Path | None = None
    """Certificate chain (PEM) of the services that listen on TCP; it must name the hosts of their addresses. A TCP address needs
    it, its key, `tls_ca` and `token_file`. This and the next four may be given as ROLLPLEX_TLS_CERT and so on instead."""
    tls_key: Path | None = None
    """Its private key, in a file that only its owner may read."""
    tls_ca: Path | None = None
    """Certificates (PEM) that callers trust: who signed `tls_cert`, and those of rewards on TCP."""
    token_file: Path | None = None
    """Holds the token that every call by TCP carries, 32 characters or more; only its owner may read it."""
    insecure_tcp: bool = False
    """Plain TCP without a token on loopback addresses: every user of the machine may call."""
    drain_timeout_s: float = 10.0
    train_tensor_parallel: int = 1
    """Trainer ranks, one process and one device each: services trainer-0, trainer-1, ..."""
    rollout_tensor_parallel: int = 1
    """Shards of a rollout replica. It must divide train_tensor_parallel; the quotient q is the number of replicas that share
    the trainer's devices: services rollout-0, rollout-1, ..."""
    reference_tensor_parallel: int = 1
    """Reference ranks, one process each: services reference-0, reference-1, ..."""
    own_replicas: int = 0
    """Rollout replicas on devices of their own, each with a copy of the snapshot, for schedule `disaggregated`; 0: rollout
    shares the trainer's devices."""
    devices: str = "host"
    """`host`: every device is a slab set in host memory, and engines compute on the CPU; `cuda`: device g is GPU g."""
    hbm_budget_gib: float = 0.0
    """Memory of each device that all roles together may take; the broker refuses what would exceed it, with the ledger's table.
    0: the whole GPU; no limit on `host` devices."""
    hbm_runtime_gib: float = 4.0
    """Of that, on a GPU: contexts, communication buffers, CUDA graphs and allocator caches, which no object class counts."""
    rendezvous: Path | None = None
    """Directory in which the ranks of a role meet; absent: `rendezvous` in the runtime directory."""
    collective_timeout_s: float = 120.0
    """Deadline of every collective between ranks of a role, and of their meeting."""
    sharing: str = "mps-priority"
    """How processes share a GPU (docs/adr/0009-sharing-policies.md): `time-slice`, without MPS; `mps-default`; `mps-priority`,
    rollout above trainer and reference; `thread-cap`, that, with trainer and reference capped in all they do, and `sm-affinity`,
    fixed shares for both sides; `green-context`, as mps-priority with only the forward pass of prefix blocks capped, unless
    run.saved_activations is `keep`: then their backward pass too. No effect on `host`."""
    prefix_sm_percent: int = 0
    """Share of the SMs for trainer and reference under `thread-cap` and `sm-affinity`, for their prefix blocks alone under
    `green-context`; rollout has the rest under `sm-affinity`, else no cap. 0: 50 under the first two, at most of whose other
    shares cuBLAS computes wrongly (an engine then refuses to start), 70 under the third."""
    stall_timeout_s: float = 10.0
    """How long a process of the mesh may be stopped (SIGSTOP) before the watchdog kills it, and it is started again; the keeper
    is continued, and one that a debugger has stopped left alone. 0: for ever."""
    hang_timeout_s: float = 120.0
    """How long a service that has served may leave its gRPC health unanswered before the watchdog kills it; an engine may hold
    the interpreter while it compiles. 0: for ever."""

    def __post_init__(self) -> None:
        _one_of("sharing", self.sharing, tuple(POLICIES))
        if not 0 <= self.prefix_sm_percent <= 99:
            raise ValueError(f"prefix_sm_percent is {self.prefix_sm_percent}; it must be from 1 to 99, or 0 for the policy's own")
        for name in ("train_tensor_parallel", "rollout_tensor_parallel", "reference_tensor_parallel"):
            _at_least(name, getattr(self, name), 1)
        for name in ("hbm_budget_gib", "hbm_runtime_gib", "stall_timeout_s", "hang_timeout_s"):
            _at_least(name, getattr(self, name), 0)
        if not self.collective_timeout_s > 0:
            raise ValueError(f"collective_timeout_s is {self.collective_timeout_s}; it must be above 0")
        _ = self.topology
        self._check_addresses()

    def _check_addresses(self) -> None:
        """Raises BadInput: a name that nobody has would leave its service on the default socket without a word."""
        seen: set[str] = set()
        for pair in self.addresses:
            name, _, address = pair.partition("=")
            wrong = ""
            if name not in self.services:
                wrong = f"no service of this mesh is called {name!r}; they are {', '.join(self.services)}"
            elif not address:
                wrong = f"{name!r} has no address; write \"{name}=host:port\" or \"{name}=unix:/path\""
            elif name in seen:
                wrong = f"{name!r} has two addresses"
            if wrong:
                raise BadInput(f"mesh.addresses: {wrong}", reason="BAD_CONFIG", key="mesh.addresses", service=name)
            seen.add(name)

    @property
    def services(self) -> tuple[str, ...]:
        """Every name that has an address."""
        engines = (f"{role}-{index}" for role in ENGINE_ROLES for index in range(self.ranks(role)))
        return ("broker", *engines, "reward", "coordinator")

    @property
    def topology(self) -> Topology:
        return Topology(self.train_tensor_parallel, self.rollout_tensor_parallel, self.own_replicas,
                        self.devices)

    @property
    def hbm_budget_bytes(self) -> int:
        """0: not set."""
        return round(self.hbm_budget_gib * (1 << 30))

    @property
    def hbm_runtime_bytes(self) -> int:
        """What a device holds that no object class counts; host devices have nothing of it."""
        return round(self.hbm_runtime_gib * (1 << 30)) if self.devices == "cuda" else 0

    @property
    def policy(self) -> Policy | None:
        """How the mesh shares its GPUs; None where there are none."""
        return POLICIES[self.sharing] if self.devices == "cuda" else None

    @property
    def prefix_percent(self) -> int:
        """prefix_sm_percent, or the policy's own."""
        return self.prefix_sm_percent or POLICIES[self.sharing].sm_percent

    @property
    def prefix_stream_percent(self) -> int | None:
        """Share of the SMs for prefix blocks, where they have a stream of their own."""
        return self.prefix_percent if self.policy is not None and self.policy.prefix_stream_capped else None

    def ranks(self, role: str) -> int:
        """Processes of a role: its ranks, or rollout's replicas."""
        return {"trainer": self.train_tensor_parallel, "reference": self.reference_tensor_parallel,
                "rollout": self.topology.replica_count}[role]

    def address(self, service: str) -> str:
        """Where `service` ("coordinator", "trainer-0", ...) listens."""
        for pair in self.addresses:
            name, _, address = pair.partition("=")
            if name == service:
                return address
        return f"unix:{self.runtime_dir / (service + '.sock')}"

    @property
    def rendezvous_dir(self) -> Path:
        return self.rendezvous or self.runtime_dir / "rendezvous"

    @property
    def checkpoints_dir(self) -> Path:
        """Where durable checkpoints are unless coordinator.checkpoints says otherwise."""
        return self.runtime_dir / "checkpoints"

    @property
    def handle_socket(self) -> Path:
        """Where the broker passes file descriptors."""
        return self.runtime_dir / "handles.sock"

    @property
    def keeper_socket(self) -> Path:
        """Where the keeper takes and gives back duplicates."""
        return self.runtime_dir / "keeper.sock"

    @property
    def watchdog_socket(self) -> Path:
        """Where the watchdog shows that it lives."""
        return self.runtime_dir / "watchdog.sock"

    @property
    def mps_socket(self) -> Path:
        """Where the MPS service is, and what engines hold on to while it lives."""
        return self.runtime_dir / "mps.sock"

    @property
    def mps_pipe_dir(self) -> Path:
        """CUDA_MPS_PIPE_DIRECTORY of the mesh's own daemon."""
        return self.runtime_dir / "mps"

    @property
    def mps_log_dir(self) -> Path:
        return self.runtime_dir / "logs" / "mps"
