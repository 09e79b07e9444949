"""A connection to a Dask cluster: whether its workers can do what a run asks of them, and tasks for them."""

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
from attncheck.execution.runner import Group
from attncheck.executors.dask.tasks import JobContext, asked_of, differences, end_run, found_here
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
    def groups(self) -> Sequence[Group]:
        """The groups, in the order in which tasks count them."""
        return self.job.groups

    def workers(self) -> Workers:
        """Ask the scheduler for its workers. Raises ``ClusterError`` where it does not answer."""
        return workers_of(self.client, self.address)


@contextmanager
def connected(address: str, groups: Sequence[Group], judge: Judge, limits: Limits) -> Iterator[Cluster]:
    """Connect to a cluster for one run, and end there whatever of the run is left.

    Raises ``UsageError`` where nothing answers at the address, or its workers lack something.
    """
    with _quiet():
        client = _client(address)
        job: JobContext | None = None
        try:
            workers = workers_of(client, address)
            _require_resources(address, workers, groups)
            here = found_here(asked_of(groups))
            _require_versions(client, workers, groups, here)
            job = _campaign(groups, judge, limits, workers, here)
            yield Cluster(client, address, job)
        finally:
            _leave(client, job)


def describe(workers: Workers) -> dict[str, Any]:
    """Return what environment.json says of a cluster; nothing that changes with the address of a machine."""
    offers = Counter(_shown(worker["resources"]) for worker in workers.values())
    return {
        "workers": len(workers),
        "threads": threads_of(workers),
        "machines": len({worker["host"] for worker in workers.values()}),
        "resources": dict(sorted(offers.items())),
    }


def threads_of(workers: Workers) -> int:
    """Return how many tasks the workers can do at the same time."""
    return sum(int(worker["nthreads"]) for worker in workers.values())


def lacking(workers: Workers, groups: Sequence[Group]) -> dict[str, float]:
    """Return what the first group needs that no worker offers; empty where each can run somewhere."""
    for group in groups:
        needs = group.implementation.needs
        if not any(offers(worker, needs) for worker in workers.values()):
            return needs
    return {}


def offers(worker: Mapping[str, Any], needs: Mapping[str, float]) -> bool:
    """Return whether a worker has so much of everything."""
    return all(worker["resources"].get(name, 0) >= amount for name, amount in needs.items())


def workers_of(client: Client, address: str) -> Workers:
    """Ask a scheduler for its workers. Raises ``ClusterError`` where it does not answer."""
    try:
        found: Workers = client.scheduler_info(n_workers=-1)["workers"]
        return found
    except Exception as error:  # whatever the connection died of
        raise lost(address, f"{type(error).__name__}: {error}") from None


def lost(address: str, why: str) -> ClusterError:
    """Return the error of a lost cluster, with how to go on."""
    return ClusterError(
        f"the cluster at {address} is lost: {why}; what was judged is on disk, and the same command with --resume goes "
        "on, with or without --cluster"
    )


def worker_command(address: str, needs: Mapping[str, float]) -> str:
    """Return the command that starts a worker which offers something."""
    return _WORKER_COMMAND.format(address=address, resources=_shown(needs))


def _client(address: str) -> Client:
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="attncheck")
    except Exception as error:  # an address that is none fails in as many ways as there are texts
        raise UsageError(
            f"no Dask scheduler answers at {address} ({error or type(error).__name__}); expected the address that "
            "`dask scheduler` prints, such as tcp://host:8786"
        ) from None


def _require_resources(address: str, workers: Workers, groups: Sequence[Group]) -> None:
    missing = lacking(workers, groups)
    if not missing:
        return
    names = ", ".join(group.implementation.name for group in groups if group.implementation.needs == missing)
    there = "; ".join(f"{worker['name']}: {_shown(worker['resources']) or 'none'}" for worker in workers.values())
    raise UsageError(
        f"no worker of the cluster at {address} offers {_shown(missing)}, which {names} needs; workers and their "
        f"resources: {there or 'no worker'}; start one with: {worker_command(address, missing)}"
    )


def _require_versions(client: Client, workers: Workers, groups: Sequence[Group], here: Mapping[str, str]) -> None:
    answers = client.run(found_here, asked_of(groups), on_error="return")
    for address, found in sorted(answers.items()):
        if address not in workers:  # it has come just now, and looks itself when it is asked for something
            continue
        name = workers[address]["name"]
        if isinstance(found, BaseException):
            raise UsageError(
                f"worker {name} cannot run attncheck: {type(found).__name__}: {found}; install there what is here: "
                f"Python {platform.python_version()}, attncheck[dask] {here['attncheck']} and the frameworks"
            )
        able = [group for group in groups if offers(workers[address], group.implementation.needs)]
        wrong = differences(_part(here, able), found)
        if wrong:
            raise UsageError(
                f"worker {name} ({address}) has other versions than this machine: {'; '.join(wrong)}; install the "
                "same, or their results would stand in one report as if they were of one version"
            )


def _part(here: Mapping[str, str], groups: Sequence[Group]) -> dict[str, str]:
    """Return those versions that matter where some groups run."""
    return {name: here[name] for name in asked_of(groups).names}


def _campaign(
    groups: Sequence[Group], judge: Judge, limits: Limits, workers: Workers, here: Mapping[str, str]
) -> JobContext:
    on_one_machine = max(Counter(worker["host"] for worker in workers.values()).values(), default=1)
    versions = {number: _part(here, [group]) for number, group in enumerate(groups)}
    return JobContext(
        uuid4().hex,
        tuple(groups),
        judge,
        limits,
        limits.hard_memory_limit != Limits().hard_memory_limit,
        on_one_machine * len(groups),
        {**versions, -1: _part(here, [])},
    )


def _leave(client: Client, job: JobContext | None) -> None:
    """End what is left of the run on the cluster; a cluster that does not answer is left alone."""

    def end() -> None:
        with suppress(Exception):
            if job is not None and client.status == "running":
                client.run(end_run, job.name, on_error="ignore")

    _within(_END_SECONDS, end)
    _within(_END_SECONDS, client.close)


def _within(seconds: float, function: Callable[[], object]) -> None:
    thread = Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dask's log and warnings from the terminal: what matters of them is reported in our words."""
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


def _shown(resources: Mapping[str, float]) -> str:
    return " ".join(f"{name}={amount:g}" for name, amount in resources.items())
