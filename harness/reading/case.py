"""A case as the rest of the harness sees it: read, checked and frozen; its record, and where it is kept.

Its record is what a report needs to know of it, as plain data beside the results: no case file is read again. In memory
some dozens of cases are packed together, and on the disk they are kept under every byte of their file. What is kept
there is unpickled, but only into the classes of a case: an entry that names anything else is none.
"""

from __future__ import annotations

import io
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from attncheck.common.store import Key, Store, UnreadableEntry, digest_of, digest_of_code
from attncheck.common.wording import DocumentLayout, layout_of
from attncheck.reading import array_kinds
from attncheck.reading.array_kinds import Array, PrintedInput, Reference
from attncheck.reading.model import TAG_FILE, Random, Source, TagEntry
from attncheck.reading.printed import PrintedArray, Rounding, parse_printed
from attncheck.spec import InputSpec, Options, Shape, inputs_of

Found = TypeVar("Found")
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
        if isinstance(named, PrintedInput) and not (source.is_arranged or named.is_arranged):
            given.setdefault(name, {})["printed"] = parse_printed(named.printed, Rounding()).text.tolist()
    return given


def _in_short(rows: list[int]) -> str:
    """Write rows with commas, many that follow each other as a slice."""
    if len(rows) > MAX_LISTED_ROWS and rows == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]}:{rows[-1] + 1}"
    return ",".join(map(str, rows))


def _expected_record(expected: Expected) -> dict[str, Any]:
    record = {name: getattr(expected, name) for name in ("name", "of", "basis", "transpose")}
    texts = {name: getattr(expected, name) for name in ("called", "because", "erratum", "note", "digits")}
    given = {name: text for name, text in texts.items() if text is not None}
    return record | {"shape": list(expected.shape)} | given


TOGETHER = 64
"""Cases of one file resemble each other, so that together they pack to a small part of what each would take."""

_UNPACKED = 32
"""Parts that stay unpacked: all of a corpus of 2,048 cases, through which a run comes several times."""


class PackedCases(Sequence[Case]):
    """A sequence of cases of which most are packed; what is unpacked twice is equal, and not the same object."""

    def __init__(self, cases: Iterable[Case] = ()) -> None:
        self._parts: list[bytes] = []
        self._open: list[Case] = []
        self._order = array("L")
        for case in cases:
            self.append(case)

    def append(self, case: Case) -> None:
        """Add a case at the end."""
        self._order.append(len(self._parts) * TOGETHER + len(self._open))
        self._open.append(case)
        if len(self._open) == TOGETHER:
            self._parts.append(_packed(self._open))
            self._open = []

    def arrange(self, order: Iterable[int]) -> None:
        """Put the cases in another order: that of their present places."""
        self._order = array("L", (self._order[index] for index in order))

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        part, inside = divmod(self._order[index], TOGETHER)
        return self._open[inside] if part == len(self._parts) else _unpack(self._parts[part])[inside]


@lru_cache(maxsize=_UNPACKED)
def _unpack(part: bytes) -> list[Case]:
    found: list[Case] = pickle.loads(zlib.decompress(part))
    return found


_PARTS = ("reading", "spec", "backends.contract", "common")
READING_CODE = tuple(f"attncheck.{part}" for part in _PARTS)
_READS_WITH = ("numpy", "pydantic", "PyYAML", "ruamel.yaml")
_LARGEST_FILE = 1 << 24
_UNPICKLED = frozenset(
    {
        *((array_kinds.__name__, name) for name in vars(array_kinds)),
        *(("attncheck.reading.case", name) for name in ("Case", "Expected")),
        *(("attncheck.reading.model", name) for name in ("Random", "Source", "TagEntry")),
        ("attncheck.reading.printed", "PrintedArray"),
        ("attncheck.spec.options", "Options"),
        *(("numpy", name) for name in ("dtype", "ndarray")),
        *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
        ("numpy._core.numeric", "_frombuffer"),
    }
)


def load_kept_case_file(path: Path, named: object, store: Store, load: Callable[[], list[Case]]) -> list[Case]:
    """Return what ``load`` makes of a case file, which is ``named`` so, unless the same file was read before.

    Raises what ``load`` does. A file whose arrays lie in files of their own is read every time: those may have changed.
    """
    cases = _kept(path, named, store, load, cases_to_bytes, cases_from_bytes)
    return load() if any(map(_has_stored_arrays, cases)) else cases


def load_kept_tags(folder: Path, store: Store, load: Callable[[], dict[str, TagEntry]]) -> dict[str, TagEntry]:
    """Return what ``load`` makes of a folder's tags.yaml, unless the same file was read before; raise what it does."""
    return _kept(folder / TAG_FILE, TAG_FILE, store, load, _packed, lambda data: _unpacked(data, dict, TagEntry))


def _kept(
    path: Path,
    named: object,
    store: Store,
    load: Callable[[], Found],
    encode: Callable[[Found], bytes],
    decode: Callable[[bytes], Found],
) -> Found:
    """Return what was read of a file with these bytes; read it where reading has to say what is wrong with it."""
    try:
        content = None if store.folder is None or path.stat().st_size > _LARGEST_FILE else path.read_bytes()
    except OSError:
        content = None
    if content is None:
        return load()
    digest = digest_of(digest_of_code(READING_CODE, _READS_WITH), content, named)
    return store.remembered(lambda: Key("cases", digest), load, encode, decode)


def _has_stored_arrays(case: Case) -> bool:
    if any(expected.stored for expected in case.expected):
        return True
    left = [*case.arrays.values(), *case.inputs.values()]
    while left:
        source = left.pop()
        if isinstance(source, array_kinds.StoredArray):
            return True
        left += [part for _, part in array_kinds.parts_of(source)]
    return False


def cases_to_bytes(cases: list[Case]) -> bytes:
    """Write cases down, each with its digest."""
    for case in cases:
        assert case.digest
    return _packed(cases)


def cases_from_bytes(data: bytes) -> list[Case]:
    """Read cases that ``cases_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    found: list[Case] = _unpacked(data, list, Case)
    return found


def _packed(found: object) -> bytes:
    return zlib.compress(pickle.dumps(found, pickle.HIGHEST_PROTOCOL), 1)


def _unpacked(data: bytes, collection: type, kind: type) -> Any:
    try:
        found = _CasesAlone(io.BytesIO(zlib.decompress(data))).load()
    except Exception as error:  # whatever bytes make of pickle's machine
        raise UnreadableEntry from error
    entries = found.values() if isinstance(found, dict) else found
    if not isinstance(found, collection) or not all(isinstance(each, kind) for each in entries):
        raise UnreadableEntry
    return found


class _CasesAlone(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _UNPICKLED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a case")
        return super().find_class(module, name)
