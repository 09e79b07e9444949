"""A plan driven through a cluster: batches of units in flight, results written as they come.

The client plans and writes; the workers compute everything. Only a few batches are in flight at a time, so that what
the client and the scheduler hold does not grow with the plan.

Dask blames every task that a dead worker had. So units in flight when workers died are tried again: one unit at a time
on one worker, with no other task. Only a unit that kills a worker again, alone, is to blame.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from distributed import Future, wait
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from attncheck.execution.worker import Failure
from attncheck.executors.base import ResultRecorder
from attncheck.executors.dask.connection import (
    Cluster,
    count_threads,
    describe_cluster,
    find_missing_resources,
    has_resources,
    lost_cluster_error,
    worker_command,
)
from attncheck.executors.dask.tasks import Batch, GroupOutcomes, JudgedBatch, evaluate_batch, judge_batch
from attncheck.planning.plan import Plan, Unit

MAX_SECONDS_WITHOUT_WORKER = 60.0
"""A cluster without a worker for something is given up after so long: nodes take a while to come back."""
SECONDS_BETWEEN_CHECKS = 1.0
_MAX_UNITS = 48
_BATCH_SECONDS = 0.5
_BATCH_BYTES = 2**24
_BATCHES_PER_THREAD = 3
"""One is computed, one waits, one is on its way."""


class DaskExecutor:
    """Runs a plan on a Dask cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.environment_record: Mapping[str, Any] = {"cluster": describe_cluster(cluster.workers())}

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """Return the descriptions of the frameworks, by group."""
        return self._cluster.descriptions

    @property
    def starting_frameworks(self) -> Sequence[str]:
        """Return no name: the workers of a cluster do not report it."""
        return ()

    @property
    def calls_left(self) -> Mapping[str, int]:
        """Return nothing: a task on a cluster has the calls of several implementations."""
        return {}

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute and judge every unit of a plan."""
        driver = _Driver(self._cluster, plan, recorder, on_progress)
        on_progress(0, driver.total)
        if not self._cluster.job.judge.implementations:
            return
        try:
            driver.run_plan()
        except (CancelledError, CommClosedError):
            raise lost_cluster_error(
                self._cluster.address, "the scheduler is gone, or was asked to forget this run"
            ) from None
        finally:
            driver.cancel_tasks()


class _Driver:
    """The tasks in flight, those that are left, and those that killed workers."""

    def __init__(
        self, cluster: Cluster, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]
    ) -> None:
        self.cluster, self.plan, self.recorder, self.on_progress = cluster, plan, recorder, on_progress
        self.total = sum(len(groups_serving_unit(cluster, unit)) for unit in plan)
        self._next = 0
        self._units_per_batch = 1.0
        self._in_flight: dict[Future, tuple[Unit, ...]] = {}
        self._suspects: list[QuarantinedUnit] = []
        self._done: SimpleQueue[Future] = SimpleQueue()
        self._threads = 1
        self._checked_at = self._able = monotonic()

    def run_plan(self) -> None:
        """Keep the cluster busy until every unit is judged."""
        self._check_workers()
        while not self.recorder.is_stopped and (self._submit_batches() or self._in_flight):
            try:
                self._record_batch(self._done.get(timeout=SECONDS_BETWEEN_CHECKS))
            except Empty:
                self._check_workers()
            if monotonic() - self._checked_at > SECONDS_BETWEEN_CHECKS * 5:
                self._check_workers()
        for suspect in sorted(self._suspects, key=lambda suspect: suspect.unit.position):
            if self.recorder.is_stopped:
                return
            self._record_judged_batch(
                judge_suspect_unit(self.cluster, self.plan, suspect, self._check_workers), (suspect.unit,)
            )

    def cancel_tasks(self) -> None:
        """Cancel what is in flight."""
        if self._in_flight and self.cluster.client.status == "running":
            self.cluster.client.cancel(list(self._in_flight), force=True)
        self._in_flight.clear()

    def _submit_batches(self) -> bool:
        """Send batches until enough are in flight; tell whether any are left."""
        units = self.plan.units
        while self._next < len(units) and len(self._in_flight) < _BATCHES_PER_THREAD * self._threads:
            shared = (len(units) - self._next) // (2 * self._threads)  # towards the end, smaller ones for everybody
            count = min(self._units_per_batch, _MAX_UNITS, max(shared, self._units_per_batch / 8))
            count = max(1, int(count))  # and never so small that sending them costs more than they do
            chosen = tuple(units[self._next : self._next + count])
            future = submit_batch(self.cluster, self.plan, chosen, self._next)
            self._in_flight[future] = chosen
            self._next += count
            future.add_done_callback(self._done.put)
        return self._next < len(units)

    def _record_batch(self, future: Future) -> None:
        """Record the results of a batch."""
        if future.status == "error":
            self._handle_failed_batch(future)
        elif future.status == "cancelled":
            raise CancelledError
        elif (packed := fetch_result(future)) is None:  # the worker that held it is lost: it is computed again
            future.add_done_callback(self._done.put)
        else:
            judged: JudgedBatch = pickle.loads(packed)
            units = self._in_flight.pop(future)
            # Batches that are worth sending, and do not take long to compute.
            fitting = len(units) / max(judged.seconds / _BATCH_SECONDS, len(packed) / _BATCH_BYTES, 1e-9)
            self._units_per_batch = min(fitting, 4 * self._units_per_batch, _MAX_UNITS)
            self._record_judged_batch(judged, units)

    def _handle_failed_batch(self, future: Future) -> None:
        """Suspect the units of a batch that killed workers; raise any other error."""
        error = future.exception()
        if isinstance(error, OSError):
            raise lost_cluster_error(
                self.cluster.address, f"a worker cannot go on: {type(error).__name__}: {error}"
            ) from None
        if not isinstance(error, KilledWorker):
            raise (
                error
                if error is not None
                else lost_cluster_error(self.cluster.address, "a task failed without a reason")
            )
        deaths = error.allowed_failures + 1
        self._suspects += [QuarantinedUnit(unit, deaths) for unit in self._in_flight.pop(future)]

    def _record_judged_batch(self, judged: JudgedBatch, units: Sequence[Unit]) -> None:
        for name, description in judged.descriptions.items():
            self.cluster.descriptions[name] = description or self.cluster.descriptions.get(name, {})
        for result in judged.results:
            self.recorder.record_result(result)
        self.recorder.evaluations += sum(len(groups_serving_unit(self.cluster, unit)) for unit in units)
        self.on_progress(self.recorder.evaluations, self.total)

    def _check_workers(self) -> None:
        """Check the workers. Raises ``ClusterError`` if for too long none of them could compute the rest."""
        self._checked_at = monotonic()
        workers = self.cluster.workers()
        self._threads = max(1, count_threads(workers))
        missing = find_missing_resources(workers, self.cluster.groups)
        if workers and not missing:
            self._able = self._checked_at
        elif self._checked_at - self._able > MAX_SECONDS_WITHOUT_WORKER:
            command = worker_command(self.cluster.address, missing)
            why = f"no worker is left for {MAX_SECONDS_WITHOUT_WORKER:g} s; start one with: {command}"
            raise lost_cluster_error(self.cluster.address, why)


_FETCH_SECONDS = 2.0


def groups_serving_unit(cluster: Cluster, unit: Unit) -> list[int]:
    """Return the groups that serve a unit."""
    return [number for number, group in enumerate(cluster.groups) if unit.dtype in group.dtypes]


def pack_batch(plan: Plan, units: Sequence[Unit]) -> bytes:
    """Pack units with their cases, once for all tasks of a batch."""
    indices = {case: number for number, case in enumerate(dict.fromkeys(unit.case_index for unit in units))}
    here = tuple(replace(unit, case_index=indices[unit.case_index]) for unit in units)
    return pickle.dumps(Batch(tuple(plan.cases[case] for case in indices), here), pickle.HIGHEST_PROTOCOL)


def submit_batch(cluster: Cluster, plan: Plan, units: Sequence[Unit], number: int) -> Future:
    """Send the tasks of a batch, an evaluation for each group and one that judges; return the latter's future."""
    batch = pack_batch(plan, units)
    groups = sorted({group for unit in units for group in groups_serving_unit(cluster, unit)})
    evaluations = [
        cluster.client.submit(
            evaluate_batch,
            cluster.packed,
            batch,
            group,
            key=f"evaluate-{cluster.job.name}-{number}-{group}",
            resources=cluster.groups[group].implementation.cluster_resources,
        )
        for group in groups
    ]
    key = f"judge-{cluster.job.name}-{number}"
    return cluster.client.submit(judge_batch, cluster.packed, batch, groups, evaluations, key=key)


