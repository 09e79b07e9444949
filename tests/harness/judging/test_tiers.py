"""What the errors of one tensor say: proved wrong, statistically wrong, noisy, or within what the class allows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from attncheck.judging.tiers import Measured, Tier, measure, threshold
from attncheck.judging.truth import find_truth

# sqrt(2 ln(2 N / 1e-6)): 6.3 for 256 elements, 7.5 for a million (docs/numerics.md, section 7).
THRESHOLDS = [(1, 5.387), (256, 6.333), (10**6, 7.527)]

# Shapes of which a root mean square says something, and others that have fewer than 25 rows or columns.
ENOUGH = [(25, 25), (2, 13, 25), (300, 26), (26, 300)]
TOO_FEW = [(300,), (1, 300), (300, 1), (24, 300), (300, 24), (1, 24, 300)]


def measured(
    error: Any,
    *,
    radius: Any = 0.0,
    max_error: Any = 1.0,
    scale: Any = 0.125,
    judged: Any = True,
    supports_statistics: bool = True,
) -> Measured:
    """Judge errors, given with everything else as one number for all or as one for each."""
    shape = np.shape(error)
    numbers = [np.broadcast_to(np.asarray(part, np.float64), shape) for part in (error, radius, max_error, scale)]
    return measure(*numbers, np.broadcast_to(np.asarray(judged), shape), supports_statistics=supports_statistics)


def one_of(count: int, error: float, rest: float = 0.0) -> np.ndarray[Any, Any]:
    """So many errors, of which the last is another."""
    errors = np.full(count, rest)
    errors[-1] = error
    return errors


@pytest.mark.parametrize(("elements", "wanted"), THRESHOLDS)
def test_the_threshold_grows_slowly_with_the_number_of_elements(elements: int, wanted: float) -> None:
    assert threshold(elements) == pytest.approx(wanted, abs=5e-4)


def test_the_threshold_is_the_one_that_the_design_states() -> None:
    assert round(threshold(256), 1) == 6.3
    assert round(threshold(10**6), 1) == 7.5


# Proven.


@pytest.mark.parametrize("supports_statistics", [True, False])
def test_an_error_beyond_its_bound_is_proved_wrong_whatever_the_inputs(supports_statistics: bool) -> None:
    found = measured([[0.0, 1.25], [0.5, 0.0]], supports_statistics=supports_statistics)
    assert (found.tier, found.ratio, found.index, found.elements) == (Tier.PROVEN, 1.25, (0, 1), 4)
    assert found.largest_z == 1.25 / 0.125
    assert found.tier.fails


def test_an_error_of_exactly_the_bound_is_possible_and_the_next_number_is_not() -> None:
    assert measured([1.0], supports_statistics=False).tier is Tier.WITHIN
    assert measured([np.nextafter(1.0, 2)], supports_statistics=False).tier is Tier.PROVEN


def test_the_benefit_of_what_the_exact_value_is_uncertain_by_is_given() -> None:
    assert measured([1.25], radius=0.25, supports_statistics=False).tier is Tier.WITHIN
    assert measured([1.25], radius=0.125, supports_statistics=False).tier is Tier.PROVEN
    assert measured([0.25], radius=0.5).ratio == 0


@pytest.mark.parametrize("supports_statistics", [True, False])
def test_a_value_that_is_not_finite_where_the_exact_one_is_has_an_infinite_error(supports_statistics: bool) -> None:
    found = measured([0.0, np.inf], supports_statistics=supports_statistics)
    assert (found.tier, found.ratio, found.index, found.largest_z) == (Tier.PROVEN, np.inf, (1,), np.inf)


def test_the_element_that_is_named_is_the_worst_beside_its_own_bound() -> None:
    found = measured([8.0, 2.0, 0.5], max_error=[10.0, 1.0, 1.0])
    assert (found.index, found.ratio) == ((1,), 2.0)


# Statistical, and warnings.


@pytest.mark.parametrize(("elements", "limit"), THRESHOLDS[:2])
def test_one_error_beyond_the_threshold_is_statistically_wrong_on_generic_inputs_alone(
    elements: int, limit: float
) -> None:
    # sigma is 1/8: an error of z / 8 lies at z.
    above, below = (one_of(elements, (limit + by) / 8) for by in (0.001, -0.001))
    assert measured(above).tier is Tier.STATISTICAL
    assert measured(above, supports_statistics=False).tier is Tier.WITHIN
    assert not measured(below).tier.fails
    assert measured(above).largest_z == pytest.approx(limit, abs=2e-3)


@pytest.mark.parametrize("shape", ENOUGH)
def test_errors_that_are_all_a_little_too_large_fail(shape: tuple[int, ...]) -> None:
    found = measured(np.full(shape, 1.0625 / 8))
    assert (found.tier, found.mean_z, found.largest_z) == (Tier.STATISTICAL, 1.0625, 1.0625)
    assert measured(np.full(shape, 1.0 / 8)).tier is Tier.WARNING
    assert measured(np.full(shape, 0.625 / 8)).tier is Tier.WARNING
    for harmless in (0.5625, 1 / np.sqrt(3)):  # the second is that of roundings just above a power of two
        assert measured(np.full(shape, harmless / 8)).tier is Tier.WITHIN
    assert measured(np.full(shape, 1.0625 / 8), supports_statistics=False).tier is Tier.WITHIN


@pytest.mark.parametrize("shape", TOO_FEW)
def test_a_mean_over_few_rows_or_columns_says_nothing(shape: tuple[int, ...]) -> None:
    found = measured(np.full(shape, 1.5 / 8))
    assert (found.tier, found.mean_z) == (Tier.WITHIN, 1.5)


@pytest.mark.parametrize(("judged", "tier"), [(255, Tier.WITHIN), (256, Tier.STATISTICAL)])
def test_a_mean_needs_256_judged_elements(judged: int, tier: Tier) -> None:
    places = np.add.outer(np.arange(30), np.arange(30)) % 30 < 9  # nine in every row and column
    places.flat[np.flatnonzero(places)[judged:]] = False
    assert min(places.any(axis=0).sum(), places.any(axis=1).sum()) >= 25
    assert measured(np.full((30, 30), 1.5 / 8), judged=places).tier is tier


@pytest.mark.parametrize(("rows", "tier"), [(24, Tier.WITHIN), (25, Tier.STATISTICAL)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_or_column_of_which_nothing_is_judged_does_not_count(rows: int, tier: Tier, axis: int) -> None:
    judged = np.broadcast_to(np.arange(40)[:, np.newaxis] < rows, (40, 40))
    assert measured(np.full((40, 40), 1.5 / 8), judged=judged.T if axis else judged).tier is tier


@pytest.mark.parametrize("seed", [113, 343, 635])
@pytest.mark.parametrize("shared", ["query", "key"])
def test_the_error_of_one_projected_number_is_no_evidence_however_many_scores_it_meets(seed: int, shared: str) -> None:
    # An honest float32 computation, summed from the first term to the last: one query of width 1, projected from 64
    # numbers, meets 300 keys, or one such key 300 queries. All 300 scores are off by the error of that one number,
    # which is more than one sigma in about one of 150 draws; these seeds are such.
    many = "key" if shared == "query" else "query"
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {
        many: random.standard_normal((1, 300, 1)),
        shared: random.standard_normal((1, 1, 64)),
        f"{shared}_weight": random.standard_normal((64, 1)),
        f"{many}_weight": np.ones((1, 1)),
        "value_weight": np.ones((1, 1)),
    }
    inputs["value"] = np.ones((1, inputs["key"].shape[1], 1))
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    query, key = (
        np.cumsum(inputs[name] * inputs[f"{name}_weight"][:, 0], axis=-1, dtype=np.float32)[:, np.newaxis, :, -1:]
        for name in ("query", "key")
    )
    scores = query * np.swapaxes(key, -1, -2)
    truth = find_truth("multi_head_attention", {"heads": 1}, inputs, "float32", supports_statistics=True)
    exact, bound = truth.exact["scores"], truth.bounds("native")["scores"]
    judged = np.full(scores.shape, True)
    found = measure(
        exact.error_of(scores), exact.radius, bound.max_error, bound.sigma, judged, supports_statistics=True
    )
    assert found.mean_z > 1
    assert found.elements == 300
    assert found.tier is Tier.WITHIN


@pytest.mark.parametrize(("elements", "tier"), [(255, Tier.WITHIN), (256, Tier.WARNING)])
def test_a_large_error_is_a_warning_from_256_elements(elements: int, tier: Tier) -> None:
    # A single z of 3.25 where half the threshold is 3.17.
    errors = one_of(elements, 3.25 / 8)
    assert measured(errors).tier is tier
    assert measured(errors, supports_statistics=False).tier is Tier.WITHIN
    assert not tier.fails


def test_what_every_known_good_implementation_does_is_no_noise() -> None:
    assert measured(np.full((32, 32), 0.5 / 8)).tier is Tier.WITHIN
    # Half the threshold is 3.17 for 256 elements and 3.61 for 250,000.
    assert measured(one_of(256, 3.125 / 8)).tier is Tier.WITHIN
    assert measured(one_of(250_000, 3.5 / 8)).tier is Tier.WITHIN
    assert measured(one_of(250_000, 3.75 / 8)).tier is Tier.WARNING


def test_proof_comes_before_statistics() -> None:
    assert measured(np.full(300, 2.0), scale=0.01).tier is Tier.PROVEN


# Bounds of nothing, and nothing to judge.


def test_where_nothing_may_be_wrong_nothing_is_and_anything_else_is_infinitely_so() -> None:
    zero: dict[str, Any] = {"max_error": 0.0, "scale": 0.0}
    found = measured([0.0, 0.0], **zero)
    assert (found.tier, found.ratio, found.largest_z, found.mean_z) == (Tier.WITHIN, 0.0, 0.0, 0.0)
    found = measured([0.0, 5e-324], **zero)
    assert (found.tier, found.ratio, found.index) == (Tier.PROVEN, np.inf, (1,))


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_an_empty_tensor_is_right(shape: tuple[int, ...]) -> None:
    assert measured(np.zeros(shape)) == Measured(Tier.WITHIN, 0.0, None, 0.0, 0.0, 0)


def test_a_tensor_of_which_nothing_is_judged_is_right() -> None:
    assert measured([np.inf, 9.0], judged=False) == Measured(Tier.WITHIN, 0.0, None, 0.0, 0.0, 0)


def test_what_is_outside_the_domain_neither_fails_nor_counts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measured([np.inf, 0.5], radius=[np.inf, 0.0], judged=[False, True])
    assert (found.tier, found.ratio, found.index, found.elements) == (Tier.WITHIN, 0.5, (1,), 1)
    # The mean is over what is judged: one z of 4, not two of which one is 0.
    assert found.mean_z == 4.0


def test_a_tensor_without_axes_is_judged() -> None:
    found = measured(2.0)
    assert (found.tier, found.index, found.ratio) == (Tier.PROVEN, (), 2.0)
