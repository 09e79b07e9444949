"""The output of commands (an answer, JSON, an error), and how they find one case or read results back."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from attncheck.cli.parameters import SUMMARY_VARIABLE
from attncheck.common.errors import AttncheckError, ExitCode, OutputError
from attncheck.common.wording import escape_to_one_line
from attncheck.results import DEFAULT_RESULTS

if TYPE_CHECKING:
    from attncheck.cli.parameters import OutputFormats
    from attncheck.execution.call import Limits, WorkerProcess
    from attncheck.execution.implementations import Implementation
    from attncheck.reading.case import Case
    from attncheck.reading.selection import CaseSelection
    from attncheck.reports.frames import Frames
    from attncheck.reports.json_documents import Document
    from attncheck.reports.terminal import Line
    from attncheck.results.coverage import MinimumJudged
    from attncheck.results.last_failed import CheckRecord


JSON_OPTION = "--json"


def print_document(document: Document) -> None:
    """Print a document; nothing else may stand on standard output."""
    from attncheck.reports.json_documents import document_to_json

    typer.echo(document_to_json(document), nl=False)


def make_document(command: str, code: int, answer: str, **fields: Any) -> Document:
    """Return the document of a command, with the fields that every one begins with and its own."""
    from attncheck.reports.json_documents import opening_fields
    from attncheck.showing.json_schema import DOCUMENTS

    return DOCUMENTS[command](**opening_fields(command, code, answer), **fields)


def show_outcome(document: Document, lines: Iterable[Line], *, as_json: bool, quiet: bool = False) -> None:
    """Print an outcome, as a document for programs or as lines for people."""
    from attncheck.reports.terminal import print_lines

    if as_json:
        print_document(document)
    elif not quiet:
        print_lines(lines)


def print_and_exit(document: Document, lines: Iterable[Line], *, as_json: bool, quiet: bool = False) -> NoReturn:
    """Print an outcome, and end the command with its exit code."""
    show_outcome(document, lines, as_json=as_json, quiet=quiet)
    raise typer.Exit(document.exit_code)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line has ``--json``, even if it is invalid.

    Example:
        >>> wants_json(["check", "--json"]), wants_json(["protocol", "--", "program", "--json"])
        (True, False)
    """
    words = list(arguments)
    return JSON_OPTION in (words[: words.index("--")] if "--" in words else words)


def print_error(error: AttncheckError) -> None:
    """Print why there is no outcome: as text on standard error, and with ``--json`` as a document."""
    typer.echo("\n".join(map(escape_to_one_line, f"attncheck: {error}".split("\n"))), err=True)
    if wants_json(sys.argv[1:]):
        from attncheck.reports.json_documents import document_of_error

        print_document(document_of_error(command_name(sys.argv[1:]), error))


def print_error_document(message: str, kind: str = "UsageError", code: int = ExitCode.BAD_INPUT) -> None:
    """Print a document with the reason why there is no outcome, such as an invalid command line."""
    from attncheck.reports.json_documents import make_error_document

    print_document(make_error_document(command_name(sys.argv[1:]), kind, message, code))


def command_name(arguments: Sequence[str]) -> str:
    """Return the command of a command line, as documents name it; empty if there is none.

    Example:
        >>> command_name(["vectors", "--json", "verify", "folder"])
        'vectors verify'
    """
    words = [word for word in arguments if not word.startswith("-")]
    return " ".join(words[: 2 if words[:1] == ["vectors"] else 1])


def rerun_commands(
    case: Mapping[str, Any],
    implementation: Implementation,
    limits: Limits,
    dtype: str,
    names: Sequence[str] = ("explain", "repro"),
) -> list[str]:
    """Return commands about a case, given as its record, on an implementation."""
    from attncheck.settings.commands import case_command, command_words_by_name

    again = command_words_by_name([implementation], limits, None).get(implementation.name, [implementation.name])
    return [case_command(name, case, again, dtype) for name in names]


def select_one(case: str, checked: CheckRecord | None = None) -> tuple[Case, CaseSelection]:
    """Return the one case of a name, and its selection.

    A case that neither the folders below nor the project's configuration have may be in a check's results.
    """
    from attncheck.reading import selection
    from attncheck.settings.config import read_config

    config = read_config()
    try:
        return selection.select_case(case, config.cases, lists=config.expected_failure_lists)
    except selection.NoSuchCaseError:
        address = checked.case_address(case) if checked else None
        if address is None or address == case:
            raise
    return selection.select_case(address)


def read_earlier_check(results: Path | None) -> CheckRecord | None:
    """Return the results of the check to which commands about one case may refer; None if there are none."""
    from attncheck.results.last_failed import read_check_record

    return read_check_record(results or DEFAULT_RESULTS, needed=results is not None)


def print_case_faults(selection: CaseSelection) -> None:
    """Print faults of case files on stderr."""
    for fault in selection.faults:
        typer.echo(f"attncheck: {fault}", err=True)


def split_names(names: list[str] | None) -> list[str]:
    """Split a,b and repeated options alike."""
    return [part for name in names or () for part in name.split(",") if part]


