"""What is written for people and read from them: words, verdicts, elements, progress, commands, configuration."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from attncheck import progress, wording
from attncheck.backends import BACKENDS
from attncheck.cli.explaining import script_name
from attncheck.cli.listing import case_lines, list_cases
from attncheck.commands import command, joined, words_again, words_of
from attncheck.config import read_config
from attncheck.errors import ExitCode, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.implementations import Implementation
from attncheck.options import RunOptions
from attncheck.progress import MAX_FAILURES_SHOWN, ProgressBar, ProgressLines, duration, show_progress
from attncheck.reading.selection import select_cases
from attncheck.verdicts import Verdict, worst
from attncheck.wording import (
    DocumentLayout,
    counted,
    expected,
    index_from,
    layout_of,
    listed,
    listed_or,
    stored_index,
    written_element,
)


def test_counts_lists_and_choices() -> None:
    counts = {0: "0 cases", 1: "1 case", 2: "2 cases", 2000: "2,000 cases"}
    assert {number: counted(number, "case") for number in counts} == counts
    lists = {"": "", "a": "a", "ab": "a and b", "abc": "a, b and c"}
    assert {names: listed(iter(names)) for names in lists} == lists
    assert [listed_or(names) for names in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b or c"]


def test_what_is_nearly_called_so_is_asked_for() -> None:
    dtypes = ["float64", "bfloat16", "int8"]
    all_of_them = "expected float64, bfloat16, int8"
    said = {
        "bflaot16": f"did you mean bfloat16? ({all_of_them})",
        "Int8": f"did you mean int8? ({all_of_them})",
        **dict.fromkeys(("complex", "", "x" * 100_000), all_of_them),
    }
    assert {name: expected(name, dtypes, one_of=False) for name in said} == said
    with_a_command = {name: expected(name, dtypes, "`attncheck list dtypes`") for name in ("flaot64", "word")}
    assert with_a_command == {
        "flaot64": "did you mean float64? (`attncheck list dtypes` lists all)",
        "word": "expected one of float64, bfloat16, int8",
    }


EXIT_CODES = {
    0: ["agree", "unverified", "unsupported"],
    1: ["misprint", "semantic", "numeric", "nonfinite", "dtype", "shape", "xpass"],
    3: ["untried", "error", "timeout", "crash"],
}
"""Verdicts from harmless to severe, by their exit codes."""


def test_verdicts_have_their_words_severities_and_exit_codes() -> None:
    words = [word for own in EXIT_CODES.values() for word in own]
    assert [str(verdict) for verdict in Verdict] == words
    assert sorted(Verdict, key=lambda verdict: verdict.severity) == [Verdict(word) for word in words]
    assert len({verdict.severity for verdict in Verdict}) == len(words)
    assert all(Verdict(word).exit_code is ExitCode(code) for code, own in EXIT_CODES.items() for word in own)
    for milder, graver in (("agree", "unsupported"), ("misprint", "numeric"), ("shape", "error")):
        for order in permutations([Verdict(milder), Verdict(graver), Verdict.AGREE]):
            assert worst(list(order)) is Verdict(graver)
    assert worst([]) is Verdict.AGREE


PACKAGE = Path(wording.__file__).parent


def test_an_element_is_written_behind_its_array_and_read_back() -> None:
    written: dict[tuple[str | tuple[int, ...], str], str] = {
        ((0, 2, 8, 4), "output"): "output[0, 2, 8, 4]",
        ("0,2,8,4", "output"): "output[0, 2, 8, 4]",
        ("3", ""): "[3]",
        ("", "largest"): "largest",
        ("", ""): "[]",
    }
    assert {key: written_element(*key) for key in written} == written
    assert stored_index((0, 12, 3)) == "0,12,3"
    assert (index_from("0,12,3"), index_from("")) == ((0, 12, 3), ())


def test_a_document_counts_without_leading_axes_of_length_1() -> None:
    written = {
        ((1, 1, 4, 5), False): "w[2, 3]",
        ((1, 1, 4, 5), True): "w[3, 2]",
        ((1, 2, 4, 5), False): "w[0, 2, 3]",
        ((2, 1, 4, 5), True): "w[0, 0, 3, 2]",
        ((4, 5), False): "w[0, 0, 2, 3]",
    }
    assert {each: written_element((0, 0, 2, 3), "w", DocumentLayout(*each)) for each in written} == written
    assert written_element((0, 0, 0, 3), "w", DocumentLayout((1, 1, 1, 5))) == "w[3]"
    assert written_element("0,0,0,0", layout=DocumentLayout((1, 1, 1, 1))) == "[0]"  # one axis stays
    shape, own = (1, 1, 4, 5), [("w", True)]
    assert layout_of("w", shape, own, is_document=False) is None
    assert [layout_of(name, shape, own, is_document=True) for name in "wx"] == [
        DocumentLayout(shape, is_transposed) for is_transposed in (True, False)
    ]


def test_nothing_else_writes_an_index() -> None:
    """Brackets around what is joined with commas, or around an index of a row: that is another way of writing."""
    other_way = re.compile(r"\[\{', ?'\.join\(map\(str|\[\{row(\.index|\['index'\])\}\]|\[\{index\}\]")
    folders = [PACKAGE, *(PACKAGE.parent / name for name in ("reports", "benchmarks"))]
    found = [
        f"{path.name}: {line.strip()}"
        for folder in folders
        for path in folder.rglob("*.py")
        if path.name != "wording.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if other_way.search(line)
    ]
    assert found == []


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_far_the_run_is_and_what_failed() -> None:
    clock, written = Clock(), list[str]()
    lines = ProgressLines(written.append, clock)
    lines.update(0, 2000)
    lines.tick()
    assert written == []  # workers are started: there is no rate yet
    clock.now += 60
    lines.update(1, 2000)
    lines.tick()
    clock.now += 10
    lines.update(501, 2000)
    lines.fail("numpy.eager: a")
    lines.tick()
    lines.update(2000, 2000)
    lines.tick()
    assert written == [
        "attncheck: 1 of 2,000 evaluations, 0 failing",
        "attncheck: 501 of 2,000 evaluations, 1 failing, 50 a second, 30 s left",
    ]


def test_an_evaluation_that_hangs_makes_the_rate_smaller() -> None:
    clock, written = Clock(), list[str]()
    lines = ProgressLines(written.append, clock)
    lines.update(1, 10)
    clock.now += 2
    lines.update(5, 10)
    lines.tick()
    clock.now += 8
    lines.tick()
    assert written == [
        "attncheck: 5 of 10 evaluations, 0 failing, 2 a second, 2 s left",
        "attncheck: 5 of 10 evaluations, 0 failing, 0.4 a second, 12 s left",
    ]


def test_a_time_is_written_as_people_do() -> None:
    times = {0.4: "0 s", 59.4: "59 s", 59.6: "1:00 min", 187: "3:07 min", 3599: "59:59 min", 3720: "1:02 h"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_above_a_bar_stand_the_first_failures_and_the_others_are_counted() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False, markup=False, emoji=False)
    shown = Progress("{task.fields[failures]} failing", console=console, auto_refresh=False)
    bar = ProgressBar(shown)
    for number in range(MAX_FAILURES_SHOWN + 5):
        bar.fail(f"numpy.eager: case-{number} [float64]: numeric at weights[bold]")
    bar.update(30, 60)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for number in range(MAX_FAILURES_SHOWN + 5):
        line = f"case-{number} [float64]: numeric at weights[bold]"
        assert (line in text) is (number < MAX_FAILURES_SHOWN)
    assert text.count("further failures are counted below") == 1
    [task] = shown.tasks
    assert (task.completed, task.total, task.fields["failures"]) == (30, 60, MAX_FAILURES_SHOWN + 5)


def test_where_there_is_no_terminal_lines_come_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.001)
    written = Event()
    write = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: (written.set(), write(text))[1])
    with show_progress(visible=True) as shown:
        assert isinstance(shown, ProgressLines)
        shown.update(1, 7)
        shown.fail("numpy.eager: a")
        assert written.wait(60)
    out, err = capsys.readouterr()
    assert out == ""
    assert set(err.splitlines()[1:]) <= {line for line in err.splitlines() if "1 of 7 evaluations, 1 failing" in line}
    assert err.startswith("attncheck: 1 of 7 evaluations, ")


def test_a_reader_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    progress._to_standard_error("attncheck: a line")


def test_columns_stand_below_each_other_fit_100_and_no_tag_is_lost() -> None:
    records = list_cases(select_cases(["kernel_shapes/*", "gradients/*", "attention/*"]))
    lines = list(case_lines(records))
    described = [line for line in lines if line.startswith("  ") and line[2] != " "]
    ids = [line for line in lines if not line.startswith(" ")]
    assert len(described) == len(ids) > 100
    assert len({line.index(" B=") for line in described if " B=" in line}) == 1
    assert len([line for line in lines if line.startswith(" ") and len(line) > 100]) < len(described) / 10
    assert [tag for case in records for tag in case["tags"] if tag not in "\n".join(lines)] == []
    assert list(case_lines([])) == []


NUMPY = Implementation(BACKENDS["numpy"])

KERNEL = "def attention(query, key, value):\n    return value\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no Bash")
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), max_size=20))
def test_a_shell_reads_every_word_back(words: list[str]) -> None:
    text = joined(["printf", "%s\\0", "first", *words])
    assert text.isprintable()
    assert not any(each in text for each in ('"""', "`", "```"))
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[1:-1] == words


