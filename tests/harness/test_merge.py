"""Several runs as one comparison, without running anything again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from attncheck.backends import BackendEntry
from attncheck.harness.merge import Merged, merge_runs
from attncheck.harness.results.reader import Run, read_runs
from attncheck.harness.results.writer import Row, StoredArray
from attncheck.harness.run import RunSummary

RunSmall = Callable[..., tuple[RunSummary, Run]]
Entries = tuple[BackendEntry, BackendEntry]
Weights = Mapping[str, float]
MakeRun = Callable[..., Path]

RIGHT, WRONG = 0.25, -0.25


@pytest.fixture
def make_run(make_row: Callable[..., Row], write_run: Callable[..., Path]) -> MakeRun:
    """Write a run in which every implementation returned weights that are all the same number."""

    def make(label: str, weights: Weights, *, keep: bool = True, case: str = "file/one", **fields: Any) -> Path:
        rows = [
            make_row(case=case, implementation=name, verdict="unverified", message="no other", **fields)
            for name in weights
        ]
        arrays = [
            StoredArray(case, "float64", name, "weights", np.full((1, 1, 1, 4), number))
            for name, number in weights.items()
        ]
        return write_run(rows, label=label, arrays=arrays if keep else ())

    return make


def merged(*directories: Path) -> Merged:
    return merge_runs(read_runs(directories))


def said(rows: pd.DataFrame, comparison: str = "stage") -> list[tuple[str, ...]]:
    """Return who was compared with whom, and the verdict, in a fixed order."""
    own = rows[rows["comparison"] == comparison]
    names = [
        "environment",
        "implementation",
        *(["other_environment", "other"] if comparison == "pair" else []),
        "verdict",
    ]
    return sorted(tuple(record) for record in own[names].itertuples(index=False, name=None))


def test_one_run_alone_keeps_every_row_as_it_is(make_run: MakeRun) -> None:
    directory = make_run("alone", {"numpy.eager": RIGHT})
    rows = merged(directory).rows
    assert said(rows) == [("alone", "numpy.eager", "unverified")]
    assert list(rows["message"]) == ["no other"]
    assert rows["other_environment"].isna().all()


def test_two_runs_of_one_framework_each_verify_each_other(make_run: MakeRun) -> None:
    rows = merged(make_run("old", {"numpy.eager": RIGHT}), make_run("new", {"numpy.eager": RIGHT})).rows
    assert said(rows) == [("new", "numpy.eager", "agree"), ("old", "numpy.eager", "agree")]
    assert said(rows, "pair") == [("new", "numpy.eager", "old", "numpy.eager", "agree")]
    assert set(rows["message"]) == {""}


def test_the_one_that_differs_from_the_others_is_the_one_that_is_named(make_run: MakeRun) -> None:
    rows = merged(
        make_run("a", {"numpy.eager": RIGHT, "torch.eager": RIGHT}),
        make_run("b", {"numpy.eager": RIGHT, "torch.eager": WRONG}),
    ).rows
    assert said(rows) == [
        ("a", "numpy.eager", "agree"),
        ("a", "torch.eager", "agree"),
        ("b", "numpy.eager", "agree"),
        ("b", "torch.eager", "numeric"),
    ]
    assert len(said(rows, "pair")) == 6
    assert said(rows, "pair")[2] == ("a", "numpy.eager", "b", "torch.eager", "numeric")
    (bad,) = rows[(rows["comparison"] == "stage") & (rows["verdict"] == "numeric")].to_dict("records")
    assert (bad["value"], bad["reference"], bad["index"]) == (WRONG, RIGHT, "0,0,0,0")
    assert (bad["other"], bad["other_environment"]) == ("numpy.eager", "a")
    assert "differs from numpy.eager @ a, numpy.eager @ b, torch.eager @ a" in bad["message"]


def test_a_blame_that_a_run_laid_for_want_of_a_majority_is_taken_back(
    make_row: Callable[..., Row], write_run: Callable[..., Path], make_run: MakeRun
) -> None:
    # Alone, each of two differs from all the others, which is one.
    weights = {"numpy.eager": RIGHT, "torch.eager": WRONG}
    evidence: dict[str, Any] = {"value": 1.0, "reference": 2.0, "difference": 1.0, "units": 9e9, "index": "0,0,0,0"}
    rows = [
        make_row(implementation=name, verdict="numeric", message="differs", other="somebody", **evidence)
        for name in weights
    ]
    rows.append(make_row(comparison="pair", implementation="numpy.eager", other="torch.eager", verdict="numeric"))
    arrays = [
        StoredArray("file/one", "float64", name, "weights", np.full((1, 1, 1, 4), number))
        for name, number in weights.items()
    ]
    first = write_run(rows, label="a", arrays=arrays)
    assert said(merged(first).rows, "pair") == [("a", "numpy.eager", "a", "torch.eager", "numeric")]
    both = merged(first, make_run("b", {"numpy.eager": RIGHT})).rows
    assert said(both) == [
        ("a", "numpy.eager", "agree"),
        ("a", "torch.eager", "numeric"),
        ("b", "numpy.eager", "agree"),
    ]
    freed = both[(both["comparison"] == "stage") & (both["verdict"] == "agree") & (both["environment"] == "a")]
    assert freed[["other", "other_environment", "index", "value", "difference", "units"]].isna().all(axis=None)
    assert list(freed["message"]) == [""]


@pytest.mark.parametrize("keep", [(False, False), (True, False), (False, True)])
def test_runs_without_all_their_arrays_keep_what_they_said(keep: tuple[bool, bool], make_run: MakeRun) -> None:
    first = make_run("a", {"numpy.eager": RIGHT}, keep=keep[0])
    second = make_run("b", {"numpy.eager": WRONG}, keep=keep[1])
    rows = merged(first, second).rows
    assert said(rows) == [("a", "numpy.eager", "unverified"), ("b", "numpy.eager", "unverified")]
    assert said(rows, "pair") == []


def test_a_run_without_arrays_keeps_its_own_comparisons(
    make_row: Callable[..., Row], write_run: Callable[..., Path], make_run: MakeRun
) -> None:
    names = ("numpy.eager", "torch.eager")
    rows = [make_row(implementation=name) for name in names]
    rows.append(make_row(comparison="pair", implementation=names[0], other=names[1]))
    found = merged(write_run(rows, label="a"), make_run("b", {"numpy.eager": RIGHT})).rows
    assert said(found, "pair") == [("a", "numpy.eager", "a", "torch.eager", "agree")]
    assert [verdict for *_, verdict in said(found)] == ["agree", "agree", "unverified"]


def test_cases_that_only_one_run_has_stay_beside_those_that_are_compared(
    make_row: Callable[..., Row], write_run: Callable[..., Path], make_run: MakeRun
) -> None:
    array = StoredArray("file/one", "float64", "numpy.eager", "weights", np.full((1, 1, 1, 4), RIGHT))
    rows = [make_row(verdict="unverified"), make_row(case="file/more", verdict="unverified")]
    both = merged(write_run(rows, label="a", arrays=[array]), make_run("b", {"numpy.eager": RIGHT}))
    assert list(both.cases) == ["file/more", "file/one"]
    verdicts = both.rows[both.rows["comparison"] == "stage"][["environment", "case", "verdict"]]
    assert sorted(verdicts.itertuples(index=False, name=None)) == [
        ("a", "file/more", "unverified"),
        ("a", "file/one", "agree"),
        ("b", "file/one", "agree"),
    ]


@pytest.mark.parametrize("verdict", ["error", "crash", "timeout", "unsupported"])
def test_what_did_not_run_stays_with_its_reason(
    verdict: str, make_row: Callable[..., Row], write_run: Callable[..., Path], make_run: MakeRun
) -> None:
    failed = write_run([make_row(stage="", verdict=verdict, message="why")], label="a")
    rows = merged(failed, make_run("b", {"numpy.eager": RIGHT, "torch.eager": RIGHT})).rows
    assert said(rows) == [
        ("a", "numpy.eager", verdict),
        ("b", "numpy.eager", "agree"),
        ("b", "torch.eager", "agree"),
    ]
    assert list(rows[rows["verdict"] == verdict]["message"]) == ["why"]


@pytest.mark.parametrize("verdict", ["shape", "dtype"])
def test_a_form_that_the_case_itself_forbids_stays_wrong(verdict: str, make_run: MakeRun) -> None:
    first = make_run("a", {"numpy.eager": RIGHT, "torch.eager": RIGHT})
    third = make_run("b", {"jax.eager": RIGHT})
    runs = read_runs([first, third])
    runs[1].rows.loc[:, "verdict"] = verdict
    runs[1].rows.loc[:, "message"] = "wrong form"
    rows = merge_runs(runs).rows
    assert said(rows)[-1] == ("b", "jax.eager", verdict)
    assert list(rows[rows["verdict"] == verdict]["message"]) == ["wrong form"]


def test_labels_may_hold_what_the_merge_itself_writes_between_names(make_run: MakeRun) -> None:
    rows = merged(make_run("x @ y", {"numpy.eager": RIGHT}), make_run("x", {"numpy.eager": WRONG})).rows
    assert said(rows) == [("x", "numpy.eager", "numeric"), ("x @ y", "numpy.eager", "numeric")]
    assert said(rows, "pair") == [("x", "numpy.eager", "x @ y", "numpy.eager", "numeric")]


def test_real_runs_compare_across_and_numbers_keep_their_environment(
    honest: Entries, run_small: RunSmall, make_backend: Callable[..., BackendEntry], tmp_path: Path
) -> None:
    wrong = make_backend(
        "second",
        "def softmax(scores):\n    stages = numpy_backend.softmax(scores); stages['weights'] *= -1; return stages",
    )
    directories = []
    for label, entry in [("one", honest[0]), ("two", honest[1]), ("three", wrong)]:
        summary, run = run_small([entry], label=label, keep_all_arrays=True)
        assert label == "three" or summary.exit_code == 0
        directories.append(Path(shutil.move(run.directory, tmp_path / label)))
    alone = merged(directories[0])
    assert set(alone.rows[alone.rows["comparison"] == "stage"]["verdict"]) == {"unverified"}
    rows = merged(*directories).rows
    stages = rows[rows["comparison"] == "stage"]
    assert len(stages) == 3 * 4 * 2
    assert len(rows[rows["comparison"] == "pair"]) == 3 * 4 * 2
    bad = stages[stages["verdict"] != "agree"]
    assert {(row.environment, row.case, row.stage, row.verdict) for row in bad.itertuples()} == {
        ("three", "small/small/b-weights", "weights", "numeric"),
        ("three", "small/small/d-weights", "weights", "numeric"),
    }
    known = rows[rows["comparison"] == "known"]
    assert known.groupby("environment")["verdict"].agg(set).to_dict() == {
        "one": {"agree"},
        "two": {"agree"},
        "three": {"numeric"},
    }


def test_an_implementation_whose_array_has_no_elements_is_compared(
    make_row: Callable[..., Row], write_run: Callable[..., Path], make_run: MakeRun
) -> None:
    empty: NDArray[Any] = np.zeros((0,))
    array = StoredArray("file/one", "float64", "numpy.eager", "weights", empty)
    first = write_run([make_row(verdict="shape", message="expected 4")], label="a", arrays=[array])
    rows = merged(first, make_run("b", {"numpy.eager": RIGHT})).rows
    assert said(rows, "pair") == [("a", "numpy.eager", "b", "numpy.eager", "shape")]
