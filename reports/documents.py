"""Documents: each printed number with the exact one and every implementation's value, as blocks.

A document has a source and computations, each a case. A computation has inputs, and expectations with a table of
numbers for each dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.common.wording import DocumentLayout, count_noun, format_element, parse_index
from attncheck.reports.cells import State
from attncheck.reports.document_model import (
    Block,
    Coloured,
    Details,
    Inline,
    Items,
    Mark,
    PageOnly,
    Subsection,
    Table,
    Text,
)
from attncheck.reports.frames import Frames, cached_for_frames, documents_of, group_by_key, to_records
from attncheck.reports.panels import Drawing, KeptCase, exact_array, input_text, make_drawings, read_kept_case
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

Array = NDArray[Any]
Record = Mapping[str, Any]
Rows = Sequence[Record]
"""Comparisons, as plain records."""
_HARMLESS_VERDICTS = (Verdict.AGREE, Verdict.UNVERIFIED)


@dataclass(frozen=True)
class DocumentComputation:
    """One computation of a document: its case, its numbers and pairs, and by dtype the arrays that were kept."""

    case: Record
    numbers: Rows | None
    """None if the case did not run."""
    pairs: Rows
    kept: Mapping[str, KeptCase]
    in_columns: bool
    """Whether the document writes vectors as columns."""

    @property
    def id(self) -> str:
        """The id of its case."""
        return str(self.case["id"])

    @cached_property
    def rows(self) -> Mapping[int, Rows]:
        """Return the comparisons with each expectation, by position; empty for stages that were not returned."""
        rows_by_position: dict[int, Rows] = {}
        for place, expected in enumerate(self.case["expected"]):
            basis = "exact" if expected["basis"] == "unprinted" else expected["basis"]
            chosen = [row for row in self.numbers or () if row["stage"] == expected["name"] and row["basis"] == basis]
            if "called" in expected and any(isinstance(row["called"], str) for row in chosen):
                chosen = [row for row in chosen if row["called"] == expected["called"]]
            rows_by_position[place] = chosen
        return rows_by_position

    @property
    def fails(self) -> bool:
        """Return whether a comparison fails that no erratum explains."""
        return any(map(_has_failure, self.rows.values()))

    @property
    def notes(self) -> list[str]:
        """The notes of the case, and the precision in which its numbers were computed, if that is known."""
        precision = self.case.get("computed_in")
        text = f"The printed numbers were computed in {precision}, and are allowed what rounding in it can do."
        return [*self.case["notes"], *([text] if precision else [])]

    @cached_property
    def drawings(self) -> tuple[Drawing, ...]:
        """Return the drawings of its inputs and exact stages, with misprints marked; empty if no array was kept."""
        printed: dict[str, dict[str, str]] = {}
        for row in self.numbers or ():
            if row["verdict"] == Verdict.MISPRINT and row["index"]:
                printed.setdefault(row["stage"], {})[row["index"]] = str(row["printed"])
        kept = next(iter(self.kept.values()), None)
        return make_drawings(self.case, kept, in_columns=self.in_columns, printed=printed) if kept else ()

    @cached_property
    def given(self) -> list[tuple[str, list[str], Sequence[Sequence[str]]]]:
        """Return the inputs by their names in the document, with their numbers if it prints them."""
        inputs = next((kept.inputs for kept in self.kept.values()), {})
        written = self.case.get("given", {})
        together = group_by_key(inputs, lambda name: str(written.get(name, {}).get("called", name)))
        return [
            (called, names, input_text(self.case, names[0], inputs[names[0]])) for called, names in together.items()
        ]


@cached_for_frames
def computations_by_document(frames: Frames) -> dict[str, list[DocumentComputation]]:
    """Return the computations of each document that was run, by file, in the document's order."""
    cases_by_file = documents_of(frames)
    wanted = {case["id"] for cases in cases_by_file.values() for case in cases}
    # As plain records, because frames are slow for many small parts.
    numbers, pairs = (
        group_by_key(to_records(frame[frame["case"].isin(wanted)]), itemgetter("case"))
        for frame in (frames.numbers, frames.pairs)
    )
    return {
        file: [
            DocumentComputation(
                case,
                numbers.get(case["id"]),
                pairs.get(case["id"], ()),
                {dtype: kept for dtype in case["dtypes"] if (kept := read_kept_case(frames.arrays, case["id"], dtype))},
                any(expected["transpose"] for sibling in cases for expected in sibling["expected"]),
            )
            for case in cases
        ]
        for file, cases in cases_by_file.items()
    }


