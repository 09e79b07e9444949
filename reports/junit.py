"""The report as JUnit XML, which CI systems read: a suite per implementation, a test per case and dtype.

What fails is a failure whose type is the verdict; what raised, crashed or ran out of time is an error; what is
unsupported, or has no exact answer to be held against, is skipped with its reason; a known divergence passes and says
why. Whatever was asked for and is not there is an error in a suite of its own. Elements and attributes are those of the
schema that Jenkins and Surefire share (junit-10.xsd of Jenkins' xUnit plugin). No durations and no dates: results have
none, and the same results give the same bytes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, starmap
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import pandas as pd

from attncheck.harness.errors import ExitCode
from attncheck.harness.verdicts import Verdict
from attncheck.reports.answer import what_is_wrong
from attncheck.reports.cells import Cell, State, cell_table
from attncheck.reports.frames import Column, Frames, known_divergences, records

# What XML 1.0 has no way to write, not even as a reference.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_INDENT = "  "
_KEYS = ["case", "dtype", "environment", "implementation"]
_Key = tuple[str, str, str, str]


class _Said(NamedTuple):
    """What the results say of tests, by case, dtype, environment and implementation."""

    wrong: Mapping[_Key, Mapping[str, Any]]
    known: Mapping[_Key, Mapping[str, Any]]
    unsupported: Mapping[_Key, Mapping[str, Any]]


@dataclass(frozen=True)
class _Suite:
    """A suite whose elements are made whenever they are asked for: one of a hundred thousand is in memory."""

    name: str
    elements: Callable[[], Iterable[Element]]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How many tests there are, and what became of them."""
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for element in self.elements():
            counts["tests"] += element.tag == "testcase"
            for child in element:
                if child.tag in _COUNTED:
                    counts[_COUNTED[child.tag]] += 1
        return counts


def render_junit(frames: Frames) -> Iterator[str]:
    """Give the XML piece by piece. The same frames give the same text."""
    suites = [*_suites(frames), *_problems(frames)]
    counts = {name: sum(suite.counts[name] for suite in suites) for name in ("tests", "failures", "errors")}
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    of_suites = (_around("testsuite", each.name, each.counts, _lines(each), 1) for each in suites)
    yield from _around("testsuites", "attncheck", counts, chain.from_iterable(of_suites), 0)


def _around(tag: str, name: str, counts: Mapping[str, int], children: Iterable[str], level: int) -> Iterator[str]:
    """Put the lines of children, if there are any, between the tags of an element."""
    element = Element(tag, {"name": xml_text(name)} | {key: str(count) for key, count in counts.items()})
    lines = iter(children)
    if (first := next(lines, None)) is None:
        yield _line(element, level)
        return
    element.text = "\n"  # between the tags: in attributes, a line break is written as a reference
    begin, end = tostring(element, encoding="unicode").split("\n")
    yield f"{_INDENT * level}{begin}\n"
    yield first
    yield from lines
    yield f"{_INDENT * level}{end}\n"


def _lines(suite: _Suite) -> Iterator[str]:
    return (_line(element, 2) for element in suite.elements())


def _line(element: Element, level: int) -> str:
    indent(element, _INDENT, level)
    return f"{_INDENT * level}{tostring(element, encoding='unicode')}\n"


def _suites(frames: Frames) -> Iterator[_Suite]:
    said = _Said(
        _by_key(what_is_wrong(frames)),
        _by_key(pd.concat([known_divergences(frames.results), known_divergences(frames.numbers)])),
        _by_key(frames.results[frames.results["verdict"].eq(Verdict.UNSUPPORTED)]),
    )
    table = cell_table(frames)
    environments = {record["environment"]: record for record in records(frames.environments)}
    for column in frames.columns:

        def elements(column: Column = column) -> Iterator[Element]:
            yield _properties(column, environments[column.environment])
            for case, cells in table.items():
                for dtype, cell in cells.get(column, {}).items():
                    yield _test(frames.cases[case], column, dtype, cell, said)

        yield _Suite(f"{column.environment}: {column.implementation}", elements)


