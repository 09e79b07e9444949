"""What a script holds stages against: the exact answer and the error bounds, as the judge uses them."""

from __future__ import annotations

import base64
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, is_measured, is_prescribed
from attncheck.oracle.sampling import axis_of_queries
from attncheck.reading.case import Case
from attncheck.repro.parts import Expected
from attncheck.spec import computed_stages

_SPELLED_OUT = 64
"""Numbers of an array that are still written out."""
_WIDTH = 100
"""Characters in a line."""


def written(array: NDArray[Any], margin: int = 0, lead: int = 0) -> str:
    """Write an array as an expression that stands behind a margin and ``lead`` more characters in its first line."""
    if not array.size:
        return f"np.zeros({array.shape}, {_dtype(array)})"
    return (_spelled(array, margin + lead) if array.size <= _SPELLED_OUT else "") or _packed(array, margin)


def spelled(array: NDArray[Any]) -> str:
    """Write every number of an array on one line; its bytes where digits do not give it back."""
    text = " ".join(_spelled(array, 0).split()).replace("[ ", "[")
    return text or f"np.frombuffer(bytes.fromhex({array.tobytes().hex()!r}), {_dtype(array)}).reshape({array.shape})"


def _spelled(array: NDArray[Any], start: int) -> str:
    """Write every number in as few digits as tell it from its neighbours; empty where these do not give it back."""
    plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    behind = f", {_dtype(array)})"
    text = np.array2string(
        plain,
        max_line_width=_WIDTH,
        separator=", ",
        prefix=" " * (start + len("np.array(")),
        suffix=f"{behind},",
        threshold=sys.maxsize,
        floatmode="unique",
    )
    if np.issubdtype(plain.dtype, np.floating):
        # Python reads them as float64 first, and of a NaN its payload is lost.
        read = np.array([float(number) for number in re.findall(r"[^\[\],\s]+", text)]).astype(plain.dtype)
        if read.tobytes() != plain.tobytes():
            return ""
    return f"np.array({text}{behind}"


def _packed(array: NDArray[Any], margin: int) -> str:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    inner = " " * (margin + 4)
    width = _WIDTH - len(inner)
    lines = [f"{inner}{text[start : start + width]}\n" for start in range(0, len(text), width)]
    return f'unpack("{array.dtype.name}", {array.shape}, """\n{"".join(lines)}{inner}""")'


def _dtype(array: NDArray[Any]) -> str:
    name = array.dtype.name
    return {"bool": "bool", "bfloat16": "ml_dtypes.bfloat16"}.get(name, f"np.{name}")


def expected_stages(
    case: Case, truth: Truth, rounding_model: str, judgements: Sequence[StageJudgement]
) -> dict[str, Expected]:
    """Return what is right for the stages that were judged, or for every stage of the case where none came back."""
    if any(judgement.has_wide_statistics for judgement in judgements):
        truth = truth.with_wide_statistics()
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
    allowed = np.where(is_measured(exact, bound, truth.dtype_of(stage)), bound.max_error + exact.radius, np.nan)
    allowed[is_prescribed(exact)] = 0.0
    # Only in float64 are numbers so close to the exact answer that its own rounding to float64 counts.
    rest = exact.low if truth.dtype == "float64" and exact.low.any() else 0.0
    axis = axis_of_queries(stage)
    rows = None if axis is None else truth.query_rows
    own = truth.dtype_of(stage)
    dtype = "" if own == truth.dtype else own
    return Expected(shape, exact.high, allowed, rest, rows, -2 if axis is None else axis, dtype)


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
        if each.dtype:
            yield f'        dtype="{each.dtype}",'
        yield "    ),"
    yield "}"