def test_what_looks_like_an_option_is_given_as_a_file() -> None:
    words = ["-k.py:f", "--framework", "torch"]
    assert command("explain", {"id": "-x/a"}, words, "float64") == (
        "attncheck explain ./-x/a ./-k.py:f --dtype float64 --framework torch"
    )
    assert command("repro", {"id": "o/a-case", "path": "/my files/o.yaml"}, ["numpy.eager"], "float64") == (
        "attncheck repro '/my files/o.yaml::a-case' numpy.eager --dtype float64"
    )


def test_a_bundled_one_is_named_by_its_name_and_limits_that_are_not_as_ever_are_said() -> None:
    assert words_again([NUMPY], Limits(), Path("elsewhere")) == {"numpy.eager": ["numpy.eager"]}
    assert (words_of("torch.sdpa", {}), words_of("mine.attention", {})) == (["torch.sdpa"], [])
    limits = Limits(threads=2, case_seconds=0.5, hard_memory_limit=3 * 2**29)
    assert words_again([NUMPY], limits, None) == {
        "numpy.eager": ["numpy.eager", "--threads", "2", "--time-limit", "0.5", "--memory-limit", "1.5"]
    }


def test_an_own_one_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my kernel.py").write_text(KERNEL, encoding="utf-8")
    (own,) = select_implementations(None, ["my kernel.py:attention"], "numpy").implementations
    words = ["my kernel.py:attention", "--framework", "numpy"]
    assert words_again([own], Limits(), Path("results/latest")) == {own.name: words}
    assert words_again([own], Limits(), Path("my results")) == {own.name: [*words, "--results", "my results"]}
    assert words_again([own], Limits(), None) == {own.name: words}
    handed_over = select_callable(lambda query, key, value: value, None, None)
    assert words_again([handed_over], Limits(), None) == {}


