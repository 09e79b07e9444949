"""What ends its process in every call is not asked for ever: the rest is untried, says so, and may be tried later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from attncheck.errors import ExitCode
from attncheck.execution import runner
from attncheck.execution.runner import MAX_EQUAL_ENDS, EqualEnds
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.xfail import ExpectedFailureRecord
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.results.format import Row
from attncheck.results.reader import read_run

pytestmark = pytest.mark.usefixtures("forked_workers")

Invoke = Callable[..., tuple[int, str, str]]
CRASH, TIMEOUT = Failure("crash", "died"), Failure("timeout", "not done after 2 s")
UNSUPPORTED, ERROR, DONE = Failure("unsupported", "takes no mask"), Failure("error", "raised"), Computed({})
DIES = "import os\ndef attention(query, key, value, *, scale=None):\n    os._exit(9)\n"
PICKY = """
import os
from attncheck.backends.numpy_backend import attention as right

def attention(query, key, value, *, scale=None):
    if scale is None:
        os._exit(9)
    return right(query, key, value, scale=scale)
"""
CASES = """\
title: Seven
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 5}, dtypes: [float64]}
arrays: {some: {draw: randn, shape: [3, 4]}}
cases:
"""


def write_cases(folder: Path, scaled: str = "") -> None:
    """Write cases a to g, with a scale where their letter is among those."""
    (folder / "own.yaml").write_text(
        CASES
        + "".join(
            f"  - name: Case {name}\n    inputs: {{query: some, key: some, value: some}}\n"
            + ("    options: {scale: 0.3}\n" if name in scaled else "")
            for name in "abcdefg"
        ),
        encoding="utf-8",
    )


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ends in a row are enough."""
    monkeypatch.setattr(runner, "MAX_EQUAL_ENDS", 3)


def told(outcomes: list[Outcome], *, reason: str = "died", keep_going: bool = False) -> Failure | None:
    counted = EqualEnds(keep_going)
    for outcome in outcomes:
        assert counted.instead() is None
        counted.note(outcome, outcome.message if outcome is TIMEOUT else reason)
    return counted.instead()


def test_ten_equal_ends_in_a_row_are_enough() -> None:
    assert told([CRASH] * (MAX_EQUAL_ENDS - 1)) is None
    found = told([CRASH] * MAX_EQUAL_ENDS)
    assert found is not None
    assert found.verdict == "untried"
    assert "the 10 evaluations before ended alike (crash: died); --keep-going tries all" in found.message


@pytest.mark.parametrize("other", [DONE, ERROR, TIMEOUT], ids=["a result", "an error", "another end"])
def test_anything_else_begins_the_count_anew(other: Outcome) -> None:
    assert told([*[CRASH] * 9, other, *[CRASH] * 9]) is None
    assert told([*[CRASH] * 9, other, *[CRASH] * 10]) is not None


def test_what_is_unsupported_says_nothing_either_way() -> None:
    assert told([*[CRASH] * 5, UNSUPPORTED, UNSUPPORTED, *[CRASH] * 4]) is None
    assert told([*[CRASH] * 5, UNSUPPORTED, UNSUPPORTED, *[CRASH] * 5]) is not None


def test_ends_for_other_reasons_are_not_equal() -> None:
    counted = EqualEnds()
    for number in range(30):
        counted.note(CRASH, f"died with exit code {number}")
    assert counted.instead() is None


def test_who_keeps_going_tries_all() -> None:
    assert told([CRASH] * 50, keep_going=True) is None


def rows_of(folder: Path) -> pd.DataFrame:
    rows = read_run(folder / "out").rows
    return rows[rows["comparison"] == "stage"]


def verdicts_of(folder: Path, implementation: str) -> list[str]:
    rows = rows_of(folder)
    own = rows[(rows["implementation"] == implementation) & rows["stage"].isin(["", "output"])]
    return [str(verdict) for verdict in own.sort_values("case")["verdict"]]


