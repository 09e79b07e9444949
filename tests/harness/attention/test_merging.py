"""Parts of attention, merged: exact answers, the bounds of the ways in which people merge, and what reaches what."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bound
from attncheck.attention.problem import Problem
from attncheck.attention.radii import propagate
from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.reading.canonical import canonical_form
from attncheck.reading.dtypes import rounded_once
from attncheck.reading.inputs import Inputs
from attncheck.spec import stage_dtype, statistics_dtype

Array = NDArray[Any]
Stages = dict[str, Array]
MODELS = [
    *(("float64", "native"), ("float32", "native"), ("float32", "tf32_products")),
    *(("float16", "fused"), ("float16", "eager"), ("bfloat16", "eager_pre")),
]


def drawn(parts: int = 4, size: float = 3.0, at: float = 0.0, seed: int = 3) -> Stages:
    rng = np.random.default_rng(seed)
    log_sum_exps = at + size * rng.standard_normal((parts, 2, 3, 5))
    return {"outputs": rng.standard_normal((parts, 2, 3, 5, 6)), "log_sum_exps": log_sum_exps}


def stored(inputs: Stages, dtype: str) -> Stages:
    wide = statistics_dtype(dtype)
    dtypes = {"outputs": dtype, "log_sum_exps": wide}
    return {name: np.ascontiguousarray(rounded_once(array, dtypes[name])) for name, array in inputs.items()}


def exact_of(inputs: Stages, base: str = "e") -> Stages:
    plain = canonical_form("merge_states", {"lse_base": base}, inputs)
    return {stage: each.high for stage, each in exact_stages("merge_states", plain.options, plain.inputs).items()}


def parts_of_attention(keys: int, cuts: tuple[int, ...]) -> tuple[Stages, Stages]:
    """Return attention on all keys, and the outputs and log_sum_exps of parts of them, all in float64 by the oracle."""
    rng = np.random.default_rng(11)
    query, key, value = (rng.standard_normal((1, 2, length, 5)) for length in (3, keys, keys))

    def attend(start: int, stop: int) -> Stages:
        inputs = {"query": query, "key": key[:, :, start:stop], "value": value[:, :, start:stop]}
        return {stage: each.high for stage, each in exact_stages("attention", {}, inputs).items()}

    edges = [0, *cuts, keys]
    found = [attend(*edge) for edge in pairwise(edges)]
    parts = {f"{name}s": np.stack([part[name] for part in found]) for name in ("output", "log_sum_exp")}
    return attend(0, keys), parts


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 9), (0, 4), (4, 4, 10, 10), ()])
def test_parts_of_attention_become_the_whole(cuts: tuple[int, ...]) -> None:
    whole, parts = parts_of_attention(10, cuts)
    merged = exact_of(parts)
    for stage in ("log_sum_exp", "output"):
        np.testing.assert_allclose(merged[stage], whole[stage], rtol=1e-13, atol=1e-15)


@given(at=st.sampled_from([0.0, -90.0, -800.0, 800.0]), seed=st.integers(0, 50), parts=st.integers(1, 6))
def test_base_two_is_base_e_in_other_units(at: float, seed: int, parts: int) -> None:
    inputs = drawn(parts, at=at, seed=seed)
    natural, binary = exact_of(inputs), exact_of(inputs | {"log_sum_exps": inputs["log_sum_exps"] / np.log(2)}, "2")
    allowed = 1e-15 * (abs(at) + 20)  # the quotient rounds once
    np.testing.assert_allclose(binary["log_sum_exp"] * np.log(2), natural["log_sum_exp"], rtol=0, atol=2 * allowed)
    np.testing.assert_allclose(binary["output"], natural["output"], rtol=0, atol=20 * allowed)


@given(seed=st.integers(0, 50), order=st.permutations(range(5)))
def test_the_order_of_the_parts_does_not_matter(seed: int, order: list[int]) -> None:
    inputs = drawn(5, seed=seed)
    other = exact_of({name: array[order] for name, array in inputs.items()})
    for stage, array in exact_of(inputs).items():
        expected = array[..., order] if stage == "weights" else array
        np.testing.assert_allclose(other[stage], expected, rtol=1e-15, atol=1e-300)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e300, 0.0])
def test_what_an_empty_part_gives_does_not_count(poison: float) -> None:
    inputs = drawn()
    without = exact_of({name: array[[0, 1, 3]] for name, array in inputs.items()})
    inputs["outputs"][2], inputs["log_sum_exps"][2] = poison, -np.inf
    merged = exact_of(inputs)
    assert (merged["weights"][..., 2] == 0).all()
    for stage in ("log_sum_exp", "output"):
        np.testing.assert_array_equal(merged[stage], without[stage])


def test_where_all_parts_are_empty_the_output_is_0_and_log_sum_exp_minus_infinity() -> None:
    inputs = drawn()
    inputs["log_sum_exps"][:, 0, 1, 2], inputs["outputs"][:, 0, 1, 2] = -np.inf, np.nan
    merged = exact_of(inputs)
    assert (merged["output"][0, 1, 2] == 0).all()
    assert (merged["weights"][0, 1, 2] == 0).all()
    assert merged["log_sum_exp"][0, 1, 2] == -np.inf
    assert np.isfinite(np.delete(merged["log_sum_exp"].ravel(), 7)).all()


# Ways to merge, in float32 or wider, and what is stored of them.


def in_sequence(outputs: Array, totals: Array) -> tuple[Array, Array]:
    output, total = outputs[0], totals[0]
    for own_output, own_total in zip(outputs[1:], totals[1:], strict=True):
        with np.errstate(all="ignore"):
            whole = np.logaddexp(total, own_total)
            shares = [np.exp(np.where(np.isneginf(each), -np.inf, each - whole)) for each in (total, own_total)]
        output = shares[0][..., None] * output + shares[1][..., None] * own_output
        total = whole
    return output, total


def by_a_logistic_function(outputs: Array, totals: Array) -> tuple[Array, Array]:
    """Merge as ring attention does (zhuzilin/ring-flash-attention, utils.py)."""
    output, total = outputs[0], totals[0]
    for own_output, own_total in zip(outputs[1:], totals[1:], strict=True):
        with np.errstate(all="ignore"):
            share = 1 / (1 + np.exp(total - own_total))
            share = np.where(np.isneginf(own_total), 0, np.where(np.isneginf(total), 1, share)).astype(total.dtype)
            above = np.where(np.isneginf(own_total), -np.inf, own_total - total)
            grown = np.where(above > 0, above, 0) + np.log1p(np.exp(-np.abs(above)))
            total = np.where(np.isneginf(total), own_total, total + grown).astype(total.dtype)
        output = output - share[..., None] * (output - own_output)
    return output, total


def in_powers_of_two(outputs: Array, totals: Array) -> tuple[Array, Array]:
    totals = totals * totals.dtype.type(1 / np.log(2))
    highest = totals.max(axis=0)
    shift = np.where(np.isneginf(highest), 0, highest)
    powers = np.exp2(totals - shift)
    total = powers.sum(axis=0)
    with np.errstate(divide="ignore"):
        whole = (shift + np.log2(total)) * totals.dtype.type(np.log(2))
    mean = (powers[..., None] * outputs).sum(axis=0)
    return np.asarray(mean / np.where(total == 0, 1, total)[..., None]), whole


WAYS = [in_sequence, by_a_logistic_function, in_powers_of_two]


@pytest.mark.parametrize(("dtype", "model"), MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("parts", "size", "at"), [(2, 3, 0), (2, 3000, 0), (2, 200, -500), (7, 2, -800), (16, 30, 90), (33, 1, 700)]
)
@pytest.mark.parametrize("base", ["e", "2"])
def test_every_way_to_merge_is_within_the_bounds(
    dtype: str, model: str, way: Callable[..., tuple[Array, Array]], parts: int, size: float, at: float, base: str
) -> None:
    inputs = drawn(parts, size, at)
    inputs["log_sum_exps"][1, 0], inputs["outputs"][1, 0] = -np.inf, 7.0
    inputs = stored(inputs, dtype)
    truth = truth_of(inputs, dtype, base)
    unit = inputs["log_sum_exps"].dtype.type(np.log(2))
    empty = np.isneginf(inputs["log_sum_exps"])[..., None]
    wide = np.where(empty, 0, inputs["outputs"].astype(inputs["log_sum_exps"].dtype))
    output, total = way(wide, inputs["log_sum_exps"] if base == "e" else inputs["log_sum_exps"] * unit)
    total = total if base == "e" else total / unit
    returned = {"log_sum_exp": total, "output": rounded_once(output, dtype)}
    for stage, array in returned.items():
        bound = truth.bounds(model)[stage]
        error = truth.exact[stage].error_of(array) - truth.exact[stage].radius
        assert (error <= bound.max_error).all(), (stage, float((error / bound.max_error).max()))
        assert (bound.sigma <= bound.max_error).all()


def truth_of(inputs: Stages, dtype: str, base: str = "e") -> Truth:
    return find_truth("merge_states", {"lse_base": base}, inputs, dtype, supports_statistics=True)


@pytest.mark.parametrize("wrong", [1.001, 1 / np.log(2)])
@pytest.mark.parametrize("at", [0.0, -90.0, -800.0])
def test_the_bounds_are_no_wider_than_they_have_to_be(wrong: float, at: float) -> None:
    """A factor of a thousandth on the differences of log_sum_exps shows in float32, at -800 too."""
    inputs = stored(drawn(2, 3.0, at), "float32")
    truth = truth_of(inputs, "float32")
    middle = inputs["log_sum_exps"].mean(axis=0)
    moved = middle + (inputs["log_sum_exps"] - middle) * np.float32(wrong)
    other = numpy_backend.merge_states(inputs["outputs"], moved.astype(np.float32))
    bound = truth.bounds("native")["output"]
    assert (truth.exact["output"].error_of(other["output"]) > bound.max_error).any()


def test_log_sum_exps_are_float32_beside_sixteen_bits() -> None:
    for dtype, wide in (
        ("float64", "float64"),
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
    ):
        assert stage_dtype("merge_states", "log_sum_exp", dtype) == wide
        assert stage_dtype("merge_states", "weights", dtype) == wide
        assert stage_dtype("merge_states", "output", dtype) == dtype
    assert stage_dtype("attention", "log_sum_exp", "bfloat16") == "bfloat16"


def test_rows_are_those_of_the_whole() -> None:
    inputs, rows = drawn(5), np.array([1, 3])
    inputs["log_sum_exps"][2, :, :, 3] = -np.inf
    whole, some = (canonical_form("merge_states", {}, inputs, each) for each in (None, rows))
    assert some.inputs["row_values"].shape == (2, 3, 2, 5, 6)
    everything, part = (exact_stages("merge_states", each.options, each.inputs) for each in (whole, some))
    sampled = exact_stages("merge_states", whole.options, whole.inputs, query_rows=[1, 3])
    for stage, exact in everything.items():
        kept = exact.high.take(rows, -1 if stage == "log_sum_exp" else -2)
        np.testing.assert_array_equal(part[stage].high, kept)
        np.testing.assert_array_equal(sampled[stage].high, kept)


def test_the_output_follows_from_the_weights_that_were_returned() -> None:
    inputs = drawn(3)
    plain, exact = canonical_form("merge_states", {}, inputs), exact_of(inputs)
    weights = exact["weights"][..., ::-1]
    step = exact_from("merge_states", plain.options, plain.inputs, {"weights": weights}, "output")
    assert step is not None
    np.testing.assert_allclose(
        step.high, np.einsum("bhqn,nbhqd->bhqd", weights, inputs["outputs"]), rtol=1e-13, atol=1e-14
    )
    rounding = rounding_model_named("native", "float64")
    bound = introduced_bound(
        "merge_states", plain.options, plain.inputs, rounding, {"weights": weights}, step.high, "output"
    )
    assert bound is not None
    assert bound.max_error.shape == exact["output"].shape
    assert (bound.max_error < 1e-13).all()


def test_a_bound_of_some_rows_is_that_of_the_whole() -> None:
    inputs, rounding = drawn(3), rounding_model_named("native", "float32")
    plain, exact = canonical_form("merge_states", {}, inputs), exact_of(inputs)
    whole = accumulated_bounds("merge_states", {}, plain.inputs, rounding, exact)
    some = canonical_form("merge_states", {}, inputs, np.array([4]))
    part = accumulated_bounds("merge_states", {}, some.inputs, rounding, exact_of({**_row(inputs, 4)}))
    np.testing.assert_allclose(part["output"].max_error, whole["output"].max_error[..., 4:, :], rtol=1e-9)


def _row(inputs: Stages, row: int) -> Stages:
    return {
        "outputs": inputs["outputs"][..., row : row + 1, :],
        "log_sum_exps": inputs["log_sum_exps"][..., row : row + 1],
    }


@pytest.mark.parametrize("base", ["e", "2"])
def test_a_radius_covers_what_moves(base: str) -> None:
    inputs, rng = drawn(3), np.random.default_rng(5)
    radius = {name: np.full(array.shape, 1e-3) for name, array in inputs.items()}
    moved = {name: array + rng.uniform(-1e-3, 1e-3, array.shape) for name, array in inputs.items()}
    plain = canonical_form("merge_states", {"lse_base": base}, inputs)
    radii = canonical_form("merge_states", {"lse_base": base}, radius).inputs
    balls, other = propagate("merge_states", plain.options, Inputs(plain.inputs, radii)), exact_of(moved, base)
    for stage, ball in balls.items():
        distance = np.abs(other[stage] - ball.value)
        assert (distance <= ball.radius * (1 + 1e-9)).all(), stage
        assert distance.max() > 1e-5


def test_nan_in_a_part_that_has_keys_reaches_its_own_elements_alone() -> None:
    inputs = drawn()
    inputs["outputs"][1, 0, 1, 2, 3] = np.nan
    inputs["log_sum_exps"][2, 1, 2, 4] = np.inf
    truth = truth_of(inputs, "float64")
    assert truth.undefined is not None
    of_output = truth.undefined.of("output", (2, 3, 5, 6))
    assert of_output[0, 1, 2, 3]
    assert of_output[1, 2, 4].all()
    assert of_output.sum() == 7
    assert truth.undefined.of("log_sum_exp", (2, 3, 5)).sum() == 1
    assert truth.undefined.of("weights", (2, 3, 5, 4)).sum() == 4


def test_the_canonical_form_of_a_canonical_form_is_itself() -> None:
    plain = canonical_form("merge_states", {"lse_base": "2"}, drawn())
    again = canonical_form("merge_states", plain.options, plain.inputs)
    assert again.options == plain.options == {"lse_base": "2"}
    assert again.inputs.keys() == plain.inputs.keys() == {"scores", "row_values"}
    assert Problem.of("merge_states", plain.options, plain.inputs).rows.tolist() == [0, 1, 2, 3, 4]
