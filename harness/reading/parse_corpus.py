"""Parse the bundled case files when a wheel is built: ``python -m attncheck.reading.parse_corpus FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from attncheck.reading.case import pack_value, serialize_cases
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.model import TAG_FILE
from attncheck.reading.parsed_corpus import cache_key, write_entries
from attncheck.reading.selection import BUNDLED_PREFIX, bundled_case_files, find_bundled_cases_folder


def parse_bundled_files() -> Iterator[tuple[str, bytes]]:
    """Yield the key and the parsed content of the bundled tags and of each bundled case file.

    Raises ``CaseError`` if one is wrong.
    """
    folder = find_bundled_cases_folder()
    tags = load_tags(folder, f"{BUNDLED_PREFIX}/{TAG_FILE}")
    yield cache_key((folder / TAG_FILE).read_bytes(), TAG_FILE), pack_value(tags)
    for file in bundled_case_files():
        named = file.name, file.id_prefix, sorted(tags)
        yield cache_key(file.path.read_bytes(), named), serialize_cases(load_case_file(file.path, *named))


if __name__ == "__main__":
    write_entries(Path(sys.argv[1]), parse_bundled_files())
