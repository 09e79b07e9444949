"""Each document's numbers beside each framework's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES
from attncheck.reports.frames import Column, Frames, documents_of, groups, records
from attncheck.reports.markdown_text import code, details, escape, table

_MOST_VISIBLE = 40
"""Longer tables are folded away."""
_EXTRA_DIGITS = 3
"""Digits shown beyond the printed ones."""


def document_sections(frames: Frames) -> list[list[str]]:
    """Return a section per document: its cases, and in each what it prints and what it computes without printing."""
    documents = documents_of(frames)
    if not documents:
        return []
    numbers = groups(frames.numbers, "case")
    sections = [
        [
            "## Documents",
            "",
            "Each number that a document prints, beside what each implementation computes; elements count from 0.",
        ]
    ]
    return [*sections, *(_document(cases, frames, numbers) for cases in documents.values())]


def _document(
    cases: Sequence[Mapping[str, Any]],
    frames: Frames,
    numbers: Mapping[str, pd.DataFrame],
) -> list[str]:
    source = cases[0]["source"]
    by = f", by {escape(source['author'])}" if "author" in source else ""
    section = f"; {escape(source['section'])}" if "section" in source else ""
    lines = [f"### {escape(cases[0]['title'])}", "", f"*{escape(source['title'])}*{by}{section}.", ""]
    lines += [f"- {escape(note)}" for note in source.get("notes", [])]
    for case in cases:
        lines += ["", f"#### {escape(case['name'])}", ""]
        lines += [escape(note) for note in case["notes"]]
        own = numbers.get(case["id"])
        for expected in case["expected"]:
            lines += ["", *_expectation(expected, own, frames, case["id"])]
    return lines


def _expectation(expected: Mapping[str, Any], numbers: pd.DataFrame | None, frames: Frames, case: str) -> list[str]:
    title = f"**{escape(expected['called'])}** (stage {code(expected['name'])})" if "called" in expected else ""
    title = title or f"**{code(expected['name'])}**"
    notes = [escape(expected[key]) for key in ("because", "note", "erratum") if key in expected]
    if "erratum" in expected:
        notes[-1] = f"**Erratum.** {notes[-1]}"
    if numbers is None:
        return [f"{title}: not run."]
    basis = "exact" if expected["basis"] == "unprinted" else expected["basis"]
    rows = numbers[(numbers["stage"] == expected["name"]) & (numbers["basis"] == basis)]
    if expected["basis"] == "unprinted":
        return _unprinted(title, notes, rows, frames, case, expected)
    return _given(title, notes, rows, frames.columns, expected)


def _given(
    title: str, notes: list[str], rows: pd.DataFrame, columns: Sequence[Column], expected: Mapping[str, Any]
) -> list[str]:
    if rows.empty:
        return [f"{title}: no implementation returned it."]
    per_dtype = [(dtype, rows[rows["dtype"] == dtype]) for dtype in DTYPES]
    lines = [f"{title}: {_holds(rows, expected['basis'])}", *(f"\n{note}" for note in notes), ""]
    for dtype, own in per_dtype:
        if own.empty:
            continue
        body = _number_table(own, columns, expected)
        count = own["index"].nunique()
        if dtype == DTYPES[0] and count <= _MOST_VISIBLE:
            lines += [*body, ""]
        else:
            lines += [*details(f"{dtype}: {_count(count)}", body), ""]
    return lines[:-1]


def _holds(rows: pd.DataFrame, basis: str) -> str:
    word = "printed" if basis == "printed" else "known"
    parts = []
    for dtype in DTYPES:
        own = rows[rows["dtype"] == dtype]
        if own.empty:
            continue
        total, good = len(own), int(own["verdict"].eq(Verdict.AGREE).sum())
        errata = int((own["verdict"].eq(Verdict.MISPRINT) & own["known"].astype(bool)).sum())
        text = f"{good} of {total} comparisons with {word} numbers hold in {dtype}"
        parts.append(f"{text}, {errata} are the recorded erratum" if errata else text)
    return "; ".join(parts) + "."


def _number_table(rows: pd.DataFrame, columns: Sequence[Column], expected: Mapping[str, Any]) -> list[str]:
    """One line per number: the document's, then each implementation's."""
    present = {(row["environment"], row["implementation"]) for row in records(rows)}
    shown = [column for column in columns if (column.environment, column.implementation) in present]
    with_environment = len({column.environment for column in shown}) > 1
    headings = [
        "element",
        expected["basis"],
        *(escape(column.title(with_environment=with_environment)) for column in shown),
    ]
    cells: dict[str, dict[tuple[str, str], str]] = {}
    printed: dict[str, str] = {}
    for row in records(rows):
        printed[row["index"]] = row["printed"]
        text = _beside(row["value"], row["dtype"], row["half_unit"])
        mark = "" if row["verdict"] == Verdict.AGREE else f" **{row['verdict']}**"
        cells.setdefault(row["index"], {})[row["environment"], row["implementation"]] = f"{text}{mark}"
    lines = [
        [
            _element(place, expected),
            code(text),
            *(cells[place].get((c.environment, c.implementation), "") for c in shown),
        ]
        for place, text in printed.items()
    ]
    return table(headings, lines, "lr" + "r" * len(shown))


def _element(place: str, expected: Mapping[str, Any]) -> str:
    """Write an element's place as the document counts it: no leading axes of length 1, transposed back."""
    index, shape = [int(axis) for axis in place.split(",")], list(expected["shape"])
    while len(shape) > 1 and shape[0] == 1:
        index, shape = index[1:], shape[1:]
    if expected["transpose"] and len(index) > 1:
        index[-2:] = index[:-3:-1]
    return f"[{','.join(map(str, index))}]"


