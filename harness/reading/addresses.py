"""What people call one case: its id, a glob that only it matches, or its file with a part of its name.

    attention/a-query-that-may-attend-to-nothing-gets-zeros      an id: of a bundled case, or of one's own
    my_cases/a.yaml                                              a file with one case
    my_cases/a.yaml::equal keys                                  a file, and what only one of its names has in it
    my_cases/a.yaml/two-equal-keys                               the same

An id of one's own leads to its file where that lies below the folder that one is in, or among the project's cases
(``[tool.attncheck]`` in its pyproject.toml).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from attncheck.errors import CaseError, UsageError
from attncheck.reading.case import Case
from attncheck.reading.selection import (
    BUNDLED,
    Selection,
    bundled_root,
    exists,
    names_near,
    select_cases,
    shown_text,
)
from attncheck.reading.slugs import slug
from attncheck.reading.tiles import TEMPLATE, tiles_named

BEHIND_FILE = "::"
"""Stands between a file and a part of a name."""
_SPLIT = re.compile(r"::|/")
_SUFFIXES = (".yaml", ".yml")
_MAX_LISTED = 20


class NoSuchCase(UsageError):
    """Nothing is called so."""


def address(identity: str, path: str) -> str:
    """Return what leads to a case: its id, or with a ``path`` that, and its own name as it stands in the id."""
    return f"{path}{BEHIND_FILE}{identity.rpartition('/')[2]}" if path else identity


def select_one(
    wanted: str, configured: Sequence[str] = (), base: Path | None = None, lists: Sequence[Path] = ()
) -> tuple[Case, Selection]:
    """Return the one case that is meant, and the selection that it is in, for its tags.

    ``configured`` are the project's own files and folders, ``lists`` those of expected failures among them. Raises
    ``NoSuchCase`` or ``UsageError`` for none or several, ``CaseError`` where its file cannot be read.
    """
    selection = _candidates(wanted, configured, base or Path.cwd(), lists)
    if selection.faults:
        raise CaseError(list(selection.faults))
    return find_case(selection.cases, wanted), selection


def find_case(cases: Sequence[Case], wanted: str) -> Case:
    """Return the one case that is meant. Raises ``UsageError`` for none or several."""
    exact = [case for case in cases if case.id == wanted]
    if len(exact or cases) == 1:
        return (exact or cases)[0]
    raise UsageError(f"{wanted!r} matches {len(cases)} cases; name one of them:\n{_listed(cases)}")


def _listed(cases: Sequence[Case]) -> str:
    lines = [f"  {case.id}" for case in cases[:_MAX_LISTED]]
    return "\n".join([*lines, *([f"  and {len(cases) - len(lines)} more"] if len(cases) > len(lines) else [])])


def _candidates(wanted: str, configured: Sequence[str], base: Path, lists: Sequence[Path]) -> Selection:
    for file, part in _splits(wanted, base):
        tiles = tiles_named([slug(part)]) if _is_template(file) else ()
        return _with_part(select_cases([file], base=base, expected_failures=lists, tiles=tiles), part, file)
    prefix, _, name = wanted.rpartition("/")
    tiles = tiles_named([name]) if prefix == TEMPLATE else ()
    for files in (_files_called(base, prefix), _bundled_files(prefix)):
        if files and (found := _with_id(select_cases(files, base=base, tiles=tiles), name)):
            return found
    try:
        return select_cases([wanted], base=base, expected_failures=lists)
    except UsageError:
        if exists(base / wanted):
            raise
    if configured:
        selection = select_cases(configured, base=base, expected_failures=lists)
        matching = [case for case in selection.cases if fnmatchcase(case.id, wanted)]
        if matching or selection.faults:
            return replace(selection, cases=matching, faults=() if matching else selection.faults)
    raise NoSuchCase(
        f"there is no case {wanted!r}: expected its id, a glob over the bundled cases, a file with one case, or "
        f"FILE.yaml{BEHIND_FILE}PART of a name; `attncheck list cases` and `attncheck list cases FILE.yaml` list ids"
        f"{names_near(wanted)}"
    )


def _splits(wanted: str, base: Path) -> Iterator[tuple[str, str]]:
    """Yield where a text may be a file, one's own or a bundled one, and a part of a name behind it."""
    for found in _SPLIT.finditer(wanted):
        file, part = wanted[: found.start()], wanted[found.end() :]
        if not file.endswith(_SUFFIXES) or not part:
            continue
        if own := _file_at(base / file):
            yield str(own), part
        elif _bundled_files(file.rpartition(".")[0].removeprefix(f"{BUNDLED}/")):
            yield file, part


def _is_template(file: str) -> bool:
    return file.removeprefix(f"{BUNDLED}/").rpartition(".")[0] == TEMPLATE


def _with_part(selection: Selection, part: str, file: str) -> Selection:
    """Keep the case whose name is the part, or else those whose names have it in them."""
    if selection.faults:
        return selection
    wanted = slug(part)
    fits: list[Callable[[str], bool]] = [lambda name: name == wanted, lambda name: bool(wanted) and wanted in name]
    for fit in fits:
        if found := [case for case in selection.cases if fit(_name(case)) or fit(slug(case.name))]:
            return replace(selection, cases=found)
    raise UsageError(f"no case of {file} has {part!r} in its name; its cases are\n{_listed(selection.cases)}")


def _with_id(selection: Selection, name: str) -> Selection | None:
    """Keep the case of an id; None where the files were read and have none."""
    found = [case for case in selection.cases if _name(case) == name]
    return replace(selection, cases=found) if found or selection.faults else None


def _name(case: Case) -> str:
    return case.id.rpartition("/")[2]


def _files_called(base: Path, prefix: str) -> list[str]:
    found = [_file_at(base / f"{prefix}{suffix}") for suffix in _SUFFIXES] if prefix else []
    return [str(file) for file in found if file]


def _bundled_files(prefix: str) -> list[str]:
    found = [f"{prefix}{suffix}" for suffix in _SUFFIXES]
    return [f"{BUNDLED}/{name}" for name in found if prefix and _is_file(bundled_root() / name)]


def _file_at(path: Path) -> Path | None:
    """Return a file; a ? may stand for a byte that is no text, as ids and reports have it."""
    if _is_file(path):
        return path
    if "?" not in str(path):
        return None
    pattern = "?".join(map(escape, str(path.relative_to(path.anchor)).split("?")))
    alike = sorted(Path(path.anchor).glob(pattern))
    return next((found for found in alike if shown_text(str(found)) == str(path)), None)


def _is_file(path: Path) -> bool:
    return exists(path) and path.is_file()


def read_called(addresses: Mapping[str, str], base: Path | None = None) -> dict[str, Case]:
    """Read cases by their ids, of which each has an ``address``; what is no longer there is left out."""
    base = base or Path.cwd()
    files = dict.fromkeys(file for each in addresses.values() for file in _files_of(each, base))
    if not files:
        return {}
    tiles = tiles_named(each for each in addresses if each.startswith(f"{TEMPLATE}/"))
    selection = select_cases(list(files), base=base, tiles=tiles)
    return {case.id: case for case in selection.cases if case.id in addresses}


def _files_of(called: str, base: Path) -> list[str]:
    file, found, _ = called.rpartition(BEHIND_FILE)
    if found and (own := _file_at(base / file)):
        return [str(own)]
    prefix = called.rpartition("/")[0]
    return _files_called(base, prefix) or _bundled_files(prefix)
