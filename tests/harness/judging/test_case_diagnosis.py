"""A wrong result is told for what it is: another convention, or a mistake of a known kind; and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as reference
from attncheck.judging import judge_implementation, residuals
from attncheck.judging.judge_implementation import JudgedStages, OwnEmptyRows, judge_and_diagnose
from attncheck.judging.truth import find_truth
from attncheck.mutation.catalogue import variant_named
from attncheck.reading.lowering import Problem
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Inputs = dict[str, Array]
Stages = dict[str, Array]
Compute = Callable[[Inputs], Stages]

DTYPES = ("float64", "float32")
DRAWN = np.random.default_rng(20)
QUERY, KEY, VALUE = (DRAWN.standard_normal(shape) for shape in ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)))
MASK = DRAWN.random((2, 1, 5, 7)) < 0.6
MASK[..., 0] = True
BIAS = DRAWN.standard_normal((1, 4, 5, 7))
LENGTHS = np.array([3, 6])
PLAIN = {"query": QUERY, "key": KEY, "value": VALUE}
GROUPED = PLAIN | {"key": KEY[:, :2], "value": VALUE[:, :2]}
FEW_KEYS = PLAIN | {"key": KEY[:, :, :3], "value": VALUE[:, :, :3]}


def attend(**options: Any) -> Compute:
    """Return what computes attention with these options, whatever the case says."""

    def compute(inputs: Inputs) -> Stages:
        problem = Problem("attention", options, inputs).canonical()
        given = {name: value for name, value in problem.options.items() if value is not None}
        with np.errstate(all="ignore"):
            return dict(reference.attention(**problem.inputs, **given))

    return compute


def changed(compute: Compute, **change: Callable[[Array], Array]) -> Compute:
    """Return what computes from inputs that it takes for others."""
    return lambda inputs: compute({**inputs, **{name: take(inputs[name]) for name, take in change.items()}})


def without(compute: Compute, name: str) -> Compute:
    return lambda inputs: compute({other: array for other, array in inputs.items() if other != name})


def diagnosed(
    options: Mapping[str, Any],
    inputs: Mapping[str, Array],
    compute: Compute,
    dtype: str = "float64",
    stages: tuple[str, ...] = (),
    own: OwnEmptyRows | None = None,
) -> JudgedStages:
    """Judge what an implementation makes of a problem, of which it returns only some stages."""
    stored = {
        name: array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in inputs.items()
    }
    with np.errstate(all="ignore"):
        returned = compute(dict(stored))
    returned = {name: array for name, array in returned.items() if not stages or name in stages}
    assert {str(array.dtype) for array in returned.values()} == {dtype}
    truth = find_truth(Problem("attention", options, stored), dtype, supports_statistics=True)
    shapes = {name: array.shape for name, array in returned.items()}
    return judge_and_diagnose(truth, returned, shapes, "native", own)


def failing(judged: JudgedStages) -> dict[str, Verdict]:
    return {found.stage: found.verdict for found in judged.judgements if found.verdict.exit_code}


CAUSAL, LOWER = {"is_causal": True}, {"is_causal": True, "alignment": "bottom_right"}
WINDOW = {"window": (2, 1)}
PROBLEMS: Mapping[str, tuple[Mapping[str, Any], Inputs, str]] = {
    "causal": (CAUSAL, PLAIN, "masked"),
    "window": (WINDOW, PLAIN, "masked"),
    "mask": ({}, PLAIN | {"mask": MASK}, "masked"),
    "key": ({}, PLAIN | {"key_lengths": LENGTHS}, "masked"),
    "groups": ({}, GROUPED, "raw_scores"),
    "softcap": ({"softcap": 2.0}, PLAIN | {"bias": BIAS, "mask": MASK}, "capped"),
    "softcap_after_the_mask": ({"softcap": 2.0}, PLAIN | {"bias": BIAS, "mask": MASK}, "masked"),
    "bias": ({}, PLAIN | {"bias": BIAS}, "biased"),
    "scale": ({}, PLAIN, "scores"),
    "explicit": ({"scale": 0.7}, PLAIN, "scores"),
    "top-left": (LOWER, PLAIN, "masked"),
    "window-from-the-left": (WINDOW | {"alignment": "bottom_right"}, PLAIN, "masked"),
}
"""Options, inputs, and the stage that goes wrong, by what the names of faults begin with."""
OWN: Mapping[str, Compute] = {
    "top-left": attend(**CAUSAL),
    "window-from-the-left": attend(**WINDOW),
    "window both ends": attend(window=(1, 0)),
    "scale of values": attend(scale=3**-0.5),
    "scale fitted": attend(scale=0.31),
    "scale of zero": attend(scale=0.0),
}
"""What no fault of the catalogue does."""
ENDS = "the case means [2, 1], ends included"
CONVENTIONS = {
    "causal_aligned_bottom_right": "causality is aligned bottom-right (key j for query i iff j <= i + Lk - Lq); "
    "the case means top-left",
    "top-left": "causality is aligned top-left (key j for query i iff j <= i); the case means bottom-right",
    "window-from-the-left": "the window is aligned top-left (query i stands at key i); the case means bottom-right",
    "window_one_key_too_few_before": f"the window is one key too narrow on the left: [1, 1]; {ENDS}",
    "window_one_key_too_many_after": f"the window is one key too wide on the right: [2, 2]; {ENDS}",
    "window both ends": f"the window is one key too narrow on the left and the right: [1, 0]; {ENDS}",
    "mask_inverted": "the mask is read as True = may not attend; the case means True = may attend",
    "key_lengths_one_too_long": "a key length is taken for the last key's index; the case means the number of keys",
    "groups_tiled": "query head h takes key and value head h % Hkv (tiled); "
    "the case means head h // (H / Hkv) (repeated)",
    "softcap_after_the_bias": "the softcap is applied after the bias; the case means before it",
    "softcap_after_the_mask": "the softcap is applied after the mask, and masked keys have the logit -softcap; "
    "the case means before it",
}
MISTAKES = {
    "causal_ignored": "causality is ignored",
    "mask_ignored": "the mask is ignored",
    "mask_added_as_zero_and_one": "the mask is added to the scores as the numbers 0 and 1",
    "window_ignored": "the window is ignored",
    "key_lengths_ignored": "the key lengths are ignored",
    "bias_ignored": "the bias is ignored",
    "bias_scaled_with_scores": "the bias is added before the scores are scaled",
    "softcap_ignored": "the softcap is ignored",
    "scale_missing": "the default scale is 1: give scale, or divide by sqrt(D)",
    "scale_applied_twice": "the default scale is 1/D: give scale, or divide by sqrt(D)",
    "scale of values": "the default scale is 1/sqrt(Dv): give scale, or divide by sqrt(D)",
    "scale_of_model_width": "the output is exactly that of scale 0.1768, 1/sqrt(H D) or half as large, "
    "instead of 0.3536",
    "explicit_scale_ignored": "the output is exactly that of scale 0.3536, the default 1/sqrt(D), instead of 0.7",
    "scale fitted": "the output is that of scale 0.31 (given 0.3536)",
    "scale of zero": "the output is that of scale 0 (given 0.3536)",
}


def faulty(name: str, dtype: str, returned: tuple[str, ...] = ()) -> tuple[JudgedStages, str]:
    """Diagnose a fault of the catalogue, or one of the test's own, and return the stage that goes wrong."""
    options, inputs, stage = PROBLEMS.get(name) or PROBLEMS[re.split("[ _]", name)[0]]

    def of_catalogue(given: Inputs) -> Stages:
        called = Problem("attention", dict(options), given).called()
        return dict(variant_named(name).attention(**called.inputs, **called.options))

    return diagnosed(options, inputs, OWN.get(name, of_catalogue), dtype, returned), stage