def _by_key(frame: pd.DataFrame) -> dict[_Key, dict[str, Any]]:
    """Return the first row of each case, dtype, environment and implementation."""
    return {tuple(row[key] for key in _KEYS): row for row in records(frame.drop_duplicates(_KEYS))}


def _properties(column: Column, environment: Mapping[str, Any]) -> Element:
    properties = Element("properties")
    of_column = {"environment": column.environment, "implementation": column.implementation, "version": column.version}
    for name, value in (of_column | {name: environment[name] for name in ("python", "platform")}).items():
        SubElement(properties, "property", {"name": name, "value": xml_text(value)})
    return properties


def _test(case: Mapping[str, Any], column: Column, dtype: str, cell: Cell, said: _Said) -> Element:
    key = (case["id"], dtype, column.environment, column.implementation)
    # Jenkins takes what stands before the last dot for a package, and a class and a name for one test in all suites.
    place = f"{column.environment}.{column.implementation}.{_topic(case['file'])}"
    name = f"{case['id'].rpartition('/')[2]} [{dtype}]"
    test = Element("testcase", {"classname": xml_text(place), "name": xml_text(name)})
    if key in said.wrong:
        _add_failure(test, case, column, dtype, cell, said.wrong[key])
    elif cell.state is State.UNSUPPORTED:
        _add(test, "skipped", _in_words(said.unsupported.get(key, {}).get("message"), "unsupported"))
    elif cell.state is State.UNVERIFIED:
        _add(test, "skipped", "unverified: there is no exact answer to hold it against")
    elif cell.state is State.KNOWN:
        row = said.known[key]
        told = [f"known {cell.verdict}", _text(row["reason"]) or _text(row["message"]), _text(row["thread"])]
        SubElement(test, "system-out").text = xml_text("\n".join(filter(None, told)))
    elif cell.state is State.ERRATUM:
        SubElement(test, "system-out").text = "a recorded erratum: the document prints these numbers for another call"
    return test


@cache
def _topic(file: str) -> str:
    return ".".join(part for part in PurePosixPath(file).with_suffix("").parts if part != "/")


def _add_failure(
    test: Element, case: Mapping[str, Any], column: Column, dtype: str, cell: Cell, row: Mapping[str, Any]
) -> None:
    # A pair that differs although no stage is blamed leaves the cell itself harmless.
    verdict = Verdict(cell.verdict if cell.state is State.FAILING else row["verdict"])
    kind = "error" if verdict.exit_code is ExitCode.NOT_RUN else "failure"
    message = ": ".join(filter(None, (row["stage"], row["message"]))) or verdict.value
    again = shlex.join(["attncheck", "explain", case["id"], column.implementation, "--dtype", dtype])
    count = "1 comparison fails" if row["rows"] == 1 else f"{row['rows']} comparisons fail"
    element = _add(test, kind, message, verdict.value)
    element.text = xml_text(f"{message}\n\n{case['file']}:{case['line']}: {case['name']}\n{count}\n{again}\n")


def _problems(frames: Frames) -> Iterator[_Suite]:
    """Make an error of everything that was asked for and is not there: a green file must mean a complete run."""
    if frames.problems:
        yield _Suite("what could not be run", lambda: starmap(_problem, enumerate(frames.problems, 1)))


def _problem(number: int, problem: str) -> Element:
    test = Element("testcase", {"classname": "attncheck.run", "name": f"problem {number}"})
    _add(test, "error", problem, "not run").text = xml_text(problem)
    return test


def _add(test: Element, kind: str, message: str, its_type: str = "") -> Element:
    attributes = {"type": its_type} if its_type else {}
    return SubElement(test, kind, attributes | {"message": xml_text(" ".join(message.split()))})


_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def _in_words(message: object, verdict: str) -> str:
    text = _text(message)
    return text if text.startswith(verdict) else f"{verdict}: {text}" if text else verdict


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def xml_text(text: str) -> str:
    """Write what XML cannot hold as a visible escape, such as ``\\x1b``; nothing is lost, nothing is markup."""
    return _NO_XML.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
