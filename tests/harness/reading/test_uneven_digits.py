"""Numbers that show fewer digits than their neighbours are warned of; honest ways of printing are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases

Load = Callable[[str | bytes], list[Case]]

CASE = """\
title: Printed numbers
source: {kind: document, title: Made for this test}
operation: softmax
cases:
  - name: The case at hand
    inputs: {scores: %s}
    expect:
      - {stage: weights, %s}
"""
SQUARE = "{values: [[0, 1], [2, -1]]}"


def warnings(load_text: Load, printed: str, says: str = "", scores: str = SQUARE) -> tuple[str, ...]:
    (case,) = load_text(CASE % (scores, f'printed: "{printed}"{says}'))
    return case.warnings


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (
            "0. 0.73105858\\n0.95257413 0.04742587",
            "0. shows fewer digits than numbers beside, so that anything within 0.5",
        ),
        ("0. 1.\\n0.95257413 0.04742587", "0. and 1 more show fewer digits"),  # a row of NumPy's that is all whole
        ("0.5 0.73105858\\n0.95257413 0.25", "0.5 and 1 more show fewer digits"),
        ("0.2 0.73\\n0.95 0.05", "0.2 shows fewer digits"),
        ("1e-5 0.73105858\\n0.95257413 0.04742587", "1e-5 shows fewer digits"),
    ],
)
def test_zeros_that_were_left_out_are_warned_of(load_text: Load, printed: str, words: str) -> None:
    (warning,) = warnings(load_text, printed)
    assert warning.startswith(f'file.yaml:8: case "The case at hand": expect[0].printed: {words}')
    decimals = 2 if "0.73\\n" in printed else 8
    assert f"say `decimals: {decimals}` if all were rounded alike" in warning


@pytest.mark.parametrize(
    "printed",
    [
        "0.26894142 0.73105858\\n0.95257413 0.04742587",
        "0.26894142 0.7310586\\n0.95257413 0.0474259",  # R gives a column decimals of its own
        "0.50 0.25\\n0.95257413 0.04742587",  # and whoever prints a row by itself a row
        "0.26894142 0.7310586\\n0.95257413 0.04742587",  # a last zero that is missing by chance costs nothing
        "0.2689 0.7311\\n12.95 1.234e-5",  # four significant digits each
        "1 0\\n0 1",
        "inf nan\\n0.5 .",
        ". 0.73105858\\n. 0.04742587",
    ],
)
def test_honest_ways_of_printing_are_not_warned_of(load_text: Load, printed: str) -> None:
    assert warnings(load_text, printed) == ()


@pytest.mark.parametrize(
    "says",
    [
        ", decimals: 8",
        ", significant_digits: 8",
        ", exact: true",
        ", digits: rounded",
        ", digits: truncated",
        ", digits: {units: 1, because: typed from a figure}",
    ],
)
def test_who_says_how_digits_came_about_is_not_warned(load_text: Load, says: str) -> None:
    assert warnings(load_text, "0. 0.73105858\\n0.95257413 0.04742587", says) == ()


def test_a_case_says_it_for_all_of_its_numbers(load_text: Load) -> None:
    text = CASE % (SQUARE, 'printed: "0. 0.73105858\\n0.95257413 0.04742587"')
    (case,) = load_text(text.replace("    inputs:", "    digits: rounded\n    inputs:"))
    assert case.warnings == ()


def test_inputs_and_the_arrays_that_they_refer_to_are_looked_at_too(load_text: Load) -> None:
    weights = "0.26894142 0.73105858\\n0.95257413 0.04742587"
    own = '{printed: "0. 1.00000001\\n2.00000001 -1.00000001"}'
    (warning,) = warnings(load_text, weights, scores=own)
    assert "inputs.scores.printed: 0. shows fewer digits" in warning
    text = CASE % ("{ref: shared, times: 2}", f'printed: "{weights}"') + f"arrays: {{shared: {own}}}\n"
    (case,) = load_text(text)
    (warning,) = case.warnings
    assert warning.startswith("file.yaml:9: arrays.shared.printed: 0. shows fewer digits")


def test_no_bundled_case_is_warned_of() -> None:
    assert [warning for case in select_cases().cases for warning in case.warnings] == []
