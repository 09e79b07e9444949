"""A case as the rest of the harness sees it: read, checked and frozen.

Its record is what a report needs to know of it, as plain data beside the results: no case file is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from attncheck.reading.array_kinds import Array, PrintedInput, Reference
from attncheck.reading.lowering import Problem
from attncheck.reading.model import Random, Source, TagEntry
from attncheck.reading.printed import PrintedArray, Rounding, parse_printed
from attncheck.spec import InputSpec, Options, Shape, inputs_of
from attncheck.store import digest_of
from attncheck.wording import DocumentLayout, layout_of

Basis = Literal["printed", "known", "unprinted"]
NOT_JUDGED = frozenset(
    {"name", "file", "line", "title", "source", "dtypes", "tags", "notes", "warnings", "path", "properties"}
)
"""What of a case says where it stands and what it is called, or is asked of other calls: no verdict follows from it."""


@dataclass(frozen=True)
class Expected:
    """The expectation of a case for one stage, or for one quantity derived from a stage.

    ``shape`` is the stage's own, or the quantity's. ``numbers`` has the same, and
    is None where the document computes something and prints no number. ``digits``
    says in a sentence how last digits came about that were not simply rounded.
    Numbers that are ``stored`` lie in a file of their own, to the last bit.
    """

    name: str
    of: str
    shape: Shape
    basis: Basis
    numbers: PrintedArray | None
    called: str | None = None
    because: str | None = None
    erratum: str | None = None
    note: str | None = None
    transpose: bool = False
    digits: str | None = None
    stored: bool = False

    @property
    def layout(self) -> DocumentLayout:
        """Return how its numbers are laid out where they are printed."""
        return DocumentLayout(self.shape, self.transpose)


@dataclass(frozen=True)
class Case:
    """One attention computation: inputs, options, and what is known about the result.

    ``arrays`` and ``inputs`` are still descriptions; ``inputs.py`` makes the numbers. ``input_shapes`` are lifted to
    the rank that the operation works with. ``supports_statistics`` tells whether the inputs are continuous and
    unstructured, so that statistical tests apply (``case_maker.py``). Inputs in ``merged`` come with their
    heads side by side. ``judged_stages`` leaves other stages out of the judgement; None is all of them. ``computed_in``
    is the precision in which its printed numbers were computed, None where nothing is said of it. ``warnings`` say,
    with file and line, what in the case is probably not meant. ``path`` leads to the file where the id does not
    (``selection.py``). A case that has ``properties`` is judged only by these.
    """

    id: str
    name: str
    file: str
    line: int
    title: str
    source: Source
    operation: str
    random: Random | None
    arrays: Mapping[str, Array]
    inputs: Mapping[str, Array]
    input_shapes: Mapping[str, Shape]
    stage_shapes: Mapping[str, Shape]
    options: Options
    dtypes: tuple[str, ...]
    expected: tuple[Expected, ...] = ()
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    allow_nonfinite: bool = False
    supports_statistics: bool = False
    storage: str | None = None
    merged: frozenset[str] = frozenset()
    memory_layout: Mapping[str, str] = field(default_factory=dict)
    judged_stages: tuple[str, ...] | None = None
    computed_in: str | None = None
    warnings: tuple[str, ...] = ()
    path: str = ""
    properties: tuple[str, ...] = ()

    @property
    def input_specs(self) -> Mapping[str, InputSpec]:
        """Return what the operation expects of each input."""
        return inputs_of(self.operation, self.options.score)

    def layout_of(self, stage: str, shape: Shape | None = None) -> DocumentLayout | None:
        """Return how the document of the case lays a stage out; None where the case is of no document."""
        transposed = ((expected.name, expected.transpose) for expected in self.expected)
        found = self.stage_shapes.get(stage, ()) if shape is None else shape
        return layout_of(stage, found, transposed, is_document=self.is_document)

    @property
    def is_document(self) -> bool:
        """Return whether the case is transcribed from a published document."""
        return self.source.kind == "document"

    def problem(self, inputs: Mapping[str, NDArray[Any]]) -> Problem:
        """Return the problem that the case is, on inputs in the working dtype."""
        return Problem(self.operation, self.options, inputs)

    @cached_property
    def digest(self) -> str:
        """Return what stands for all of the case that a verdict follows from; kept with it wherever it is kept."""
        return digest_of({each.name: getattr(self, each.name) for each in fields(self) if each.name not in NOT_JUDGED})


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
