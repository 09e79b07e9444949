"""Connect to a Dask cluster, and check that its workers can do what a run needs."""

from __future__ import annotations

import logging
import pickle
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any
from uuid import uuid4

from distributed import Client

from attncheck.common.errors import ClusterError, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.runner import WorkerGroup
from attncheck.executors.dask.tasks import (
    JobContext,
    describe_version_differences,
    end_run,
    find_installed_versions,
    required_sources,
)
from attncheck.judging.units import Judge

CONNECT_SECONDS = 10.0
_END_SECONDS = 5.0
_LOGGERS = ("distributed", "tornado", "asyncio")
_WORKER_COMMAND = "dask worker {address} --nthreads 1 --resources '{resources}'"

Workers = Mapping[str, Mapping[str, Any]]
"""The scheduler's record of each worker, by address."""


class Cluster:
    """A cluster that has everything that a run needs. ``groups`` and ``job`` are those of the run."""

    def __init__(self, client: Client, address: str, job: JobContext) -> None:
        self.client = client
        self.address = address
        self.job = job
        self.packed = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        self.descriptions: dict[str, Mapping[str, str]] = {}

    @property
    def groups(self) -> Sequence[WorkerGroup]:
        """The groups, in the order in which tasks count them."""
        return self.job.groups

    def workers(self) -> Workers:
        """Return the scheduler's workers. Raises ``ClusterError`` if it does not answer."""
        return fetch_workers(self.client, self.address)


@contextmanager
def connect_for_run(address: str, groups: Sequence[WorkerGroup], judge: Judge, limits: Limits) -> Iterator[Cluster]:
    """Connect to a cluster for one run, and end the rest of the run there afterwards.

    Raises ``UsageError`` if no scheduler answers at the address, or if the workers lack something.
    """
    with _silence_dask():
        try:
            client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="attncheck")
        except Exception as error:  # an invalid address raises many kinds of errors
            raise UsageError(
                f"no Dask scheduler answers at {address} ({error or type(error).__name__}); expected the address that "
                "`dask scheduler` prints, such as tcp://host:8786"
            ) from None
        job: JobContext | None = None
        try:
            workers = fetch_workers(client, address)
            _require_resources(address, workers, groups)
            here = find_installed_versions(required_sources(groups))
            _require_versions(client, workers, groups, here)
            job = _job_context(groups, judge, limits, workers, here)
            yield Cluster(client, address, job)
        finally:
            _end_run(client, job)


def describe_cluster(workers: Workers) -> dict[str, Any]:
    """Return the record of a cluster for environment.json; nothing in it depends on the machines' addresses."""
    offers = Counter(_format_resources(worker["resources"]) for worker in workers.values())
    return {
        "workers": len(workers),
        "threads": count_threads(workers),
        "machines": len({worker["host"] for worker in workers.values()}),
        "resources": dict(sorted(offers.items())),
    }


def count_threads(workers: Workers) -> int:
    """Return how many tasks the workers can do at the same time."""
    return sum(int(worker["nthreads"]) for worker in workers.values())


def find_missing_resources(workers: Workers, groups: Sequence[WorkerGroup]) -> dict[str, float]:
    """Return the needs of the first group that no worker offers; empty if each group can run on a worker."""
    for group in groups:
        needs = group.implementation.cluster_resources
        if not any(has_resources(worker, needs) for worker in workers.values()):
            return needs
    return {}


def has_resources(worker: Mapping[str, Any], needs: Mapping[str, float]) -> bool:
    """Return whether a worker has these amounts of all resources."""
    return all(worker["resources"].get(name, 0) >= amount for name, amount in needs.items())


def fetch_workers(client: Client, address: str) -> Workers:
    """Return a scheduler's workers. Raises ``ClusterError`` if it does not answer."""
    try:
        workers: Workers = client.scheduler_info(n_workers=-1)["workers"]
        return workers
    except Exception as error:  # whatever the connection died of
        raise lost_cluster_error(address, f"{type(error).__name__}: {error}") from None