def fetch_result(future: Future) -> Any:
    """Fetch a finished result; None if it is lost with its worker."""
    seconds = _FETCH_SECONDS
    while future.status == "finished":
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            seconds *= 2  # either it is lost, and the status will tell, or it is large and the line slow
        except KilledWorker:  # it was lost, and computed again
            return None
    return None


_SECONDS_BETWEEN_POLLS = 0.2
_ATTEMPTS_ALONE = 2
"""How often an evaluation has to kill a worker alone: the first one may have been dying of another evaluation."""


@dataclass(frozen=True)
class QuarantinedUnit:
    """A unit that was in flight when workers died, so many times that Dask gave up."""

    unit: Unit
    worker_deaths: int


def judge_suspect_unit(
    cluster: Cluster, plan: Plan, suspect: QuarantinedUnit, check_workers: Callable[[], None]
) -> JudgedBatch:
    """Compute and judge a unit; an evaluation that kills its worker is a crash.

    ``check_workers`` raises an error if the cluster has had no usable worker for too long.

    Raises ``ClusterError`` if judging it kills a worker.
    """
    unit = suspect.unit
    batch, groups, answers = pack_batch(plan, [unit]), groups_serving_unit(cluster, unit), []
    for group in groups:
        needs, answer = cluster.groups[group].implementation.cluster_resources, None
        for turn in range(_ATTEMPTS_ALONE):
            key = f"evaluate-{cluster.job.name}-alone-{unit.position}-{group}-{turn}"
            if answer is None:
                somebody = _find_answering_worker(cluster, needs, check_workers)
                answer = _call_on_worker(somebody, cluster, key, needs, evaluate_batch, cluster.packed, batch, group)
        if answer is None:
            times = suspect.worker_deaths + _ATTEMPTS_ALONE
            reason = f"the cluster's worker died {times} times with this evaluation"
            failure = Failure("crash", f"{reason}, the last time with nothing beside it")
            answer = GroupOutcomes((failure,), {}, 0.0)
        answers.append(answer)
    key = f"judge-{cluster.job.name}-alone-{unit.position}"
    somebody = _find_answering_worker(cluster, {}, check_workers)
    packed = _call_on_worker(somebody, cluster, key, {}, judge_batch, cluster.packed, batch, groups, answers)
    if packed is None:
        raise lost_cluster_error(
            cluster.address, f"judging {plan.case(unit).id} in {unit.dtype} kills the worker that does it"
        )
    judged: JudgedBatch = pickle.loads(packed)
    return judged


