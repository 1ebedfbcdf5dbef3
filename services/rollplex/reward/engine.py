"""Scores samples by Video-R1's rules. No grpc, no protos; one engine serves all calls."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollplex.core.errors import BadInput
from rollplex.reward.rules import RULES, Rule
from rollplex.reward.rules.answer import answer_of, has_format, truth_of


@dataclass(frozen=True, slots=True)
class Sample:
    """What the rules look at."""

    response: str
    """The response as text, special tokens left out."""
    ground_truth: str | None
    """Bare, or inside <answer> tags as in Video-R1's files."""
    problem_type: str | None


@dataclass(frozen=True, slots=True)
class Scored:
    """A value, or why there is none."""

    value: float | None
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """"accuracy" and "format", both in [0, 1] and before weighting; empty for an unscored sample."""


class RewardEngine:
    """Stateless but for its weights: may be called from several threads."""

    def __init__(self, accuracy_weight: float = 1.0, format_weight: float = 1.0) -> None:
        self._accuracy_weight, self._format_weight = accuracy_weight, format_weight

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """One result a sample, in order; what is wrong with one sample stays with that sample."""
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: Sample) -> Scored:
        try:
            accuracy = rule_of(sample.problem_type)(answer_of(sample.response), truth_of(sample.ground_truth))
        except BadInput as error:
            return Scored(None, str(error))
        parts = {"accuracy": accuracy, "format": float(has_format(sample.response))}
        return Scored(self._accuracy_weight * parts["accuracy"] + self._format_weight * parts["format"], "", parts)


def rule_of(problem_type: str | None) -> Rule:
    """The rule of a type, spelled exactly. Raises BadInput naming the nearest known type."""
    rule = RULES.get(problem_type or "")
    if rule is not None:
        return rule
    known = ", ".join(repr(name) for name in RULES)
    if not problem_type:
        raise BadInput(f"the row has no problem_type; known types: {known}", reason="PROBLEM_TYPE_MISSING")
    by_folded = {name.casefold(): name for name in RULES}
    near = difflib.get_close_matches(problem_type.strip().casefold(), by_folded, n=1, cutoff=0.5)
    hint = f"; did you mean {by_folded[near[0]]!r}?" if near else ""
    raise BadInput(f"unknown problem_type {problem_type!r}{hint} (known types: {known})", reason="UNKNOWN_PROBLEM_TYPE",
                   problem_type=problem_type, nearest=by_folded[near[0]] if near else "")
