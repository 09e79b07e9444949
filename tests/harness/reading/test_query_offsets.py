"""Offsets of queries: what they fold into, what they turn, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attncheck.attention.radii import propagate
from attncheck.errors import CaseError
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs

Load = Callable[[str | bytes], list[Case]]
OFFSETS = np.array([2, 0, 5])


def drawn(past: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    inputs = {"query": rng.normal(size=(3, 2, 4, 6)), "query_offsets": OFFSETS}
    inputs |= {name: rng.normal(size=(3, 2, 9 - past, 6)) for name in ("key", "value")}
    if past:
        inputs |= {f"past_{name}": rng.normal(size=(3, 2, past, 6)) for name in ("key", "value")}
    return inputs


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("rows", [None, [1, 3]])
def test_causality_and_windows_become_a_mask_for_each_batch_entry(past: int, rows: list[int] | None) -> None:
    options = {"is_causal": True, "window": (3, None)}
    posed = canonical_form("attention", options, drawn(past), None if rows is None else np.array(rows))
    assert "query_offsets" not in posed.inputs
    assert not posed.options
    mask = np.broadcast_to(posed.inputs["mask"], (3, 1, 4 if rows is None else 2, 9))
    for b, _, row, j in np.ndindex(mask.shape):
        position = OFFSETS[b] + (row if rows is None else rows[row])
        assert mask[b, 0, row, j] == (position - 3 <= j <= position)


@pytest.mark.parametrize("past", [0, 3])
def test_a_function_that_knows_offsets_is_given_them_with_causality_and_window(past: int) -> None:
    options = {"is_causal": True, "window": (3, None)}
    posed = call_form("attention", options, drawn(past))
    assert posed.options == options
    assert "mask" not in posed.inputs
    np.testing.assert_array_equal(posed.inputs["query_offsets"], OFFSETS)


@pytest.mark.parametrize("past", [0, 3])
def test_queries_take_the_rows_of_their_batch_entry_and_keys_their_own(past: int) -> None:
    tables = {name: np.arange(12.0)[:, np.newaxis] + np.zeros(2) for name in ("rotary_cos", "rotary_sin")}
    posed = canonical_form("attention", {}, drawn(past) | tables)
    for b, i in np.ndindex(3, 4):
        assert (posed.inputs["query_cos"][b, 0, i] == OFFSETS[b] + i).all()
    assert posed.inputs["key_cos"][past:, 0].tolist() == list(range(past, 9))


def test_radii_of_the_tables_are_those_of_the_rows_that_queries_take() -> None:
    inputs = drawn() | {name: np.full((12, 2), 0.5) for name in ("rotary_cos", "rotary_sin")}
    radius = {name: np.zeros(np.shape(array)) for name, array in inputs.items()}
    radius["rotary_cos"][6:] = 1e-3  # of which only the last batch entry has rows, and the last keys
    radii = propagate("attention", {}, Inputs(inputs, radius))["rotated_query"].radius
    assert (radii[:2] == 0).all()
    assert (radii[2, :, 0] == 0).all()
    assert (radii[2, :, 1:, :4] > 0).all()


CASE = """\
title: Offsets
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: The case at hand
    options: {is_causal: true}
    inputs:
      query: {draw: randn, shape: [2, 1, 3, 4]}
      key: {draw: randn, shape: [2, 1, 6, 4]}
      value: {draw: randn, shape: [2, 1, 6, 4]}
      rotary_cos: {draw: randn, shape: [8, 2]}
      rotary_sin: {draw: randn, shape: [8, 2]}
      query_offsets: {values: [5, 0]}
"""
WITHOUT_TABLES = "".join(line for line in CASE.splitlines(keepends=True) if "rotary" not in line)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (CASE.replace("[5, 0]", "[7, 0]"), "query_offsets.values[0]", "expected at most 6, as there are 6 keys"),
        (CASE.replace("[5, 0]", "[0, 6]"), "query_offsets", "of batch entry 1 end at position 8"),
        (CASE.replace("[5, 0]", "[5, 0, 1]"), "query_offsets", "expected axis B of (B) to be 2"),
        (WITHOUT_TABLES.replace("{is_causal: true}", "{scale: 1}"), "query_offsets", "says where queries stand for"),
    ],
)
def test_offsets_that_cannot_be_are_refused(load_text: Load, text: str, field: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        load_text(text)
    [fault] = error.value.faults
    assert fault.field == f"inputs.{field}"
    assert message in fault.message


def test_an_alignment_beside_offsets_is_refused(load_text: Load) -> None:
    assert load_text(CASE)
    with pytest.raises(CaseError, match="query_offsets say it of each batch entry"):
        load_text(CASE.replace("{is_causal: true}", "{is_causal: true, alignment: top_left}"))
