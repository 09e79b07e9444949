"""The store of results that never change: entries in the user's cache folder, by a digest of everything they depend on.

A store keeps facts about problems, never results of implementations. Every entry has a checksum and the key under which
it was written, so that a damaged or foreign file is not an entry. Entries are written to a temporary file and renamed,
so that several processes can share a store. If the folder is not writable, the store keeps nothing.

A key is a digest of everything on which an entry depends: equal values have equal digests in every process. Numbers
count with every bit, arrays with dtype and shape, mappings and sets without regard to order, dataclasses and models
with the name of their class. A tuple has the digest of a list. Any other type is an error, so that nothing is left out.

If a store is full, the entries that were not used for the longest time are removed first. An entry that is large and
quickly made again counts as used up to a day earlier than an entry that is small and takes long. The file's time of
modification is the time of use, so that no entry has to be read for it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import thread_time, time
from typing import Any, TypeVar, cast

import numpy as np

_DIGEST_BYTES = 16  # bytes of a digest: 128 bits are enough that different values do not collide


def digest_of(*parts: Any) -> str:
    """Return a digest, in hexadecimal. Raises ``TypeError`` for what is not plain data.

    Example:
        >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}), digest_of((1, 2)) == digest_of([1, 2])
        (True, True)
        >>> digest_of(np.float32([0.0])) == digest_of(np.float64([0.0])), digest_of(0.0) == digest_of(-0.0)
        (False, False)
    """
    return _hex_digest(json.dumps(parts, default=_to_plain_data, sort_keys=True).encode())


def _hex_digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _to_plain_data(value: Any) -> Any:
    """Return an object that JSON does not know as plain data."""
    match value:
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.hasobject:
                return {"objects": array.tolist(), "shape": array.shape}
            data = _hex_digest(np.ascontiguousarray(array).tobytes())
            return {"array": data, "dtype": array.dtype.name, "shape": array.shape}
        case Mapping():
            return dict(value)
        case Set():
            content: Any = sorted(value)
        case bytes():
            content = _hex_digest(value)
        case Enum():
            content = value.name
        case _ if isinstance(value, getattr(sys.modules.get("pydantic"), "BaseModel", ())):
            # Importing pydantic takes workers, which have no models, too long.
            content = cast(Any, value).model_dump_json()
        case _ if is_dataclass(value) and not isinstance(value, type):
            content = {item.name: getattr(value, item.name) for item in fields(value)}
        case _:
            raise TypeError(f"no digest is known for {type(value).__name__}")
    return {type(value).__name__: content}


@lru_cache
def digest_of_code(modules: tuple[str, ...], distributions: tuple[str, ...]) -> str:
    """Return a digest of the sources of modules, and of the versions of Python and distributions that they use.

    Args:
        modules: As in ``digest_of_sources``.
        distributions: Installed distributions whose version counts, in addition to Python's.
    """
    versions = [(name, _installed_version(name)) for name in distributions]
    return digest_of(digest_of_sources(modules), sys.version, versions)


@lru_cache
def digest_of_sources(modules: tuple[str, ...]) -> str:
    """Return a digest of the sources of modules and packages, by the names by which they are imported.

    Everything below a package counts.
    """
    return digest_of(
        [(name, path.as_posix(), (root / path).read_bytes()) for name in modules for root, path in _source_files(name)]
    )


def _source_files(name: str) -> Iterable[tuple[Path, Path]]:
    """Return the files of a module, each below a folder."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {name!r}")
    folder = Path(spec.origin).parent
    paths = sorted(folder.rglob("*.py")) if spec.submodule_search_locations else [Path(spec.origin)]
    return ((folder, path.relative_to(folder)) for path in paths)


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


CACHE_VARIABLE = "ATTNCHECK_CACHE"
"""Names another folder than the user's cache folder."""
STORE_FOLDER = "store"
_TRIMMED_FILE = ".trimmed"
"""The file whose time of modification is that of the last ``trim``."""
_FEW_ENTRIES = 1000
"""A run adds fewer if only a kernel has changed; they take a few megabytes."""
DEFAULT_STORE_BYTES = int(0.13 * 2**30)
"""Bytes that a store may take, on disk."""

_MAGIC = b"attncheck store 2\n"
_CHECKSUM_BYTES = 16  # 128 bits: no damage goes unnoticed by chance
_LEAD_STRUCT = struct.Struct("<d")
"""The seconds by which an entry counts as used earlier than it was."""
_LONGEST_LEAD = 24 * 3600.0
"""The lead of an entry that takes no time to make: one that was not used for a day is about to go anyway."""
_HEADING_BYTES = len(_MAGIC) + _CHECKSUM_BYTES + _LEAD_STRUCT.size
_LARGEST_SHARE = 8
"""An entry may take at most an eighth of the store. A choice: a larger part lets a few entries evict all others, a
smaller one computes the largest exact answers again in every run."""
_TOUCH_SECONDS = 3600
"""The time of use of an entry is written at most once in this time. A choice: ``trim`` needs the order of days; a
shorter time writes to the disk in every run."""

_COUNTED_EVENTS = ("found", "missing", "damaged", "kept", "not kept")

Result = TypeVar("Result")


def cache_folder() -> Path:
    """Return the folder of everything that can be made again; it may be deleted at any time."""
    import platformdirs

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("attncheck"))


@dataclass(frozen=True)
class StoreKey:
    """The key of an entry: its kind, and a digest of everything that it follows from."""

    kind: str
    digest: str


