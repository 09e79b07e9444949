"""A run as a whole: what is planned, written and judged of what was asked, and what lists and conventions excuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tables import tables_beside

from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.backends import ALL_ENTRIES, BACKENDS, BackendEntry, DeclaredConvention, Mode
from attncheck.common.errors import CaseError, ExitCode
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.planning import plan
from attncheck.reading.expected_failures import (
    ExpectedFailure,
    find_recorded_empty_rows,
    load_bundled_expected_failures,
    load_expected_failures,
)
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.markdown import render_markdown
from attncheck.reports.merge import merge_runs
from attncheck.results.format import EXACT, FORMAT_VERSION, INPUTS
from attncheck.results.reader import Run, read_run
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.settings.config import minimum_to_be_judged
from attncheck.settings.options import RunOptions, read_options
from attncheck.showing.explanation import explanation_text
from attncheck.spec import DTYPES

pytestmark = pytest.mark.usefixtures("forked_workers")

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]
TEXTS = tables_beside(__file__)["run"]

WRONG = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages"


@pytest.mark.usefixtures("workers_here")
def test_two_that_agree_give_0_and_every_comparison_is_a_row(honest: Entries, run_small: RunSmall) -> None:
    summary, run = run_small(honest, dtypes=(), label="one of many", command=["attncheck", "run", "two words"])
    assert summary.exit_code == ExitCode.AGREE
    assert (summary.cases, summary.evaluations, summary.failures) == (4, 16, ())
    # Two stages per case, dtype: a row for each of two implementations, and one for the pair. Six known numbers.
    counts = run.rows["comparison"].value_counts().to_dict()
    assert counts == {"stage": 4 * 2 * 2 * 2, "pair": 4 * 2 * 2, "known": 6 * 2 * 2}
    assert summary.verdicts == {"agree": len(run.rows)}
    stages = run.rows[run.rows["comparison"] == "stage"]
    assert set(stages["tier"]) == {"within"}
    assert (stages["ratio"] <= 1).all()
    assert run.summary == {**TEXTS["summary"], "format": FORMAT_VERSION, "verdicts": {"agree": len(run.rows)}}
    assert run.arrays() == {}
    environment = run.environment
    assert (run.label, environment["command"]) == ("one of many", "attncheck run 'two words'")
    assert environment["implementations"] == {"first.eager": "numpy", "second.eager": "numpy"}
    classes = {"float64": "native", "float32": "native", "bfloat16": "eager", "float16": "eager"}
    assert environment["classes"] == {"first.eager": classes, "second.eager": classes}
    assert {"attncheck", "numpy"} <= environment["versions"].keys()
    assert environment["threads_per_worker"] == 1


@pytest.mark.usefixtures("workers_here")
def test_which_arrays_are_kept(make_backend: Callable[..., BackendEntry], honest: Entries, run_small: RunSmall) -> None:
    entries = [honest[0], make_backend("wrong", WRONG), honest[1]]
    _, run = run_small(entries)
    arrays = run.arrays()
    assert {case for case, _, _, _ in arrays} == {"small/small/b-weights", "small/small/d-weights"}
    bound = "bound of class native"
    implementations = {"first.eager", "wrong.eager", "second.eager"}
    assert {name for _, _, name, _ in arrays} == {*implementations, bound, EXACT, INPUTS}
    key = ("small/small/d-weights", "float64")
    assert (arrays[*key, "wrong.eager", "weights"] == -arrays[*key, "first.eager", "weights"]).all()
    assert arrays[*key, INPUTS, "scores"].shape == arrays[*key, EXACT, "weights"].shape
    assert (arrays[*key, bound, "weights"] > 0).all()
    assert (arrays[*key, bound, "weights"] < 1e-14).all()
    _, run = run_small(entries, keep_all_arrays=True)
    counts = Counter(name for _, _, name, _ in run.arrays())
    assert counts == {**dict.fromkeys([*implementations, bound, EXACT], 8), INPUTS: 6}


def test_our_own_faults_end_a_run(honest: Entries, run_small: RunSmall, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("in the harness")

    monkeypatch.setattr(plan, "make_exact_inputs", broken)
    with pytest.raises(ZeroDivisionError, match="in the harness"):
        run_small(honest)


def test_every_file_of_a_run_is_whole_and_of_the_same_format(honest: Entries, run_small: RunSmall) -> None:
    _, run = run_small(honest)
    documents = {"environment.json", "cases.json", "summary.json", "failed.json"}
    names = {path.relative_to(run.directory).as_posix() for path in run.directory.rglob("*") if path.is_file()}
    logs = {"logs/first.eager-float64.txt", "logs/second.eager-float64.txt"}
    assert names == {*documents, *logs, "rows/part-00000.npz"}
    for name in documents:
        assert json.loads((run.directory / name).read_text())["format"] == FORMAT_VERSION
    assert run.environment["backends"]["first.eager-float64"]["version"] == run.environment["versions"]["numpy"]


# Cases in dtypes that an implementation does not declare


@pytest.mark.usefixtures("workers_here")
def test_who_declares_no_such_dtype_is_unsupported_and_was_never_asked(
    run_small: RunSmall, case_folder: Path, make_backend: Callable[..., BackendEntry]
) -> None:
    def write(dtypes: str) -> None:
        (case_folder / "small.yaml").write_text(
            "title: Small cases\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\n"
            f"defaults: {{dtypes: [{dtypes}]}}\n"
            "cases:\n  - name: Some weights\n    inputs: {scores: {values: [[0, 1, 2], [3, 1, 0]]}}\n"
        )

    write("bfloat16, float64")
    summary, run = run_small([BACKENDS["numpy"], make_backend("wide", TEXTS["in_double"])], dtypes=())
    narrow = run.rows[run.rows["dtype"] == "bfloat16"]
    [refused] = narrow[narrow["implementation"] == "numpy.eager"].itertuples()
    assert (refused.verdict, refused.message) == ("unsupported", "declares no bfloat16")
    assert set(narrow[narrow["implementation"] == "wide.eager"]["verdict"]) == {"agree"}
    assert set(run.rows[run.rows["dtype"] == "float64"]["verdict"]) == {"agree"}
    assert summary.evaluations == 3  # wide in both, numpy in float64 alone
    assert set(run.environment["backends"]) == {"numpy.eager-float64", "wide.eager-bfloat16-float64"}
    classes = {name: own["bfloat16"] for name, own in run.environment["classes"].items()}
    assert classes == {"numpy.eager": None, "wide.eager": "eager"}
    write("bfloat16, float16")
    summary, run = run_small([BACKENDS["numpy"]], dtypes=())
    assert (summary.evaluations, run.summary is None) == (0, False), "a case that nobody can run ends, too"
    assert sorted(run.rows["message"]) == ["declares no bfloat16", "declares no float16"]


# What was judged: the first line and the exit code say it


def test_a_project_says_how_much_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command and a file that say no number, sessions.yaml has."""
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\nmin_judged = "80%"\n')
    monkeypatch.chdir(tmp_path)
    assert str(minimum_to_be_judged(RunOptions(), complete=True)) == "80%"
    assert minimum_to_be_judged(RunOptions(), complete=False) is None
    assert str(minimum_to_be_judged(read_options({"min_judged": "5"}), complete=False)) == "5"


