"""Which cases to run: the bundled corpus and people's own folders, chosen by path, glob, tag and expression.

Case files that were read before: the cases and tags that came of them, kept under every byte of the file.

What is kept is unpickled, but only into the classes of a case: an entry that names anything else is none.
"""

from __future__ import annotations

import io
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from attncheck.digests import digest_of, digest_of_code
from attncheck.errors import CaseError, Diagnostic, UsageError
from attncheck.reading import array_fields, array_kinds, bias_kinds, file_kinds, mask_kinds
from attncheck.reading.case import Case
from attncheck.reading.compressed_cases import PackedCases
from attncheck.reading.expression import Expression
from attncheck.reading.model import TAG_FILE, TagEntry
from attncheck.reading.tiles import TEMPLATE, load_tile, tiles_named
from attncheck.store import Key, Store, UnreadableEntry, user_store
from attncheck.wording import NEAR, expected, listed_or

_WILD = re.compile(r"[*?[]")
_MOST_MEANT = 3
_SUFFIXES = (".yaml", ".yml")
BUNDLED = "cases"
"""The bundled corpus is called cases/..., as in the repository; the name in front is not part of a case's id."""
PROPERTIES_FILE = "properties"
"""The bundled file of which every case has properties."""


@dataclass(frozen=True)
class Selection:
    """The cases to run, by id, the faults of files that could not be read, and every tag that is defined."""

    cases: Sequence[Case]
    faults: tuple[Diagnostic, ...]
    tags: dict[str, TagEntry]


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    """As it is shown: the path that the user gave, or cases/... for the bundled corpus."""
    beside_id: str = ""
    """The path that leads to it where its cases' ids do not."""

    @property
    def id_prefix(self) -> str:
        return self.name.removesuffix(".yaml").removesuffix(".yml").removeprefix(f"{BUNDLED}/")


@dataclass(frozen=True)
class _Reading:
    """What all files share: tags that are defined so far, what is wrong so far, and what was read before."""

    tags: dict[str, TagEntry]
    faults: list[Diagnostic]
    store: Store
    properties: bool = False


_Found = tuple[Path, Case]
"""A case and the file that it is really in."""
_Lists = frozenset[Path]
"""Files that are lists of expected failures, resolved."""


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
) -> Selection:
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
    faults: list[Diagnostic] = []
    lists = frozenset(path.resolve() for path in expected_failures)
    reading = _Reading({}, faults, user_store() if store is None else store, properties)
    known_tags = reading.tags
    known_tags |= _tags_of(bundled_root(), f"{BUNDLED}/{TAG_FILE}", reading)
    origins: dict[str, tuple[Path, int]] = {}
    chosen, ids = PackedCases(), []
    others = 0
    named = [_matching(pattern, base, reading, lists, several=len(patterns) > 1) for pattern in patterns or ("*",)]
    for found in (*named, *(_of_tile(tile, known_tags) for tile in tiles)):
        for path, case in found:
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
                faults.append(
                    Diagnostic(case.file, f"the same case id as in {first[0]}: {case.id}", case.line, case.name)
                )
    if origins:
        _check_tags(tags, known_tags)
    if not chosen and not faults:
        also = _said_of(expression, origins, known_tags) if expression else ""
        raise UsageError(f"no case matches the paths, globs, tags and dtypes that were given{also}{_HINT[others > 0]}")
    chosen.arrange(sorted(range(len(ids)), key=ids.__getitem__))
    return Selection(chosen, tuple(dict.fromkeys(faults)), known_tags)


def _said_of(expression: Expression, ids: Iterable[str], tags: Iterable[str]) -> str:
    """Name an expression that matches nothing, and what its words may mean of those in ids and tags."""
    import difflib

    known = {*tags, *(word for identity in ids for word in re.split("[-/]", identity))}
    words = [word.lower() for word in re.findall(r"[\w-]+", expression.text)]
    meant = [near for word in words if word not in known for near in difflib.get_close_matches(word, known, 1, NEAR)]
    return f", and the expression {expression.text!r}" + (f"; did you mean {listed_or(meant)}?" if meant else "")


_HINT = {False: "", True: "; cases with properties are run by `attncheck properties` and `check --properties`"}


