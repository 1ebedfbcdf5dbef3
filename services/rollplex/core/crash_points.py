"""Named places in the services at which a fault harness may end or stop processes. Unarmed, a place costs one comparison.

Armed by ROLLPLEX_CRASH_POINTS, a directory that is read once a process: for the point `trainer.update.chunk_written` it is
`DIR/trainer.update.chunk_written.json` (an Order), there while the point is armed. The process that reaches the point for the
nth time since takes the file away, so that an order is carried out once, however often processes are restarted, and only then
strikes. Where the victims are others it goes on once they are dead, or stopped. So one running mesh serves many faults.

A test compares POINTS with the calls in the sources: each name has a row and a call, in the sources of its own role.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollplex.core.errors import BadInput
from rollplex.core.pidfds import ended_within

ENVIRONMENT = "ROLLPLEX_CRASH_POINTS"
SELF = "self"
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STRIKE_TIMEOUT_S = 5.0
"""How long a victim may take to be dead or stopped; a process in an uninterruptible wait is not waited for any longer."""


@dataclass(frozen=True, slots=True)
class Point:
    role: str
    """Of the processes that reach it."""
    world: str
    """What is done there, and what is not."""
    times: int = 1
    """How often one iteration of the harness's mesh reaches it."""
    when: str = "iteration"
    """What reaches it: an `iteration`, `open` (a new run), or, by name, the recovery from a process that died at that point."""


def _points(role: str, **worlds: str | Point) -> dict[str, Point]:
    """`update__begun` is `role.update.begun`."""
    return {f"{role}.{name.replace('__', '.')}": world if isinstance(world, Point) else Point(role, world)
            for name, world in worlds.items()}


CHUNKS = 3
"""Of an update in the harness's mesh; two updates an iteration."""
_PER_CHUNK = 2 * CHUNKS
_PHASES = 6
"""OVERLAP, SUFFIX, UPDATE, SUFFIX, UPDATE, IDLE."""

