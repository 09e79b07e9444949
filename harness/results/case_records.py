"""The case records of a results directory, cases.json: there may be more of them than fit in memory as objects."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from attncheck.errors import ResultsError
from attncheck.results.format import FORMAT
from attncheck.results.records import CaseRecord, fault_in, read_json, require_readable, require_shallow

_FIRST_LINE, _LAST_LINE = f'{{"format": {FORMAT}, "cases": [\n', "]}\n"
_UNPACKED = 2048
"""More cases than a corpus has: a report comes back to each of them many times."""
_WINDOW = -12
"""As zlib counts: 4 KiB, without header or checksum. Few records are larger."""


class _Packed(NamedTuple):
    """A record's text, packed by what it has in common with an example."""

    text: bytes
    example: bytes


@lru_cache(maxsize=_UNPACKED)
def _unpacked(packed: _Packed) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(zlib.decompressobj(_WINDOW, packed.example).decompress(packed.text))
    return record


class CaseRecords(Mapping[str, dict[str, Any]]):
    """Records by id, packed: as objects they take twenty times as much. Those asked for last stay unpacked.

    Nobody changes what is handed out.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._packed: dict[str, _Packed] = {}
        self._example = b""
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, in the place of an earlier one with its id."""
        text = json.dumps(record).encode()
        self._example = self._example or text
        packer = zlib.compressobj(level=1, wbits=_WINDOW, zdict=self._example)
        self._packed[record["id"]] = _Packed(packer.compress(text) + packer.flush(), self._example)

    @classmethod
    def together(cls, several: Iterable[CaseRecords]) -> CaseRecords:
        """Put records together, those of each in the order of their ids; of two with one id, the later stays."""
        made = cls()
        made._packed = {identity: packed for each in several for identity, packed in sorted(each._packed.items())}
        return made

    def __getitem__(self, identity: str) -> dict[str, Any]:
        return _unpacked(self._packed[identity])

    def __contains__(self, identity: object) -> bool:
        return identity in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def cases_text(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Give the text of cases.json piece by piece, a case a line."""
    yield _FIRST_LINE.rstrip("\n")
    for number, record in enumerate(records):
        yield f"{',' if number else ''}\n{json.dumps(record, ensure_ascii=False)}"
    yield f"\n{_LAST_LINE}"


def read_cases(path: Path) -> tuple[CaseRecords, tuple[str, ...]]:
    """Read the usable case records, with a note where the file or one of them is not usable."""
    try:
        require_readable(path)
        try:
            with path.open(encoding="utf-8") as file:
                return _usable(_line_by_line(file, path), path)
        except (ValueError, RecursionError, ResultsError):  # somebody laid it out in another way, or it is damaged
            return _usable(_whole(path), path)
    except FileNotFoundError:
        return CaseRecords(), ()
    except OSError as error:
        return CaseRecords(), (f"{path} cannot be read: {error}",)
    except ResultsError as error:
        return CaseRecords(), (str(error),)


def with_unnamed(cases: CaseRecords, identities: Collection[str]) -> CaseRecords:
    """Add a bare record for every case that has rows and no record of its own."""
    unnamed = sorted(set(identities) - set(cases))
    return CaseRecords.together([cases, CaseRecords(map(_unnamed, unnamed))]) if unnamed else cases


def _line_by_line(file: IO[str], path: Path) -> Iterator[Any]:
    """Read what ``cases_text`` gives. Raises ``ValueError`` for anything else."""
    if file.readline() != _FIRST_LINE:
        raise ValueError("another first line")
    for line in file:
        if line == _LAST_LINE and not file.read(1):
            return
        record = json.loads(line.rstrip(",\n"))
        require_shallow(record, path)
        yield record
    raise ValueError("another last line")


def _whole(path: Path) -> list[Any]:
    content = read_json(path)
    listed = None if content is None else content.get("cases")
    if not isinstance(listed, list):
        raise ResultsError(f"{path} is not what `attncheck check` writes: it has no cases")
    return listed


def _usable(listed: Iterable[Any], path: Path) -> tuple[CaseRecords, tuple[str, ...]]:
    cases, bad, count = CaseRecords(), [], 0
    for record in listed:
        count += 1
        if fault := fault_in(record, CaseRecord):
            bad.append(fault)
        else:
            cases.add(record)
    if not bad:
        return cases, ()
    return cases, (f"{path}: {len(bad)} of {count} cases are not what `attncheck check` writes: {bad[0]}",)


def _unnamed(identity: str) -> dict[str, Any]:
    file, _, name = identity.rpartition("/")
    return {
        "id": identity,
        "name": name,
        "file": file,
        "line": 0,
        "title": file or identity,
        "source": {"kind": "unknown", "title": "unknown", "notes": []},
        "operation": "",
        "options": {},
        "dtypes": [],
        "inputs": {},
        "tags": [],
        "notes": [],
        "expected": [],
    }
