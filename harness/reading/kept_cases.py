"""Cases in a packed form: in memory some dozens together, and on the disk under every byte of their file.

What is kept on the disk is unpickled, but only into the classes of a case: an entry that names anything else is none.
"""

from __future__ import annotations

import io
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

from attncheck.reading import array_kinds
from attncheck.reading.case import Case
from attncheck.reading.model import TAG_FILE, TagEntry
from attncheck.store import Key, Store, UnreadableEntry, digest_of, digest_of_code

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
        parts = self._parts  # not ourselves, or only the garbage collector would ever free us
        self._part = lru_cache(maxsize=_UNPACKED)(lambda part: _unpack(parts[part]))
        for case in cases:
            self.append(case)

    def __reduce__(self) -> tuple[Callable[..., PackedCases], tuple[list[bytes], list[Case], array[int]]]:
        return _restored, (self._parts, self._open, self._order)  # sent to another process they stay packed

    def append(self, case: Case) -> None:
        """Add a case at the end."""
        self._order.append(len(self._parts) * TOGETHER + len(self._open))
        self._open.append(case)
        if len(self._open) == TOGETHER:
            self._parts.append(zlib.compress(pickle.dumps(self._open, pickle.HIGHEST_PROTOCOL), 1))
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
        return self._open[inside] if part == len(self._parts) else self._part(part)[inside]


def _restored(parts: list[bytes], opened: list[Case], order: array[int]) -> PackedCases:
    cases = PackedCases(opened)
    cases._parts.extend(parts)
    cases._order = order
    return cases


def _unpack(part: bytes) -> list[Case]:
    found: list[Case] = pickle.loads(zlib.decompress(part))
    return found


_PARTS = ("reading", "spec", "backends.contract", "dtypes", "errors", "store", "wording")
_CODE = tuple(f"attncheck.{part}" for part in _PARTS)
_READS_WITH = ("numpy", "pydantic", "PyYAML", "ruamel.yaml")
_LARGEST_FILE = 1 << 24
_OF_CASES = frozenset(
    {
        *((array_kinds.__name__, name) for name in vars(array_kinds)),
        *(("attncheck.reading.case", name) for name in ("Case", "Expected")),
        *(("attncheck.reading.model", name) for name in ("Random", "Source", "TagEntry")),
        ("attncheck.reading.printed", "PrintedArray"),
        ("attncheck.spec.options", "Options"),
    }
)
_OF_ARRAYS = frozenset(
    {
        *(("numpy", name) for name in ("dtype", "ndarray")),
        *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
        ("numpy._core.numeric", "_frombuffer"),
    }
)


def load_kept_case_file(
    path: Path, display_name: str, id_prefix: str, known_tags: Iterable[str], store: Store
) -> list[Case]:
    """Do as ``load_case_file`` does, unless the same file was read before. Raises ``CaseError``.

    A file of cases whose arrays lie in files of their own is read every time: those may have changed.
    """
    tags = sorted(known_tags)

    def load() -> list[Case]:
        from attncheck.reading.loader import load_case_file

        return load_case_file(path, display_name, id_prefix, tags)

    content = None if store.folder is None else _content_of(path)
    if content is None:
        return load()
    digest = digest_of(_reading_version(), content, display_name, id_prefix, tags)
    cases = store.remembered(lambda: Key("cases", digest), load, cases_to_bytes, cases_from_bytes)
    return load() if any(map(_has_stored_arrays, cases)) else cases


def load_kept_tags(folder: Path, display_name: str, store: Store) -> dict[str, TagEntry]:
    """Read a folder's tags.yaml, unless the same file was read before. Raises ``CaseError``."""

    def load() -> dict[str, TagEntry]:
        from attncheck.reading.loader import load_tags

        return load_tags(folder, display_name)

    content = None if store.folder is None else _content_of(folder / TAG_FILE)
    if content is None:
        return load()
    digest = digest_of(_reading_version(), TAG_FILE, content)
    return store.remembered(lambda: Key("cases", digest), load, _packed, _tags_from_bytes)


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


@lru_cache
def _reading_version() -> str:
    return digest_of_code(_CODE, _READS_WITH)


def _content_of(path: Path) -> bytes | None:
    """Return the bytes of a file; None where reading it the usual way has to say what is wrong with it."""
    try:
        return path.read_bytes() if path.stat().st_size <= _LARGEST_FILE else None
    except OSError:
        return None


def cases_to_bytes(cases: list[Case]) -> bytes:
    """Write cases down, each with its digest."""
    for case in cases:
        assert case.digest
    return _packed(cases)


def cases_from_bytes(data: bytes) -> list[Case]:
    """Read cases that ``cases_to_bytes`` wrote. Raises ``UnreadableEntry``."""
    found = _unpacked(data)
    if not (isinstance(found, list) and all(isinstance(each, Case) for each in found)):
        raise UnreadableEntry
    return found


def _tags_from_bytes(data: bytes) -> dict[str, TagEntry]:
    found = _unpacked(data)
    if not (isinstance(found, dict) and all(isinstance(each, TagEntry) for each in found.values())):
        raise UnreadableEntry
    return found


def _packed(found: object) -> bytes:
    return zlib.compress(pickle.dumps(found, pickle.HIGHEST_PROTOCOL), 1)


def _unpacked(data: bytes) -> Any:
    try:
        return _CasesAlone(io.BytesIO(zlib.decompress(data))).load()
    except Exception as error:  # whatever bytes make of pickle's machine
        raise UnreadableEntry from error


class _CasesAlone(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_CASES and (module, name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a case")
        return super().find_class(module, name)
