"""A page per document, as data: its source, its inputs, what it prints beside what is computed, and its pictures.

The numbers of a document's expectation: what is printed beside every implementation's value and the exact one.

What is drawn of a document's case: its inputs, and its exact stages, as the document lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.elements import DocumentLayout, index_from, written_element
from attncheck.quantities import QUANTITIES
from attncheck.reports.arrays import KeptArrays
from attncheck.reports.figures.panels import BLUE, GREY, ORANGE, PURPLE, Panel, panels_of
from attncheck.reports.frames import Column, Frames, documents_of, once_for_frames, records
from attncheck.results.format import EXACT, INPUTS
from attncheck.spec import DTYPES, LOGITS, MEANS, ON_SCORES, PROJECTIONS, STAGES
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


MAX_WRITTEN = 64
"""Inputs with more numbers are not spelt out, unless the document prints them."""

_COLOURS = (
    dict.fromkeys(("query", *LOGITS), PURPLE) | dict.fromkeys(MEANS, BLUE) | dict.fromkeys(("mask", "bias"), GREY)
)
_NOT_DRAWN = frozenset({"log_sum_exp"})
_OF_A_TOKEN = frozenset({*PROJECTIONS, *MEANS, "applied_values"})
"""What has a row per token, and a column where a document writes its vectors in columns."""
_KEYS_ACROSS = frozenset({*ON_SCORES, "mask", "bias"})


Printed = Mapping[str, Mapping[str, str]]
"""By stage or quantity, then by an element's index as results keep it: the text that a document prints."""


@dataclass(frozen=True)
class Kept:
    """One case in one dtype as the run kept it: the inputs as delivered, the exact stages in float64."""

    inputs: Mapping[str, Array]
    exact: Mapping[str, Array]


@dataclass(frozen=True)
class Drawing:
    """One picture to draw with ``figures.heatmaps(panels)``.

    ``names`` are the inputs, or the stages and quantities, that it shows: several where they are equal.
    """

    title: str
    names: tuple[str, ...]
    is_input: bool
    panels: tuple[Panel, ...]


def kept_of(arrays: KeptArrays, case: str, dtype: str) -> Kept | None:
    """Return a case's inputs and exact stages, of the first run that kept them; None where no run did."""
    found = arrays.of(case, dtype)
    for environment in dict.fromkeys(key[0] for key in found):
        own = {name: {k[2]: found[k] for k in found if k[:2] == (environment, name)} for name in (INPUTS, EXACT)}
        if own[INPUTS] and own[EXACT]:
            return Kept(own[INPUTS], own[EXACT])
    return None


def exact_value(expected: Mapping[str, Any], kept: Kept) -> Array | None:
    """Return the exact value of a stage, or of the quantity that is derived from it; None where it was not kept."""
    name, stage = expected["name"], kept.exact.get(expected["of"])
    if stage is None or name == expected["of"]:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[name].compute(stage, kept.inputs) if name in QUANTITIES else None


def input_text(case: Mapping[str, Any], name: str, array: Array) -> tuple[tuple[str, ...], ...]:
    """Return an input's numbers as the document prints them, else as short as they can be written, if they are few."""
    printed = case.get("given", {}).get(name, {}).get("printed")
    if printed is not None:
        rows = np.array(printed, dtype=object)
        return tuple(tuple(map(str, row)) for row in rows.reshape(-1, rows.shape[-1] if rows.ndim else 1))
    if array.size > MAX_WRITTEN or not array.ndim:
        return ()
    return tuple(tuple(map(_shortest, row)) for row in array.reshape(-1, array.shape[-1]).tolist())