NUMBERS_EXPLAINED = (
    "Each number that a document prints, beside the exact answer and what each implementation computes; elements count "
    "from 0."
)


def source_blocks(case: Record) -> list[Block]:
    """Return the source of a case's document, and the notes about it."""
    source = case["source"]
    by = f", by {source['author']}" if source.get("author") else ""
    section = f"; {source['section']}" if source.get("section") else ""
    notes, url = source.get("notes", ()), source.get("url")
    where: Inline = (": ", Mark(url, "link", url)) if url else "."
    text = Text((Mark(source["title"], "cite"), f"{by}{section}", where), "source")
    return [text, *([Items(notes, "notes")] if notes else [])]


def expectation_parts(
    frames: Frames, computation: DocumentComputation, *, with_numbers: bool = True
) -> list[Subsection]:
    """Return a part for each printed or computed matrix: whether it holds, and its numbers if ``with_numbers``."""
    return [
        _expectation_part(frames, computation, expected, computation.rows[place], with_numbers)
        for place, expected in enumerate(computation.case["expected"])
    ]


def _expectation_part(
    frames: Frames, computation: DocumentComputation, expected: Record, rows: Rows, with_numbers: bool
) -> Subsection:
    name, called, is_printed = expected["name"], expected.get("called", ""), expected["basis"] != "unprinted"
    named: Inline = (f"{called} (stage ", Mark(name), ")") if called else Mark(name)
    computed = "" if is_printed else "Computed, not printed. "
    holds = "Not run." if computation.numbers is None else count_holding_sentence(rows, expected["basis"])
    spread = "" if is_printed or not rows else spread_sentence(computation.pairs, expected["of"])
    blocks: list[Block] = [Text(f"{computed}{holds} {spread}".rstrip())]
    if erratum := expected.get("erratum", ""):
        blocks.append(Text((Mark("Erratum.", "strong"), f" {erratum}"), "erratum-note"))
    blocks += [Text(expected[key], "note") for key in ("because", "note", "digits") if key in expected]
    if with_numbers and rows:
        parts = {dtype: rows_in_dtype for dtype in DTYPES if (rows_in_dtype := _rows_in_dtype(rows, dtype))}
        tables: list[Block] = []
        for dtype, rows_in_dtype in parts.items():
            table = _number_table(frames, rows_in_dtype, dtype, expected, computation.kept.get(dtype))
            is_open = not tables and (_has_failure(rows) or len(table.rows) <= _MIN_LINES_TO_FOLD)
            tables.append(Details(f"{dtype}: {count_noun(len(table.rows), 'number')}", [table], is_open=is_open))
        blocks += tables if is_printed else [PageOnly(tables, [_matrix_block(*next(iter(parts.items())), expected)])]
    return Subsection((named, *(part for tag in _outcome_marks(expected, rows) for part in (" ", tag))), blocks, 5)


def _has_failure(rows: Rows) -> bool:
    return any(row["verdict"] not in _HARMLESS_VERDICTS and not row["xfail"] for row in rows)


def _outcome_marks(expected: Record, rows: Rows) -> Iterator[Mark]:
    """Yield the outcome of a printed or computed matrix, in a word or two."""
    unverified = len({row["index"] for row in rows if row["verdict"] == Verdict.UNVERIFIED})
    if _has_failure(rows):
        yield Mark("fails", State.FAILING)
    elif expected.get("erratum", ""):
        yield Mark("erratum", State.MISPRINT)
    elif not rows:
        yield Mark("not compared", State.UNVERIFIED)
    elif not unverified:
        yield Mark("holds", State.AGREE)
    if unverified:
        yield Mark(f"{unverified} unverified", State.UNVERIFIED)


