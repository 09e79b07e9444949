"""A page per document, as data: its source, its inputs, what it prints beside what is computed, and its pictures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attncheck.reports.documents.drawings import Drawing, Kept, drawings_of, exact_value, input_text, kept_of
from attncheck.reports.documents.numbers import NumberTable, Rows, hold_sentence, number_tables, spread_sentence
from attncheck.reports.frames import Column, Frames, documents_of, once_for_frames, records
from attncheck.verdicts import Verdict

_HARMLESS = (Verdict.AGREE, Verdict.UNVERIFIED)


@dataclass(frozen=True)
class Given:
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
    given: tuple[Given, ...]
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


def _given(case: Mapping[str, Any], kept: Kept) -> tuple[Given, ...]:
    """Return the inputs, those under one name together."""
    together: dict[str, list[str]] = {}
    for name in kept.inputs:
        together.setdefault(case.get("given", {}).get(name, {}).get("called", name), []).append(name)
    return tuple(
        Given(called, tuple(names), input_text(case, names[0], kept.inputs[names[0]]))
        for called, names in together.items()
    )


def _expectation(
    expected: Mapping[str, Any],
    numbers: Rows | None,
    pairs: Rows,
    columns: Sequence[Column],
    kept: Mapping[str, Kept],
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
