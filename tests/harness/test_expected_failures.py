"""Conventions and expected failures: what an entry excuses, what fails no run, and what reports and lists say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tables import tables_beside

from attncheck.backends import EVERYTHING, BackendEntry, DeclaredConvention, Mode
from attncheck.errors import CaseError, ExitCode
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.explain import explain_case
from attncheck.merge import merge_runs
from attncheck.reading.expected_failures import (
    ExpectedFailure,
    bundled_expected_failures,
    load_expected_failures,
    recorded_empty_rows,
)
from attncheck.reading.selection import select_cases
from attncheck.reports.build_frames import make_frames
from attncheck.reports.explanation import explanation_text
from attncheck.reports.frames import Frames
from attncheck.reports.markdown import render_markdown
from attncheck.reports.summary import make_summary
from attncheck.results.reader import Run
from attncheck.run import RunSummary
from attncheck.spec import DTYPES

MakeBackend = Callable[..., BackendEntry]
RunCases = Callable[..., tuple[RunSummary, Frames]]

TEXTS = tables_beside(__file__)["expected_failures"]
ENTRY = TEXTS["torch_entry"]


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "small.yaml").write_text(TEXTS["cases"], encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path, cases: Path, workers_here: None, run_below: Callable[..., tuple[RunSummary, Run]]) -> RunCases:
    """Run the cases without workers, with the text of a list of expected failures."""

    def run(*entries: BackendEntry, known: str = "", **settings: Any) -> tuple[RunSummary, Frames]:
        (tmp_path / "known.yaml").write_text(known or "[]\n", encoding="utf-8")
        lists = load_expected_failures([tmp_path / "known.yaml"])
        summary, found = run_below(tmp_path, entries, expected_failures=lists, **settings)
        return summary, make_frames(merge_runs([found]))

    return run


def bad(frame: pd.DataFrame) -> list[tuple[str, str, str, bool]]:
    rows = frame[~frame["verdict"].isin(["agree", "unverified", "unsupported"])]
    return [(row["case"], row["stage"], row["verdict"], bool(row["xfail"])) for row in rows.to_dict("records")]


@pytest.fixture
def right(honest: tuple[BackendEntry, BackendEntry]) -> BackendEntry:
    return honest[0]


def test_a_known_failure_fails_no_run(run: RunCases, make_backend: MakeBackend, right: BackendEntry) -> None:
    summary, frames = run(right, make_backend("lower", TEXTS["lower_right"]), known=TEXTS["entry"])
    assert (summary.exit_code, summary.failures) == (ExitCode.AGREE, ())
    assert bad(frames.results) == [("small/small/causal", "output", "semantic", True)]
    assert bad(frames.pairs) == [("small/small/causal", "output", "numeric", True)]
    assert make_summary(frames).sentences[2].endswith("none disagrees, except for 1 expected failure.")


def test_a_stale_entry_fails_a_complete_run(run: RunCases, right: BackendEntry, tmp_path: Path) -> None:
    entry = TEXTS["entry"].replace("lower.*", "first.eager")
    assert run(right, known=entry)[0].exit_code is ExitCode.AGREE, "it need not show in some of the cases alone"
    summary, frames = run(right, known=entry, complete=True)
    assert (summary.exit_code, summary.verdicts["xpass"]) == (ExitCode.DISAGREE, 1)
    (failure,) = summary.failures
    assert f"{tmp_path / 'known.yaml'}:1: this expected failure no longer happens" in failure.message
    assert bad(frames.results) == [("small/small/causal", "", "xpass", False)]


@pytest.mark.parametrize("declares", [True, False])
def test_a_declared_convention_fails_no_run_and_the_report_says_what_each_gives(
    run: RunCases, make_backend: MakeBackend, right: BackendEntry, declares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_backend("uniform", TEXTS["uniform"])
    if declares:
        conventions = {"empty_rows": DeclaredConvention("uniform", "for tests", "")}
        mode = Mode("eager", entry.module, "for tests", conventions=conventions)
        of_others = property(lambda each: mode if each.entry is entry else each.entry.all_modes[each.mode])
        monkeypatch.setattr(Implementation, "declared", of_others)
    summary, frames = run(right, entry)
    assert summary.exit_code is (ExitCode.AGREE if declares else ExitCode.DISAGREE)
    assert bad(frames.results) == [
        ("small/small/empty", stage, "semantic", declares) for stage in ("weights", "output")
    ]
    assert {row[3] for row in bad(frames.pairs)} == {declares}
    messages = set(frames.results[frames.results["verdict"] == "semantic"]["message"])
    says = "a query without a key gives the mean of all values (uniform); the case expects zero"
    assert messages == {f"{says} (declared)" if declares else says}
    section = render_markdown(frames).partition("## Queries without a key")[2].partition("## Verdicts")[0]
    assert "| implementation | zero | the mean of all values (uniform) |" in section
    counts = {line.split()[1]: line.split("|")[2:4] for line in section.splitlines() if "eager" in line}
    assert counts == {"first.eager": [" 1 ", " - "], "uniform.eager": [" - ", " 1 "]}


DOCUMENTS = {"uniform": ("0.3333 0.3333 0.3333", "2.6667 4.3333"), "nan": ("nan nan nan", "nan nan"),
             "zero": ("0. 0. 0.", "0. 0.")}  # fmt: skip


def print_case(folder: Path, convention: str) -> None:
    weights, output = DOCUMENTS[convention]
    text = TEXTS["printed"].replace("CONVENTION", convention).replace("WEIGHTS", weights).replace("OUTPUT", output)
    (folder / "small.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("convention", DOCUMENTS)
def test_a_document_may_print_any_convention_and_who_has_no_keyword_for_it_fails_where_zeros_are_meant_alone(
    run: RunCases, make_backend: MakeBackend, right: BackendEntry, cases: Path, convention: str
) -> None:
    print_case(cases, convention)
    summary, frames = run(right, make_backend("uniform", TEXTS["uniform"]))
    is_known = convention != "zero"
    assert summary.exit_code is (ExitCode.AGREE if is_known else ExitCode.DISAGREE)
    who_takes_it = frames.numbers[frames.numbers["implementation"] == "first.eager"]
    assert (len(who_takes_it), set(who_takes_it["verdict"]), set(who_takes_it["xfail"])) == (10, {"agree"}, {False})
    if convention == "uniform":
        assert bad(frames.results) + bad(frames.pairs) + bad(frames.numbers) == []
        return
    assert bad(frames.results) == [("small/small/empty", each, "semantic", is_known) for each in ("weights", "output")]
    semantic = frames.results[frames.results["verdict"] == "semantic"]
    assert set(semantic["empty_rows"]) == {"uniform"}
    says = f"a query without a key gives the mean of all values (uniform); the case expects {convention}"
    assert all(message.startswith(says) for message in semantic["message"])
    assert {row[2:] for row in bad(frames.numbers)} == {("semantic", is_known)}
    assert {row[3] for row in bad(frames.pairs)} == {is_known}


def test_other_errors_still_fail(run: RunCases, make_backend: MakeBackend, cases: Path) -> None:
    print_case(cases, "nan")
    (case,) = select_cases([str(cases)], base=cases.parent).cases
    wrong = TEXTS["uniform"].replace("weights @ value}", "weights @ value * (1 + 1e-6)}")
    for name, code, says in (
        ("uniform", TEXTS["uniform"], "It means something else at weights"),
        ("wrong", wrong, "It goes wrong at"),
    ):
        entry = make_backend(name, code)
        text = explanation_text(explain_case(case, Implementation(entry), "float64", Limits()), {})
        assert says in text
        assert "the case expects nan, for which it has no keyword empty_rows" in text
    summary, frames = run(entry)
    assert summary.exit_code is ExitCode.DISAGREE
    failing = [row for row in bad(frames.results) if not row[3]]
    assert failing == [("small/small/empty", "output", "numeric", False)]


# Lists as they are read: what an entry concerns and excuses

Load = Callable[[str], tuple[ExpectedFailure, ...]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def read(text: str) -> tuple[ExpectedFailure, ...]:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return load_expected_failures([path])

    return read


def test_every_backend_has_a_list_that_names_it_and_in_every_case_excuses_one_thing() -> None:
    """An entry of every case would otherwise hide any other error, or a mask that is read the other way round."""
    for name, entry in EVERYTHING.items():
        names = {f"{name}.{mode}" for mode in (*entry.all_modes, *(each.name for each in entry.device_modes))}
        for expected in bundled_expected_failures([name]):
            case = expected.entry.cases[0].replace("*", "x").replace("?", "x")
            assert expected.file == f"backends/expected_failures/{name}.yaml"
            assert any(expected.names(each, case, dtype) for each in names for dtype in expected.entry.dtypes or DTYPES)
            if "*" in expected.entry.cases:
                limit = {"numeric": expected.entry.max_ratio, "semantic": expected.entry.empty_rows}
                assert limit.get(expected.entry.verdict, True), expected.location


def test_the_conventions_of_entries_are_those_of_what_they_concern(load: Load) -> None:
    (found,) = load(ENTRY.replace("reason: aligned", "empty_rows: nan\n  reason: aligned"))
    assert recorded_empty_rows([found], "torch.sdpa", "masking/x", "float32") == ("nan",)
    assert recorded_empty_rows([found], "torch.eager", "masking/x", "float32") == ()
    assert recorded_empty_rows(load(ENTRY), "torch.sdpa", "masking/x", "float32") == ()


def test_an_entry_of_a_property_says_nothing_of_a_call_and_is_broken(load: Load) -> None:
    entry = "- {{implementation: a.b, cases: [x/*]{}, verdict: {}, decided: numeric, reason: it rolls a die}}\n"
    (found,) = load(entry.format(", property: repeated", "broken"))
    assert found.concerns("a.b", "x/1", "float32", "repeated")
    assert not found.concerns("a.b", "x/1", "float32", "threads")
    assert not found.concerns("a.b", "x/1", "float32")
    for wrong in (entry.format(", property: repeated", "numeric"), entry.format("", "broken")):
        with pytest.raises(CaseError, match="propert"):
            load(wrong)
