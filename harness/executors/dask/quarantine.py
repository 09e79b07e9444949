"""What was in flight when workers died, tried again: one unit at a time, nothing beside it, on one worker.

Dask blames everything that a dead worker had before it. Here only what kills a worker again, alone, is to blame.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any

from distributed import wait
from distributed.scheduler import KilledWorker

from attncheck.execution.worker import Failure
from attncheck.executors.dask.batches import fetched, pack, serving
from attncheck.executors.dask.connection import Cluster, lost, offers
from attncheck.executors.dask.tasks import Evaluated, Judged, evaluate_batch, judge_batch
from attncheck.plan import Plan, Unit

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class QuarantinedUnit:
    """A unit that was in flight when workers died, so many times that Dask gave up."""

    unit: Unit
    deaths: int


def judge_alone(cluster: Cluster, plan: Plan, suspect: QuarantinedUnit, look: Callable[[], None]) -> Judged:
    """Compute and judge a unit; an evaluation that kills its worker is a crash. ``look`` gives up waiting for workers.

    Raises ``ClusterError`` where judging it kills a worker.
    """
    unit = suspect.unit
    batch, groups, answers = pack(plan, [unit]), serving(cluster, unit), []
    for group in groups:
        needs = cluster.groups[group].implementation.needs
        key = f"evaluate-{cluster.job.name}-alone-{unit.position}-{group}"
        answer = _alone(cluster, key, needs, look, evaluate_batch, cluster.packed, batch, group)
        answers.append(_crashed(suspect) if answer is None else answer)
    key = f"judge-{cluster.job.name}-alone-{unit.position}"
    packed = _alone(cluster, key, {}, look, judge_batch, cluster.packed, batch, groups, answers)
    if packed is None:
        raise lost(cluster.address, f"judging {plan.case(unit).id} in {unit.dtype} kills the worker that does it")
    judged: Judged = pickle.loads(packed)
    return judged


def _crashed(suspect: QuarantinedUnit) -> Evaluated:
    times = suspect.deaths + 1
    reason = f"the cluster's worker died {times} times with this evaluation, the last time with nothing beside it"
    return Evaluated((Failure("crash", reason),), {}, 0.0)


def _alone(
    cluster: Cluster,
    key: str,
    needs: Mapping[str, float],
    look: Callable[[], None],
    function: Callable[..., Any],
    *arguments: object,
) -> Any:
    """Call a function on one worker and no other; None where that worker dies of it."""
    worker = _somebody(cluster, needs, look)
    future = cluster.client.submit(
        function, *arguments, key=key, workers=[worker], allow_other_workers=False, resources=dict(needs) or None
    )
    try:
        while future.status in ("pending", "lost"):
            with suppress(TimeoutError), cluster.client.as_current():
                wait([future], timeout=_LOOK_SECONDS)
            if future.status != "finished" and worker not in cluster.workers():
                return None
        return future.result() if future.status == "error" else fetched(future)
    except KilledWorker:
        return None
    finally:
        future.cancel()


def _somebody(cluster: Cluster, needs: Mapping[str, float], look: Callable[[], None]) -> str:
    """Return the address of a worker that offers something, once there is one."""
    while True:
        found = [address for address, worker in cluster.workers().items() if offers(worker, needs)]
        if found:
            return min(found)
        look()
        sleep(_LOOK_SECONDS)
