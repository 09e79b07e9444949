"""The tasks on the workers of a cluster: batches of units, evaluated in a framework's own process, and judged.

Only descriptions are sent: the inputs are made where they are used, as in a local run. Versions have to be the same on
every machine: a report must not mix the numbers of two versions.
"""

from __future__ import annotations

import pickle
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from time import perf_counter

from attncheck.common.errors import UsageError
from attncheck.common.store import user_store
from attncheck.execution.call import Limits, divide_memory_between_workers
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import UserImplementation
from attncheck.execution.runner import GroupRunner, WorkerGroup
from attncheck.execution.worker import Outcome
from attncheck.judging.units import Judge, UnitResult
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.case import Case

_MAX_CACHED_PLANS = 4
_MAX_REMEMBERED_RUNS = 64


@dataclass(frozen=True)
class JobContext:
    """The context that all tasks of a run share.

    ``max_workers_per_machine`` is how many worker processes a machine may have to hold. Without ``limits_memory``, the
    default memory limit of each machine applies. ``versions`` have to be the same on workers of each of the ``groups``,
    and those under -1 on all workers.
    """

    name: str
    groups: tuple[WorkerGroup, ...]
    judge: Judge
    limits: Limits
    limits_memory: bool
    max_workers_per_machine: int
    versions: Mapping[int, Mapping[str, str]]


