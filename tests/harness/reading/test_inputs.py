"""Inputs: shapes bound to axes, numbers made as a file says and rounded once, and which of them support statistics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, repeat
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import CASES, tables_beside

from attncheck.reading.case import Case
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.shapes import ShapeFault, bind_axes, fitted_shape, show
from attncheck.spec import OPERATIONS, SCORE_INPUTS, InputSpec, inputs_of

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
    has_past = "past_key" in OPERATIONS[operation].inputs
    return lengths["T"] if has_past else lengths["Lk"]


def _full_shapes(operation: str, kind: str | None, lengths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    lengths = lengths | {"T": _keys(operation, lengths)}
    return {name: tuple(lengths[letter] for letter in spec.axes) for name, spec in inputs_of(operation, kind).items()}


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
    [field] = fault.value.field
    assert specs[name].axes[axis] in specs[field].axes
    assert show(shapes[field]) in str(fault.value)


@given(lengths=lengths_of_letters, ones=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_mask_may_have_length_one_on_any_axis(lengths: dict[str, int], ones: list[bool]) -> None:
    shapes = _full_shapes("attention", None, lengths)
    shapes["mask"] = tuple(1 if one else length for one, length in zip(ones, shapes["mask"], strict=True))
    bound = bind_axes(OPERATIONS["attention"].inputs, shapes, None)
    scores = tuple(lengths[letter] for letter in ("B", "H", "Lq", "T"))
    assert np.broadcast_shapes(shapes["mask"], tuple(bound[letter] for letter in ("B", "H", "Lq", "T"))) == scores


def test_inputs_are_fitted_to_axes() -> None:
    for axes, shape, heads, fitted in TABLES["fitted"]:
        assert fitted_shape(InputSpec(tuple(axes)), tuple(shape), heads) == tuple(fitted), axes
    with pytest.raises(ValueError, match="4x16x2 is a matrix for each of 4 heads, and there are 3"):
        fitted_shape(InputSpec(("E", "H*D")), (4, 16, 2), 3)


Load = Callable[[str | bytes], list[Case]]


def _made(load_text: Load, *lines: str) -> NDArray[Any]:
    [case] = load_text(CASES["head of softmax"] + "\n    ".join(["  - name: The case at hand", *lines]))
    return make_exact_inputs(case)["scores"].array


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
    np.testing.assert_array_equal(made[0, 0], np.concatenate([second, -first, third + first]))


def test_numbers_are_made_one_step_after_another_in_their_own_dtype(load_text: Load) -> None:
    series = _made(load_text, "inputs: {scores: {geometric: [0.1, 1.1], shape: [40]}}")[0, 0, 0]
    assert series.tolist() == list(accumulate(repeat(1.1, 39), mul, initial=0.1))
    random = "random: {generator: torch, seed: 3}"
    plain = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64]}}")
    scaled = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64], times: 0.1}}")
    assert plain.dtype == scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, plain * np.float32(0.1))
    whole = _made(
        load_text,
        "random: {generator: r, seed: 0}",
        "inputs: {scores: {draw: runif, low: 0, high: 3, shape: [3, 3], floor: true, times: 10}}",
    )
    # set.seed(0); runif(9, 0, 3) begins 2.69 0.80 1.12 1.72 2.72
    assert whole.swapaxes(-1, -2).ravel()[:5].tolist() == [20, 0, 10, 10, 20]


@pytest.mark.parametrize("generator", ["numpy-legacy", "r", "torch"])
def test_an_empty_draw_draws_nothing(load_text: Load, generator: str) -> None:
    kind = "runif, low: 0, high: 1" if generator == "r" else "randn"
    before = f"arrays: {{before: {{draw: {kind}, shape: [0, 6]}}}}"
    random, draw = f"random: {{generator: {generator}, seed: 5}}", f"{{draw: {kind}, shape: [4, 6]}}"
    alone = _made(load_text, random, f"inputs: {{scores: {draw}}}")
    behind = _made(load_text, random, before, f"inputs: {{scores: {{concat: [before, {draw}], axis: 0}}}}")
    np.testing.assert_array_equal(alone, behind)