def _beside(value: float, dtype: str, half_unit: float) -> str:
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


def _unprinted(
    title: str, notes: list[str], rows: pd.DataFrame, frames: Frames, case: str, expected: Mapping[str, Any]
) -> list[str]:
    """Show one implementation's numbers as a matrix, and how far the others are from it."""
    lines = [f"{title}: computed, not printed. {_held(rows)}"]
    lines += [f"\n{note}" for note in notes]
    if rows.empty:
        return [*lines, "", "No implementation returned it."]
    dtype = next(dtype for dtype in DTYPES if (rows["dtype"] == dtype).any())
    present = set(zip(rows["environment"], rows["implementation"], strict=True))
    column = next(c for c in frames.columns if (c.environment, c.implementation) in present)
    shown = rows[
        (rows["dtype"] == dtype)
        & (rows["environment"] == column.environment)
        & (rows["implementation"] == column.implementation)
    ]
    caption = f"{column.implementation} in {dtype}"
    matrix = _matrix(shown, expected)
    headings = [escape(caption), *map(str, range(len(next(iter(matrix.values())))))]
    body = table(headings, [[row, *cells] for row, cells in matrix.items()], "l" + "r" * len(headings))
    lines += ["", _spread(frames, case, expected["of"]), ""]
    return [*lines, *(body if len(shown) <= _MOST_VISIBLE else details(f"{caption}: {_count(len(shown))}", body))]


def _held(rows: pd.DataFrame) -> str:
    """Say whether what is not printed is within its error bound of the exact answer."""
    good = int(rows["verdict"].eq(Verdict.AGREE).sum())
    if good == len(rows):
        return "On every implementation it is within its error bound of the exact answer, in every dtype."
    return f"**{len(rows) - good} of {len(rows)} comparisons with the exact answer fail.**"


def _matrix(rows: pd.DataFrame, expected: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lay numbers out in the document's rows."""
    matrix: dict[str, list[str]] = {}
    places = [(_element(row["index"], expected), row["value"]) for row in records(rows)]
    for place, value in sorted(places, key=lambda item: [int(axis) for axis in item[0][1:-1].split(",")]):
        row, _, _ = place[1:-1].rpartition(",")
        matrix.setdefault(f"[{row}]" if row else "", []).append(f"{value:.8g}")
    return matrix


def _spread(frames: Frames, case: str, stage: str) -> str:
    """Say by how much the implementations differ at a stage."""
    parts = []
    pairs = frames.pairs[(frames.pairs["case"] == case) & (frames.pairs["stage"] == stage)]
    for dtype in DTYPES:
        own = pairs[(pairs["dtype"] == dtype) & pairs["ratio"].notna()]
        if own.empty:
            continue
        most = records(own.nlargest(1, "ratio"))[0]
        if most["difference"] == 0:
            parts.append(f"in {dtype} they are identical")
        else:
            names = f"{most['implementation']} and {most['other']}"
            most_of = f"{most['difference']:.3g}, {most['ratio']:.3g} of what is allowed"
            parts.append(f"in {dtype} they differ by at most {most_of} ({names})")
    return (
        f"Among the implementations: {escape('; '.join(parts))}." if parts else "There is nothing to compare it with."
    )


def _count(numbers: int) -> str:
    return "1 number" if numbers == 1 else f"{numbers} numbers"
