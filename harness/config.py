"""What a project says of itself in ``[tool.attncheck]`` of its pyproject.toml.

    [tool.attncheck]
    cases = ["conformance/"]                     # own files or folders of cases, besides the bundled ones
    expected_failures = ["conformance/expected_failures.yaml"]     # own lists of expected failures
    min_judged = "80%"                           # what every implementation has to be judged in; or a number of cases
    tile = 48                                    # the tile of the kernel, or a list: cases at its edges run, too

Paths are relative to the folder of that file. The minimum is that of runs in which nothing is picked: of a few cases
that are named, no share says anything. The tile, too, is that of runs in which no cases are named.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attncheck.errors import UsageError
from attncheck.reading.expected_failures import ExpectedFailure, bundled_expected_failures, load_expected_failures
from attncheck.reading.selection import Expression, Selection, exists, select_cases
from attncheck.reading.tiles import read_tiles
from attncheck.results.coverage import Minimum
from attncheck.store import Store

_FILE = "pyproject.toml"


@dataclass(frozen=True)
class Config:
    """A project's own cases and lists of expected failures, and how much has to be judged; paths are absolute."""

    cases: tuple[str, ...] = ()
    expected_failures: tuple[Path, ...] = ()
    minimum: Minimum | None = None
    tiles: tuple[int, ...] = ()

    @property
    def own_and_bundled(self) -> tuple[str, ...]:
        """What runs when no cases are named: the bundled ones, and the project's own."""
        return ("*", *self.cases) if self.cases else ()


def read_config(start: Path | None = None) -> Config:
    """Read the nearest pyproject.toml in this folder or above that has the section. Raises ``UsageError``."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        path = folder / _FILE
        section = _section(path) if path.is_file() else None
        if section is not None:
            return _config(section, path)
    return Config()


def selected(
    patterns: Sequence[str],
    tags: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    expected_failures: Sequence[Path] = (),
    tiles: Sequence[int] = (),
    *,
    expression: Expression | None = None,
    store: Store | None = None,
) -> Selection:
    """Read the cases that are named: where none is, the bundled ones and the project's.

    The cases of ``tiles`` come besides; files that were read before come out of the ``store``. Raises ``UsageError`` as
    ``select_cases`` does.
    """
    config = read_config()
    lists = (*config.expected_failures, *expected_failures)
    named = patterns or config.own_and_bundled
    sizes = tiles_of(tiles, complete=not patterns)
    return select_cases(named, tags, dtypes, expected_failures=lists, tiles=sizes, expression=expression, store=store)


def tiles_of(given: Sequence[int], *, complete: bool) -> tuple[int, ...]:
    """Return the tiles whose cases run: those given, or what the project says where no cases are named."""
    return tuple(given) or (read_config().tiles if complete else ())


def expected_failures_of(backends: Sequence[str], own: Sequence[Path] = ()) -> tuple[ExpectedFailure, ...]:
    """Return these backends' expected failures: bundled, the project's, and of ``own`` lists. Raises ``CaseError``."""
    return bundled_expected_failures(backends) + load_expected_failures([*read_config().expected_failures, *own])


def minimum_of(given: str | int | None, *, complete: bool) -> Minimum | None:
    """Return how much has to be judged: what is given, or in a complete run what the project says."""
    if given is not None:
        return Minimum.of(given, "--min-judged")
    return read_config().minimum if complete else None


def _section(path: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no UTF-8, no TOML, a number of thousands of digits
        raise UsageError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: cannot be read: nested too deep") from None
    tools = document.get("tool")
    section = tools.get("attncheck") if isinstance(tools, dict) else None
    if section is not None and not isinstance(section, dict):
        raise UsageError(f"{path}: tool.attncheck: expected a table")
    return section


def _config(section: dict[str, Any], path: Path) -> Config:
    known = {"cases", "expected_failures", "min_judged", "tile"}
    unknown = sorted(section.keys() - known)
    if unknown:
        raise UsageError(f"{path}: tool.attncheck.{_short(unknown[0])}: unknown; expected {', '.join(sorted(known))}")
    paths: dict[str, list[Path]] = {}
    for name in ("cases", "expected_failures"):
        given = section.get(name, [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise UsageError(f"{path}: tool.attncheck.{name}: expected a list of paths")
        paths[name] = [path.parent / each for each in given]
        missing = [each for each in paths[name] if not exists(each)]
        if missing:
            raise UsageError(f"{path}: tool.attncheck.{name}: there is no {_short(str(missing[0]))}")
    least = section.get("min_judged")
    minimum = None if least is None else Minimum.of(least, f"{path}: tool.attncheck.min_judged")
    tile = section.get("tile", [])
    tiles = read_tiles(tile if isinstance(tile, list) else [tile], f"{path}: tool.attncheck.tile")
    return Config(tuple(map(str, paths["cases"])), tuple(paths["expected_failures"]), minimum, tiles)


def _short(text: str) -> str:
    """Write a text of a file in one line that is not too long."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
