"""The JSON files of a results directory: checked when they are read, so that reports find all fields that they use.

Other fields are kept unchanged. Case records (cases.json) are packed, since as objects they may not fit in memory. The
records of two runs show if an id means the same case in both: the same computation, inputs and expectations.
"""

from __future__ import annotations

import json
import re
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from attncheck.common.errors import ResultsError
from attncheck.common.wording import ESCAPED_CHARACTERS, MAX_TEXT_LENGTH, WEB_ADDRESS, escape_to_one_line
from attncheck.results.coverage import MINIMUM_PATTERN
from attncheck.results.format import FORMAT_VERSION

_MAX_BYTES = 2**29
"""Limit of one JSON file: some hundred thousand cases."""
_MAX_DEPTH = 50


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A whole number that every format of a report can hold."""


_Int53 = Annotated[int, Field(ge=0, lt=2**53)]
"""A length that is exact as a float, too, which reports draw."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", defer_build=True)


class _CodeLocation(_Record):
    file: str
    line: Int32


class _RequestRecord(_Record):
    cases: list[str] = []
    tags: list[str] = []
    dtypes: list[str] = []
    match: list[str] = []
    failed: list[str] = []
    searched: list[str] = []
    by_name: list[str] = []
    own: list[str] = []
    widens: dict[str, str] = {}
    alike: dict[str, str] = {}
    confirmed: dict[str, list[str]] = {}
    min_judged: Annotated[str, Field(pattern=f"^(?:{MINIMUM_PATTERN.pattern})$")] | None = None


class EnvironmentRecord(_Record):
    """The environment of a run, its versions and its request: environment.json."""

    label: str
    command: str
    python: str
    platform: str
    cpu_features: list[str]
    isa: str | None = None
    processors: Int32 | None
    threads_per_worker: Int32
    versions: dict[str, str]
    flags: dict[str, Any]
    implementations: dict[str, str]
    classes: dict[str, dict[str, str | None]]
    left_out: dict[str, str]
    missing: dict[str, str]
    faults: list[str]
    started: Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}$")] = ""
    asked: _RequestRecord = _RequestRecord()
    sources: dict[str, _CodeLocation] = {}
    again: dict[str, list[str]] = {}


_Count = Annotated[int, Field(ge=0, lt=2**31)]


class _StopRecord(_Record):
    failing: _Count
    not_run: _Count
    in_part: _Count = 0


class SummaryRecord(_Record):
    """The outcome of a run: summary.json."""

    exit_code: Int32
    stopped: _StopRecord | None = None


class FailedFile(_Record):
    """The failures of the last run: failed.json."""

    format: Int32
    failed: list[Annotated[list[str], Field(min_length=3, max_length=3)]]
    selected: list[Annotated[list[str], Field(min_length=2, max_length=2)]] | None = None


class _SourceRecord(_Record):
    kind: str
    title: str
    author: str | None = None
    section: str | None = None
    url: Annotated[str, Field(pattern=WEB_ADDRESS)] | None = None
    notes: list[str] = []


class _ExpectationRecord(_Record):
    name: str
    of: str
    basis: str
    transpose: bool
    shape: list[_Int53]
    called: str = ""
    because: str = ""
    erratum: str = ""
    note: str = ""
    digits: str = ""


def _require_rectangular(printed: Any) -> Any:
    """Return printed numbers unchanged if they are texts in rows of one length; raise ``ValueError`` otherwise."""
    cells = np.array(printed, dtype=object)
    if cells.ndim > 4 or not all(isinstance(cell, str) for cell in cells.ravel()):
        raise ValueError("expected texts in rows of one length")
    return printed


class _PrintedInputRecord(_Record):
    called: str = ""
    printed: Annotated[Any, AfterValidator(_require_rectangular)] = ""


class _TagRecord(_Record):
    probes: str
    defect: str


class StoredCaseRecord(_Record):
    """One case of cases.json."""

    id: str
    name: str
    file: str
    path: str = ""
    line: Int32
    title: str
    source: _SourceRecord
    operation: str
    options: dict[str, Any]
    dtypes: list[str]
    inputs: dict[str, list[_Int53]]
    given: dict[str, _PrintedInputRecord] = {}
    tags: list[str]
    probes: dict[str, _TagRecord] = {}
    notes: list[str]
    computed_in: str | None = None
    warnings: list[str] = []
    expected: list[_ExpectationRecord]


Model = TypeVar("Model", bound=_Record)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object from a JSON file; None if there is no such file. Raises ``ResultsError`` for anything else."""
    try:
        require_readable(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} cannot be read: {error}; run the check again") from None
    if not isinstance(content, dict):
        raise ResultsError(f"{path} is not what `attncheck check` writes: expected a JSON object; run the check again")
    require_shallow(content, path)
    lines: dict[str, Any] = sanitize_text(content)
    return lines


def sanitize_text(content: Any) -> Any:
    r"""Return plain data in which every text and key is one printable line of limited length.

    Example:
        >>> sanitize_text({"note": ["two\nlines", 3]})
        {'note': ['two\\nlines', 3]}
    """
    if isinstance(content, str):
        return escape_to_one_line(content)
    if isinstance(content, dict):
        return {escape_to_one_line(name): sanitize_text(value) for name, value in content.items()}
    return [sanitize_text(value) for value in content] if isinstance(content, list) else content


def require_readable(path: Path) -> None:
    """Raise ``ResultsError`` for a file that is not regular or too large, ``OSError`` for a missing one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe, say
        raise ResultsError(f"{path} cannot be read: it is not a regular file")
    if status.st_size > _MAX_BYTES:
        raise ResultsError(f"{path} cannot be read: {status.st_size} bytes; expected at most {_MAX_BYTES}")


