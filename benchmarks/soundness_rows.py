"""What the soundness campaign writes down: a row for every stage of every evaluation, and the files that hold them."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from soundness_problems import Drawn

from attncheck.harness.judging.judge_stages import StageJudgement, judge_stages
from attncheck.harness.judging.tiers import Measured
from attncheck.harness.judging.truth import Truth, find_truth
from attncheck.harness.running.implementations import Implementation
from attncheck.harness.running.worker import Failure, Outcome

_CASES_PER_PART = 25


@dataclass(frozen=True)
class Unit:
    """One problem in one dtype: what is judged at once."""

    number: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """One stage of one evaluation, measured against the exact answer, and against the exact step (``step_``).

    An evaluation that failed has one row without a stage. ``tier`` is empty where there is no such comparison.
    """

    number: int
    dtype: str
    implementation: str
    numerical_class: str
    operation: str
    regime: str
    mask: str
    generic: bool
    scores: str
    stage: str
    verdict: str
    message: str = ""
    tier: str = ""
    ratio: float = 0.0
    z: float = 0.0
    rms: float = 0.0
    elements: int = 0
    step_tier: str = ""
    step_ratio: float = 0.0
    step_z: float = 0.0
    step_rms: float = 0.0
    step_elements: int = 0
    index: str = ""
    value: float | None = None
    exact: float | None = None
    error: float | None = None
    bound: float | None = None


def judge_unit(unit: Unit, drawn: Drawn, outcomes: Sequence[tuple[Implementation, Outcome]]) -> list[Row]:
    """Judge every implementation's stages; the truth is worked out once."""
    truth = find_truth(drawn.operation, drawn.options, drawn.stored(unit.dtype), unit.dtype, generic=drawn.generic)
    return [row for each, outcome in outcomes for row in _rows(unit, drawn, truth, each, outcome)]


def _rows(unit: Unit, drawn: Drawn, truth: Truth, implementation: Implementation, outcome: Outcome) -> list[Row]:
    shapes, numerical_class = drawn.stage_shapes, implementation.numerical_class(unit.dtype)
    common: dict[str, Any] = {
        "number": unit.number,
        "dtype": unit.dtype,
        "implementation": implementation.name,
        "numerical_class": numerical_class,
        "operation": drawn.kind,
        "regime": drawn.regime,
        "mask": drawn.mask,
        "generic": drawn.generic,
        "scores": "x".join(map(str, (shapes.get("scores") or shapes["weights"]))),
    }
    if isinstance(outcome, Failure):
        return [Row(**common, stage="", verdict=outcome.verdict, message=outcome.message)]
    judgements = judge_stages(truth, outcome.stages, shapes, numerical_class)
    return [Row(**common, **_stage_fields(judgement)) for judgement in judgements]


def _stage_fields(judgement: StageJudgement) -> dict[str, Any]:
    return {
        "stage": judgement.stage,
        "verdict": str(judgement.verdict),
        "message": judgement.message,
        **_measured_fields("", judgement.accumulated),
        **_measured_fields("step_", judgement.introduced),
        "index": "" if judgement.index is None else ",".join(map(str, judgement.index)),
        "value": judgement.value,
        "exact": judgement.exact,
        "error": judgement.error,
        "bound": judgement.bound,
    }


def _measured_fields(prefix: str, measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {}
    found = {
        "tier": str(measured.tier),
        "ratio": measured.ratio,
        "z": measured.largest_z,
        "rms": measured.mean_z,
        "elements": measured.elements,
    }
    return {f"{prefix}{name}": value for name, value in found.items()}


class Parts:
    """A campaign's rows on disk, so many problems to a file; each is renamed into place when it is whole.

    A file is named by the first and the last number in it. ``missing`` are the numbers below ``cases`` on no file.
    """

    def __init__(self, folder: Path, dtypes: Sequence[str], cases: int) -> None:
        self._folder = folder
        self._rows: dict[int, list[Row]] = defaultdict(list)
        folder.mkdir(parents=True, exist_ok=True)
        whole = {number for path in self.files for number in _numbers_of(path)}
        self.missing = [number for number in range(cases) if number not in whole]
        self._due = Counter(_part_of(number) for number in self.missing for _ in dtypes)

    @property
    def files(self) -> list[Path]:
        """What is whole."""
        return sorted(self._folder.glob("part-*.csv"))

    def add(self, unit: Unit, rows: Sequence[Row]) -> None:
        """Add a unit; its part is written with the last of its units."""
        part = _part_of(unit.number)
        self._rows[part].extend(rows)
        self._due[part] -= 1
        if not self._due[part]:
            self._write(sorted(self._rows.pop(part), key=lambda row: (row.number, row.dtype)))

    def _write(self, rows: Sequence[Row]) -> None:
        path = self._folder / f"part-{rows[0].number:06d}-{rows[-1].number:06d}.csv"
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        partial.rename(path)


def _part_of(number: int) -> int:
    return number // _CASES_PER_PART


def _numbers_of(path: Path) -> range:
    first, last = path.stem.split("-")[1:]
    return range(int(first), int(last) + 1)
