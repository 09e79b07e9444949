from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.reading.shapes import (
    ShapeFault,
    bind_axes,
    fitted_shape,
    repeated_axes,
    show,
)
from attncheck.spec import OPERATIONS, SCORE_INPUTS, InputSpec, inputs_of

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


@pytest.mark.parametrize(
    ("axes", "shape", "fitted"),
    [
        (("B", "H", "Lq", "D"), (2, 3), (1, 1, 2, 3)),
        (("B", "H", "Lq", "D"), (), (1, 1, 1, 1)),
        (("E", "H*D"), (4, 16, 2), (16, 8)),
        (("E", "H*D"), (16, 8), (16, 8)),
        (("H*D",), (8,), (8,)),
    ],
)
def test_inputs_are_fitted_to_axes(axes: tuple[str, ...], shape: tuple[int, ...], fitted: tuple[int, ...]) -> None:
    assert fitted_shape(InputSpec(axes), shape) == fitted


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
