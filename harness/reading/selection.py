"""Cases to run: the bundled corpus and people's own folders, chosen by path, glob, tag and expression.

One case is called by its id, a glob that only it matches, or its file with a part of its name.

    attention/a-query-that-may-attend-to-nothing-gets-zeros      an id: of a bundled case, or of one's own
    my_cases/a.yaml                                              a file with one case
    my_cases/a.yaml::equal keys                                  a file, and what only one of its names has in it
    my_cases/a.yaml/two-equal-keys                               the same

An id of one's own leads to its file where that lies below the folder that one is in, or among the project's cases
(``[tool.attncheck]`` in its pyproject.toml).

Cases for the tile of a kernel: one bundled file states them, and a row for it can be made for any size.
``kernel_shapes/tiles.yaml`` has a row of lengths under ``for_each``. With another row in its place it makes the same
cases for another tile. Their ids say which tile that is, so that an id alone leads to its case.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from attncheck.common.errors import CaseError, Diagnostic, UsageError
from attncheck.common.store import Store, user_store
from attncheck.common.wording import MIN_SIMILARITY, join_words_or, slug, suggest_names
from attncheck.reading.case import Case, PackedCases, load_cached_case_file, load_cached_tags
from attncheck.reading.expressions import Expression
from attncheck.reading.model import TAG_FILE, TagEntry
from attncheck.spec import OPERATIONS

_WILDCARD = re.compile(r"[*?[]")
_MAX_SUGGESTIONS = 3
_SUFFIXES = (".yaml", ".yml")
_MAX_FILES_BELOW = 100_000
"""Files and folders below a folder of cases, whatever they hold: a folder with more is a disk."""
BUNDLED_PREFIX = "cases"
"""The bundled corpus is called cases/..., as in the repository; the name in front is not part of a case's id."""
PROPERTIES_FILE = "properties"
"""The bundled file of which every case has properties."""


@dataclass(frozen=True)
class CaseSelection:
    """The cases to run, by id, the faults of files that could not be read, and every tag that is defined."""

    cases: Sequence[Case]
    faults: tuple[Diagnostic, ...]
    tags: dict[str, TagEntry]


@dataclass(frozen=True)
class _CaseFile:
    path: Path
    name: str
    """As it is shown: the path that the user gave, or cases/... for the bundled corpus."""
    path_if_not_in_id: str = ""
    """The path of the file if its cases' ids do not have it."""

    @property
    def id_prefix(self) -> str:
        return self.name.removesuffix(".yaml").removesuffix(".yml").removeprefix(f"{BUNDLED_PREFIX}/")


@dataclass(frozen=True)
class _ReadingState:
    """The state that all files share: the store, tags and faults so far, and the lists of expected failures.

    Paths in ``lists`` are resolved.
    """

    store: Store
    properties: bool
    lists: frozenset[Path]
    tags: dict[str, TagEntry] = field(default_factory=dict)
    faults: list[Diagnostic] = field(default_factory=list)


_FileAndCase = tuple[Path, Case]
"""A case and the file that it is really in."""


