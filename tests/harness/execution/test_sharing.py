"""Modes of one framework in one process, of which none is blamed for what another did to it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from attncheck.backends import BackendEntry, Mode
from attncheck.execution import runner as module
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import GroupRunner, group_by_process, group_runners
from attncheck.execution.worker import Computed, Failure, Outcome, Task

LOUD = """\
import os, sys
def softmax(scores):
    print("{name} in", os.getpid(), flush=True)
    {action}
    return numpy_backend.softmax(scores)
"""

REFUSING = """\
pass
def prepare(dtype, threads):
    if "mode0_backend" in sys.modules:
        raise RuntimeError("not beside another")
def softmax(scores):
    print("mode1 in", os.getpid(), flush=True)
"""


def task(number: float = 1.0) -> Task:
    return Task("softmax", {}, {"scores": np.full((1, 1, 1, 2), number)})


@pytest.fixture
def runners_of(
    tmp_path: Path, make_backend: Callable[..., BackendEntry], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[list[GroupRunner[str]]]]]:
    """Return what makes runners of a framework whose modes do what is said of each before they are right."""
    made: list[list[GroupRunner[str]]] = []

    def make(*actions: str, bundled: bool = True, own_process: bool = False) -> list[list[GroupRunner[str]]]:
        names = [f"mode{number}" for number in range(len(actions))]
        modules = [
            make_backend(name, LOUD.format(name=name, action=action)).module
            for name, action in zip(names, actions, strict=True)
        ]
        modes = tuple(
            Mode(name, each, "for tests", own_process=own_process) for name, each in zip(names, modules, strict=True)
        )
        entry = BackendEntry("some", "attncheck.backends.numpy_backend", ("numpy",), modes=modes)
        monkeypatch.setattr(module, "EVERYTHING", {"some": entry} if bundled else {})
        groups = [group for name in names for group in group_by_process(Implementation(entry, name), ["float64"])]
        limits = Limits(case_seconds=20.0)
        made.extend(group_runners(groups, limits, tmp_path))
        return made

    yield make
    for together in made:
        for each in together:
            each.close()


def pids(runner: GroupRunner[str], folder: Path) -> list[int]:
    log = (folder / f"{runner.group.name}.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(mode[0-9]) in ([0-9]+)$", log, re.MULTILINE)
    assert {mode for mode, _ in found} == {runner.group.implementation.mode}
    return [int(pid) for _, pid in found]


def answered(outcome: Outcome) -> bool:
    return isinstance(outcome, Computed) and bool(np.all(outcome.stages["weights"] == 0.5))


def test_modes_share_one_process_and_each_prints_to_its_own_log(
    runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    ((first, second),) = runners_of("pass", "pass")
    assert all(answered(each.evaluate(task())) for each in (first, second, first))
    assert len(set(pids(first, tmp_path) + pids(second, tmp_path))) == 1
    assert (len(pids(first, tmp_path)), len(pids(second, tmp_path))) == (2, 1)
    assert first.description["version"] == np.__version__


@pytest.mark.parametrize("how", [{"own_process": True}, {"bundled": False}])
def test_what_is_configured_otherwise_or_is_not_bundled_has_a_process_of_its_own(
    how: dict[str, bool], runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    (first,), (second,) = runners_of("pass", "pass", **how)
    assert all(answered(each.evaluate(task())) for each in (first, second))
    assert pids(first, tmp_path) != pids(second, tmp_path)


def test_dtypes_that_need_a_process_of_their_own_share_it_among_modes() -> None:
    entry = module.EVERYTHING["jax"]
    dtypes = ["float64", "float32", "float16"]
    groups = [
        group for mode in ("jit", "eager", "dpa_jit") for group in group_by_process(Implementation(entry, mode), dtypes)
    ]
    shared = {group.process for group in groups}
    assert shared == {("jax", "float64"), ("jax",)}


def test_a_mode_is_not_blamed_for_what_another_did_to_the_process(
    runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    ((harmful, harmed),) = runners_of("sys.harmed = True", "os.abort() if hasattr(sys, 'harmed') else None")
    assert answered(harmful.evaluate(task()))
    assert answered(harmed.evaluate(task()))
    assert answered(harmful.evaluate(task()))
    assert answered(harmed.evaluate(task()))
    died, alone, again = pids(harmed, tmp_path)
    assert alone == again != died == pids(harmful, tmp_path)[0]


def test_what_ends_its_process_alone_too_is_a_crash_and_harms_nobody(
    runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    ((good, dying),) = runners_of("pass", "os.abort() if scores.max() == 2 else None")
    assert answered(good.evaluate(task()))
    outcome = dying.evaluate(task(2.0))
    assert isinstance(outcome, Failure)
    assert outcome.verdict == "crash"
    assert "SIGABRT" in outcome.message
    assert answered(dying.evaluate(task()))
    assert answered(good.evaluate(task(2.0)))
    assert len(set(pids(dying, tmp_path))) == 3  # shared, alone, and what replaced that


def test_a_mode_that_cannot_start_beside_others_starts_alone(
    runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    ((first, second),) = runners_of("pass", REFUSING)
    assert answered(first.evaluate(task()))
    assert answered(second.evaluate(task()))
    assert pids(first, tmp_path) != pids(second, tmp_path)


def test_a_runner_that_is_stopped_ends_the_process_that_it_shares(
    runners_of: Callable[..., list[list[GroupRunner[str]]]], tmp_path: Path
) -> None:
    ((first, second),) = runners_of("pass", "pass")
    assert answered(first.evaluate(task()))
    (pid,) = pids(first, tmp_path)
    second.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("bundled", "same"), [(True, False), (False, True)])
def test_a_bundled_framework_makes_room_earlier_than_what_may_hold_a_model(
    bundled: bool,
    same: bool,
    runners_of: Callable[..., list[list[GroupRunner[str]]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(module, "_BUNDLED_MEMORY", 1)
    ((runner,),) = runners_of("pass", bundled=bundled)
    assert all(answered(runner.evaluate(task())) for _ in range(2))
    assert (len(set(pids(runner, tmp_path))) == 1) == same
