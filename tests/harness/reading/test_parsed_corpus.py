"""The cases that a build parses: equal to the YAML, found without parsing, and ignored if anything changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from attncheck.common.store import NO_STORE
from attncheck.reading import loader, parsed_corpus
from attncheck.reading.parse_corpus import parse_bundled_files
from attncheck.reading.parsed_corpus import FILE_NAME, cache_key, read_entry, write_entries
from attncheck.reading.selection import bundled_case_files, find_bundled_cases_folder, select_cases


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the parsed corpus to a folder."""
    path = tmp_path_factory.mktemp("parsed") / FILE_NAME
    write_entries(path, parse_bundled_files())
    return path


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Return a function that names the folder of the parsed corpus."""

    def name_folder(folder: Path) -> None:
        monkeypatch.setattr(parsed_corpus, "files", lambda package: folder)
        parsed_corpus._open_archive.cache_clear()

    yield name_folder
    parsed_corpus._open_archive.cache_clear()


def test_a_run_reads_the_parsed_cases_and_they_are_those_of_the_yaml(
    archive: Path, read_from: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_yaml = {case.id: case.digest for case in select_cases(()).cases}
    read_from(archive.parent)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError(f"{arguments[0]} is parsed")

    monkeypatch.setattr(loader, "load_case_file", refuse)
    assert {case.id: case.digest for case in select_cases((), store=NO_STORE).cases} == from_yaml


def test_a_wheel_has_an_entry_for_every_bundled_file() -> None:
    if not (find_bundled_cases_folder() / FILE_NAME).exists():
        pytest.skip("an editable checkout has no parsed cases: the YAML is read")
    tags = sorted(select_cases(()).tags)
    missing = [
        file.name
        for file in bundled_case_files()
        if read_entry(cache_key(file.path.read_bytes(), (file.name, file.id_prefix, tags))) is None
    ]
    assert not missing


def test_the_same_cases_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    with ZipFile(archive) as parsed:
        entries = [(name, parsed.read(name)) for name in parsed.namelist()]
    write_entries(tmp_path / FILE_NAME, reversed(entries))
    assert (tmp_path / FILE_NAME).read_bytes() == archive.read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 damaged"])
def test_a_missing_or_damaged_file_has_no_entry(
    content: bytes | None, tmp_path: Path, read_from: Callable[[Path], None]
) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    read_from(tmp_path)
    assert read_entry(cache_key(b"cases: []", "name")) is None
