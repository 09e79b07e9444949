"""The inputs that only some calls have: lengths, masks of queries, a past, shared heads; arrays without elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attncheck.errors import CaseError
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

Load = Callable[[str | bytes], list[Case]]

# The first line of the case's own text is line 10, a further input's line 13.
HEAD = """\
title: Inputs of attention
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
arrays:
  two: {values: [2, 4]}
  half: {values: [0.5, 4]}
cases:
  - name: The case at hand
"""
INPUTS = """\
    inputs:
      query: {draw: randn, shape: [2, 4, 3, 6]}
      key: {draw: randn, shape: [2, 2, 5, 6]}
      value: {draw: randn, shape: [2, 2, 5, 7]}
"""
MORE_LINE = 14


def _loaded(load_text: Load, more: str = "", inputs: str = INPUTS) -> Case:
    [case] = load_text(HEAD + inputs + "".join(f"      {line}\n" for line in more.splitlines()))
    return case


def _fault(load_text: Load, more: str, inputs: str = INPUTS) -> tuple[int | None, str | None, str]:
    with pytest.raises(CaseError) as error:
        _loaded(load_text, more, inputs)
    [fault] = error.value.faults
    assert fault.case == "The case at hand"
    return fault.line, fault.field, fault.message


def test_query_heads_share_those_of_keys(load_text: Load) -> None:
    case = _loaded(load_text)
    assert case.stage_shapes["weights"] == (2, 4, 3, 5)
    assert case.stage_shapes["output"] == (2, 4, 3, 7)


def test_the_keys_of_scores_are_not_shared(load_text: Load) -> None:
    text = INPUTS.replace("      value: {draw: randn, shape: [2, 2, 5, 7]}\n", "") + "    operation: scoring\n"
    assert (
        _fault(load_text, "", text)[2] == "shape 2x2x5x6: expected axis H of (B, H, Lk, D) to be 4 as in query, got 2"
    )


def test_heads_that_cannot_be_shared_evenly_are_refused(load_text: Load) -> None:
    line, field, message = _fault(load_text, "", INPUTS.replace("[2, 2, 5,", "[2, 3, 5,"))
    assert (line, field) == (MORE_LINE - 2, "inputs.key")
    assert message.endswith("4 query heads cannot share 3 evenly")


@pytest.mark.parametrize("lengths", ["{values: [0, 5]}", "two", "{ref: two, rows: [1, 0]}"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_lengths_are_whole_numbers_in_every_dtype(load_text: Load, lengths: str, dtype: str) -> None:
    case = _loaded(load_text, f"key_lengths: {lengths}")
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    assert inputs.arrays["key_lengths"].dtype == np.int64
    assert inputs.arrays["key_lengths"].shape == (2,)
    assert not inputs.radius["key_lengths"].any()
    assert case.supports_statistics


def test_lengths_count_the_past_too(load_text: Load) -> None:
    past = "past_key: {draw: randn, shape: [2, 2, 3, 6]}\npast_value: {draw: randn, shape: [2, 2, 3, 7]}\n"
    case = _loaded(load_text, past + "key_lengths: {values: [0, 8]}")
    assert case.stage_shapes["masked"] == (2, 4, 3, 8)
    _, field, message = _fault(load_text, past + "key_lengths: {values: [0, 9]}")
    assert field == "inputs.key_lengths.values[1]"
    assert message == "expected at most 8, as there are 8 keys, got 9"


@pytest.mark.parametrize(
    ("lengths", "field", "words"),
    [
        ("{values: [1, 6]}", "values[1]", "expected at most 5, as there are 5 keys, got 6"),
        ("{values: [1, -1]}", "values[1]", "expected a whole number of at least 0, got -1"),
        ("{values: [1.5, 1]}", "values[0]", "expected a whole number of at least 0, got 1.5"),
        ("{values: [.inf, 1]}", "values[0]", "expected a whole number of at least 0, got inf"),
        ("{values: [.nan, 1]}", "values[0]", "expected a whole number of at least 0, got nan"),
        ("{values: [true, 1]}", "values[0]", "expected a whole number of at least 0, got true"),
        ("half", "", "expected a whole number of at least 0, got 0.5"),
        (
            "{ref: two, times: 0.5}",
            "",
            "give them as `values` or from a `file`, without times or plus",
        ),
        (
            "{values: [1, 2], plus: 1}",
            "",
            "give them as `values` or from a `file`, without times or plus",
        ),
        ("{constant: 1, shape: [2]}", "", "these are counts; give them as `values`"),
        ("{draw: randint, low: 0, high: 2, shape: [2]}", "", "these are counts; give them as `values`"),
        ('{printed: "1 2"}', "", "these are counts; give them as `values`"),
        ("{values: [1, 2, 3]}", "", "shape 3: expected axis B of (B) to be 2 as in query, got 3"),
        ("{values: 3}", "", "shape 1: expected axis B of (B) to be 2 as in query, got 1"),
        ("{values: [[1, 2]]}", "", "expected at most 1 axes (B), got shape 1x2"),
    ],
)
def test_lengths_that_count_nothing_are_refused(load_text: Load, lengths: str, field: str, words: str) -> None:
    line, found, message = _fault(load_text, f"key_lengths: {lengths}")
    assert (line, found) == (MORE_LINE, f"inputs.key_lengths.{field}".rstrip("."))
    assert words in message


@pytest.mark.parametrize(
    ("mask", "shape"), [("[true, false, true]", (1, 3)), ("[[true], [false]]", (2, 1)), ("true", (1, 1))]
)
def test_a_mask_of_queries_is_spread_as_any_mask(load_text: Load, mask: str, shape: tuple[int, ...]) -> None:
    case = _loaded(load_text, f"query_mask: {{values: {mask}}}")
    assert case.input_shapes["query_mask"] == shape
    inputs = convert_inputs(case, make_exact_inputs(case), "float32")
    assert inputs.arrays["query_mask"].dtype == bool
    assert np.broadcast_shapes(canonical_form("attention", {}, inputs.arrays).inputs["mask"].shape, (2, 4, 3, 5)) == (
        2,
        4,
        3,
        5,
    )


@pytest.mark.parametrize(
    ("mask", "field", "words"),
    [
        ("{values: [true, false]}", "", "shape 1x2 does not broadcast to 2x3"),
        ("{values: [[[true]]]}", "", "expected at most 2 axes (B, Lq), got shape 1x1x1"),
        ("{values: [2, 0, 1]}", ".values[0]", "a mask is boolean (true = may attend), got 2"),
    ],
)
def test_a_mask_of_other_queries_is_refused(load_text: Load, mask: str, field: str, words: str) -> None:
    line, found, message = _fault(load_text, f"query_mask: {mask}")
    assert (line, found) == (MORE_LINE, f"inputs.query_mask{field}")
    assert words in message


@pytest.mark.parametrize(
    ("more", "field", "words"),
    [
        ("past_key: {draw: randn, shape: [2, 2, 3, 6]}", "past_key", "needs past_value, which is missing"),
        ("past_value: {draw: randn, shape: [2, 2, 3, 7]}", "past_value", "needs past_key, which is missing"),
        (
            "past_key: {constant: 1, shape: [2, 2, 3, 6]}\npast_value: {constant: 1, shape: [2, 2, 4, 7]}",
            "past_value",
            "expected axis P of (B, Hkv, P, Dv) to be 3 as in past_key, got 4",
        ),
        (
            "past_key: {constant: 1, shape: [2, 4, 3, 6]}\npast_value: {constant: 1, shape: [2, 4, 3, 7]}",
            "past_key",
            "expected axis Hkv of (B, Hkv, P, D) to be 2 as in key, got 4",
        ),
    ],
)
def test_a_past_that_does_not_fit_is_refused(load_text: Load, more: str, field: str, words: str) -> None:
    _, found, message = _fault(load_text, more)
    assert found == f"inputs.{field}"
    assert words in message


def test_gradients_take_no_past(load_text: Load) -> None:
    more = "past_key: {constant: 1, shape: [2, 2, 3, 6]}"
    _, field, message = _fault(
        load_text, more, INPUTS.replace("inputs:", "operation: attention_gradients\n    inputs:")
    )
    assert field == "inputs.past_key"
    assert message.startswith("attention_gradients has no input 'past_key'; expected query, key, value, mask")


GRADIENTS = INPUTS.replace("    inputs:", "    operation: attention_gradients\n    inputs:")


@pytest.mark.parametrize(
    ("grad_output", "supports_statistics"),
    [
        ("{draw: randn, shape: [2, 4, 3, 7]}", True),
        ("{draw: rand, times: 2, shape: [2, 4, 3, 7]}", True),
        ("{constant: 1, shape: [2, 4, 3, 7]}", False),
        ("{draw: randint, low: 0, high: 9, shape: [2, 4, 3, 7]}", False),
    ],
)
def test_gradients_are_generic_if_what_comes_from_behind_is(
    load_text: Load, grad_output: str, supports_statistics: bool
) -> None:
    case = _loaded(load_text, f"grad_output: {grad_output}", GRADIENTS)
    assert case.supports_statistics is supports_statistics
    assert case.stage_shapes == {"grad_query": (2, 4, 3, 6), "grad_key": (2, 2, 5, 6), "grad_value": (2, 2, 5, 7)}


def test_gradients_need_one_of_the_output_in_its_shape(load_text: Load) -> None:
    assert _fault(load_text, "", GRADIENTS)[1:] == (
        "inputs.grad_output",
        "attention_gradients needs this input: grad_output is missing",
    )
    _, field, message = _fault(load_text, "grad_output: {constant: 1, shape: [2, 4, 3, 6]}", GRADIENTS)
    assert (field, message) == (
        "inputs.grad_output",
        "shape 2x4x3x6: expected axis Dv of (B, H, Lq, Dv) to be 7 as in value, got 6",
    )


def test_a_past_that_is_typed_makes_a_case_structured(load_text: Load) -> None:
    drawn = "past_key: {draw: randn, shape: [2, 2, 1, 6]}\npast_value: {draw: randn, shape: [2, 2, 1, 7]}"
    assert _loaded(load_text, drawn).supports_statistics
    assert not _loaded(
        load_text, drawn.replace("{draw: randn, shape: [2, 2, 1, 7]}", "{constant: 1, shape: [2, 2, 1, 7]}")
    ).supports_statistics


@pytest.mark.parametrize(
    ("dtypes", "number", "of"),
    [
        ("[float64, bfloat16]", "3.389e38", None),
        ("[bfloat16]", "3.395e38", "bfloat16"),
        ("[float32]", "3.395e38", None),
        ("[float64, bfloat16, float16]", "65505", "float16"),
        ("[float16]", "65504", None),
        ("[bfloat16]", "1.0e-50", None),
    ],
)
def test_a_number_must_be_in_range_of_the_narrowest_dtype(
    load_text: Load, dtypes: str, number: str, of: str | None
) -> None:
    inputs = INPUTS.replace("{draw: randn, shape: [2, 4, 3, 6]}", f"{{constant: {number}, shape: [2, 4, 3, 6]}}")
    inputs += f"    dtypes: {dtypes}\n"
    if of is None:
        assert _loaded(load_text, inputs=inputs).dtypes == tuple(dtypes[1:-1].split(", "))
        return
    _, field, message = _fault(load_text, "", inputs)
    assert field == "inputs.query.constant"
    assert message.endswith(f"is beyond the range of {of}; a case for wider dtypes says `dtypes`")


def test_a_product_of_draws_may_be_too_large_for_float16(load_text: Load) -> None:
    inputs = INPUTS.replace("shape: [2, 4, 3, 6]", "times: 6000, shape: [2, 4, 3, 6]") + "    dtypes: [float16]\n"
    # normal numbers of a generator are below 13
    assert _fault(load_text, "", inputs)[2].startswith("may reach 7.8e+04, beyond the range of float16")


def _shaped(query: str, key: str, more: str = "") -> str:
    return f"    inputs:\n      query: {{{query}}}\n      key: {{{key}}}\n      value: {{{key}}}\n{more}"


ANY = "draw: randn, shape: "


@pytest.mark.parametrize(
    ("inputs", "weights", "output"),
    [
        (_shaped(ANY + "[0, 4, 3, 6]", ANY + "[0, 2, 5, 6]"), (0, 4, 3, 5), (0, 4, 3, 6)),
        (_shaped(ANY + "[2, 4, 0, 6]", ANY + "[2, 4, 5, 6]"), (2, 4, 0, 5), (2, 4, 0, 6)),
        (_shaped(ANY + "[2, 4, 3, 6]", ANY + "[2, 4, 0, 6]"), (2, 4, 3, 0), (2, 4, 3, 6)),
        (_shaped("constant: 1, shape: [3, 6]", "constant: 1, shape: [0, 6]"), (1, 1, 3, 0), (1, 1, 3, 6)),
        (_shaped("identity: 6", "ascending: [1, 2], shape: [0, 6]"), (1, 1, 6, 0), (1, 1, 6, 6)),
        (_shaped("identity: 6", "geometric: [1, 2], shape: [0, 6]"), (1, 1, 6, 0), (1, 1, 6, 6)),
        (
            _shaped(ANY + "[3, 6]", ANY + "[0, 6]", "      mask: {constant: 1, shape: [3, 0]}\n"),
            (1, 1, 3, 0),
            (1, 1, 3, 6),
        ),
        (_shaped(ANY + "[3, 6]", ANY + "[0, 6]", "      key_lengths: {values: [0]}\n"), (1, 1, 3, 0), (1, 1, 3, 6)),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_there_may_be_no_batch_no_query_and_no_key(
    load_text: Load, inputs: str, weights: tuple[int, ...], output: tuple[int, ...], dtype: str
) -> None:
    case = _loaded(load_text, inputs=inputs)
    assert (case.stage_shapes["weights"], case.stage_shapes["output"]) == (weights, output)
    made = convert_inputs(case, make_exact_inputs(case), dtype)
    assert {name: array.shape for name, array in made.arrays.items()} == case.input_shapes
    for posed in (call_form, canonical_form):
        mask = posed("attention", {"is_causal": True, "window": (1, 1)}, made.arrays).inputs.get("mask")
        assert mask is None or np.broadcast_shapes(mask.shape, weights) == weights


@pytest.mark.parametrize("generator", ["numpy-legacy", "r", "torch"])
def test_an_empty_draw_draws_nothing(load_text: Load, generator: str) -> None:
    kind = "runif, low: 0, high: 1" if generator == "r" else "randn"
    size = "[4, 6]"  # torch draws fewer than 16 normal numbers by another method
    inputs = (
        f"    random: {{generator: {generator}, seed: 5}}\n    inputs:\n      query: {{draw: {kind}, shape: {size}}}\n"
        f"      key: {{draw: {kind}, shape: [%s, 6]}}\n      value: {{draw: {kind}, shape: [%s, 6]}}\n"
    )
    query = [make_exact_inputs(_loaded(load_text, inputs=inputs % (keys, keys)))["query"].array for keys in (0, 16)]
    np.testing.assert_array_equal(query[0], query[1])


def test_an_empty_past_is_a_past_of_length_0(load_text: Load) -> None:
    past = "past_key: {constant: 0, shape: [2, 2, 0, 6]}\npast_value: {constant: 0, shape: [2, 2, 0, 7]}"
    assert _loaded(load_text, past).stage_shapes["weights"] == (2, 4, 3, 5)
