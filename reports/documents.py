"""The numbers that documents print: each counted once, and page by page beside what is computed.

A number holds only where every comparison of it holds. One that was not compared on some implementation is unverified
there, and one that some implementation alone misses is no fault of the document. A page has a document's source, its
inputs, what it prints beside every implementation's value and the exact one, and its pictures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.reports.frames import (
    Column,
    Frames,
    document_cases,
    documents_of,
    element_in,
    failing,
    groups,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)
from attncheck.reports.panels import Drawing, KeptCase, drawings_of, exact_value, input_text, kept_of
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict
from attncheck.wording import DocumentLayout, counted, index_from, told_apart, written_element

_PLACE = ["case", "stage", "called", "index"]
_MAX_NUMBERS = 3
OF_DOCUMENTS = (Verdict.MISPRINT, Verdict.XPASS)
"""Verdicts of numbers that no implementation is to blame for: what is printed or recorded is wrong."""


@dataclass(frozen=True)
class NumberCounts:
    """How many printed numbers there are of which kind; ``errata`` are no part of ``printed``."""

    printed: int
    hold: int
    misprints: int
    missed: int
    unverified: int
    errata: int
    outdated: int
    not_returned: int
    """Printed matrices of which nothing was compared: no implementation returned their stage."""


@dataclass(frozen=True)
class Misprint:
    """What a document prints otherwise than it is, or a recorded erratum that no longer is one: one per matrix."""

    case: str
    stage: str
    called: str
    verdict: str
    message: str
    numbers: tuple[tuple[str, str, str], ...]
    """The place of each number, what is printed there, and the exact answer."""
    rows: int
    """How many comparisons fail because of it."""


@once_for_frames
def number_counts(frames: Frames) -> NumberCounts:
    """Count the printed numbers of documents, and every other printed number that is wrong or was not compared."""
    return number_counts_of(frames, list(frames.cases))


def number_counts_of(frames: Frames, cases: Collection[str]) -> NumberCounts:
    """Count those of some cases."""
    printed = printed_numbers(frames)
    printed = printed[printed["case"].isin(cases)]
    wrong_call = under_erratum(frames, printed) | (
        printed["verdict"].eq(Verdict.MISPRINT) & printed["xfail"].astype(bool)
    )
    errata = printed[wrong_call & printed["verdict"].eq(Verdict.MISPRINT)]
    states = _states(printed[~wrong_call])
    count = {state: int(states.eq(state).sum()) for state in (*_STATES,)}
    return NumberCounts(
        printed=len(states),
        hold=count[_HOLDS],
        misprints=count[_MISPRINT],
        missed=count[_MISSED],
        unverified=count[_UNVERIFIED],
        errata=len(errata[_PLACE].drop_duplicates()),
        outdated=sum(each.verdict == Verdict.XPASS and each.case in cases for each in misprints(frames)),
        not_returned=_not_returned(frames, cases),
    )


@once_for_frames
def printed_numbers(frames: Frames) -> pd.DataFrame:
    """Return the comparisons with printed numbers: of documents, and of other sources where they do not hold."""
    documents = document_cases(frames).keys()
    numbers = frames.numbers[frames.numbers["basis"].eq("printed")]
    doubtful = numbers["verdict"].isin([Verdict.MISPRINT, Verdict.UNVERIFIED])
    return numbers[numbers["case"].isin(documents) | doubtful]


def unverified_on(frames: Frames, column: Column) -> int:
    """Count the numbers, printed or not, that were not compared on an implementation."""
    numbers = frames.numbers
    own = numbers["environment"].eq(column.environment) & numbers["implementation"].eq(column.implementation)
    return len(numbers[own & numbers["verdict"].eq(Verdict.UNVERIFIED)][_PLACE].drop_duplicates())


_HOLDS, _UNVERIFIED, _MISSED, _MISPRINT = _STATES = range(4)


def _states(numbers: pd.DataFrame) -> pd.Series[int]:
    """Return one state per printed number: the worst of its comparisons."""
    state = pd.Series(_HOLDS, index=numbers.index)
    state[numbers["verdict"].eq(Verdict.UNVERIFIED)] = _UNVERIFIED
    fails = numbers.index.isin(failing(numbers).index)
    state[fails] = _MISSED
    state[numbers["verdict"].eq(Verdict.MISPRINT)] = _MISPRINT
    return state.groupby([numbers[name] for name in _PLACE], dropna=False).max()


def _not_returned(frames: Frames, cases: Collection[str]) -> int:
    return sum(case in cases for case, _ in _printed_and_not_returned(frames))


@once_for_frames
def _printed_and_not_returned(frames: Frames) -> tuple[tuple[str, str], ...]:
    """Return the cases and names of what is printed, and was returned by nothing that ran."""
    numbers = frames.numbers[frames.numbers["basis"].eq("printed")]
    returned = set(zip(numbers["case"], numbers["stage"], strict=True))
    ran = set(frames.results["case"])
    return tuple(
        (identity, expected["name"])
        for identity, case in frames.cases.items()
        if identity in ran
        for expected in case["expected"]
        if expected["basis"] == "printed" and (identity, expected["name"]) not in returned
    )


@once_for_frames
def misprints(frames: Frames) -> tuple[Misprint, ...]:
    """Return what documents print wrongly and what is recorded wrongly, once for all implementations and dtypes."""
    bad = failing(frames.numbers)
    bad = bad[bad["verdict"].isin(OF_DOCUMENTS)]
    found = [_misprint(frames, key, records(part)) for key, part in groups(bad, ["case", "stage", "verdict"]).items()]
    return tuple(sorted(found, key=lambda each: (each.case, stage_order(each.stage))))


def _misprint(frames: Frames, key: tuple[str, str, str], rows: Sequence[Mapping[str, Any]]) -> Misprint:
    case, stage, verdict = key
    widest = min((str(row["dtype"]) for row in rows), key=DTYPES.index)
    by_index = {str(row["index"]): row for row in rows if row["dtype"] == widest}
    numbers = tuple((index, str(row["printed"]), value_text(row["exact"])) for index, row in by_index.items())
    called = rows[0]["called"] if isinstance(rows[0]["called"], str) and rows[0]["called"] else stage
    if verdict == Verdict.XPASS:
        return Misprint(case, stage, called, verdict, str(rows[0]["message"]), (), len(rows))
    sentences = [
        f"{element_in(frames.cases[case], row, called)} is printed as {text}, should be {_beside(row)}"
        for row, (_, text, _) in zip(by_index.values(), numbers, strict=True)
    ]
    more = len(sentences) - _MAX_NUMBERS
    rest = [f"And {counted(more, 'more number')} of it"] if more > 0 else []
    message = ". ".join([*sentences[:_MAX_NUMBERS], *rest, *_hints(list(by_index.values()))])
    return Misprint(case, stage, called, verdict, message, numbers, len(rows))


def _beside(row: Mapping[str, Any]) -> str:
    """Write an exact answer with as many digits as tell it from what is printed, which may be no plain number."""
    try:
        return told_apart(float(row["printed"]), row["exact"])[1]
    except ValueError:
        return value_text(row["exact"])


def _hints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what would explain misprints, each thing once and of how many of them."""
    counts = Counter(str(row["hint"]) for row in rows if isinstance(row["hint"], str))
    return [
        f"{hint[0].upper()}{hint[1:]}" if count == len(rows) else f"For {count} of these {len(rows)} numbers: {hint}"
        for hint, count in counts.items()
    ]


def value_text(value: float) -> str:
    """Write an exact answer, rounded to float64, with all of its digits."""
    return str(value) if not math.isfinite(value) else f"{value:.17g}"


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
