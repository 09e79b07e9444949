"""Arrays in another layout hold the same numbers, at the strides that the layout promises."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.execution.layout import apply_layout

LAYOUTS = ("strided", "transposed", "broadcast")
DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def _array(shape: tuple[int, ...], dtype: type = np.float32, *, repeated: bool = False) -> NDArray[Any]:
    numbers = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    return np.ascontiguousarray(np.broadcast_to(numbers[:, :1], shape)) if repeated else numbers


def _one(array: NDArray[Any], layout: str) -> NDArray[Any]:
    return apply_layout({"query": array}, {"query": layout})["query"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=st.tuples(*[st.integers(0, 4)] * 4), repeated=st.booleans())
def test_the_numbers_shape_and_dtype_are_the_same(
    layout: str, dtype: type, shape: tuple[int, ...], repeated: bool
) -> None:
    array = _array(shape, dtype, repeated=repeated)
    other = _one(array, layout)
    assert (other.shape, other.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(other.astype(np.float64), array.astype(np.float64))


def test_strided_is_every_second_number_and_what_lies_between_would_show() -> None:
    array = _array((2, 3, 4, 5))
    other = _one(array, "strided")
    assert other.strides == (2 * 3 * 4 * 5 * 2 * 2, 4 * 5 * 4 * 2, 5 * 4 * 2, 4 * 2)
    assert other.base is not None
    assert (other.base.reshape(2, 3, 4, 10)[..., 1::2] == 7).all()


def test_transposed_has_the_heads_inside_of_the_length() -> None:
    other = _one(_array((2, 3, 4, 5)), "transposed")
    assert other.strides == (4 * 3 * 5 * 4, 5 * 4, 3 * 5 * 4, 4)
    assert other.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 4, 5), (4 * 5 * 4, 0, 5 * 4, 4)), ((1, 3, 4, 5), (4 * 5 * 4, 0, 5 * 4, 4)), ((3, 5), (5 * 4, 4))],
)
def test_broadcast_has_stride_0_where_all_slices_are_alike(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    other = _one(_array(shape, repeated=len(shape) == 4), "broadcast")
    assert tuple(0 if stride == 0 else stride for stride in other.strides)[1:] == strides[1:]
    assert (other.strides[0] == strides[0]) or shape[0] == 1


def test_several_axes_may_have_stride_0_but_never_the_last() -> None:
    other = _one(np.ones((2, 3, 4, 5), dtype=np.float32), "broadcast")
    assert other.strides == (0, 0, 0, 4)


def test_only_what_is_named_is_moved() -> None:
    query, key = _array((1, 2, 3, 4)), _array((1, 2, 3, 4))
    moved = apply_layout({"query": query, "key": key}, {"key": "strided"})
    assert list(moved) == ["query", "key"]
    assert moved["query"] is query
    assert moved["key"] is not key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_array_that_was_given_is_left_alone(layout: str) -> None:
    array = _array((2, 2, 3, 4), repeated=True)
    before = array.copy()
    _one(array, layout)
    np.testing.assert_array_equal(array, before)
    assert array.flags.c_contiguous
