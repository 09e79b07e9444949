"""The numbers of a document's expectation: what is printed beside every implementation's value and the exact one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.elements import DocumentLayout, index_from, written_element
from attncheck.reports.frames import Column
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Rows = Sequence[Mapping[str, Any]]
"""Comparisons, as plain records."""
ExactOf = Mapping[str, Array]
"""dtype -> exact value of what is expected, in the stage's own shape"""

_EXTRA_DIGITS = 3
"""Digits shown beyond the printed ones."""


@dataclass(frozen=True)
class Value:
    """What one implementation computed for one number, and whether it holds."""

    text: str
    verdict: str
    is_erratum: bool
    """Whether it misses a number under a recorded erratum, which the exact answer misses too."""

    @property
    def state(self) -> str:
        """Return ``unverified`` where it was not compared, ``failing`` where it is wrong; empty where nobody blames it.

        What is printed wrongly is the document's fault, and told beside the printed number.
        """
        if self.verdict in (Verdict.AGREE, Verdict.MISPRINT):
            return ""
        return "unverified" if self.verdict == Verdict.UNVERIFIED else "failing"


@dataclass(frozen=True)
class NumberLine:
    """One number: its place as the document counts it (from 0), its digits as printed, the exact value, every value.

    ``printed`` is empty where the document computes and prints nothing, ``exact`` where it was not kept.
    """

    index: str
    printed: str
    exact: str
    values: tuple[Value | None, ...]

    @property
    def mark_text(self) -> str:
        """Return ``misprint`` or ``erratum`` where the exact answer misses what is printed; empty elsewhere."""
        misses = {value.is_erratum for value in self.values if value is not None and value.verdict == Verdict.MISPRINT}
        return "" if not misses else "erratum" if misses == {True} else "misprint"


@dataclass(frozen=True)
class NumberTable:
    """The numbers of one expectation in one dtype; ``values`` of its lines are in the order of its columns."""

    dtype: str
    columns: tuple[Column, ...]
    lines: tuple[NumberLine, ...]


def number_tables(
    rows: Rows, columns: Sequence[Column], expected: Mapping[str, Any], exact: ExactOf
) -> tuple[NumberTable, ...]:
    """Return a table per dtype; ``rows`` are those of one expectation."""
    return tuple(
        _table(own, dtype, columns, expected, exact.get(dtype)) for dtype in DTYPES if (own := _in_dtype(rows, dtype))
    )


def _in_dtype(rows: Rows, dtype: str) -> Rows:
    return [row for row in rows if row["dtype"] == dtype]


def _table(
    rows: Rows, dtype: str, columns: Sequence[Column], expected: Mapping[str, Any], exact: Array | None
) -> NumberTable:
    present = {(row["environment"], row["implementation"]) for row in rows}
    shown = tuple(column for column in columns if (column.environment, column.implementation) in present)
    values: dict[str, dict[tuple[str, str], Value]] = {}
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        index = row["index"] or ""
        first.setdefault(index, row)
        is_erratum = row["verdict"] == Verdict.MISPRINT and bool(row["xfail"])
        value = Value(beside(row["value"], dtype, _half_unit(row)), str(row["verdict"]), is_erratum)
        values.setdefault(index, {})[row["environment"], row["implementation"]] = value
    lines = tuple(
        NumberLine(
            element(index, expected),
            row["printed"] if isinstance(row["printed"], str) else "",
            _exact_text(row, exact),
            tuple(values[index].get((column.environment, column.implementation)) for column in shown),
        )
        for index, row in first.items()
    )
    return NumberTable(dtype, shown, tuple(sorted(lines, key=_index_order)))


def _half_unit(row: Mapping[str, Any]) -> float:
    """Return half a unit of the last printed digit; 0 where nothing is printed, or exactly."""
    return 0.0 if row["half_unit"] is None or math.isnan(row["half_unit"]) else float(row["half_unit"])


