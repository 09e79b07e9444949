"""Designs: covering arrays for what a kernel has, and cases of the widths, tile and strength that are asked for."""

from __future__ import annotations

from importlib.resources import files
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends import EVERYTHING
from attncheck.covering import Exclusion, count_combinations, covering_rows
from attncheck.designing import DesignRequest, write_design
from attncheck.errors import UsageError
from attncheck.execution.implementations import Implementation, entry_of
from attncheck.execution.user_call import declarations
from attncheck.execution.user_code import Target
from attncheck.reading.loader import load_case_file
from attncheck.spec import OPERATIONS


def plain(query: Any, key: Any, value: Any) -> None: ...


def masked(query: Any, key: Any, value: Any, *, mask: Any = None, is_causal: bool = False) -> None: ...


masked.capabilities = {"grouped_heads": False, "value_width": False, "dtypes": ["bfloat16"]}  # type: ignore[attr-defined]
masked.requires = {"widths": [32, 80]}  # type: ignore[attr-defined]


def windowed(query: Any, key: Any, value: Any, *, window: Any = None) -> None: ...


def everything(query: Any, key: Any, value: Any, **options: Any) -> None: ...


def attention_gradients(
    query: Any, key: Any, value: Any, grad_output: Any, *, sinks: Any = None, bias: Any = None
) -> None: ...


def softmax(scores: Any) -> None: ...


KERNELS: tuple[Any, ...] = (plain, masked, windowed, everything, attention_gradients, softmax)
# The inputs and options that its cases have beside those that come by position, its widths, its longest keys.
MADE = {
    "plain": (set(), {64, 128}, 1025),
    "masked": ({"mask", "is_causal", "alignment"}, {32, 80}, 1025),
    "windowed": ({"window"}, {64, 128}, 1025),
    "everything": (
        {"mask", "bias", "sinks", "key_lengths", "past_key", "past_value", "query_offsets"}
        | {"is_causal", "alignment", "window", "softcap"},
        {64, 128},
        1025,
    ),
    "attention_gradients": ({"sinks", "bias"}, {64, 128}, 1025),
}
DESIGNS = Path(str(files("attncheck.cases") / "designs" / "kernels.yaml"))
POSITIONAL = {"query", "key", "value", "grad_output"}


def requested(name: str, strength: int = 3, widths: tuple[int, ...] = (), tile: int = 64) -> DesignRequest:
    [kernel] = (kernel for kernel in KERNELS if kernel.__name__ == name)
    entry = entry_of(Target("kernels.py", name), declarations(kernel, name), "numpy")
    return DesignRequest(Implementation(entry, name), strength, widths, tile)


def test_a_design_has_what_a_kernel_takes_and_nothing_else(tmp_path: Path) -> None:
    offenders = []
    for name, expected in MADE.items():
        request = requested(name)
        path, count, _ = write_design(request, tmp_path / f"{name}.yaml")
        cases = load_case_file(path, path.name, path.stem, ())
        given = {each for case in cases for each in (*case.inputs, *case.options)} - POSITIONAL
        shapes = [case.input_shapes for case in cases]
        found = given, {each["query"][3] for each in shapes}, max(each["key"][2] for each in shapes)
        grouped = any(each["query"][1] != each["key"][1] for each in shapes)
        if found != expected or len(cases) != count or grouped is (name == "masked"):
            offenders.append((name, found, count))
        assert {dtype for case in cases for dtype in case.dtypes} == {*request.implementation.declared.classes}
    assert offenders == []


def test_what_no_design_can_be_made_for_is_refused(tmp_path: Path) -> None:
    refused = {
        "softmax": "designs are made for attention and attention_gradients; kernels has softmax",
        "masked": "--widths 64: kernels takes widths of 32, 80",
    }
    for name, message in refused.items():
        with pytest.raises(UsageError, match=message):
            write_design(requested(name, widths=(64,)), tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="numpy is no function of yours"):
        write_design(DesignRequest(Implementation(EVERYTHING["numpy"])), tmp_path / "a.yaml")


def test_the_bundled_design_has_every_option_of_attention_but_those_with_a_reason() -> None:
    reasons = {
        "scale": "one number for all, which meets no edge of a tile",
        "head_scale": "meets every two others in cases/designs/attention.yaml",
        "rotary_cos": "rotates before anything is tiled: cases/rotary.yaml and designs/attention.yaml",
        "query_mask": "is folded into the mask before any kernel is called",
        "mask_fill": "stands in scores that the mask decides about: cases/designs/attention.yaml",
        "empty_rows": "says what a query without a key gives, and here every query has one",
        "heads": "says how arrays are cut, which have an axis of heads here",
    }
    own = OPERATIONS["attention"]
    known = {name for name, spec in own.inputs.items() if not spec.required} | own.options
    second = {"kv_heads", "rotary_sin", "rotary_interleaved"}  # say nothing without another
    [*cases] = load_case_file(DESIGNS, "kernels.yaml", "designs/kernels", ("option-triples",))
    given = {name for case in cases for name in (*case.inputs, *case.options)} - POSITIONAL
    assert known - second - given == reasons.keys()


# Covering arrays: every combination of levels that is possible occurs, and none that is excluded.


@st.composite
def designs(draw: st.DrawFn) -> tuple[list[int], int, list[Exclusion]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    levels = st.integers(0, len(sizes) - 1).flatmap(
        lambda factor: st.tuples(st.just(factor), st.sets(st.integers(0, sizes[factor] - 1), min_size=1))
    )
    excluded = draw(st.lists(st.lists(levels, min_size=1, max_size=3).map(dict), max_size=4))
    return sizes, draw(st.integers(2, min(3, len(sizes)))), excluded


@settings(max_examples=150)
@given(designs())
def test_every_combination_that_is_possible_meets(design: tuple[list[int], int, list[Exclusion]]) -> None:
    sizes, strength, excluded = design
    possible = [
        row
        for row in product(*map(range, sizes))
        if not any(all(row[factor] in levels for factor, levels in each.items()) for each in excluded)
    ]
    rows = covering_rows(sizes, strength, excluded)
    assert set(rows) <= set(possible)
    assert len(set(rows)) == len(rows)

    def met(some: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {each for row in some for each in combinations(enumerate(row), strength)}

    assert met(rows) == met(possible)
    assert count_combinations(sizes, strength) == sum(map(prod, combinations(sizes, strength)))


FEWEST = {((3,) * 4, 2): 9, ((4,) * 5, 2): 16, ((2,) * 11, 3): 12, ((3, 2, 3, 3, 2, 4, 2, 2, 2, 2), 3): 36}
"""Designs of which no smaller ones exist: orthogonal arrays, and as many rows as the largest factors have triples."""


def test_rows_are_the_fewest_where_it_is_known_how_many_these_are_and_are_the_same_each_time() -> None:
    made = {design: covering_rows(*design) for design in FEWEST}
    assert {design: len(rows) for design, rows in made.items()} == FEWEST
    assert made == {design: covering_rows(*design) for design in FEWEST}
