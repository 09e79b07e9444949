"""Printed arrays, pasted as libraries print them: the texts of the tables are printed by the libraries named there."""

from __future__ import annotations

import math
import sys
import textwrap
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from attncheck.reading.printed import Rounding, parse_printed
from attncheck.reading.printed_text import Cells, PrintedError, count_numbers, shape_of, split_numbers

TWO_BY_TWO = [["0.10", "2."], ["-3e-5", "nan"]]


@pytest.mark.parametrize(
    "text",
    [
        "0.10 2.\n-3e-5 nan",
        "0.10, 2.\n-3e-5, nan",
        "0.10, 2.,\n-3e-5, nan,\n",
        "[[0.10 2.  ]\n [-3e-5 nan]]",  # str of NumPy
        "array([[0.10, 2.  ],\n       [-3e-5,   nan]])",
        "np.array([[0.10, 2.], [-3e-5, nan]])",
        "array([[0.10, 2.  ],\n       [-3e-5,   nan]], dtype=float32)",
        "Array([[0.10, 2.],\n       [-3e-5, nan]],      dtype=float32, weak_type=True)",  # JAX
        "tensor([[0.10, 2.],\n        [-3e-5, nan]])",  # torch
        "tensor([[0.10, 2.],\n        [-3e-5, nan]], device='cuda:0', dtype=torch.float64, grad_fn=<SoftmaxBackward0>)",
        "Parameter containing:\ntensor([[0.10, 2.],\n        [-3e-5, nan]], requires_grad=True)",
        "<tf.Tensor: shape=(2, 2), dtype=float32, numpy=\narray([[0.10, 2.],\n       [-3e-5, nan]], dtype=float32)>",
        "tf.Tensor(\n[[0.10 2.]\n [-3e-5 nan]], shape=(2, 2), dtype=float32)",
        "<tf.Variable 'Variable:0' shape=(2, 2) dtype=float32, numpy=\narray([[0.10, 2.],\n       [-3e-5, nan]])>",
        "[[0.10, 2.], [-3e-5, nan]]",  # a list of Python
        "[[0.10,2.],[-3e-5,nan]]",  # JSON without spaces
        "[[0.10,\n  2.],\n [-3e-5,\n  nan]]",  # JSON, indented
        "[[0.10\n 2.] [-3e-5\n nan]]",  # rows that are wrapped
        "[[np.float64(0.10), np.float64(2.)], [np.float64(-3e-5), np.float64(nan)]]",
        "[0.10 2.]\n[-3e-5 nan]",  # a loop that prints rows
        "tensor([0.10, 2.])\ntensor([-3e-5, nan])",
        "      [,1] [,2]\n[1,]  0.10   2.\n[2,] -3e-5  nan",  # R
        "      [,1]\n[1,]  0.10\n[2,] -3e-5\n     [,2]\n[1,]   2.\n[2,]  nan\n",  # R, wrapped
    ],
)
def test_an_array_is_read_as_it_was_printed(text: str) -> None:
    assert split_numbers(text) == TWO_BY_TWO
    assert split_numbers(textwrap.indent(text, "    ")) == TWO_BY_TWO
    assert count_numbers(text) >= 4


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("tensor(0.5000)", "0.5000"),
        ("np.float32(0.50)", "0.50"),
        ("<tf.Tensor: shape=(), dtype=float32, numpy=0.50>", "0.50"),
        ("array(0.50)", "0.50"),
        ("[0.50]", ["0.50"]),
        ("[[[1 2]]]", [[["1", "2"]]]),
        ("[1. . 3.]", ["1.", ".", "3."]),
        ("[1] 0.10 0.20\n[3] 0.30", ["0.10", "0.20", "0.30"]),  # a vector of R
        ("[1] 0.50", ["0.50"]),
    ],
)
def test_numbers_vectors_and_blocks_are_read_as_well(text: str, cells: Cells) -> None:
    assert split_numbers(text) == cells


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0.1 0.2 ... 0.8 0.9]]", "'...' leaves numbers out; print the whole array (numpy.set_printoptions("),
        ("tensor([[0.1, 0.2],\n        ...,\n        [0.8, 0.9]])", "'...' leaves numbers out"),
        ("0.1 … 0.9", "'...' leaves numbers out"),
        ("1,5 2,5", "row 1: '1,5 2,5' may be one number or several; write a decimal point as a point"),
        ("1, 2\n1,000.5, 2", "row 2: '1,000.5' may be one number or several"),
        ("1, 2 3", "row 1: expected one number between two commas, got '2 3'"),
        (
            "[1,000 2,000]",
            "line 1: '2' and the number before it are set apart by spaces alone, others by a comma alone",
        ),
        (
            "[[1, 2],\n [3, 4,000]]",
            "line 2: '000' and the number before it are set apart by a comma alone, others by a",
        ),
        ("[1, 2 3]", "set apart by spaces alone, others by a comma and a space; leave out what groups digits"),
        ("[1 2", "line 1: expected ']', got the end of the text"),
        ("[[1 2]\n [3 4]", "line 2: expected ']', got the end of the text"),
        ("1 2]", "line 1: expected a number or '[', got ']'"),
        ("[1,, 2]", "expected a number or '[', got ','"),
        ("[[1 2] [3]]", "ragged: entry 2 has shape 1, entry 1 has shape 2"),
        ("[1 [2]]", "ragged: entry 2 has shape 1, entry 1 has shape scalar"),
        ("[1 2] 3", "numbers stand outside of the brackets"),
        ("[]", "[] holds no number"),
        ("[[], []]", "[] holds no number"),
        ("array([1, 2]", "expected ')' behind the array, got the end of the text"),
        ("array([1, 2])[0]", "ragged"),
        ("tensor(1e-2 *\n [1 2])", "expected ')' behind the array, got '*'"),
        ("(1, 2)", "expected a number or '[', got '(1,'"),
        ("scores = [1 2]", "expected a number or '[', got '='"),
        ("<tf.Tensor: shape=(2,), dtype=float32, numpy=array([1, 2])", "expected '>' behind the array, got the end"),
        ("<tf.Tensor: shape=(3,), dtype=float32, numpy=array([1, 2])>", "the text says shape=(3,) and holds 2"),
        ("tf.Tensor([1 2], shape=(2, 1), dtype=float32)", "the text says shape=(2, 1) and holds 2"),
        ("[" * 100_000, "expected at most 5 axes, got brackets that are deeper"),
        ("<tf.Tensor: shape=(), numpy=" * 9000, "expected a number or '[', got '<tf.Tensor:'"),
        ("     [,1] [,2]\n", "no number is given"),
        ("[1] , [", "line 1: expected a number or '[', got the end of the text"),
        ("[1] 0.1, 0.2", "numbers stand outside of the brackets"),
        ("[2,] 0.1", "expected R's label [1,], got [2,]"),
        ("[1] 0.1 0.2\n[4] 0.3", "expected R's label [3], got [4]"),
        ("     [,1] [,2]\n[1,] 1 2\n[2,] 3", "ragged rows: 1 in row 2, 2 in row 1"),
    ],
)
def test_what_could_be_read_in_two_ways_or_is_not_whole_is_refused(text: str, words: str) -> None:
    with pytest.raises(PrintedError) as error:
        parse_printed(text, Rounding())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_array_that_is_pasted_into_a_list_of_texts_has_one_axis_more() -> None:
    parsed = parse_printed(["[[1.50 2]\n [3 4]]", "tensor([[5, 6], [7, 8]])"], Rounding())
    assert parsed.shape == (2, 2, 2)
    assert parsed.text[0, 0, 0] == "1.50"
    assert parsed.half_unit[0, 0].tolist() == [0.005, 0.5]