def select_cases(
    patterns: Sequence[str] = (),
    tags: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    base: Path | None = None,
    expected_failures: Sequence[Path] = (),
    tiles: Sequence[int] = (),
    *,
    expression: Expression | None = None,
    store: Store | None = None,
    properties: bool = False,
) -> CaseSelection:
    """Read the cases that match.

    Args:
        patterns: Paths of files or folders of cases, or else globs over the bundled cases, with or without ``cases/``
            in front: ``cases/documents/*``, ``masking/*causal*``. Default: the whole bundled corpus. A glob that names
            a tile (``*tile-48*``) matches the cases of that tile.
        tags: Select the cases that have one of these tags.
        dtypes: Select the cases that declare one of these dtypes.
        base: The folder that paths are relative to. Default: the working directory.
        expected_failures: Lists of expected failures, which may lie among the cases and are none.
        tiles: Sizes of tiles whose cases are added, whatever the patterns are.
        expression: Select the cases that it matches.
        store: Where the cases of files are that were read before. Default: the one in the user's cache folder.
        properties: Select the cases that have properties, instead of those that have none.

    Returns:
        The cases, sorted by id, what is wrong with files that are left out, and the tags that are defined.

    Raises:
        UsageError: If a pattern, tag, dtype or expression matches nothing.
    """
    base = base or Path.cwd()
    lists = frozenset(path.resolve() for path in expected_failures)
    reading = _ReadingState(user_store() if store is None else store, properties, lists)
    _add_tags(find_bundled_cases_folder(), f"{BUNDLED_PREFIX}/{TAG_FILE}", reading)
    origins: dict[str, tuple[Path, int]] = {}
    chosen, ids = PackedCases(), []
    others = 0
    named = [_read_matching_cases(pattern, base, reading, several=len(patterns) > 1) for pattern in patterns or ("*",)]
    for path, case in chain(*named, *(_read_tile(tile, reading.tags) for tile in tiles)):
        first = origins.get(case.id)
        if first is None:
            origins[case.id] = (path, case.line)
            if bool(case.properties) is not properties:
                others += 1
            elif _is_wanted(case, tags, dtypes, expression):
                chosen.append(case)
                ids.append(case.id)
        # The same file may be named twice; two files may look the same from afar.
        elif first != (path, case.line):
            problem = f"the same case id as in {first[0]}: {case.id}"
            reading.faults.append(Diagnostic(case.file, problem, case.line, case.name))
    for tag in tags if origins else ():
        if tag not in reading.tags:
            raise UsageError(
                f"undefined tag {tag!r}; {suggest_names(tag, sorted(reading.tags), '`attncheck list tags`')}"
            )
    if not chosen and not reading.faults:
        also = _expression_hint(expression, origins, reading.tags) if expression else ""
        also += _PROPERTIES_HINT if others else ""
        raise UsageError(f"no case matches the paths, globs, tags and dtypes that were given{also}")
    chosen.reorder(sorted(range(len(ids)), key=ids.__getitem__))
    return CaseSelection(chosen, tuple(dict.fromkeys(reading.faults)), reading.tags)


def _expression_hint(expression: Expression, ids: Iterable[str], tags: Iterable[str]) -> str:
    """Return a hint for an expression that matches nothing, with similar words of ids and tags."""
    import difflib

    known = {*tags, *(word for identity in ids for word in re.split("[-/]", identity))}
    words = [word.lower() for word in re.findall(r"[\w-]+", expression.text)]
    meant = [
        near
        for word in words
        if word not in known
        for near in difflib.get_close_matches(word, known, 1, MIN_SIMILARITY)
    ]
    return f", and the expression {expression.text!r}" + (f"; did you mean {join_words_or(meant)}?" if meant else "")


_PROPERTIES_HINT = "; cases with properties are run by `attncheck properties` and `check --properties`"


def find_bundled_cases_folder() -> Path:
    """Return the folder of the bundled corpus."""
    return Path(str(files("attncheck.cases")))


def check_user_files(
    patterns: Sequence[str], expected_failures: Sequence[Path] = (), *, store: Store | None = None
) -> None:
    """Read only the user's files among the patterns, no bundled ones, so that their faults are known at once.

    Raises ``CaseError`` with all faults, and ``UsageError`` as ``select_cases`` does.
    """
    lists = frozenset(path.resolve() for path in expected_failures)
    reading, base = _ReadingState(user_store() if store is None else store, False, lists), Path.cwd()
    bundled: list[_CaseFile] | None = None
    for pattern in patterns:
        if not path_exists(base / pattern):
            continue
        if bundled is None:
            bundled = bundled_case_files()
            _add_tags(find_bundled_cases_folder(), f"{BUNDLED_PREFIX}/{TAG_FILE}", reading)
        for _ in _read_user_files(pattern, base, reading, bundled, several=len(patterns) > 1) or ():
            pass
    if reading.faults:
        raise CaseError(list(dict.fromkeys(reading.faults)))


