"""What the services of a mesh must agree on, as flat facts (name -> text), and what is said when two of them do not. Pure.

A subject is a set of facts: `protos`, `config.mesh`, `config.model`, `layout`. Two services are compared in the subjects that
both have, by digest first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollplex.core.config import MeshSection, ModelSection
from rollplex.core.errors import WrongState
from rollplex.core.strict import to_plain

Facts = Mapping[str, str]

PROTOS, MESH, MODEL, LAYOUT = "protos", "config.mesh", "config.model", "layout"
MISMATCHES = {
    # What explains the others comes first: another [model] section makes another layout.
    MESH: ("CONFIG_MISMATCH", "give all services the same [mesh] section and restart those that read another"),
    MODEL: ("CONFIG_MISMATCH", "give all services the same [model] section and restart those that read another"),
    PROTOS: ("PROTO_MISMATCH", "they run different versions of the protocol; restart those that run the older code"),
    LAYOUT: ("LAYOUT_MISMATCH", "they hold different models or layouts; restart those that run the older code or checkpoint"),
}

NOT_SHARED = frozenset({
    "addresses", "tls_cert", "tls_key", "tls_ca", "token_file", "insecure_tcp", "drain_timeout_s", "collective_timeout_s",
})
"""Keys of [mesh] in which services may differ: how a process is reached, and how long it waits."""
SHOWN = 8
"""Differences that a message lists; the others are counted."""


@dataclass(frozen=True, slots=True)
class Description:
    """What one service says of itself."""

    name: str
    pid: int
    digests: Mapping[str, str]
    """By subject."""
    facts: Mapping[str, Facts] = field(default_factory=dict)
    """By subject; empty unless asked for."""


def config_facts(mesh: MeshSection, model: ModelSection | None = None) -> dict[str, dict[str, str]]:
    """Subject -> the keys that must agree. A path is what it leads to: two names of one checkpoint are one."""
    shared = {key: value for key, value in to_plain(mesh).items() if key not in NOT_SHARED}
    shared["runtime_dir"] = str(mesh.runtime_dir.resolve())
    found = {MESH: {f"mesh.{key}": str(value) for key, value in shared.items()}}
    if model is not None:
        keys = to_plain(model) | {"checkpoint": str(model.checkpoint.resolve())}
        found[MODEL] = {f"model.{key}": str(value) for key, value in keys.items()}
    return found


def digest(facts: Facts) -> str:
    """sha256 in hex, whatever the order."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def unlike(one: Description, other: Description) -> str:
    """The first subject that both have and in which they differ; empty when they agree."""
    return next((subject for subject in MISMATCHES if subject in one.digests and subject in other.digests
                 and one.digests[subject] != other.digests[subject]), "")


def mismatch(subject: str, one: Description, other: Description) -> WrongState:
    """The error that names what differs; both have the facts of the subject."""
    reason, advice = MISMATCHES[subject]
    lines = differences(one.facts.get(subject, {}), other.facts.get(subject, {}))
    shown = "; ".join(f"{name}: {ours} in {one.name}, {theirs} in {other.name}" for name, ours, theirs in lines[:SHOWN])
    rest = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return WrongState(f"{other.name} (pid {other.pid}) does not fit {one.name}: {shown or 'digests differ'}{rest}. {advice}",
                      reason=reason, service=other.name, subject=subject, differences=len(lines),
                      names=",".join(name for name, *_ in lines[:SHOWN]))


def differences(ours: Facts, theirs: Facts) -> list[tuple[str, str, str]]:
    """(name, our text, their text) of each fact that differs, by name; what one side lacks is `absent` there."""
    return [(name, ours.get(name, "absent"), theirs.get(name, "absent"))
            for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
