"""Folders of ONNX's tests read into a folder of cases: a file for each operator, and the arrays of each case beside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from attncheck.errors import CaseError, OutputError
from attncheck.onnx_data.attention_import import attention_entry
from attncheck.onnx_data.entries import Entry
from attncheck.onnx_data.files import BackendTest, NotACase, folders_of, read_tests
from attncheck.onnx_data.softmax import softmax_entry
from attncheck.reading.loader import case_of_data
from attncheck.reading.slugs import slug

_ENTRIES: Mapping[str, Callable[[BackendTest], Entry]] = {"Attention": attention_entry, "Softmax": softmax_entry}
_MAX_NAMED = 3


@dataclass
class Imported:
    """The cases that were written by their files, and the tests that were left out by the reason.

    ``notes`` say of cases what of their tests they do not say.
    """

    files: dict[Path, int] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)


def import_tests(folder: Path, output: Path) -> Imported:
    """Write the tests of a folder as cases. Raises ``OnnxDataError``, and ``OutputError`` where files are there."""
    importing = _Importing(output)
    try:
        for place in folders_of(folder):
            importing.take(place)
        return importing.finish()
    except BaseException:  # half of a folder of cases is none
        for path in importing.written:
            path.unlink(missing_ok=True)
        raise


@dataclass
class _Importing:
    """What an import has come to: the entries of each file, and the paths that were ``written``."""

    output: Path
    found: Imported = field(default_factory=Imported)
    cases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)

    def take(self, place: Path) -> None:
        """Make cases of the data sets of a test, or say why not."""
        try:
            for test in read_tests(place):
                self._take(test)
        except NotACase as reason:
            self.found.left_out.setdefault(str(reason), []).append(place.resolve().name)

    def _take(self, test: BackendTest) -> None:
        try:
            entry = _ENTRIES[test.operator](test)
        except ValueError as error:  # NumPy's, of arrays that do not go together
            raise NotACase(f"shapes that do not fit together: {error}") from None
        entries, identity = self.cases.setdefault(entry.operation, {}), slug(test.name)
        if identity in entries:
            raise NotACase("another test of the same name")
        arrays = Path("arrays") / f"{test.name}.npz"
        checksum = self._write_arrays(self.output / arrays, entry)
        data = entry.data(test.name, identity, {"file": arrays.as_posix(), "sha256": checksum})
        try:
            case_of_data(_file(entry.operation, [data]), self.output, f"{entry.operation}/{identity}")
        except CaseError as error:
            (self.output / arrays).unlink()
            [first, *_] = error.faults
            said = ": ".join(filter(None, ["what no case may be", first.field, first.message]))
            raise NotACase(said) from None
        entries[identity] = data
        for note in entry.notes:
            self.found.notes.setdefault(note, []).append(test.name)

    def _write_arrays(self, path: Path, entry: Entry) -> str:
        """Write the arrays of a case, and return the checksum of their file."""
        content = BytesIO()
        np.savez(content, **entry.beside)  # type: ignore[arg-type] # whose stubs know no mapping of arrays
        self._write(path, content.getvalue())
        return hashlib.sha256(content.getvalue()).hexdigest()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                self.written.append(path)
                file.write(content)
        except FileExistsError:
            raise OutputError(f"{path} is already there; remove it, or name another folder with --output") from None
        except OSError as error:
            raise OutputError.of(path, error) from None

    def finish(self) -> Imported:
        """Write the case files."""
        for operation, entries in self.cases.items():
            if entries:
                path = self.output / f"{operation}.yaml"
                file = _file(operation, list(entries.values()))
                self._write(path, yaml.safe_dump(file, sort_keys=False, width=120, allow_unicode=True).encode())
                self.found.files[path] = len(entries)
        return self.found


def _file(operation: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    operator = operation.capitalize()
    notes = "Inputs and outputs are those of the tests, to the last bit. Outputs are compared with the exact answer."
    return {
        "title": f"ONNX's tests of {operator}",
        "source": {
            "kind": "document",
            "title": "ONNX backend test data",
            "author": "the ONNX authors",
            "section": f"node tests of {operator}",
            "notes": [notes],
        },
        "operation": operation,
        "cases": entries,
    }


def lines_of(imported: Imported) -> Iterator[str]:
    """Say what was read and what was not."""
    for path, count in imported.files.items():
        yield f"{count:,} cases: {path}"
    for note, names in imported.notes.items():
        yield f"noted in {_counted(names)}: {note}"
    for reason, names in imported.left_out.items():
        yield f"left out: {_counted(names)}: {reason}"


def _counted(names: list[str]) -> str:
    listed = ", ".join(names[:_MAX_NAMED])
    return f"{len(names):,} ({listed}{', ...' if len(names) > _MAX_NAMED else ''})"
