"""Inputs: shapes bound to axes, numbers made as a file says and rounded once, and which of them support statistics."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.dtypes import numpy_dtype
from attncheck.reading.array_kinds import Arrangement
from attncheck.reading.case import Case
from attncheck.reading.inputs import Exact, arranged_shape, convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import (
    ShapeFault,
    bind_axes,
    fitted_shape,
    repeated_axes,
    show,
)
from attncheck.spec import DTYPES, OPERATIONS, SCORE_INPUTS, InputSpec, inputs_of
from attncheck.store import digest_of

TABLES = tables_beside(__file__)

KINDS = [("scoring", kind) for kind in SCORE_INPUTS] + [(name, None) for name in OPERATIONS if name != "scoring"]
LETTERS = (*"BPDCAERSWN", *("Hkv", "Lq", "Lk", "Dk", "Dv", "Dr", "Ek", "Ev", "Eo", "Lr", "Np", "Lp"))
MAY_BE_EMPTY = ("B", "Lq", "Lk", "P", "Lr")


def _consistent(lengths: dict[str, int], group: int) -> dict[str, int]:
    """Add the lengths that follow from others: ``group`` query heads share a head of keys."""
    lengths = lengths | {"H": group * lengths["Hkv"], "T": lengths["P"] + lengths["Lk"], "S1": lengths["S"] + 1}
    lengths["D"] += 2 * lengths["R"]  # there are as many positions and elements as are rotated, or more
    lengths |= {"Nq": lengths["D"], "Nk": lengths["D"]}
    lengths["Lr"] += lengths["P"] + max(lengths["Lq"], lengths["Lk"])
    merged = [(heads, width) for heads in ("H", "Hkv") for width in ("D", "Dv")]
    return lengths | {f"{heads}*{width}": lengths[heads] * lengths[width] for heads, width in merged}


lengths_of_letters = st.builds(
    _consistent,
    st.fixed_dictionaries({letter: st.integers(0 if letter in MAY_BE_EMPTY else 1, 7) for letter in LETTERS}),
    st.integers(1, 3),
)


def _heads(operation: str, lengths: dict[str, int]) -> tuple[int | None, int | None]:
    return (lengths["H"], lengths["Hkv"]) if operation == "multi_head_attention" else (None, None)


def _keys(operation: str, lengths: dict[str, int]) -> int:
    if operation == "paged_attention":
        return lengths["W"] * lengths["Lp"]
    return lengths["T"] if operation in {"attention", "multi_head_attention"} else lengths["Lk"]


def _full_shapes(operation: str, kind: str | None, lengths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    lengths = lengths | {"T": _keys(operation, lengths)}
    return {name: tuple(lengths[letter] for letter in spec.axes) for name, spec in inputs_of(operation, kind).items()}


@settings(max_examples=150)
@given(of=st.sampled_from(KINDS), lengths=lengths_of_letters)
def test_every_axis_letter_gets_its_length(of: tuple[str, str | None], lengths: dict[str, int]) -> None:
    operation, kind = of
    specs = inputs_of(operation, kind)
    bound = bind_axes(specs, _full_shapes(operation, kind, lengths), *_heads(operation, lengths))
    assert {letter for spec in specs.values() for letter in spec.axes} <= set(bound)
    keys = {} if "N" in bound else {"T": _keys(operation, lengths)}
    assert bound == {letter: lengths[letter] for letter in bound} | keys


def _shared_axes(operation: str, kind: str | None) -> list[tuple[str, int]]:
    """Every axis of every input whose letter another input, one that does not broadcast, has too."""
    specs = inputs_of(operation, kind)
    return [
        (name, axis)
        for name, spec in specs.items()
        for axis, letter in enumerate(spec.axes)
        if any(letter in other.axes for key, other in specs.items() if key != name and not other.broadcast)
    ]


@settings(max_examples=150)
@given(
    of=st.sampled_from([(*kind, *axis) for kind in KINDS for axis in _shared_axes(*kind)]), lengths=lengths_of_letters
)
def test_an_axis_that_disagrees_is_blamed(of: tuple[str, str | None, str, int], lengths: dict[str, int]) -> None:
    operation, kind, name, axis = of
    specs = inputs_of(operation, kind)
    shapes = _full_shapes(operation, kind, lengths)
    more = 2 if specs[name].broadcast and shapes[name][axis] == 0 else 1  # of none, 1 would be broadcast
    shapes[name] = (*shapes[name][:axis], shapes[name][axis] + more, *shapes[name][axis + 1 :])
    with pytest.raises(ShapeFault) as fault:
        bind_axes(specs, shapes, *_heads(operation, lengths))
    assert specs[name].axes[axis] in specs[fault.value.field].axes
    assert show(shapes[fault.value.field]) in str(fault.value)


@given(lengths=lengths_of_letters, ones=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_mask_may_have_length_one_on_any_axis(lengths: dict[str, int], ones: list[bool]) -> None:
    shapes = _full_shapes("attention", None, lengths)
    shapes["mask"] = tuple(1 if one else length for one, length in zip(ones, shapes["mask"], strict=True))
    bound = bind_axes(OPERATIONS["attention"].inputs, shapes, None)
    scores = tuple(lengths[letter] for letter in ("B", "H", "Lq", "T"))
    assert np.broadcast_shapes(shapes["mask"], tuple(bound[letter] for letter in ("B", "H", "Lq", "T"))) == scores


@pytest.mark.parametrize(("axes", "shape", "fitted"), TABLES["fitted"])
def test_inputs_are_fitted_to_axes(axes: tuple[str, ...], shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
    assert fitted_shape(InputSpec(tuple(axes)), tuple(shape)) == tuple(fitted)


@pytest.mark.parametrize(
    ("shape", "heads", "split"),
    [((2, 3, 8), 4, (2, 4, 3, 2)), ((3, 8), 4, (1, 4, 3, 2)), ((8,), 4, (1, 4, 1, 2)), ((2, 0, 8), 4, (2, 4, 0, 2))],
)
def test_heads_side_by_side_are_split(shape: tuple[int, ...], heads: int, split: tuple[int, ...]) -> None:
    assert fitted_shape(InputSpec(("B", "H", "Lq", "D")), shape, heads) == split


@pytest.mark.parametrize("heads", [None, 4])
def test_a_matrix_per_head_is_taken_for_as_many_heads_as_there_are(heads: int | None) -> None:
    assert fitted_shape(InputSpec(("E", "H*D")), (4, 16, 2), heads) == (16, 8)
    assert fitted_shape(InputSpec(("E", "H*D")), (16, 8), heads) == (16, 8)
    with pytest.raises(ValueError, match="4x16x2 is a matrix for each of 4 heads, and there are 3"):
        fitted_shape(InputSpec(("E", "H*D")), (4, 16, 2), 3)


@pytest.mark.parametrize(
    ("array", "axes"),
    [
        (np.arange(6.0).reshape(2, 3), ()),
        (np.ones((2, 3)), (0,)),
        (np.ones((1, 3, 2)), (1,)),
        (np.ones((4,)), ()),
        (np.arange(3.0).reshape(1, 3, 1, 1).repeat(2, axis=0), (0,)),
        (np.arange(3.0).reshape(1, 1, 1, 3).repeat(2, axis=0).repeat(5, axis=2), (0, 2)),
        (np.full((2, 3), np.nan), ()),
        (np.zeros((2, 0, 3)), (0,)),
    ],
)
def test_the_axes_of_equal_slices_are_found_but_for_the_last(array: NDArray[Any], axes: tuple[int, ...]) -> None:
    assert repeated_axes(array) == axes


@pytest.mark.parametrize(("shape", "text"), [((2, 3, 4), "2x3x4"), ((5,), "5"), ((), "scalar")])
def test_a_shape_is_shown_as_people_write_it(shape: tuple[int, ...], text: str) -> None:
    assert show(shape) == text


Load = Callable[[str | bytes], list[Case]]

SOFTMAX = """\
title: Inputs of every kind
source: {kind: derivation, title: Made for this test}
operation: softmax
cases:
  - name: The case at hand