def require_shallow(content: object, path: Path) -> None:
    """Raise ``ResultsError`` if lists and objects are nested too deep."""
    depth, level = 0, [content]
    while level := [holder for holder in level if isinstance(holder, dict | list)]:
        depth += 1
        level = [held for holder in level for held in (holder.values() if isinstance(holder, dict) else holder)]
    if depth > _MAX_DEPTH:
        raise ResultsError(f"{path} cannot be read: nested more than {_MAX_DEPTH} levels deep")


def require_valid_record(content: Mapping[str, Any], model: type[Model], path: Path) -> None:
    """Raise ``ResultsError`` if a record lacks a field that reports use."""
    if fault := describe_first_fault(content, model):
        raise ResultsError(f"{path} is not what `attncheck check` writes: {fault}; run the check again")


def describe_first_fault(content: object, model: type[_Record]) -> str:
    """Describe the first fault of a record; empty if there is none."""
    try:
        model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        return f"it has no {field}" if first["type"] == "missing" else f"{field or 'it'}: {first['msg']}"
    return ""


_FIRST_LINE, _LAST_LINE = f'{{"format": {FORMAT_VERSION}, "cases": [\n', "]}\n"
MAX_UNPACKED = 2048
"""More cases than a corpus has: a report uses each of them many times, and packing them takes a tenth of a second."""
_ZLIB_WINDOW_BITS = -12
"""zlib's parameter for 4 KiB, without header or checksum. Few records are larger."""


class _PackedRecord(NamedTuple):
    """A record's text, compressed with an example as the dictionary."""

    text: bytes
    example: bytes


@lru_cache(maxsize=MAX_UNPACKED)
def _unpack(packed: _PackedRecord) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(zlib.decompressobj(_ZLIB_WINDOW_BITS, packed.example).decompress(packed.text))
    return record