def bundled_root() -> Path:
    """Return the folder of the bundled corpus."""
    return Path(str(files("attncheck.cases")))


def _matching(pattern: str, base: Path, reading: _Reading, lists: _Lists, *, several: bool) -> Iterator[_Found]:
    path, tags, faults = base / pattern, reading.tags, reading.faults
    if _is_kernel(pattern, path):
        raise UsageError(f"{pattern!r} is no case file; name a kernel of your own with --implementation {pattern}")
    glob = pattern.removeprefix(f"{BUNDLED}/").removesuffix(".yaml")
    root = bundled_root()
    bundled = [_File(path, f"{BUNDLED}/{path.relative_to(root).as_posix()}") for path in _case_files(root)]
    # A program may be called as bundled cases are, which are meant: check attention -i ./attention.
    is_program = path.suffix not in _SUFFIXES and any(_matches(file.id_prefix, glob) for file in bundled)
    is_here = exists(path) and not (is_program and path.is_file())
    if several and is_here and (path.name == "__pycache__" or (path.is_file() and not _is_case_file(path, lists))):
        # The shell spreads cases/* over everything that is there.
        return
    if is_here:
        own = _own_files(path, base, lists)
        for folder in sorted({file.path.parent for file in own} | {path if path.is_dir() else path.parent}):
            tags |= _tags_of(folder, _shown(folder / TAG_FILE, base), reading)
        yield from _read(own, reading)
        return
    if glob == "*" and not reading.properties:
        bundled = [file for file in bundled if file.id_prefix != PROPERTIES_FILE]  # which holds no other cases
    # A whole file, a folder or single cases can be meant; only files that may match are read.
    whole = [file for file in bundled if _matches(file.id_prefix, glob)]
    rest = [file for file in bundled if file not in whole and _may_hold(file.id_prefix, glob)]
    single = (found for found in _read(rest, reading) if _matches(found[1].id, glob)) if not whole else ()
    of_tiles = chain.from_iterable(_of_tile(tile, tags) for tile in tiles_named([glob]))
    made = (found for found in of_tiles if _matches(found[1].id, glob))
    matches = False
    for found in chain(_read(whole, reading), single, made):
        matches = True
        yield found
    if not matches and not faults:
        problem = f"{pattern!r} is neither a file or folder nor a glob that matches a bundled case"
        raise UsageError(f"{problem}{names_near(pattern, reading.store)}")


def names_near(pattern: str, store: Store | None = None) -> str:
    """Ask whether the bundled cases were meant that are called nearly so; nothing where there is none."""
    import difflib

    text = _WILD.sub("", pattern.removeprefix(f"{BUNDLED}/").removesuffix(".yaml")).strip("]/")
    ids = [case.id for case in select_cases([], store=store).cases]
    close = [each for each in ids if text and text in each]
    if not close:
        globs = sorted({f"{each.rpartition('/')[0]}/*" for each in ids}, key=lambda glob: (len(glob), glob))
        shortened = re.compile(".*".join(map(re.escape, text[:20])))
        close = [glob for glob in globs if text and shortened.match(glob)]
        close = close or difflib.get_close_matches(f"{text}/*", globs) or difflib.get_close_matches(text[:200], ids)
    return f"; did you mean {listed_or(close[:_MOST_MEANT])}?" if close else ""


