"""Options that say nothing of a case, or no sense, are refused at their line; defaults go where they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.errors import CaseError
from attncheck.reading.case import Case

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Options
source: {kind: derivation, title: Made for this test}
operation: attention
arrays: {q: {constant: 1, shape: [2, 4, 3, 6]}, k: {constant: 1, shape: [2, 2, 5, 6]}}
"""
CASES = "cases:\n  - name: The case at hand\n"
INPUTS = "    inputs: {query: q, key: k, value: k%s}\n"
MERGED = """\
    layout: merged
    inputs: {query: {constant: 1, shape: [3, 8]}, key: {constant: 1, shape: [4, 4]}, value: {identity: 4}}
"""
"""Inputs of which the heads lie side by side: 8 columns, and 4 of keys."""
OPTIONS_LINE = 8


def _loaded(load_text: Load, options: str, inputs: str = INPUTS % "", defaults: str = "") -> Case:
    [case] = load_text(HEAD + CASES + inputs + (f"    options: {options}\n" if options else "") + defaults)
    return case


def _fault(load_text: Load, options: str, inputs: str = INPUTS % "", defaults: str = "") -> tuple[int | None, str, str]:
    with pytest.raises(CaseError) as error:
        _loaded(load_text, options, inputs, defaults)
    [fault] = error.value.faults
    assert fault.case == "The case at hand" or defaults
    return fault.line, fault.field or "", fault.message


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ("{softcap: 30, scale: 0.5}", {"softcap": 30, "scale": 0.5}),
        ("{window: [2, 0]}", {"window": (2, 0)}),
        ("{window: [null, 1]}", {"window": (None, 1)}),
        ("{window: [0, null], alignment: bottom_right}", {"window": (0, None), "alignment": "bottom_right"}),
        ("{is_causal: true, alignment: top_left}", {"is_causal": True, "alignment": "top_left"}),
        ("{is_causal: true, empty_rows: nan}", {"is_causal": True, "empty_rows": "nan"}),
    ],
)
def test_options_are_read_as_the_rest_takes_them(load_text: Load, options: str, read: dict[str, Any]) -> None:
    assert _loaded(load_text, options).options == read


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ("{softcap: 0}", "options.softcap", "expected a value greater than 0, got 0"),
        ("{softcap: .nan}", "options.softcap", "expected a value greater than 0, got nan"),
        ("{softcap: .inf}", "options.softcap", "expected a finite number, got inf"),
        ("{softcap: true}", "options.softcap", "expected a number, got true"),
        ("{window: 3}", "options.window", "expected a list, got 3"),
        ("{window: [1]}", "options.window", "expected at least 2 items, got [1]"),
        ("{window: [1, 2, 3]}", "options.window", "expected at most 2 items, got [1, 2, 3]"),
        ("{window: [-1, 2]}", "options.window[0]", "expected a value greater than or equal to 0, got -1"),
        ("{window: [1, 0.5]}", "options.window[1]", "expected a whole number, got 0.5"),
        (
            "{window: [null, null]}",
            "options.window",
            "bounds nothing on either side; expected a number of keys on one at least",
        ),
        ("{alignment: left}", "options.alignment", "expected 'top_left' or 'bottom_right', got 'left'"),
        (
            "{alignment: bottom_right}",
            "options.alignment",
            "says where queries stand for is_causal or a window, and this case has neither",
        ),
        ("{alignment: top_left, is_causal: false}", "options.alignment", "and this case has neither"),
        (
            "{heads: 4}",
            "options.heads",
            "says how inputs in `layout: merged` are split; these inputs have an axis of heads",
        ),
        ("{kv_heads: 2}", "options.kv_heads", "says how inputs in `layout: merged` are split"),
        ("{empty_rows: none}", "options.empty_rows", "expected 'zero', 'uniform' or 'nan', got 'none'"),
        (
            "{empty_rows: zero}",
            "options.empty_rows",
            "says what a query gives that may attend to no key; nothing forbids a key here",
        ),
        ("{score: dot}", "options.score", "does not apply to attention, which takes alignment, empty_rows, heads"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_at_its_line(
    load_text: Load, options: str, field: str, words: str
) -> None:
    line, found, message = _fault(load_text, options)
    assert (line, found) == (OPTIONS_LINE, field)
    assert words in message


@pytest.mark.parametrize(
    ("operation", "options", "field", "words"),
    [
        ("softmax", "{window: [1, 1]}", "window", "does not apply to softmax, which takes empty_rows"),
        ("scoring", "{is_causal: true}", "is_causal", "does not apply to scoring, which takes scale, score, softcap"),
        (
            "masking",
            "{softcap: 2}",
            "softcap",
            "does not apply to masking, which takes alignment, is_causal, mask_fill, window",
        ),
        ("multi_head_attention", "{heads: 2, softcap: 2}", "softcap", "does not apply to multi_head_attention"),
        ("scoring", "{score: cosine, softcap: 2}", "softcap", "the cosine score has no softcap"),
        ("scoring", "{score: additive, scale: 2}", "scale", "the additive score has no scale"),
        ("scoring", "{score: general, softcap: 2}", "softcap", "the general score has no softcap"),
        ("multi_head_attention", "{heads: 4, kv_heads: 3}", "kv_heads", "4 query heads cannot share 3 key and value"),
        ("multi_head_attention", "{heads: 4, kv_heads: 0}", "kv_heads", "expected a value greater than 0, got 0"),
    ],
)
def test_an_option_is_refused_where_its_operation_has_no_use_for_it(
    load_text: Load, operation: str, options: str, field: str, words: str
) -> None:
    inputs = f"    inputs: {{}}\n    operation: {operation}\n"
    line, found, message = _fault(load_text, options, inputs)
    assert (line, found) == (OPTIONS_LINE + 1, f"options.{field}")
    assert words in message


@pytest.mark.parametrize(
    "more",
    [
        ", mask: {values: [true, false, true, true, true]}",
        ", bias: {values: [0, -.inf, 0, 0, 0]}",
        ", key_lengths: {values: [5, 0]}",
        ", query_mask: {values: [true, false, true]}",
    ],
)
def test_empty_rows_may_be_spoken_of_where_something_forbids_keys(load_text: Load, more: str) -> None:
    assert _loaded(load_text, "{empty_rows: uniform}", INPUTS % more).options == {"empty_rows": "uniform"}


def test_a_bias_of_finite_numbers_forbids_nothing(load_text: Load) -> None:
    _, field, _ = _fault(load_text, "{empty_rows: uniform}", INPUTS % ", bias: {values: [0, 1, 0, 0, 0]}")
    assert field == "options.empty_rows"


def test_without_a_key_every_row_is_empty(load_text: Load) -> None:
    none = (
        "    inputs: {query: q, key: {constant: 1, shape: [2, 2, 0, 6]}, value: {constant: 1, shape: [2, 2, 0, 6]}}\n"
    )
    assert _loaded(load_text, "{empty_rows: zero}", none).stage_shapes["weights"] == (2, 4, 3, 0)


def test_the_merged_layout_takes_heads(load_text: Load) -> None:
    case = _loaded(load_text, "{heads: 4, kv_heads: 2}", MERGED)
    assert (case.input_shapes["query"], case.input_shapes["key"]) == ((1, 4, 3, 2), (1, 2, 4, 2))


def test_query_heads_must_be_a_multiple_of_those_of_keys_in_the_merged_layout_too(load_text: Load) -> None:
    line, field, message = _fault(load_text, "{heads: 4, kv_heads: 3}", MERGED)
    assert (line, field) == (OPTIONS_LINE + 1, "options.kv_heads")
    assert message == "4 query heads cannot share 3 key and value heads evenly"


DEFAULTS = "defaults: {options: {heads: 4, kv_heads: 3, alignment: bottom_right, score: general, window: [1, 1]}}\n"


def test_defaults_are_for_the_cases_that_they_fit(load_text: Load) -> None:
    assert _loaded(load_text, "", defaults=DEFAULTS).options == {"window": (1, 1), "alignment": "bottom_right"}
    causal = DEFAULTS.replace(", window: [1, 1]", "")
    assert _loaded(load_text, "", defaults=causal).options == {}
    assert _loaded(load_text, "{is_causal: true}", defaults=causal).options == {
        "is_causal": True,
        "alignment": "bottom_right",
    }


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ("{softcap: .inf}", "softcap", "expected a finite number, got inf"),
        ("{window: [null, null]}", "window", "bounds nothing on either side"),
    ],
)
def test_a_fault_of_the_defaults_is_told_where_they_stand(
    load_text: Load, options: str, field: str, words: str
) -> None:
    line, found, message = _fault(load_text, "{scale: 1}", defaults=f"defaults: {{options: {options}}}\n")
    assert (line, found) == (OPTIONS_LINE + 1, f"defaults.options.{field}")
    assert words in message