def _shortest(value: float) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def drawings_of(
    case: Mapping[str, Any], kept: Kept, *, in_columns: bool, printed: Printed = MappingProxyType({})
) -> tuple[Drawing, ...]:
    """Return the inputs, then the stages in the order of computation; ``in_columns`` vectors are drawn as columns.

    ``printed`` is what the document prints otherwise than it is.
    """
    given = case.get("given", {})
    names = {name: given.get(name, {}).get("called", "") for name in kept.inputs}
    called = {expected["name"]: expected["called"] for expected in case["expected"] if "called" in expected}
    stages = {stage: kept.exact[stage] for stage in STAGES if stage in kept.exact and stage not in _NOT_DRAWN}
    derived = {expected["name"]: expected for expected in case["expected"] if expected["name"] != expected["of"]}
    for name, expected in derived.items():
        value = exact_value(expected, kept)
        if value is not None:
            stages = _after(stages, expected["of"], name, value)
    return tuple(
        drawing
        for arrays, titles, is_input in ((kept.inputs, names, True), (stages, called, False))
        for drawing in _drawings(arrays, titles, is_input, in_columns, {} if is_input else printed)
    )


def _after(stages: Mapping[str, Array], before: str, name: str, value: Array) -> dict[str, Array]:
    """Put a derived quantity behind the stage that it comes from."""
    placed: dict[str, Array] = {}
    for stage, array in stages.items():
        placed[stage] = array
        if stage == before:
            placed[name] = value
    return placed


def _drawings(
    arrays: Mapping[str, Array], called: Mapping[str, str], is_input: bool, in_columns: bool, printed: Printed
) -> Sequence[Drawing]:
    """Draw each array once: those that are equal share a picture."""
    together: dict[str, list[str]] = {}
    for name, array in arrays.items():
        same = next((first for first in together if _are_equal(arrays[first], array)), name)
        together.setdefault(same, []).append(name)
    drawings = []
    for first, names in together.items():
        title = title_of(names, dict.fromkeys(text for name in names if (text := called.get(name))))
        panels = panels_of(_laid_out(arrays[first], first, in_columns), title, **_look(first, in_columns))
        marked = [_marked(panels, arrays[name], printed[name], first, in_columns) for name in names if name in printed]
        drawings.append(Drawing(title, tuple(names), is_input, marked[0] if marked else panels))
    return drawings


def _marked(
    panels: tuple[Panel, ...], array: Array, printed: Mapping[str, str], name: str, in_columns: bool
) -> tuple[Panel, ...]:
    """Say in the panels of an array what is printed otherwise."""
    found: dict[int, dict[tuple[int, int], str]] = {}
    for text, number in printed.items():
        index = index_from(text)
        if len(index) != array.ndim or any(place >= length for place, length in zip(index, array.shape, strict=True)):
            continue  # of results that somebody else wrote
        *leading, row, column = (0, *index) if array.ndim == 1 else index
        place = (column, row) if in_columns and name in _OF_A_TOKEN and array.ndim > 1 else (row, column)
        panel = int(np.ravel_multi_index(leading, array.shape[:-2])) if leading else 0
        found.setdefault(panel, {})[place] = number
    return tuple(replace(panel, printed=found.get(number, {})) for number, panel in enumerate(panels))


def title_of(names: Sequence[str], documents: Collection[str]) -> str:
    """Name a matrix as the document does, and as stages and inputs are called here where that is another name."""
    words, own = ", ".join(names), ", ".join(documents)
    return f"{own} ({words})" if own and own != words else words


def _are_equal(first: Array, second: Array) -> bool:
    """Whether two arrays look the same: leading axes of length 1 are not seen."""
    shapes = [
        array.shape[next((i for i, n in enumerate(array.shape) if n != 1), array.ndim) :] for array in (first, second)
    ]
    return shapes[0] == shapes[1] and np.array_equal(first.ravel(), second.ravel(), equal_nan=True)


def _laid_out(array: Array, name: str, in_columns: bool) -> Array:
    return np.swapaxes(array, -1, -2) if in_columns and name in _OF_A_TOKEN and array.ndim > 1 else array


def _look(name: str, in_columns: bool) -> dict[str, str]:
    """Return a matrix's colour and what its rows and columns are."""
    look = {"colour": _COLOURS.get(name, GREY if "_" in name and name.endswith(("weight", "bias")) else ORANGE)}
    if name in _KEYS_ACROSS:
        return look | {"row_axis": "query", "column_axis": "key"}
    return look
