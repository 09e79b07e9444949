"""The files of a report, written from frames: tables, the report as Markdown and HTML, and as JUnit XML.

JUnit XML, which CI systems read, has a suite per implementation, and a test per case and dtype. What fails is a failure
whose type is the verdict; what raised, crashed or ran out of time is an error; what is unsupported, or has no exact
answer to be compared with, is skipped with its reason; an expected failure passes and says why. The numbers that
documents print are a suite of their own, a test per matrix: a misprint fails there, once, and no implementation for it.
Whatever was asked for and is not there, or was not judged, is an error in another. Properties are suites too, a test
per property, case and dtype: one that is broken, or holds less than is claimed, fails. Elements and attributes are
those of the schema that Jenkins and Surefire share (junit-10.xsd of Jenkins' xUnit plugin).

``timestamp`` is when the run began (UTC), ``time`` how many seconds an evaluation took, as the run recorded both: the
same results give the same bytes, and of two runs nothing but these may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from csv import Error, reader, writer
from dataclasses import asdict
from functools import cache
from gzip import GzipFile
from importlib.util import find_spec
from io import StringIO, TextIOWrapper
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import pandas as pd

from attncheck.common.errors import ExitCode, OutputError, ResultsError
from attncheck.common.wording import ESCAPED_CHARACTERS
from attncheck.reports.cells import Cell, State, cell_table
from attncheck.reports.coverage import (
    Coverage,
    Misprint,
    coverage_by_column,
    misprints,
    printed_numbers,
    shortfall_lines,
)
from attncheck.reports.failures import outdated_records, wrong_implementations
from attncheck.reports.frames import (
    PROPERTY_COLUMNS,
    Column,
    Frames,
    group_by_key,
    property_columns,
    rows_of_column,
    select_expected_failures,
    split_by,
    to_records,
)
from attncheck.reports.html.page import render_html_pieces
from attncheck.reports.json_documents import Failure
from attncheck.reports.markdown import render_markdown
from attncheck.reports.one_failure import EVALUATION_KEYS, failing_comparisons_text
from attncheck.reports.properties import explain_command, properties_sentence, worst_row
from attncheck.reports.summary import make_summary
from attncheck.results.format import PROPERTIES_TABLE, Row
from attncheck.spec.verdicts import PropertyOutcome, Verdict

# Spreadsheets run what begins like this; some take the full-width forms too, and some pass over leading blanks.
_FORMULA_SIGN = r"[=+\-@\uff1d\uff0b\uff0d\uff20]"
_FORMULA_PATTERN = re.compile(rf"\s*{_FORMULA_SIGN}|[\t\n]")
# Where a list separator is a semicolon, a spreadsheet begins a new cell after one, whatever the quotes say.
_INNER_FORMULA_PATTERN = re.compile(rf"([;\t\n]\s*)(?={_FORMULA_SIGN})")
_NUMBER_PATTERN = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf|nan)")
_LINE_BREAK_PATTERN = re.compile(r"\r\n?")
_CONTROL_PATTERN = re.compile(rf"(?![\t\n]){ESCAPED_CHARACTERS.pattern}")


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as CSV: a line of column names, texts in quotes, all digits of numbers, empty for no value.

    If the path ends with .gz, the file is compressed.
    """
    columns = [[_quote_csv(str(name)), *_csv_values(column)] for name, column in frame.items()]
    lines = (",".join(row) + "\n" for row in zip(*columns, strict=True))
    with ExitStack() as stack:
        file: Any = stack.enter_context(path.open("wb"))
        if path.suffix == ".gz":  # without a name and a time, so that the same frame gives the same bytes
            file = stack.enter_context(GzipFile("", "wb", 1, file, 0))
        stack.enter_context(TextIOWrapper(file, encoding="utf-8", newline="")).writelines(lines)


def write_parquet(frame: pd.DataFrame, path: Path) -> bool:
    """Write a frame as Parquet if pyarrow is installed; else remove an earlier one. Return whether it is there."""
    if find_spec("pyarrow") is None:
        path.unlink(missing_ok=True)
        return False
    frame.to_parquet(path, index=False, engine="pyarrow", compression="zstd")
    return True


def _csv_values(column: pd.Series[Any]) -> list[str]:
    """Return the values of a column as CSV cells; equal values are formatted once, because texts often repeat."""
    missing = column.isna()
    if pd.api.types.is_float_dtype(column.dtype):
        return [
            "" if no else repr(value).removesuffix(".0") for value, no in zip(column.tolist(), missing, strict=True)
        ]
    codes, values = column.factorize(use_na_sentinel=True)
    texts = [*map(_csv_cell, values.tolist()), ""]  # the number of no value is -1
    return [texts[code] for code in codes.tolist()]