_EXTRA_DIGITS = 3
"""Digits shown beyond the printed ones."""
_MIN_LINES_TO_FOLD = 20
"""Longer tables are folded away."""


def _rows_in_dtype(rows: Rows, dtype: str) -> Rows:
    return [row for row in rows if row["dtype"] == dtype]


def _number_table(frames: Frames, rows: Rows, dtype: str, expected: Record, kept: KeptCase | None) -> Table:
    """Return a row for each number, in the document's order: printed, exact, and computed by each implementation."""
    exact = exact_array(expected, kept) if kept else None
    firsts: dict[str, Record] = {}
    by_index: dict[str, dict[tuple[str, str], Record]] = {}
    for row in rows:
        firsts.setdefault(row["index"] or "", row)
        by_index.setdefault(row["index"] or "", {})[row["environment"], row["implementation"]] = row
    present = set().union(*by_index.values())
    columns = [column for column in frames.columns if column.key in present]
    is_printed = expected["basis"] != "unprinted"
    lines = []
    for index, rows_by_column in by_index.items():
        first = firsts[index]
        values = [_computed_cell(rows_by_column.get(column.key), dtype) for column in columns]
        printed = [_printed_cell(first, rows_by_column.values())] if is_printed else []
        lines.append(
            (element_in_document(index, expected), *printed, _exact_cell(first, exact) or "\N{EN DASH}", *values)
        )
    lines.sort(key=lambda line: parse_index(str(line[0])[1:-1]))
    titles = [frames.title(column) for column in columns]
    headings = ["element", *([expected["basis"]] if is_printed else []), "exact", *titles]
    caption = f"{expected.get('called') or expected['name']} in {dtype}"
    return Table(caption, headings, lines, "l" + "r" * len(headings), "numbers")


def _printed_cell(first: Record, rows: Collection[Record]) -> Inline:
    """Write a printed number, with a mark if the exact answer misses it."""
    printed = Mark(first["printed"] or "")
    misses = {bool(row["xfail"]) for row in rows if row["verdict"] == Verdict.MISPRINT}
    mark = "erratum" if misses == {True} else "misprint"
    return Coloured((printed, " ", Mark(mark, "strong")), mark) if misses else printed


def _computed_cell(row: Record | None, dtype: str) -> Inline:
    """Write an implementation's number, with its verdict if it was not compared or is wrong.

    A misprint is the document's fault, so the printed number is marked instead.
    """
    if row is None:
        return ""
    text, verdict = format_computed(row["value"], dtype, _half_unit(row)), str(row["verdict"])
    if verdict in (Verdict.AGREE, Verdict.MISPRINT):
        return text
    state = State.UNVERIFIED if verdict == Verdict.UNVERIFIED else State.FAILING
    return Coloured((f"{text} ", Mark(verdict, "strong")), state)


def _half_unit(row: Mapping[str, Any]) -> float:
    """Return half a unit of the last printed digit; 0 if nothing is printed, or the printed number is exact."""
    return 0.0 if row["half_unit"] is None or math.isnan(row["half_unit"]) else float(row["half_unit"])


def _exact_cell(row: Mapping[str, Any], exact: Array | None) -> str:
    if row["basis"] == "exact":
        return format_computed(row["reference"], "float64", 0.0)
    index = parse_index(row["index"] or "")  # a single number stands at no index
    if exact is None or len(index) != exact.ndim or any(i >= n for i, n in zip(index, exact.shape, strict=True)):
        return ""
    return format_computed(float(exact[index]), "float64", _half_unit(row))


def element_in_document(text: str, expected: Mapping[str, Any]) -> str:
    """Write an element's index in the document's layout."""
    return format_element(text, layout=DocumentLayout(tuple(expected["shape"]), bool(expected["transpose"])))


