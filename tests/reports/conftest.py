"""Frames for the tests of reports: of results that are written by hand, and of the documents, really run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.backends import BackendEntry
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.merge import merge_runs
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames
from attncheck.reports.making import make_frames
from attncheck.results.reader import read_runs
from attncheck.run import Settings, run_cases


@pytest.fixture(scope="session")
def frames_of() -> Callable[..., Frames]:
    """Read results directories into frames."""
    return lambda *directories: make_frames(merge_runs(read_runs(directories)))


@pytest.fixture(scope="session")
def document_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of the bundled documents and the softmax cases on two implementations, both NumPy's."""
    directory = tmp_path_factory.mktemp("documents") / "out"
    entries = [BackendEntry(name, "attncheck.backends.numpy_backend", ("numpy",)) for name in ("first", "second")]
    chosen = ImplementationSelection(tuple(map(Implementation, entries)))
    cases = select_cases(["documents", "softmax"], base=directory.parent).cases
    run_cases(cases, chosen, Settings(directory, label="here"))
    return directory


@pytest.fixture(scope="session")
def document_frames(document_run: Path, frames_of: Callable[..., Frames]) -> Frames:
    return frames_of(document_run)
