"""A search finds what is wrong, says it once, is the same for the same seed; a reduction keeps what makes it fail."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from here import evaluation_here
from soundness_problems import DrawnProblem, PooledDraw, draw_problem
from tables import tables_beside
from typer.testing import CliRunner

from attncheck.asking.engine import Engine
from attncheck.cli import app
from attncheck.common.errors import CaseError, OutputError, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.mutation import variant_entry
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import format_case_address, select_case, select_cases
from attncheck.reading.shapes import ShapeFault
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.merge import merge_runs
from attncheck.results.format import SEARCH_STATE
from attncheck.results.reader import read_runs
from attncheck.searching.concrete import (
    case_of_problem,
    concrete_problem,
    drawn_case_id,
    optional_inputs,
    problem_features,
    required_features,
)
from attncheck.searching.drawing import REGIMES
from attncheck.searching.findings import (
    ProblemSubject,
    SearchFinding,
    SearchFolder,
    Symptom,
    has_same_numbers,
    symptom_of,
    write_case,
)
from attncheck.searching.problems import DrawSettings, ProblemSource, draw_numbers
from attncheck.searching.reduction import (
    clip_counts_to_lengths,
    cuttable_axes,
    keep_positions,
    position_count,
    reduce_problem,
    simplicity_key,
)
from attncheck.searching.search import Search, SearchTimeExpired, simplest_in_new_process, stop_search_after
from attncheck.searching.shapes import EDGE_LENGTHS
from attncheck.spec import DTYPES, MEMORY_LAYOUTS, OPERATIONS, OPTIONS

TABLES = tables_beside(__file__)
RIGHT: str = TABLES["right"]
WRONG = RIGHT.replace("AHEAD", "1 if scores.shape[-1] > 3 else 0")
ASKED = ("--operation", "attention", "--dtype", "float32", "--seed", "7")
PROBLEMS = ("--problems", "7")

Run = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("forked_workers")


def searched(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["search", "kernel.py:attention", *ASKED, "--output", "found", *arguments])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return searched


def write(text: str) -> None:
    Path("kernel.py").write_text(text, encoding="utf-8")


def test_a_search_ends_when_its_time_is_over_whatever_it_waits_for() -> None:
    ended = []
    with pytest.raises(SearchTimeExpired), stop_search_after(0.01, lambda: ended.append("workers")):
        Event().wait(600)
    assert ended == ["workers"]
    with stop_search_after(math.inf, lambda: ended.append("again")):
        pass
    assert ended == ["workers"]


def test_a_failure_whose_reduction_is_cut_off_is_written_as_it_was_drawn(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over(*_: object) -> None:
        raise SearchTimeExpired

    write(WRONG)
    monkeypatch.setattr(ProblemSubject, "run_in_new_process", over)
    result = run("--minutes", "1", "--json")
    assert (result.exit_code, len(record_of(result)["failures"])) == (1, 1)
    (finding,) = SearchFolder.open(Path("found"), "kernel.attention", "kernel.py:attention").findings
    assert (finding.tries, finding.is_smallest) == (0, False)


def test_a_search_of_another_function_of_the_same_name_is_not_gone_on_with(run: Run) -> None:
    for place, said in (
        ("old/kernel.py:attention", ""),
        ("new/kernel.py:attention", "holds a search of old/kernel.py"),
    ):
        if said:
            with pytest.raises(UsageError, match=said):
                SearchFolder.open(Path("found"), "kernel.attention", place)
        else:
            SearchFolder.open(Path("found"), "kernel.attention", place).write()


def frames_of(folder: str) -> Frames:
    return make_frames(merge_runs(read_runs([Path(folder)])))


def test_a_report_has_each_finding_under_its_file_and_every_problem_that_passes(run: Run) -> None:
    write(WRONG)
    run(*PROBLEMS)
    folder = SearchFolder.open(Path("found"), "kernel.attention", "kernel.py:attention")
    rows = frames_of("found").results
    wrong = set(rows.loc[rows["verdict"].eq("numeric"), "case"])
    assert {case.partition("/")[0] for case in wrong} == {Path(each.file).stem for each in folder.findings}
    assert all(case.startswith("search/attention/") for case in set(rows["case"]) - wrong)
    like = sum(each.times - 1 for each in folder.findings)
    assert rows["case"].nunique() == 7 - like
    reported = CliRunner().invoke(app, ["report", "found", "--junit-xml", "found.xml"])
    assert (reported.exit_code, "7 problems of seed 7" in reported.stdout) == (1, True)
    assert Path("found.xml").read_text(encoding="utf-8").count("<failure") == len(wrong)


def reported() -> int:
    return CliRunner().invoke(app, ["report", "found"]).exit_code


def test_a_mended_finding_is_a_case_that_passes(run: Run) -> None:
    write(WRONG)
    run(*PROBLEMS)
    before = frames_of("found").results
    write(RIGHT.replace("AHEAD", "0"))
    run(*PROBLEMS)
    rows = frames_of("found").results
    assert set(rows["verdict"]) <= {"agree", "unsupported"}
    assert set(before.loc[before["verdict"].eq("numeric"), "case"]) <= set(
        rows.loc[rows["verdict"].eq("agree"), "case"]
    )
    assert reported() == 0


def test_a_finding_that_is_not_asked_again_still_fails_in_the_report(run: Run) -> None:
    write(WRONG)
    run(*PROBLEMS)
    assert run("--minutes", "0").exit_code == 1
    assert reported() == 1


def test_ctrl_c_while_a_failure_is_reduced_loses_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write(WRONG)
    monkeypatch.setattr(ProblemSubject, "run_in_new_process", interrupted)
    result = run("--minutes", "1")
    assert (result.exit_code, "interrupted; 1 finding" in result.stdout) == (1, True)
    assert reported() == 1


def test_the_commands_of_a_report_on_a_search_find_its_cases(run: Run) -> None:
    write(WRONG)
    run(*PROBLEMS)
    for case, record in frames_of("found").cases.items():
        if not case.startswith("search/"):
            assert select_case(format_case_address(case, record["path"]))[0].id.endswith(case)


def test_a_search_that_was_killed_at_once_goes_on_in_its_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write(WRONG)
    monkeypatch.setattr(Search, "run", Mock(side_effect=MemoryError))
    monkeypatch.setattr(Search, "write", lambda search: None)
    assert isinstance(run(*PROBLEMS).exception, MemoryError)
    monkeypatch.undo()
    monkeypatch.chdir(Path("found").resolve().parent)
    assert run(*PROBLEMS).exit_code == 1


def test_results_of_a_check_are_not_replaced_by_a_search(run: Run) -> None:
    write(WRONG)
    CliRunner().invoke(app, ["check", "softcap", "-i", "kernel.py:attention", "--output", "found", "--no-report"])
    kept = Path("found/environment.json").read_bytes()
    error = run(*PROBLEMS).exception
    assert (type(error), "name another folder with --output" in str(error)) == (OutputError, True)
    assert Path("found/environment.json").read_bytes() == kept


def test_a_check_does_not_write_over_a_search(run: Run) -> None:
    write(WRONG)
    run(*PROBLEMS)
    words = ["check", "softcap", "-i", "kernel.py:attention", "--output", "found", "--no-report"]
    error = CliRunner().invoke(app, words).exception
    assert (type(error), "holds a search" in str(error)) == (OutputError, True)


def record_of(result: Any) -> Any:
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Search what is wrong once, and return the folder that was searched from, which holds "found", and the result."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch, evaluation_here():
        patch.chdir(folder)
        write(WRONG)
        return folder, searched(*PROBLEMS, "--json")


def test_a_finding_keeps_the_readings_that_fit_all_of_its_problems() -> None:
    shapes = {"query": (1, 1, 1, 1)}
    finding = SearchFinding(
        Symptom("numeric", "output"), "attention", "float32", (), {}, shapes, 1, 2, True, "", "a.yaml"
    )
    assert finding.with_diagnosis(None).diagnosis == ""
    drawn = finding.with_diagnosis("scale-inverse-width or scale-twice or scale-half")
    narrowed = drawn.with_diagnosis("scale-inverse-width or scale-twice")
    assert narrowed.diagnosis == "scale-inverse-width or scale-twice"
    assert narrowed.with_diagnosis(None) == narrowed
    assert narrowed.with_diagnosis("softcap-none") == narrowed


def test_a_fault_is_found_reduced_and_written(first: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, result = first
    monkeypatch.chdir(folder)
    assert result.exit_code == 1, result.output
    [finding] = [each for each in record_of(result)["findings"] if "is_causal" in each["asked"]]
    assert (finding["verdict"], finding["stage"]) in {
        ("numeric", "output"),
        ("semantic", "output"),
    }
    assert finding["asked"] == ["is_causal"]
    assert finding["lengths"]["Lk"] == 4
    assert finding["is_smallest"]
    selected = select_cases([str(folder / "found")])
    assert not selected.faults
    assert len(selected.cases) == len(record_of(result)["findings"])
    script = folder / "found" / finding["script"]
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    assert subprocess.run([sys.executable, script], check=False, capture_output=True).returncode == 1
    write(RIGHT.replace("AHEAD", "0"))
    assert subprocess.run([sys.executable, script], check=False, capture_output=True).returncode == 0


def test_a_search_is_the_same_however_many_processes_judge(
    run: Run, first: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(WRONG)
    monkeypatch.setattr("attncheck.searching.search._MIN_PROBLEMS_FOR_PROCESSES", 0)
    run(*PROBLEMS)
    states = [
        json.loads((folder / "found" / SEARCH_STATE).read_text(encoding="utf-8")) for folder in (first[0], Path())
    ]
    assert states[0] == states[1]


@pytest.mark.usefixtures("workers_here")
def test_it_goes_on_and_says_what_is_mended(run: Run, first: tuple[Path, Any]) -> None:
    shutil.copytree(first[0] / "found", "found")
    state = json.loads(Path("found", SEARCH_STATE).read_text(encoding="utf-8"))
    write(RIGHT.replace("AHEAD", "0"))
    again = record_of(run("--problems", "2", "--json"))
    found = record_of(first[1])["findings"]
    assert {each["file"] for each in found if "is_causal" in each["asked"]} <= set(again["no_longer_failing"])
    after = json.loads(Path("found", SEARCH_STATE).read_text(encoding="utf-8"))
    assert all(after["next"][key] > number for key, number in state["next"].items())


def test_a_failure_of_the_calls_before_is_told_as_one(run: Run) -> None:
    write(TABLES["remembering"])
    result = run("--problems", "15", "--json")
    assert result.exit_code == 1, result.output
    assert any(each["needs_calls"] for each in record_of(result)["findings"])


def drawn(options: dict[str, object] | None = None) -> Problem:
    random = np.random.RandomState(5)
    inputs = {
        "query": random.randn(2, 4, 19, 8),
        "key": random.randn(2, 2, 21, 8),
        "value": random.randn(2, 2, 21, 6),
        "bias": random.randn(1, 4, 19, 21),
        "sinks": random.randn(4),
    }
    return Problem("attention", options or {}, inputs, "float32", {"key": "strided"}, True)


@pytest.mark.parametrize(
    ("fails", "asked", "most"),
    [
        (lambda it: it.axis_lengths["Lk"] >= 17, set(), {"key": 17, "query": 1}),
        (lambda it: (it.inputs.get("bias", np.zeros(1)) < 0).any(), {"bias"}, {"bias": 1, "key": 1}),
        (
            lambda it: "window" in it.options and it.axis_lengths["Hkv"] < it.axis_lengths["H"],
            {"window"},
            {"query": 2, "key": 1},
        ),
    ],
    ids=["seventeen keys", "a bias with a negative number", "a window and heads that share a key"],
)
def test_nothing_is_left_but_what_it_takes_and_every_step_is_simpler_than_the_one_before(
    fails: Callable[[Problem], bool], asked: set[str], most: dict[str, int]
) -> None:
    reduced = reduce_problem(drawn({"window": (3, 4), "scale": 0.3}), fails)
    problem = reduced.problem
    assert fails(problem)
    assert reduced.is_smallest
    assert {*problem.options, *optional_inputs(problem)} == asked
    assert {name: problem.inputs[name].size for name in most} == most
    assert not problem.memory_layout
    assert not problem.supports_statistics
    assert set(np.unique(problem.inputs["query"])) == {0.0}
    measures = [simplicity_key(step) for step in reduced.steps]
    assert len(measures) > 5
    assert measures == sorted(measures, reverse=True)
    assert all(map(fails, reduced.steps))
    early = reduce_problem(drawn({"window": (3, 4)}), fails, tries=5)
    assert (early.tries, early.is_smallest, fails(early.problem)) == (5, False, True)


def test_a_fault_fails_its_reduced_case_in_a_fresh_process() -> None:
    faulty = Implementation(variant_entry("last_key_of_a_full_tile_of_16_dropped"), "eager")
    subject = ProblemSubject(faulty, Engine(Limits(keep_going=True), expected_failures=()))
    random = np.random.RandomState(2)
    inputs = {each: random.randn(1, 1, 32, 2) for each in ("query", "key", "value")}
    problem = Problem("attention", {"is_causal": True, "scale": 0.5}, inputs, "float32")
    try:
        symptom = subject.run_for_symptom(problem)
        assert symptom is not None
        reduced = reduce_problem(problem, lambda each: subject.run_for_symptom(each) == symptom)
        simplest, found = simplest_in_new_process(reduced, subject, symptom)
    finally:
        subject.close()
    assert symptom == symptom_of(found)
    assert symptom.stage == "weights"
    assert {name: array.shape[2] for name, array in simplest.inputs.items()} == {"query": 1, "key": 16, "value": 16}


# Problems: drawn by number alone, all that can be asked; written as cases, read again, and cut smaller

FILE_ALONE = {"projections", "poison", "swizzle"}
"""Options that say how a file is written."""


def drawn_from(count: int) -> list[DrawnProblem]:
    return [draw_problem(PooledDraw(1, shapes=40), number) for number in range(count)]


def problems_of(seed: int = 1, count: int = 250) -> list[Problem]:
    source = ProblemSource(DrawSettings(seed), DTYPES)
    return [source.draw_problem(number) for number in range(count)]


def test_a_problem_follows_from_seed_and_number() -> None:
    for one, again in ((drawn_from(5), drawn_from(5)), (problems_of(count=20), problems_of(count=20))):
        for first, second in zip(one, again, strict=True):
            assert (first.operation, first.options) == (second.operation, second.options)
            assert all(first.inputs[name].tobytes() == second.inputs[name].tobytes() for name in first.inputs)
    assert len({problem.id for problem in drawn_from(50)}) == 50
    assert problem_features(problems_of(2, 1)[0]) != problem_features(problems_of(1, 1)[0])


def test_whatever_the_specification_has_is_drawn_and_soon_searched(tmp_path: Path) -> None:
    drawn, problems = drawn_from(400), problems_of(5, 320)
    for some in (drawn, problems):
        assert {problem.operation for problem in some} == set(OPERATIONS)
        assert set(OPTIONS) - {name for problem in some for name in problem.options} == FILE_ALONE
    assert {problem.drawing_regime for problem in drawn} == set(REGIMES)
    forms = {word for problem in drawn for word in problem.asked.split(" + ")}
    assert forms >= {
        *(f"mask {form}" for form in ("padding", "random", "blocks", "documents")),
        *(f"bias {form}" for form in ("with -inf", "ALiBi", "of buckets", "lowest")),
        *("of attention", "empty parts", "self", "nothing", "heads shared", "one head shared"),
    }
    assert {each.dtype for each in problems} == set(DTYPES)
    inputs = {name for operation in OPERATIONS.values() for name in operation.inputs}
    assert inputs <= {name for each in problems for name in each.inputs}
    assert set(EDGE_LENGTHS) <= {length for each in problems for length in each.axis_lengths.values()}
    layouts = {layout for each in problems for layout in each.memory_layout.values()}
    assert layouts == MEMORY_LAYOUTS.keys() - {"fused", "distant"}
    specials = {each.special_value.partition(" in ")[0] for each in problems}
    assert {"NaN", "infinity", "zeros", "ones", "equal rows", "large numbers", "small numbers"} <= specials
    read = 0
    for number, problem in enumerate(problems[::5]):
        with suppress(CaseError):
            case_of_problem(problem, tmp_path, f"search/drawn-{number}")
            read += 1
    assert read > 0.9 * len(problems[::5])


def attention_problem(options: dict[str, object] | None = None, keys: int = 3, dtype: str = "float32") -> Problem:
    inputs = {
        "query": np.ones((1, 4, 2, 3)),
        "key": np.ones((1, 2, keys, 3)),
        "value": np.ones((1, 2, keys, 5)),
        "bias": np.ones((1, 1, 2, keys)),
    }
    return Problem("attention", options or {}, inputs, dtype)


def test_features_are_options_inputs_sizes_and_forms_by_which_lists_can_name_what_is_drawn() -> None:
    found = problem_features(attention_problem({"window": (0, None), "scale": -1.0}, keys=17))
    assert {"window zero none", "scale negative", "bias along Lq T", "heads shared", "Lk = 17"} <= found
    assert "another width of values" in found
    assert required_features(attention_problem({"is_causal": True})) == {"is_causal", "bias", "heads shared"}
    assert drawn_case_id(attention_problem(), "problem-3") == "search/attention/bias-heads-shared/problem-3"
    causal = attention_problem({"is_causal": True, "scale": -0.5})
    causal.inputs["query"][0, 0, 0, 0] = np.nan
    named = "search/attention/bias-heads-shared-is-causal-scale-negative-nonfinite/problem-4"
    assert drawn_case_id(causal, "problem-4") == named
    assert "-scale-zero/" in drawn_case_id(attention_problem({"scale": 0.0}), "problem-5")


PATTERNS = [
    "layouts/*",
    "packed/*",
    "ragged/*tree*",
    "linear_projections/*",
    "quantized/*",
    "mask_fill/*",
    "merge_states/*",
    "probes/*",
]


def test_the_call_of_every_form_of_case_comes_back(tmp_path: Path) -> None:
    cases = [
        each
        for each in select_cases(PATTERNS).cases
        if sum(int(np.prod(shape)) for shape in each.input_shapes.values()) < 4000
    ]
    assert len(cases) > 100
    for number, case in enumerate(cases):
        dtype = case.dtypes[number % len(case.dtypes)]
        again = case_of_problem(concrete_problem(case, dtype), tmp_path, f"search/one-{number}")
        one, other = (make_problem_of_case(each, make_inputs(each, dtype)).as_call() for each in (case, again))
        assert one.options == other.options, case.id
        assert one.inputs.keys() == other.inputs.keys()
        for name, array in one.inputs.items():
            assert array.dtype == other.inputs[name].dtype
            np.testing.assert_array_equal(array.astype(np.float64), other.inputs[name].astype(np.float64))
        assert case.stage_shapes == again.stage_shapes


def test_other_numbers_are_drawn_for_a_table_of_more_entries_than_pages() -> None:
    [case] = select_cases(["ragged/pages-of-one-token"]).cases
    problem = replace(make_problem_of_case(case, make_inputs(case, "float64")).as_call(), drawing_regime="normal")
    drawn = draw_numbers(problem, np.random.RandomState(1)).inputs["block_table"]
    assert (drawn.shape, drawn.size > len(problem.inputs["key_pages"]) > drawn.max()) == ((4, 5), True)


def test_drawn_problems_come_back_from_their_files(tmp_path: Path) -> None:
    source, written = ProblemSource(DrawSettings(7), DTYPES), 0
    for number in range(36):
        problem = source.draw_problem(number)
        with suppress(CaseError, ShapeFault):  # what was drawn may not fit together
            case = write_case(problem, tmp_path / f"case-{number}.yaml", "A drawn problem", "a test")
            assert has_same_numbers(case, problem, tmp_path)
            written += 1
    assert written > 30
    assert list(tmp_path.glob("*.npz"))  # some are large


def test_most_cuts_of_drawn_problems_are_cases_again(tmp_path: Path) -> None:
    source, tried, read = ProblemSource(DrawSettings(3), DTYPES), 0, 0
    for number in range(25):
        problem = source.draw_problem(number)
        for letter in cuttable_axes(problem):
            if (length := position_count(problem, letter)) > 1:
                tried += 1
                with suppress(CaseError, ShapeFault):
                    shorter = clip_counts_to_lengths(keep_positions(problem, {letter: np.arange(length - 1)}))
                    case_of_problem(shorter, tmp_path, f"search/cut-{tried}")
                    read += 1
    assert tried > 100
    assert read > 0.8 * tried
