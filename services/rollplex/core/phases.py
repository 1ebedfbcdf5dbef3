"""Phases of an iteration and the transition table of a run."""

from __future__ import annotations

from enum import StrEnum

from rollplex.core.errors import WrongState


class Phase(StrEnum):
    IDLE = "idle"
    OVERLAP = "overlap"
    SUFFIX = "suffix"
    UPDATE = "update"


class PhaseEvent(StrEnum):
    BEGIN = "begin"
    """An iteration or a validation starts."""
    RESPONSES_FIXED = "responses_fixed"
    """Responses fixed, boundaries ready, rewards in, rollout's KV released."""
    READERS_QUIESCED = "readers_quiesced"
    """Every reader of the snapshot has left it."""
    PUBLISHED = "published"
    """The next snapshot is visible, or the update was skipped."""
    GRADIENT_LOST = "gradient_lost"
    """The trainer was lost before UPDATE_BEGIN: its prefixes and suffixes are done again under the same snapshot."""
    NEXT_MINI_BATCH = "next_mini_batch"
    """Another mini-batch of the same responses follows under the new snapshot."""
    ENDED = "ended"
    """No update follows: validation, cancellation or failure before UPDATE."""


TRANSITIONS: dict[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.IDLE, PhaseEvent.BEGIN): Phase.OVERLAP,
    (Phase.OVERLAP, PhaseEvent.RESPONSES_FIXED): Phase.SUFFIX,
    (Phase.OVERLAP, PhaseEvent.ENDED): Phase.IDLE,
    (Phase.SUFFIX, PhaseEvent.READERS_QUIESCED): Phase.UPDATE,
    (Phase.SUFFIX, PhaseEvent.ENDED): Phase.IDLE,
    (Phase.UPDATE, PhaseEvent.PUBLISHED): Phase.IDLE,
    (Phase.UPDATE, PhaseEvent.GRADIENT_LOST): Phase.SUFFIX,
    (Phase.UPDATE, PhaseEvent.NEXT_MINI_BATCH): Phase.SUFFIX,
}


def next_phase(phase: Phase, event: PhaseEvent) -> Phase:
    """The phase after `event`. Raises WrongState where the table has no row."""
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise WrongState(f"{event.value} cannot happen in phase {phase.value}", reason="WRONG_PHASE",
                         phase=phase.value, event=event.value) from None
