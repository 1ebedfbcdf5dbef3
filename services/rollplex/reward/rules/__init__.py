"""Video-R1's accuracy rules by problem type; `src/r1-v/src/open_r1/grpo.py` of Video-R1 is the source of the formulas.

A rule takes the model's answer and the ground truth, both extracted and stripped, and returns the accuracy in [0, 1].
An answer that cannot be read is the model's fault: 0. A ground truth that cannot be read is the data's: BadInput.
"""

from __future__ import annotations

from collections.abc import Callable

from rollplex.reward.rules.free_form import free_form
from rollplex.reward.rules.multiple_choice import multiple_choice
from rollplex.reward.rules.numerical import numerical
from rollplex.reward.rules.ocr import ocr
from rollplex.reward.rules.regression import regression

Rule = Callable[[str, str], float]

RULES: dict[str, Rule] = {
    "multiple choice": multiple_choice,
    "numerical": numerical,
    "OCR": ocr,
    "free-form": free_form,
    "regression": regression,
}
