"""The bundled case files as the build of a wheel parsed them, in one file beside them.

Parsing the bundled YAML takes three seconds, and its result takes 0.4 MB. A build parses each case file with the code
that it ships (``parse_corpus.py``); a run reads the entry of a file when it needs it. The YAML stays the source: the
key of an entry is a digest of the reading code, of the file's content and of its name, so if any of them changed, there
is no entry and the file is parsed. An editable checkout has no such file; the user's store keeps what its runs parse.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

from attncheck.common.store import digest_of, digest_of_sources

FILE_NAME = "parsed.zip"
_READING_MODULES = ("reading", "spec", "backends.contract", "common")
READING_CODE_MODULES = tuple(f"attncheck.{part}" for part in _READING_MODULES)


def cache_key(content: bytes, name_and_tags: object) -> str:
    """Return the key of a case file: of its content, its name and the known tags; the same on every machine."""
    return digest_of(digest_of_sources(READING_CODE_MODULES), content, name_and_tags)


def read_entry(key: str) -> bytes | None:
    """Return the parsed cases under a key; None without an entry, or if the file is missing or damaged."""
    archive = _open_archive()
    try:
        return None if archive is None else archive.read(key)
    except (KeyError, BadZipFile, OSError):
        return None


@lru_cache
def _open_archive() -> ZipFile | None:
    path = Path(str(files("attncheck.cases"))) / FILE_NAME
    try:
        return ZipFile(path)
    except (OSError, BadZipFile):
        return None


def write_entries(path: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Write parsed cases by their keys. The same entries give the same bytes."""
    with ZipFile(path, "w") as archive:
        for key, data in sorted(entries):
            archive.writestr(ZipInfo(key), data)  # packed already, and dated 1980
