"""The loop of somebody who changes a kernel: stop at a failure, run what failed, go on, select by shape and tile."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from here import own_code_here
from kernels import kernel

from attncheck.api import check
from attncheck.backends import BackendEntry
from attncheck.config import read_config
from attncheck.errors import ExitCode, UsageError
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import TEMPLATE, select_cases
from attncheck.results.coverage import Stop
from attncheck.results.last_failed import FailedEvaluation
from attncheck.results.reader import read_run
from attncheck.run import Settings, run_cases

Invoke = Callable[..., tuple[int, str, str]]

CASES = """\
title: Seven lengths
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float64]}
for_each: {keys: [1, 2, 3, 4, 5, 6, 7]}
cases:
  - name: Some keys
    inputs:
      query: {draw: randn, shape: [2, 4]}
      key: {draw: randn, shape: [{each: keys}, 4]}
      value: {draw: randn, shape: [{each: keys}, 4]}
"""
KERNEL = kernel("output * query.dtype.type(1.5) if key.shape[-2] in WRONG else output")
"""Wrong for so many keys as WRONG says."""


@pytest.fixture
def invoke(invoke: Invoke) -> Invoke:
    """Run the command, and the kernel as it is written now, in this process."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with own_code_here():
            return invoke(*arguments)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    """Write keys.yaml with seven cases, and kernel.py, which is wrong for some of them."""
    (tmp_path / "keys.yaml").write_text(CASES, encoding="utf-8")

    def written(*wrong: int) -> None:
        (tmp_path / "kernel.py").write_text(f"WRONG = {wrong}\n{KERNEL}", encoding="utf-8")

    return written


def ran(folder: Path) -> list[int]:
    """Return the numbers of keys that were judged."""
    rows = read_run(folder).rows
    return sorted({int(case[-1]) for case in rows["case"]})


CHECK = ("check", "keys.yaml", "-i", "kernel.py:attention")
QUICK = (*CHECK, "--no-report")


def test_a_run_stops_at_the_first_failure(write: Callable[..., None], invoke: Invoke, tmp_path: Path) -> None:
    write(3, 5)
    out = tmp_path / "results" / "latest"
    code, text, err = invoke(*CHECK, "-x")
    assert (code, err) == (1, "")
    first, second = text.splitlines()[:2]
    assert first == (
        "kernel.attention is wrong in 1 of the 3 cases that it was judged in; the run was stopped after 1 failing "
        "case. Judged 3 of 7 cases; 4 not run."
    )
    assert second == ("Too little was judged: the run was stopped after 1 failing case: 4 of 7 cases were not run.")
    assert ran(out) == [1, 2, 3]
    assert "the run was stopped after 1 failing case" in (out / "report" / "junit.xml").read_text()
    code, text, _ = invoke(*QUICK, "-x", "--resume")
    assert code == 1
    assert ran(out) == [1, 2, 3, 4, 5]
    assert "2 of the 5 cases that it was judged in; the run was stopped after 1 failing case." in text
    code, text, _ = invoke(*QUICK, "--resume")
    assert code == 1
    assert text.startswith(
        "kernel.attention is wrong in 2 of the 7 cases that it was judged in. Judged 7 of 7 cases.\n"
    )
    assert "stopped" not in json.loads((out / "summary.json").read_text())


def test_a_report_can_be_made_later(write: Callable[..., None], invoke: Invoke, tmp_path: Path) -> None:
    write(3)
    out = tmp_path / "results" / "latest"
    code, whole, _ = invoke(*CHECK)
    assert code == 1
    assert (out / "report").is_dir()
    code, text, err = invoke(*CHECK, "--no-report", "--annotations", "--ci-summary", "summary.md")
    assert (code, err) == (1, "")
    assert not (out / "report").exists()  # that of the run before is none of this one
    assert "Results: results/latest\nReport: not written; attncheck report results/latest writes it\n" in text
    assert text.splitlines()[:7] == whole.splitlines()[:7]
    assert "The results, without a report: `results/latest`" in (tmp_path / "summary.md").read_text()
    assert ran(out) == [1, 2, 3, 4, 5, 6, 7]
    assert invoke("report", str(out))[0] == 1
    assert (out / "report" / "report.html").is_file()


