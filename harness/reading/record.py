"""What a report needs to know of a case, as plain data beside the results: no case file is read again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attncheck.reading.array_kinds import Array, PrintedInput, Reference
from attncheck.reading.case import Case, Expected
from attncheck.reading.model import TagEntry
from attncheck.reading.printed import Rounding, parse_printed

MAX_LISTED_ROWS = 4
"""More rows that follow each other are written as a slice."""


def case_records(cases: Iterable[Case], tags: Mapping[str, TagEntry]) -> Iterator[dict[str, Any]]:
    """Yield the records of cases for cases.json; what a tag means stands with the first case that has it."""
    left = dict(tags)
    for case in cases:
        yield case_record(case, {tag: left.pop(tag) for tag in case.tags if tag in left})


def case_record(case: Case, tags: Mapping[str, TagEntry]) -> dict[str, Any]:
    """Return a case's names, source, notes, expectations, and what its tags mean, for cases.json."""
    return {
        "id": case.id,
        "name": case.name,
        "file": case.file,
        **({"path": case.path} if case.path else {}),
        "line": case.line,
        "title": case.title,
        "source": case.source.model_dump(exclude_none=True),
        "operation": case.operation,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in case.options.items()},
        "dtypes": list(case.dtypes),
        "storage": case.storage,
        "memory_layout": dict(case.memory_layout),
        "merged": sorted(case.merged),
        "inputs": {name: list(shape) for name, shape in case.input_shapes.items()},
        "given": _given(case) if case.is_document else {},
        "tags": list(case.tags),
        "probes": {tag: tags[tag].model_dump() for tag in case.tags if tag in tags},
        "notes": list(case.notes),
        "computed_in": case.computed_in,
        "warnings": list(case.warnings),
        "expected": [_expected_record(expected) for expected in case.expected],
    }


def _given(case: Case) -> dict[str, Any]:
    """Return what a document calls its inputs, and the digits in which it prints them, where it does."""
    given: dict[str, Any] = {}
    for name, source in case.inputs.items():
        if isinstance(source, Reference):
            rows = "" if source.rows is None else f"[{_in_short(source.rows)}]"
            given[name] = {"called": f"{source.ref}{rows}{'.T' if source.transpose else ''}"}
        named = case.arrays.get(source.ref) if isinstance(source, Reference) else source
        if isinstance(named, PrintedInput) and not (_is_arranged(source) or _is_arranged(named)):
            given.setdefault(name, {})["printed"] = parse_printed(named.printed, Rounding()).text.tolist()
    return given


def _in_short(rows: list[int]) -> str:
    """Write rows with commas, many that follow each other as a slice."""
    if len(rows) > MAX_LISTED_ROWS and rows == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]}:{rows[-1] + 1}"
    return ",".join(map(str, rows))


def _is_arranged(source: Array) -> bool:
    return source.transpose or any(value is not None for value in (source.rows, source.times, source.plus))


def _expected_record(expected: Expected) -> dict[str, Any]:
    texts = {
        "called": expected.called,
        "because": expected.because,
        "erratum": expected.erratum,
        "note": expected.note,
        "digits": expected.digits,
    }
    return {
        "name": expected.name,
        "of": expected.of,
        "basis": expected.basis,
        "transpose": expected.transpose,
        "shape": list(expected.shape),
        **{name: text for name, text in texts.items() if text is not None},
    }