"""


def _softmax_of(load_text: Load, *lines: str) -> Case:
    [case] = load_text(SOFTMAX + "".join(f"    {line}\n" for line in lines))
    return case


def _made(load_text: Load, *lines: str) -> Exact:
    return make_exact_inputs(_softmax_of(load_text, *lines))["scores"]


def test_an_input_is_made_as_the_file_says_with_its_leading_axes(load_text: Load) -> None:
    for source, array in TABLES["made"]:
        made = _made(load_text, "inputs:", f"  scores: {source}")
        wanted = np.array(array, dtype=np.float64)
        assert made.array.shape == made.radius.shape == (1,) * (4 - wanted.ndim) + wanted.shape
        np.testing.assert_array_equal(made.array.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_number_is_that_of_each_dtype(load_text: Load, dtype: str) -> None:
    case = _softmax_of(
        load_text,
        "inputs: {scores: {concat: [{lowest: [1, 2]}, {values: [[1, -0.0]]}], axis: 1, transpose: true}}",
        f"dtypes: [{', '.join(DTYPES)}]",
    )
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    scores = inputs.arrays["scores"][0, 0]
    lowest = ml_dtypes.finfo(scores.dtype).min
    assert scores.dtype == numpy_dtype(dtype)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores, np.array([[lowest], [lowest], [1], [0]]).astype(scores.dtype))
    assert np.signbit(scores[3, 0])
    assert not inputs.radius["scores"].any()
    assert not case.supports_statistics


def test_a_printed_number_may_differ_by_half_a_unit_also_after_it_was_moved(load_text: Load) -> None:
    made = _made(
        load_text,
        "arrays:",
        '  table: {printed: "0.25 1.5\\n10 0.125\\n1 2"}',
        "inputs: {scores: {ref: table, rows: [1, 0], transpose: true}}",
    )
    np.testing.assert_array_equal(made.array[0, 0], [[10, 0.25], [0.125, 1.5]])
    np.testing.assert_allclose(made.radius[0, 0], [[0.5, 0.005], [0.0005, 0.05]], rtol=1e-15)


def test_half_a_unit_of_a_printed_number_goes_through_what_is_made_of_it(load_text: Load) -> None:
    arrays = ("arrays:", '  first: {printed: "2.0 -4.0"}', '  second: {printed: "10 100"}')
    doubled = _made(load_text, *arrays, "inputs: {scores: {ref: first, times: -2, plus: 1000}}")
    np.testing.assert_allclose(doubled.array[0, 0], [[996, 1008]])
    np.testing.assert_allclose(doubled.radius[0, 0], [[0.1, 0.1]])
    added = _made(load_text, *arrays, "inputs: {scores: {sum: [first, second]}}")
    np.testing.assert_allclose(added.radius[0, 0], [[0.55, 0.55]])
    multiplied = _made(load_text, *arrays, "inputs: {scores: {product: [first, second]}}")
    # |2| 0.5 + 0.05 |10| + 0.05 0.5, and |4| 0.5 + 0.05 |100| + 0.05 0.5
    np.testing.assert_allclose(multiplied.radius[0, 0], [[1.525, 7.025]])
    joined = _made(load_text, *arrays, "inputs: {scores: {concat: [second, first], axis: 0}}")
    np.testing.assert_allclose(joined.radius[0, 0], [[0.5, 0.5, 0.05, 0.05]])


def test_parts_are_drawn_in_the_order_in_which_they_are_listed(load_text: Load) -> None:
    made = _made(
        load_text,
        "random: {generator: numpy-legacy, seed: 5}",
        "arrays: {first: {draw: randn, shape: [1, 3]}}",
        "inputs:",
        "  scores:",
        "    concat: [{draw: rand, shape: [2, 3]}, {ref: first, times: -1}, {sum: [{draw: randn, shape: [3]}, first]}]",
        "    axis: 0",
    )
    state = np.random.RandomState(5)
    first, second, third = state.randn(1, 3), state.rand(2, 3), state.randn(3)
    np.testing.assert_array_equal(made.array[0, 0], np.concatenate([second, -first, third + first]))


def test_a_geometric_series_is_one_multiplication_after_another(load_text: Load) -> None:
    made = _made(load_text, "inputs: {scores: {geometric: [0.1, 1.1], shape: [40]}}").array[0, 0, 0]
    wanted = [0.1]
    for _ in range(39):
        wanted.append(wanted[-1] * 1.1)
    assert made.tolist() == wanted


def test_a_draw_is_rounded_down_and_multiplied_in_its_own_dtype(load_text: Load) -> None:
    random = "random: {generator: torch, seed: 3}"
    plain = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64]}}").array
    scaled = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64], times: 0.1}}").array
    assert plain.dtype == scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, plain * np.float32(0.1))
    whole = _made(
        load_text,
        "random: {generator: r, seed: 0}",
        "inputs: {scores: {draw: runif, low: 0, high: 3, shape: [3, 3], floor: true, times: 10}}",
    ).array
    # set.seed(0); runif(9, 0, 3) begins 2.69 0.80 1.12 1.72 2.72
    assert whole.swapaxes(-1, -2).ravel()[:5].tolist() == [20, 0, 10, 10, 20]


MASKED = (
    "inputs:",
    '  scores: {printed: "0.1 0.2\\n0.3 0.4"}',
    "  mask: {values: [[true, false], [1, 0]]}",
    "  bias: {values: [[0.1, -.inf], [0, 1]]}",
)


def _masked(load_text: Load) -> Case:
    [case] = load_text(SOFTMAX.replace("softmax", "masking") + "".join(f"    {line}\n" for line in MASKED))
    return case


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_inputs_are_rounded_once_to_the_working_dtype_and_masks_become_boolean(load_text: Load, dtype: str) -> None:
    case = _masked(load_text)
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    assert {name: str(array.dtype) for name, array in inputs.arrays.items()} == {
        "scores": dtype,
        "mask": "bool",
        "bias": dtype,
    }
    assert all(array.flags.c_contiguous for array in inputs.arrays.values())
    np.testing.assert_array_equal(inputs.arrays["mask"][0, 0], [[True, False], [True, False]])
    np.testing.assert_array_equal(inputs.arrays["bias"][0, 0], np.array([[0.1, -np.inf], [0, 1]], dtype=dtype))


def test_what_conversion_moves_is_added_to_the_radius(load_text: Load) -> None:
    case = _masked(load_text)
    inputs = convert_inputs(case, make_exact_inputs(case), "float32")
    # 0.1f is 0.100000001490116119384765625
    moved = 0.100000001490116119384765625 - 0.1
    assert inputs.radius["bias"][0, 0].tolist() == [[moved, 0], [0, 0]]
    assert inputs.radius["scores"][0, 0, 0, 0] == pytest.approx(0.05 + moved, rel=1e-15)
    assert not inputs.radius["mask"].any()
    wide = convert_inputs(case, make_exact_inputs(case), "float64")
    assert not wide.radius["bias"].any()


@given(
    shape=st.lists(st.integers(1, 4), max_size=4).map(tuple),
    rows=st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=5),
    transpose=st.booleans(),
)
def test_rows_and_transpose_are_numpys(shape: tuple[int, ...], rows: list[int] | None, transpose: bool) -> None:
    arrangement = Arrangement(rows=rows, transpose=transpose)
    try:
        array = np.zeros(shape) if rows is None else np.zeros(shape)[rows]
        wanted = (np.swapaxes(array, -1, -2) if transpose else array).shape
    except (IndexError, ValueError):  # NumPy's AxisError is both
        with pytest.raises(ValueError, match=r"row|axes"):
            arranged_shape(shape, arrangement)
        return
    assert arranged_shape(shape, arrangement) == wanted


def test_radii_are_worked_out_when_they_are_asked_for_and_travel_as_numbers() -> None:
    for case in select_cases(["documents/*", "attention"]).cases[::9]:
        exact = make_exact_inputs(case)
        inputs, others = (convert_inputs(case, exact, case.dtypes[-1]) for _ in range(2))
        sent = pickle.loads(pickle.dumps(inputs))
        assert type(sent.radius) is dict
        assert list(sent.radius) == list(inputs.radius) == list(inputs.arrays)
        assert len(inputs.radius) == len(inputs.arrays)
        for name, radius in sent.radius.items():
            assert radius.tobytes() == inputs.radius[name].tobytes() == others.radius[name].tobytes()
            assert inputs.radius[name] is inputs.radius[name]
        assert digest_of(inputs) == digest_of(sent)
    with pytest.raises(KeyError):
        inputs.radius["nothing"]


HEAD = """\
title: Inputs that may support statistics
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
arrays:
  drawn: {draw: randn, shape: [4, 5]}
  whole: {draw: randint, low: 0, high: 9, shape: [4, 5]}
