"""A softcap behind the mask gives masked keys weight: it is told for that, and not for what it makes of empty rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as reference
from attncheck.judging.diagnosis import Evidence, decide, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, JudgedStages, judge_and_diagnose
from attncheck.judging.truth import find_truth
from attncheck.verdicts import Verdict

Inputs = dict[str, NDArray[Any]]
Stages = dict[str, NDArray[Any]]

NAME = "softcap-after-masked"
CAP = 2.0
DRAWN = np.random.default_rng(31)
INPUTS: Inputs = {
    name: DRAWN.standard_normal(shape)
    for name, shape in (("query", (2, 4, 5, 8)), ("key", (2, 4, 7, 8)), ("value", (2, 4, 7, 3)))
}
BIAS = DRAWN.standard_normal((1, 4, 5, 7))
MASK = DRAWN.random((2, 1, 5, 7)) < 0.6
WHOLE_ROWS = np.array([True, False, True, True, False])[:, np.newaxis]
"""A mask that forbids all keys of a query, or none."""
ONE_EMPTY_ROW = MASK & (np.arange(5) != 1)[:, np.newaxis]


def masked_at_minus_cap(inputs: Inputs) -> Stages:
    """Compute attention that gives masked keys the logit -softcap."""
    logits = CAP * np.tanh(reference.dot_scores(inputs["query"], inputs["key"])["scores"] / CAP)
    logits = np.where(inputs["mask"], logits + inputs.get("bias", 0.0), -CAP)
    exponentials = np.exp(logits)
    sinks = np.exp(inputs["sinks"])[:, np.newaxis, np.newaxis] if "sinks" in inputs else 0.0
    weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + sinks)
    return {"masked": logits, "weights": weights, "output": weights @ inputs["value"]}


def diagnosed(operation: str, inputs: Inputs, returned: Stages, empty_rows: str = "zero") -> JudgedStages:
    options = {"softcap": CAP, "empty_rows": empty_rows}
    truth = find_truth(operation, options, inputs, "float64", supports_statistics=True)
    return judge_and_diagnose(truth, returned, {name: each.shape for name, each in returned.items()}, "native")


def names(judged: JudgedStages) -> set[str]:
    return {each.name for each in judged.findings.fits}


def evidence(judged: JudgedStages, operation: str) -> Evidence:
    failing = [each.stage for each in judged.judgements if each.verdict in DIAGNOSABLE]
    return evidence_of(judged.findings, failing[0], operation)


@pytest.mark.parametrize("stages", [("masked", "weights", "output"), ("weights", "output"), ("output",)])
@pytest.mark.parametrize("mask", [MASK, ONE_EMPTY_ROW, WHOLE_ROWS], ids=["partly", "one empty row", "whole rows"])
@pytest.mark.parametrize(
    "beside", [{}, {"bias": BIAS}, {"sinks": DRAWN.standard_normal(4)}], ids=["alone", "bias", "sinks"]
)
def test_masked_keys_at_minus_the_cap_are_named(beside: Inputs, mask: NDArray[Any], stages: tuple[str, ...]) -> None:
    inputs = INPUTS | {"mask": mask} | beside
    returned = {name: each for name, each in masked_at_minus_cap(inputs).items() if name in stages}
    judged = diagnosed("attention", inputs, returned)
    assert NAME in names(judged)
    if mask is not WHOLE_ROWS:
        assert judged.diagnosis is not None
        assert judged.diagnosis.name == NAME
        assert {each.verdict for each in judged.judgements} == {Verdict.SEMANTIC}


@pytest.mark.parametrize("bias", [BIAS, np.where(BIAS > 1, -np.inf, BIAS)], ids=["finite", "with minus infinity"])
def test_a_cap_behind_the_bias_is_no_refutation_of_itself(bias: NDArray[Any]) -> None:
    inputs = INPUTS | {"bias": bias, "mask": MASK}
    scores = reference.dot_scores(inputs["query"], inputs["key"])["scores"]
    biased = CAP * np.tanh((scores + bias) / CAP)
    weights = reference.softmax(masked := np.where(MASK, biased, -np.inf))["weights"]
    returned = {"biased": biased, "masked": masked, "weights": weights, "output": weights @ inputs["value"]}
    judged = diagnosed("attention", inputs, {"capped": CAP * np.tanh(scores / CAP)} | returned)
    assert "softcap-after-biased" not in judged.findings.refuted
    if np.isfinite(bias).all():
        assert names(judged) == {"softcap-after-biased"}


def test_forms_of_one_name_are_told_once() -> None:
    inputs = INPUTS | {"mask": MASK}
    judged = diagnosed("attention", inputs, {"output": masked_at_minus_cap(inputs)["output"]})
    assert len(judged.findings.fits) > 1
    assert names(judged) == {NAME}
    (decision,) = decide({"case": evidence(judged, "attention")}).values()
    assert decision.fit is not None
    assert decision.fit.name == NAME


def test_a_masked_key_with_another_logit_is_not_said_to_be_capped() -> None:
    inputs = INPUTS | {"mask": MASK}
    returned = masked_at_minus_cap(inputs)
    returned["masked"] = np.where(MASK, returned["masked"], -1.1 * CAP)
    assert NAME not in names(diagnosed("attention", inputs, returned))


def gradients(inputs: Inputs, *, empty_rows: str) -> Stages:
    returned = reference.attention_gradients(**inputs, softcap=CAP, empty_rows=empty_rows)
    return {name: each for name, each in returned.items() if name.startswith("grad_")}


@pytest.fixture
def backward() -> Inputs:
    return INPUTS | {"grad_output": DRAWN.standard_normal((2, 4, 5, 3)), "bias": BIAS}


def test_gradients_of_uniform_rows_under_a_softcap_have_two_possible_causes(backward: Inputs) -> None:
    inputs = backward | {"mask": WHOLE_ROWS}
    judged = diagnosed("attention_gradients", inputs, gradients(inputs, empty_rows="uniform"))
    assert names(judged) == {"empty-rows-uniform", NAME}
    (decision,) = decide({"case": evidence(judged, "attention_gradients")}).values()
    assert decision.fit is None
    message = next(each.message for each in judged.judgements if each.verdict is Verdict.SEMANTIC)
    assert message.endswith("this case does not tell them apart)")


def test_a_row_that_a_mask_forbids_in_part_leaves_the_empty_rows_alone(backward: Inputs) -> None:
    inputs = backward | {"mask": ONE_EMPTY_ROW}
    judged = diagnosed("attention_gradients", inputs, gradients(inputs, empty_rows="uniform"))
    assert names(judged) == {"empty-rows-uniform"}
