"""The commands that show one cell again, as a shell takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from attncheck.harness.running.own import name_of
from attncheck.reports.frames import Column, Frames

_SEPARATORS = re.compile(r"[=,]")
_COMMANDS = ("explain", "repro")


def commands_of(case: str, column: Column, dtype: str, own: Mapping[Column, list[str]]) -> tuple[str, ...]:
    """Return a command that explains the cell, and one that writes a script of it."""
    words = [case, *own.get(column, [column.implementation]), "--dtype", dtype]
    return tuple(shlex.join(["attncheck", command, *words]) for command in _COMMANDS)


def own_implementations(frames: Frames) -> dict[Column, list[str]]:
    """Return how those are named that were given as file.py:function: as the run's own command names them."""
    commands = zip(frames.environments["environment"], frames.environments["command"], strict=True)
    words = {environment: _split(command) for environment, command in commands}
    named = {environment: _targets(own) for environment, own in words.items()}
    return {
        column: [target, *_framework(words[column.environment])]
        for column in frames.columns
        if (target := named.get(column.environment, {}).get(column.implementation))
    }


def _split(command: object) -> list[str]:
    try:
        return shlex.split(str(command))
    except ValueError:
        return []


def _targets(words: Iterable[str]) -> dict[str, str]:
    """Return the targets among a command's words, by the names that they have in a report."""
    found = {}
    for target in (part for word in words for part in _SEPARATORS.split(word)):
        module, colon, attribute = target.rpartition(":")
        if colon and module and attribute:
            found[f"{name_of(module)}.{attribute}"] = target
    return found


def _framework(words: list[str]) -> list[str]:
    for place, word in enumerate(words):
        if word == "--framework" and place + 1 < len(words):
            return ["--framework", words[place + 1]]
        if word.startswith("--framework="):
            return [word]
    return []