def test_the_message_about_a_number_in_brackets_says_where_it_stands() -> None:
    with pytest.raises(PrintedError, match=r"^row 2, number 1: 'x' is not a number$"):
        parse_printed("[[1 2]\n [x 4]]", Rounding())


PIECES = ("[", "]", "[[", "]]", ",", ", ", " ", "\n", "1", "0.5", "-3e-5", "nan", "array(", ")", "tensor(", ">", "...")
PIECES += (
    "dtype=float32",
    "shape=(2,)",
    "<tf.Tensor: shape=(2,), numpy=",
    "[1,]",
    "[,1]",
    "[1] ",
    "np.float64(1)",
    ".",
)


@settings(max_examples=1000)
@given(text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_whatever_is_put_together_of_printed_pieces_is_read_whole_or_refused(text: str) -> None:
    try:
        cells = split_numbers(text)
        shape = shape_of(cells)
    except PrintedError:
        return
    assert 0 < math.prod(shape) <= count_numbers(text)


arrays = npst.arrays(
    st.sampled_from([np.float64, np.float32]),
    npst.array_shapes(min_dims=1, max_dims=4, max_side=5),
    elements={"min_value": -(2.0**20), "max_value": 2.0**20},
)


@given(array=arrays, precision=st.integers(1, 9), width=st.integers(12, 90), text=st.sampled_from(["str", "repr"]))
def test_what_numpy_prints_is_read_back_to_half_a_unit_of_each_last_digit(
    array: np.ndarray, precision: int, width: int, text: str
) -> None:
    with np.printoptions(precision=precision, linewidth=width, threshold=sys.maxsize):
        printed = str(array) if text == "str" else repr(array)
    parsed = parse_printed(printed, Rounding())
    assert parsed.shape == array.shape
    assert all(number in printed for number in parsed.text.ravel())
    _assert_rounded(parsed.text, array)


@given(array=arrays)
def test_a_list_of_python_numbers_is_read_back_as_it_was(array: np.ndarray) -> None:
    numbers = array.astype(np.float64)
    np.testing.assert_array_equal(parse_printed(repr(numbers.tolist()), Rounding()).value, numbers)


def _assert_rounded(text: np.ndarray, array: np.ndarray) -> None:
    """Every text is its number, rounded: from the shortest digits that tell the float from others, as NumPy does."""
    for shown, number in zip(text.ravel(), array.ravel(), strict=True):
        unit = Decimal(10) ** int(Decimal(shown).as_tuple().exponent)
        float_error = Decimal(float(np.spacing(np.abs(number)))) / 2
        assert abs(Decimal(shown) - Decimal(float(number))) <= unit / 2 + float_error, (shown, number)


NUMBERS = np.linspace(-2, 3, 24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.torch
def test_what_torch_prints_is_read_back() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(NUMBERS, requires_grad=True)
    for printed in (tensor, tensor * 1, torch.nn.Parameter(tensor), tensor.double().detach(), tensor[0, 0, 0]):
        parsed = parse_printed(repr(printed), Rounding())
        assert parsed.shape == tuple(printed.shape)
        np.testing.assert_allclose(parsed.value, printed.detach().numpy(), rtol=0, atol=0.5001e-4)
    with pytest.raises(PrintedError, match="leaves numbers out"):
        split_numbers(repr(torch.zeros(50, 50)))


@pytest.mark.tensorflow
def test_what_tensorflow_prints_is_read_back() -> None:
    tf = pytest.importorskip("tensorflow")
    tensor = tf.constant(NUMBERS)
    for printed in (repr(tensor), str(tensor), repr(tf.Variable(tensor))):
        np.testing.assert_allclose(parse_printed(printed, Rounding()).value, NUMBERS, rtol=0, atol=0.5001e-7)
    assert shape_of(split_numbers(repr(tensor[0, 0, 0]))) == ()


@pytest.mark.jax
def test_what_jax_prints_is_read_back() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for printed in (repr(jnp.array(NUMBERS)), str(jnp.array(NUMBERS))):
        np.testing.assert_allclose(parse_printed(printed, Rounding()).value, NUMBERS, rtol=0, atol=0.5001e-7)
    assert split_numbers(repr(jnp.float32(0.5))) == "0.5"
