"""Frames for the tests of reports, of results that are written by hand and of the documents, really run; pages read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from here import evaluation_here
from html_pages import Element, parse
from tables import tables_beside

from attncheck.backends import BackendEntry
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.html.page import render_html
from attncheck.reports.merge import merge_runs
from attncheck.reports.write import write_report
from attncheck.results.format import EXACT, Row, StoredArray, bound_array_name
from attncheck.results.reader import read_runs
from attncheck.run import Settings, run_cases


def read_frames(*directories: Path) -> Frames:
    return make_frames(merge_runs(read_runs(directories)))


@dataclass(frozen=True)
class Hand:
    """Results that are written by hand: rows, records of cases, a folder of them, and the frames of folders."""

    row: Callable[..., Row]
    case: Callable[..., dict[str, Any]]
    write: Callable[..., Path]
    numbers: Iterator[int] = field(default_factory=count)

    @staticmethod
    def frames_of(*directories: Path) -> Frames:
        return read_frames(*directories)

    def run(self, rows: Iterable[Row | Mapping[str, Any]] = (), **run: Any) -> Path:
        """Write a folder of rows, or of the fields of rows; ``run`` is what ``write_run`` takes."""
        made = [row if isinstance(row, Row) else self.row(**row) for row in rows]
        return self.write(made, **{"name": f"run {next(self.numbers)}"} | run)

    def frames(self, rows: Iterable[Row | Mapping[str, Any]] = (), **run: Any) -> Frames:
        """Return the frames of one run."""
        return read_frames(self.run(rows, **run))


@pytest.fixture
def hand(
    make_row: Callable[..., Row], make_case_record: Callable[..., dict[str, Any]], write_run: Callable[..., Path]
) -> Hand:
    return Hand(make_row, make_case_record, write_run)


@pytest.fixture(scope="session")
def document_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of the bundled documents and the softmax cases on two implementations, both NumPy's."""
    directory = tmp_path_factory.mktemp("documents") / "out"
    entries = [BackendEntry(name, "attncheck.backends.numpy_backend", ("numpy",)) for name in ("first", "second")]
    chosen = ImplementationSelection(tuple(map(Implementation, entries)))
    cases = select_cases(["documents", "softmax"], base=directory.parent).cases
    with evaluation_here():
        run_cases(cases, chosen, Settings(directory, label="here"))
    return directory


@pytest.fixture(scope="session")
def document_frames(document_run: Path) -> Frames:
    return read_frames(document_run)


@pytest.fixture(scope="session")
def document_report(document_frames: Frames, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of the documents, written once. Tests leave it as it is."""
    return write_report(document_frames, tmp_path_factory.mktemp("written") / "deep" / "report").parent


@pytest.fixture(scope="session")
def page_of() -> Callable[..., Element]:
    """Read a page, or render frames and read theirs."""
    return lambda page, budget=None: parse(page if isinstance(page, str) else render_html(page, budget))


@pytest.fixture
def failing_frames(hand: Any) -> Frames:
    """One case on three implementations: right, wrong at one of its three weights, and known to be wrong."""
    exact, wrong = np.array([[[[0.1, 0.2, 0.7]]]]), np.array([[[[0.1, 0.205, 0.9]]]])
    named = {"good.eager": exact, "bad.eager": wrong, "old.eager": wrong, EXACT: exact}
    named[bound_array_name("native")] = np.full((1, 1, 1, 3), 0.01)
    arrays = [StoredArray("file/one", "float64", name, "weights", array) for name, array in named.items()]
    made: Frames = hand.frames(tables_beside(__file__)["failing"], arrays=arrays)
    return made