@pytest.mark.parametrize("name", CONVENTIONS)
def test_another_convention_is_semantic_and_named_with_its_stage(name: str) -> None:
    for dtype, returned in product(DTYPES, ((), ("output",))):
        judged, stage = faulty(name, dtype, returned)
        assert set(failing(judged).values()) == {Verdict.SEMANTIC}
        assert "output" in failing(judged)
        assert {found.message for found in judged.judgements if found.verdict.exit_code} == {CONVENTIONS[name]}
        begins_at = "biased" if name == "softcap_after_the_bias" and not returned else stage
        assert (judged.begins_at, judged.excused) == (begins_at, frozenset())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_stays_numeric_and_is_told_with_the_stage_where_it_lies(name: str) -> None:
    for dtype in DTYPES:
        judged, stage = faulty(name, dtype, ("output",))
        (found,) = judged.judgements
        assert (found.verdict, judged.begins_at) == (Verdict.NUMERIC, stage)
        assert found.message.startswith(f"{MISTAKES[name]}; ")
        assert "times the largest error that is possible" in found.message


def with_rows(value: float, dtype: str = "float64", of: Compute | None = None) -> Compute:
    """Return attention (``of``, or the right one) whose weights in rows without a key are all this number."""

    def compute(inputs: Inputs) -> Stages:
        stages = dict((of or attend())(inputs))
        empty = stages["log_sum_exp"][..., np.newaxis] == -np.inf
        stages["weights"] = np.where(empty, np.array(value, dtype), stages["weights"])
        return stages | {"output": stages["weights"] @ inputs["value"]}

    return compute


