"""What tests share: a case run through NumPy in this process; small cases, faulty backends and results made by hand."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forked import forked_workers, forking
from here import evaluation_here
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from tables import CASES

from attncheck.backends import ALL_ENTRIES, BACKENDS, BackendEntry, numpy_backend
from attncheck.common.processors import ISA_VARIABLE
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.execution.operations import run_operation
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_inputs, make_problem_of_case
from attncheck.reading.selection import select_cases
from attncheck.results.format import Row, StoredArray
from attncheck.results.reader import Run, read_run
from attncheck.results.writer import ResultsWriter
from attncheck.run import RunSummary, Settings, run_cases

__all__ = ["forked_workers", "forking"]

Stages = dict[str, NDArray[Any]]

# Where CI runs these tests, the summary of its page is for the results, not for what tests make up.
os.environ.pop("GITHUB_STEP_SUMMARY", None)
_EMULATED = os.environ.get(ISA_VARIABLE)

# Machines are shared: how long an example takes says nothing of it. ``benchmarks/fuzz.py`` draws more.
settings.register_profile("attncheck", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("attncheck")


def pytest_configure(config: pytest.Config) -> None:
    """Give every framework and library of the table a marker, for the tests that need it."""
    for name, entry in ALL_ENTRIES.items():
        config.addinivalue_line("markers", f"{name}: needs {entry.packages[0]}")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what the tests import: a million objects, which stay until the end."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked with a framework that is not installed, and say so.

    Where a processor is emulated, commands name it: tests of frameworks know, others expect commands as they are.
    """
    needed = [entry for name, entry in ALL_ENTRIES.items() if item.get_closest_marker(name) is not None]
    for entry in needed:
        if not entry.is_installed:
            pytest.skip(f"{entry.packages[0]} is not installed")
    if _EMULATED and needed:
        os.environ[ISA_VARIABLE] = _EMULATED
    else:
        os.environ.pop(ISA_VARIABLE, None)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave what is written to the system: a run waits eight times for the disk, longer than it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def compute() -> Callable[[Case, str], tuple[RoundedInputs, Stages]]:
    """Return what makes a case's inputs in a dtype and runs them through the NumPy backend."""
    backend = BACKENDS["numpy"].load()

    def run(case: Case, dtype: str) -> tuple[RoundedInputs, Stages]:
        inputs = make_inputs(case, dtype)
        with np.errstate(all="ignore"):
            called = make_problem_of_case(case, inputs).as_call()
            stages = run_operation(backend, case.operation, called.inputs, called.options)
        return inputs, dict(stages)

    return run


@pytest.fixture(scope="session")
def write_small() -> Callable[[Path], Path]:
    """Write a folder ``small`` with the file small.yaml; the ids are small/small/a-scores and so on.

    There are four cases, run in this order; whatever is wrong with softmax shows in the second and the fourth.
    """

    def write(parent: Path) -> Path:
        folder = parent / "small"
        folder.mkdir()
        (folder / "small.yaml").write_text(CASES["small cases"], encoding="utf-8")
        return folder

    return write


@pytest.fixture
def case_folder(tmp_path: Path, write_small: Callable[[Path], Path]) -> Path:
    """Return the folder of the small cases."""
    return write_small(tmp_path)


@pytest.fixture(scope="session")
def honest() -> tuple[BackendEntry, BackendEntry]:
    """Return two backends that are right."""
    module = "attncheck.backends.numpy_backend"
    return BackendEntry("first", module, ("numpy",)), BackendEntry("second", module, ("numpy",))


@pytest.fixture(scope="session")
def write_backend() -> Callable[..., BackendEntry]:
    """Write a module that is NumPy's backend with something replaced, and return its line of the table."""

    def write(folder: Path, name: str, source: str, **fields: Any) -> BackendEntry:
        text = f"from attncheck.backends import numpy_backend\nfrom {numpy_backend.__name__} import *\n{source}\n"
        (folder / f"{name}_backend.py").write_text(text, encoding="utf-8")
        return BackendEntry(name, f"{name}_backend", ("numpy",), **fields)

    return write


