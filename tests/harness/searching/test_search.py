"""A search finds what is wrong, says it once, is the same for the same seed; a reduction keeps what makes it fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from here import evaluation_here
from tables import tables_beside
from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.mutation import entry_of
from attncheck.reading.selection import select_cases
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.findings import STATE, WorkerJudge, symptom_of
from attncheck.searching.reduction import measure, reduce_problem
from attncheck.searching.search import simplest_afresh

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


@pytest.mark.usefixtures("workers_here")
def test_what_is_known_of_drawn_problems_is_counted_and_not_found(run: Run) -> None:
    write(WRONG)
    Path("pyproject.toml").write_text("[tool.attncheck]\nexpected_failures = ['known.yaml']\n", encoding="utf-8")
    entries = "".join(TABLES["known"].format(verdict=verdict) for verdict in ("numeric", "semantic"))
    Path("known.yaml").write_text(entries, encoding="utf-8")
    known = record_of(run(*PROBLEMS, "--json"))
    assert not [each for each in known["findings"] if "is_causal" in each["asked"]]
    assert known["known"]["One key too many is seen."] >= 2
    printed = run(*PROBLEMS, "--output", "other").stdout
    assert f"Known, in {known['known']['One key too many is seen.']} problems: One key too many is seen." in printed


@pytest.mark.usefixtures("workers_here")
def test_it_goes_on_and_says_what_is_mended(run: Run, first: tuple[Path, Any]) -> None:
    shutil.copytree(first[0] / "found", "found")
    state = json.loads(Path("found", STATE).read_text(encoding="utf-8"))
    write(RIGHT.replace("AHEAD", "0"))
    again = record_of(run("--problems", "2", "--json"))
    found = record_of(first[1])["findings"]
    assert {each["file"] for each in found if "is_causal" in each["asked"]} <= set(again["no_longer_failing"])
    after = json.loads(Path("found", STATE).read_text(encoding="utf-8"))
    assert all(after["next"][key] > number for key, number in state["next"].items())


def test_what_cannot_be_searched_is_said(run: Run, first: tuple[Path, Any]) -> None:
    write(WRONG)
    for arguments, said in {
        ("--operation", "nothing"): "unknown 'nothing'",
        ("--dtype", "float16"): "declares no 'float16'",
    }.items():
        assert said in str(run("--problems", "1", *arguments).exception)
    # Another implementation does not go on in a folder.
    result = CliRunner().invoke(app, ["search", "numpy", "--problems", "1", "--output", str(first[0] / "found")])
    assert result.exit_code != 0
    assert "holds a search of kernel.attention" in str(result.exception)


@pytest.mark.usefixtures("workers_here")
def test_a_right_implementation_raises_no_finding(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["search", "numpy", "--problems", "20", "--seed", "4", "--output", str(tmp_path), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert record_of(result)["findings"] == []


def test_a_failure_of_the_calls_before_is_told_as_one(run: Run) -> None:
    write(TABLES["remembering"])
    result = run("--problems", "15", "--json")
    assert result.exit_code == 1, result.output
    assert any(each["needs_calls"] for each in record_of(result)["findings"])


def drawn(options: dict[str, object] | None = None) -> ConcreteCase:
    random = np.random.RandomState(5)
    inputs = {
        "query": random.randn(2, 4, 19, 8),
        "key": random.randn(2, 2, 21, 8),
        "value": random.randn(2, 2, 21, 6),
        "bias": random.randn(1, 4, 19, 21),
        "sinks": random.randn(4),
    }
    return ConcreteCase("attention", options or {}, inputs, "float32", {"key": "strided"}, True)


def _needs_seventeen_keys(problem: ConcreteCase) -> bool:
    return problem.lengths["Lk"] >= 17


def _needs_a_bias_with_a_negative_number(problem: ConcreteCase) -> bool:
    return bool((problem.inputs.get("bias", np.zeros(1)) < 0).any())


def _needs_a_window_and_grouped_heads(problem: ConcreteCase) -> bool:
    return "window" in problem.options and problem.lengths["Hkv"] < problem.lengths["H"]


@pytest.mark.parametrize(
    ("fails", "asked", "most"),
    [
        (_needs_seventeen_keys, set(), {"key": 17, "query": 1}),
        (_needs_a_bias_with_a_negative_number, {"bias"}, {"bias": 1, "key": 1}),
        (_needs_a_window_and_grouped_heads, {"window"}, {"query": 2, "key": 1}),
    ],
)
def test_nothing_is_left_but_what_it_takes_and_every_step_is_simpler_than_the_one_before(
    fails: Callable[[ConcreteCase], bool], asked: set[str], most: dict[str, int]
) -> None:
    reduced = reduce_problem(drawn({"window": (3, 4), "scale": 0.3}), fails)
    problem = reduced.problem
    assert fails(problem)
    assert reduced.is_smallest
    assert {*problem.options, *problem.optional_inputs} == asked
    assert {name: problem.inputs[name].size for name in most} == most
    assert not problem.memory_layout
    assert not problem.supports_statistics
    assert set(np.unique(problem.inputs["query"])) == {0.0}
    measures = [measure(step) for step in reduced.steps]
    assert len(measures) > 5
    assert measures == sorted(measures, reverse=True)
    assert all(map(fails, reduced.steps))
    early = reduce_problem(drawn({"window": (3, 4)}), fails, tries=5)
    assert (early.tries, early.is_smallest, fails(early.problem)) == (5, False, True)


def test_a_fault_fails_its_reduced_case_in_a_fresh_process() -> None:
    judge = WorkerJudge(
        Implementation(entry_of("last_key_of_a_full_tile_of_16_dropped"), "eager"), Limits(keep_going=True), ()
    )
    random = np.random.RandomState(2)
    inputs = {each: random.randn(1, 1, 32, 2) for each in ("query", "key", "value")}
    problem = ConcreteCase("attention", {"is_causal": True, "scale": 0.5}, inputs, "float32")
    try:
        symptom = judge.symptom(problem)
        assert symptom is not None
        reduced = reduce_problem(problem, lambda each: judge.symptom(each) == symptom)
        simplest, found = simplest_afresh(reduced, judge, symptom)
    finally:
        judge.close()
    assert symptom == symptom_of(found)
    assert symptom.stage == "weights"
    assert {name: array.shape[2] for name, array in simplest.inputs.items()} == {"query": 1, "key": 16, "value": 16}


@pytest.mark.usefixtures("workers_here")
def test_the_same_number_of_problems_of_a_seed_is_the_same_search(run: Run, first: tuple[Path, Any]) -> None:
    write(WRONG)
    one, other = (record_of(result) for result in (first[1], run(*PROBLEMS, "--json", "--output", "other")))
    assert one["findings"] == other["findings"] != []
    cases = [
        sorted(path.read_text(encoding="utf-8") for path in folder.glob("*.yaml"))
        for folder in (first[0] / "found", Path("other"))
    ]
    assert cases[0] == cases[1]


@pytest.mark.usefixtures("workers_here")
def test_reduce_writes_the_smallest_case(run: Run, tmp_path: Path) -> None:
    write(WRONG)
    case = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    result = CliRunner().invoke(app, ["reduce", case, "kernel.py:attention", "--output", "small.yaml"])
    assert result.exit_code == 1, result.output
    assert "nothing smaller fails alike" in result.stdout
    [small] = select_cases([str(tmp_path / "small.yaml")]).cases
    assert small.input_shapes["key"] == (1, 1, 4, 1)
    assert dict(small.options) == {"is_causal": True}
    result = CliRunner().invoke(app, ["reduce", case, "numpy"])
    assert result.exit_code == 0
    assert "nothing to reduce" in result.stdout