EMPTY = MASK.copy()
EMPTY[0, 0, 2] = EMPTY[1, 0, 0] = False
SAYS = {
    "nan": "a query without a key gives NaN; the case expects",
    "uniform": "a query without a key gives the mean of all values (uniform); the case expects",
    "zero": "a query without a key gives zero; the case expects",
}
FILLED = {"nan": np.nan, "uniform": 1 / 7, "zero": 0.0}


@pytest.mark.parametrize("expected", SAYS)
@pytest.mark.parametrize("given", SAYS)
def test_rows_without_a_key_follow_the_convention_of_the_case(given: str, expected: str) -> None:
    options, inputs = {"empty_rows": expected}, PLAIN | {"mask": EMPTY}
    for dtype, stages in product(DTYPES, (("output",), ("weights", "output"), ())):
        judged = diagnosed(options, inputs, with_rows(FILLED[given], dtype), dtype, stages)
        messages = {found.message for found in judged.judgements if found.verdict.exit_code}
        if given == expected:
            assert (failing(judged), judged.begins_at) == ({}, "")
            continue
        assert failing(judged) == dict.fromkeys(stages or ("weights", "output"), Verdict.SEMANTIC)
        assert messages == {f"{SAYS[given]} {expected}"}
        assert (judged.begins_at, judged.excused) == ("weights", frozenset())


@pytest.mark.parametrize(("given", "declared"), [("uniform", "uniform"), ("nan", "nan"), ("nan", "uniform")])
def test_a_convention_that_is_declared_is_known(given: str, declared: str) -> None:
    inputs = PLAIN | {"mask": EMPTY}
    judged = diagnosed({}, inputs, with_rows(FILLED[given]), own=OwnEmptyRows(declared))
    known = given == declared
    assert judged.excused == ({"weights", "output"} if known else set())
    assert set(failing(judged).values()) == {Verdict.SEMANTIC}
    assert judged.judgements[-1].message.endswith("the case expects zero" + " (declared)" * known)


def test_rows_that_are_empty_only_under_the_other_convention_are_told_too() -> None:
    def nan_rows(inputs: Inputs) -> Stages:
        stages = attend(**LOWER)(inputs)
        empty = stages["log_sum_exp"][..., np.newaxis] == -np.inf
        return {"output": np.where(empty, np.nan, stages["output"])}

    judged = diagnosed(CAUSAL, FEW_KEYS, nan_rows)
    (found,) = judged.judgements
    assert (found.verdict, found.empty_rows) == (Verdict.SEMANTIC, None)
    assert found.message == (
        "causality is aligned bottom-right (key j for query i iff j <= i + Lk - Lq); the case means top-left; "
        "a query without a key gives NaN; the case expects zero"
    )


SCALED = attend(scale=1.0)
SAYS_SCALED = "the output is exactly that of scale 1 instead of 0.3536"