def test_failing_cases_run_until_none_fails(write: Callable[..., None], invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "results" / "latest"
    write(2, 3, 5)
    _, _, err = invoke(*QUICK, "--failed")
    assert err == "attncheck: there are no earlier results in results/latest: every selected case runs\n"
    assert ran(out) == [1, 2, 3, 4, 5, 6, 7]
    write(3, 5, 7)
    code, text, err = invoke(*QUICK, "--failed")
    assert code == 1
    assert err == "attncheck: 3 of 7 cases failed last time in results/latest and run alone\n"
    assert "Judged 3 of 3 cases." in text
    assert "Partial run: only the cases keys.yaml; what failed last time in results/latest." in text
    assert ran(out) == [2, 3, 5]
    write(5)
    invoke(*QUICK, "--failed", "-x")
    assert ran(out) == [3, 5]
    invoke(*QUICK, "-k", "Lk=1")  # has nothing to do with it
    write()
    assert invoke(*QUICK, "--failed")[0] == 0
    assert invoke(*QUICK, "--failed") == (
        0,
        "",
        "attncheck: nothing failed last time in results/latest: nothing runs\n",
    )
    assert ran(out) == [5], "the results are those of the last run"


def test_cases_are_selected_by_shape(write: Callable[..., None], invoke: Invoke, tmp_path: Path) -> None:
    write()
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\nmin_judged = "100%"\n')
    assert invoke(*QUICK, "-k", "Lk>=6 or keys-1")[0] == 0
    assert ran(tmp_path / "results" / "latest") == [1, 6, 7]
    assert read_run(tmp_path / "results" / "latest").environment["asked"]["match"] == ["Lk>=6 or keys-1"]
    assert invoke("list", "cases", "keys.yaml", "-k", "Lk=3")[1].startswith("keys/some-keys-keys-3\n")
    assert (
        invoke(*QUICK, "-k", "Lk>>6")[2]
        == "attncheck: -k: expected a whole number or an axis, got '>'\n  Lk>>6\n     ^\n"
    )


def test_from_python_a_check_can_be_narrowed_and_stopped(tmp_path: Path, write: Callable[..., None]) -> None:
    write(3, 4, 5)
    target, cases, out = f"{tmp_path / 'kernel.py'}:attention", [str(tmp_path / "keys.yaml")], tmp_path / "out"
    with own_code_here():
        result = check(target, cases=cases, match="Lk>3", max_failures=1, output=out)
        again = check(target, cases=cases, output=out, failed=True)
    assert (result.exit_code, result.judged, result.asked) == (ExitCode.DISAGREE, 1, 4)
    assert "the run was stopped after 1 failing case" in result.headline
    assert (again.judged, again.asked) == (1, 1)
    for wrong, message in (
        ({"failed": True}, "failed: expected an output folder"),
        ({"max_failures": 0}, "max_failures: expected a number of cases, at least 1; got 0"),
        ({"match": "Lk>"}, "match: expected a whole number or an axis, got the end"),
    ):
        with pytest.raises(UsageError, match=message):
            check(target, cases=cases, **wrong)  # type: ignore[arg-type]


WRONG = "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages"


@pytest.mark.usefixtures("workers_here")
def test_a_stopped_run_looks_for_no_outdated_records_and_tells_failures_as_they_happen(
    case_folder: Path, tmp_path: Path, honest: tuple[BackendEntry, ...], make_backend: Callable[..., BackendEntry]
) -> None:
    entries = (honest[0], make_backend("wrong", WRONG))
    (tmp_path / "known.yaml").write_text(
        "- {implementation: wrong.*, cases: ['*/a-scores'], verdict: numeric, decided: numeric, reason: it never was}\n"
    )
    told: list[FailedEvaluation] = []
    settings = Settings(
        tmp_path / "out",
        dtypes=("float64",),
        expected_failures=load_expected_failures([tmp_path / "known.yaml"]),
        complete=True,
        max_failures=1,
    )
    summary = run_cases(
        select_cases(["small"], base=tmp_path).cases,
        ImplementationSelection(tuple(map(Implementation, entries))),
        settings,
        on_failure=told.append,
    )
    assert summary.exit_code is ExitCode.DISAGREE
    assert summary.stopped == Stop(1, not_run=2)
    assert {row.verdict for row in summary.failures} == {"numeric"}  # and no xpass
    assert [str(each) for each in told] == ["wrong.eager: small/small/b-weights [float64]: numeric at weights"]


# Cases at a kernel's own tile


TILED = """
import numpy as np


def attention(query, key, value, *, is_causal=False):
    if key.shape[-2] % 6 == 1 and key.shape[-2] > 6:  # the key behind a tile of six is never read
        key, value = key[..., :-1, :], value[..., :-1, :]
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, groups, axis=1) for each in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
SMALL = """
title: A small case
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}, dtypes: [float32]}
cases:
  - name: Nothing but three keys
    inputs: {query: {draw: randn, shape: [3, 4]}, key: {draw: randn, shape: [3, 4]}, value: {identity: 3}}
