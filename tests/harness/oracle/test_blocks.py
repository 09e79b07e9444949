"""Results with keys in blocks: the same truth as that of a score matrix that is held whole."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.execution.worker import Computed
from attncheck.judging.judge import judge
from attncheck.judging.truth import Truth, find_truth
from attncheck.oracle import blocks as oracle_blocks
from attncheck.oracle import bounds_by_rows as by_rows
from attncheck.oracle.blocks import are_blocked, exact_results
from attncheck.oracle.enclosure import Enclosure
from attncheck.oracle.evaluate import OutsideDomain, exact_stages
from attncheck.reading.canonical import canonical_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs

Array = NDArray[Any]
RESULTS = ("log_sum_exp", "output")
BATCH, HEADS, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 4, 9, 13, 6, 5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several blocks of a few keys, and bound a few rows at a time."""
    monkeypatch.setattr(oracle_blocks, "ELEMENTS_AT_A_TIME", 1)
    monkeypatch.setattr(oracle_blocks, "_MIN_KEYS", 3)
    monkeypatch.setattr(by_rows, "ELEMENTS_AT_A_TIME", BATCH * HEADS * KEYS * 2)
    monkeypatch.setattr(oracle_blocks, "MIN_ELEMENTS", 0)


def drawn(seed: int, dtype: str = "float64", kv_heads: int = HEADS) -> dict[str, Array]:
    random = np.random.RandomState(seed)
    shapes = {
        "query": (BATCH, HEADS, QUERIES, WIDTH),
        "key": (BATCH, kv_heads, KEYS, WIDTH),
        "value": (BATCH, kv_heads, KEYS, VALUE_WIDTH),
    }
    return {name: random.randn(*shape).astype(dtype) for name, shape in shapes.items()}


def masked(seed: int) -> dict[str, Array]:
    random = np.random.RandomState(seed)
    mask = random.rand(BATCH, 1, QUERIES, KEYS) < 0.6
    mask[1, 0, 4] = False
    return {"mask": mask}


def biased(seed: int) -> dict[str, Array]:
    bias = np.random.RandomState(seed).randn(1, HEADS, QUERIES, KEYS)
    bias[:, 1, 2, 3:] = -np.inf
    bias[:, 2, 5] = -np.inf
    return {"bias": bias}


PROBLEMS: Mapping[str, tuple[dict[str, Any], dict[str, Array]]] = {
    "plain": ({}, drawn(1)),
    "scale": ({"scale": -0.7}, drawn(2)),
    "causal": ({"is_causal": True}, drawn(3)),
    "bottom-right": ({"is_causal": True, "alignment": "bottom_right"}, drawn(4)),
    "mask": ({}, drawn(5) | masked(5)),
    "mask and causality": ({"is_causal": True}, drawn(6) | masked(6)),
    "one mask for all queries": ({}, drawn(7) | {"mask": np.arange(KEYS)[np.newaxis, np.newaxis, np.newaxis] % 5 > 1}),
    "one column of a bias": ({}, drawn(8) | {"bias": np.random.RandomState(8).randn(1, HEADS, QUERIES, 1)}),
    "bias": ({}, drawn(9) | biased(9)),
    "bias, mask, softcap": ({"softcap": 1.5, "is_causal": True}, drawn(10) | biased(10) | masked(10)),
    "window": ({"window": (4, 1)}, drawn(11)),
    "key lengths": ({}, drawn(12) | {"key_lengths": np.array([13, 5])}),
    "no key at all": ({}, drawn(13) | {"key_lengths": np.array([0, 5])}),
    "even rows": ({"empty_rows": "uniform"}, drawn(14) | {"key_lengths": np.array([0, 5])}),
    "mask of queries": ({}, drawn(15) | {"query_mask": np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES) % 3 > 0}),
    "past": (
        {"is_causal": True},
        drawn(16)
        | {"past_key": np.full((BATCH, HEADS, 4, WIDTH), 0.3), "past_value": np.ones((BATCH, HEADS, 4, VALUE_WIDTH))},
    ),
    "grouped heads": ({"is_causal": True}, drawn(17, kv_heads=2)),
    "one head of keys": ({}, drawn(18, kv_heads=1)),
    "large scores": ({"scale": 1e4}, drawn(19)),
    "huge scores": ({"scale": 1e12}, drawn(20)),
    "float32": ({"is_causal": True}, drawn(21, "float32")),
    "float16": ({}, drawn(22, "float16")),
}


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Array]]:
    return PROBLEMS[str(request.param)]


