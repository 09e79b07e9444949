"""A checked, frozen case, its record for reports, and the cache of read cases.

The record has all that a report needs of a case, as plain data next to the results, so that no case file is read again.
In memory, dozens of cases are packed together. On disk, they are cached under a digest of their file's bytes. Cached
cases are unpickled, but only into the classes of a case: an entry with any other class is ignored.
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

from attncheck.common.store import Store, StoreKey, UnreadableEntry, digest_of, digest_of_code
from attncheck.common.wording import DocumentLayout, stage_layout
from attncheck.reading import array_kinds
from attncheck.reading.array_kinds import Array, PrintedInput, Reference
from attncheck.reading.model import TAG_FILE, Random, Source, TagEntry
from attncheck.reading.parsed_corpus import READING_CODE_MODULES, cache_key, read_entry
from attncheck.reading.printed import PrintedArray, PrintedRounding, parse_printed
from attncheck.spec import InputSpec, Options, Shape, input_specs

Loaded = TypeVar("Loaded")
ExpectationBasis = Literal["printed", "known", "unprinted"]
UNJUDGED_FIELDS = frozenset(
    {"name", "file", "line", "title", "source", "dtypes", "tags", "notes", "warnings", "path", "properties"}
)
"""Fields of a case that no verdict depends on: names, places, and properties, which other calls test."""


@dataclass(frozen=True)
class ExpectedStage:
    """The expectation of a case for one stage, or for one quantity derived from a stage.

    ``shape`` is the stage's own, or the quantity's. ``numbers`` has the same, and
    is None if the document computes something and prints no number. ``digits``
    says in a sentence how last digits came about that were not simply rounded.
    Numbers that are ``stored`` lie in a file of their own, to the last bit.
    """

    name: str
    of: str
    shape: Shape
    basis: ExpectationBasis
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
        """Return the layout of its numbers in the document."""
        return DocumentLayout(self.shape, self.transpose)


@dataclass(frozen=True)
class Case:
    """One attention computation: inputs, options, and what is known about the result.

    ``arrays`` and ``inputs`` are still descriptions; ``inputs.py`` makes the numbers. ``input_shapes`` are lifted to
    the rank that the operation works with. ``supports_statistics`` tells whether the inputs are continuous and
    unstructured, so that statistical tests apply (``case_maker.py``). Inputs in ``merged`` come with their
    heads side by side. ``judged_stages`` leaves other stages out of the judgement; None is all of them. ``computed_in``
    is the precision in which its printed numbers were computed, None if nothing is said of it. ``warnings`` say,
    with file and line, what in the case is probably not meant. ``path`` leads to the file if the id does not
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
    expected: tuple[ExpectedStage, ...] = ()
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
        """Return the specification of each input."""
        return input_specs(self.operation, self.options.score)

    def layout_of(self, stage: str, shape: Shape | None = None) -> DocumentLayout | None:
        """Return how the document of the case lays a stage out; None if the case is of no document."""
        transposed = ((expected.name, expected.transpose) for expected in self.expected)
        stage_shape = self.stage_shapes.get(stage, ()) if shape is None else shape
        return stage_layout(stage, stage_shape, transposed, is_document=self.is_document)

    @property
    def is_document(self) -> bool:
        """Return whether the case is transcribed from a published document."""
        return self.source.kind == "document"

    @cached_property
    def digest(self) -> str:
        """Return the digest of all that a verdict depends on; it is stored with the case."""
        judged = [attribute.name for attribute in fields(self) if attribute.name not in UNJUDGED_FIELDS]
        return digest_of({name: getattr(self, name) for name in judged})


MAX_LISTED_ROWS = 4
"""More consecutive rows are written as a slice."""


def make_case_records(cases: Iterable[Case], tags: Mapping[str, TagEntry]) -> Iterator[dict[str, Any]]:
    """Yield the records of cases for cases.json; only the first case with a tag has the tag's meaning."""
    remaining = dict(tags)
    for case in cases:
        yield make_case_record(case, {tag: remaining.pop(tag) for tag in case.tags if tag in remaining})


def make_case_record(case: Case, tags: Mapping[str, TagEntry]) -> dict[str, Any]:
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
        "given": _describe_document_inputs(case) if case.is_document else {},
        "tags": list(case.tags),
        "probes": {tag: tags[tag].model_dump() for tag in case.tags if tag in tags},
        "notes": list(case.notes),
        "computed_in": case.computed_in,
        "warnings": list(case.warnings),
        "expected": [_make_expectation_record(expected) for expected in case.expected],
    }


def _describe_document_inputs(case: Case) -> dict[str, Any]:
    """Return, by input, the document's name of it and the digits that the document prints."""
    described: dict[str, Any] = {}
    for name, source in case.inputs.items():
        if isinstance(source, Reference):
            rows = source.rows or []
            is_slice = len(rows) > MAX_LISTED_ROWS and rows == list(range(rows[0], rows[-1] + 1))
            text = f"{rows[0]}:{rows[-1] + 1}" if is_slice else ",".join(map(str, rows))
            index = "" if source.rows is None else f"[{text}]"
            described[name] = {"called": f"{source.ref}{index}{'.T' if source.transpose else ''}"}
        named = case.arrays.get(source.ref) if isinstance(source, Reference) else source
        if isinstance(named, PrintedInput) and not (source.is_arranged or named.is_arranged):
            described.setdefault(name, {})["printed"] = parse_printed(named.printed, PrintedRounding()).text.tolist()
    return described