@pytest.mark.parametrize("given", ["nan", "uniform"])
def test_a_mistake_beside_a_declared_convention_is_still_told_and_has_the_size_of_the_mistake_alone(given: str) -> None:
    def both(inputs: Inputs) -> Stages:
        return {"output": with_rows(FILLED[given], of=SCALED)(inputs)["output"]}

    judged = diagnosed({}, PLAIN | {"mask": EMPTY}, both, own=OwnEmptyRows(given))
    (found,) = judged.judgements
    assert found.verdict is Verdict.NUMERIC
    assert found.message.startswith(f"{SAYS_SCALED}; {SAYS[given]} zero; ")
    assert found.accumulated is not None
    assert 1 < found.accumulated.ratio < np.inf
    assert (judged.begins_at, judged.excused) == ("scores", frozenset())


def test_what_a_declared_convention_does_not_explain_fails_on_its_own() -> None:
    def both(inputs: Inputs) -> Stages:
        stages = with_rows(1 / 7)(inputs)
        return stages | {"log_sum_exp": stages["log_sum_exp"] * (1 + 1e-6)}

    judged = diagnosed({}, PLAIN | {"mask": EMPTY}, both, own=OwnEmptyRows("uniform"))
    assert failing(judged) == {
        "weights": Verdict.SEMANTIC,
        "log_sum_exp": Verdict.NUMERIC,
        "output": Verdict.SEMANTIC,
    }
    assert (judged.begins_at, judged.excused) == ("log_sum_exp", {"weights", "output"})


def test_what_nothing_explains_is_judged_by_what_is_declared() -> None:
    noise = 1 + 1e-6 * np.random.default_rng(6).standard_normal((2, 4, 5, 3))

    def both(inputs: Inputs) -> Stages:
        return {"output": with_rows(1 / 7)(inputs)["output"] * noise}

    for own in (OwnEmptyRows(), OwnEmptyRows("uniform"), OwnEmptyRows(recorded=("nan", "uniform"))):
        judged = diagnosed({}, PLAIN | {"mask": EMPTY}, both, own=own)
        (found,) = judged.judgements
        assert (found.verdict, judged.diagnosis, judged.excused) == (Verdict.NUMERIC, None, frozenset())
        assert found.accumulated is not None
        assert (found.accumulated.ratio == np.inf) is (own == OwnEmptyRows())


# What an implementation was not asked for.


NOT_ASKED = OwnEmptyRows(is_asked=False)


@pytest.mark.parametrize("expected", ["uniform", "nan"])
@pytest.mark.parametrize("given", SAYS)
@pytest.mark.parametrize("stages", [("output",), ()])
def test_what_was_not_asked_for_a_convention_may_follow_another(
    given: str, expected: str, stages: tuple[str, ...]
) -> None:
    options, inputs = {"empty_rows": expected}, PLAIN | {"mask": EMPTY}
    judged = diagnosed(options, inputs, with_rows(FILLED[given]), stages=stages, own=NOT_ASKED)
    if given == expected:
        assert (failing(judged), judged.excused) == ({}, frozenset())
        return
    assert failing(judged) == dict.fromkeys(stages or ("weights", "output"), Verdict.SEMANTIC)
    assert judged.excused == failing(judged).keys()
    assert judged.reason == f"{SAYS[given]} {expected}, for which it has no keyword empty_rows"
    assert {found.empty_rows for found in judged.judgements if found.verdict.exit_code} == {given}


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("given", ["zero", "nan"])
def test_what_was_asked_for_a_convention_and_gives_another_fails_whatever_it_declares(
    given: str, is_declared: bool
) -> None:
    own = OwnEmptyRows(given if is_declared else None)
    judged = diagnosed({"empty_rows": "uniform"}, PLAIN | {"mask": EMPTY}, with_rows(FILLED[given]), own=own)
    assert set(failing(judged).values()) == {Verdict.SEMANTIC}
    assert judged.excused == frozenset()


# What is known of an implementation, and not declared.