def assert_overlap(own: Enclosure, other: Enclosure) -> None:
    """Both are of the same number."""
    assert own.shape == other.shape
    same = np.isinf(own.high) & (own.high == other.high)
    with np.errstate(invalid="ignore"):
        apart = np.abs((own.high - other.high) + (own.low - other.low))
    assert (same | (apart <= 2 * (own.radius + other.radius))).all()


def results(options: Mapping[str, Any], inputs: Mapping[str, Array]) -> Mapping[str, Enclosure]:
    found = exact_results("attention", options, inputs, RESULTS)
    assert found is not None
    return found.exact


def test_blocks_enclose_what_the_whole_encloses(problem: tuple[dict[str, Any], dict[str, Array]]) -> None:
    options, inputs = problem
    posed = canonical_form("attention", options, inputs)
    posed.options.update({name: options[name] for name in ("empty_rows",) if name in options})
    found = exact_results("attention", posed.options, posed.inputs, RESULTS)
    assert found is not None
    whole = exact_stages("attention", posed.options, posed.inputs)
    assert found.exact.keys() == set(RESULTS)
    assert_overlap(found.exact["output"], whole["output"])
    if "empty_rows" not in options:  # what log_sum_exp is of an even row is nobody's convention
        assert_overlap(found.exact["log_sum_exp"], whole["log_sum_exp"])
    # What bounds need besides: the last logits and the weights, and what the last logits follow from.
    assert found.inner.keys() == whole.keys() - set(RESULTS) - {"raw_scores"}
    places = whole[next(stage for stage in ("masked", "biased", "capped", "scores") if stage in whole)].high > -np.inf
    for stage, array in found.inner.items():
        np.testing.assert_allclose(array[places], whole[stage].high[places], rtol=2.0**-42, atol=1e-300)
    assert (found.inner["weights"][~places] == whole["weights"].high[~places]).all()


def test_bounds_by_rows_are_those_of_the_whole_or_tighter(problem: tuple[dict[str, Any], dict[str, Array]]) -> None:
    options, inputs = problem
    dtype = str(inputs["query"].dtype)
    name = "fused" if dtype == "float16" else "native"
    blocked = truth_of(options, inputs, dtype, returned=["output", "log_sum_exp"])
    assert blocked.inner
    whole = truth_of(options, inputs, dtype)
    assert not whole.inner
    for stage, bound in blocked.bounds(name).items():
        other = whole.bounds(name)[stage]
        # The logarithm of a sum of weights just below 1 comes in steps of 2^-53.
        step = 2.0**-51 if stage == "log_sum_exp" else 0.0
        assert (bound.max_error <= other.max_error * (1 + 1e-9) + step).all()
        # Tighter, but never by more than the extremes of the values and the lowest bits of the keys explain.
        assert (bound.max_error >= 0.2 * other.max_error).all()
        assert (bound.sigma <= bound.max_error).all()
        np.testing.assert_allclose(bound.sigma, np.minimum(other.sigma, bound.max_error), rtol=1e-6)


def truth_of(options: dict[str, Any], inputs: dict[str, Array], dtype: str, **more: Any) -> Truth:
    return find_truth("attention", options, inputs, dtype, supports_statistics=True, **more)


def test_a_step_that_follows_from_nothing_returned_is_the_accumulated_one() -> None:
    options, inputs = PROBLEMS["causal"]
    truth = truth_of(options, inputs, "float64", returned=["output"])
    step = truth.introduced("output", {"output": np.zeros(truth.exact["output"].shape)}, "native")
    assert step is not None
    assert step[0] is truth.exact["output"]
    assert step[1] is truth.bounds("native")["output"]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float64", "float32", "float16"]),
    st.floats(-30, 30),
    st.booleans(),
    st.integers(1, 7),
)
@settings(max_examples=25, deadline=None)
def test_blocks_of_any_size_enclose_what_the_whole_encloses(
    seed: int, dtype: str, scale: float, is_causal: bool, keys: int
) -> None:
    inputs, options = drawn(seed, dtype, kv_heads=2), {"scale": scale, "is_causal": is_causal}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_blocks, "_MIN_KEYS", keys)
        found = results(options, inputs)
    whole = exact_stages("attention", options, inputs, RESULTS)
    for stage in RESULTS:
        assert_overlap(found[stage], whole[stage])


def test_a_mean_that_can_be_worked_out_by_hand() -> None:
    # Equal scores: the mean of 0 .. 12, and the logarithm of 13.
    inputs = {"query": np.zeros((1, 1, 1, 2)), "key": np.ones((1, 1, KEYS, 2))}
    inputs["value"] = np.arange(float(KEYS)).reshape(1, 1, KEYS, 1)
    found = results({}, inputs)
    assert abs(Fraction(float(found["output"].high[0, 0, 0, 0])) - 6) <= Fraction(float(found["output"].radius.item()))
    assert found["log_sum_exp"].high.item() == math.log(13)