SLOW = "slow_to_compile"


@pytest.fixture
def run_standard(
    tmp_path: Path,
    case_folder: Path,
    make_backend: Callable[..., BackendEntry],
    monkeypatch: pytest.MonkeyPatch,
    workers_here: None,
) -> Callable[..., tuple[RunSummary, Run]]:
    """Run four cases in two dtypes on an implementation that is asked for few, and on one that is asked for all."""
    made = make_backend(SLOW, "")
    slow = BackendEntry(
        SLOW, made.module, ("numpy",), modes=(Mode("slow", made.module, "", runs_only_standard_cases=True),)
    )
    quick = BackendEntry("quick", "attncheck.backends.numpy_backend", ("numpy",))
    chosen = ImplementationSelection((Implementation(slow, "slow"), Implementation(quick)))
    monkeypatch.setattr(plan, "MAX_UNITS_FOR_ALL_MODES", 0)

    def run(**settings: Any) -> tuple[RunSummary, Run]:
        cases = select_cases(["small"], base=tmp_path).cases
        summary = run_cases(cases, chosen, Settings(tmp_path / "out", dtypes=("float64", "float32"), **settings))
        return summary, read_run(tmp_path / "out")

    return run


def units_of(rows: pd.DataFrame, **having: str) -> int:
    for column, value in having.items():
        rows = rows[rows[column] == value]
    return len(rows[["case", "dtype"]].drop_duplicates())


def test_what_is_left_out_is_neither_judged_nor_failing_and_runs_where_that_is_asked(
    run_standard: Callable[..., tuple[RunSummary, Run]],
) -> None:
    summary, run = run_standard()
    slow = run.rows[run.rows["implementation"] == f"{SLOW}.slow"]
    left_out = units_of(slow, verdict="unsupported", lacks="--all-cases")
    assert 0 < left_out < 8
    assert units_of(slow, verdict="agree") == 8 - left_out
    assert units_of(run.rows, implementation="quick.eager", verdict="agree") == 8
    assert summary.exit_code == 0
    summary, run = run_standard(all_cases=True, resume=True)
    slow = run.rows[run.rows["implementation"] == f"{SLOW}.slow"]
    assert units_of(slow, verdict="agree") == units_of(slow) == 8
    assert summary.judged == {f"{SLOW}.slow": 4, "quick.eager": 4}


