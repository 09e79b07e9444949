"""Cases written as vectors: inputs as stored in a dtype, the exact answer, a bound per element and rounding model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.operations import call_of
from attncheck.execution.runner import task_of
from attncheck.execution.worker import Task
from attncheck.judging.truth import Truth, is_measured, is_prescribed, truth_of_case
from attncheck.oracle.enclosure import Enclosure
from attncheck.plan import Plan
from attncheck.reading.case import Case
from attncheck.spec import ROUNDING_MODELS, result_stages
from attncheck.store import Store
from attncheck.vectors.format import VERSION, Name, VectorsWriter, digest_of_call

Array = NDArray[Any]
DEFAULT_MODELS = ("native", "eager", "fused")


@dataclass(frozen=True)
class Exported:
    """How many cases in a dtype were written, and of the others why not, each with how many."""

    written: int
    left_out: dict[str, int]


def export_vectors(
    cases: Sequence[Case], dtypes: Sequence[str], models: Sequence[str], folder: Path, store: Store
) -> Exported:
    """Write cases as vectors into a folder. Raises ``OutputError`` and ``UsageError``."""
    written, left_out = 0, dict[str, int]()
    plan = Plan.of(cases, dtypes)
    with VectorsWriter(folder) as writer:
        for unit in plan:
            case, inputs = plan.case(unit), plan.inputs(unit)
            task = task_of(case, inputs)
            stages = result_stages(task.operation, task.options, task.inputs)
            truth = truth_of_case(case, unit.dtype, inputs, stages, store)
            if reason := lacks(truth, stages):
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            root = f"{case.id}/{unit.dtype}"
            entries, arrays = _inputs(task, root)
            found = [
                _stage(truth, stage, root, [x for x in models if unit.dtype in ROUNDING_MODELS[x]]) for stage in stages
            ]
            record = _record(case.id, unit.dtype, task) | {"inputs": entries, "stages": [entry for entry, _ in found]}
            writer.add(record, {**arrays, **{name: each for _, of_stage in found for name, each in of_stage.items()}})
            written += 1
    return Exported(written, left_out)


def _record(case: str, dtype: str, task: Task) -> dict[str, Any]:
    """Return what a line says besides inputs and stages."""
    function, options = call_of(task.operation, task.options)
    return {
        "attncheck_vectors": VERSION,
        "id": case,
        "dtype": dtype,
        "operation": task.operation,
        "function": function,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "call": digest_of_call(function, options, task.inputs),
    }


def _inputs(task: Task, root: str) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Return the entries of a line for the inputs, and their arrays."""
    arrays = {f"{root}/inputs/{name}": array for name, array in task.inputs.items()}
    entries = [
        {"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "data": Name(f"{root}/inputs/{name}")}
        for name, array in task.inputs.items()
    ]
    return entries, arrays


def lacks(truth: Truth, stages: Sequence[str]) -> str:
    """Say why a case has no vectors; nothing where it has."""
    if truth.outside:
        return "without an exact answer"
    if truth.query_rows is not None:
        return "so large that some rows stand for all"
    return "" if stages and all(stage in truth.exact for stage in stages) else "without an exact answer"


def _stage(truth: Truth, stage: str, root: str, models: Sequence[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return a stage's entry in a line, and its arrays: high and low of the exact value, and a bound for each model."""
    exact, dtype = truth.exact[stage], truth.dtype_of(stage)
    place = f"{root}/stages/{stage}"
    arrays: dict[str, Array] = {f"{place}/exact": exact.high, f"{place}/low": exact.low}
    for model in models:
        arrays[f"{place}/bounds/{model}"] = allowed(truth, stage, exact, model)
    entry = {
        "name": stage,
        "dtype": dtype,
        "shape": list(exact.shape),
        "exact": Name(f"{place}/exact"),
        "low": Name(f"{place}/low"),
        "bounds": {model: Name(f"{place}/bounds/{model}") for model in models},
    }
    return entry, arrays


def allowed(truth: Truth, stage: str, exact: Enclosure, model: str) -> NDArray[np.float64]:
    """Return the largest error of each element: 0 where it has to be the very same, infinite where nothing is said."""
    bound, dtype = truth.bounds(model)[stage], truth.dtype_of(stage)
    measured = is_measured(exact, bound, dtype)
    most = np.where(measured, bound.max_error, np.inf) + np.where(measured, exact.radius, 0.0)
    return np.where(is_prescribed(exact), 0.0, most)


def lines_of(exported: Exported) -> Iterator[str]:
    """Say what was written."""
    yield f"{exported.written:,} vectors: a case in a dtype each"
    for reason, count in sorted(exported.left_out.items()):
        yield f"left out: {count:,} {reason}"
