"""Numbers may be expected where they can be compared with something; elsewhere the case is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attncheck.errors import CaseError
from attncheck.reading.case import Case
from attncheck.reading.loader import load_case_file

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: What is expected
source: {kind: derivation, title: Made for this test}
operation: attention
cases:
  - name: The case at hand
    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}%s}
"""


STORED = HEAD % "" + "    expect: [{stage: output, printed: {file: %s}}]\n"


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


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("{file: missing.npy}", r"expect\[0\].printed.file: there is no file 'missing.npy'"),
        ("{file: ../output.npy}", r"expect\[0\].printed.file: .* leads out of the folder"),
        ("{file: narrow.npy}", r"expect\[0\].printed: expected numbers of shape 1x1x2x2, got 2x1"),
        ("{file: many.npy}", r"expect\[0\].printed.file: 40000 numbers; expected at most 30000"),
        ("{file: output.npy, times: 2}", r"expect\[0\].printed.*times"),
        ("{file: output.npy}, decimals: 3", r"expect\[0\].decimals: says how numbers were printed"),
    ],
)
def test_numbers_of_a_file_that_cannot_be_expected_are_refused(tmp_path: Path, printed: str, message: str) -> None:
    np.save(tmp_path / "output.npy", np.ones((2, 2)))
    np.save(tmp_path / "narrow.npy", np.ones((2, 1)))
    np.save(tmp_path / "many.npy", np.ones((200, 200)))
    with pytest.raises(CaseError, match=message):
        _load_beside(tmp_path, STORED.replace("{file: %s}", printed))


# How printed numbers came about.

PRINTED = """\
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
        load_text(PRINTED % (source, case, LOGISTIC))[0].computed_in
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
        (expected,) = load_text(PRINTED % ("", case, LOGISTIC + expectation))[0].expected
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
