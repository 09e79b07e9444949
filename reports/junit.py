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
from collections.abc import Iterator, Mapping
from functools import cache
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

_KEYS = ["case", "dtype", "environment", "implementation"]
_Key = tuple[str, str, str, str]


class _Said(NamedTuple):
    """What the results say of tests, by case, dtype, environment and implementation."""

    wrong: Mapping[_Key, Mapping[str, Any]]
    known: Mapping[_Key, Mapping[str, Any]]
    unsupported: Mapping[_Key, Mapping[str, Any]]


def render_junit(frames: Frames) -> str:
    """Return the XML. The same frames give the same text."""
    root = Element("testsuites", {"name": "attncheck"})
    for suite in (*_suites(frames), *_problems(frames)):
        root.append(suite)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, 0)) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suites(frames: Frames) -> Iterator[Element]:
    said = _Said(
        _by_key(what_is_wrong(frames)),
        _by_key(pd.concat([known_divergences(frames.results), known_divergences(frames.numbers)])),
        _by_key(frames.results[frames.results["verdict"].eq(Verdict.UNSUPPORTED)]),
    )
    table = cell_table(frames)
    environments = {record["environment"]: record for record in records(frames.environments)}
    for column in frames.columns:
        name = f"{column.environment}: {column.implementation}"
        suite = Element("testsuite", {"name": xml_text(name)})
        _add_properties(suite, column, environments[column.environment])
        for case, cells in table.items():
            for dtype, cell in cells.get(column, {}).items():
                suite.append(_test(frames.cases[case], column, dtype, cell, said))
        yield _counted(suite)


def _by_key(frame: pd.DataFrame) -> dict[_Key, dict[str, Any]]:
    """Return the first row of each case, dtype, environment and implementation."""
    return {tuple(row[key] for key in _KEYS): row for row in records(frame.drop_duplicates(_KEYS))}


def _add_properties(suite: Element, column: Column, environment: Mapping[str, Any]) -> None:
    properties = SubElement(suite, "properties")
    of_column = {"environment": column.environment, "implementation": column.implementation, "version": column.version}
    for name, value in (of_column | {name: environment[name] for name in ("python", "platform")}).items():
        SubElement(properties, "property", {"name": name, "value": xml_text(value)})


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


def _problems(frames: Frames) -> Iterator[Element]:
    """Make an error of everything that was asked for and is not there: a green file must mean a complete run."""
    if not frames.problems:
        return
    suite = Element("testsuite", {"name": "what could not be run"})
    for number, problem in enumerate(frames.problems, 1):
        test = SubElement(suite, "testcase", {"classname": "attncheck.run", "name": f"problem {number}"})
        _add(test, "error", problem, "not run").text = xml_text(problem)
    yield _counted(suite)


def _add(test: Element, kind: str, message: str, its_type: str = "") -> Element:
    attributes = {"type": its_type} if its_type else {}
    return SubElement(test, kind, attributes | {"message": xml_text(" ".join(message.split()))})


def _counted(suite: Element) -> Element:
    counts = {"tests": len(suite.findall("testcase"))}
    counts |= {name: len(suite.findall(f"testcase/{tag}")) for name, tag in _COUNTED.items()}
    for name, count in counts.items():
        suite.set(name, str(count))
    return suite


_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _in_words(message: object, verdict: str) -> str:
    text = _text(message)
    return text if text.startswith(verdict) else f"{verdict}: {text}" if text else verdict


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def xml_text(text: str) -> str:
    """Write what XML cannot hold as a visible escape, such as ``\\x1b``; nothing is lost, nothing is markup."""
    return _NO_XML.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
