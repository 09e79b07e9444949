"""Commands that reports print: each can be pasted into a shell, in the folder where the check ran, and works.

A run writes down how its implementations are named on a command line, with the options that the numbers depend on
(``words_again``), so that a report of its results can say so later. What was handed over as an object has no name
there, and no command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attncheck.backends import EVERYTHING
from attncheck.common.processors import emulated_isa
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.results import DEFAULT_RESULTS

# A report is Markdown, HTML, XML and a docstring, too: there these would end what a command stands in.
_TROUBLESOME = re.compile(r'["`\\]')


def words_again(
    implementations: Iterable[Implementation], limits: Limits, results: Path | None
) -> dict[str, list[str]]:
    """Return by name what names an implementation on a command line, and how it was run where that is not as ever.

    ``results`` is the folder that keeps what was found; None where nothing is kept.
    """
    found = {}
    for item in implementations:
        own = item.entry if isinstance(item.entry, UserImplementation) else None
        named = [item.name] if own is None else list(own.given)
        if named:
            kept = results if own is not None and results != DEFAULT_RESULTS else None
            found[item.name] = [*named, *_limits(limits), *(["--results", str(kept)] if kept else [])]
    return found


def words_of(implementation: str, again: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what names an implementation of a report; empty where no command line can."""
    if implementation in again:
        return list(again[implementation])
    backend, _, mode = implementation.partition(".")
    return [implementation] if backend in EVERYTHING and mode in EVERYTHING[backend].all_modes else []


def command(name: str, case: Mapping[str, Any], implementation: Sequence[str], dtype: str) -> str:
    """Return a command about one case, given as its record, on an implementation, as ``words_of`` names it."""
    from attncheck.reading.selection import address  # what reads cases is loaded where a command is printed

    target, *options = implementation
    words = [_argument(address(case["id"], case.get("path", ""))), _argument(target), "--dtype", dtype, *options]
    return joined(["attncheck", name, *words])


def joined(words: Iterable[str]) -> str:
    """Join words to a command for a shell, on one line whatever they hold."""
    return " ".join(map(_quoted, words))


def _argument(word: str) -> str:
    """Keep a shell's user from giving the name of a file as an option."""
    return f"./{word}" if word.startswith("-") else word


def _quoted(word: str) -> str:
    if word.isprintable() and not _TROUBLESOME.search(word):
        return shlex.quote(word)
    letters = (each if each.isprintable() and each not in "\"'`\\" else _escaped(each) for each in word)
    return f"$'{''.join(letters)}'"  # as Bash, zsh and ksh read it


def _escaped(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))


def _limits(limits: Limits) -> list[str]:
    standard = Limits()
    words = []
    if limits.threads != standard.threads:
        words += ["--threads", str(limits.threads)]
    if isa := emulated_isa():
        words += ["--isa", isa]
    if limits.case_seconds != standard.case_seconds:
        words += ["--time-limit", f"{limits.case_seconds:g}"]
    if limits.hard_memory_limit != standard.hard_memory_limit:
        words += ["--memory-limit", f"{limits.hard_memory_limit / 2**30:g}"]
    return words
