"""The specification, which contract, readings and lists of stages are held against, and designs that follow from it."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.resources import files
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.backends import BACKENDS
from attncheck.backends.contract import Backend
from attncheck.common.errors import UsageError
from attncheck.execution.implementations import Implementation, make_user_entry
from attncheck.execution.operations import function_and_keywords
from attncheck.execution.signatures import CONTRACT_FUNCTIONS, INPUTS_BY_FUNCTION
from attncheck.execution.user_call import read_target_declarations
from attncheck.execution.user_code import Target
from attncheck.planning.designing import DesignRequest, write_design
from attncheck.reading.covering import ExcludedLevels, count_combinations, make_covering_rows
from attncheck.reading.loader import load_case_file
from attncheck.spec import (
    GRADIENTS,
    HEADS,
    OPERATIONS,
    OPTIONS,
    REQUESTERS_OF_STAGE,
    SCORE_SPECS,
    STAGE_SPECS,
    STAGES,
    Options,
    computed_stages,
    input_specs,
)
from attncheck.spec.quantities import QUANTITIES

KINDS = [(name, score) for name in OPERATIONS for score in (SCORE_SPECS if name == "scoring" else [None])]

EVERYTHING: dict[str, Any] = {"is_causal": True, "window": (1, 0), "softcap": 2.0}


def keywords_of(operation: str, score: str | None) -> frozenset[str]:
    """Return the options that reach the contract's function."""
    own = OPERATIONS[operation]
    named = own.options if score is None else SCORE_SPECS[score].options
    return frozenset(
        name for name in named if not OPTIONS[name].only_in_files and (own.has_projections or name not in HEADS)
    )


def test_the_contract_has_the_inputs_and_options_of_the_specification_and_no_others() -> None:
    for operation, score in KINDS:
        function, _ = function_and_keywords(operation, {} if score is None else {"score": score})
        parameters = dict(list(inspect.signature(getattr(Backend, function)).parameters.items())[1:])
        inputs = {name: spec for name, spec in input_specs(operation, score).items() if not spec.only_in_files}
        assert set(parameters) == {*inputs, *keywords_of(operation, score)}
        for name, spec in inputs.items():
            assert parameters[name].default is (inspect.Parameter.empty if spec.required else None), name
        assert all(inputs[name].required for name in INPUTS_BY_FUNCTION[function])
    others = {"prepare", "describe", "from_numpy", "to_numpy"}
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert set(CONTRACT_FUNCTIONS) == public - others


def test_a_gradient_has_the_axes_of_its_input_and_every_option_belongs_to_an_operation() -> None:
    inputs = OPERATIONS["gated_attention_gradients"].inputs
    axes = {f"grad_{name}": spec.axes for name, spec in inputs.items() if spec.is_differentiable}
    assert tuple(axes) == GRADIENTS
    assert {name: STAGE_SPECS[name].axes for name in axes} == axes
    assert [field.name for field in fields(Options)] == list(OPTIONS)
    assert {name for own in OPERATIONS.values() for name in own.options} == set(OPTIONS)


def test_a_stage_is_computed_only_where_something_asks_for_it() -> None:
    for stage, asking in REQUESTERS_OF_STAGE.items():
        own = next(each for each in OPERATIONS.values() if stage in each.stages)
        required = [name for name, spec in own.inputs.items() if spec.required]
        assert stage not in computed_stages(own.name, {}, required)
        for name in asking:
            options = {name: EVERYTHING[name]} if name in EVERYTHING else {}
            assert stage in computed_stages(own.name, options, [*required, name])


ROOT = Path(__file__).parents[2]

MAY_NAME_STAGES = (
    "backends/",  # implementations return their stages by name, each in its framework's own idiom
    "harness/spec/",
)


# What states the graph of attention's steps, and what each step reads. These numbers may only become smaller.
LEFT = {"harness/attention/backward_sums.py": 2, "harness/attention/graph.py": 2, "harness/attention/problem.py": 1}