def test_a_convention_that_is_recorded_is_told_and_left_to_the_record() -> None:
    own = OwnEmptyRows(recorded=("uniform", "nan"))
    judged = diagnosed({}, PLAIN | {"mask": EMPTY}, with_rows(np.nan), own=own)
    assert failing(judged) == dict.fromkeys(("weights", "output"), Verdict.SEMANTIC)
    assert {found.empty_rows for found in judged.judgements if found.verdict.exit_code} == {"nan"}
    assert judged.excused == frozenset()


# What is not recognised.


@pytest.mark.parametrize("wrong", [0.5, 1e-9])
def test_an_error_in_one_place_is_no_convention(wrong: float) -> None:
    def one_wrong(inputs: Inputs) -> Stages:
        stages = attend(**CAUSAL)(inputs)
        stages["output"][1, 2, 3, 1] += wrong
        return stages

    judged = diagnosed(CAUSAL, PLAIN | {"mask": MASK, "bias": BIAS}, one_wrong)
    assert (failing(judged), judged.diagnosis) == ({"output": Verdict.NUMERIC}, None)
    assert judged.begins_at == "output"


def test_a_reading_that_gives_the_same_answer_is_none() -> None:
    # On square scores both alignments are one; what is wrong here is something else.
    inputs = PLAIN | {"key": KEY[:, :, :5], "value": VALUE[:, :, :5]}
    judged = diagnosed(CAUSAL, inputs, lambda given: {"output": 1.001 * attend(**CAUSAL)(given)["output"]})
    assert judged.diagnosis is None


def test_a_stage_that_no_reading_explains_leaves_all_unexplained() -> None:
    def two_wrongs(inputs: Inputs) -> Stages:
        stages = attend(**LOWER)(inputs)
        return stages | {"output": stages["output"] * 1.5}

    judged = diagnosed(CAUSAL, PLAIN, two_wrongs)
    assert judged.diagnosis is None
    assert Verdict.SEMANTIC not in failing(judged).values()


def test_large_problems_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_implementation, "MAX_ELEMENTS", QUERY[..., 0].size * 7 - 1)
    assert diagnosed(CAUSAL, PLAIN, attend(**LOWER)).diagnosis is None
    monkeypatch.setattr(judge_implementation, "MAX_ELEMENTS", QUERY[..., 0].size * 7)
    assert diagnosed(CAUSAL, PLAIN, attend(**LOWER)).diagnosis is not None


# A query that holds NaN.

POISONED = QUERY.copy()
POISONED[0, 1, 2, 3] = np.nan


def test_a_nan_score_may_leave_the_weights_of_forbidden_keys_at_zero_and_no_others() -> None:
    def confined(inputs: Inputs) -> Stages:
        stages = attend(**CAUSAL)(inputs)
        return stages | {"weights": np.where(np.isneginf(stages["masked"]), 0.0, stages["weights"])}

    def swallowed(inputs: Inputs) -> Stages:
        stages = confined(inputs)
        return stages | {"weights": np.nan_to_num(stages["weights"])}

    inputs = PLAIN | {"query": POISONED}
    assert failing(diagnosed(CAUSAL, inputs, confined)) == {}
    assert failing(diagnosed(CAUSAL, inputs, swallowed)) == {"weights": Verdict.NONFINITE}


@pytest.mark.parametrize("stages", [(), ("output",)])
def test_nan_that_is_swallowed_is_nonfinite(stages: tuple[str, ...]) -> None:
    judged = diagnosed(
        CAUSAL, PLAIN | {"query": POISONED}, changed(attend(**CAUSAL), query=np.nan_to_num), stages=stages
    )
    assert set(failing(judged).values()) == {Verdict.NONFINITE}
    assert judged.begins_at == ("output" if stages else "raw_scores")
    assert all(found.message.startswith("NaN swallowed: ") for found in judged.judgements)


def test_nan_that_reaches_other_rows_is_nonfinite() -> None:
    def spread(inputs: Inputs) -> Stages:
        output = attend()(inputs)["output"]
        return {"output": np.where(np.isnan(output).any(axis=-2, keepdims=True), np.nan, output)}

    judged = diagnosed({}, PLAIN | {"query": POISONED}, spread)
    assert failing(judged) == {"output": Verdict.NONFINITE}
    assert judged.judgements[0].message.startswith("nan where the exact value is ")