POINTS: dict[str, Point] = {
    **_points(
        "keeper",
        put__received="a record has come from the broker and is not kept yet",
        put__stored="the record is kept, the broker has no answer",
        drop__done="a record is gone, the broker has no answer"),
    **_points(
        "broker",
        deposit__received="a slab's descriptor is here, the keeper does not have it",
        deposit__kept="the keeper has the slab, the broker's tables do not, the depositor waits",
        slab__deleted="a slab is gone from the tables and the keeper, its pages are not free, the asker does not know",
        lease__granted="a lease is granted and noted, whoever asked does not know",
        lease__redeemed="a ticket is spent, its descriptor is not sent",
        lease__released="a lease is gone, its former holder has no answer",
        snapshot__registered="the actor is known, the coordinator does not know that",
        phase__entered="the ledger is in the next phase, the coordinator does not know that",
        update__granted="the actor is TORN under a new epoch, the coordinator does not know that",
        publish__checked="all chunks are reported and every writer is gone, the actor is still TORN",
        publish__done="the actor is VALID(k+1), the coordinator does not know that",
        restored=Point("broker", "a successor has taken over from the keeper and serves nobody yet",
                       when="broker.update.granted")),
    **_points(
        "trainer",
        open__created=Point("trainer", "a new run's slabs are there and empty", when="open"),
        open__loaded=Point("trainer", "a new run's slabs are filled, no snapshot is registered", when="open"),
        attach__done=Point("trainer", "a successor maps the run's state, and has not said so",
                           when="trainer.update.chunk_written"),
        bind__done="the snapshot is bound, the coordinator does not know that",
        prefix__group=Point("trainer", "a group's prefix is there, the next one's is not", times=3),
        old_logprob__group=Point("trainer", "a group's old log-probabilities are computed and sent to nobody", times=2),
        suffix__group=Point("trainer", "a group's gradient is added, its boundary is gone", times=2),
        norm__measured=Point("trainer", "gradients are summed and measured, nobody knows the norm", times=2),
        update__bound=Point("trainer", "the actor is mapped for writing, nothing is written", times=2),
        update__chunk_loaded=Point("trainer", "a chunk is in working memory", times=_PER_CHUNK),
        update__chunk_computed=Point("trainer", "a chunk's AdamW step is in working memory only", times=_PER_CHUNK),
        update__chunk_written=Point("trainer", "a chunk's new state is in a spare slot, without a flip record",
                                    times=_PER_CHUNK),
        update__chunk_flipped=Point("trainer", "a chunk's flip is on record, the actor has its old weights", times=_PER_CHUNK),
        update__chunk_cast=Point("trainer", "a chunk's new weights are in the actor", times=_PER_CHUNK),
        update__chunks_done=Point("trainer", "every chunk is written, the step is not finished", times=2),
        update__step_finished=Point("trainer", "the step is finished, the actor still mapped, gradients are there", times=2),
        update__left=Point("trainer", "the actor is left and gradients are zero, the coordinator does not know", times=2),
        quiesce__done="boundaries are dropped, the coordinator does not know that",
        checkpoint__begun="a durable checkpoint's writer runs, the command has no answer",
        checkpoint__weights_written="the checkpoint's weights are on disk, its state is not",
        checkpoint__state_written="this rank's part of a checkpoint is on disk, nobody was told"),
    **_points(
        "rollout",
        bind__done="the snapshot is bound, the coordinator does not know that",
        prefill__done="prompts are prefilled, no token is sampled",
        decode__step=Point("rollout", "a token more of every response, sent to nobody", times=4),
        samples__handed_on="finished samples are on their way, others still decode",
        kv__released="all samples are handed on, keys and values are gone, the command has no result",
        quiesce__done="the snapshot is left where that was asked for, the coordinator does not know that"),
    **_points(
        "reference",
        open__loaded=Point("reference", "the frozen weights are in their slab, a new run is not open", when="open"),
        bind__done="the snapshot's number is noted, the coordinator does not know that",
        prefix__group=Point("reference", "a group's boundary is there, the next one's is not", times=2),
        score__group=Point("reference", "a group is scored, its log-probabilities are sent to nobody", times=2),
        quiesce__done="boundaries are dropped, the coordinator does not know that"),
    **_points(
        "reward",
        score__received="samples to score have come, nothing is computed",
        score__computed="samples are scored, the answer is not sent"),
    **_points(
        "coordinator",
        submit__prepared="prompts are decoded, their media in custody, nothing is in the journal",
        submit__journalled="the iteration is in the journal, the client does not know",
        iteration__running="the iteration is RUNNING in the journal, no engine works",
        phase__entered=Point("coordinator", "the broker is in the next phase", times=_PHASES),
        sample__received="finished samples have come and are not in the journal",
        sample__committed="finished samples are in the journal, no reward has seen them",
        reward__scored="a batch is scored in memory only",
        reward__journalled="a batch's scores are in the journal",
        responses__journalled="all responses are in the journal with their rewards, the KV is not released",
        advantages__journalled="advantages are there, the reference has scored nothing yet",
        suffix__done=Point("coordinator", "a mini-batch's gradients are summed", times=2),
        norm__agreed=Point("coordinator", "the norm is known, UPDATE_BEGIN is not in the journal", times=2),
        update__begun=Point("coordinator", "UPDATE_BEGIN is in the journal, the broker was not asked", times=2),
        update__granted=Point("coordinator", "the write epoch is granted, the trainer has no order", times=2),
        update__chunks_reported=Point("coordinator", "every rank has reported its last chunk, nothing is published", times=2),
        update__broker_published=Point("coordinator", "the broker has published k+1, the journal has not", times=2),
        update__published=Point("coordinator", "the publish record is in the journal, readers have not bound k+1", times=2),
        bind__done=Point("coordinator", "every engine has bound the snapshot", times=3),
        iteration__concluding="the last update is published, the iteration's end is not in the journal",
        iteration__ended="the iteration's end is in the journal, no client has heard of it",
        checkpoint__begun="the trainer writes a durable checkpoint, nothing of it counts",
        checkpoint__parts_written="all parts of a checkpoint are on disk, it has no manifest",
        checkpoint__manifest_written="the manifest is on disk, the checkpoint still has its partial name",
        checkpoint__visible="the checkpoint is there, older ones are not pruned",
        restart__journal_read=Point("coordinator", "a successor has read the journal and serves nobody",
                                    when="coordinator.update.begun"),
        roll_forward__ready=Point("coordinator", "the trainer has attached again, the update is not ordered again",
                                  when="trainer.update.chunk_written")),
}


