"""Type "free-form"."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rollplex.core.errors import BadInput

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

KINDS = ("rouge1", "rouge2", "rougeL")


def free_form(answer: str, truth: str) -> float:
    """Mean F-measure of ROUGE-1, ROUGE-2 and ROUGE-L with Porter stemming, in [0, 1].

    A truth of a single word has no bigram, so that 2/3 is its best score. Raises BadInput for a ground truth without
    any of a-z and 0-9, the only letters that rouge_score reads: every answer would get 0.
    """
    if not any(letter.isascii() and letter.isalnum() for letter in truth):
        raise BadInput(f"the ground truth {truth!r} has no letter a-z or digit, and ROUGE reads nothing else",
                       reason="GROUND_TRUTH_UNREADABLE")
    scores = _scorer().score(truth, answer)
    return max(0.0, min(1.0, sum(scores[kind].fmeasure for kind in KINDS) / len(KINDS)))


@functools.cache
def _scorer() -> RougeScorer:
    # Importing it takes 0.4 s of nltk, which --help and runs without free-form questions need not wait for.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(KINDS), use_stemmer=True)