"""
MISSED = f"{TEMPLATE}/no-edge-shows-in-attention-tile-6-under-by-over"


@pytest.fixture
def tiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(TILED)
    (tmp_path / "small.yaml").write_text(SMALL)
    with own_code_here():
        yield tmp_path


def recorded(results: Path) -> set[str]:
    return {case["id"] for case in json.loads((results / "cases.json").read_text())["cases"]}


def test_a_fault_at_the_tile_is_found_and_shown_again_by_its_id(invoke: Invoke, tiled: Path) -> None:
    own = ["--implementation", "kernel.py:attention", "--no-report"]
    assert invoke("check", "small.yaml", *own, "--output", "without")[0] == 0
    code, out, _ = invoke("check", "small.yaml", "--tile", "6", *own, "--output", "with")
    assert code == 1
    assert "kernel.attention is wrong" in out
    environment = json.loads((tiled / "with" / "environment.json").read_text())
    assert environment["asked"]["tiles"] == [6]
    assert MISSED in recorded(tiled / "with")
    assert "small/nothing-but-three-keys" in recorded(tiled / "with")
    code, out, _ = invoke("explain", MISSED, "kernel.py:attention", "--results", "with")
    assert code == 1
    assert "output" in out
    assert "(tile 6, under by over)" in invoke("show", MISSED)[1]
    listed = invoke("list", "cases", "small.yaml", "--tile", "48", "--tile", "6,7")[1]
    assert all(f"-tile-{tile}-under-by-over" in listed for tile in (6, 7, 48))


@pytest.mark.usefixtures("tiled")
def test_what_is_no_tile_is_told_in_a_line_and_what_is_left_out_of_a_large_one_is_said(invoke: Invoke) -> None:
    line = "expected a whole number from 2 to 4096, got '1'; every length is a whole number of tiles of one"
    for command in (["check"], ["list", "cases"]):
        assert invoke(*command, "--tile", "1")[::2] == (2, f"attncheck: --tile: {line}\n")
    asked = ["check", "small.yaml", "--backend", "numpy", "--tag", "cache", "--tile", "512", "--no-report"]
    code, _, err = invoke(*asked)
    assert code == 0
    assert "--tile 512: rows stand for all where there are more than 262,144 scores, and gradients" in err


def test_a_project_says_its_tile_for_runs_in_which_no_cases_are_named(invoke: Invoke, tiled: Path) -> None:
    (tiled / "pyproject.toml").write_text("[tool.attncheck]\ntile = 48\n")
    assert read_config().tiles == (48,)
    (tiled / "pyproject.toml").write_text('[tool.attncheck]\ntile = [48, 6]\ncases = ["small.yaml"]\n')
    assert read_config().tiles == (48, 6)
    listed = invoke("list", "cases", "--tag", "cache")[1]
    assert "-tile-48\n" in listed
    assert "-tile-48\n" not in invoke("list", "cases", "small.yaml")[1]
    assert "-tile-48\n" not in invoke("list", "cases", "--tag", "cache", "--tile", "5")[1]
    (tiled / "pyproject.toml").write_text("[tool.attncheck]\ntile = 1\n")
    with pytest.raises(UsageError, match=r"tool\.attncheck\.tile: expected a whole number from 2 to 4096, got 1"):
        read_config()


@pytest.mark.usefixtures("tiled")
def test_pytest_takes_tiles(run_pytest: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    named = ["--attncheck", "kernel.py:attention", "--attncheck-cases", "small.yaml", "--attncheck-dtype", "float32"]
    run = partial(run_pytest, "-p", "no:cacheprovider", *named)
    collected = run("--attncheck-tile", "6", "--collect-only").stdout
    assert f"attncheck::kernel.attention[{MISSED}-float32]" in collected
    assert "tile-48" not in collected
    done = run(f"attncheck::kernel.attention[{MISSED}-float32]")
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done.stdout
    refused = run("--attncheck-tile", "1")
    assert "--attncheck-tile: expected a whole number from 2 to 4096" in refused.stderr
