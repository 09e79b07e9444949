"""Documents page by page: what each prints beside every implementation's value and the exact one, as blocks too.

A page has a document's source, its inputs, its expectations with a table of numbers for each dtype, and its pictures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.reports.frames import (
    Column,
    Frames,
    State,
    documents_of,
    index_of,
    once_for_frames,
    records,
)
from attncheck.reports.panels import Drawing, KeptCase, drawings_of, exact_value, input_text, kept_of
from attncheck.reports.sections import Block, Coloured, Details, Inline, Mark, OnPage, Subsection, Table, Text
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict
from attncheck.wording import DocumentLayout, counted, index_from, written_element

_HARMLESS = (Verdict.AGREE, Verdict.UNVERIFIED)


@dataclass(frozen=True)
class DocumentInput:
    """An input: what the document calls it, which inputs of the operation it is, its numbers as they are printed.

    ``rows`` is empty where the document does not write the numbers down (they follow from a seed, or are many).
    """

    called: str
    inputs: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Expectation:
    """One thing that a document computes: ``basis`` is ``printed``, ``known`` by derivation, or ``unprinted``.

    ``notes`` are why a number is known, and what is to be said of it; ``erratum`` why printed numbers do not hold.
    ``holds`` says how many comparisons hold, ``spread`` how far implementations are apart (only where nothing is
    printed); ``fails`` tells whether a comparison fails that no erratum explains, ``unverified`` how many numbers were
    not compared somewhere. Without tables it was not run, or not returned, and ``holds`` says so.
    """

    name: str
    of: str
    called: str
    basis: str
    notes: tuple[str, ...]
    erratum: str
    holds: str
    spread: str
    fails: bool
    unverified: int
    tables: tuple[NumberTable, ...]


@dataclass(frozen=True)
class DocumentCase:
    """One computation of a document. ``drawings`` are its inputs and exact stages, empty where no arrays were kept."""

    id: str
    name: str
    operation: str
    notes: tuple[str, ...]
    given: tuple[DocumentInput, ...]
    expectations: tuple[Expectation, ...]
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True)
class DocumentPage:
    """One document; texts that its file does not give are empty."""

    file: str
    title: str
    source: str
    author: str
    section: str
    notes: tuple[str, ...]
    cases: tuple[DocumentCase, ...]


@once_for_frames
def document_pages(frames: Frames) -> tuple[DocumentPage, ...]:
    """Return a page per document that was run, in the order of their files."""
    documents = documents_of(frames)
    wanted = {case["id"] for cases in documents.values() for case in cases}
    numbers, pairs = _by_case(frames.numbers, wanted), _by_case(frames.pairs, wanted)
    pages = []
    for file, cases in documents.items():
        source = cases[0]["source"]
        in_columns = any(expected["transpose"] for case in cases for expected in case["expected"])
        pages.append(
            DocumentPage(
                file=file,
                title=cases[0]["title"],
                source=source["title"],
                author=source.get("author", ""),
                section=source.get("section", ""),
                notes=tuple(source.get("notes", ())),
                cases=tuple(
                    _case(case, numbers.get(case["id"]), pairs.get(case["id"], ()), frames, in_columns)
                    for case in cases
                ),
            )
        )
    return tuple(pages)


def _by_case(frame: pd.DataFrame, wanted: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of some cases as plain records: there are many small parts, and a frame is slow for those."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in records(frame[frame["case"].isin(wanted)]):
        found.setdefault(row["case"], []).append(row)
    return found


def _case(case: Mapping[str, Any], numbers: Rows | None, pairs: Rows, frames: Frames, in_columns: bool) -> DocumentCase:
    kept = {dtype: found for dtype in case["dtypes"] if (found := kept_of(frames.arrays, case["id"], dtype))}
    first = next(iter(kept.values()), None)
    return DocumentCase(
        id=case["id"],
        name=case["name"],
        operation=case["operation"],
        notes=(*case["notes"], *_precision(case)),
        given=() if first is None else _given(case, first),
        expectations=tuple(
            _expectation(expected, numbers, pairs, frames.columns, kept) for expected in case["expected"]
        ),
        drawings=()
        if first is None
        else drawings_of(case, first, in_columns=in_columns, printed=_misprints(numbers or ())),
    )


def _misprints(numbers: Rows) -> dict[str, dict[str, str]]:
    """Return what is printed wrongly, under a recorded erratum or not, by stage and index."""
    found: dict[str, dict[str, str]] = {}
    for row in numbers:
        if row["verdict"] == Verdict.MISPRINT and isinstance(row["index"], str) and row["index"]:
            found.setdefault(row["stage"], {})[row["index"]] = str(row["printed"])
    return found


def _precision(case: Mapping[str, Any]) -> list[str]:
    """Say in which precision a case's numbers were computed, where it does."""
    computed_in = case.get("computed_in")
    return (
        [f"The printed numbers were computed in {computed_in}, and are allowed what rounding in it can do."]
        if computed_in
        else []
    )


def _given(case: Mapping[str, Any], kept: KeptCase) -> tuple[DocumentInput, ...]:
    """Return the inputs, those under one name together."""
    together: dict[str, list[str]] = {}
    for name in kept.inputs:
        together.setdefault(case.get("given", {}).get(name, {}).get("called", name), []).append(name)
    return tuple(
        DocumentInput(called, tuple(names), input_text(case, names[0], kept.inputs[names[0]]))
        for called, names in together.items()
    )