cases:
  - name: The case at hand
"""
OTHERS = "key: {draw: rand, shape: [4, 5]}, value: {draw: runif, low: 1, high: 2, shape: [4, 3]}"


def _supports_statistics(load_text: Load, query: str, fields: str = "") -> bool:
    [case] = load_text(HEAD + f"    inputs: {{query: {query}, {OTHERS}}}\n{fields}")
    return case.supports_statistics


def test_only_what_is_drawn_from_a_continuous_distribution_supports_statistics(load_text: Load) -> None:
    assert [query for query in TABLES["generic"] if not _supports_statistics(load_text, query)] == []
    assert [query for query in TABLES["structured"] if _supports_statistics(load_text, query)] == []
    for query, fields in (("drawn", "storage: float16"), ("drawn", "options: {scale: 0}")):
        assert not _supports_statistics(load_text, query, f"    {fields}\n")
    for query in ("drawn", "whole"):  # a case that says so itself is believed
        for said in (True, False):
            assert _supports_statistics(load_text, query, f"    supports_statistics: {str(said).lower()}\n") is said


def test_gradients_and_a_past_support_them_if_they_are_drawn_too(load_text: Load) -> None:
    for grad_output, wanted in TABLES["gradients"].items():
        found = _supports_statistics(
            load_text, f"drawn, grad_output: {grad_output}", "    operation: attention_gradients\n"
        )
        assert found is wanted, grad_output
    for value, wanted in (("{draw: randn, shape: [1, 3]}", True), ("{constant: 1, shape: [1, 3]}", False)):
        past = f"drawn, past_key: {{draw: randn, shape: [1, 5]}}, past_value: {value}"
        assert _supports_statistics(load_text, past) is wanted, value


def test_a_zero_in_the_place_of_a_projection_bias_is_no_mask(load_text: Load) -> None:
    weights = ", ".join(f"{name}_weight: {{draw: randn, shape: [5, 6]}}" for name in ("query", "key", "value"))
    inputs = f"    inputs: {{query: drawn, key: drawn, value: drawn, {weights}%s}}\n    options: {{heads: 2}}\n"
    text = HEAD.replace("attention", "multi_head_attention") + inputs
    assert load_text(text % "")[0].supports_statistics
    assert not load_text(text % ", key_bias: {constant: 0, shape: [6]}")[0].supports_statistics