@dataclass(frozen=True)
class Batch:
    """Some units that follow each other in the plan; ``case`` of each counts the cases here."""

    cases: tuple[Case, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class GroupOutcomes:
    """The outcomes of one group for those units of a batch that it serves, in their order."""

    outcomes: tuple[Outcome, ...]
    description: Mapping[str, str]
    seconds: float


@dataclass(frozen=True)
class JudgedBatch:
    """The result of every unit of a batch, the descriptions of the groups' frameworks, and how long it took."""

    results: tuple[UnitResult, ...]
    descriptions: Mapping[str, Mapping[str, str]]
    seconds: float


class RunEnded(Exception):
    """The run is over; no client waits for this task any more."""


class _Run:
    """A run in this process: a runner for each group that has been asked for here."""

    def __init__(self, job: JobContext) -> None:
        self.job = job
        self.ended = False
        self._folder = tempfile.TemporaryDirectory(prefix="attncheck-")
        limits = job.limits if job.limits_memory else replace(job.limits, hard_memory_limit=Limits().hard_memory_limit)
        self._limits = divide_memory_between_workers(limits, job.max_workers_per_machine)
        # What is kept for later runs lies in the cache folder of each machine.
        keeps = job.judge.store.folder is not None
        self.judge = replace(job.judge, store=user_store(job.judge.store.max_bytes)) if keeps else job.judge
        self._lock = Lock()
        self._runners: dict[int, tuple[Lock, GroupRunner[Unit]]] = {}

    def runner_and_lock(self, group: int) -> tuple[Lock, GroupRunner[Unit]]:
        """Return the runner of a group, and the lock that gives it to one task at a time."""
        with self._lock:
            if group not in self._runners:
                check_versions(self.job, group)
                runner = GroupRunner[Unit](
                    self.job.groups[group], self._limits, Path(self._folder.name), probes_state=True
                )
                self._runners[group] = Lock(), runner
            return self._runners[group]

    def end(self) -> None:
        """Stop all evaluations, and end all processes."""
        self.ended = True
        with self._lock:
            runners = list(self._runners.values())
        for _, runner in runners:
            runner.stop()
        for lock, runner in runners:
            with lock:
                runner.close()
        self.judge.store.trim()
        self._folder.cleanup()


_runs: dict[str, _Run] = {}
_ended_runs: list[str] = []
_runs_lock = Lock()


def evaluate_batch(packed_campaign: bytes, packed_batch: bytes, group: int) -> GroupOutcomes:
    """Evaluate those units of a batch that a group serves."""
    run = _get_run(packed_campaign)
    plan, dtypes = _unpack_plan(packed_batch), run.job.groups[group].dtypes
    lock, runner = run.runner_and_lock(group)
    outcomes = []
    with lock:
        begun = perf_counter()
        for unit in plan:
            if run.ended:
                raise RunEnded
            if unit.dtype in dtypes:
                case, problem = plan.case(unit), partial(plan.problem, unit)
                if runner.group.runs_case(unit.dtype, in_standard=unit.is_standard):
                    outcomes.append(runner.known_unsupported_outcome(case, unit.dtype) or runner.evaluate(problem()))
                else:
                    outcomes.append(runner.outcome_of_left_out_case(case, unit.dtype, problem))
        return GroupOutcomes(tuple(outcomes), runner.description, perf_counter() - begun)


def judge_batch(
    packed_campaign: bytes, packed_batch: bytes, groups: Sequence[int], answers: Sequence[GroupOutcomes]
) -> bytes:
    """Judge every unit of a batch on what the groups have answered; return the ``JudgedBatch``, pickled."""
    run = _get_run(packed_campaign)
    job, plan = run.job, _unpack_plan(packed_batch)
    begun = perf_counter()
    served = [(job.groups[group], iter(answer.outcomes)) for group, answer in zip(groups, answers, strict=True)]
    results = []
    for unit in plan:
        if run.ended:
            raise RunEnded
        outcomes = {
            group.implementation.name: next(answered) for group, answered in served if unit.dtype in group.dtypes
        }
        results.append(run.judge.judge_unit(plan.case(unit), unit.dtype, plan.inputs(unit), outcomes))
    descriptions = {job.groups[group].name: answer.description for group, answer in zip(groups, answers, strict=True)}
    seconds = perf_counter() - begun + sum(answer.seconds for answer in answers)
    return pickle.dumps(JudgedBatch(tuple(results), descriptions, seconds), pickle.HIGHEST_PROTOCOL)


def check_versions(job: JobContext, group: int) -> None:
    """Raise ``UsageError`` if this process has other versions: a worker may join late."""
    asked = required_sources([job.groups[group]] if group >= 0 else [])
    wrong = describe_version_differences(job.versions[group], find_installed_versions(asked))
    if wrong:
        raise UsageError(f"a worker that joined the cluster has other versions: {'; '.join(wrong)}")


def end_run(name: str) -> None:
    """End the rest of a run in this process, without waiting for it."""
    with _runs_lock:
        _ended_runs.append(name)
        del _ended_runs[:-_MAX_REMEMBERED_RUNS]
        run = _runs.pop(name, None)
    if run is not None:
        Thread(target=run.end, daemon=True).start()


def _get_run(packed: bytes) -> _Run:
    job = _unpack_job(packed)
    with _runs_lock:
        if job.name in _ended_runs:
            raise RunEnded
        if job.name not in _runs:
            check_versions(job, -1)
            _runs[job.name] = _Run(job)
        return _runs[job.name]


@lru_cache(maxsize=_MAX_CACHED_PLANS)
def _unpack_job(packed: bytes) -> JobContext:
    job: JobContext = pickle.loads(packed)
    return job


@lru_cache(maxsize=_MAX_CACHED_PLANS)
def _unpack_plan(packed: bytes) -> Plan:
    """Unpack a batch; later tasks of the same batch in this process share its inputs."""
    batch: Batch = pickle.loads(packed)
    return Plan(batch.cases, batch.units)


ABSENT_VERSION = "nothing"
_ALWAYS_REQUIRED_PACKAGES = ("attncheck", "distributed", "numpy", "ml_dtypes", "python-flint")
_CODE_PACKAGES = ("attncheck.backends", "attncheck")
_FOLDERS_OF_SUBPACKAGES = ("backends", "cases", "reports")
"""The folders in the folder of an installed `attncheck`, and beside it in a checkout."""
_PYTHON, _SOURCE = "Python", "attncheck's code"


@dataclass(frozen=True)
class RequiredSources:
    """Distributions, and files by path, that have to be the same."""

    packages: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the versions."""
        return (_PYTHON, _SOURCE, *self.packages, *self.files)


def required_sources(groups: Iterable[WorkerGroup]) -> RequiredSources:
    """Return the distributions and files whose versions have to be the same for these groups."""
    entries = [group.implementation.entry for group in groups]
    packages = {
        *_ALWAYS_REQUIRED_PACKAGES,
        *(name for entry in entries for name in (*entry.packages, *entry.distributions)),
    }
    modules = {entry.target.module for entry in entries if isinstance(entry, UserImplementation)}
    return RequiredSources(tuple(sorted(packages)), tuple(sorted(path for path in modules if path.endswith(".py"))))


def find_installed_versions(required: RequiredSources) -> dict[str, str]:
    """Return the versions of these sources in this process."""
    versions = {_PYTHON: platform.python_version(), _SOURCE: _digest_of_code()}
    versions |= {name: package_version(name) or ABSENT_VERSION for name in required.packages}
    return versions | {
        path: _file_digest(Path(path)) if Path(path).is_file() else ABSENT_VERSION for path in required.files
    }


def describe_version_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the differences from the expected versions in words."""
    return [
        f"{name}: {found.get(name, ABSENT_VERSION)} there, {wanted} here"
        for name, wanted in expected.items()
        if found.get(name, ABSENT_VERSION) != wanted
    ]


@cache
def _digest_of_code() -> str:
    """Return the digest of attncheck's code, since checkouts of one version may differ."""
    folders = [Path(folder) for name in _CODE_PACKAGES for folder in import_module(name).__path__]
    paths = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.py")]
    files = [(name.as_posix(), path) for name, path in paths if name.parts[0] not in _FOLDERS_OF_SUBPACKAGES]
    total = sha256()
    for name, path in sorted(files):
        total.update(f"{name}\0{_file_digest(path)}\0".encode())
    return total.hexdigest()[:12]


def _file_digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:12]
