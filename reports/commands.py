"""The commands that show what fails again, as every format of a report prints them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from attncheck.commands import command, words_of
from attncheck.reports.defects import defects
from attncheck.reports.frames import Frames

_MAX_SHOWN = 3


def commands_again(frames: Frames, cell: Mapping[str, Any], names: tuple[str, ...] = ("explain",)) -> tuple[str, ...]:
    """Return commands about a cell, a record with its case, dtype, environment and implementation.

    There are none where no command line can name the implementation: it was handed over as an object.
    """
    words = words_of(cell["implementation"], frames.again.get(cell["environment"], {}))
    case = frames.cases[cell["case"]]
    return tuple(command(name, case, words, cell["dtype"]) for name in names) if words else ()


def first_commands(frames: Frames) -> list[str]:
    """Return a command for the first defect of each of some implementations.

    What a document prints wrongly is no implementation's, and has no dtype.
    """
    firsts: dict[tuple[str, str], Mapping[str, Any]] = {}
    for each in defects(frames):
        if each.is_shown_by_calls:
            firsts.setdefault(each.column, each.row)
    found = (line for row in firsts.values() for line in commands_again(frames, row))
    return list(islice(found, _MAX_SHOWN))