def _is_kernel(pattern: str, path: Path) -> bool:
    """Whether a pattern names a module or a function of one; __init__.py is what the shell spreads a * over."""
    file, _, function = pattern.partition(".py:")
    return bool(function and exists(path.with_name(f"{Path(file).name}.py"))) or (
        path.suffix == ".py" and path.name != "__init__.py" and exists(path)
    )


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; what no file can be called, because it is too long, is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _may_hold(id_prefix: str, glob: str) -> bool:
    """Whether the ids of a file's cases, which begin with its own, may begin as a glob does."""
    literal, begins = _WILD.split(glob, maxsplit=1)[0], f"{id_prefix}/"
    return begins.startswith(literal) or literal.startswith(begins)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob.rstrip('/')}/*")


def _own_files(path: Path, base: Path, lists: _Lists) -> list[_File]:
    if path.is_file() and path.resolve() in lists:
        raise UsageError(f"{path} is a list of expected failures; expected a case file")
    if path.is_file() and not _is_case_file(path):
        raise UsageError(f"{path} is no case file; expected a *.yaml that is not {TAG_FILE}")
    found = [path] if path.is_file() else _case_files(path, lists)
    if not found:
        raise UsageError(f"{path} holds no case files (*.yaml)")
    return [_File(file, _shown(file, base), _path_beside_id(file, base)) for file in found]


def _case_files(folder: Path, lists: _Lists = frozenset()) -> list[Path]:
    """Return the case files below a folder, in a fixed order; hidden folders, tags.yaml and the lists are none."""
    return sorted(
        path
        for suffix in _SUFFIXES
        for path in folder.rglob(f"*{suffix}")
        if _is_case_file(path, lists) and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_case_file(path: Path, lists: _Lists = frozenset()) -> bool:
    return path.suffix in _SUFFIXES and path.name != TAG_FILE and not (lists and path.resolve() in lists)


def _shown(path: Path, base: Path) -> str:
    """Name a file as people do: relative to where they are, if it lies below; a byte that is no text becomes a ?."""
    resolved, resolved_base = path.resolve(), base.resolve()
    if resolved.is_relative_to(resolved_base):
        name = resolved.relative_to(resolved_base).as_posix()
    else:
        name = f"{resolved.parent.name}/{resolved.name}"
    return shown_text(name)


def shown_text(name: str) -> str:
    """Make a text of a file's name, in which a byte may be no text."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _path_beside_id(path: Path, base: Path) -> str:
    """Return the path of a file where a case's id does not lead to it; empty where it does.

    It does for the bundled corpus, and below the folder that people are in.
    """
    if not path.resolve().is_relative_to(base.resolve()):
        return shown_text(str(path.resolve()))
    name = _shown(path, base)
    return name if name.startswith(f"{BUNDLED}/") else ""


def _tags_of(folder: Path, name: str, reading: _Reading) -> dict[str, TagEntry]:
    try:
        return load_kept_tags(folder, name, reading.store)
    except CaseError as error:
        reading.faults.extend(error.faults)
        return {}


def _read(case_files: Iterable[_File], reading: _Reading) -> Iterator[_Found]:
    """Read one file after the other: of many, only what is kept of each is in memory."""
    for file in case_files:
        path = file.path.resolve()
        try:
            cases = load_kept_case_file(file.path, file.name, file.id_prefix, reading.tags, reading.store)
        except CaseError as error:
            reading.faults.extend(error.faults)
        else:
            yield from ((path, replace(case, path=file.beside_id) if file.beside_id else case) for case in cases)


def _of_tile(tile: int, tags: dict[str, TagEntry]) -> Iterator[_Found]:
    """Read the cases of one tile, of which the bundled corpus has some already."""
    path = bundled_root() / f"{TEMPLATE}.yaml"
    yield from ((path.resolve(), case) for case in load_tile(path, f"{BUNDLED}/{TEMPLATE}.yaml", tags, tile))


def _is_wanted(case: Case, tags: Sequence[str], dtypes: Sequence[str], expression: Expression | None) -> bool:
    return (
        (not tags or bool(set(case.tags) & set(tags)))
        and (not dtypes or bool(set(case.dtypes) & set(dtypes)))
        and (expression is None or expression.matches(case))
    )


def _check_tags(wanted: Sequence[str], known: dict[str, TagEntry]) -> None:
    for tag in wanted:
        if tag not in known:
            raise UsageError(f"undefined tag {tag!r}; {expected(tag, sorted(known), '`attncheck list tags`')}")


_CODE = ("attncheck.reading", "attncheck.spec", "attncheck.backends.contract", "attncheck.digests", "attncheck.errors")
_READS_WITH = ("numpy", "pydantic", "PyYAML", "ruamel.yaml")
_LARGEST_FILE = 1 << 24
_OF_ARRAY_KINDS = (array_fields, array_kinds, bias_kinds, file_kinds, mask_kinds)
_OF_CASES = frozenset(
    {
        *((module.__name__, name) for module in _OF_ARRAY_KINDS for name in vars(module)),
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
        if isinstance(source, file_kinds.StoredArray):
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
