"""The sizes at which kernels have paths of their own: each of them is there, and no fault of one size is seen once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest

from attncheck.judging.undefined_rows import empty_rows
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.tiles import TEMPLATE, tile_row

CASES = select_cases(["kernel_shapes"]).cases
WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
TILES = (16, 64, 128)
OPERATIONS = ("attention", "attention_gradients")
DTYPES = ("float64", "float32", "bfloat16", "float16")
TWICE = 2
"""Cases that have to see a fault which one size alone has."""
MAX_SHAPES = 68


def of(operation: str) -> list[Case]:
    return [case for case in CASES if case.operation == operation]


def axis(case: Case, name: str, place: int) -> int:
    shape = case.input_shapes[name]
    return shape[place] if len(shape) >= -place else 1


def keys(case: Case) -> int:
    return sum(axis(case, name, -2) for name in ("key", "past_key") if name in case.input_shapes)


def heads(case: Case) -> tuple[int, int, int]:
    """Return batch entries, query heads, and heads of keys and values."""
    return axis(case, "query", -4), axis(case, "query", -3), axis(case, "key", -3)


def edges(tile: int) -> tuple[int, int, int, int]:
    return tile - 1, tile, tile + 1, 2 * tile + 1


def is_causal(case: Case) -> bool:
    return bool(case.options.get("is_causal"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_width_is_that_of_keys_and_of_values_twice_and_has_every_dtype(operation: str) -> None:
    for width in WIDTHS:
        of_keys = [case for case in of(operation) if axis(case, "query", -1) == width]
        of_values = [case for case in of(operation) if axis(case, "value", -1) == width]
        assert len([case for case in of_keys if case in of_values]) >= TWICE
        assert any(case not in of_values for case in of_keys), "beside values of another width"
        assert any(case not in of_keys for case in of_values), "beside keys of another width"
        assert {is_causal(case) for case in of_keys} == {True, False}
        dtypes = Counter(dtype for case in of_keys for dtype in case.dtypes)
        assert all(dtypes[dtype] >= (1 if dtype == "float64" else TWICE) for dtype in DTYPES), dtypes
        # The model is as wide as its heads together, as PyTorch's and Keras' layers need it.
        sizes = {
            (axis(case, "query_weight", -2), axis(case, "query_weight", -1))
            for case in of("multi_head_attention")
            if axis(case, "query_weight", -1) == width * case.options["heads"]
        }
        assert sizes, width
        assert all(model == together for model, together in sizes), width


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("tile", TILES)
def test_masks_windows_and_corners_meet_every_edge(tile: int, operation: str) -> None:
    """Causal and not, and twice."""
    of_tile = [
        case for case in of(operation) if case.id.startswith(f"{TEMPLATE}/") and f"-tile-{tile}-" in f"{case.id}-"
    ]
    for length_of in (keys, lambda case: axis(case, "query", -2)):
        lengths = Counter(map(length_of, of(operation)))
        found = {(length_of(case), is_causal(case)) for case in of_tile}
        assert found >= {(length, causal) for length in edges(tile) for causal in (False, True)}
        assert all(lengths[length] >= TWICE for length in edges(tile))
    named = [case for case in of(operation) if f"-tile-{tile}-" in f"{case.id}-"]
    masked = [axis(case, "mask", -2) > 1 for case in named if "mask" in case.inputs]
    assert {True, False} == set(masked)
    assert any("key_lengths" in case.inputs for case in named)
    assert any("window" in case.options for case in named)
    corners = {case.options.get("alignment") for case in named if is_causal(case)}
    assert corners == {None, "bottom_right"}


@pytest.mark.parametrize("tile", TILES)
def test_one_query_and_a_few_meet_every_edge_of_keys_in_several_heads_and_entries(tile: int) -> None:
    several = [case for case in of("attention") if min(heads(case)[:2]) > 1]
    assert {keys(case) for case in several if axis(case, "query", -2) == 1} >= set(edges(tile))
    assert any(keys(case) > tile and 1 < axis(case, "query", -2) < 8 for case in several)
    assert any("past_key" in case.inputs and axis(case, "past_key", -2) == tile for case in several)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_heads_and_entries_are_many_and_grouped_and_hundreds_of_keys_have_no_edge_near(operation: str) -> None:
    assert any(axis(case, "query", -2) > 2 * keys(case) for case in of(operation))
    hundreds = [keys(case) for case in of(operation) if keys(case) > 200]
    assert any(all(min(length % tile, -length % tile) > 4 for tile in TILES) for length in hundreds)
    grids = [heads(case) for case in of(operation)]
    many = [grid for grid in grids if grid[0] * grid[1] > 64]
    assert max(batch for batch, _, _ in many) == 17
    assert max(heads for _, heads, _ in many) == 40
    groups = Counter(heads // shared for _, heads, shared in many)
    assert all(groups[size] >= TWICE for size in (1, 4, 8)), groups
    assert any(is_causal(case) for case in of(operation) if math.prod(heads(case)[:2]) > 64)


def test_the_file_has_the_rows_that_are_made_for_its_tiles() -> None:
    """Else a case of that name would be one thing in the corpus and another with ``--tile``."""
    for tile in TILES:
        made = {case.id: case for case in select_cases(["kernel_shapes/lengths"], tiles=[tile]).cases}
        own = {case.id: case for case in CASES if f"-tile-{tile}" in case.id and f"-tile-{tile}0" not in case.id}
        assert own.keys() == {identity for identity in made if identity.startswith(f"{TEMPLATE}/")}
        assert all(_same(made[identity], case) for identity, case in own.items())
        assert tile_row(tile)["whole"] == tile


def _same(one: Case, other: Case) -> bool:
    fields = ("name", "inputs", "input_shapes", "options", "dtypes", "tags", "judged_stages", "random", "line")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def test_no_query_is_left_without_a_key_but_at_the_other_corner() -> None:
    """Queries without a key are a convention, of which other files ask; here they would only hide a size."""
    for case in CASES:
        if case.operation in OPERATIONS and "other-corner" not in case.id:
            inputs = convert_inputs(case, make_exact_inputs(case), "float32")
            assert not empty_rows(case.problem(inputs.arrays)).any(), case.id


def test_there_are_few_shapes() -> None:
    """JAX compiles every operation for every shape. A softmax takes the scores of a query that attends elsewhere."""
    assert len(set(_shapes(case for case in CASES if case.operation != "softmax"))) <= MAX_SHAPES


def _shapes(cases: Iterable[Case]) -> Iterable[tuple[tuple[int, ...], ...]]:
    for case in cases:
        named = (name for name in ("query", "key", "value") if name in case.inputs)
        yield tuple(tuple(case.input_shapes[name]) for name in named)