def bundled_case_files() -> list[_CaseFile]:
    """Return the bundled case files."""
    root = find_bundled_cases_folder()
    return [_CaseFile(path, f"{BUNDLED_PREFIX}/{path.relative_to(root).as_posix()}") for path in _find_case_files(root)]


def _read_user_files(
    pattern: str, base: Path, reading: _ReadingState, bundled: Sequence[_CaseFile], *, several: bool
) -> Iterator[_FileAndCase] | None:
    """Return the cases of a user's file or folder; None if the pattern is neither."""
    path = base / pattern
    file, _, function = pattern.partition(".py:")
    names_function = function and path_exists(path.with_name(f"{Path(file).name}.py"))
    # The shell may expand * to __init__.py.
    if names_function or (path.suffix == ".py" and path.name != "__init__.py" and path_exists(path)):
        raise UsageError(f"{pattern!r} is no case file; name a kernel of your own with --implementation {pattern}")
    # A program may be called as bundled cases are, which are meant: check attention -i ./attention.
    glob = _case_glob(pattern)
    is_program = path.suffix not in _SUFFIXES and any(_matches_glob(file.id_prefix, glob) for file in bundled)
    if not path_exists(path) or (is_program and path.is_file()):
        return None
    if several and (path.name == "__pycache__" or (path.is_file() and not _is_case_file(path, reading.lists))):
        # The shell spreads cases/* over everything that is there.
        return iter(())
    case_files = _user_case_files(path, base, reading.lists)
    for folder in sorted({file.path.parent for file in case_files} | {path if path.is_dir() else path.parent}):
        _add_tags(folder, _display_name(folder / TAG_FILE, base), reading)
    return _read_cases(case_files, reading)


def _case_glob(pattern: str) -> str:
    return pattern.removeprefix(f"{BUNDLED_PREFIX}/").removesuffix(".yaml")


def _read_matching_cases(pattern: str, base: Path, reading: _ReadingState, *, several: bool) -> Iterator[_FileAndCase]:
    bundled, glob = bundled_case_files(), _case_glob(pattern)
    if (user_cases := _read_user_files(pattern, base, reading, bundled, several=several)) is not None:
        yield from user_cases
        return
    if glob == "*" and not reading.properties:
        bundled = [file for file in bundled if file.id_prefix != PROPERTIES_FILE]  # which holds no other cases
    # A whole file, a folder or single cases can be meant; only files that may match are read.
    whole = [file for file in bundled if _matches_glob(file.id_prefix, glob)]
    literal = _WILDCARD.split(glob, maxsplit=1)[0]
    rest = [file for file in bundled if file not in whole]
    rest = [
        file for file in rest if f"{file.id_prefix}/".startswith(literal) or literal.startswith(f"{file.id_prefix}/")
    ]
    single = (item for item in _read_cases(rest, reading) if _matches_glob(item[1].id, glob)) if not whole else ()
    of_tiles = chain.from_iterable(_read_tile(tile, reading.tags) for tile in find_tiles_in_names([glob]))
    made = (item for item in of_tiles if _matches_glob(item[1].id, glob))
    matching = chain(_read_cases(whole, reading), single, made)
    if (first := next(matching, None)) is not None:
        yield from chain([first], matching)
    elif not reading.faults:
        problem = f"{pattern!r} is neither a file or folder nor a glob that matches a bundled case"
        raise UsageError(f"{problem}{similar_names_hint(pattern, reading.store)}")