# Mistakes that are no option's, and steps that were computed as other steps.


def over_heads(inputs: Inputs) -> Stages:
    scores = reference.dot_scores(inputs["query"], inputs["key"])["scores"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = powers / powers.sum(axis=1, keepdims=True)
    return {"weights": weights, "output": weights @ inputs["value"]}


def zeroed_behind(inputs: Inputs) -> Stages:
    weights = np.where(inputs["mask"], attend()({name: inputs[name] for name in PLAIN})["weights"], 0)
    return {"weights": weights, "output": weights @ inputs["value"]}


def last_row_open(inputs: Inputs) -> Stages:
    mask = inputs["mask"].copy()
    mask[..., -1, :] = True
    return attend()({**inputs, "mask": mask})


def times(factor: float) -> Compute:
    return changed(attend(), bias=lambda bias: bias * bias.dtype.type(factor))


def outputs_times(factor: float) -> Compute:
    return lambda inputs: {"output": attend()(inputs)["output"] * inputs["query"].dtype.type(factor)}


def unscaled_weights(inputs: Inputs) -> Stages:
    """Multiply weights and output by the number of keys, as a sum in the place of a mean does."""
    stages, keys = attend()(inputs), inputs["key"].shape[-2]
    return {name: stages[name] * inputs["query"].dtype.type(keys) for name in ("weights", "output")}


SQUARE = PLAIN | {"value": np.roll(KEY, 2, -2) / 2}
OTHERS: Mapping[str, tuple[Inputs, Compute, tuple[str, ...]]] = {
    "last-row-unmasked": (PLAIN | {"mask": MASK}, last_row_open, ("output",)),
    "bias-negated": (PLAIN | {"bias": BIAS}, times(-1), ("output",)),
    "bias-unscaled": (PLAIN | {"bias": BIAS}, times(8**0.5), ("output",)),
    "bias-fitted": (PLAIN | {"bias": BIAS}, times(0.3), ("output",)),
    "value-read-as-key": (SQUARE, lambda inputs: attend()({**inputs, "value": inputs["key"]}), ("output",)),
    "key-read-as-value": (SQUARE, lambda inputs: attend()({**inputs, "key": inputs["value"]}), ("output",)),
    "softmax-over-heads": (PLAIN, over_heads, ("weights", "output")),
    "output-doubled": (PLAIN, outputs_times(2), ()),
    "output-negated": (PLAIN, outputs_times(-1), ()),
    "output-over-root-of-width": (PLAIN, outputs_times(8**-0.5), ()),
    "output-times-width": (PLAIN, outputs_times(8), ()),
    "output-over-keys": (PLAIN, outputs_times(1 / 7), ()),
    "output-times-keys": (PLAIN, unscaled_weights, ()),
    "weights-not-renormalised": (PLAIN | {"mask": MASK}, zeroed_behind, ("output",)),
    "log-sum-exp-base-2": (
        PLAIN,
        lambda inputs: {"log_sum_exp": attend()(inputs)["log_sum_exp"] / inputs["query"].dtype.type(np.log(2))},
        (),
    ),
}
"""What no fault of the catalogue is, or none of a case of its own topic shows: ``test_readings.py`` has the others."""


@pytest.mark.parametrize("name", OTHERS)
def test_another_step_or_operand_is_named(name: str) -> None:
    inputs, compute, stages = OTHERS[name]
    for dtype in DTYPES:
        judged = diagnosed({}, inputs, compute, dtype, stages)
        assert judged.diagnosis is not None
        assert judged.diagnosis.name == name
        assert set(failing(judged).values()) == {Verdict.NUMERIC}


HEADS = {name: DRAWN.standard_normal((2, 5, 6)) for name in ("query", "key", "value")}
HEADS |= {f"{name}_weight": DRAWN.standard_normal((6, 6)) for name in ("query", "key", "value", "output")}
HEADS |= {f"{name}_bias": DRAWN.standard_normal(6) for name in ("query", "key", "value", "output")}


# How accurate a wrong result is.


def in_precision(dtype: Any) -> Compute:
    def compute(inputs: Inputs) -> Stages:
        return {"output": attend()({name: inputs[name].astype(dtype) for name in PLAIN})["output"].astype(wide(inputs))}

    def wide(inputs: Inputs) -> Any:
        return inputs["query"].dtype

    return compute


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "accuracy-of-float32"), (np.float16, "accuracy-of-16-bits")])
def test_the_accuracy_of_a_lower_precision_is_told(dtype: Any, name: str) -> None:
    judged = diagnosed({}, PLAIN, in_precision(dtype))
    assert judged.diagnosis is not None
    assert judged.diagnosis.name == name
    (found,) = judged.judgements
    assert found.verdict is Verdict.NUMERIC
    assert found.message.startswith(
        f"the output is as accurate as {name.removeprefix('accuracy-of-').replace('-', ' ')}"
    )