@pytest.fixture
def make_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_backend: Callable[..., BackendEntry]
) -> Callable[..., BackendEntry]:
    """Write such a module to a folder on sys.path, which a worker takes over."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return partial(write_backend, folder)


@pytest.fixture
def workers_here() -> Iterator[None]:
    """Evaluate in this process for a test, where a process of its own is not its point."""
    with evaluation_here():
        yield


@pytest.fixture(scope="session")
def run_below() -> Callable[..., tuple[RunSummary, Run]]:
    """Run cases below a folder on some backends, really, in workers, and read back what was written."""

    def run(
        parent: Path,
        entries: Iterable[BackendEntry],
        *,
        dtypes: tuple[str, ...] = ("float64",),
        seconds: float = 600.0,
        missing: tuple[str, ...] = (),
        **settings: Any,
    ) -> tuple[RunSummary, Run]:
        selection = select_cases(["small"], base=parent)
        summary = run_cases(
            selection.cases,
            ImplementationSelection(tuple(Implementation(entry) for entry in entries), missing=missing),
            Settings(parent / "out", dtypes=dtypes, limits=Limits(case_seconds=seconds), **settings),
        )
        return summary, read_run(parent / "out")

    return run


@pytest.fixture
def run_small(
    tmp_path: Path, case_folder: Path, run_below: Callable[..., tuple[RunSummary, Run]]
) -> Callable[..., tuple[RunSummary, Run]]:
    """Run the small cases on some backends in the test's own folder."""
    return partial(run_below, tmp_path)


BY_HAND: dict[str, dict[str, Any]] = yaml.load(
    Path(__file__).with_name("support").joinpath("results.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """Return a row of the softmax of a case in a file ``file`` that agrees, unless something else is said."""
    return lambda **fields: Row(**(BY_HAND["row"] | fields))


@pytest.fixture
def make_case_record() -> Callable[..., dict[str, Any]]:
    """Return what cases.json says of a case."""

    def make(identity: str = "file/one", **fields: Any) -> dict[str, Any]:
        file, _, name = identity.rpartition("/")
        place = {"id": identity, "name": name, "file": f"{file}.yaml", "line": 7}
        return place | copy.deepcopy(BY_HAND["case"]) | fields

    return make


@pytest.fixture
def write_run(tmp_path: Path, make_case_record: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Write a results directory by hand; nothing is computed."""

    def write(
        rows: Iterable[Row] = (),
        *,
        label: str = "local",
        name: str | None = None,
        versions: Mapping[str, str] | None = None,
        arrays: Iterable[StoredArray] = (),
        cases: Sequence[Mapping[str, Any]] | None = None,
        summary: bool = True,
        exit_code: int = 0,
        **environment: Any,
    ) -> Path:
        """``versions`` are those of the implementations, whose packages have the same names."""
        rows = list(rows)
        directory = tmp_path / (name or f"run-{label}")
        versions = {row.implementation: "1.0" for row in rows} if versions is None else versions
        writer = ResultsWriter(directory)
        of_each = {
            "versions": dict(versions),
            "implementations": {implementation: implementation for implementation in versions},
            "classes": {implementation: {"float64": "native", "float32": "native"} for implementation in versions},
            "again": {implementation: [implementation] for implementation in versions},
        }
        writer.write_json("environment.json", {**BY_HAND["environment"], "label": label, **of_each, **environment})
        if cases is None:
            cases = [make_case_record(identity) for identity in sorted({row.case for row in rows})]
        writer.write_json("cases.json", {"cases": [dict(case) for case in cases]})
        writer.add_arrays(arrays)
        writer.add_rows(rows)
        writer.flush()
        if summary:
            writer.write_json("summary.json", {"exit_code": exit_code})
        return directory

    return write
