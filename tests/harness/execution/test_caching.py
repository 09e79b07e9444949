"""Where frameworks keep what they compile: the user's cache folder, unless the user says otherwise."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from attncheck.backends import BACKENDS
from attncheck.execution.environment import with_cache
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.user_code import Target, entry_of
from attncheck.execution.worker import Computed
from attncheck.plan import Plan
from attncheck.reading.selection import select_cases
from attncheck.store import VARIABLE, cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for entry in BACKENDS.values():
        for name in (*entry.cache, *entry.without_cache):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_word_of_the_user_it_is_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "attncheck"
    assert tmp_path in cache_folder().parents or os.name != "posix"


@pytest.mark.skipif(sys.platform == "darwin", reason="nothing is kept on macOS")
def test_a_framework_gets_a_folder_of_its_own_that_nobody_else_may_write(folder: Path) -> None:
    environment = with_cache(BACKENDS["jax"], keep=True).environment
    own = Path(environment["JAX_COMPILATION_CACHE_DIR"])
    assert own.parent == folder
    assert own.name.startswith("jax-")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert with_cache(BACKENDS["torch"], keep=True).environment["TORCHINDUCTOR_CACHE_DIR"] != str(own)


def test_what_the_user_has_set_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    assert "JAX_COMPILATION_CACHE_DIR" not in with_cache(BACKENDS["jax"], keep=True).environment


def test_it_can_be_switched_off(folder: Path) -> None:
    environment = with_cache(BACKENDS["jax"], keep=False).environment
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_keeps_nothing_and_stops_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    assert with_cache(BACKENDS["jax"], keep=True).environment == BACKENDS["jax"].environment


def test_an_own_implementation_shares_its_frameworks(folder: Path) -> None:
    entry = entry_of(Target("kernel.py", "attention"), {"framework": "jax"}, None)
    kept = with_cache(entry, keep=True)
    assert kept.target == entry.target
    assert kept.environment == with_cache(BACKENDS["jax"], keep=True).environment


@pytest.mark.jax
def test_what_one_worker_compiled_the_next_one_reads_and_computes_the_same(folder: Path, tmp_path: Path) -> None:
    plan = Plan.of(select_cases(["attention/a-causal-row-sees-its-own-key-and-earlier-ones"]).cases, ["float32"])
    results = []
    for _ in range(2):
        runner: GroupRunner[int] = GroupRunner(
            Group(Implementation(BACKENDS["jax"], "eager"), ("float32",)), Limits(), tmp_path
        )
        outcome = runner.evaluate(plan.task(plan.units[0]))
        runner.close()
        assert isinstance(outcome, Computed), outcome
        entries = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*-cache")}
        results.append((entries, {stage: array.tobytes() for stage, array in outcome.stages.items()}))
    assert len(results[0][0]) > 5
    assert results[0] == results[1]