def _call_on_worker(
    worker: str,
    cluster: Cluster,
    key: str | None,
    needs: Mapping[str, float],
    function: Callable[..., Any],
    *arguments: object,
) -> Any:
    """Call a function on this worker only; return None if the worker dies or is gone before it answers."""
    future = cluster.client.submit(
        function,
        *arguments,
        key=key,
        workers=[worker],
        allow_other_workers=False,
        resources=dict(needs) or None,
        pure=False,
    )
    try:
        while future.status in ("pending", "lost"):
            with suppress(TimeoutError), cluster.client.as_current():
                wait([future], timeout=_SECONDS_BETWEEN_POLLS)
            if future.status != "finished" and worker not in cluster.workers():
                return None
        return future.result() if future.status == "error" else fetch_result(future)
    except KilledWorker:
        return None
    finally:
        future.cancel()


def _find_answering_worker(cluster: Cluster, needs: Mapping[str, float], check_workers: Callable[[], None]) -> str:
    """Return the address of a worker that has the needed resources and answers, once there is one.

    The scheduler lists a killed worker until it notices. A call on that worker would be blamed for the death.
    """
    while True:
        addresses = [address for address, worker in cluster.workers().items() if has_resources(worker, needs)]
        if addresses and _call_on_worker(min(addresses), cluster, None, {}, int) is not None:
            return min(addresses)
        check_workers()
        sleep(_SECONDS_BETWEEN_POLLS)