def _exact_text(row: Mapping[str, Any], exact: Array | None) -> str:
    if row["basis"] == "exact":
        return beside(row["reference"], "float64", 0.0)
    index = index_from(row["index"] or "")  # a single number stands at no index
    if exact is None or len(index) != exact.ndim or any(i >= n for i, n in zip(index, exact.shape, strict=True)):
        return ""
    return beside(float(exact[index]), "float64", _half_unit(row))


def _index_order(line: NumberLine) -> list[int]:
    return list(index_from(line.index[1:-1]))


def element(text: str, expected: Mapping[str, Any]) -> str:
    """Write an element's place as the document counts it."""
    return written_element(text, layout=DocumentLayout(tuple(expected["shape"]), bool(expected["transpose"])))


def beside(value: float, dtype: str, half_unit: float) -> str:
    """Write a computed number with a few digits more than the printed one, but none that the dtype has not."""
    if not math.isfinite(value):
        return str(value)
    digits = 9 if dtype == "float32" else 17
    if half_unit:
        decimals = max(0, -math.floor(math.log10(2 * half_unit))) if half_unit > 1e-300 else 0
        text = f"{value:.{decimals + _EXTRA_DIGITS}f}"
        if len(text.replace("-", "").replace(".", "").lstrip("0")) <= digits and decimals:
            return text
    return f"{value:.{digits}g}"


def count(numbers: int) -> str:
    """Count numbers in words."""
    return "1 number" if numbers == 1 else f"{numbers} numbers"


def hold_sentence(rows: Rows, basis: str) -> str:
    """Say how many comparisons with what is printed, known or exact hold."""
    if not rows:
        return "No implementation returned it."
    if basis == "unprinted":
        good, unverified = (_count(rows, verdict) for verdict in (Verdict.AGREE, Verdict.UNVERIFIED))
        if good == len(rows):
            return "On every implementation it is within its error bound of the exact answer, in every dtype."
        bad = f"{len(rows) - good - unverified} of {len(rows)} comparisons with the exact answer fail"
        return f"{bad}, {unverified} are unverified." if unverified else f"{bad}."
    word = "printed" if basis == "printed" else "known"
    parts = [_held_in(own, dtype, word) for dtype in DTYPES if (own := _in_dtype(rows, dtype))]
    return f"{'; '.join(parts)}."


def _held_in(rows: Rows, dtype: str, word: str) -> str:
    errata = sum(row["verdict"] == Verdict.MISPRINT and bool(row["xfail"]) for row in rows)
    good, unverified = (_count(rows, verdict) for verdict in (Verdict.AGREE, Verdict.UNVERIFIED))
    text = f"{good} of {len(rows)} comparisons with {word} numbers hold in {dtype}"
    text += f", {errata} are the recorded erratum" if errata else ""
    return f"{text}, {unverified} are unverified" if unverified else text


def _count(rows: Rows, verdict: Verdict) -> int:
    return sum(row["verdict"] == verdict for row in rows)


def spread_sentence(pairs: Rows, stage: str) -> str:
    """Say by how much the implementations differ at a stage; ``pairs`` are those of one case."""
    parts = []
    pairs = [row for row in pairs if row["stage"] == stage and not math.isnan(row["ratio"])]
    for dtype in DTYPES:
        if not (own := _in_dtype(pairs, dtype)):
            continue
        most = max(own, key=lambda row: float(row["ratio"]))
        if most["difference"] == 0:
            parts.append(f"in {dtype} they are identical")
        else:
            names = f"{most['implementation']} and {most['other']}"
            most_of = f"{most['difference']:.3g}, {most['ratio']:.3g} of what is allowed"
            parts.append(f"in {dtype} they differ by at most {most_of} ({names})")
    return f"Among the implementations: {'; '.join(parts)}." if parts else "There is nothing to compare it with."


def as_matrix(lines: Sequence[NumberLine]) -> dict[str, list[str]]:
    """Lay the exact numbers out in the document's rows, in fewer digits; by the rows' places."""
    matrix: dict[str, list[str]] = {}
    for line in lines:
        *row, _ = index_from(line.index[1:-1]) or (0,)
        number = np.float64(line.exact)
        matrix.setdefault(written_element(row) if row else "", []).append(f"{number:.8g}")
    return matrix
