"""Failures that a new process does not show: which calls are repeated, and which failures get the diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attncheck import check
from attncheck.asking.earlier_calls import MAX_REPEATED_CALLS, MAX_REPEATED_PER_GROUP, mark_irreproducible_rows
from attncheck.judging.judge import OTHER_CALL_DIAGNOSIS, RIGHT_IN_NEW_PROCESS_DIAGNOSIS
from attncheck.results.format import Row

KERNEL = """\
import numpy as np

KEYS = {}


def attention(query, key, value):
    key = KEYS.setdefault((key.shape, key.dtype), key)
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True) @ value
"""
CASES = """\
title: Calls with keys of one shape
source: {kind: derivation, title: Made for the test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float32]}
cases:
"""
CASE = (
    "  - {{name: {number} queries, inputs: {{query: {{draw: randn, shape: [{number}, 4]}}, "
    "key: {{draw: randn, shape: [6, 4]}}, value: {{draw: randn, shape: [6, 4]}}}}}}\n"
)


def failing(case: str, diagnosis: str | None = None, message: str = "3 times the bound") -> Row:
    return Row(case, "attention", "float32", "mine", "stage", "output", "numeric", message=message, diagnosis=diagnosis)


def marked(rows: list[Row], is_right: Callable[[str], bool]) -> tuple[list[Row], list[str]]:
    """Return the rows after the repetition, and the cases that were repeated."""
    repeated: list[str] = []

    def repeat(call: tuple[str, str]) -> bool:
        repeated.append(call[0])
        return is_right(call[0])

    undiagnosed = [replace(row, diagnosis=None, message="3 times the bound") for row in rows]
    return mark_irreproducible_rows(undiagnosed, rows, repeat), repeated


def test_an_ordinary_fault_costs_a_process_only_if_it_has_no_clear_diagnosis() -> None:
    named = [failing(f"named {number}", "scale-one", "the scale is 1; 3 times the bound") for number in range(9)]
    assert marked(named, lambda case: True) == (named, [])
    doubtful = [replace(row, message="the scale is 1, but not in 10 other cases; 3 times the bound") for row in named]
    for rows, repeated in ((doubtful, ["named 0"]), ([*doubtful, failing("unnamed")], ["named 0", "unnamed"])):
        assert marked(rows, lambda case: False) == (rows, repeated)


def test_failures_that_new_processes_do_not_show_have_one_diagnosis_also_if_they_had_another() -> None:
    named = [failing(f"named {number}", "scale-one", "the scale is 1; 3 times the bound") for number in range(30)]
    unnamed = [failing(f"unnamed {number}") for number in range(4)]
    rows, repeated = marked([*named, *unnamed], lambda case: True)
    assert len(repeated) == 2 * MAX_REPEATED_PER_GROUP <= MAX_REPEATED_CALLS
    assert {row.diagnosis for row in rows} == {RIGHT_IN_NEW_PROCESS_DIAGNOSIS}
    words = "the result depends on earlier calls, or on chance: 6 repeated calls are right in a new process"
    assert {row.message for row in rows} == {f"{words}; 3 times the bound"}


def test_a_name_stays_if_a_new_process_confirms_it_and_calls_of_no_name_are_marked_singly() -> None:
    named = [failing(f"named {number}", "scale-one", "the scale is 1; 3 times the bound") for number in range(3)]
    unnamed = [failing(f"unnamed {number}") for number in range(3)]
    rows, _ = marked([*named, *unnamed], lambda case: case == "unnamed 0")
    assert rows[:3] == named
    assert [row.diagnosis for row in rows[3:]] == [RIGHT_IN_NEW_PROCESS_DIAGNOSIS, None, None]


def test_proved_state_and_failures_that_depend_on_earlier_calls_are_one_cause() -> None:
    rows, repeated = marked([failing("proved", OTHER_CALL_DIAGNOSIS), failing("unnamed")], lambda case: True)
    assert repeated == ["unnamed"]
    assert {row.diagnosis for row in rows} == {OTHER_CALL_DIAGNOSIS}


@pytest.mark.usefixtures("forked_workers")
def test_a_check_of_a_function_with_stale_keys_names_the_state(tmp_path: Path) -> None:
    (tmp_path / "stale.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "cases.yaml").write_text(
        CASES + "".join(CASE.format(number=number) for number in range(2, 8)), encoding="utf-8"
    )
    result = check(f"{tmp_path / 'stale.py'}:attention", cases=[str(tmp_path / "cases.yaml")])
    assert len(result.failures) >= 3
    assert {row.diagnosis for row in result.failures} == {RIGHT_IN_NEW_PROCESS_DIAGNOSIS}