def lost_cluster_error(address: str, why: str) -> ClusterError:
    """Return the error of a lost cluster, with how to go on."""
    return ClusterError(
        f"the cluster at {address} is lost: {why}; what was judged is on disk, and the same command with --resume goes "
        "on, with or without --cluster"
    )


def worker_command(address: str, needs: Mapping[str, float]) -> str:
    """Return the command that starts a worker which offers something."""
    return _WORKER_COMMAND.format(address=address, resources=_format_resources(needs))


def _require_resources(address: str, workers: Workers, groups: Sequence[WorkerGroup]) -> None:
    missing = find_missing_resources(workers, groups)
    if not missing:
        return
    names = ", ".join(
        group.implementation.name for group in groups if group.implementation.cluster_resources == missing
    )
    there = "; ".join(
        f"{worker['name']}: {_format_resources(worker['resources']) or 'none'}" for worker in workers.values()
    )
    raise UsageError(
        f"no worker of the cluster at {address} offers {_format_resources(missing)}, which {names} needs; workers and "
        f"their resources: {there or 'no worker'}; start one with: {worker_command(address, missing)}"
    )


def _require_versions(client: Client, workers: Workers, groups: Sequence[WorkerGroup], here: Mapping[str, str]) -> None:
    answers = client.run(find_installed_versions, required_sources(groups), on_error="return")
    for address, versions in sorted(answers.items()):
        if address not in workers:  # it has just joined, and checks its versions at its first task
            continue
        name = workers[address]["name"]
        if isinstance(versions, BaseException):
            raise UsageError(
                f"worker {name} cannot run attncheck: {type(versions).__name__}: {versions}; install there what is "
                f"here: Python {platform.python_version()}, attncheck[dask] {here['attncheck']} and the frameworks"
            )
        able = [group for group in groups if has_resources(workers[address], group.implementation.cluster_resources)]
        wrong = describe_version_differences(_versions_needed(here, able), versions)
        if wrong:
            raise UsageError(
                f"worker {name} ({address}) has other versions than this machine: {'; '.join(wrong)}; install the "
                "same, or their results would stand in one report as if they were of one version"
            )


def _versions_needed(here: Mapping[str, str], groups: Sequence[WorkerGroup]) -> dict[str, str]:
    """Return the versions that matter for some groups."""
    return {name: here[name] for name in required_sources(groups).names}


def _job_context(
    groups: Sequence[WorkerGroup], judge: Judge, limits: Limits, workers: Workers, here: Mapping[str, str]
) -> JobContext:
    on_one_machine = max(Counter(worker["host"] for worker in workers.values()).values(), default=1)
    versions = {number: _versions_needed(here, [group]) for number, group in enumerate(groups)}
    return JobContext(
        uuid4().hex,
        tuple(groups),
        judge,
        limits,
        limits.hard_memory_limit != Limits().hard_memory_limit,
        on_one_machine * len(groups),
        {**versions, -1: _versions_needed(here, [])},
    )


def _end_run(client: Client, job: JobContext | None) -> None:
    """End the rest of the run on the cluster; a cluster that does not answer is ignored."""

    def end_tasks() -> None:
        with suppress(Exception):
            if job is not None and client.status == "running":
                client.run(end_run, job.name, on_error="ignore")

    _run_with_timeout(_END_SECONDS, end_tasks)
    _run_with_timeout(_END_SECONDS, client.close)


def _run_with_timeout(seconds: float, function: Callable[[], object]) -> None:
    thread = Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


@contextmanager
def _silence_dask() -> Iterator[None]:
    """Keep Dask's log and warnings from the terminal: attncheck reports what matters itself."""
    loggers = [
        logging.getLogger(name)
        for name in (*_LOGGERS, *logging.root.manager.loggerDict)
        if name.partition(".")[0] in _LOGGERS
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _format_resources(resources: Mapping[str, float]) -> str:
    return " ".join(f"{name}={amount:g}" for name, amount in resources.items())