def similar_names_hint(pattern: str, store: Store | None = None) -> str:
    """Return a "did you mean" hint with bundled cases of similar names; empty if there are none."""
    import difflib

    text = _WILDCARD.sub("", pattern.removeprefix(f"{BUNDLED_PREFIX}/").removesuffix(".yaml")).strip("]/")
    ids = [case.id for case in select_cases([], store=store).cases]
    close = [identity for identity in ids if text and text in identity]
    if not close:
        globs = sorted({f"{identity.rpartition('/')[0]}/*" for identity in ids}, key=lambda glob: (len(glob), glob))
        shortened = re.compile(".*".join(map(re.escape, text[:20])))
        close = [glob for glob in globs if text and shortened.match(glob)]
        close = close or difflib.get_close_matches(f"{text}/*", globs) or difflib.get_close_matches(text[:200], ids)
    return f"; did you mean {join_words_or(close[:_MAX_SUGGESTIONS])}?" if close else ""


def path_exists(path: Path) -> bool:
    """Return whether a file or folder exists; False for a name that no file can have, such as one that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _matches_glob(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob.rstrip('/')}/*")


def _user_case_files(path: Path, base: Path, lists: frozenset[Path]) -> list[_CaseFile]:
    if path.is_file() and path.resolve() in lists:
        raise UsageError(f"{path} is a list of expected failures; expected a case file")
    if path.is_file() and not _is_case_file(path):
        raise UsageError(f"{path} is no case file; expected a *.yaml that is not {TAG_FILE}")
    paths = [path] if path.is_file() else _find_case_files(path, lists)
    if not paths:
        raise UsageError(f"{path} holds no case files (*.yaml)")
    return [_CaseFile(file, _display_name(file, base), _path_if_not_in_id(file, base)) for file in paths]


def _find_case_files(folder: Path, lists: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the case files below a folder, in a fixed order; hidden folders, tags.yaml and the lists are none."""
    paths, seen = [], 0
    for above, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen += len(folders) + len(names)
        if seen > _MAX_FILES_BELOW:
            raise UsageError(
                f"{folder} is no folder of cases: there are more than {_MAX_FILES_BELOW:,} files and folders below it; "
                "expected case files (*.yaml), or a folder that holds them"
            )
        paths += [Path(above, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if _is_case_file(path, lists))


def _is_case_file(path: Path, lists: frozenset[Path] = frozenset()) -> bool:
    return path.suffix in _SUFFIXES and path.name != TAG_FILE and not (lists and path.resolve() in lists)


def _display_name(path: Path, base: Path) -> str:
    """Return a file's name for messages: relative to the base if below it; a byte that is no text becomes a ?."""
    place, folder = path.parent.resolve() / path.name, base.resolve()  # a link is named, and not its target
    name = (
        place.relative_to(folder) if place.is_relative_to(folder) else Path(place.parent.name) / place.name
    ).as_posix()
    return as_valid_text(name)


def as_valid_text(name: str) -> str:
    """Return a file's name as valid text; a byte that is no text becomes a ?."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _path_if_not_in_id(path: Path, base: Path) -> str:
    """Return the path of a file if the ids of its cases do not have it; empty if they do.

    They have it for the bundled corpus and for files below the base.
    """
    if not path.resolve().is_relative_to(base.resolve()):
        return as_valid_text(str(path.resolve()))
    name = _display_name(path, base)
    return name if name.startswith(f"{BUNDLED_PREFIX}/") else ""


def _add_tags(folder: Path, name: str, reading: _ReadingState) -> None:
    def load() -> dict[str, TagEntry]:
        from attncheck.reading.loader import load_tags  # what is kept of files needs no more of it

        return load_tags(folder, name)

    try:
        reading.tags.update(load_cached_tags(folder, reading.store, load))
    except CaseError as error:
        reading.faults.extend(error.faults)


def _read_cases(case_files: Iterable[_CaseFile], reading: _ReadingState) -> Iterator[_FileAndCase]:
    """Read one file after the other, so that only one is in memory unpacked."""
    for file in case_files:
        path, named = file.path.resolve(), (file.name, file.id_prefix, sorted(reading.tags))
        try:
            cases = load_cached_case_file(file.path, named, reading.store, partial(_load_case_file, file.path, *named))
        except CaseError as error:
            reading.faults.extend(error.faults)
        else:
            yield from (
                (path, replace(case, path=file.path_if_not_in_id) if file.path_if_not_in_id else case) for case in cases
            )


def _load_case_file(path: Path, name: str, id_prefix: str, tags: Sequence[str]) -> list[Case]:
    from attncheck.reading.loader import load_case_file

    return load_case_file(path, name, id_prefix, tags)


def _read_tile(tile: int, tags: dict[str, TagEntry]) -> Iterator[_FileAndCase]:
    """Read the cases of one tile, of which the bundled corpus has some already."""
    path = find_bundled_cases_folder() / f"{TILE_TEMPLATE}.yaml"
    cases = load_tile_cases(path, f"{BUNDLED_PREFIX}/{TILE_TEMPLATE}.yaml", tags, tile)
    yield from ((path.resolve(), case) for case in cases)


def _is_wanted(case: Case, tags: Sequence[str], dtypes: Sequence[str], expression: Expression | None) -> bool:
    return (
        (not tags or bool(set(case.tags) & set(tags)))
        and (not dtypes or bool(set(case.dtypes) & set(dtypes)))
        and (expression is None or expression.matches(case))
    )


CASE_SEPARATOR = "::"
"""The separator between a file and a part of a name."""
_SEPARATORS = re.compile(r"::|/")
_MAX_LISTED_IDS = 20


class NoSuchCaseError(UsageError):
    """No case has this name."""


def format_case_address(identity: str, path: str) -> str:
    """Return the address of a case: its id, or with a ``path`` the path and the last part of the id."""
    return f"{path}{CASE_SEPARATOR}{identity.rpartition('/')[2]}" if path else identity


def select_case(
    wanted: str, configured: Sequence[str] = (), base: Path | None = None, lists: Sequence[Path] = ()
) -> tuple[Case, CaseSelection]:
    """Return the one case that the text names, and the selection that it is in, for its tags.

    ``configured`` are the project's files and folders, ``lists`` the lists of expected failures among them. Raises
    ``NoSuchCaseError`` or ``UsageError`` for none or several, ``CaseError`` if its file cannot be read.
    """
    selection = _select_candidates(wanted, configured, base or Path.cwd(), lists)
    if selection.faults:
        raise CaseError(list(selection.faults))
    return require_single_case(selection.cases, wanted), selection


def require_single_case(cases: Sequence[Case], wanted: str) -> Case:
    """Return the one case that is meant. Raises ``UsageError`` for none or several."""
    exact = [case for case in cases if case.id == wanted]
    if len(exact or cases) == 1:
        return (exact or cases)[0]
    raise UsageError(f"{wanted!r} matches {len(cases)} cases; name one of them:\n{_list_ids(cases)}")


DEFAULT_DTYPE = "float32"
"""The dtype of a question about one case, if the case has it."""


def choose_dtype(case: Case, wanted: str | None) -> str:
    """Return the dtype in which one case is asked: the one that is wanted, or float32, or the case's first.

    Raises ``UsageError`` if the case does not have the one that is wanted.
    """
    if wanted is None:
        return DEFAULT_DTYPE if DEFAULT_DTYPE in case.dtypes else case.dtypes[0]
    if wanted not in case.dtypes:
        raise UsageError(f"{case.id} has no dtype {wanted!r}; expected one of {', '.join(case.dtypes)}")
    return wanted


def _list_ids(cases: Sequence[Case]) -> str:
    lines = [f"  {case.id}" for case in cases[:_MAX_LISTED_IDS]]
    return "\n".join([*lines, *[f"  and {len(cases) - len(lines)} more"] * (len(cases) > len(lines))])


def _select_candidates(wanted: str, configured: Sequence[str], base: Path, lists: Sequence[Path]) -> CaseSelection:
    for separator in _SEPARATORS.finditer(wanted):  # a file of the user or a bundled one, and a part of a name after it
        file, part = wanted[: separator.start()], wanted[separator.end() :]
        if not file.endswith(_SUFFIXES) or not part:
            continue
        if path := _find_file(base / file):
            file = str(path)
        elif not _bundled_files_named(file.rpartition(".")[0].removeprefix(f"{BUNDLED_PREFIX}/")):
            continue
        is_template = file.removeprefix(f"{BUNDLED_PREFIX}/").rpartition(".")[0] == TILE_TEMPLATE
        tiles = find_tiles_in_names([slug(part)]) if is_template else ()
        return _filter_by_name_part(select_cases([file], base=base, expected_failures=lists, tiles=tiles), part, file)
    prefix, _, name = wanted.rpartition("/")
    tiles = find_tiles_in_names([name]) if prefix == TILE_TEMPLATE else ()
    for called in (_user_files_named(base, prefix), _bundled_files_named(prefix)):
        if not called:
            continue
        selection = select_cases(called, base=base, tiles=tiles)
        cases = [case for case in selection.cases if _last_part_of_id(case) == name]
        if cases or selection.faults:
            return replace(selection, cases=cases)
    try:
        return select_cases([wanted], base=base, expected_failures=lists)
    except UsageError:
        if path_exists(base / wanted):
            raise
    if configured:
        selection = select_cases(configured, base=base, expected_failures=lists)
        matching = [case for case in selection.cases if fnmatchcase(case.id, wanted)]
        if matching or selection.faults:
            return replace(selection, cases=matching, faults=() if matching else selection.faults)
    raise NoSuchCaseError(
        f"there is no case {wanted!r}: expected its id, a glob over the bundled cases, a file with one case, or "
        f"FILE.yaml{CASE_SEPARATOR}PART of a name; `attncheck list cases` and `attncheck list cases FILE.yaml` list ids"
        f"{similar_names_hint(wanted)}"
    )


def _filter_by_name_part(selection: CaseSelection, part: str, file: str) -> CaseSelection:
    """Keep the case whose name is the part, or else those whose names have it in them."""
    if selection.faults:
        return selection
    wanted = slug(part)
    names = [(case, (_last_part_of_id(case), slug(case.name))) for case in selection.cases]
    exact = [case for case, called in names if wanted in called]
    if matching := exact or [case for case, called in names if wanted and any(wanted in name for name in called)]:
        return replace(selection, cases=matching)
    raise UsageError(f"no case of {file} has {part!r} in its name; its cases are\n{_list_ids(selection.cases)}")


def _last_part_of_id(case: Case) -> str:
    return case.id.rpartition("/")[2]


def _user_files_named(base: Path, prefix: str) -> list[str]:
    paths = [_find_file(base / f"{prefix}{suffix}") for suffix in _SUFFIXES] if prefix else []
    return [str(file) for file in paths if file]


def _bundled_files_named(prefix: str) -> list[str]:
    names = [f"{prefix}{suffix}" for suffix in _SUFFIXES]
    return [f"{BUNDLED_PREFIX}/{name}" for name in names if prefix and _is_file(find_bundled_cases_folder() / name)]


def _find_file(path: Path) -> Path | None:
    """Return a file, or None; a ? matches a byte that is no text, as in ids and reports."""
    if _is_file(path):
        return path
    if "?" not in str(path):
        return None
    pattern = "?".join(map(escape, str(path.relative_to(path.anchor)).split("?")))
    alike = sorted(Path(path.anchor).glob(pattern))
    return next((candidate for candidate in alike if as_valid_text(str(candidate)) == str(path)), None)


def _is_file(path: Path) -> bool:
    return path_exists(path) and path.is_file()


def read_cases_at_addresses(addresses: Mapping[str, str], base: Path | None = None) -> dict[str, Case]:
    """Read cases by their ids, each of which has an ``address``; cases that no longer exist are left out."""
    base = base or Path.cwd()
    called = dict.fromkeys(file for location in addresses.values() for file in _files_at_address(location, base))
    if not called:
        return {}
    tiles = find_tiles_in_names(identity for identity in addresses if identity.startswith(f"{TILE_TEMPLATE}/"))
    selection = select_cases(list(called), base=base, tiles=tiles)
    return {case.id: case for case in selection.cases if case.id in addresses}


def _files_at_address(called: str, base: Path) -> list[str]:
    file, separator, _ = called.rpartition(CASE_SEPARATOR)
    if separator and (path := _find_file(base / file)):
        return [str(path)]
    prefix = called.rpartition("/")[0]
    return _user_files_named(base, prefix) or _bundled_files_named(prefix)


TILE_TEMPLATE = "kernel_shapes/tiles"
"""The file below the bundled corpus, and what its cases' ids begin with."""
MIN_TILE, MAX_TILE = 2, 4096
MAX_JUDGED_SCORES = 1 << 18
"""Scores of which every row is judged. Gradients have no rows that stand for all, and are left out beyond this."""

_MAX_TILE_OF_ALL_STAGES = 32
"""Tiles up to this size are judged at every stage, larger ones at the output: scores and weights cost more than it."""
_TILE_IN_ID = re.compile(r"(?<![0-9a-z])tile-([1-9][0-9]{0,3})(?![0-9])")


def make_for_each_row_of_tile(tile: int) -> dict[str, Any]:
    """Return the row of ``for_each`` for a tile."""
    return {
        "name": f"tile {tile}",
        "under": tile - 1,
        "whole": tile,
        "over": tile + 1,
        "double": 2 * tile + 1,
        "twice": 2 * tile,
        "heads": 2 if tile <= _MAX_TILE_OF_ALL_STAGES else 1,
        "stages": None if tile <= _MAX_TILE_OF_ALL_STAGES else ["output"],
    }


def read_tiles(values: Iterable[Any], where: str) -> tuple[int, ...]:
    """Read the sizes of tiles. Raises ``UsageError``, which names the place ``where``."""
    tiles: dict[int, None] = {}
    for value in values:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        size = int(value) if is_whole or (isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value.strip())) else 0
        if not MIN_TILE <= size <= MAX_TILE:
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            why = "; a tile of 1 has no edges" if size == 1 else ""
            raise UsageError(f"{where}: expected a whole number from {MIN_TILE} to {MAX_TILE}, got {shown}{why}")
        tiles[size] = None
    return tuple(tiles)