def _make_expectation_record(expected: ExpectedStage) -> dict[str, Any]:
    record = {name: getattr(expected, name) for name in ("name", "of", "basis", "transpose")}
    texts = {name: getattr(expected, name) for name in ("called", "because", "erratum", "note", "digits")}
    present = {name: text for name, text in texts.items() if text is not None}
    return record | {"shape": list(expected.shape)} | present


CASES_PER_PACK = 64
"""Cases of one file are similar, so that packed together they take a small part of their separate sizes."""

_MAX_UNPACKED = 32
"""Parts that are never packed, and parts that stay unpacked: a run iterates several times over its cases. Packing all
cases of a corpus takes as long as to judge some dozens of them."""


class PackedCases(Sequence[Case]):
    """A sequence of cases, packed after the first 2,048; a case that is unpacked twice is equal, but not identical."""

    def __init__(self, cases: Iterable[Case] = ()) -> None:
        self._parts: list[list[Case] | bytes] = []
        self._open: list[Case] = []
        self._order = array("L")
        for case in cases:
            self.append(case)

    def append(self, case: Case) -> None:
        """Add a case at the end."""
        self._order.append(len(self._parts) * CASES_PER_PACK + len(self._open))
        self._open.append(case)
        if len(self._open) == CASES_PER_PACK:
            self._parts.append(self._open if len(self._parts) < _MAX_UNPACKED else pack_value(self._open))
            self._open = []

    def reorder(self, order: Iterable[int]) -> None:
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
            return [self[position] for position in range(*index.indices(len(self)))]
        number, inside = divmod(self._order[index], CASES_PER_PACK)
        part = self._open if number == len(self._parts) else self._parts[number]
        return (_unpack_cases(part) if isinstance(part, bytes) else part)[inside]


@lru_cache(maxsize=_MAX_UNPACKED)
def _unpack_cases(part: bytes) -> list[Case]:
    cases: list[Case] = pickle.loads(zlib.decompress(part))
    return cases


_READING_PACKAGES = ("numpy", "pydantic", "PyYAML", "ruamel.yaml")
# 32 times the size that a case file may have (``yaml_reader.MAX_BYTES``): a larger file is refused without a digest.
_MAX_CACHED_BYTES = 1 << 24
_ALLOWED_CLASSES = frozenset(
    {
        *((array_kinds.__name__, name) for name in vars(array_kinds)),
        *((part.__module__, part.__name__) for part in (Case, ExpectedStage, Random, Source, TagEntry)),
        *((part.__module__, part.__name__) for part in (PrintedArray, Options)),
        *(("numpy", name) for name in ("dtype", "ndarray")),
        *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
        ("numpy._core.numeric", "_frombuffer"),
    }
)


def load_cached_case_file(path: Path, named: object, store: Store, load: Callable[[], list[Case]]) -> list[Case]:
    """Return the cached cases of a case file with this content and name (``named``), or else those of ``load``.

    Raises the errors of ``load``. A file with arrays in other files is read every time, since those may have changed.
    """
    cases = _load_cached(path, named, store, load, serialize_cases, deserialize_cases)
    return load() if any(map(_has_stored_arrays, cases)) else cases


def load_cached_tags(folder: Path, store: Store, load: Callable[[], dict[str, TagEntry]]) -> dict[str, TagEntry]:
    """Return the cached tags of a folder's tags.yaml, or else those of ``load``; raises the errors of ``load``."""
    return _load_cached(
        folder / TAG_FILE, TAG_FILE, store, load, pack_value, lambda data: _unpack_checked(data, dict, TagEntry)
    )


def _load_cached(
    path: Path,
    named: object,
    store: Store,
    load: Callable[[], Loaded],
    encode: Callable[[Loaded], bytes],
    decode: Callable[[bytes], Loaded],
) -> Loaded:
    """Return the result that the build or the store has for a file's bytes; call ``load`` if neither has one."""
    try:
        content = None if path.stat().st_size > _MAX_CACHED_BYTES else path.read_bytes()
    except OSError:
        content = None
    if content is None:
        return load()
    if (parsed := read_entry(cache_key(content, named))) is not None:
        return decode(parsed)
    if store.folder is None:
        return load()
    digest = digest_of(digest_of_code(READING_CODE_MODULES, _READING_PACKAGES), content, named)
    return store.get_or_compute(lambda: StoreKey("cases", digest), load, encode, decode)


def _has_stored_arrays(case: Case) -> bool:
    if any(expected.stored for expected in case.expected):
        return True
    pending = [*case.arrays.values(), *case.inputs.values()]
    while pending:
        source = pending.pop()
        if isinstance(source, array_kinds.StoredArray):
            return True
        pending += [part for _, part in array_kinds.array_parts_with_paths(source)]
    return False


def serialize_cases(cases: list[Case]) -> bytes:
    """Return cases as bytes, each with its digest."""
    for case in cases:
        assert case.digest
    return pack_value(cases)


def deserialize_cases(data: bytes) -> list[Case]:
    """Read cases that ``serialize_cases`` wrote. Raises ``UnreadableEntry``."""
    cases: list[Case] = _unpack_checked(data, list, Case)
    return cases


def pack_value(value: object) -> bytes:
    """Return cases or tags as bytes."""
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)


def _unpack_checked(data: bytes, collection: type, kind: type) -> Any:
    try:
        value = _CaseUnpickler(io.BytesIO(zlib.decompress(data))).load()
    except Exception as error:  # whatever bytes make of pickle's machine
        raise UnreadableEntry from error
    entries = value.values() if isinstance(value, dict) else value
    if not isinstance(value, collection) or not all(isinstance(entry, kind) for entry in entries):
        raise UnreadableEntry
    return value


class _CaseUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a case")
        return super().find_class(module, name)
