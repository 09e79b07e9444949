"""Readings and mistakes by name: faults of the catalogue in cases of their topic, scales, softcaps, merged parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as reference
from attncheck.judging.alternatives import has_scale, scale_of, scales_in_words
from attncheck.judging.diagnosis import decide, evidence_of
from attncheck.judging.judge_implementation import DIAGNOSABLE, JudgedStages, judge_and_diagnose
from attncheck.judging.readings import ACCURACIES, CATALOGUE, readings_of
from attncheck.judging.residuals import fit_scale, shortest
from attncheck.judging.truth import find_truth
from attncheck.judging.wrong_result import _cosine, _is_noise
from attncheck.mutation.catalogue import MUTANTS
from attncheck.mutation.judgement import RIGHTLY, ExactJudge, Naming, how_named
from attncheck.mutation.unit import UnitScorer, count_scores, unit_of
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.lowering import Problem
from attncheck.reading.selection import select_cases
from attncheck.spec import EMPTY_ROWS
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Arrays = dict[str, Array]

TOPICS = {
    "attention by score": "attention_by_score",
    "bias": "attention",
    "causal": "masking attention",
    "empty rows": "empty_rows",
    "gradients": "gradients",
    "grouped": "grouped_heads",
    "heads": "multi_head_attention",
    "latents": "latent_projections",
    "lengths": "lengths",
    "mask fills": "mask_fill",
    "masks": "masking attention grouped_heads",
    "merging": "merge_states",
    "norms": "normalized",
    "paged caches": "paged",
    "projections": "multi_head_attention",
    "rotary": "rotary query_offsets",
    "scale": "attention grouped_heads scoring",
    "scores": "attention scoring",
    "sinks": "sinks",
    "softcap": "softcap",
    "softmax": "attention scoring",
    "windows": "windows",
}
"""Topics of the catalogue, and files of cases that tell their faults from each other."""
HERE = Path(__file__).parent
"""A folder in which nothing is called as a file of bundled cases."""
ELSEWHERE = {
    "causality-ignored",
    "mask-added",
    "parts-averaged",
    "value-read-as-key",
    "empty-rows-uniform",
    "weights-not-renormalised",
    "bias-of-batch-for-heads",
    "mask-of-batch-for-heads",
    "value-of-first-head",
    "fill-minus-infinity",
}
"""What these cases do not tell from something else, and a test of its own or the score of all cases does."""
MOST_SCORES = 1000
AT_A_TIME = 8
"""Of the cases of a topic, so many that lie apart are asked until they have named all that they tell."""


@pytest.mark.parametrize("topic", TOPICS)
def test_faults_are_named_in_cases_of_their_topic(topic: str) -> None:
    faults = [fault for fault in MUTANTS if fault.topic == topic and fault.diagnosis]
    faults = [fault for fault in faults if not fault.diagnosis[0].startswith("accuracy-of")]
    naming, unnamed = Naming(), {fault.diagnosis[0] for fault in faults}
    cases = [case for case in select_cases(TOPICS[topic].split(), base=HERE).cases if count_scores(case) <= MOST_SCORES]
    for number, place in enumerate(sorted(range(len(cases)), key=lambda place: (place % AT_A_TIME, place)), 1):
        if "float64" in cases[place].dtypes:
            scorer = UnitScorer(unit_of(cases[place], 0, "float64"), ExactJudge())
            for fault in faults:
                if (evidence := scorer.evidence(fault)) is not None:
                    naming.add(fault.name, (cases[place].id, "float64", 0), evidence)
        if number % AT_A_TIME == 0 or number == len(cases):
            said = naming.names()
            rightly = {fault.diagnosis[0] for fault in faults if how_named(fault, said.get(fault.name, ())) == RIGHTLY}
            if (unnamed := {fault.diagnosis[0] for fault in faults} - rightly) <= ELSEWHERE:
                break
    assert unnamed <= ELSEWHERE


def test_every_reading_is_one_of_some_case() -> None:
    made_elsewhere = {f"empty-rows-{value}" for value in (*EMPTY_ROWS, "unmasked")} | {"scale-fitted", "bias-fitted"}
    unused = {reading.name for readings in CATALOGUE.values() for reading in readings} - made_elsewhere
    unused -= {accuracy.name for accuracy in ACCURACIES.values()}
    for case in select_cases([]).cases:
        if unused and not case.id.startswith("large/"):
            called = case.problem(convert_inputs(case, make_exact_inputs(case), case.dtypes[0]).arrays)
            problem = called.lowered()
            unused -= {each.name for each in readings_of(problem)}
            unused -= (
                {each.name for each in readings_of(called, before_lowering=True)} if problem is not called else set()
            )
    assert not unused


# Problems made by hand.


def judged(
    operation: str, options: dict[str, Any], inputs: Arrays, returned: Arrays, dtype: str = "float64"
) -> JudgedStages:
    truth = find_truth(Problem(operation, options, inputs), dtype, supports_statistics=True)
    shapes = {stage: each.shape for stage, each in returned.items()}
    return judge_and_diagnose(truth, returned, shapes, "native" if dtype != "float16" else "eager")


def named(found: JudgedStages) -> tuple[str, set[Verdict]]:
    wrong = {each.verdict for each in found.judgements if each.verdict is not Verdict.AGREE}
    return found.diagnosis.name if found.diagnosis else "", wrong


def names(found: JudgedStages) -> set[str]:
    return {each.name for each in found.findings.fits}


DRAWN = np.random.default_rng(31)
LIMITS = {"cu_seqlens_q": np.array([0, 3, 8]), "cu_seqlens_k": np.array([0, 5, 8]), "key_lengths": np.array([3, 1])}
PACKED = {name: DRAWN.standard_normal((1, 2, 8, 4)) for name in ("query", "key", "value")} | LIMITS


@pytest.mark.parametrize(
    ("name", "verdict", "change"),
    [
        ("limits-of-queries", Verdict.NUMERIC, {"cu_seqlens_k": LIMITS["cu_seqlens_q"], "key_lengths": None}),
        ("key-lengths-ignored", Verdict.NUMERIC, {"key_lengths": None}),
        ("key-lengths-one-too-short", Verdict.SEMANTIC, {"key_lengths": LIMITS["key_lengths"] - 1}),
        ("key-lengths-one-too-long", Verdict.SEMANTIC, {"key_lengths": LIMITS["key_lengths"] + 1}),
    ],
)
def test_what_was_read_in_the_place_of_limits_is_named(name: str, verdict: Verdict, change: dict[str, Any]) -> None:
    inputs = PACKED if name != "limits-of-queries" else {n: each for n, each in PACKED.items() if n != "key_lengths"}
    returned = reference.packed_attention(**(inputs | change))["output"]
    assert named(judged("packed_attention", {}, inputs, {"output": returned})) == (name, {verdict})


OUTPUTS, TOTALS = DRAWN.standard_normal((4, 2, 3, 5, 6)), 3 * DRAWN.standard_normal((4, 2, 3, 5))
OF_SOME = np.where(np.arange(5) == 2, -np.inf, TOTALS)
"""Log-sum-exps of parts that are all empty for one query."""


def of_parts(stages: Arrays, totals: Array = TOTALS) -> tuple[str, set[Verdict]]:
    return named(judged("merge_states", {}, {"outputs": OUTPUTS, "log_sum_exps": totals}, stages))


def test_another_base_is_a_convention_and_other_weights_are_a_mistake() -> None:
    binary = reference.merge_states(OUTPUTS, TOTALS, lse_base="2")
    for hidden in ((), ("weights",), ("weights", "log_sum_exp")):
        returned = {stage: each for stage, each in binary.items() if stage not in hidden}
        assert of_parts(returned) == ("lse-base-2", {Verdict.SEMANTIC})
    averaged = {"output": reference.merge_states(OUTPUTS, np.zeros_like(TOTALS))["output"]}
    assert of_parts(averaged) == ("parts-averaged", {Verdict.NUMERIC})


def test_nan_where_every_part_is_empty_is_a_convention_and_plus_infinity_is_wrong() -> None:
    right, empty = reference.merge_states(OUTPUTS, OF_SOME), (np.arange(5) == 2)[:, np.newaxis]
    assert of_parts(right, OF_SOME) == ("", set())
    spoilt = {stage: np.where(empty, np.nan, right[stage]) for stage in ("weights", "output")}
    assert of_parts(right | spoilt, OF_SOME) == ("empty-rows-nan", {Verdict.SEMANTIC})
    total = np.where(np.isneginf(right["log_sum_exp"]), np.inf, right["log_sum_exp"])
    assert of_parts(right | {"log_sum_exp": total}, OF_SOME) == ("", {Verdict.NONFINITE})


def test_log_sum_exp_of_parts_in_sixteen_bits_has_to_be_float32() -> None:
    inputs = {"outputs": OUTPUTS.astype(np.float16), "log_sum_exps": TOTALS.astype(np.float32)}
    stages = dict(reference.merge_states(**inputs))
    assert named(judged("merge_states", {}, inputs, stages, "float16")) == ("", set())
    narrow = stages | {"log_sum_exp": stages["log_sum_exp"].astype(np.float16)}
    found = {each.stage: each for each in judged("merge_states", {}, inputs, narrow, "float16").judgements}
    assert (found["log_sum_exp"].verdict, found["log_sum_exp"].message) == (
        Verdict.DTYPE,
        "expected float32, got float16",
    )


# A softcap behind the mask gives masked keys weight.

SOFTCAP = "softcap-after-masked"
CAP = 2.0
INPUTS: Arrays = {
    name: DRAWN.standard_normal(shape)
    for name, shape in (("query", (2, 4, 5, 8)), ("key", (2, 4, 7, 8)), ("value", (2, 4, 7, 3)))
}
BIAS = DRAWN.standard_normal((1, 4, 5, 7))
MASK = DRAWN.random((2, 1, 5, 7)) < 0.6
WHOLE_ROWS = np.array([True, False, True, True, False])[:, np.newaxis]
"""A mask that forbids all keys of a query, or none."""
ONE_EMPTY_ROW = MASK & (np.arange(5) != 1)[:, np.newaxis]


def masked_at_minus_cap(inputs: Arrays) -> Arrays:
    """Compute attention that gives masked keys the logit -softcap."""
    logits = CAP * np.tanh(reference.dot_scores(inputs["query"], inputs["key"])["scores"] / CAP)
    logits = np.where(inputs["mask"], logits + inputs.get("bias", 0.0), -CAP)
    exponentials = np.exp(logits)
    sinks = np.exp(inputs["sinks"])[:, np.newaxis, np.newaxis] if "sinks" in inputs else 0.0
    weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + sinks)
    return {"masked": logits, "weights": weights, "output": weights @ inputs["value"]}


def capped(operation: str, inputs: Arrays, returned: Arrays) -> JudgedStages:
    return judged(operation, {"softcap": CAP, "empty_rows": "zero"}, inputs, returned)


def decided(found: JudgedStages, operation: str) -> str:
    failing = [each.stage for each in found.judgements if each.verdict in DIAGNOSABLE]
    (decision,) = decide({"case": evidence_of(found.findings, failing[0], operation)}).values()
    return decision.fit.name if decision.fit else ""


@pytest.mark.parametrize("stages", [("masked", "weights", "output"), ("weights", "output"), ("output",)])
@pytest.mark.parametrize("mask", [MASK, ONE_EMPTY_ROW, WHOLE_ROWS], ids=["partly", "one empty row", "whole rows"])
@pytest.mark.parametrize(
    "beside", [{}, {"bias": BIAS}, {"sinks": DRAWN.standard_normal(4)}], ids=["alone", "bias", "sinks"]
)
def test_masked_keys_at_minus_the_cap_are_named(beside: Arrays, mask: Array, stages: tuple[str, ...]) -> None:
    inputs = INPUTS | {"mask": mask} | beside
    returned = {name: each for name, each in masked_at_minus_cap(inputs).items() if name in stages}
    found = capped("attention", inputs, returned)
    assert SOFTCAP in names(found)
    if mask is not WHOLE_ROWS:
        assert found.diagnosis is not None
        assert found.diagnosis.name == SOFTCAP
        assert {each.verdict for each in found.judgements} == {Verdict.SEMANTIC}


@pytest.mark.parametrize("bias", [BIAS, np.where(BIAS > 1, -np.inf, BIAS)], ids=["finite", "with minus infinity"])
def test_a_cap_behind_the_bias_is_no_refutation_of_itself(bias: Array) -> None:
    inputs = INPUTS | {"bias": bias, "mask": MASK}
    scores = reference.dot_scores(inputs["query"], inputs["key"])["scores"]
    biased = CAP * np.tanh((scores + bias) / CAP)
    weights = reference.softmax(masked := np.where(MASK, biased, -np.inf))["weights"]
    returned = {"biased": biased, "masked": masked, "weights": weights, "output": weights @ inputs["value"]}
    found = capped("attention", inputs, {"capped": CAP * np.tanh(scores / CAP)} | returned)
    assert "softcap-after-biased" not in found.findings.refuted
    if np.isfinite(bias).all():
        assert names(found) == {"softcap-after-biased"}


def test_forms_of_one_name_are_told_once() -> None:
    inputs = INPUTS | {"mask": MASK}
    found = capped("attention", inputs, {"output": masked_at_minus_cap(inputs)["output"]})
    assert len(found.findings.fits) > 1
    assert names(found) == {SOFTCAP}
    assert decided(found, "attention") == SOFTCAP


def test_a_masked_key_with_another_logit_is_not_said_to_be_capped() -> None:
    inputs = INPUTS | {"mask": MASK}
    returned = masked_at_minus_cap(inputs)
    returned["masked"] = np.where(MASK, returned["masked"], -1.1 * CAP)
    assert SOFTCAP not in names(capped("attention", inputs, returned))


def gradients(inputs: Arrays, *, empty_rows: str) -> Arrays:
    returned = reference.attention_gradients(**inputs, softcap=CAP, empty_rows=empty_rows)
    return {name: each for name, each in returned.items() if name.startswith("grad_")}


@pytest.fixture
def backward() -> Arrays:
    return INPUTS | {"grad_output": DRAWN.standard_normal((2, 4, 5, 3)), "bias": BIAS}


def test_gradients_of_uniform_rows_under_a_softcap_have_two_possible_causes(backward: Arrays) -> None:
    inputs = backward | {"mask": WHOLE_ROWS}
    found = capped("attention_gradients", inputs, gradients(inputs, empty_rows="uniform"))
    assert names(found) == {"empty-rows-uniform", SOFTCAP}
    assert decided(found, "attention_gradients") == ""
    message = next(each.message for each in found.judgements if each.verdict is Verdict.SEMANTIC)
    assert message.endswith("this case does not tell them apart)")


def test_a_row_that_a_mask_forbids_in_part_leaves_the_empty_rows_alone(backward: Arrays) -> None:
    inputs = backward | {"mask": ONE_EMPTY_ROW}
    found = capped("attention_gradients", inputs, gradients(inputs, empty_rows="uniform"))
    assert names(found) == {"empty-rows-uniform"}


# Scales that are taken for others: the common ones, and one that is fitted.

PLAIN = {"query": np.zeros((2, 4, 3, 16)), "key": np.zeros((2, 4, 5, 16)), "value": np.zeros((2, 4, 5, 9))}
HEADS = {
    "query": np.zeros((2, 3, 64)),
    "query_weight": np.zeros((64, 32)),
    "value_weight": np.zeros((64, 18)),
}


@pytest.mark.parametrize(
    ("operation", "options", "inputs", "scale"),
    [
        ("attention", {}, PLAIN, 0.25),
        ("attention", {"scale": 0.5}, PLAIN, 0.5),
        ("scoring", {"score": "dot"}, PLAIN, 1.0),
        ("scoring", {"score": "scaled_dot"}, PLAIN, 0.25),
        ("scoring", {"score": "cosine"}, PLAIN, 1.0),
        ("multi_head_attention", {"heads": 2, "kv_heads": 1}, HEADS, 0.25),
    ],
)
def test_the_scale_that_a_case_means(
    operation: str, options: dict[str, Any], inputs: dict[str, Array], scale: float
) -> None:
    assert scale_of(Problem(operation, options, inputs)) == scale
    assert has_scale(Problem(operation, options, inputs))


def test_what_has_no_scale() -> None:
    for operation, options in (("softmax", {}), ("masking", {}), ("scoring", {"score": "general"})):
        assert not has_scale(Problem(operation, options, {}))


@pytest.mark.parametrize("wanted", [0.31, -0.2, 3.0, 1e-2])
def test_a_scale_is_fitted_to_float64s_accuracy(wanted: float) -> None:
    slopes = np.array([0.3, -1.2, 2.0, 0.7])
    fitted = fit_scale(lambda scale: np.tanh(scale * slopes) - np.tanh(wanted * slopes), 0.35)
    assert fitted == pytest.approx(wanted, rel=4e-16)


def test_what_depends_on_no_scale_has_no_best_one() -> None:
    assert fit_scale(lambda scale: np.ones(3), 0.35) is None
    assert fit_scale(lambda scale: np.full(3, scale - 1e6), 0.35) is None
    assert fit_scale(lambda scale: np.full(3, np.nan), 0.35) is None


@pytest.mark.parametrize(
    ("scale", "short"), [(0.31 + 1e-9, 0.31), (0.31 + 1e-4, 0.3101), (1e-9, 0.0), (-0.2, -0.2), (1 / 3, 0.333333)]
)
def test_the_shortest_number_that_is_near_enough(scale: float, short: float) -> None:
    assert shortest(scale, 2e-6, 0.35) == short


def test_scales_that_look_alike_get_more_digits() -> None:
    assert scales_in_words(0.31, 0.35355339) == ["0.31", "0.3536"]
    assert scales_in_words(0.353553, 0.35355339) == ["0.353553", "0.35355339"]


# Errors that look like the roundings of a format.


def test_errors_of_a_stage_whose_exact_values_are_all_zero_are_looked_at() -> None:
    inputs = {"query": np.zeros((1, 1, 9, 4)), "key": DRAWN.normal(size=(1, 1, 9, 4))}
    truth = find_truth(Problem("scoring", {"scale": 1.0}, inputs), "float64", supports_statistics=True)
    assert _is_noise(truth, np.full((1, 1, 9, 9), 1e-16), "scores", DRAWN.normal(size=(1, 1, 9, 9)))


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_the_angle_between_vectors_is_that_of_any_multiple(size: float) -> None:
    one, other = DRAWN.normal(size=5), DRAWN.normal(size=5)
    with np.errstate(all="ignore"):
        assert _cosine(one * size, other) == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        assert _cosine(np.zeros(5), other) == 0