def _expectation(
    expected: Mapping[str, Any],
    numbers: Rows | None,
    pairs: Rows,
    columns: Sequence[Column],
    kept: Mapping[str, KeptCase],
) -> Expectation:
    basis = "exact" if expected["basis"] == "unprinted" else expected["basis"]
    rows = () if numbers is None else _rows_of(expected, numbers, basis)
    exact = {dtype: exact_value(expected, found) for dtype, found in kept.items()}
    unverified = {row["index"] for row in rows if row["verdict"] == Verdict.UNVERIFIED}
    return Expectation(
        name=expected["name"],
        of=expected["of"],
        called=expected.get("called", ""),
        basis=expected["basis"],
        notes=tuple(expected[key] for key in ("because", "note", "digits") if key in expected),
        erratum=expected.get("erratum", ""),
        holds="Not run." if numbers is None else hold_sentence(rows, expected["basis"]),
        spread=spread_sentence(pairs, expected["of"]) if expected["basis"] == "unprinted" and rows else "",
        fails=any(row["verdict"] not in _HARMLESS and not row["xfail"] for row in rows),
        unverified=len(unverified),
        tables=()
        if not rows
        else number_tables(
            rows, columns, expected, {dtype: array for dtype, array in exact.items() if array is not None}
        ),
    )


def _rows_of(expected: Mapping[str, Any], numbers: Rows, basis: str) -> Rows:
    chosen = [row for row in numbers if row["stage"] == expected["name"] and row["basis"] == basis]
    if "called" in expected and any(isinstance(row["called"], str) for row in chosen):
        return [row for row in chosen if row["called"] == expected["called"]]
    return chosen


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
        index = index_of(row)
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
    index = index_from(index_of(row))  # a single number stands at no index
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


_MANY_LINES = 20
"""Longer tables are folded away."""


def expectation_part(expected: Expectation, *, with_environment: bool, with_numbers: bool = True) -> Subsection:
    """Return what a document prints or computes as blocks: whether it holds, and the numbers where they are wanted."""
    named: Inline = (f"{expected.called} (stage ", Mark(expected.name), ")") if expected.called else Mark(expected.name)
    computed = "Computed, not printed. " if expected.basis == "unprinted" else ""
    blocks: list[Block] = [Text(f"{computed}{expected.holds} {expected.spread}".rstrip())]
    blocks += [Text((Mark("Erratum.", "strong"), f" {expected.erratum}"), "erratum-note")] if expected.erratum else []
    blocks += [Text(note, "note") for note in expected.notes]
    tables = [_folded(table, number, expected, with_environment) for number, table in enumerate(expected.tables)]
    if with_numbers and tables:
        blocks += tables if expected.basis != "unprinted" else [OnPage(tables, [_matrix(expected.tables[0])])]
    return Subsection((named, *(part for tag in _tags(expected) for part in (" ", tag))), blocks, 5)


def _tags(expected: Expectation) -> Iterator[Mark]:
    """Yield in a word or two what became of it."""
    if expected.fails:
        yield Mark("fails", State.FAILING)
    elif expected.erratum:
        yield Mark("erratum", State.MISPRINT)
    elif not expected.tables:
        yield Mark("not compared", State.UNVERIFIED)
    elif not expected.unverified:
        yield Mark("holds", State.AGREE)
    if expected.unverified:
        yield Mark(f"{expected.unverified} unverified", State.UNVERIFIED)


def _folded(numbers: NumberTable, number: int, expected: Expectation, with_environment: bool) -> Details:
    """Return one line per number: the document's, the exact one, then each implementation's."""
    titles = [column.title(with_environment=with_environment) for column in numbers.columns]
    is_printed = expected.basis != "unprinted"
    rows = [
        (line.index, *([_printed(line)] if is_printed else []), line.exact or "\N{EN DASH}", *map(_shown, line.values))
        for line in numbers.lines
    ]
    headings = ["element", *([expected.basis] if is_printed else []), "exact", *titles]
    caption = f"{expected.called or expected.name} in {numbers.dtype}"
    table = Table(caption, headings, rows, "l" + "r" * len(headings), "numbers")
    is_open = not number and (expected.fails or len(numbers.lines) <= _MANY_LINES)
    return Details(f"{numbers.dtype}: {counted(len(numbers.lines), 'number')}", [table], is_open=is_open)


def _printed(line: NumberLine) -> Inline:
    printed = Mark(line.printed)
    return Coloured((printed, " ", Mark(line.mark_text, "strong")), line.mark_text) if line.mark_text else printed


def _shown(value: Value | None) -> Inline:
    if value is None:
        return ""
    return Coloured((f"{value.text} ", Mark(value.verdict, "strong")), value.state) if value.state else value.text


def _matrix(numbers: NumberTable) -> Block:
    """Lay the exact numbers out in the document's rows, in fewer digits."""
    matrix: dict[str, list[str]] = {}
    for line in numbers.lines:
        *row, _ = index_from(line.index[1:-1]) or (0,)
        matrix.setdefault(written_element(row) if row else "", []).append(f"{np.float64(line.exact):.8g}")
    headings = [f"exact answer for {numbers.dtype}", *map(str, range(max(map(len, matrix.values()))))]
    table = Table(headings[0], headings, [[row, *cells] for row, cells in matrix.items()], "l" + "r" * len(headings))
    many = len(numbers.lines) > _MANY_LINES
    return Details(f"{headings[0]}: {counted(len(numbers.lines), 'number')}", [table]) if many else table
