"""Units of a plan, packed into tasks for a cluster."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributed import Future
from distributed.scheduler import KilledWorker

from attncheck.executors.dask.connection import Cluster
from attncheck.executors.dask.tasks import Batch, evaluate_batch, judge_batch
from attncheck.plan import Plan, Unit

_FETCH_SECONDS = 2.0


def serving(cluster: Cluster, unit: Unit) -> list[int]:
    """Return the groups that serve a unit."""
    return [number for number, group in enumerate(cluster.groups) if unit.dtype in group.dtypes]


def pack(plan: Plan, units: Sequence[Unit]) -> bytes:
    """Pack units with their cases, once for all tasks of a batch."""
    indices = {case: number for number, case in enumerate(dict.fromkeys(unit.case for unit in units))}
    here = tuple(replace(unit, case=indices[unit.case]) for unit in units)
    return pickle.dumps(Batch(tuple(plan.cases[case] for case in indices), here), pickle.HIGHEST_PROTOCOL)


def submit(cluster: Cluster, plan: Plan, units: Sequence[Unit], number: int) -> Future:
    """Send the tasks of a batch, an evaluation for each group and one that judges; return the latter's future."""
    batch = pack(plan, units)
    groups = sorted({group for unit in units for group in serving(cluster, unit)})
    evaluations = [
        cluster.client.submit(
            evaluate_batch,
            cluster.packed,
            batch,
            group,
            key=f"evaluate-{cluster.job.name}-{number}-{group}",
            resources=cluster.groups[group].implementation.needs,
        )
        for group in groups
    ]
    key = f"judge-{cluster.job.name}-{number}"
    return cluster.client.submit(judge_batch, cluster.packed, batch, groups, evaluations, key=key)


def fetched(future: Future) -> Any:
    """Fetch a result that is there; None where it is so no more, because the worker that held it is lost."""
    seconds = _FETCH_SECONDS
    while future.status == "finished":
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            seconds *= 2  # either it is lost, and the status will tell, or it is large and the line slow
        except KilledWorker:  # it was lost, and computed again
            return None
    return None
