"""Emulated tensor cores and stored log_sum_exps: what they compute, and that the classes that they claim hold them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest

from attncheck.mutation.kernel import Array, bfloat16, tf32, truncated_bfloat16, truncated_tf32
from attncheck.mutation.narrow import block_product, in_two_parts, rounded_product
from attncheck.spec.rounding import rounding_model_named

Product = Callable[[Array, Array], Array]


PRODUCTS: dict[str, tuple[Product, ...]] = {
    "tf32_products": (
        rounded_product(tf32),
        rounded_product(truncated_tf32, block_product(4)),
        rounded_product(truncated_tf32, block_product(8)),
    ),
    "bf16_products": (
        rounded_product(bfloat16),
        rounded_product(truncated_bfloat16, block_product(4)),
    ),
    "bf16x3_products": (
        in_two_parts(bfloat16),
        in_two_parts(truncated_bfloat16, block_product(4)),
    ),
}


def matrices(rng: np.random.Generator, inner: int) -> tuple[Array, Array]:
    left, right = rng.standard_normal((2, 5, inner)), rng.standard_normal((2, inner, 7))
    return left.astype(np.float32), right.astype(np.float32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_rounded_factors_is_within_its_class(name: str) -> None:
    rounding = rounding_model_named(name, "float32")
    for inner, seed in product((1, 3, 4, 5, 9, 64, 300), range(10)):
        left, right = matrices(np.random.default_rng(seed), inner)
        exact = left.astype(np.longdouble) @ right.astype(np.longdouble)
        size = np.abs(left).astype(np.longdouble) @ np.abs(right).astype(np.longdouble)
        allowed = (inner * rounding.accumulate_unit + rounding.product_error) * (1 + 8 * rounding.coarsest_unit)
        for multiply in PRODUCTS[name]:
            assert (np.abs(multiply(left, right) - exact) <= allowed * size).all(), inner


def test_the_next_coarser_product_is_outside_of_it() -> None:
    left, right = matrices(np.random.default_rng(0), 4)
    exact, size = left.astype(np.float64) @ right.astype(np.float64), np.abs(left) @ np.abs(right)
    order = ("bf16_products", "tf32_products", "bf16x3_products")
    for coarse, fine in pairwise(order):
        rounding = rounding_model_named(fine, "float32")
        allowed = 4 * rounding.accumulate_unit + rounding.product_error
        assert (np.abs(PRODUCTS[coarse][0](left, right) - exact) > allowed * size).any(), (coarse, fine)


@pytest.mark.parametrize("terms", [4, 8])
def test_a_tensor_core_cuts_sums_off_towards_zero(terms: int) -> None:
    rng = np.random.default_rng(terms)
    left, right = (tf32(np.abs(array)) for array in matrices(rng, 64))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    found = block_product(terms)(left, right)
    assert found.dtype == np.float32
    assert (found <= exact).all()
    assert (found < exact).mean() > 0.9


def test_a_tensor_core_aligns_what_it_adds_to_the_largest() -> None:
    """2^24 and 1 do not meet in 24 bits: each 1 is lost beside 2^24, though four of them would not be."""
    left, right = np.array([[2.0**24, 1, 1, 1]], np.float32), np.ones((4, 1), np.float32)
    assert block_product(4)(left, right).item() == 2.0**24
    assert block_product(4)(left[:, ::-1], right).item() == 2.0**24
    assert (left[:, 1:] @ right[1:]).item() == 3


def test_small_integers_are_exact_in_a_tensor_core() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.integers(-8, 9, (6, 33)).astype(np.float32), rng.integers(-8, 9, (33, 5)).astype(np.float32)
    for products in PRODUCTS.values():
        for multiply in products:
            np.testing.assert_array_equal(multiply(left, right), left @ right)
