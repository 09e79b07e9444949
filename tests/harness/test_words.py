"""What is written for people and read from them: words, verdicts, progress, commands, configuration and options."""

from __future__ import annotations

import inspect
import io
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import tables_beside

import attncheck
from attncheck.common import progress
from attncheck.common.errors import ExitCode, UsageError
from attncheck.pytest_plugin import conformance
from attncheck.run import Settings
from attncheck.settings.commands import case_command, shell_command
from attncheck.settings.config import read_config
from attncheck.settings.options import CheckKeywords, RecordedOptions, RunOptions, find_options, read_options
from attncheck.spec.verdicts import Verdict


def test_verdicts_have_their_words_severities_and_exit_codes() -> None:
    exit_codes = tables_beside(__file__)["exit_codes"]
    words = [word for own in exit_codes.values() for word in own]
    assert [str(verdict) for verdict in Verdict] == words
    assert sorted(Verdict, key=lambda verdict: verdict.severity) == [Verdict(word) for word in words]
    assert len({verdict.severity for verdict in Verdict}) == len(words)
    assert all(Verdict(word).exit_code is ExitCode(code) for code, own in exit_codes.items() for word in own)


def test_a_reader_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    progress._print_to_stderr("attncheck: a line")


def test_progress_names_frameworks_that_start_and_estimates_nothing_before_a_twentieth_is_done() -> None:
    written: list[str] = []
    times = iter((0.0, 0.0, 100.0, 200.0))
    lines = progress.ProgressLines(written.append, clock=lambda: next(times))
    executor = SimpleNamespace(starting_frameworks=["torch", "jax"], calls_left={})
    lines.watch_executor(executor)
    lines.update(0, 1000)
    lines.write_progress()
    lines.update(1, 1000)
    lines.update(50, 1000)
    lines.write_progress()
    executor.starting_frameworks = []
    lines.update(51, 1000)
    lines.write_progress()
    assert written == [
        "attncheck: starting torch and jax ...",
        "attncheck: 50 of 1,000 evaluations, 0 failing, starting torch and jax ...",
        "attncheck: 51 of 1,000 evaluations, 0 failing, 0.25 a second, 1:03 h left",
    ]


def test_the_time_left_is_that_of_the_implementation_that_takes_the_longest() -> None:
    written: list[str] = []
    times = iter((0.0, 10.0, 20.0, 30.0))
    lines = progress.ProgressLines(written.append, clock=lambda: next(times))
    executor = SimpleNamespace(starting_frameworks=[], calls_left={"numpy": 900, "jax": 100})
    lines.watch_executor(executor)
    lines.update(1, 1000)
    for numpy_left, jax_left in ((900, 100), (500, 90), (100, 85)):
        executor.calls_left = {"numpy": numpy_left, "jax": jax_left}
        lines.update(1000 - numpy_left - jax_left, 1000)
        lines.write_progress()
    assert [line.rpartition(", ")[2] for line in written] == ["0 failing", "20 a second", "2:50 min left"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no Bash")
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=20))
def test_a_shell_reads_every_word_back(words: list[str]) -> None:
    text = shell_command(["printf", "%s\\0", "first", *words])
    assert text.isprintable()
    assert not any(each in text for each in ('"""', "`", "```"))
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[1:-1] == words


def test_what_looks_like_an_option_is_given_as_a_file() -> None:
    words = ["-k.py:f", "--framework", "torch"]
    assert case_command("explain", {"id": "-x/a"}, words, "float64") == (
        "attncheck explain ./-x/a ./-k.py:f --dtype float64 --framework torch"
    )
    assert case_command("repro", {"id": "o/a-case", "path": "/my files/o.yaml"}, ["numpy.eager"], "float64") == (
        "attncheck repro '/my files/o.yaml::a-case' numpy.eager --dtype float64"
    )


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def test_the_nearest_section_counts_and_its_paths_start_at_its_file(tmp_path: Path) -> None:
    project(tmp_path, '[tool.attncheck]\ncases = ["own"]\nexpected_failures = ["known.yaml"]\n')
    (tmp_path / "own").mkdir()
    (tmp_path / "known.yaml").touch()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    project(inner, "[project]\nname = 'other'\n")
    assert read_config(inner) == RunOptions(
        cases=(str(tmp_path / "own"),), expected_failure_lists=(tmp_path / "known.yaml",)
    )
    for text in ("[tool.other]\nx = 1\n", "tool = 3\n"):
        assert read_config(project(tmp_path, text)) == RunOptions()


def test_a_section_that_says_nothing_sensible_is_told_in_one_line(tmp_path: Path) -> None:
    for text, message in (
        *tables_beside(__file__)["sections"],
        ("x = " + "[" * 2000 + "]" * 2000 + "\n", "nested too deep"),
        (f"x = {'9' * 5000}\n", "cannot be read"),
        (f"[tool.attncheck]\ncases = ['{'x' * 5000}']\n", "there is no"),
    ):
        with pytest.raises(UsageError) as error:
            read_config(project(tmp_path, text))
        told = str(error.value)
        assert message in told
        assert "pyproject.toml" in told
        assert told.isprintable()
        assert len(told) < 1000


OPTIONS = find_options(RunOptions)


def test_every_field_says_how_it_is_given_and_calls_show_their_keywords_with_the_defaults_of_the_options() -> None:
    assert list(OPTIONS) == [*inspect.signature(RunOptions).parameters]
    assert inspect.signature(RecordedOptions).parameters.keys() < inspect.signature(Settings).parameters.keys()
    shown = inspect.signature(attncheck.check).parameters
    assert [*shown] == ["function", *get_type_hints(CheckKeywords)]
    others = {"function", "name", "output"}
    assert {name: each.default for name, each in shown.items() if name not in others} == {
        name: OPTIONS[name].default for name in shown if name not in others
    }
    assert shown.keys() > inspect.signature(conformance).parameters.keys()
    with pytest.raises(TypeError, match="case"):
        attncheck.check("numpy", case=["attention"])  # type: ignore[call-arg]


def test_dtypes_may_have_the_short_names_that_frameworks_have() -> None:
    assert read_options({"dtypes": ["fp16", "half", "bf16", "single", "float64"]}).dtypes == (
        *("float16", "float16", "bfloat16", "float32", "float64"),
    )


@pytest.mark.parametrize(("given", "message"), tables_beside(__file__)["unreadable_options"])
def test_what_cannot_be_read_is_said_where_it_was_given(given: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read_options(given)
    assert message in str(error.value)
    if "tiles" in given:
        (tmp_path / "pyproject.toml").write_text("[tool.attncheck]\ntile = 1\n", encoding="utf-8")
        with pytest.raises(UsageError, match=r"tool\.attncheck\.tile: expected a whole number from 2"):
            read_config(tmp_path)
