"""What attention may be given, and in which form: layouts, storage, stages, lengths, projections; what is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tables import tables_beside

from attncheck.errors import CaseError
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import load_case_file
from attncheck.reading.lowering import Problem

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Forms of inputs
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: The case at hand
"""
SPLIT = """\
    inputs:
      query: {draw: randn, shape: [2, 4, 3, 6]}
      key: {draw: randn, shape: [2, 2, 5, 6]}
      value: {draw: randn, shape: [2, 2, 5, 6]}
"""
MERGED = """\
    layout: merged
    options: {heads: 4, kv_heads: 2}
    inputs:
      query: {ascending: [0, 1], shape: [2, 3, 24]}
      key: {ascending: [0, 1], shape: [2, 5, 12]}
      value: {ascending: [0, 1], shape: [2, 5, 14]}
"""


def _loaded(load_text: Load, text: str) -> Case:
    [case] = load_text(HEAD + text)
    return case


def test_heads_side_by_side_are_split_and_handed_over_as_views_of_that(load_text: Load) -> None:
    case = _loaded(load_text, MERGED)
    assert case.input_shapes == {"query": (2, 4, 3, 6), "key": (2, 2, 5, 6), "value": (2, 2, 5, 7)}
    assert case.memory_layout == dict.fromkeys(("query", "key", "value"), "transposed")
    made = {name: exact.array for name, exact in make_exact_inputs(case).items()}
    whole = np.arange(2.0 * 3 * 24).reshape(2, 3, 24)
    for head in range(4):
        np.testing.assert_array_equal(made["query"][:, head], whole[..., 6 * head : 6 * head + 6])
    keys = np.arange(2.0 * 5 * 14).reshape(2, 5, 14)
    for head in range(2):
        np.testing.assert_array_equal(made["value"][:, head], keys[..., 7 * head : 7 * head + 7])


def test_merged_heads_of_a_document_keep_the_radius_of_what_is_printed(load_text: Load) -> None:
    case = _loaded(
        load_text,
        "    layout: merged\n    options: {heads: 2}\n    inputs:\n"
        '      query: {printed: "1.5 2.25"}\n      key: {printed: "1 2"}\n      value: {printed: "1 2"}\n',
    )
    assert make_exact_inputs(case)["query"].radius.tolist() == [[[[0.05]], [[0.005]]]]


def test_inputs_are_rounded_to_their_storage_and_then_widened(load_text: Load) -> None:
    text = SPLIT.replace("{draw: randn, shape: [2, 4, 3, 6]}", "{values: [[1.1, 2, 3, 4, 5, 6]]}")
    text = text.replace("[2, 2, 5, 6]", "[5, 6]")
    # 1.1 = 1.000110011001100110011001100... in binary, cut to 8, 11 and 24 bits
    for storage, dtype, kept in (
        ("bfloat16", "float64", 1 + 13 / 2**7),
        ("bfloat16", "float32", 1 + 13 / 2**7),
        ("float16", "float32", 1 + 102 / 2**10),
        ("float32", "float64", 1 + 838861 / 2**23),
    ):
        case = _loaded(load_text, f"{text}    storage: {storage}\n    dtypes: [{dtype}]\n")
        inputs = convert_inputs(case, make_exact_inputs(case), dtype)
        assert str(inputs.arrays["query"].dtype) == dtype
        assert inputs.arrays["query"][0, 0, 0, 0] == kept
        assert inputs.radius["query"][0, 0, 0, 0] == abs(kept - 1.1)


LONG = """\
    inputs:
      query: {draw: randn, shape: [9000, 1]}
      key: {draw: randn, shape: [9000, 1]}
      value: {draw: randn, shape: [9000, 1]}
"""


def test_only_the_stages_that_are_named_are_judged_and_held(load_text: Load) -> None:
    assert _loaded(load_text, SPLIT).judged_stages is None
    assert _loaded(load_text, SPLIT + "    stages: [output, weights]\n").judged_stages == ("output", "weights")
    assert _loaded(load_text, LONG + "    stages: [output]\n").judged_stages == ("output",)


def test_defaults_are_for_the_cases_that_they_fit(load_text: Load) -> None:
    fitting = "heads: 4, kv_heads: 3, alignment: bottom_right, score: general"
    for defaults, options, expected in (
        (f"{fitting}, window: [1, 1]", "", {"window": (1, 1), "alignment": "bottom_right"}),
        (fitting, "", {}),
        (fitting, "    options: {is_causal: true}\n", {"is_causal": True, "alignment": "bottom_right"}),
    ):
        head = HEAD.replace("defaults: {", f"defaults: {{options: {{{defaults}}}, ")
        assert load_text(head + SPLIT + options)[0].options == expected


# The first line of the case's own text is line 10, a further input's line 13.
SHARED_HEAD = """\
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
SHARED = """\
    inputs:
      query: {draw: randn, shape: [2, 4, 3, 6]}
      key: {draw: randn, shape: [2, 2, 5, 6]}
      value: {draw: randn, shape: [2, 2, 5, 7]}