def test_scripts_have_short_names_that_stay_apart() -> None:
    assert script_name("folder/file/a-name", "torch.sdpa", "float32") == "repro_a_name_torch.sdpa_float32.py"
    long = "file/" + "-".join(["word"] * 20)
    first, second, again = (script_name(f"{long}-{end}", "numpy.eager", "float64") for end in ("one", "two", "one"))
    assert first == again != second
    assert len(first) == len("repro_") + 60 + len("_numpy.eager_float64.py")
    names = Counter(script_name(case.id, "numpy.eager", "float32") for case in select_cases(tiles=[48]).cases)
    assert max(names.values()) == 1


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
        ("[tool.attncheck]\ncase = []\n", "tool.attncheck.case: unknown; expected cases, expected_failures"),
        ("[tool.attncheck]\ncases = 'own'\n", "tool.attncheck.cases: expected a list of paths"),
        ("[tool.attncheck]\ncases = ['gone']\n", "tool.attncheck.cases: there is no"),
        ("[tool]\nattncheck = 3\n", "tool.attncheck: expected a table"),
        ("[tool.attncheck\n", "cannot be read"),
        ("x = " + "[" * 2000 + "]" * 2000 + "\n", "nested too deep"),
        (f"x = {'9' * 5000}\n", "cannot be read"),
        ('[tool.attncheck]\ncases = ["a\\u0000b"]\n', "there is no"),
        (f"[tool.attncheck]\ncases = ['{'x' * 5000}']\n", "there is no"),
        ('[tool.attncheck]\n"a\\nb" = 1\n', "tool.attncheck.'a\\nb': unknown"),
    ):
        with pytest.raises(UsageError) as error:
            read_config(project(tmp_path, text))
        told = str(error.value)
        assert message in told
        assert "pyproject.toml" in told
        assert told.isprintable()
        assert len(told) < 1000
