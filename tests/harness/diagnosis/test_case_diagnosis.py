"""A wrong result is told for what it is: another convention, or a mistake of a known kind; and nothing else is.

Of every reading, faults of the catalogue are named in cases of their topic; what no such fault shows is made by hand.
``docs/diagnoses.md`` holds the words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Array, Arrays, Options, Problem, failing, options_of
from tables import tables_beside

from attncheck.attention import walk
from attncheck.attention.problem import Computation
from attncheck.attention.problem import Problem as PlainProblem
from attncheck.attention.walk import Walk
from attncheck.backends import numpy_backend as reference
from attncheck.diagnosis import examine, residuals
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import collect_evidence, decide_diagnoses
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.diagnosis.wrong_result import FailingCase
from attncheck.judging.judge_implementation import JudgedStages, KnownEmptyRows
from attncheck.judging.truth import find_truth
from attncheck.mutation.catalogue import MUTANTS, SUBJECTS_BY_NAME
from attncheck.mutation.judgement import RIGHTLY, diagnoses_by_subject, judge_diagnosis
from attncheck.mutation.unit import SeededUnit, UnitScorer, count_case_scores
from attncheck.reading.problem import Problem as ReadProblem
from attncheck.reading.selection import select_case, select_cases
from attncheck.spec.verdicts import Verdict

Compute = Callable[[Arrays], Arrays]
SEMANTIC, NUMERIC, NONFINITE = Verdict.SEMANTIC, Verdict.NUMERIC, Verdict.NONFINITE

# Faults of the catalogue, in cases of their topic.

TABLES = tables_beside(__file__)
TOPICS = TABLES["topics"]
HERE = Path(__file__).parent
"""A folder in which nothing is called as a file of bundled cases."""
ELSEWHERE = {
    *("causality-ignored", "mask-added", "parts-averaged", "value-read-as-key", "empty-rows-uniform"),
    *("weights-not-renormalised", "bias-of-batch-for-heads", "mask-of-batch-for-heads", "value-of-first-head"),
    "bias-gradient-of-batch-for-heads",
    *("fill-minus-infinity", "masked-at-least-number", "maximum-not-subtracted"),
    "batch-entries-unwritten",
}
"""What these cases do not tell from something else, and a test of its own or the score of all cases does."""
MOST_SCORES = 1000
AT_A_TIME = 8
"""Of the cases of a topic, so many that lie apart are asked until they have named all that they tell."""


@pytest.mark.parametrize("topic", TOPICS)
def test_faults_are_named_in_cases_of_their_topic(topic: str) -> None:
    faults = [fault for fault in MUTANTS if fault.topic == topic and fault.diagnosis]
    faults = [fault for fault in faults if not fault.diagnosis[0].startswith("accuracy-of")]
    found: dict[str, dict[tuple[str, str, int], Evidence]] = defaultdict(dict)
    unnamed = {fault.diagnosis[0] for fault in faults}
    cases = [
        case for case in select_cases(TOPICS[topic].split(), base=HERE).cases if count_case_scores(case) <= MOST_SCORES
    ]
    for number, place in enumerate(sorted(range(len(cases)), key=lambda place: (place % AT_A_TIME, place)), 1):
        if "float64" in cases[place].dtypes:
            scorer = UnitScorer(SeededUnit(cases[place], "float64"))
            for fault in faults:
                if (evidence := scorer.diagnosis_evidence(fault)) is not None:
                    found[fault.name][cases[place].id, "float64", 0] = evidence
        if number % AT_A_TIME == 0 or number == len(cases):
            said = diagnoses_by_subject(found)
            rightly = {
                fault.diagnosis[0] for fault in faults if judge_diagnosis(fault, said.get(fault.name, ())) == RIGHTLY
            }
            unnamed -= rightly
            if unnamed <= ELSEWHERE:
                break
            faults = [fault for fault in faults if fault.diagnosis[0] in unnamed]
    assert unnamed <= ELSEWHERE


# Problems made by hand.

DRAWN = np.random.default_rng(20)
QUERY, KEY, VALUE = (DRAWN.standard_normal(shape) for shape in ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)))
MASK = DRAWN.random((2, 1, 5, 7)) < 0.6
MASK[..., 0] = True
BIAS = DRAWN.standard_normal((1, 4, 5, 7))
PLAIN = {"query": QUERY, "key": KEY, "value": VALUE}
MASKED, BIASED = PLAIN | {"mask": MASK}, PLAIN | {"bias": BIAS}
EMPTY = PLAIN | {"mask": MASK & (np.arange(10).reshape(2, 1, 5, 1) % 7 != 2)}
"""A query of each batch entry has no key."""
POISONED = PLAIN | {"query": np.where(np.arange(QUERY.size).reshape(QUERY.shape) == 59, np.nan, QUERY)}
CAUSAL, LOWER = {"is_causal": True}, {"is_causal": True, "alignment": "bottom_right"}


def attend(**options: Any) -> Compute:
    """Return what computes attention with these options, whatever the case says."""

    def compute(inputs: Arrays) -> Arrays:
        problem = Problem("attention", options, inputs).canonical()
        given = {name: value for name, value in problem.options.items() if value is not None}
        with np.errstate(all="ignore"):
            return dict(reference.attention(**problem.inputs, **given))

    return compute


def changed(compute: Compute, **change: Callable[[Array], Array]) -> Compute:
    """Return what computes from inputs that it takes for others."""
    return lambda inputs: compute({**inputs, **{name: take(inputs[name]) for name, take in change.items()}})


def instead(stage: str, change: Callable[[Array, Arrays], Array], compute: Compute | None = None) -> Compute:
    """Return what changes a stage of what it computed, and nothing that follows from it."""

    def computed(inputs: Arrays) -> Arrays:
        stages = dict((compute or attend())(inputs))
        return stages | {stage: change(stages[stage], inputs).astype(inputs["query"].dtype)}

    return computed


def diagnosed(
    options: Options,
    inputs: Arrays,
    compute: Compute,
    dtype: str = "float64",
    stages: tuple[str, ...] = (),
    own: KnownEmptyRows | None = None,
) -> JudgedStages:
    """Judge what an implementation makes of a problem, of which it returns only some stages."""
    problem = Problem("attention", options, inputs).stored(dtype)
    with np.errstate(all="ignore"):
        returned = compute(dict(problem.inputs))
    return problem.judged({name: returned[name] for name in stages or returned}, dtype, own=own)


def names(found: JudgedStages) -> set[str]:
    return {each.name for each in found.findings.matches}


def name_of(found: JudgedStages) -> str:
    return found.diagnosis.name if found.diagnosis else ""


OUT, STEPS = ("output",), ("weights", "output")


def test_a_convention_is_semantic_a_mistake_numeric_and_both_are_told_with_their_stage() -> None:
    for row, dtype, returned in product(TABLES["readings"], ("float64", "float32"), ((), OUT)):
        compute = attend(**options_of(row["computed"]))
        judged = diagnosed(options_of(row.get("case", {})), PLAIN, compute, dtype, returned)
        assert (judged.begins_at, judged.excused_stages) == (row["stage"], frozenset()), row
        assert {each.value for each in failing(judged).values()} == {row["verdict"]}
        of_output = judged.judgements[-1]
        assert of_output.stage == "output"
        if row["verdict"] == "semantic":
            assert {each.message for each in judged.judgements if each.verdict.exit_code} == {row["says"]}
        elif returned:
            assert of_output.message.startswith(f"{row['says']}; ")
            assert "times the largest error that is possible" in of_output.message


def zeroed_behind(inputs: Arrays) -> Arrays:
    weights = np.where(inputs["mask"], attend()({name: inputs[name] for name in PLAIN})["weights"], 0)
    return {"weights": weights, "output": weights @ inputs["value"]}


def unscaled_weights(inputs: Arrays) -> Arrays:
    """Multiply weights and output by the number of keys, as a sum in the place of a mean does."""
    stages, keys = attend()(inputs), inputs["key"].shape[-2]
    return {name: stages[name] * inputs["query"].dtype.type(keys) for name in STEPS}


def seeing(keys: Array) -> Compute:
    """Return what sees these keys alone."""
    return lambda inputs: attend()({**inputs, "mask": keys})


def bias_times(factor: float) -> Compute:
    return changed(attend(), bias=lambda bias: bias * bias.dtype.type(factor))


def output_times(factor: float) -> Compute:
    return instead("output", lambda output, inputs: output * inputs["query"].dtype.type(factor))


def narrow(dtype: Any) -> Compute:
    """Return what computes in a lower precision."""

    def computed(inputs: Arrays) -> Arrays:
        stages = attend()({name: array.astype(dtype) for name, array in inputs.items()})
        return {"output": stages["output"].astype(inputs["query"].dtype)}

    return computed


def moved(by: float) -> Compute:
    at = np.arange(120).reshape(2, 4, 5, 3) == 100
    return instead("output", lambda output, _: output + by * at, attend(**CAUSAL))


SQUARE = PLAIN | {"value": np.roll(KEY, 2, -2) / 2}
FIVE_KEYS = PLAIN | {"key": KEY[:, :, :5], "value": VALUE[:, :, :5]}
BOTH, WIDE = ("float64", "float32"), ("float64",)
OTHERS: tuple[tuple[str, Options, Arrays, Compute, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        *("last-row-unmasked", {}, MASKED),
        *(changed(attend(), mask=lambda mask: mask | (np.arange(5)[:, np.newaxis] == 4)), OUT, BOTH),
    ),
    ("bias-unscaled", {}, BIASED, bias_times(8**0.5), OUT, BOTH),
    ("bias-fitted", {}, BIASED, bias_times(0.3), OUT, BOTH),
    ("value-read-as-key", {}, SQUARE, lambda inputs: attend()({**inputs, "value": inputs["key"]}), OUT, BOTH),
    ("key-read-as-value", {}, SQUARE, lambda inputs: attend()({**inputs, "key": inputs["value"]}), OUT, BOTH),
    ("output-doubled", {}, PLAIN, output_times(2), (), BOTH),
    ("output-negated", {}, PLAIN, output_times(-1), (), BOTH),
    ("output-over-root-of-width", {}, PLAIN, output_times(8**-0.5), (), BOTH),
    ("output-times-width", {}, PLAIN, output_times(8), (), BOTH),
    ("output-over-keys", {}, PLAIN, output_times(1 / 7), (), BOTH),
    ("output-times-keys", {}, PLAIN, unscaled_weights, (), BOTH),
    ("weights-not-renormalised", {}, MASKED, zeroed_behind, OUT, BOTH),
    ("accuracy-of-float32", {}, PLAIN, narrow("float32"), (), WIDE),
    ("accuracy-of-16-bits", {}, PLAIN, narrow("float16"), (), WIDE),
    ("stage-fitted", {}, PLAIN, output_times(1 / 0.9), (), BOTH),
    ("keys-fitted", {}, PLAIN, seeing((np.arange(7) < 3) | (np.arange(7) > 4)), OUT, BOTH),
    # An error of the size of float32 in proportion to the answer is no accuracy, and one in one place is nothing.
    ("stage-fitted", {}, PLAIN, output_times(1 + 1e-7), (), WIDE),
    ("", CAUSAL, MASKED | BIASED, moved(0.5), (), WIDE),
    ("", CAUSAL, MASKED | BIASED, moved(1e-9), (), WIDE),
    # On square scores both alignments are one; what is wrong here is something else, and something else beside one.
    ("stage-fitted", CAUSAL, FIVE_KEYS, changed(attend(**CAUSAL), value=lambda value: 1.001 * value), (), WIDE),
    ("", CAUSAL, PLAIN, instead("output", lambda output, _: output * 1.5, attend(**LOWER)), (), WIDE),
    # A reading that would change a stage that is right does not fit.
    ("", CAUSAL, PLAIN, instead("output", lambda _, given: attend()(given)["output"], attend(**CAUSAL)), (), WIDE),
)
"""What no fault of the catalogue is, or none of a case of its own topic shows, by its name; and what has none."""


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_another_step_operand_or_accuracy_is_named_and_what_no_reading_explains_has_no_name(number: int) -> None:
    name, options, inputs, compute, stages, dtypes = OTHERS[number]
    for dtype in dtypes:
        judged = diagnosed(options, inputs, compute, dtype, stages)
        assert name_of(judged) == name
        assert NUMERIC in failing(judged).values()
        assert SEMANTIC not in failing(judged).values()
        assert name or "causality-ignored" not in names(judged)
        if name.startswith("accuracy"):
            says = f"the output is as accurate as {name.removeprefix('accuracy-of-').replace('-', ' ')}"
            assert judged.judgements[0].message.startswith(says)


# Rows without a key.

SAYS = {
    "nan": "a query without a key gives NaN; the case expects",
    "uniform": "a query without a key gives the mean of all values (uniform); the case expects",
    "zero": "a query without a key gives zero; the case expects",
}
FILLED = {"nan": np.nan, "uniform": 1 / 7, "zero": 0.0}


def with_rows(value: float, of: Compute | None = None) -> Compute:
    """Return attention (``of``, or the right one) whose weights in rows without a key are all this number."""

    def compute(inputs: Arrays) -> Arrays:
        stages = dict((of or attend())(inputs))
        empty = stages["log_sum_exp"][..., np.newaxis] == -np.inf
        stages["weights"] = np.where(empty, inputs["query"].dtype.type(value), stages["weights"])
        return stages | {"output": stages["weights"] @ inputs["value"]}

    return compute


@pytest.mark.parametrize(("given", "expected"), list(product(SAYS, SAYS)))
def test_rows_without_a_key_follow_the_convention_of_the_case_unless_another_is_known(
    given: str, expected: str
) -> None:
    asked = {"empty_rows": expected} if expected != "zero" else {}
    for own, dtype, stages in (
        *((None, dtype, stages) for dtype in ("float64", "float32") for stages in (OUT, STEPS, ())),
        *((own, "float64", ()) for own in (KnownEmptyRows(given), KnownEmptyRows("uniform"), KnownEmptyRows())),
        (
            KnownEmptyRows(recorded_conventions=("uniform", "nan")),
            "float64",
            (),
        ),  # what is recorded is left to the record
        *((KnownEmptyRows(accepts_convention_option=False), "float64", stages) for stages in (OUT, ())),
    ):
        judged = diagnosed(asked, EMPTY, with_rows(FILLED[given]), dtype, stages, own)
        if given == expected:
            assert (failing(judged), judged.begins_at, judged.excused_stages) == ({}, "", frozenset())
            continue
        assert failing(judged) == dict.fromkeys(stages or STEPS, SEMANTIC)
        assert judged.begins_at == "weights"
        # What was asked for a convention and gives another fails, whatever it declares.
        is_declared = own is not None and own.declared_convention == given and not asked
        is_unasked = own is not None and not own.accepts_convention_option and bool(asked)
        message = f"{SAYS[given]} {expected}" + " (declared)" * is_declared
        assert judged.excused_stages == (failing(judged).keys() if is_declared or is_unasked else set())
        if is_unasked:
            assert judged.excuse_reason == f"{message}, for which it has no keyword empty_rows"
        else:
            assert {each.message for each in judged.judgements if each.verdict.exit_code} == {message}


def test_rows_that_are_empty_only_under_the_other_convention_are_told_too() -> None:
    def nan_rows(inputs: Arrays) -> Arrays:
        stages = attend(**LOWER)(inputs)
        return {"output": np.where(stages["log_sum_exp"][..., np.newaxis] == -np.inf, np.nan, stages["output"])}

    few_keys = PLAIN | {"key": KEY[:, :, :3], "value": VALUE[:, :, :3]}
    (found,) = diagnosed(CAUSAL, few_keys, nan_rows).judgements
    assert (found.verdict, found.empty_rows) == (SEMANTIC, None)
    assert found.message == (
        "causality is aligned bottom-right (key j for query i iff j <= i + Lk - Lq); the case means top-left; "
        "a query without a key gives NaN; the case expects zero"
    )


@pytest.mark.parametrize("given", ["nan", "uniform"])
def test_beside_a_declared_convention_what_else_is_wrong_is_told_with_its_own_size(given: str) -> None:
    own = KnownEmptyRows(given)
    both = diagnosed({}, EMPTY, with_rows(FILLED[given], of=attend(scale=1.0)), stages=OUT, own=own)
    (found,) = both.judgements
    says = "the output is exactly that of scale 1 instead of 0.3536"
    assert found.message.startswith(f"{says}; {SAYS[given]} zero; ")
    assert (found.verdict, both.begins_at, both.excused_stages) == (NUMERIC, "scores", frozenset())
    assert 1 < found.accumulated.ratio < np.inf
    partly = diagnosed(
        {}, EMPTY, instead("log_sum_exp", lambda array, _: array * (1 + 1e-6), with_rows(FILLED[given])), own=own
    )
    assert failing(partly) == {"weights": SEMANTIC, "log_sum_exp": NUMERIC, "output": SEMANTIC}
    assert (partly.begins_at, partly.excused_stages) == ("log_sum_exp", {"weights", "output"})


def test_what_nothing_explains_is_judged_by_what_is_declared() -> None:
    noise = 1 + 1e-6 * np.random.default_rng(6).standard_normal((2, 4, 5, 3))
    compute = instead("output", lambda output, _: output * noise, with_rows(1 / 7))
    for own in (KnownEmptyRows(), KnownEmptyRows("uniform"), KnownEmptyRows(recorded_conventions=("nan", "uniform"))):
        judged = diagnosed({}, EMPTY, compute, stages=OUT, own=own)
        (found,) = judged.judgements
        assert (found.verdict, judged.diagnosis, judged.excused_stages) == (NUMERIC, None, frozenset())
        assert (found.accumulated.ratio == np.inf) is (own == KnownEmptyRows())


# Beside readings.


def test_of_rows_that_stand_for_all_keys_that_are_left_out_are_named() -> None:
    query, key = DRAWN.standard_normal((1, 1, 2048, 4)), DRAWN.standard_normal((1, 1, 130, 4))
    for start, end, name in ((128, 130, "keys-fitted"), (64, 80, "keys-fitted"), (128, 128, "")):
        number = np.arange(130)
        seen = seeing((number < start) | (number >= end))
        judged = diagnosed({}, {"query": query, "key": key, "value": key}, seen, stages=OUT)
        assert (judged.judgements[0].judged_rows, name_of(judged)) == (64, name)
        assert f"keys are left out: {start} to {end - 1} of 130; " in judged.judgements[0].message or not name


def test_large_problems_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, name in ((QUERY[..., 0].size * 7 - 1, ""), (QUERY[..., 0].size * 7, "aligned-bottom-right")):
        monkeypatch.setattr(examine, "MAX_SCORES_TO_TRY", most)
        assert name_of(diagnosed(CAUSAL, PLAIN, attend(**LOWER))) == name


def test_nan_of_a_query_is_confined_to_its_row_and_neither_swallowed_nor_spread() -> None:
    confined = instead("weights", lambda own, given: np.where(np.tri(5, 7) == 0, 0.0, own), attend(**CAUSAL))
    swallowed = instead("weights", lambda own, given: np.nan_to_num(own), confined)
    spread = instead(
        "output", lambda own, _: np.where(np.isnan(own).any(axis=-2, keepdims=True), np.nan, own), attend(**CAUSAL)
    )
    assert failing(diagnosed(CAUSAL, POISONED, confined)) == {}
    assert failing(diagnosed(CAUSAL, POISONED, swallowed)) == {"weights": NONFINITE}
    judged = diagnosed(CAUSAL, POISONED, spread)
    assert failing(judged) == {"output": NONFINITE}
    assert judged.judgements[-1].message.startswith("nan where the exact value is ")
    for stages in ((), OUT):
        judged = diagnosed(CAUSAL, POISONED, changed(attend(**CAUSAL), query=np.nan_to_num), stages=stages)
        assert set(failing(judged).values()) == {NONFINITE}
        assert judged.begins_at == ("output" if stages else "raw_scores")
        assert all(found.message.startswith("NaN swallowed: ") for found in judged.judgements)


def test_a_convention_beside_others_says_that_the_case_does_not_tell() -> None:
    judged = diagnosed(CAUSAL, PLAIN | {"query": QUERY[..., :1, :]}, attend(), stages=OUT)
    assert failing(judged) == {"output": SEMANTIC}
    message = judged.judgements[0].message
    for part in ("causality is aligned bottom-right", "causality is ignored", "this case does not tell them apart)"):
        assert part in message


def test_masked_keys_with_weight_are_told_as_that() -> None:
    leaking = instead("weights", lambda weights, _: np.where(weights == 0, 1e-10, weights))
    (found,) = diagnosed({}, MASKED, leaking, stages=("weights",)).judgements
    count = 4 * int((~MASK).sum())
    says = f"{count} masked keys have weight, up to 1e-10: a key that may not be attended to must have exactly 0"
    assert found.message.startswith(says)


def test_whoever_fails_a_case_first_changes_no_diagnosis_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []
    value_walk = walk.value_walk

    def counted(problem: Computation) -> Walk:
        evaluated.append(problem.operation)
        return value_walk(problem)

    monkeypatch.setattr(walk, "value_walk", counted)
    truth = Problem("attention", {}, BIASED).truth()
    for compute in (
        attend(scale=0.123),
        bias_times(0.37),
        lambda inputs: {name: each.astype("f").astype("d") for name, each in attend()(inputs).items()},
        attend(scale=-0.211),
    ):
        stages = compute(BIASED)
        evaluated.clear()
        found = judge_and_diagnose(truth, stages, {name: array.shape for name, array in stages.items()}, "native")
        again = len(evaluated)
        evaluated.clear()
        alone = diagnosed({}, BIASED, compute)
        for one, other in zip(found.findings.matches, alone.findings.matches, strict=True):
            assert (one.name, one.description) == (other.name, other.description)
        assert (found.findings.refuted_names, found.judgements) == (alone.findings.refuted_names, alone.judgements)
    assert 0 < again < len(evaluated) / 2, "what is tried whatever was returned is worked out once"


def test_no_factor_is_made_of_a_width_of_no_features() -> None:
    inputs = {"query": np.zeros((1, 2, 3, 0)), "key": np.zeros((1, 2, 5, 0))}
    inputs["value"] = DRAWN.standard_normal((1, 2, 5, 4))
    wrong = reference.attention(**inputs, scale=0.5)["output"] + 1
    assert failing(Problem("attention", {"scale": 0.5}, inputs).judged({"output": wrong})) == {"output": NUMERIC}


# Packed sequences and merged parts.


def test_what_was_read_in_the_place_of_limits_is_named() -> None:
    packed = {name: DRAWN.standard_normal((1, 2, 8, 4)) for name in ("query", "key", "value")}
    packed |= {"cu_seqlens_q": np.array([0, 3, 8]), "cu_seqlens_k": np.array([0, 5, 8])}
    used = packed | {"key_lengths": np.array([3, 1])}
    for inputs, name, verdict, change in (
        (packed, "limits-of-queries", NUMERIC, {"cu_seqlens_k": packed["cu_seqlens_q"]}),
        (used, "key-lengths-ignored", NUMERIC, {"key_lengths": None}),
        (used, "key-lengths-one-too-short", SEMANTIC, {"key_lengths": used["key_lengths"] - 1}),
        (used, "key-lengths-one-too-long", SEMANTIC, {"key_lengths": used["key_lengths"] + 1}),
    ):
        returned = reference.packed_attention(**(inputs | change))["output"]
        found = Problem("packed_attention", {}, inputs).judged({"output": returned})
        assert (name_of(found), failing(found)) == (name, {"output": verdict})


def test_other_weights_of_parts_are_a_mistake_and_log_sum_exp_is_neither_infinite_nor_of_16_bits() -> None:
    outputs, totals = DRAWN.standard_normal((4, 2, 3, 5, 6)), 3 * DRAWN.standard_normal((4, 2, 3, 5))
    of_some = np.where(np.arange(5) == 2, -np.inf, totals)  # parts that are all empty for one query
    right = dict(reference.merge_states(outputs, of_some))
    averaged = {"output": reference.merge_states(outputs, np.zeros_like(totals))["output"]}
    infinite = {"log_sum_exp": np.where(np.isneginf(right["log_sum_exp"]), np.inf, right["log_sum_exp"])}
    for given, stages, name, verdicts in (
        (totals, averaged, "parts-averaged", {"output": NUMERIC}),
        (of_some, right, "", {}),
        (of_some, right | infinite, "", {"log_sum_exp": NONFINITE}),
    ):
        problem = Problem("merge_states", {}, {"outputs": outputs, "log_sum_exps": given})
        found = problem.judged(stages)
        assert (name_of(found), failing(found)) == (name, verdicts)
    narrow_problem = problem.stored("float16")
    for dtype, verdicts in (("float32", {}), ("float16", {"log_sum_exp": Verdict.DTYPE})):
        stages = dict(reference.merge_states(**narrow_problem.inputs))
        stages["log_sum_exp"] = stages["log_sum_exp"].astype(dtype)
        assert failing(narrow_problem.judged(stages, "float16", "eager")) == verdicts


# A softcap behind the mask gives masked keys weight.

SOFTCAP, CAP = "softcap-after-masked", 2.0
WHOLE_ROWS = np.array([True, False, True, True, False])[:, np.newaxis]
"""A mask that forbids all keys of a query, or none."""
ONE_EMPTY_ROW = MASK & (np.arange(5) != 1)[:, np.newaxis]


def capped(operation: str, inputs: Arrays, returned: Arrays) -> JudgedStages:
    return Problem(operation, {"softcap": CAP}, inputs).judged(returned, empty_rows="zero")


@pytest.mark.parametrize("bias", [BIAS, np.where(BIAS > 1, -np.inf, BIAS)], ids=["finite", "with minus infinity"])
def test_a_cap_behind_the_bias_is_no_refutation_of_itself(bias: Array) -> None:
    scores = reference.dot_scores(QUERY, KEY)["scores"]
    biased = CAP * np.tanh((scores + bias) / CAP)
    weights = reference.softmax(masked := np.where(MASK, biased, -np.inf))["weights"]
    returned = {"biased": biased, "masked": masked, "weights": weights, "output": weights @ VALUE}
    found = capped("attention", MASKED | {"bias": bias}, {"capped": CAP * np.tanh(scores / CAP)} | returned)
    assert "softcap-after-biased" not in found.findings.refuted_names
    if np.isfinite(bias).all():
        assert names(found) == {"softcap-after-biased"}
    # Read so, another reading may be looked for beside it.
    problem = PlainProblem("attention", {"softcap": CAP, "softcap_follows": "biased"}, MASKED | {"bias": bias})
    output = residuals.approximate(problem).stages["output"]
    np.testing.assert_allclose(output, returned["output"], rtol=1e-12)


def test_gradients_of_uniform_rows_under_a_softcap_have_two_possible_causes_and_of_one_row_one() -> None:
    backward = BIASED | {"grad_output": DRAWN.standard_normal((2, 4, 5, 3))}
    for mask, possible in ((WHOLE_ROWS, {"empty-rows-uniform", SOFTCAP}), (ONE_EMPTY_ROW, {"empty-rows-uniform"})):
        inputs = backward | {"mask": mask}
        returned = reference.attention_gradients(**inputs, softcap=CAP, empty_rows="uniform")
        found = capped("attention_gradients", inputs, dict(returned))
        assert names(found) == possible
        if len(possible) > 1:
            evidence = collect_evidence(found.findings, next(iter(failing(found))), "attention_gradients")
            assert decide_diagnoses({"case": evidence})["case"].match is None
            message = next(each.message for each in found.judgements if each.verdict is SEMANTIC)
            assert message.endswith("this case does not tell them apart)")


def test_a_reading_is_recognised_in_a_case_whose_rows_without_a_key_are_uniform() -> None:
    numbers = np.random.default_rng(0)
    query, key, value = (numbers.standard_normal((1, 1, rows, 8)).astype(np.float32) for rows in (3, 5, 5))
    mask = np.arange(15).reshape(3, 5) // 5 != 1
    problem = ReadProblem(
        "attention",
        {"empty_rows": "uniform"},
        {"query": query, "key": key, "value": value, "mask": mask},
        dtype="float32",
    )
    unscaled = find_truth(problem.with_options(scale=1.0)).exact["output"].high.astype(np.float32)
    case = FailingCase(problem, "float32", {"output": unscaled}, {}, "native")
    assert [reading.name for reading in case.find_explaining_readings({"scale-one": None})] == ["scale-one"]


def test_errors_nearly_as_large_as_the_numbers_are_of_no_format() -> None:
    """The bounds of bfloat16 allow them in this case, in which most of the gradient cancels."""
    name = "designs/operations/gradients-at-a-class-of-lengths-lq-1-lk-33-causal"
    scorer = UnitScorer(SeededUnit(select_case(name)[0], "float32"))
    evidence = scorer.diagnosis_evidence(SUBJECTS_BY_NAME["softcap_slope_missing"])
    assert evidence is not None
    assert not evidence.matches
