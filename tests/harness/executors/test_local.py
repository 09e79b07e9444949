"""What is judged where on this machine: what the store has takes no judging process."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncheck import run
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.implementations import bundled_implementations
from attncheck.execution.limits import Limits
from attncheck.executors import local, shared_work
from attncheck.executors.judges import MIN_UNITS, JudgingProcesses
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_arrays, read_run
from attncheck.run import Settings, run_cases
from attncheck.store import NO_STORE, Store


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Gets an entry whenever judging processes are begun."""
    begun: list[None] = []

    def begin(*given: Any) -> JudgingProcesses:
        begun.append(None)
        return JudgingProcesses(*given)

    monkeypatch.setattr(local, "JudgingProcesses", begin)
    return begun


def contents(folder: Path) -> tuple[Any, ...]:
    rows = read_run(folder).rows.drop(columns="seconds")
    arrays = {key: (array.dtype, array.shape, array.tobytes()) for key, array in read_arrays(folder).items()}
    return sorted(map(str, rows.to_dict("records"))), arrays


def test_documents_among_cases_that_were_judged_before_have_their_arrays_put_together_here(
    started: list[None], tmp_path: Path
) -> None:
    cases = select_cases(["documents/*", "softmax", "masking", "scoring"]).cases
    chosen = bundled_implementations(["numpy"])

    def run(name: str, store: Store) -> int:
        before = len(started)
        run_cases(cases, chosen, Settings(tmp_path / name, dtypes=("float64",), store=store))
        return len(started) - before

    assert len(cases) >= MIN_UNITS
    assert run("plain", NO_STORE) == 1
    assert run("first", Store(tmp_path / "store")) == 1
    assert run("again", Store(tmp_path / "store")) == 0
    assert contents(tmp_path / "plain") == contents(tmp_path / "first") == contents(tmp_path / "again")
    assert contents(tmp_path / "plain")[1]


class _Counted(JudgingProcesses):
    """Remembers how many units ever waited for judging processes at once, each with those before it."""

    most = 0

    def submit(self, *question: Any) -> Future[Any]:
        waiting = self._threads._work_queue.qsize() + 1
        _Counted.most = max(_Counted.most, waiting)
        return super().submit(*question)


def test_computing_waits_for_judging_and_comes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = select_cases(["softmax", "masking", "scoring"]).cases
    chosen = bundled_implementations(["numpy"])
    settings = Settings(tmp_path / "freely", store=NO_STORE)
    run_cases(cases, chosen, settings)
    monkeypatch.setattr(local, "JudgingProcesses", _Counted)
    monkeypatch.setattr(local, "MAX_ANSWERS", 1)
    monkeypatch.setattr(local, "MAX_TO_JUDGE", 3)
    run_cases(cases, chosen, replace(settings, output=tmp_path / "in step"))
    assert 0 < _Counted.most <= 3
    assert contents(tmp_path / "freely") == contents(tmp_path / "in step")


def test_a_run_that_is_stopped_leaves_no_worker_waiting_to_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_ANSWERS", 1)
    monkeypatch.setattr(local, "MAX_TO_JUDGE", 1)
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def softmax(scores, **options):\n    return {'weights': scores}\n", encoding="utf-8")
    chosen = select_implementations(None, [f"{kernel}:softmax"])
    summary = run_cases(select_cases(["softmax"]).cases, chosen, Settings(tmp_path / "results", max_failures=1))
    assert summary.stopped is not None
    assert summary.stopped.failing == 1


def test_several_workers_of_one_framework_come_to_what_one_comes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = select_cases(["softmax", "masking", "scoring", "attention"]).cases
    chosen = bundled_implementations(["numpy"])
    alone = run_cases(cases, chosen, Settings(tmp_path / "alone", limits=Limits(workers=1), store=NO_STORE))
    monkeypatch.setattr(run, "available_processors", lambda: 3)
    monkeypatch.setattr(shared_work, "MIN_SECONDS_LEFT", 0.0)
    monkeypatch.setattr(local, "CHUNK", 2)
    monkeypatch.setattr(shared_work, "CHUNK", 2)
    shared = run_cases(cases, chosen, Settings(tmp_path / "shared", limits=Limits(workers=3), store=NO_STORE))
    assert alone == shared
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")
    assert {path.name for path in (tmp_path / "alone" / "logs").iterdir()} == {"numpy.eager-float32-float64.txt"}
    several = {path.name for path in (tmp_path / "shared" / "logs").iterdir()}
    assert {"numpy.eager-float32-float64.txt", "numpy.eager-float32-float64-2.txt"} <= several


def test_ones_own_kernel_has_one_worker_in_which_calls_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def attention(query, key, value):\n    return query\n", encoding="utf-8")
    chosen = select_implementations(None, [f"{kernel}:attention"])
    monkeypatch.setattr(shared_work, "MIN_SECONDS_LEFT", 0.0)
    run_cases(
        select_cases(["attention"]).cases, chosen, Settings(tmp_path / "run", limits=Limits(workers=3), store=NO_STORE)
    )
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 1
