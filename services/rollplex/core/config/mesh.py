"""[mesh], and what follows from it: services and their addresses, devices, shares, the runtime directory's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollplex.core.config.checks import check_at_least, check_one_of
from rollplex.core.errors import BadInput
from rollplex.core.replicas import Replicas
from rollplex.core.sharing import POLICIES, Policy
from rollplex.core.topology import Topology

ENGINE_ROLES = ("trainer", "reference", "rollout")


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
    data_parallel: bool = False
    """Trainer and reference compute a group on the devices of one rollout replica, at TP_rollout, and share an iteration's groups
    out, instead of computing each on all devices. Training state stays cut into train_tensor_parallel shards; gradients and the
    reference's weights are as large as the replica's weights. No effect where q is 1 (docs/adr/0019-data-parallel.md)."""
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
    `green-context`; rollout has the rest under `sm-affinity`, else no cap. 0: 50 under the first two, 70 under the
    third. Under the first two cuBLAS computes wrongly with most other shares; engines refuse to start with one of those."""
    stall_timeout_s: float = 10.0
    """How long a process of the mesh may be stopped (SIGSTOP) before the watchdog kills it, and it is started again; the keeper
    is continued, and one that a debugger has stopped left alone. 0: for ever."""
    hang_timeout_s: float = 120.0
    """How long a service that has served may leave its gRPC health unanswered before the watchdog kills it; an engine may hold
    the interpreter while it compiles. 0: for ever."""

    def __post_init__(self) -> None:
        check_one_of("sharing", self.sharing, tuple(POLICIES))
        if not 0 <= self.prefix_sm_percent <= 99:
            raise ValueError(f"prefix_sm_percent is {self.prefix_sm_percent}; it must be from 1 to 99, or 0 for the policy's own")
        for name in ("train_tensor_parallel", "rollout_tensor_parallel", "reference_tensor_parallel"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("hbm_budget_gib", "hbm_runtime_gib", "stall_timeout_s", "hang_timeout_s"):
            check_at_least(name, getattr(self, name), 0)
        if not self.collective_timeout_s > 0:
            raise ValueError(f"collective_timeout_s is {self.collective_timeout_s}; it must be above 0")
        _ = self.topology
        if self.data_parallel and (ranks := self.reference_tensor_parallel) % min(self.rollout_tensor_parallel, ranks):
            raise ValueError(f"reference_tensor_parallel is {self.reference_tensor_parallel}; with data_parallel it must be a "
                             f"multiple of rollout_tensor_parallel, {self.rollout_tensor_parallel}, or less")
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

    def replicas(self, role: str) -> Replicas:
        """Of the trainer's or the reference's ranks."""
        ranks = self.ranks(role)
        shares = self.data_parallel and self.topology.q > 1
        return Replicas(ranks, min(self.rollout_tensor_parallel, ranks) if shares else ranks)

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