def test_an_error_of_that_size_in_proportion_to_the_answer_is_no_accuracy() -> None:
    judged = diagnosed({}, PLAIN, lambda inputs: {"output": attend()(inputs)["output"] * (1 + 1e-7)})
    assert judged.diagnosis is None
    assert "accuracy-of-float32" in judged.findings.refuted


# What one case cannot tell.


def test_a_convention_beside_others_says_that_the_case_does_not_tell() -> None:
    inputs = {"query": QUERY[..., :1, :], "key": KEY, "value": VALUE}
    judged = diagnosed(CAUSAL, inputs, attend(), stages=("output",))
    (found,) = judged.judgements
    assert found.verdict is Verdict.SEMANTIC
    assert "causality is aligned bottom-right" in found.message
    assert "causality is ignored" in found.message
    assert found.message.endswith("this case does not tell them apart)")


def test_a_reading_that_would_change_a_stage_that_is_right_does_not_fit() -> None:
    def only_output(inputs: Inputs) -> Stages:
        return attend(**CAUSAL)(inputs) | {"output": attend()(inputs)["output"]}

    judged = diagnosed(CAUSAL, PLAIN, only_output)
    assert judged.diagnosis is None
    assert "causality-ignored" not in {each.name for each in judged.findings.fits}


def test_masked_keys_with_weight_are_told_as_that() -> None:
    def leaking(inputs: Inputs) -> Stages:
        stages = attend()(inputs)
        return {"weights": np.where(stages["weights"] == 0, 1e-10, stages["weights"])}

    judged = diagnosed({}, PLAIN | {"mask": MASK}, leaking)
    (found,) = judged.judgements
    count = 4 * int((~MASK).sum())
    says = f"{count} masked keys have weight, up to 1e-10: a key that may not be attended to must have exactly 0"
    assert found.message.startswith(says)


def test_whoever_fails_a_case_first_changes_no_diagnosis_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[float | None] = []
    run = residuals.run_operation

    def counted(backend: Any, operation: str, inputs: Inputs, options: Mapping[str, Any]) -> Stages:
        evaluated.append(options.get("scale"))
        return dict(run(backend, operation, inputs, options))

    monkeypatch.setattr(residuals, "run_operation", counted)
    inputs = PLAIN | {"bias": BIAS}
    truth = find_truth(Problem("attention", {}, inputs), "float64", supports_statistics=True)
    for compute in (
        attend(scale=0.123),
        changed(attend(), bias=lambda bias: 0.37 * bias),
        lambda inputs: {name: each.astype(np.float32).astype(np.float64) for name, each in attend()(inputs).items()},
        attend(scale=-0.211),
    ):
        stages = compute(inputs)
        shapes = {name: array.shape for name, array in stages.items()}
        evaluated.clear()
        found = judge_and_diagnose(truth, stages, shapes, "native")
        again = len(evaluated)
        evaluated.clear()
        alone = diagnosed({}, inputs, compute)
        assert [each.name for each in found.findings.fits] == [each.name for each in alone.findings.fits]
        assert [each.description for each in found.findings.fits] == [each.description for each in alone.findings.fits]
        assert found.findings.refuted == alone.findings.refuted
        assert found.judgements == alone.judgements
    assert 0 < again < len(evaluated) / 2, "what is tried whatever was returned is worked out once"