def _csv_cell(value: Any) -> str:
    if isinstance(value, str):
        return _quote_csv(escape_formula(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quote_csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def escape_formula(text: str) -> str:
    """Return a text as a cell that no spreadsheet runs; numbers are unchanged.

    Example:
        >>> escape_formula("=1+1"), escape_formula("-1.5")
        ("'=1+1", '-1.5')
    """
    if _NUMBER_PATTERN.fullmatch(text):
        return text
    text = _CONTROL_PATTERN.sub("\N{REPLACEMENT CHARACTER}", _LINE_BREAK_PATTERN.sub("\n", text))
    text = _INNER_FORMULA_PATTERN.sub(r"\1'", text)
    return f"'{text}" if _FORMULA_PATTERN.match(text) else text


def rows_to_csv(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV with a line of column names; no spreadsheet runs a cell."""
    text = StringIO()
    lines = ([escape_formula(str(cell)) for cell in row] for row in rows)
    writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def read_csv_text(path: Path, header: Sequence[str]) -> list[list[str]]:
    """Read the rows of a file that ``rows_to_csv`` made. Raises ``ResultsError`` for one that is damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            columns, *rows = list(reader(file)) or [[]]
    except (OSError, UnicodeError, Error) as error:
        raise ResultsError(f"{path} cannot be read: {error}; {RESTORE_ADVICE}") from None
    if tuple(columns) != tuple(header):
        raise ResultsError(f"{path} has the columns {','.join(columns)}; expected {','.join(header)}; {RESTORE_ADVICE}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ResultsError(f"{path}: row {line} has {len(row)} cells; expected {len(header)}; {RESTORE_ADVICE}")
    return rows


def write_texts(texts: Mapping[str, str], directory: Path) -> None:
    """Write files of text, by name, with the line breaks that they have. Raises ``OutputError``."""
    for name, text in texts.items():
        _write_pieces(directory / name, [text])


RESTORE_ADVICE = "restore the file from version control, or publish the folder again"
"""The fix for a damaged table of a published folder."""

_MAX_FRAME_ROWS = 10_000
"""The most rows of a plain CSV file: larger tables are for programs, which read Parquet or compressed CSV."""

REPORT_NAME = "report.md"
HTML_NAME = "report.html"
JUNIT_NAME = "junit.xml"


def write_report(frames: Frames, directory: Path) -> Path:
    """Write report.md, report.html, junit.xml, and every frame as CSV; return the path of report.md.

    With pyarrow every frame is written as Parquet too. A frame of more than 10,000 rows is written as Parquet only, or
    without pyarrow as .csv.gz. The same frames give the same bytes. Raises ``OutputError`` if the folder cannot be
    written.
    """
    if directory.is_symlink() and (directory.parent / "environment.json").exists():
        raise OutputError(f"{directory} is a link that came with the results; name another folder with --output")
    with OutputError.convert_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.tables().items():
        _write_frame(frame, directory, name)
    texts = {
        JUNIT_NAME: render_junit(frames),
        HTML_NAME: render_html_pieces(frames),
        REPORT_NAME: [render_markdown(frames)],
    }
    for name, pieces in texts.items():
        with OutputError.convert_os_errors(path := directory / name):
            _remove_link(path)
        _write_pieces(path, pieces)
    return directory / REPORT_NAME


def _write_frame(frame: pd.DataFrame, directory: Path, name: str) -> None:
    with OutputError.convert_os_errors(path := directory / f"{name}.parquet"):
        has_parquet = write_parquet(frame, _remove_link(path))
    small = len(frame) <= _MAX_FRAME_ROWS
    for suffix, is_wanted in ((".csv", small), (".csv.gz", not small and not has_parquet)):
        with OutputError.convert_os_errors(path := directory / f"{name}{suffix}"):
            if is_wanted:
                write_csv(frame, _remove_link(path))
            else:
                path.unlink(missing_ok=True)  # of an earlier report


def _remove_link(path: Path) -> Path:
    """Remove a link at a path, and return the path: results of another person may have a link to any of our files."""
    if path.is_symlink():
        path.unlink()
    return path


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    with OutputError.convert_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with OutputError.convert_os_errors(path), path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(pieces)


def write_junit(frames: Frames, path: Path) -> None:
    """Write the JUnit XML. Raises ``OutputError`` if it cannot be written."""
    _write_pieces(path, render_junit(frames))


def write_sarif(frames: Frames, path: Path) -> None:
    """Write the SARIF log of a run in this folder. Raises ``OutputError`` if it cannot be written."""
    from attncheck.reports.ci import folder_in_repository, render_sarif  # few runs write one

    _write_pieces(path, [render_sarif(frames, folder_in_repository(Path.cwd()))])


def write_badge(frames: Frames, path: Path) -> None:
    """Write the badge: as JSON for shields.io into a file that ends with .json, else as an SVG.

    Raises ``OutputError`` if it cannot be written.
    """
    from attncheck.reports.ci import make_badge, render_badge_json, render_badge_svg

    badge = make_badge(frames)
    _write_pieces(path, [render_badge_json(badge) if path.suffix == ".json" else render_badge_svg(badge)])


def write_property_table(rows: Sequence[Row], directory: Path) -> None:
    """Write rows of properties as properties.csv, as a report has them. Raises ``OutputError``."""
    path = directory / PROPERTIES_TABLE
    with OutputError.convert_os_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        write_csv(pd.DataFrame(list(map(property_columns, rows)), columns=list(PROPERTY_COLUMNS)), _remove_link(path))


def write_property_junit(rows: Sequence[Row], again: Mapping[str, Sequence[str]], path: Path) -> None:
    """Write the JUnit XML of properties only. Raises ``OutputError`` if it cannot be written."""
    suites = property_suites({"": rows}, {"": again})
    _write_pieces(path, render_suites(f"attncheck: {properties_sentence(rows)}", list(suites)))


# Characters that XML 1.0 cannot contain, not even as references.
_NOT_XML_PATTERN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_INDENT = "  "
_evaluation_key = attrgetter(*EVALUATION_KEYS)
_Key = tuple[str, str, str, str]
_Notes = Mapping[State, Mapping[_Key, Mapping[str, Any]]]
"""By state, the rows that explain tests, by case, dtype, environment and implementation."""


class Suite(NamedTuple):
    """A suite as XML, the counts of its tests and of their outcomes, and its time if that is known."""

    counts: Mapping[str, int]
    seconds: float | None
    xml: str


def make_suite(name: str, elements: Iterable[Element], started: str = "", seconds: float | None = None) -> Suite:
    """Make a suite of its tests, and its properties if it has some."""
    suite = Element("testsuite", {"name": escape_xml_characters(name)})
    suite.extend(elements)
    counts = {"tests": len(suite.findall("testcase"))}
    counts |= {_COUNTER_NAMES[kind]: len(suite.findall(f"testcase/{kind}")) for kind in _COUNTER_NAMES}
    attributes = {name: str(count) for name, count in counts.items()}
    attributes |= {} if seconds is None else {"time": _seconds_text(seconds)}
    suite.attrib |= attributes | ({"timestamp": started} if started else {})
    indent(suite, _INDENT, 1)
    return Suite(counts, seconds, f"{_INDENT}{tostring(suite, encoding='unicode')}\n")


def render_junit(frames: Frames) -> Iterator[str]:
    """Yield the XML in pieces. The same frames give the same text."""
    suites = [*_implementation_suites(frames), *_document_suites(frames), *_problem_suites(frames)]
    if frames.properties:
        suites += property_suites(frames.properties, frames.command_words)
    yield from render_suites(f"attncheck: {make_summary(frames).first_line}", suites)


def render_suites(name: str, suites: Sequence[Suite]) -> Iterator[str]:
    """Yield the XML of suites in pieces."""
    counts = {name: str(sum(suite.counts[name] for suite in suites)) for name in ("tests", "failures", "errors")}
    if times := [suite.seconds for suite in suites if suite.seconds is not None]:
        counts["time"] = _seconds_text(sum(times))
    around = tostring(
        Element("testsuites", {"name": escape_xml_characters(name)} | counts), "unicode", short_empty_elements=False
    )
    begin, end, _ = around.partition("</testsuites>")
    yield f'<?xml version="1.0" encoding="UTF-8"?>\n{begin}\n'
    yield from (suite.xml for suite in suites)
    yield f"{end}\n"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3f}"


def _implementation_suites(frames: Frames) -> Iterator[Suite]:
    wrong = {
        _evaluation_key(failure): failure for failure in (*outdated_records(frames), *wrong_implementations(frames))
    }
    rows = {
        State.XFAIL: pd.concat([select_expected_failures(frames.results), select_expected_failures(frames.numbers)]),
        State.UNSUPPORTED: frames.results[frames.results["verdict"].eq(Verdict.UNSUPPORTED)],
    }
    notes: _Notes = {
        state: {
            tuple(row[key] for key in EVALUATION_KEYS): row
            for row in to_records(of_state.drop_duplicates(list(EVALUATION_KEYS)))
        }
        for state, of_state in rows.items()
    }
    table = cell_table(frames)
    environments = {record["environment"]: record for record in to_records(frames.environments)}
    for judged in coverage_by_column(frames):
        column, times = (
            judged.column,
            rows_of_column(frames.times, judged.column) if len(frames.times) else frames.times,
        )
        seconds = {(row["case"], row["dtype"]): row["seconds"] for row in to_records(times)}
        tests = [_suite_properties(column, environments[column.environment], judged)]
        for case, cells in table.items():
            for dtype, cell in cells.get(column, {}).items():
                tests.append(test := _case_test(frames.cases[case], column, dtype, cell, notes, wrong))
                if (case, dtype) in seconds:
                    test.set("time", _seconds_text(seconds[case, dtype]))
        name, started = f"{column.environment}: {column.implementation}", frames.started.get(column.environment, "")
        yield make_suite(name, tests, started, sum(seconds.values()) if seconds else None)


def _suite_properties(column: Column, environment: Mapping[str, Any], judged: Coverage) -> Element:
    properties = Element("properties")
    of_run = {name: environment[name] for name in ("python", "platform")} | {"judged": judged.summary_text}
    for name, value in (asdict(column) | of_run).items():
        SubElement(properties, "property", {"name": name, "value": escape_xml_characters(value)})
    return properties


def _case_test(
    case: Mapping[str, Any], column: Column, dtype: str, cell: Cell, notes: _Notes, failures: Mapping[_Key, Failure]
) -> Element:
    key = (case["id"], dtype, *column.key)
    # Jenkins parses the text before the last dot as a package, and identifies a test by class and name in all suites.
    classname = f"{column.environment}.{column.implementation}.{_class_name(case['file'])}"
    name = f"{case['id'].rpartition('/')[2]} [{dtype}]"
    test = Element("testcase", {"classname": escape_xml_characters(classname), "name": escape_xml_characters(name)})
    if wrong := failures.get(key):
        _add_failure(test, case, cell, wrong)
    elif cell.state is State.UNSUPPORTED:
        message = notes[State.UNSUPPORTED].get(key, {}).get("message") or "unsupported"
        add_result(test, "skipped", message if message.startswith("unsupported") else f"unsupported: {message}")
    elif cell.state is State.UNVERIFIED:
        add_result(test, "skipped", "unverified: there is no exact answer to hold it against")
    elif cell.state in (State.MISPRINT, State.XPASS):
        SubElement(test, "system-out").text = f"{cell.verdict}: the document's, reported among the printed numbers"
    elif cell.state is State.XFAIL:
        row = notes[State.XFAIL][key]
        lines = [f"xfail {cell.verdict}", row["reason"] or row["message"], row["thread"]]
        SubElement(test, "system-out").text = escape_xml_characters("\n".join(filter(None, lines)))
    elif cell.state is State.ERRATUM:
        SubElement(test, "system-out").text = "a recorded erratum: the document prints these numbers for another call"
    return test


@cache
def _class_name(file: str) -> str:
    path = PurePosixPath(file)
    return ".".join(part for part in (*path.parent.parts, path.stem) if part not in ("/", ""))


def _add_failure(test: Element, case: Mapping[str, Any], cell: Cell, failure: Failure) -> None:
    # If a pair differs although no stage is blamed, the cell is harmless.
    verdict = Verdict(cell.verdict if cell.state is State.FAILING else failure.verdict)
    kind = "error" if verdict.exit_code is ExitCode.NOT_RUN else "failure"
    message = ": ".join(filter(None, (failure.stage, failure.message))) or verdict.value
    element = add_result(test, kind, message, verdict.value)
    lines = [message, "", f"{case['file']}:{case['line']}: {case['name']}", failing_comparisons_text(failure.rows)]
    element.text = escape_xml_characters("\n".join([*lines, *failure.next[:1], ""]))


def _document_suites(frames: Frames) -> Iterator[Suite]:
    """Make a test of every matrix that a document prints: whether its numbers hold on all implementations."""
    numbers = printed_numbers(frames)
    if numbers.empty:
        return
    wrong = {(misprint.case, misprint.stage): misprint for misprint in misprints(frames)}
    matrices = split_by(numbers, ["case", "stage"]).items()
    tests = (
        _matrix_test(frames.cases[case], stage, part, wrong.get((case, stage))) for (case, stage), part in matrices
    )
    yield make_suite("printed numbers", tests)


def _matrix_test(case: Mapping[str, Any], stage: str, numbers: pd.DataFrame, wrong: Misprint | None) -> Element:
    name = f"{case['id'].rpartition('/')[2]} [{stage}]"
    test = Element(
        "testcase",
        {
            "classname": escape_xml_characters(f"printed.{_class_name(case['file'])}"),
            "name": escape_xml_characters(name),
        },
    )
    unverified = numbers.loc[numbers["verdict"].eq(Verdict.UNVERIFIED), "index"].nunique()
    if wrong is not None:
        element = add_result(test, "failure", wrong.message, wrong.verdict)
        element.text = escape_xml_characters(f"{wrong.message}\n\n{case['file']}:{case['line']}: {case['name']}\n")
    elif numbers["verdict"].eq(Verdict.MISPRINT).any():
        SubElement(test, "system-out").text = "a recorded erratum: the document prints these numbers for another call"
    if wrong is None and unverified:
        total = numbers["index"].nunique()
        add_result(test, "skipped", f"unverified: {unverified} of {total} numbers have no exact answer to compare with")
    return test


def _problem_suites(frames: Frames) -> Iterator[Suite]:
    """Make an error of every missing unit that was requested, so that a green file means a complete run."""
    if problems := [*frames.problems, *(f"too little was judged: {line}" for line in shortfall_lines(frames))]:
        tests = []
        for number, problem in enumerate(problems, 1):
            tests.append(test := Element("testcase", {"classname": "attncheck.run", "name": f"problem {number}"}))
            add_result(test, "error", problem, "not run").text = escape_xml_characters(problem)
        yield make_suite("what could not be run", tests)


def add_result(test: Element, kind: str, message: str, error_type: str = "") -> Element:
    """Add an outcome to a test: a failure, an error, or that it was skipped."""
    attributes = {"type": error_type} if error_type else {}
    return SubElement(test, kind, attributes | {"message": escape_xml_characters(" ".join(message.split()))})


_COUNTER_NAMES = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def escape_xml_characters(text: str) -> str:
    """Replace characters that XML cannot contain by visible escapes, such as ``\\x1b``."""
    return _NOT_XML_PATTERN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def property_suites(
    properties: Mapping[str, Sequence[Row]], again: Mapping[str, Mapping[str, Sequence[str]]]
) -> Iterator[Suite]:
    """Make a suite of the properties of each implementation in each environment."""
    for label, rows in properties.items():
        for name in dict.fromkeys(row.implementation for row in rows):
            of_implementation = [row for row in rows if row.implementation == name]
            words = again.get(label, {})
            title = f"{label}: {name}: properties" if label else f"{name}: properties"
            yield make_suite(title, _property_tests(of_implementation, words))


def _property_tests(rows: Sequence[Row], again: Mapping[str, Sequence[str]]) -> Iterator[Element]:
    groups = group_by_key(rows, lambda row: (row.property_name, row.case, row.dtype))
    for (name, case, dtype), group in groups.items():
        worst = worst_row(group)
        assert worst is not None, "a group has a row"
        named = {
            "classname": escape_xml_characters(f"properties.{name}"),
            "name": escape_xml_characters(f"{case} [{dtype}]"),
        }
        test = Element("testcase", named)
        _add_property_result(test, worst, explain_command(worst, again))
        yield test


def _add_property_result(test: Element, row: Row, command: str) -> None:
    text = f"{row.variant}: {row.message}" if row.variant else row.message
    if row.fails_run:
        add_result(test, "failure", text, row.verdict).text = escape_xml_characters(f"{text}\n\n{command}\n")
    elif row.verdict == PropertyOutcome.FAILED:
        add_result(test, "error", text, row.verdict).text = escape_xml_characters(text)
    elif row.verdict in (PropertyOutcome.UNSUPPORTED, PropertyOutcome.NOT_JUDGED):
        add_result(test, "skipped", f"{row.verdict}: {text}")
    else:
        SubElement(test, "system-out").text = escape_xml_characters(f"{row.verdict}: {text}")
