"""A change is a line that fits; names that are cut can still be told apart."""

from __future__ import annotations

import pandas as pd
import pytest

from attncheck.reports.diff.frames import (
    CASE_CHANGES,
    ENVIRONMENT_CHANGES,
    ERROR_CHANGES,
    KNOWN_CHANGES,
    VERDICT_CHANGES,
    typed,
)
from attncheck.reports.diff.lines import WIDTH, change_lines, shortened

LONG = "kernel_shapes/tiles/no-edge-shows-{}-the-other-corner-of-a-rather-large-tile-128-double-by-under"


def verdicts(cases: list[str], implementation: str = "torch.compile", message: str = "") -> pd.DataFrame:
    rows = [
        ("worse", "local", implementation, case, "bfloat16", "agree", "", "numeric", "output", False, message)
        for case in cases
    ]
    return typed(pd.DataFrame(rows, columns=list(VERDICT_CHANGES)), VERDICT_CHANGES)


def test_a_verdict_is_one_line_that_says_from_what_to_what() -> None:
    (line,) = change_lines("verdicts", verdicts(["attention/one"], message="off by 2"), WIDTH)
    assert line == "worse  attention/one  bfloat16  agree -> numeric at output  off by 2"


def test_names_are_cut_in_their_middle_and_stay_apart() -> None:
    lines = change_lines("verdicts", verdicts([LONG.format("at"), LONG.format("behind")], message="x" * 300), WIDTH)
    assert len(set(lines)) == 2
    for line in lines:
        assert len(line) <= WIDTH
        assert line.startswith("worse  kernel_shapes/")
        assert line.endswith("-by-under  bfloat16  agree -> numeric at output")


def test_several_implementations_stand_in_each_line() -> None:
    frame = pd.concat([verdicts(["a/b"], "torch.compile"), verdicts(["a/b"], "jax.jit")])
    lines = change_lines("verdicts", frame, WIDTH)
    assert [line.split()[1] for line in lines] == ["torch.compile", "jax.jit"]


def test_without_a_width_everything_is_in_full() -> None:
    (line,) = change_lines("verdicts", verdicts([LONG.format("at")], message="off by 2\u2026 " * 30), None)
    assert LONG.format("at") in line
    assert "torch.compile" in line
    assert line.endswith(("off by 2\u2026 " * 30).rstrip())


@pytest.mark.parametrize(
    ("name", "columns", "row", "parts"),
    [
        (
            "errors",
            ERROR_CHANGES,
            ("grew", "e", "i", "a/b", "float32", "scores", "introduced", 1.0, 9.0, 0.1, 0.9, "within", "warning"),
            ("grew", "z 1 -> 9", "0.1 -> 0.9 of the bound (introduced)", "within -> warning"),
        ),
        (
            "expected_failures",
            KNOWN_CHANGES,
            ("appeared", "e", "i", "numeric", "weights", 0, 12, "known", "owner/name#3"),
            ("appeared", "numeric at weights", "0 -> 12 cases", "known owner/name#3"),
        ),
        ("cases", CASE_CHANGES, ("changed", "a/b", 2, "mask differs"), ("changed", "2 failing", "mask differs")),
        (
            "environments",
            ENVIRONMENT_CHANGES,
            ("changed", "local", "torch", "2.9.0", "2.9.1"),
            ("local", "torch", "2.9.0 -> 2.9.1"),
        ),
    ],
)
def test_every_kind_of_change_has_its_line(
    name: str, columns: tuple[str, ...], row: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    (line,) = change_lines(name, typed(pd.DataFrame([row], columns=list(columns)), columns), WIDTH)
    assert all(part in line for part in parts)


def test_a_short_name_stays_and_a_long_one_keeps_both_ends() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefghij", 7) == "abc\u2026hij"
    assert shortened("abcdefghij", 7, 0.7) == "abcd\u2026ij"