"""


def with_input(load_text: Load, more: str = "", inputs: str = SHARED) -> Case:
    [case] = load_text(SHARED_HEAD + inputs + "".join(f"      {line}\n" for line in more.splitlines()))
    return case


def test_lengths_are_whole_numbers_in_every_dtype(load_text: Load) -> None:
    for lengths in ("{values: [0, 5]}", "two", "{ref: two, rows: [1, 0]}"):
        case = with_input(load_text, f"key_lengths: {lengths}")
        inputs = convert_inputs(case, make_exact_inputs(case), "bfloat16")
        assert (inputs.arrays["key_lengths"].dtype, inputs.arrays["key_lengths"].shape) == (np.int64, (2,))
        assert not inputs.radius["key_lengths"].any()
        assert case.supports_statistics


def test_a_number_may_be_as_large_as_the_narrowest_dtype_holds(load_text: Load) -> None:
    for dtypes, number in (
        ("float64, bfloat16", "3.389e38"),
        ("float32", "3.395e38"),
        ("float16", "65504"),
        ("bfloat16", "1.0e-50"),
    ):
        inputs = SHARED.replace("{draw: randn, shape: [2, 4, 3, 6]}", f"{{constant: {number}, shape: [2, 4, 3, 6]}}")
        assert with_input(load_text, inputs=f"{inputs}    dtypes: [{dtypes}]\n").dtypes == tuple(dtypes.split(", "))


def _shaped(query: str, key: str, more: str = "") -> str:
    return f"    inputs:\n      query: {{{query}}}\n      key: {{{key}}}\n      value: {{{key}}}\n{more}"


ANY = "draw: randn, shape: "


EMPTY: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    (_shaped(ANY + "[0, 4, 3, 6]", ANY + "[0, 2, 5, 6]"), (0, 4, 3, 5), (0, 4, 3, 6)),
    (_shaped(ANY + "[2, 4, 0, 6]", ANY + "[2, 4, 5, 6]"), (2, 4, 0, 5), (2, 4, 0, 6)),
    (_shaped(ANY + "[2, 4, 3, 6]", ANY + "[2, 4, 0, 6]"), (2, 4, 3, 0), (2, 4, 3, 6)),
    (_shaped("constant: 1, shape: [3, 6]", "constant: 1, shape: [0, 6]"), (1, 1, 3, 0), (1, 1, 3, 6)),
    (_shaped("identity: 6", "ascending: [1, 2], shape: [0, 6]"), (1, 1, 6, 0), (1, 1, 6, 6)),
    (_shaped("identity: 6", "geometric: [1, 2], shape: [0, 6]"), (1, 1, 6, 0), (1, 1, 6, 6)),
    (_shaped(ANY + "[3, 6]", ANY + "[0, 6]", "      mask: {constant: 1, shape: [3, 0]}\n"), (1, 1, 3, 0), (1, 1, 3, 6)),
    (_shaped(ANY + "[3, 6]", ANY + "[0, 6]", "      key_lengths: {values: [0]}\n"), (1, 1, 3, 0), (1, 1, 3, 6)),
)


def test_there_may_be_no_batch_no_query_and_no_key(load_text: Load) -> None:
    for inputs, weights, output in EMPTY:
        case = with_input(load_text, inputs=inputs)
        assert (case.stage_shapes["weights"], case.stage_shapes["output"]) == (weights, output)
        made = convert_inputs(case, make_exact_inputs(case), "float16")
        assert {name: array.shape for name, array in made.arrays.items()} == case.input_shapes
        for form in (Problem.called, Problem.canonical):
            mask = form(Problem("attention", {"is_causal": True, "window": (1, 1)}, made.arrays)).inputs.get("mask")
            assert mask is None or np.broadcast_shapes(mask.shape, weights) == weights


@pytest.mark.parametrize("generator", ["numpy-legacy", "r", "torch"])
def test_an_empty_draw_draws_nothing(load_text: Load, generator: str) -> None:
    kind = "runif, low: 0, high: 1" if generator == "r" else "randn"
    size = "[4, 6]"  # torch draws fewer than 16 normal numbers by another method
    inputs = (
        f"    random: {{generator: {generator}, seed: 5}}\n    inputs:\n      query: {{draw: {kind}, shape: {size}}}\n"
        f"      key: {{draw: {kind}, shape: [%s, 6]}}\n      value: {{draw: {kind}, shape: [%s, 6]}}\n"
    )
    query = [make_exact_inputs(with_input(load_text, inputs=inputs % (keys, keys)))["query"].array for keys in (0, 16)]
    np.testing.assert_array_equal(query[0], query[1])


LINEAR_HEAD = """\
title: Projections
source: {kind: derivation, title: Made for this test}
operation: multi_head_attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
"""


PRINTED = """\
cases:
  - name: The case at hand
    options: {heads: 2, projections: linear}
    arrays: {packed: {ascending: [1, 1], shape: [12, 2]}}
    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}, in_proj_weight: packed}
    expect: [{stage: query, exact: true, because: columns, known: WHAT}]
