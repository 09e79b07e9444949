"""Projections as nn.Linear holds them: the same numbers as (in, out), and faults told in the file's own terms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attncheck.errors import CaseError
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Projections
source: {kind: derivation, title: Made for this test}
operation: multi_head_attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
"""
LINEAR = (
    HEAD
    + """\
arrays: {packed: {ascending: [0, 1], shape: [16, 6]}}
cases:
  - name: The case at hand
    options: {heads: 4, kv_heads: 2, projections: linear}
    inputs:
      query: {draw: randn, shape: [3, 6]}
      key: {draw: randn, shape: [5, 6]}
      value: {draw: randn, shape: [5, 6]}
      in_proj_weight: packed
      in_proj_bias: {draw: randn, shape: [16]}
      output_weight: {ascending: [0, 1], shape: [7, 8]}
"""
)


def _arrays(load_text: Load, text: str) -> dict[str, np.ndarray]:
    [case] = load_text(text)
    return {name: exact.array for name, exact in make_exact_inputs(case).items()}


def _fault(load_text: Load, text: str) -> tuple[int | None, str | None, str]:
    with pytest.raises(CaseError) as error:
        load_text(text)
    [fault] = error.value.faults
    return fault.line, fault.field, fault.message


def test_a_packed_projection_is_cut_by_heads_and_turned(load_text: Load) -> None:
    arrays = _arrays(load_text, LINEAR)
    packed = np.arange(16.0 * 6).reshape(16, 6)
    for name, rows in (("query", slice(0, 8)), ("key", slice(8, 12)), ("value", slice(12, 16))):
        np.testing.assert_array_equal(arrays[f"{name}_weight"], packed[rows].T)
    np.testing.assert_array_equal(arrays["output_weight"], np.arange(56.0).reshape(7, 8).T)
    assert [arrays[f"{name}_bias"].shape for name in ("query", "key", "value")] == [(8,), (4,), (4,)]


def test_no_implementation_hears_of_the_layout(load_text: Load) -> None:
    [case] = load_text(LINEAR)
    inputs = convert_inputs(case, make_exact_inputs(case), "float32").arrays
    for form in (call_form, canonical_form):
        posed = form(case.operation, case.options, inputs)
        assert posed.options == {"heads": 4, "kv_heads": 2}
        assert "in_proj_weight" not in posed.inputs


def test_what_is_drawn_in_place_is_drawn_once_and_first(load_text: Load) -> None:
    arrays = _arrays(load_text, LINEAR)
    random = np.random.RandomState(1)
    bias = random.randn(16)
    np.testing.assert_array_equal(np.concatenate([arrays[f"{name}_bias"] for name in ("query", "key", "value")]), bias)
    np.testing.assert_array_equal(arrays["query"], random.randn(1, 3, 6))


def test_weights_that_are_not_packed_are_turned(load_text: Load) -> None:
    weights = {
        "query_weight": "{ascending: [0, 1], shape: [8, 6]}",
        "key_weight": "{ascending: [0, 1], shape: [6, 4], transpose: true}",  # which says that the file has (in, out)
        "value_weight": "{ascending: [0, 1], shape: [2, 2, 6]}",
    }
    separate = "\n      ".join(f"{name}: {array}" for name, array in weights.items())
    arrays = _arrays(load_text, LINEAR.replace("in_proj_weight: packed", separate))
    np.testing.assert_array_equal(arrays["query_weight"], np.arange(48.0).reshape(8, 6).T)
    np.testing.assert_array_equal(arrays["key_weight"], np.arange(24.0).reshape(6, 4))
    per_head = np.arange(24.0).reshape(2, 2, 6)
    np.testing.assert_array_equal(arrays["value_weight"], np.concatenate([each.T for each in per_head], axis=1))


@pytest.mark.parametrize("name", ["in_proj_weight: packed", "in_proj_weight: {ascending: [0, 1], shape: [16, 6]}"])
@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({", projections: linear": ""}, "in_proj_weight", "such a case has `options: {projections: linear}`"),
        ({"[16, 6]": "[18, 6]"}, "in_proj_weight", "18 rows cannot be shared evenly by 4 heads of queries, 2 of keys"),
        ({"[16, 6]": "[16]"}, "in_proj_weight", "expected (3E, E), the rows of query, key and value, got shape 16"),
        ({"[16, 6]": "[2, 8, 6]"}, "in_proj_weight", "expected (3E, E)"),
        ({"shape: [16]}": "shape: [16, 1]}"}, "in_proj_bias", "expected (3E), the rows of query, key and value"),
        ({"[16, 6]": "[16, 5]"}, "in_proj_weight", "query_weight: shape 5x8: expected axis E of (E, H*D) to be 6"),
        ({"      output_": "      key_bias: {values: [1, 2, 3, 4]}\n      output_"}, "key_bias", "is given twice"),
        ({"[7, 8]": "[7, 9]"}, "output_weight", "projections are linear: 7x9 in the file is (out, in)"),
    ],
)
def test_what_cannot_be_is_told_in_the_terms_of_the_file(
    load_text: Load, name: str, changes: dict[str, str], field: str, message: str
) -> None:
    text = LINEAR.replace("in_proj_weight: packed", name)
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    line, found, told = _fault(load_text, text)
    assert found == f"inputs.{field}"
    assert message in told
    assert line is not None
    assert field in text.splitlines()[line - 1]


def test_a_fault_inside_a_packed_array_is_told_where_it_stands(load_text: Load) -> None:
    text = LINEAR.replace("in_proj_bias: {draw: randn, shape: [16]}", f"in_proj_bias: {{values: [{'1, ' * 15}.nan]}}")
    _, field, message = _fault(load_text, text)
    assert (field, message.partition(":")[0]) == ("inputs.in_proj_bias.values[15]", "query_bias")
    _, field, message = _fault(load_text, LINEAR.replace("weight: packed", "weight: paket"))
    assert field == "inputs.in_proj_weight"
    assert "no array is named 'paket'" in message


PRINTED = """\
cases:
  - name: The case at hand
    options: {heads: 2, projections: linear}
    arrays: {packed: {ascending: [1, 1], shape: [12, 2]}}
    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}, in_proj_weight: packed}
    expect: [{stage: query, exact: true, because: columns, known: WHAT}]
"""


@pytest.mark.parametrize(
    "known",
    ['"1 3 5 7\\n2 4 6 8"', '["1 3 5 7\\n2 4 6 8"]', '["1 3\\n2 4", "5 7\\n6 8"]', '[["1 3\\n2 4", "5 7\\n6 8"]]'],
)
def test_results_are_compared_with_their_heads_side_by_side_or_one_by_one(load_text: Load, known: str) -> None:
    [case] = load_text(HEAD + PRINTED.replace("WHAT", known))
    [expected] = case.expected
    assert expected.numbers is not None
    assert expected.numbers.value.tolist() == [[[[1, 3], [2, 4]], [[5, 7], [6, 8]]]]


def test_numbers_of_another_shape_are_refused_as_ever(load_text: Load) -> None:
    _, field, message = _fault(load_text, HEAD + PRINTED.replace("WHAT", '"1 3 5\\n2 4 6"'))
    assert field == "expect[0].known"
    assert "1x2x2x2" in message
    assert message.endswith("got 2x3")
