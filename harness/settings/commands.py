"""Commands that reports print, which a user can paste into a shell in the folder where the check ran.

A run records how its implementations are named on a command line, with the options that the numbers depend on
(``command_words_by_name``). A report of its results prints them later. A function that was passed as an object has no
name there, and no command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attncheck.backends import ALL_ENTRIES
from attncheck.common.processors import emulated_isa
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.results import DEFAULT_RESULTS

# A report is Markdown, HTML, XML and a docstring, too: there these would end what a command stands in.
_NEEDS_ESCAPING = re.compile(r'["`\\]')


def command_words_by_name(
    implementations: Iterable[Implementation], limits: Limits, results: Path | None
) -> dict[str, list[str]]:
    """Return, by name, the words for an implementation on a command line, with its options that are not the default.

    ``results`` is the folder in which results are kept; None if they are not kept.
    """
    again = {}
    for item in implementations:
        entry = item.entry if isinstance(item.entry, UserImplementation) else None
        named = [item.name] if entry is None else list(entry.command_words)
        if named:
            kept = results if entry is not None and results != DEFAULT_RESULTS else None
            again[item.name] = [*named, *_limit_option_words(limits), *(["--results", str(kept)] if kept else [])]
    return again


def command_words_of(implementation: str, again: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words for an implementation of a report on a command line; empty if there are none."""
    if implementation in again:
        return list(again[implementation])
    backend, _, mode = implementation.partition(".")
    return [implementation] if backend in ALL_ENTRIES and mode in ALL_ENTRIES[backend].all_modes else []


def case_command(name: str, case: Mapping[str, Any], implementation: Sequence[str], dtype: str) -> str:
    """Return a command about one case, by its record, on an implementation, by the words of ``command_words_of``."""
    from attncheck.reading.selection import format_case_address  # what reads cases is loaded where a command is printed

    target, *options = implementation
    words = [
        _protect_leading_dash(format_case_address(case["id"], case.get("path", ""))),
        _protect_leading_dash(target),
        "--dtype",
        dtype,
        *options,
    ]
    return shell_command(["attncheck", name, *words])


def shell_command(words: Iterable[str]) -> str:
    r"""Join words to a command for a shell, on one line whatever they hold.

    Example:
        >>> shell_command(["attncheck", "show", "two\nlines"])
        "attncheck show $'two\\x0alines'"
    """
    return " ".join(map(_quote_word, words))


def _protect_leading_dash(word: str) -> str:
    """Return a word that is not read as an option, even if it is a file's name that begins with a dash."""
    return f"./{word}" if word.startswith("-") else word


def _quote_word(word: str) -> str:
    if word.isprintable() and not _NEEDS_ESCAPING.search(word):
        return shlex.quote(word)
    unsafe = {letter for letter in word if not letter.isprintable() or letter in "\"'`\\"}
    codes = {letter: letter.encode("utf-8", "surrogateescape") for letter in unsafe}
    escaped = {letter: "".join(f"\\x{byte:02x}" for byte in code) for letter, code in codes.items()}
    return f"$'{''.join(escaped.get(letter, letter) for letter in word)}'"  # as Bash, zsh and ksh read it


def _limit_option_words(limits: Limits) -> list[str]:
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