"""


def test_results_are_compared_with_their_heads_side_by_side_or_one_by_one(load_text: Load) -> None:
    for known in (
        '"1 3 5 7\\n2 4 6 8"',
        '["1 3 5 7\\n2 4 6 8"]',
        '["1 3\\n2 4", "5 7\\n6 8"]',
        '[["1 3\\n2 4", "5 7\\n6 8"]]',
    ):
        [case] = load_text(LINEAR_HEAD + PRINTED.replace("WHAT", known))
        numbers = case.expected[0].numbers
        assert numbers is not None
        assert numbers.value.tolist() == [[[[1, 3], [2, 4]], [[5, 7], [6, 8]]]]


# What is expected.

EXPECTING = """\
title: What is expected
source: {kind: derivation, title: Made for this test}
operation: attention
cases:
  - name: The case at hand
    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}%s}
"""


STORED = EXPECTING % "" + "    expect: [{stage: output, printed: {file: %s}}]\n"


def _load_beside(folder: Path, text: str) -> Case:
    """Read a case beside the arrays of ``folder``."""
    path = folder / "cases.yaml"
    path.write_text(text, encoding="utf-8")
    [case] = load_case_file(path, path.name, "cases", ())
    return case


def test_numbers_of_a_file_are_expected_to_the_last_bit(tmp_path: Path) -> None:
    numbers = np.array([[1 / 3, 2e-320], [-np.inf, 4.0]])
    np.save(tmp_path / "output.npy", numbers)
    [expected] = _load_beside(tmp_path, STORED % "output.npy").expected
    assert expected.stored
    assert expected.basis == "printed"
    assert expected.numbers is not None
    np.testing.assert_array_equal(expected.numbers.value, numbers.reshape(1, 1, 2, 2))
    assert not expected.numbers.radius.any()
    assert float(expected.numbers.text[0, 0, 0, 0]) == 1 / 3


def test_the_dtype_that_numbers_were_computed_in_may_be_of_16_bits(tmp_path: Path) -> None:
    np.save(tmp_path / "output.npy", np.ones((2, 2)))
    text = STORED % "output.npy" + "    dtypes: [float32, bfloat16]\n"
    assert _load_beside(tmp_path, text + "    computed_in: bfloat16\n").dtypes == ("float32", "bfloat16")
    with pytest.raises(CaseError, match="without bfloat16 among `dtypes`"):
        _load_beside(tmp_path, text + "    computed_in: float16\n")


def test_numbers_of_a_file_that_cannot_be_expected_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "output.npy", np.ones((2, 2)))
    np.save(tmp_path / "narrow.npy", np.ones((2, 1)))
    np.save(tmp_path / "many.npy", np.ones((200, 200)))
    for printed, message in tables_beside(__file__)["stored_refused"].items():
        with pytest.raises(CaseError, match=message):
            _load_beside(tmp_path, STORED.replace("{file: %s}", printed))


# How printed numbers came about.

DOCUMENT = """\
title: What is printed
source: {kind: document, title: Made for this test%s}
operation: softmax
cases:
  - name: The case at hand
    inputs: {scores: {values: [0, 1]}}%s
    expect: [{stage: weights, %s}]
"""
LOGISTIC = "printed: 0.2689 0.7310"


def test_the_precision_is_that_of_the_case_or_else_of_the_source(load_text: Load) -> None:
    found = [
        load_text(DOCUMENT % (source, case, LOGISTIC))[0].computed_in
        for source, case in (
            ("", ""),
            (", computed_in: float32", ""),
            (", computed_in: float32", "\n    computed_in: bfloat16"),
            ("", "\n    computed_in: float16"),
        )
    ]
    assert found == [None, "float32", "bfloat16", "float16"]


def test_digits_are_those_of_the_expectation_or_else_of_the_case(load_text: Load) -> None:
    def digits(case: str, expectation: str) -> tuple[bool, float, str | None]:
        (expected,) = load_text(DOCUMENT % ("", case, LOGISTIC + expectation))[0].expected
        assert expected.numbers is not None
        return expected.numbers.truncated, float(expected.numbers.half_unit.max()), expected.digits

    off = "{units: 2, because: typed from a figure}"
    assert digits("", "") == (False, 5e-5, None)
    assert digits("\n    digits: truncated", "") == (True, 5e-5, "Digits were cut off, not rounded.")
    assert digits("\n    digits: truncated", ", digits: rounded") == (False, 5e-5, None)
    assert digits("", f", digits: {off}") == (
        False,
        pytest.approx(25e-5),
        "Last digits may be off by 2: typed from a figure",
    )
    assert digits("\n    digits: truncated", ", exact: true") == (False, 0.0, None)