class UnreadableEntry(Exception):
    """The content of an entry does not have the form of its kind."""


@dataclass(eq=False)
class Store:
    """Entries below a folder; without a folder, a store that keeps nothing.

    Attributes:
        folder: Where the entries are.
        size: Bytes that they may take together, after ``trim``.
        counts: What happened so far: ``found``, ``missing``, ``damaged``, ``kept``, ``not kept``.
    """

    folder: Path | None
    max_bytes: int = DEFAULT_STORE_BYTES
    event_counts: Counter[str] = field(default_factory=Counter)

    @property
    def summary(self) -> str:
        """The hits and misses so far, in words."""
        if self.folder is None:
            return "not used"
        counted = ", ".join(
            f"{self.event_counts[what]} {what}"
            for what in _COUNTED_EVENTS
            if self.event_counts[what] or what == "found"
        )
        return f"{counted} in {self.folder}"

    def get_or_compute(
        self,
        key: Callable[[], StoreKey],
        compute: Callable[[], Result],
        encode: Callable[[Result], bytes],
        decode: Callable[[bytes], Result],
    ) -> Result:
        """Return the result kept under a key, or compute and keep it. The key is made only if the store keeps anything.

        ``decode`` raises ``UnreadableEntry`` for what it cannot read.
        """
        if self.folder is None:
            return compute()
        made = key()
        data = self.get(made)
        if data is not None:
            try:
                return decode(data)
            except UnreadableEntry:
                self.count_as_damaged()
        began = thread_time()
        result = compute()
        self.put(made, encode(result), thread_time() - began)
        return result

    def get(self, key: StoreKey) -> bytes | None:
        """Return the data kept under a key; None without an entry, or if it is damaged."""
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            with path.open("rb") as file:
                entry, last_used = file.read(), os.fstat(file.fileno()).st_mtime
        except OSError:
            self.event_counts["missing"] += 1
            return None
        lead, data = entry[len(_MAGIC) + _CHECKSUM_BYTES : _HEADING_BYTES], entry[_HEADING_BYTES:]
        if entry[:_HEADING_BYTES] != _make_heading(key, lead, data):
            self.event_counts["damaged"] += 1
            return None
        now, (seconds,) = time(), _LEAD_STRUCT.unpack(lead)
        if abs(now - seconds - last_used) > _TOUCH_SECONDS:
            with suppress(OSError):
                os.utime(path, (now, now - seconds))
        self.event_counts["found"] += 1
        return data

    def count_as_damaged(self) -> None:
        """Count an entry that was whole and could not be read: it was none after all."""
        self.event_counts["found"] -= 1
        self.event_counts["damaged"] += 1

    def put(self, key: StoreKey, data: bytes, seconds: float = math.inf) -> None:
        """Keep something under a key, unless it is too large, or cannot be written.

        ``seconds`` is the time that it takes to make it again: an entry that takes long for its size is kept longer.
        """
        if self.folder is None or len(data) > self.max_bytes // _LARGEST_SHARE:
            return
        path, early = self._path(key), _LONGEST_LEAD / (1 + seconds * 2**20 / max(len(data), 1))
        lead = _LEAD_STRUCT.pack(early)
        try:
            _write_entry(path, _make_heading(key, lead, data) + data, time() - early)
        except OSError:
            self.event_counts["not kept"] += 1
        else:
            self.event_counts["kept"] += 1

    def trim(self, min_interval: float = 0.0) -> None:
        """Remove the entries that were not used for the longest time until the rest fits; if any was added at all.

        Nothing is done if few entries were added, and the last time was less than ``min_interval`` seconds ago: to list
        thousands of entries takes as long as to judge hundreds.
        """
        if self.folder is None or not self.event_counts["kept"]:
            return
        marker = self.folder / _TRIMMED_FILE
        with suppress(OSError):
            is_recent = 0 <= time() - marker.stat().st_mtime < min_interval
            if is_recent and self.event_counts["kept"] < _FEW_ENTRIES:
                return
        entries = sorted(_list_entries(self.folder), reverse=True)
        taken = 0
        for _, size, path in entries:
            taken += size
            if taken > self.max_bytes:
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            marker.touch()

    def _path(self, key: StoreKey) -> Path:
        assert self.folder is not None
        return self.folder / key.kind / key.digest[:2] / key.digest[2:]


NO_STORE = Store(None)
"""Keeps nothing."""


def user_store(size: int = DEFAULT_STORE_BYTES) -> Store:
    """Return the store in the user's cache folder; a store that keeps nothing if other users may write there."""
    folder = cache_folder() / STORE_FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return NO_STORE
    if hasattr(os, "getuid"):
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return NO_STORE
    return Store(folder, size)


def _make_heading(key: StoreKey, lead: bytes, data: bytes) -> bytes:
    checksum = blake2b(f"{key.kind}/{key.digest}\n".encode(), digest_size=_CHECKSUM_BYTES)
    checksum.update(lead)
    checksum.update(data)
    return _MAGIC + checksum.digest() + lead


def _write_entry(path: Path, entry: bytes, used: float) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(entry)
        os.utime(temporary, (used, used))
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _list_entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of last use, the bytes on disk and the path of each entry, unfinished ones included."""
    waiting = [os.fspath(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, getattr(status, "st_blocks", 0) * 512 or status.st_size, Path(entry.path)
