"""The commands that show what fails again, as every format of a report prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attncheck.commands import command, words_of
from attncheck.reports.frames import Frames, records

_MAX_SHOWN = 3


def commands_again(frames: Frames, cell: Mapping[str, Any], names: tuple[str, ...] = ("explain",)) -> tuple[str, ...]:
    """Return commands about a cell, a record with its case, dtype, environment and implementation.

    There are none where no command line can name the implementation: it was handed over as an object.
    """
    words = words_of(cell["implementation"], frames.again.get(cell["environment"], {}))
    case = frames.cases[cell["case"]]
    return tuple(command(name, case, words, cell["dtype"]) for name in names) if words else ()


def first_commands(frames: Frames, wrong: Any) -> list[str]:
    """Return a command for the first cell that each of some implementations fails, of a frame of ``findings``.

    What a document prints wrongly is no implementation's, and has no dtype.
    """
    of_implementations = wrong[wrong["implementation"].ne("") & wrong["dtype"].ne("")]
    first = of_implementations.drop_duplicates(["environment", "implementation"])
    found: Iterator[str] = (line for row in records(first) for line in commands_again(frames, row))
    return [line for line, _ in zip(found, range(_MAX_SHOWN), strict=False)]