def format_computed(value: float, dtype: str, half_unit: float) -> str:
    """Write a computed number with a few more digits than the printed one, as far as the dtype has them."""
    if not math.isfinite(value):
        return str(value)
    digits = 9 if dtype == "float32" else 17
    if half_unit:
        decimals = max(0, -math.floor(math.log10(2 * half_unit))) if half_unit > 1e-300 else 0
        text = f"{value:.{decimals + _EXTRA_DIGITS}f}"
        if len(text.replace("-", "").replace(".", "").lstrip("0")) <= digits and decimals:
            return text
    return f"{value:.{digits}g}"


def count_holding_sentence(rows: Rows, basis: str) -> str:
    """Count the comparisons with printed, known or exact numbers that hold."""
    if not rows:
        return "No implementation returned it."
    if basis == "unprinted":
        good, unverified = (_count_verdict(rows, verdict) for verdict in (Verdict.AGREE, Verdict.UNVERIFIED))
        if good == len(rows):
            return "On every implementation it is within its error bound of the exact answer, in every dtype."
        bad = f"{len(rows) - good - unverified} of {len(rows)} comparisons with the exact answer fail"
        return f"{bad}, {unverified} are unverified." if unverified else f"{bad}."
    parts = []
    for rows_in_dtype in filter(None, (_rows_in_dtype(rows, dtype) for dtype in DTYPES)):
        good, unverified = (_count_verdict(rows_in_dtype, verdict) for verdict in (Verdict.AGREE, Verdict.UNVERIFIED))
        errata = sum(row["verdict"] == Verdict.MISPRINT and bool(row["xfail"]) for row in rows_in_dtype)
        kind = "printed" if basis == "printed" else "known"
        text = f"{good} of {len(rows_in_dtype)} comparisons with {kind} numbers hold in {rows_in_dtype[0]['dtype']}"
        text += f", {errata} are the recorded erratum" if errata else ""
        parts.append(f"{text}, {unverified} are unverified" if unverified else text)
    return f"{'; '.join(parts)}."


def _count_verdict(rows: Rows, verdict: Verdict) -> int:
    return sum(row["verdict"] == verdict for row in rows)


def spread_sentence(pairs: Rows, stage: str) -> str:
    """Return by how much the implementations differ at a stage; ``pairs`` are those of one case."""
    parts = []
    pairs = [row for row in pairs if row["stage"] == stage and not math.isnan(row["ratio"])]
    for dtype in DTYPES:
        if not (rows_in_dtype := _rows_in_dtype(pairs, dtype)):
            continue
        most = max(rows_in_dtype, key=lambda row: float(row["ratio"]))
        if most["difference"] == 0:
            parts.append(f"in {dtype} they are identical")
        else:
            names = f"{most['implementation']} and {most['other']}"
            most_of = f"{most['difference']:.3g}, {most['ratio']:.3g} of what is allowed"
            parts.append(f"in {dtype} they differ by at most {most_of} ({names})")
    return f"Among the implementations: {'; '.join(parts)}." if parts else "There is nothing to compare it with."


def _matrix_block(dtype: str, rows: Rows, expected: Record) -> Block:
    """Lay the exact numbers out in the document's rows, in fewer digits."""
    places = {
        index: parse_index(element_in_document(index, expected)[1:-1]) or (0,)
        for index in {row["index"] or "" for row in rows}
    }
    exact = {places[row["index"] or ""]: row["reference"] for row in reversed(rows)}
    matrix: dict[str, list[str]] = {}
    for (*row, _), value in sorted(exact.items()):
        matrix.setdefault(format_element(row) if row else "", []).append(f"{np.float64(value):.8g}")
    headings = [f"exact answer for {dtype}", *map(str, range(max(map(len, matrix.values()))))]
    table = Table(headings[0], headings, [[row, *cells] for row, cells in matrix.items()], "l" + "r" * len(headings))
    many = len(exact) > _MIN_LINES_TO_FOLD
    return Details(f"{headings[0]}: {count_noun(len(exact), 'number')}", [table]) if many else table
