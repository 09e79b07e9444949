"""What a script holds stages against: the exact answer and the error bounds, as the judge uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, is_measured, is_prescribed
from attncheck.oracle.sampling import axis_of_queries
from attncheck.reading.case import Case
from attncheck.repro.arrays import written
from attncheck.repro.parts import Expected
from attncheck.spec import computed_stages


def expected_stages(
    case: Case, truth: Truth, rounding_model: str, judgements: Sequence[StageJudgement]
) -> dict[str, Expected]:
    """Return what is right for the stages that were judged, or for every stage of the case where none came back."""
    computed = computed_stages(case.operation, case.options, case.inputs)
    stages = [judgement.stage for judgement in judgements] or case.judged_stages or computed
    return {
        stage: expected_of(truth, stage, case.stage_shapes[stage], rounding_model)
        for stage in stages
        if stage in case.stage_shapes  # one of an implementation's own is not judged
    }


def expected_of(truth: Truth, stage: str, shape: tuple[int, ...], rounding_model: str) -> Expected:
    """Return what is right for one stage: all that proves a number wrong, and nothing else."""
    if stage not in truth.exact:
        return Expected(shape)
    exact, bound = truth.exact[stage], truth.bounds(rounding_model)[stage]
    allowed = np.where(is_measured(exact, bound, truth.dtype), bound.worst + exact.radius, np.nan)
    allowed[is_prescribed(exact)] = 0.0
    # Only in float64 are numbers so close to the exact answer that its own rounding to float64 counts.
    rest = exact.low if truth.dtype == "float64" and exact.low.any() else 0.0
    axis = axis_of_queries(stage)
    rows = None if axis is None else truth.query_rows
    return Expected(shape, exact.high, allowed, rest, rows, -2 if axis is None else axis)


def expected_lines(expected: Mapping[str, Expected]) -> Iterator[str]:
    """Write what is right as Python; ``ROWS`` are the query rows that stand for all."""
    rows = next((each.rows for each in expected.values() if each.rows is not None), None)
    if rows is not None:
        yield f"ROWS = {written(rows)}"
    yield "EXPECTED = {"
    for stage, each in expected.items():
        yield f'    "{stage}": Expected('
        yield f"        shape={each.shape},"
        for name in ("exact", "allowed", "rest"):
            array = getattr(each, name)
            if isinstance(array, np.ndarray):
                yield f"        {name}={written(array, 8, len(name) + 1)},"
        if each.rows is not None:
            yield "        rows=ROWS,"
            yield f"        axis={each.axis},"
        yield "    ),"
    yield "}"