@pytest.mark.usefixtures("three")
def test_the_rest_is_untried_and_is_tried_when_the_run_goes_on(tmp_path: Path, invoke: Invoke) -> None:
    write_cases(tmp_path)
    (tmp_path / "dies.py").write_text(DIES, encoding="utf-8")
    command = ("check", "own.yaml", "-i", "dies.py:attention,numpy", "--output", "out", "--no-report")
    code, out, _ = invoke(*command)
    assert code == ExitCode.NOT_RUN
    assert verdicts_of(tmp_path, "dies.attention") == ["crash"] * 3 + ["untried"] * 4
    assert verdicts_of(tmp_path, "numpy.eager") == ["agree"] * 7
    wrong = [line for line in out.splitlines() if line.startswith(("crash", "untried"))]
    assert wrong[0].startswith(
        "crash: 3 cases [float64], the first own/case-a, dies.attention: the worker process died"
    )
    assert wrong[1].startswith(
        "untried: 4 cases [float64], the first own/case-d, dies.attention: not tried: the 3 eval"
    )
    assert len(wrong) == 2

    assert invoke(*command, "--resume")[0] == ExitCode.NOT_RUN
    assert verdicts_of(tmp_path, "dies.attention") == ["crash"] * 3 + ["untried"] * 4
    assert invoke(*command, "--resume", "--keep-going")[0] == ExitCode.NOT_RUN
    assert verdicts_of(tmp_path, "dies.attention") == ["crash"] * 7
    assert verdicts_of(tmp_path, "numpy.eager") == ["agree"] * 7
    counts = Counter(zip(*(rows_of(tmp_path)[name] for name in ("case", "implementation", "stage")), strict=True))
    assert set(counts.values()) == {1}


@pytest.mark.usefixtures("three")
def test_one_that_answers_in_between_is_tried_to_the_end(tmp_path: Path, invoke: Invoke) -> None:
    write_cases(tmp_path, scaled="ceg")
    (tmp_path / "picky.py").write_text(PICKY, encoding="utf-8")
    code, _, _ = invoke("check", "own.yaml", "-i", "picky.py:attention", "--output", "out", "--no-report")
    assert code == ExitCode.NOT_RUN
    assert verdicts_of(tmp_path, "picky.attention") == ["crash", "crash", "agree", "crash", "agree", "crash", "agree"]


@pytest.mark.usefixtures("three")
def test_an_end_that_is_known_excuses_what_is_untried_for_it(tmp_path: Path, invoke: Invoke) -> None:
    write_cases(tmp_path, scaled="a")  # one that is judged: otherwise nothing would be
    (tmp_path / "picky.py").write_text(PICKY, encoding="utf-8")
    entry = "- {implementation: picky.*, cases: ['own/*'], verdict: crash, decided: crash, reason: it dies of it}\n"
    (tmp_path / "known.yaml").write_text(entry, encoding="utf-8")
    command = (
        "check",
        "own.yaml",
        "-i",
        "picky.py:attention,numpy",
        "--no-report",
        "--output",
        "out",
        "--expected-failures",
        "known.yaml",
    )
    code, out, _ = invoke(*command)
    assert code == ExitCode.AGREE, out
    assert verdicts_of(tmp_path, "picky.attention") == ["agree"] + ["crash"] * 3 + ["untried"] * 3


def test_an_entry_of_which_nothing_was_tried_is_neither_stale_nor_seen(
    tmp_path: Path, make_row: Callable[..., Row]
) -> None:
    text = "- {implementation: numpy.*, cases: ['*'], verdict: numeric, decided: numeric, reason: it is a bit off}\n"
    (tmp_path / "known.yaml").write_text(text, encoding="utf-8")
    record = ExpectedFailureRecord(load_expected_failures([tmp_path / "known.yaml"]))
    (row,) = record.mark([make_row(verdict="untried", stage="", message="not tried")])
    assert not row.xfail
    assert not record.happened
    assert record.xpass_rows() == []
