"""What a command prints for programs: one JSON object on standard output, also where it ends with an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from attncheck.errors import AttncheckError, ExitCode

if TYPE_CHECKING:
    from attncheck.reports.machine.documents import Document

OPTION = "--json"


def print_document(document: Document) -> None:
    """Print a document; nothing else may stand on standard output."""
    from attncheck.reports.machine.documents import document_text

    typer.echo(document_text(document), nl=False)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, be it right or wrong."""
    words = list(arguments)
    return OPTION in (words[: words.index("--")] if "--" in words else words)


def print_error(error: AttncheckError) -> None:
    """Print why there is no outcome: for people on standard error, for programs as a document."""
    typer.echo(f"attncheck: {error}", err=True)
    if wants_json(sys.argv[1:]):
        from attncheck.reports.machine.documents import error_document

        print_document(error_document(command_of(sys.argv[1:]), error))


def print_no_outcome(message: str, kind: str = "UsageError", code: int = ExitCode.BAD_INPUT) -> None:
    """Print as a document why there is no outcome, such as a command line that cannot be read."""
    from attncheck.reports.machine.documents import error_of

    print_document(error_of(command_of(sys.argv[1:]), kind, message, code))


def command_of(arguments: Sequence[str]) -> str:
    """Return the command that a command line names, as documents name it; empty where it names none."""
    words = [word for word in arguments if not word.startswith("-")]
    return " ".join(words[: 2 if words[:1] == ["vectors"] else 1])