def literals(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line of every literal with three stage names or more, and the names, those of keys and of values."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                members = elements
            case ast.Dict(keys=keys, values=values):
                members = [each for each in (*keys, *values) if each is not None]
            case _:
                continue
        names = {each.value for each in members if isinstance(each, ast.Constant)} & set(STAGES)
        if len(names) >= 3:
            yield node.lineno, sorted(names)


@cache
def found() -> dict[str, list[tuple[int, list[str]]]]:
    """Return the literals of the product outside what may name stages, by file."""
    files = [path for folder in ("backends", "harness", "reports") for path in (ROOT / folder).rglob("*.py")]
    by_name = {path.relative_to(ROOT).as_posix(): path for path in files}
    return {
        name: lines
        for name, path in sorted(by_name.items())
        if not name.startswith(MAY_NAME_STAGES) and (lines := list(literals(path.read_text(encoding="utf-8"))))
    }


def test_lists_of_stages_follow_from_the_specification() -> None:
    own = {name: lines for name, lines in found().items() if name not in LEFT}
    assert own == {}, "use attncheck.spec: LOGITS, ON_SCORES, PROJECTIONS, GRADIENTS, stages_of(part), computed_stages"
    counts = Counter({name: len(lines) for name, lines in found().items()})
    assert {name: counts[name] for name, most in LEFT.items() if counts[name] > most} == {}, "it only becomes less"


# Quantities that documents print

Array = NDArray[np.float64]
ROWS = (1, 2, 3, 4)
SINGLE_QUERY = (2, 2, 1, 3)
VALUE = (2, 2, 3, 2)


def _whole(shape: tuple[int, ...], low: int, high: int) -> st.SearchStrategy[Array]:
    """Whole numbers: products and sums of them are exact, so that a bound must hold without any slack."""
    return arrays(np.int64, shape, elements=st.integers(low, high)).map(lambda array: array.astype(np.float64))


@given(stage=_whole(ROWS, -50, 50), moved=_whole(ROWS, -5, 5), slack=_whole(ROWS, 0, 3))
def test_row_maxima_move_no_further_than_their_radius(stage: Array, moved: Array, slack: Array) -> None:
    quantity = QUANTITIES["row_maxima"]
    radius = quantity.propagate_radius(np.abs(moved) + slack, stage, {}, {})
    assert (np.abs(quantity.compute(stage + moved, {}) - quantity.compute(stage, {})) <= radius).all()


@given(
    weights=_whole(SINGLE_QUERY, -9, 9),
    value=_whole(VALUE, -9, 9),
    weights_moved=_whole(SINGLE_QUERY, -3, 3),
    value_moved=_whole(VALUE, -3, 3),
)
def test_applied_values_add_up_to_the_output_and_move_so_far(
    weights: Array, value: Array, weights_moved: Array, value_moved: Array
) -> None:
    quantity = QUANTITIES["applied_values"]
    applied = quantity.compute(weights, {"value": value})
    np.testing.assert_array_equal(applied.sum(axis=-2, keepdims=True), weights @ value)
    radius = quantity.propagate_radius(np.abs(weights_moved), weights, {"value": value}, {"value": np.abs(value_moved)})
    moved = quantity.compute(weights + weights_moved, {"value": value + value_moved})
    assert (np.abs(moved - applied) <= radius).all()


@given(
    weights=arrays(np.float64, ROWS, elements=st.floats(0, 1)),
    moved=arrays(np.float64, ROWS, elements=st.floats(-0.5, 0.5)),
)
def test_log_weights_move_no_further_than_their_radius(weights: Array, moved: Array) -> None:
    quantity, other = QUANTITIES["log_weights"], np.maximum(weights + moved, 0)
    radius = quantity.propagate_radius(np.abs(other - weights), weights, {}, {})
    before, after = quantity.compute(weights, {}), quantity.compute(other, {})
    moves = np.isfinite(radius) & (before != after)
    assert (np.abs(after[moves] - before[moves]) <= radius[moves] * (1 + 1e-12) + 1e-13).all()


def test_a_mask_is_read_from_what_is_minus_infinity() -> None:
    masked = np.array([[1.0, -np.inf, np.nan, -1e38]])
    np.testing.assert_array_equal(QUANTITIES["allowed"].compute(masked, {}), [[1, 0, np.nan, 1]])
    np.testing.assert_array_equal(QUANTITIES["forbidden"].compute(masked, {}), [[0, 1, np.nan, 0]])
    radius = QUANTITIES["allowed"].propagate_radius(np.array([[2.0, 0.0, np.inf, 1e30]]), masked, {}, {})
    np.testing.assert_array_equal(radius, [[0, 0, np.inf, 0]])


def test_the_declared_shape_is_the_computed_one() -> None:
    inputs, radii = {"value": np.ones(VALUE)}, {"value": np.zeros(VALUE)}
    for name, quantity in QUANTITIES.items():
        shape = SINGLE_QUERY if name == "applied_values" else ROWS
        declared = quantity.compute_shape(shape, {"value": VALUE})
        assert quantity.compute(np.ones(shape), inputs).shape == declared
        assert quantity.propagate_radius(np.zeros(shape), np.ones(shape), inputs, radii).shape == declared
    with pytest.raises(ValueError, match="needs a single query, got 2"):
        QUANTITIES["applied_values"].compute_shape((1, 1, 2, 3), {"value": (1, 1, 3, 4)})


def plain(query: Any, key: Any, value: Any) -> None: ...


def masked(query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False) -> None: ...


masked.capabilities = {"grouped_heads": False, "value_width": False, "dtypes": ["bfloat16"]}  # type: ignore[attr-defined]
masked.requires = {"widths": [32, 80]}  # type: ignore[attr-defined]


def windowed(query: Any, key: Any, value: Any, *, window: Any = None) -> None: ...


def tiled(query: Any, key: Any, value: Any) -> None: ...


tiled.requires = {"width_multiple": 24}  # type: ignore[attr-defined]


def everything(query: Any, key: Any, value: Any, **options: Any) -> None: ...


def attention_gradients(
    query: Any, key: Any, value: Any, grad_output: Any, *, sinks: Any = None, bias: Any = None
) -> None: ...


def softmax(scores: Any) -> None: ...


KERNELS: tuple[Any, ...] = (plain, masked, windowed, tiled, everything, attention_gradients, softmax)
TABLES = tables_beside(__file__)["designs"]
DESIGNS = Path(str(files("attncheck.cases") / "designs" / "kernels.yaml"))
POSITIONAL = {"query", "key", "value", "grad_output"}


def requested(name: str, strength: int = 3, widths: tuple[int, ...] = (), tile: int = 64) -> DesignRequest:
    [kernel] = (kernel for kernel in KERNELS if kernel.__name__ == name)
    entry = make_user_entry(Target("kernels.py", name), read_target_declarations(kernel, name), "numpy")
    return DesignRequest(Implementation(entry, name), strength, widths, tile)


def test_a_design_has_what_a_kernel_takes_and_nothing_else(tmp_path: Path) -> None:
    offenders = []
    for name, (optional, widths) in TABLES["made"].items():
        request = requested(name)
        path, count, _ = write_design(request, tmp_path / f"{name}.yaml")
        cases = load_case_file(path, path.name, path.stem, ())
        given = {each for case in cases for each in (*case.inputs, *case.options)} - POSITIONAL
        shapes = [case.input_shapes for case in cases]
        found = sorted(given), sorted({each["query"][3] for each in shapes}), max(each["key"][2] for each in shapes)
        grouped = any(each["query"][1] != each["key"][1] for each in shapes)
        if found != (sorted(optional), widths, 1025) or len(cases) != count or grouped is (name == "masked"):
            offenders.append((name, found, count))
        assert {dtype for case in cases for dtype in case.dtypes} == {*request.implementation.mode_declarations.classes}
    assert offenders == []


def test_what_no_design_can_be_made_for_is_refused(tmp_path: Path) -> None:
    refused = {
        "softmax": "designs are made for attention and attention_gradients; kernels has softmax",
        "masked": "--widths 64: kernels takes widths of 32, 80",
        "tiled": "--widths 64: kernels takes no width of 64; the next larger one is 72",
    }
    for name, message in refused.items():
        with pytest.raises(UsageError, match=message):
            write_design(requested(name, widths=(64,)), tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="numpy is no function of yours"):
        write_design(DesignRequest(Implementation(BACKENDS["numpy"])), tmp_path / "a.yaml")


def test_the_bundled_design_has_every_option_of_attention_but_those_with_a_reason() -> None:
    own = OPERATIONS["attention"]
    known = {name for name, spec in own.inputs.items() if not spec.required} | own.options
    second = {"kv_heads", "rotary_sin", "rotary_interleaved"}  # say nothing without another
    [*cases] = load_case_file(DESIGNS, "kernels.yaml", "designs/kernels", ("option-triples",))
    given = {name for case in cases for name in (*case.inputs, *case.options)} - POSITIONAL
    assert known - second - given == TABLES["left out"].keys()


# Covering arrays: every combination of levels that is possible occurs, and none that is excluded.


@st.composite
def designs(draw: st.DrawFn) -> tuple[list[int], int, list[ExcludedLevels]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    levels = st.integers(0, len(sizes) - 1).flatmap(
        lambda factor: st.tuples(st.just(factor), st.sets(st.integers(0, sizes[factor] - 1), min_size=1))
    )
    excluded = draw(st.lists(st.lists(levels, min_size=1, max_size=3).map(dict), max_size=4))
    return sizes, draw(st.integers(2, min(3, len(sizes)))), excluded


@settings(max_examples=150)
@given(designs())
def test_every_combination_that_is_possible_meets(design: tuple[list[int], int, list[ExcludedLevels]]) -> None:
    sizes, strength, excluded = design
    possible = [
        row
        for row in product(*map(range, sizes))
        if not any(all(row[factor] in levels for factor, levels in each.items()) for each in excluded)
    ]
    rows = make_covering_rows(sizes, strength, excluded)
    assert set(rows) <= set(possible)
    assert len(set(rows)) == len(rows)

    def met(some: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {each for row in some for each in combinations(enumerate(row), strength)}

    assert met(rows) == met(possible)
    assert count_combinations(sizes, strength) == sum(map(prod, combinations(sizes, strength)))


FEWEST = {((3,) * 4, 2): 9, ((4,) * 5, 2): 16, ((2,) * 11, 3): 12, ((3, 2, 3, 3, 2, 4, 2, 2, 2, 2), 3): 36}
"""Designs of which no smaller ones exist: orthogonal arrays, and as many rows as the largest factors have triples."""


def test_rows_are_the_fewest_where_it_is_known_how_many_these_are_and_are_the_same_each_time() -> None:
    made = {design: make_covering_rows(*design) for design in FEWEST}
    assert {design: len(rows) for design, rows in made.items()} == FEWEST
    assert made == {design: make_covering_rows(*design) for design in FEWEST}
