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
from attncheck.reading.expected_failures import ExpectedFailure, load_bundled_expected_failures, load_expected_failures
from attncheck.reading.selection import CaseSelection, check_user_files, path_exists, select_cases
from attncheck.results.coverage import MinimumJudged
from attncheck.settings.options import RunOptions, find_options

_CONFIG_FILE = "pyproject.toml"


def read_config(start: Path | None = None) -> RunOptions:
    """Read the nearest pyproject.toml in this folder or above that has the section; paths are absolute.

    Raises ``UsageError``.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        path = folder / _CONFIG_FILE
        section = _read_section(path) if path.is_file() else None
        if section is not None:
            return _options_from_section(section, path)
    return RunOptions()


def select_configured_cases(options: RunOptions, store: Store | None = None) -> CaseSelection:
    """Read the named cases; if none are named, the bundled cases and the project's.

    The cases of tiles are added. Files that were read before are taken from the ``store``. Raises ``UsageError`` as
    ``select_cases`` does.
    """
    config = read_config()
    return select_cases(
        options.cases or (("*", *config.cases) if config.cases else ()),
        options.tags,
        options.dtypes,
        expected_failures=(*config.expected_failure_lists, *options.expected_failure_lists),
        tiles=tiles_to_run(options),
        expression=options.match,
        store=store,
    )


def check_user_cases(options: RunOptions, store: Store | None = None) -> None:
    """Read the user's cases that ``selected`` reads, before anything that takes long.

    Raises ``CaseError`` if a file has a fault.
    """
    config = read_config()
    lists = (*config.expected_failure_lists, *options.expected_failure_lists)
    check_user_files(options.cases or config.cases, lists, store=store)


def tiles_to_run(options: RunOptions) -> tuple[int, ...]:
    """Return the tiles whose cases run: the given ones, or the project's if no cases are named."""
    return options.tiles or (() if options.cases else read_config().tiles)


def load_expected_failures_of(backends: Sequence[str], lists: Sequence[Path] = ()) -> tuple[ExpectedFailure, ...]:
    """Return the expected failures of backends: bundled, the project's, and of ``lists``. Raises ``CaseError``."""
    return load_bundled_expected_failures(backends) + load_expected_failures(
        [*read_config().expected_failure_lists, *lists]
    )


def minimum_to_be_judged(options: RunOptions, *, complete: bool) -> MinimumJudged | None:
    """Return the minimum to be judged: the given one, or in a complete run the project's."""
    return options.min_judged or (read_config().min_judged if complete else None)


def _read_section(path: Path) -> dict[str, Any] | None:
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


def _options_from_section(section: dict[str, Any], path: Path) -> RunOptions:
    known = {option.flag.config_key: option for option in find_options(RunOptions).values() if option.flag.config_key}
    unknown = sorted(section.keys() - known.keys())
    if unknown:
        raise UsageError(
            f"{path}: tool.attncheck.{_shorten_text(unknown[0])}: unknown; expected {', '.join(sorted(known))}"
        )
    values = {}
    for key, option in known.items():
        value, where = section.get(key), f"{path}: tool.attncheck.{key}"
        if value is not None and option.flag.parse is None:
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise UsageError(f"{where}: expected a list of paths")
            value = [path.parent / name for name in value]
            if missing := [place for place in value if not path_exists(place)]:
                raise UsageError(f"{where}: there is no {_shorten_text(str(missing[0]))}")
        values[option.name] = option.parse(value, where)
    return RunOptions(**values | {"cases": tuple(map(str, values["cases"]))})


def _shorten_text(text: str) -> str:
    """Write a text of a file in one line that is not too long."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