class CaseRecords(Mapping[str, dict[str, Any]]):
    """Records by id. Of those that are added, all after the first 2,048 are packed: objects take twenty times as much.

    Callers must not change the returned records.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._records: dict[str, dict[str, Any] | _PackedRecord] = {}
        self._example = b""
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, or replace the one with its id. Raises ``ValueError`` for half a surrogate pair."""
        text = json.dumps(record, ensure_ascii=False).encode()
        if len(self._records) < MAX_UNPACKED:
            self._records[record["id"]] = json.loads(text)
            return
        self._example = self._example or text
        packer = zlib.compressobj(level=1, wbits=_ZLIB_WINDOW_BITS, zdict=self._example)
        self._records[record["id"]] = _PackedRecord(packer.compress(text) + packer.flush(), self._example)

    @classmethod
    def join(cls, several: Iterable[CaseRecords]) -> CaseRecords:
        """Join records, those of each in the order of their ids; the later of two with one id stays."""
        made = cls()
        made._records = {name: records._records[name] for records in several for name in sorted(records._records)}
        return made

    def __getitem__(self, identity: str) -> dict[str, Any]:
        record = self._records[identity]
        return _unpack(record) if isinstance(record, _PackedRecord) else record

    def __contains__(self, identity: object) -> bool:
        return identity in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def cases_json_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text of cases.json piece by piece, a case a line."""
    yield _FIRST_LINE.rstrip("\n")
    for number, record in enumerate(records):
        yield f"{',' if number else ''}\n{json.dumps(record, ensure_ascii=False)}"
    yield f"\n{_LAST_LINE}"


def read_cases(path: Path) -> tuple[CaseRecords, tuple[str, ...]]:
    """Read the usable case records, with a note if the file or a record is not usable."""
    try:
        require_readable(path)
        try:
            with path.open(encoding="utf-8") as file:
                return _pack_usable(_read_json_lines(file, path), path)
        except (ValueError, RecursionError, ResultsError):  # it has another layout, or is damaged
            return _pack_usable(_read_json_list(path), path)
    except FileNotFoundError:
        return CaseRecords(), ()
    except OSError as error:
        return CaseRecords(), (f"{path} cannot be read: {error}",)
    except ResultsError as error:
        return CaseRecords(), (str(error),)


def with_missing_records(cases: CaseRecords, identities: Collection[str]) -> CaseRecords:
    """Add a minimal record for every case that has rows and no record."""
    unnamed = sorted(set(identities) - set(cases))
    return CaseRecords.join([cases, CaseRecords(map(_minimal_record, unnamed))]) if unnamed else cases


def _read_json_lines(file: IO[str], path: Path) -> Iterator[Any]:
    """Read a file that ``cases_json_lines`` wrote. Raises ``ValueError`` for anything else."""
    if file.readline() != _FIRST_LINE:
        raise ValueError("another first line")
    for line in file:
        if line == _LAST_LINE and not file.read(1):
            return
        text = line.rstrip(",\n")
        record = json.loads(text)
        require_shallow(record, path)
        yield record if _is_plain(text) else sanitize_text(record)
    raise ValueError("another last line")


_JSON_ESCAPE = re.compile(r'\\[^"\\/]')
"""An escape other than of a quote, a backslash or a slash; also a letter after an escaped backslash."""


def _is_plain(text: str) -> bool:
    r"""Return whether ``sanitize_text`` certainly changes nothing in the values of a JSON text; it takes longer.

    Example:
        >>> _is_plain('{"a": "b \\" c"}'), _is_plain('{"a": "b\\n"}'), _is_plain('{"a": "\x1b"}')
        (True, False, False)
    """
    if ESCAPED_CHARACTERS.search(text) or _JSON_ESCAPE.search(text):
        return False
    return len(text) <= MAX_TEXT_LENGTH or max(map(len, text.split('"'))) <= MAX_TEXT_LENGTH


def _read_json_list(path: Path) -> list[Any]:
    listed = (read_json(path) or {}).get("cases")
    if not isinstance(listed, list):
        raise ResultsError(f"{path} is not what `attncheck check` writes: it has no cases; run the check again")
    return listed


def _pack_usable(listed: Iterable[Any], path: Path) -> tuple[CaseRecords, tuple[str, ...]]:
    cases, bad, count = CaseRecords(), [], 0
    for record in listed:
        count += 1
        if fault := describe_first_fault(record, StoredCaseRecord):
            bad.append(fault)
            continue
        try:
            cases.add(record)
        except UnicodeEncodeError:
            bad.append("it holds half of a surrogate pair, which is no text")
    if not bad:
        return cases, ()
    return cases, (f"{path}: {len(bad)} of {count} cases are not what `attncheck check` writes: {bad[0]}",)


def _minimal_record(identity: str) -> dict[str, Any]:
    file, _, name = identity.rpartition("/")
    source = {"kind": "unknown", "title": "unknown", "notes": []}
    called = {"id": identity, "name": name, "file": file, "line": 0, "title": file or identity, "source": source}
    lists: dict[str, list[str]] = {key: [] for key in ("dtypes", "tags", "notes", "expected")}
    return {**called, "operation": "", "options": {}, "inputs": {}, **lists}


_COMPUTATION_FIELDS = ("operation", "options", "inputs", "storage", "memory_layout", "merged")
"""The fields on which a case's numbers depend. Title, tags, notes and line may change, and dtypes may be added."""
_EXPECTATION_FIELDS = ("expected", "dtypes")

CasesById = Mapping[str, Mapping[str, Any]]


def differing_cases(cases: Mapping[str, CasesById]) -> dict[str, str]:
    """Return the cases whose computation differs between runs, given by label, and the first difference."""
    first: dict[str, str] = {}
    differing: dict[str, str] = {}
    for label, of_run in cases.items():
        for identity, case in of_run.items():
            if not case["operation"]:
                continue  # without a record of the case, its computation is unknown
            first_label = first.setdefault(identity, label)
            if first_label == label or identity in differing:
                continue
            if changes := describe_case_changes(cases[first_label][identity], case):
                differing[identity] = f"{changes[0]} ({first_label} and {label})"
    return differing


def describe_case_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], *, expectations: bool = False
) -> list[str]:
    """Describe the differences of a case, a line each; ``expectations`` adds its dtypes and expected numbers.

    Example:
        >>> describe_case_changes({"options": {"scale": 1.0}, "name": "a"}, {"options": {"scale": 2.0}, "name": "b"})
        ["options {'scale': 1.0} became {'scale': 2.0}"]
    """
    names = (*_COMPUTATION_FIELDS, *_EXPECTATION_FIELDS) if expectations else _COMPUTATION_FIELDS
    return [
        f"{name} {_abbreviate(before.get(name))} became {_abbreviate(after.get(name))}"
        for name in names
        if (before.get(name) or None) != (after.get(name) or None)
    ]


def first_differing_input(inputs: Mapping[str, Mapping[str, NDArray[Any]]]) -> str:
    """Name an input that differs between runs, given by label; empty if all bits are equal."""
    labels = list(inputs)
    for label in labels[1:]:
        first, second = inputs[labels[0]], inputs[label]
        for name in sorted(first.keys() | second.keys()):
            arrays = (of_one[name] for of_one in (first, second) if name in of_one)
            contents = [(array.shape, array.dtype, array.tobytes()) for array in arrays]
            if contents[:-1] != contents[1:] or len(contents) < 2:
                return f"the input {name} differs ({labels[0]} and {label})"
    return ""


def _abbreviate(value: object) -> str:
    text = "nothing" if value in (None, {}, []) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
