"""Failures that a fresh process does not show: repeated as a check met them, with as few calls before as it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from attncheck import check
from attncheck.cli import app
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.explain import Call, MetFailure, calls_before, explain_again, fewest, find_implementation
from attncheck.reading.selection import select_cases
from attncheck.reports.explanation import explanation_text

pytestmark = pytest.mark.usefixtures("forked_workers")

app.load()  # all commands, whichever another test has loaded

Kernel = Callable[[str], Implementation]


@pytest.fixture
def calls(calls_in_a_row: Path) -> list[Call]:
    """Nine calls, with one to nine queries."""
    return [(case, "float32") for case in select_cases(["row.yaml"], base=calls_in_a_row).cases]


@pytest.fixture
def kernel(remembering: Callable[[str], Path]) -> Callable[[str], Implementation]:
    return lambda needed: find_implementation(f"{remembering(needed)}:attention")


def failure(before: Sequence[Call]) -> MetFailure:
    return MetFailure("numeric at output: twice as large", lambda: before)


def queries(calls: Sequence[Call]) -> list[int]:
    return [case.input_shapes["query"][2] for case, _ in calls]


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_fewest_calls_are_exactly_those_that_it_takes(given: tuple[int, set[int]]) -> None:
    length, needed = given
    failing: list[Sequence[int]] = [range(length)]

    def fails_after(calls: Sequence[int]) -> bool:
        if fails := needed <= set(calls):
            failing.append(calls)
        return fails

    assert fewest(range(length), fails_after)
    assert list(failing[-1]) == sorted(needed)


def test_a_call_long_before_is_found_in_few_tries() -> None:
    tried: list[Sequence[int]] = []

    def fails_after(calls: Sequence[int]) -> bool:
        tried.append(calls)
        return 17 in calls

    assert fewest(range(1000), fails_after)
    assert list(next(each for each in reversed(tried) if 17 in each)) == [17]
    assert len(tried) < 30


@pytest.mark.parametrize("most", [0, 3, 6, 9])
def test_without_tries_left_the_fewest_so_far_are_not_called_the_fewest(most: int) -> None:
    tried: list[Sequence[int]] = []

    def fails_after(calls: Sequence[int]) -> bool | None:
        if len(tried) >= most:
            return None
        tried.append(calls)
        return {3, 50} <= set(calls)

    assert not fewest(range(100), fails_after)


def test_what_was_asked_before_begins_behind_the_last_death_and_has_the_same_process_alone() -> None:
    asked = dict.fromkeys(
        [("a", "float64"), ("a", "float32"), ("b", "float32"), ("c", "float16"), ("d", "float32")], ""
    )
    place, dtypes = ("d", "float32"), ("float64", "float32")
    assert calls_before(asked, place, dtypes) == [("a", "float64"), ("a", "float32"), ("b", "float32")]
    asked["a", "float64"] = "crash: the worker process was ended by SIGKILL"
    assert calls_before(asked, place, dtypes) == [("a", "float32"), ("b", "float32")]
    asked["b", "float32"] = "timeout: not done after 1 s"
    assert calls_before(asked, place, dtypes) == []
    assert calls_before(asked, ("gone", "float32"), dtypes) == []


def test_what_fails_in_a_fresh_process_is_not_looked_for_elsewhere(calls: list[Call], kernel: Kernel) -> None:
    def never() -> list[Call]:
        raise AssertionError("nobody asks")

    case = calls[-1][0]
    told = explain_again(case, kernel("set()"), "float32", Limits(), MetFailure("numeric at output", never))
    assert told.repeated is None
    assert told.explanation.begins_at == "output"


@pytest.mark.parametrize(("needed", "said"), [({3}, "1 of the 8 calls"), ({2, 5}, "2 of the 8 calls")])
def test_a_failure_is_repeated_with_its_calls(needed: set[int], said: str, calls: list[Call], kernel: Kernel) -> None:
    case = calls[-1][0]
    heard: list[str] = []
    told = explain_again(case, kernel(str(needed)), "float32", Limits(), failure(calls[:-1]), heard.append)
    assert told.explanation.begins_at == "output"
    assert queries(told.before) == sorted(needed)
    assert told.repeated is not None
    assert told.repeated.are_fewest
    text = explanation_text(told, {})
    assert text.startswith(
        "In a fresh process nothing is wrong with this case.\nThe check found numeric at output: twice"
    )
    assert f"That happens again after {said} that the check's process had been asked before" in text
    assert all(f"  after row/{number}-queries in float32" in text for number in needed)
    assert "It goes wrong at output" in text
    assert heard[0] == "in a fresh process it agrees; repeating the 8 calls that the check made before it"


def test_a_failure_that_does_not_happen_again_is_said(calls: list[Call], kernel: Kernel) -> None:
    case = calls[-1][0]
    for before, says in (
        (calls[:-1], "That does not happen again, neither in a fresh process nor after the 8 calls"),
        ([], "It was the first call there, too"),
    ):
        told = explain_again(case, kernel("{99}"), "float32", Limits(), failure(before))
        assert told.before == ()
        assert not told.explanation.fails
        text = explanation_text(told, {})
        assert says in text
        assert "Every stage is within its error bound" in text
    alone = explain_again(case, kernel("{3}"), "float32", Limits())
    assert (alone.repeated, alone.explanation.fails) == (None, False), "no check found anything"


CASE = "row/9-queries"

FRESH = "In a fresh process nothing is wrong with this case.\nThe check found numeric at output: "


@pytest.fixture
def folder(calls_in_a_row: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(calls_in_a_row)
    return calls_in_a_row


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.mark.usefixtures("folder")
def test_a_command_repeats_what_its_check_met(folder: Path, remembering: Callable[[str], Path]) -> None:
    remembering("{2, 5}")
    checked = ask("check", "row.yaml", "-i", "kernel.py:attention", "--output", "elsewhere", "--no-report")
    assert checked.exit_code == 1
    about = (CASE, "kernel.py:attention", "--dtype", "float32")
    alone = ask("explain", *about)  # nobody says that it failed anywhere
    assert alone.exit_code == 0
    assert "Every stage is within its error bound" in alone.stdout
    told = ask("explain", *about, "--results", "elsewhere")
    assert told.exit_code == 1
    assert told.stdout.startswith(FRESH)
    assert "That happens again after 2 of the 8 calls that the check's process had been asked before" in told.stdout
    assert "  after row/2-queries in float32\n  after row/5-queries in float32\n" in told.stdout
    assert ask("repro", *about, "--results", "elsewhere", "--output", "script.py").exit_code == 0
    text = (folder / "script.py").read_text(encoding="utf-8")
    assert "It makes 2 other calls, and then one" in text
    assert FRESH in text
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "output is WRONG" in done.stdout


@pytest.mark.usefixtures("folder")
def test_a_kernel_mended_since_is_said_to_have_changed(folder: Path, remembering: Callable[[str], Path]) -> None:
    remembering("set()")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention", "--no-report").exit_code == 1
    later = time.time() + 10
    os.utime(remembering("{99}"), (later, later))
    told = ask("explain", CASE, "kernel.py:attention")
    assert told.exit_code == 0
    assert told.stdout.startswith(FRESH)
    assert "That does not happen again, neither in a fresh process nor after the 8 calls" in told.stdout
    assert "kernel.py has changed since." in told.stdout


@pytest.mark.usefixtures("folder")
def test_a_case_that_was_changed_since_is_another_one(folder: Path, remembering: Callable[[str], Path]) -> None:
    remembering("{2}")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention", "--no-report").exit_code == 1
    path = folder / "row.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("[9, 4]", "[10, 4]"), encoding="utf-8")
    told = ask("explain", CASE, "kernel.py:attention")
    assert told.exit_code == 0
    assert "fresh process" not in told.stdout


@pytest.mark.usefixtures("folder")
def test_too_many_calls_for_a_script(remembering: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncheck.repro.script.MAX_BEFORE", 1)
    remembering("{2, 5}")
    assert ask("check", "row.yaml", "-i", "kernel.py:attention", "--no-report").exit_code == 1
    done = CliRunner().invoke(app, ["repro", CASE, "kernel.py:attention"])
    assert "goes wrong only after 2 other calls" in str(done.exception)


@pytest.mark.usefixtures("folder")
def test_the_call_from_python_explains_as_the_command_does(remembering: Callable[[str], Path]) -> None:
    result = check(f"{remembering('{3}')}:attention", cases=["row.yaml"])
    told = result.explain()
    assert f"\n\n{FRESH}" in told
    assert "That happens again after 1 of the 8 calls" in told
    assert "  after row/3-queries in float32" in told


@pytest.mark.usefixtures("folder")
def test_a_test_suite_tells_it_in_its_failure_and_has_a_command_for_what_a_fresh_process_shows_too(
    remembering: Callable[[str], Path], run_pytest: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    words = ["--attncheck", "kernel.py:attention", "--attncheck-cases", "row.yaml", "-p", "no:cacheprovider"]
    remembering("{3}")
    done = run_pytest(*words)
    assert "1 failed, 8 passed" in done.stdout
    assert "In a fresh process nothing is wrong with this case." in done.stdout
    assert "That happens again after 1 of the 8 calls" in done.stdout
    assert "attncheck explain" not in done.stdout  # it would start a fresh process, and find nothing
    remembering("set()")
    done = run_pytest(*words)
    assert "fresh process" not in done.stdout
    assert f"attncheck explain {CASE} kernel.py:attention --dtype float32\n" in done.stdout
