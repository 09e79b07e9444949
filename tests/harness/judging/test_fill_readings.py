"""What stands in the place of a masked score instead of the number that the case means is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as reference
from attncheck.judging.judge_implementation import judge_and_diagnose
from attncheck.judging.truth import find_truth
from attncheck.verdicts import Verdict

DRAWN = np.random.default_rng(52)
INPUTS: dict[str, NDArray[Any]] = {
    name: DRAWN.standard_normal(shape)
    for name, shape in (("query", (2, 4, 5, 8)), ("key", (2, 4, 7, 8)), ("value", (2, 4, 7, 3)))
}
MASK = (DRAWN.random((2, 1, 5, 7)) < 0.6) & (np.arange(5) != 1)[:, np.newaxis]
FILL = -20.0
SCORES = reference.dot_scores(INPUTS["query"], INPUTS["key"])["scores"]


@pytest.mark.parametrize("stages", [("masked", "weights", "output"), ("output",)], ids=["all stages", "output"])
@pytest.mark.parametrize(
    ("name", "masked", "verdict"),
    [
        ("fill-minus-infinity", -np.inf, Verdict.SEMANTIC),
        ("fill-added", SCORES + FILL, Verdict.NUMERIC),
        ("fill-scaled", FILL / np.sqrt(8), Verdict.NUMERIC),
        ("fill-inverted", 1 / FILL, Verdict.NUMERIC),
    ],
)
def test_another_fill_is_named(name: str, masked: Any, verdict: Verdict, stages: tuple[str, ...]) -> None:
    logits = np.where(MASK, SCORES, masked)
    weights = reference.softmax(logits)["weights"]
    returned = {"masked": logits, "weights": weights, "output": weights @ INPUTS["value"]}
    returned = {stage: array for stage, array in returned.items() if stage in stages}
    truth = find_truth("attention", {"mask_fill": FILL}, {**INPUTS, "mask": MASK}, "float64", supports_statistics=True)
    judged = judge_and_diagnose(truth, returned, {each: array.shape for each, array in returned.items()}, "native")
    assert judged.diagnosis is not None
    assert judged.diagnosis.name == name
    assert verdict in {each.verdict for each in judged.judgements}