def find_tiles_in_names(texts: Iterable[str]) -> tuple[int, ...]:
    """Return the tiles that ids, or globs over them, name."""
    sizes = (int(size) for text in texts for size in _TILE_IN_ID.findall(text))
    return tuple(dict.fromkeys(size for size in sizes if MIN_TILE <= size <= MAX_TILE))


def load_tile_cases(path: Path, display_name: str, known_tags: Iterable[str], tile: int) -> list[Case]:
    """Read the bundled file for one tile, without the gradients that are too large to be judged whole."""
    from attncheck.reading.loader import load_case_file  # what is kept of files needs no more of it

    cases = load_case_file(path, display_name, TILE_TEMPLATE, known_tags, for_each=[make_for_each_row_of_tile(tile)])
    return [case for case in cases if not _is_large_gradient(case)]


def describe_unjudged_tiles(tiles: Iterable[int]) -> str:
    """Return a note on the parts of large tiles that are not judged; empty if all are."""
    large = ",".join(str(size) for size in tiles if size * (2 * size + 1) > MAX_JUDGED_SCORES)
    rows = f"rows stand for all where there are more than {MAX_JUDGED_SCORES:,} scores"
    return f"--tile {large}: {rows}, and gradients of so many are left out" if large else ""


def _is_large_gradient(case: Case) -> bool:
    if not OPERATIONS[case.operation].computes_gradients:
        return False
    return math.prod(case.input_shapes["query"][:-1]) * case.input_shapes["key"][-2] > MAX_JUDGED_SCORES