def test_values_that_cancel_are_settled() -> None:
    # The weights of both keys are all but equal: what is left is 2^-60 of the values.
    inputs = {"query": np.array([[[[2.0**-30, 0.0]]]]), "key": np.array([[[[2.0**-30, 1.0], [0.0, 1.0]]]])}
    inputs["value"] = np.array([[[[1.0], [-1.0]]]])
    found = results({"scale": 1.0}, inputs)["output"]
    assert found.high.item() == pytest.approx(math.tanh(2.0**-61), rel=1e-12)
    assert found.radius.item() <= 2.0**-80


def test_a_value_that_is_not_finite_is_outside_the_domain() -> None:
    inputs = drawn(1)
    inputs["value"][0, 0, 0, 0] = np.nan
    with pytest.raises(OutsideDomain, match="value holds NaN"):
        exact_results("attention", {}, inputs, RESULTS)


@pytest.mark.parametrize(
    ("operation", "options", "stages", "blocked"),
    [
        ("attention", {}, {"output"}, True),
        ("attention", {}, {"output", "log_sum_exp"}, True),
        ("attention", {}, {"output", "weights"}, False),
        ("attention", {"softcap_follows": "biased"}, {"output"}, False),
        ("multi_head_attention", {}, {"output"}, False),
        ("softmax", {}, {"log_sum_exp"}, False),
    ],
)
def test_what_is_blocked(operation: str, options: dict[str, Any], stages: set[str], blocked: bool) -> None:
    assert are_blocked(operation, options, drawn(1), stages) is blocked


@pytest.mark.parametrize("scale", [1e17, 1e300])
def test_logits_that_two_numbers_do_not_hold_are_worked_out_as_ever(scale: float) -> None:
    inputs = drawn(1)
    assert exact_results("attention", {"scale": scale}, inputs, RESULTS) is None
    truth = truth_of({"scale": scale}, inputs, "float64", returned=["output"])
    assert not truth.inner
    assert "weights" in truth.exact


def test_small_problems_keep_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_blocks, "MIN_ELEMENTS", BATCH * HEADS * QUERIES * KEYS)
    truth = truth_of({}, drawn(1), "float64", returned=["output"])
    assert not truth.inner
    assert "weights" in truth.exact


NUMBERS = """
title: A case with numbers
source: {kind: derivation, title: none}
operation: attention
cases:
  - name: Equal scores
    inputs:
      query: {constant: 0, shape: [2, 1]}
      key: {constant: 1, shape: [4, 1]}
      value: {ascending: [0, 1], shape: [4, 1]}
    expect: [{stage: weights, because: one over the number of keys, known: "0.25 0.25 0.25 0.25\\n0.25 0.25 0.25 0.25"}]
"""


def test_stages_whose_numbers_are_known_are_worked_out_whoever_returned_them(
    load_text: Callable[[str], list[Case]], compute: Callable[[Case, str], tuple[Inputs, dict[str, Array]]]
) -> None:
    (case,) = load_text(NUMBERS)
    inputs, stages = compute(case, "float64")
    outcomes = {"a": Computed({"output": stages["output"]})}
    found = judge(case, "float64", inputs, outcomes, {"a": "native"})
    assert not found.disagrees
    assert "weights" in found.truth.exact
    without = replace(case, expected=())
    assert judge(without, "float64", inputs, outcomes, {"a": "native"}).truth.inner


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (100, 0)}, {}], ids=["causal", "window", "lengths"]
)
def test_nothing_of_the_size_of_the_score_matrix_is_made(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in ((oracle_blocks, 1 << 13), (by_rows, 1 << 13)):
        monkeypatch.setattr(module, "ELEMENTS_AT_A_TIME", limit)
    monkeypatch.setattr(oracle_blocks, "_MIN_KEYS", 64)
    length = 4096
    random = np.random.RandomState(0)
    inputs = {name: random.randn(1, 1, length, 4).astype("float32") for name in ("query", "key", "value")}
    if not options:
        inputs["key_lengths"] = np.array([3000])
        inputs["query_mask"] = np.arange(length)[np.newaxis] % 2 == 0
    tracemalloc.start()
    try:
        truth = truth_of(options, inputs, "float32", returned=["output"])
        truth.bounds("native")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert truth.exact["output"].shape == (1, 1, 64, 4)
    assert truth.queries == length
    assert peak < length * length  # a byte for each score would be more