@dataclass(frozen=True, slots=True)
class Order:
    """What to do at a point."""

    token: str
    """Unlike any other order's; counting begins anew with it."""
    action: str
    """A key of ACTIONS."""
    victims: tuple[int | str, ...] = (SELF,)
    """Process ids, or `self`, which comes last."""
    nth: int = 1
    """1: the next time."""


def folder_from(environment: str | None) -> Path | None:
    """The directory, or None when none is named. Raises BadInput for one in which others could write: they could have processes
    of ours signalled."""
    if not environment:
        return None
    path = Path(environment)
    try:
        found = path.lstat()
    except OSError as error:
        raise BadInput(f"{ENVIRONMENT} names {path}: {error.strerror}", reason="CRASH_POINTS_FOLDER") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise BadInput(f"{ENVIRONMENT} names {path}, which must be a directory of this user's with mode 0700",
                       reason="CRASH_POINTS_FOLDER", path=path)
    return path


_folder = folder_from(os.environ.get(ENVIRONMENT))
_counts: dict[str, tuple[str, int]] = {}
"""By point: token of the order, times reached since."""
_counting = threading.Lock()


def crash_point(name: str) -> None:
    """`name`: a key of POINTS. Returns, unless an order ends this process here."""
    if _folder is not None:
        reach(_folder, name)


def arm(folder: Path, name: str, order: Order) -> None:
    """Replaces the point's order. Raises KeyError for a point that is not in POINTS."""
    _ = POINTS[name], ACTIONS[order.action]
    fresh = folder / f".{name}.new"
    fresh.write_text(json.dumps(asdict(order)))
    fresh.rename(_path(folder, name))


def disarm(folder: Path, name: str) -> bool:
    """Whether the order was carried out. Afterwards none is there."""
    _path(folder, name).unlink(missing_ok=True)
    fired = _fired(folder, name)
    carried_out = fired.exists()
    fired.unlink(missing_ok=True)
    return carried_out


def reach(folder: Path, name: str) -> None:
    """What an armed process does at a point."""
    try:
        body = json.loads(_path(folder, name).read_bytes())
    except FileNotFoundError:
        return
    order = Order(**{**body, "victims": tuple(body["victims"])})
    with _counting:
        token, count = _counts.get(name, ("", 0))
        count = count + 1 if token == order.token else 1
        _counts[name] = order.token, count
    if count != order.nth:
        return
    try:
        _path(folder, name).rename(_fired(folder, name))
    except FileNotFoundError:
        return  # another process of the role was first
    for victim in sorted(order.victims, key=lambda victim: victim == SELF):
        strike(os.getpid() if victim == SELF else int(victim), ACTIONS[order.action])


def strike(pid: int, number: signal.Signals) -> None:
    """Sends SIGKILL or SIGSTOP and returns when that has had its effect; a process that is gone has had it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
        if number == signal.SIGKILL:
            ended_within(descriptor, STRIKE_TIMEOUT_S)
            return
        deadline = time.monotonic() + STRIKE_TIMEOUT_S
        while process_state(pid) not in ("T", "Z", "X", "") and time.monotonic() < deadline:
            time.sleep(0.002)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def process_state(pid: int) -> str:
    """Third field of /proc/PID/stat: `T` stopped, `t` traced, `Z` zombie, ...; empty for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _fired(folder: Path, name: str) -> Path:
    return folder / f"{name}.fired"
