"""The options that a project sets in ``[tool.attncheck]`` of its pyproject.toml.

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
from pathlib import Path
from typing import Any

from attncheck.common.errors import UsageError
from attncheck.common.store import Store
from attncheck.reading.expected_failures import ExpectedFailure, bundled_expected_failures, load_expected_failures
from attncheck.reading.selection import Selection, check_own_files, exists, select_cases
from attncheck.results.coverage import Minimum
from attncheck.settings.options import RunOptions, options_of

_FILE = "pyproject.toml"


def read_config(start: Path | None = None) -> RunOptions:
    """Read the nearest pyproject.toml in this folder or above that has the section; paths are absolute.

    Raises ``UsageError``.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        path = folder / _FILE
        section = _section(path) if path.is_file() else None
        if section is not None:
            return _config(section, path)
    return RunOptions()


def selected(options: RunOptions, store: Store | None = None) -> Selection:
    """Read the cases that are named: where none is, the bundled ones and the project's.

    The cases of tiles come besides; files that were read before come out of the ``store``. Raises ``UsageError`` as
    ``select_cases`` does.
    """
    config = read_config()
    return select_cases(
        options.cases or (("*", *config.cases) if config.cases else ()),
        options.tags,
        options.dtypes,
        expected_failures=(*config.expected_failure_lists, *options.expected_failure_lists),
        tiles=tiles_of(options),
        expression=options.match,
        store=store,
    )


def check_own_cases(options: RunOptions, store: Store | None = None) -> None:
    """Read the cases of people's own that ``selected`` reads, before anything that takes long.

    Raises ``CaseError`` where a file has a fault.
    """
    config = read_config()
    lists = (*config.expected_failure_lists, *options.expected_failure_lists)
    check_own_files(options.cases or config.cases, lists, store=store)


def tiles_of(options: RunOptions) -> tuple[int, ...]:
    """Return the tiles whose cases run: those given, or what the project says where no cases are named."""
    return options.tiles or (() if options.cases else read_config().tiles)


def expected_failures_of(backends: Sequence[str], own: Sequence[Path] = ()) -> tuple[ExpectedFailure, ...]:
    """Return these backends' expected failures: bundled, the project's, and of ``own`` lists. Raises ``CaseError``."""
    return bundled_expected_failures(backends) + load_expected_failures([*read_config().expected_failure_lists, *own])


def minimum_of(options: RunOptions, *, complete: bool) -> Minimum | None:
    """Return how much has to be judged: what is given, or in a complete run what the project says."""
    return options.min_judged or (read_config().min_judged if complete else None)


def _section(path: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number of thousands of digits
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: cannot be read: {why}") from None
    tools = document.get("tool")
    section = tools.get("attncheck") if isinstance(tools, dict) else None
    if section is not None and not isinstance(section, dict):
        raise UsageError(f"{path}: tool.attncheck: expected a table")
    return section


def _config(section: dict[str, Any], path: Path) -> RunOptions:
    known = {option.flag.key: option for option in options_of(RunOptions).values() if option.flag.key}
    unknown = sorted(section.keys() - known.keys())
    if unknown:
        raise UsageError(f"{path}: tool.attncheck.{_short(unknown[0])}: unknown; expected {', '.join(sorted(known))}")
    found = {}
    for key, option in known.items():
        given, where = section.get(key), f"{path}: tool.attncheck.{key}"
        if given is not None and option.flag.read is None:
            given = _paths(given, path.parent, where)
        found[option.name] = option.read(given, where)
    return RunOptions(**found | {"cases": tuple(map(str, found["cases"]))})


def _paths(given: object, folder: Path, where: str) -> list[Path]:
    if not isinstance(given, list) or not all(isinstance(path, str) for path in given):
        raise UsageError(f"{where}: expected a list of paths")
    paths = [folder / path for path in given]
    if missing := [path for path in paths if not exists(path)]:
        raise UsageError(f"{where}: there is no {_short(str(missing[0]))}")
    return paths


def _short(text: str) -> str:
    """Write a text of a file in one line that is not too long."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
