"""Several runs as one comparison, without running anything again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from part_files import split_arrays

from attncheck.reports.frames import Merged
from attncheck.reports.merge import merge_runs
from attncheck.results.format import ARRAY_SCHEMA, INPUTS, Row, StoredArray, bound_array_name
from attncheck.results.reader import read_runs
from attncheck.results.tables import TableFile
from attncheck.results.writer import write_table

MakeRun = WriteRun = Callable[..., Path]

SHAPE = (1, 1, 1, 4)
BOUND = 2.0**-50
RIGHT, WRONG = 0.25, -0.25
NEARLY = RIGHT + 2 * BOUND
"""As far from what is right as two bounds allow, and exactly so."""


def stored(name: str, number: float, *, case: str = "file/one", stage: str = "weights") -> StoredArray:
    return StoredArray(case, "float64", name, stage, np.full(SHAPE, number))


@pytest.fixture
def make_run(make_row: Callable[..., Row], write_run: WriteRun) -> MakeRun:
    """Write a run in which every implementation returned weights that are all the same number."""

    def make(label: str, weights: Mapping[str, float], *, keep: bool = True, bound: float | None = BOUND) -> Path:
        rows = [make_row(implementation=name, message=f"said by {label}") for name in weights]
        arrays = [stored(name, number) for name, number in weights.items()]
        arrays += [stored(bound_array_name("native"), bound)] if bound is not None else []
        return write_run(rows, label=label, arrays=arrays if keep else ())

    return make


def merged(*directories: Path) -> Merged:
    return merge_runs(read_runs(directories))


def said(rows: pd.DataFrame, comparison: str = "stage") -> list[tuple[str, ...]]:
    """Return who was compared with whom, and the verdict, in a fixed order."""
    own = rows[rows["comparison"] == comparison]
    others = ["other_environment", "other"] if comparison == "pair" else []
    names = ["environment", "implementation", *others, "verdict"]
    return sorted(tuple(record) for record in own[names].itertuples(index=False, name=None))


def test_every_two_of_different_environments_are_compared_and_no_stage_is_judged_again(make_run: MakeRun) -> None:
    rows = merged(
        make_run("a", {"numpy.eager": RIGHT, "torch.eager": RIGHT}),
        make_run("b", {"numpy.eager": RIGHT, "torch.eager": WRONG}),
    ).rows
    # What a run said of a stage against the exact answer stands; only pairs are added, none within a run.
    assert said(rows) == [(run, f"{name}.eager", "agree") for run in "ab" for name in ("numpy", "torch")]
    assert set(rows[rows["comparison"] == "stage"]["message"]) == {"said by a", "said by b"}
    assert said(rows, "pair") == [
        ("a", "numpy.eager", "b", "numpy.eager", "agree"),
        ("a", "numpy.eager", "b", "torch.eager", "numeric"),
        ("a", "torch.eager", "b", "numpy.eager", "agree"),
        ("a", "torch.eager", "b", "torch.eager", "numeric"),
    ]
    bad = rows[rows["verdict"] == "numeric"].to_dict("records")[0]
    assert (bad["value"], bad["reference"], bad["index"], bad["stage"]) == (RIGHT, WRONG, "0,0,0,0", "weights")
    assert (bad["difference"], bad["allowed"]) == (0.5, 2 * BOUND)
    assert (bad["operation"], bad["dtype"], bad["case"]) == ("softmax", "float64", "file/one")


@pytest.mark.parametrize(("number", "verdict"), [(NEARLY, "agree"), (np.nextafter(NEARLY, 1), "numeric")])
def test_the_sum_of_both_bounds_is_allowed_and_no_more(number: float, verdict: str, make_run: MakeRun) -> None:
    # Labels may hold what names are written with.
    rows = merged(make_run("x", {"numpy.eager": RIGHT}), make_run("x @ y", {"numpy.eager": number})).rows
    assert said(rows, "pair") == [("x", "numpy.eager", "x @ y", "numpy.eager", verdict)]
    (pair,) = rows[rows["comparison"] == "pair"].to_dict("records")
    assert pair["ratio"] == (number - RIGHT) / (2 * BOUND)


def test_each_has_its_bound_and_without_bounds_form_nan_and_equality_alone_are_compared(
    make_row: Callable[..., Row], write_run: WriteRun, make_run: MakeRun
) -> None:
    arrays = [stored("torch.sdpa", NEARLY + BOUND), stored(bound_array_name("fused"), 2 * BOUND)]
    classes = {"torch.sdpa": {"float64": "fused", "float32": "native"}}
    fused = write_run([make_row(implementation="torch.sdpa")], label="b", arrays=arrays, classes=classes)
    rows = merged(make_run("a", {"numpy.eager": RIGHT}), fused).rows
    (pair,) = rows[rows["comparison"] == "pair"].to_dict("records")
    assert (pair["allowed"], pair["difference"], pair["verdict"]) == (3 * BOUND, 3 * BOUND, "agree")
    for number, verdict in ((RIGHT, "agree"), (WRONG, "unverified"), (np.nan, "nonfinite")):
        # A case that has no exact answer has no bounds either.
        runs = [make_run(label, {"numpy.eager": each}, bound=None) for label, each in (("a", RIGHT), ("b", number))]
        assert said(merged(*runs).rows, "pair") == [("a", "numpy.eager", "b", "numpy.eager", verdict)]


def test_what_a_run_said_is_kept(make_row: Callable[..., Row], write_run: WriteRun, make_run: MakeRun) -> None:
    """Its own pairs, failures with their reasons, and what it says where arrays are missing or runs are kept apart."""
    names = ("numpy.eager", "torch.eager")
    rows = [make_row(implementation=name) for name in names]
    rows.append(make_row(comparison="pair", implementation=names[0], other=names[1]))
    found = merged(write_run(rows, label="own"), make_run("b", {"numpy.eager": RIGHT})).rows
    assert said(found, "pair") == [("own", "numpy.eager", "own", "torch.eager", "agree")]
    failed = write_run([make_row(stage="", verdict="error", message="why")], label="failed")
    rows = merged(failed, make_run("c", {"numpy.eager": RIGHT})).rows
    assert said(rows) == [("c", "numpy.eager", "agree"), ("failed", "numpy.eager", "error")]
    assert list(rows[rows["verdict"] == "error"]["message"]) == ["why"]
    for number, keep in enumerate(((False, False), (True, False), (False, True), (True, True))):
        weights = {f"d{number}": RIGHT, f"e{number}": WRONG}
        runs = [
            make_run(label, {"numpy.eager": weight}, keep=is_kept)
            for (label, weight), is_kept in zip(weights.items(), keep, strict=True)
        ]
        rows = merge_runs(read_runs(runs), across=not all(keep)).rows
        assert said(rows) == [(label, "numpy.eager", "agree") for label in weights]
        assert said(rows, "pair") == []


def test_a_case_that_is_not_the_same_in_both_runs_is_told_and_not_compared(
    make_row: Callable[..., Row], write_run: WriteRun, make_case_record: Callable[..., Any]
) -> None:
    cases = ("file/options", "file/inputs", "file/same")
    same: dict[str, Any] = {
        "title": "Another",
        "line": 99,
        "tags": ["new"],
        "notes": ["Said since."],
        "dtypes": ["float64"],
    }
    changes: dict[str, dict[str, Any]] = {"file/options": {"options": {"is_causal": True}}, "file/same": same}
    runs = []
    for label, scores in (("a", 1.0), ("b", 2.0)):
        records = [make_case_record(case, **changes.get(case, {}) if label == "b" else {}) for case in cases]
        arrays = [stored(INPUTS, scores if case == "file/inputs" else 1.0, case=case, stage="scores") for case in cases]
        for name, number in (("numpy.eager", RIGHT), (bound_array_name("native"), BOUND)):
            arrays += [stored(name, number, case=case) for case in cases]
        runs.append(write_run([make_row(case=case) for case in cases], label=label, arrays=arrays, cases=records))
    both = merged(*runs)
    assert list(both.rows[both.rows["comparison"] == "pair"]["case"]) == ["file/same"]
    assert len(said(both.rows)) == 2 * len(cases)
    start = "is not the same case everywhere"
    assert sorted(both.notes) == [
        f"file/inputs {start}: the input scores differs (a and b)",
        f"file/options {start}: options nothing became {{'is_causal': True}} (a and b)",
    ]


def test_arrays_that_cannot_be_read_are_told_and_the_rest_is_compared(make_run: MakeRun) -> None:
    first = make_run("a", {"numpy.eager": RIGHT})
    second = make_run("b", {"numpy.eager": RIGHT})
    path = second / "arrays" / "part-00000.npz"
    with TableFile(path, 2**20, 100) as file:
        table = file.read_columns(ARRAY_SCHEMA)
    write_table(path, table, ARRAY_SCHEMA, [b"short"])
    both = merged(first, second)
    assert said(both.rows, "pair") == []
    (note,) = both.notes
    assert note.startswith(f"{path}: the array file/one float64 numpy.eager weights cannot be read")


def test_parts_in_another_order_are_compared(make_row: Callable[..., Row], write_run: WriteRun) -> None:
    cases = [f"file/{number}" for number in range(7)]
    runs = []
    for label, order in (("a", cases), ("b", cases[::-1])):
        arrays = [
            stored(name, number, case=case)
            for case in order
            for name, number in (("numpy.eager", RIGHT), (bound_array_name("native"), BOUND))
        ]
        directory = write_run([make_row(case=case) for case in order], label=label, arrays=arrays)
        path = directory / "arrays" / "part-00000.npz"
        split_arrays(path, 1)  # a part per case, in opposite orders
        runs.append(directory)
    rows = merged(*runs).rows
    pairs = rows[rows["comparison"] == "pair"]
    assert sorted(pairs["case"]) == cases
    assert set(pairs["verdict"]) == {"agree"}