@pytest.mark.parametrize(("all_cases", "code"), [(False, 0), (True, 1)])
def test_an_expected_failure_is_outdated_only_where_nothing_was_left_out(
    all_cases: bool, code: int, run_standard: Callable[..., tuple[RunSummary, Run]], tmp_path: Path
) -> None:
    path = tmp_path / "expected.yaml"
    entry = f"implementation: {SLOW}.slow\n  cases: ['small/*']\n  verdict: numeric\n  decided: numeric\n"
    path.write_text(f"- {entry}  reason: It is wrong somewhere.\n", encoding="utf-8")
    summary, _ = run_standard(all_cases=all_cases, complete=True, expected_failures=load_expected_failures([path]))
    assert int(summary.exit_code) == code


MakeBackend = Callable[..., BackendEntry]
RunCases = Callable[..., tuple[RunSummary, Frames]]

LISTS = tables_beside(__file__)["expected_failures"]
ENTRY = LISTS["torch_entry"]


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "small.yaml").write_text(LISTS["cases"], encoding="utf-8")
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


def test_a_stale_entry_fails_a_complete_run(run: RunCases, right: BackendEntry, tmp_path: Path) -> None:
    entry = LISTS["entry"]
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
    entry = make_backend("uniform", LISTS["uniform"])
    if declares:
        conventions = {"empty_rows": DeclaredConvention("uniform", "for tests", "")}
        mode = Mode("eager", entry.module, "for tests", conventions=conventions)
        of_others = property(lambda each: mode if each.entry is entry else each.entry.all_modes[each.mode])
        monkeypatch.setattr(Implementation, "mode_declarations", of_others)
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
    text = LISTS["printed"].replace("CONVENTION", convention).replace("WEIGHTS", weights).replace("OUTPUT", output)
    (folder / "small.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("convention", DOCUMENTS)
def test_a_document_may_print_any_convention_and_who_has_no_keyword_for_it_fails_where_zeros_are_meant_alone(
    run: RunCases, make_backend: MakeBackend, right: BackendEntry, cases: Path, convention: str
) -> None:
    print_case(cases, convention)
    summary, frames = run(right, make_backend("uniform", LISTS["uniform"]))
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
    wrong = LISTS["uniform"].replace("weights @ value}", "weights @ value * (1 + 1e-6)}")
    for name, code, says in (
        ("uniform", LISTS["uniform"], "It means something else at weights"),
        ("wrong", wrong, "It goes wrong at"),
    ):
        entry = make_backend(name, code)
        with Engine() as engine:
            text = explanation_text(engine.ask(Implementation(entry), Question(case, "float64")), {})
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
    for name, entry in ALL_ENTRIES.items():
        names = {f"{name}.{mode}" for mode in (*entry.all_modes, *(each.name for each in entry.device_modes))}
        for expected in load_bundled_expected_failures([name]):
            case = expected.entry.cases[0].replace("*", "x").replace("?", "x")
            assert expected.file == f"backends/expected_failures/{name}.yaml"
            assert any(
                expected.matches_evaluation(each, case, dtype)
                for each in names
                for dtype in expected.entry.dtypes or DTYPES
            )
            if "*" in expected.entry.cases:
                limit = {"numeric": expected.entry.max_ratio, "semantic": expected.entry.empty_rows}
                assert limit.get(expected.entry.verdict, True), expected.location


def test_the_conventions_of_entries_are_those_of_what_they_concern(load: Load) -> None:
    (found,) = load(ENTRY.replace("reason: aligned", "empty_rows: nan\n  reason: aligned"))
    assert find_recorded_empty_rows([found], "torch.sdpa", "masking/x", "float32") == ("nan",)
    assert find_recorded_empty_rows([found], "torch.eager", "masking/x", "float32") == ()
    assert find_recorded_empty_rows(load(ENTRY), "torch.sdpa", "masking/x", "float32") == ()


def test_an_entry_of_a_property_says_nothing_of_a_call_and_is_broken(load: Load) -> None:
    entry = "- {{implementation: a.b, cases: [x/*]{}, verdict: {}, decided: numeric, reason: it rolls a die}}\n"
    (found,) = load(entry.format(", property: repeated", "broken"))
    assert found.applies_to_evaluation("a.b", "x/1", "float32", "repeated")
    assert not found.applies_to_evaluation("a.b", "x/1", "float32", "threads")
    assert not found.applies_to_evaluation("a.b", "x/1", "float32")
    for wrong in (entry.format(", property: repeated", "numeric"), entry.format("", "broken")):
        with pytest.raises(CaseError, match="propert"):
            load(wrong)