def read_frames_of_runs(runs: list[Path], minimum: MinimumJudged | None = None) -> Frames:
    """Read results directories back as the frames of one report; ``minimum`` replaces what the runs were asked."""
    from attncheck.reports.frames import make_frames
    from attncheck.reports.merge import merge_runs
    from attncheck.results.reader import read_runs

    frames = make_frames(merge_runs(read_runs(runs)))
    if minimum is None:
        return frames
    return replace(
        frames, requests={name: replace(asked, minimum_judged=minimum) for name, asked in frames.requests.items()}
    )


def write_frames(frames: Frames, directory: Path) -> Path:
    """Write the report, and return the file to open first."""
    from attncheck.reports.write import write_report

    return write_report(frames, directory)


Value = TypeVar("Value")


class ReportProcess:
    """A process that makes the report of a run: it imports pandas while the run computes.

    It calls the functions of ``reports.report_process``, and stays for the next run of ``--watch``.
    """

    def __init__(self) -> None:
        self._starting: Future[WorkerProcess] | None = None

    def start(self) -> None:
        """Start the process, unless it has been started, without waiting for it."""
        from attncheck.execution.call import start_single_threaded
        from attncheck.reports.report_process import IMPORTED_MODULES

        if self._starting is None:
            threads = ThreadPoolExecutor(1, thread_name_prefix="attncheck report")
            self._starting = threads.submit(start_single_threaded, *IMPORTED_MODULES)
            threads.shutdown(wait=False)

    def call(self, function: Callable[..., Value], *arguments: object) -> Value | None:
        """Return what a function returns there; None if that fails.

        The caller's own call then raises the same error.
        """
        from attncheck.execution.call import RemoteError, WorkerDied

        if self._starting is None:
            return None
        try:
            worker = self._starting.result()
        except Exception:  # it could not be started, whatever the reason is
            self._starting = None
            return None
        try:
            return worker.call(function, *arguments, seconds=math.inf)
        except (WorkerDied, RemoteError):
            worker.kill()
            self._starting = None
            return None


@dataclass(frozen=True)
class ReportLocation:
    """The folder of results, and the report's file to open first; None where no report is written."""

    results: Path
    report: Path | None

    @property
    def first_file(self) -> Path:
        """The report, or the results without one."""
        return self.results if self.report is None else self.report


def write_and_show(
    frames: Frames,
    results: Path,
    folder: Path | None,
    code: ExitCode,
    *,
    as_json: str = "",
    quiet: bool,
    announced: Collection[str] = (),
) -> ReportLocation:
    """Print the answer and write the report to ``folder``, if one is named; return where both are.

    People read the answer while the report is written; notes that were ``announced`` are not repeated. With
    ``as_json``, the name of a command, its JSON document is printed when the report is there.
    """
    from attncheck.reports.outcome import outcome_document
    from attncheck.reports.short_form import summary_lines
    from attncheck.reports.terminal import print_lines

    if not as_json:
        print_lines(summary_lines(frames, quiet=quiet, announced=announced))
    place = ReportLocation(results, None if folder is None else write_frames(frames, folder))
    if as_json:
        print_document(outcome_document(frames, code, command=as_json, report=place.report, results=results))
    elif not quiet:
        print_report_location(place)
    return place


def print_report_location(place: ReportLocation) -> None:
    """Print where the report is, or how to write it."""
    from attncheck.settings.commands import shell_command

    if place.report is not None:
        typer.echo(f"Report: {place.report.with_suffix('.html')}")
        return
    typer.echo(f"Results: {place.results}")
    typer.echo(f"Report: not written; {shell_command(['attncheck', 'report', str(place.results)])} writes it")


def open_page(page: Path) -> None:
    """Open a page in the browser that the system, or BROWSER, names; print where it is if there is none."""
    import webbrowser

    if not webbrowser.open(page.absolute().as_uri()):
        typer.echo(f"attncheck: no browser could be started; the page is {page}", err=True)


def write_ci_outputs(frames: Frames, place: ReportLocation, outlets: OutputFormats, *, as_json: bool) -> None:
    """Write what the options, or the CI system by its environment, ask for, and open the report where that is asked."""
    if outlets.open and place.report is not None:
        open_page(place.report.with_suffix(".html"))
    if not outlets.has_any:
        return
    from attncheck.reports.ci import annotation_lines, append_summary, render_ci_summary
    from attncheck.reports.write import write_badge, write_junit, write_sarif

    report, is_written = place.first_file, place.report is not None
    if outlets.annotations:
        for line in annotation_lines(frames, report, is_written=is_written):
            typer.echo(line, err=as_json)
    if outlets.junit_xml:
        write_junit(frames, outlets.junit_xml)
    if outlets.sarif:
        write_sarif(frames, outlets.sarif)
    for badge in outlets.badge or ():
        write_badge(frames, badge)
    if outlets.ci_summary:
        append_summary(render_ci_summary(frames, report, is_written=is_written), outlets.ci_summary)
    elif named := os.environ.get(SUMMARY_VARIABLE):
        try:
            append_summary(render_ci_summary(frames, report, is_written=is_written), Path(named))
        except OutputError as error:  # nobody asked for it here: a container, say, that does not see the CI's file
            typer.echo(f"attncheck: {error}", err=True)
