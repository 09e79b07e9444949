"""Properties as JUnit XML: a suite per implementation, a test per property, case and dtype.

A broken property, and one that holds less than is claimed, is a failure; a call that gave nothing is an error; what is
unsupported or could not be judged is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement

from attncheck.properties.rows import PropertyOutcome, PropertyRow, worst_of
from attncheck.reports.junit import Suite, add_result, xml_text
from attncheck.reports.properties import command_for


def property_suites(
    properties: Mapping[str, Sequence[PropertyRow]], again: Mapping[str, Mapping[str, Sequence[str]]]
) -> Iterator[Suite]:
    """Make a suite of what each implementation came to, by environment."""
    for label, rows in properties.items():
        for name in dict.fromkeys(row.implementation for row in rows):
            own = [row for row in rows if row.implementation == name]
            words = again.get(label, {})
            title = f"{label}: {name}: properties" if label else f"{name}: properties"
            yield Suite(title, lambda own=own, words=words: _tests(own, words))  # type: ignore[misc]


def _tests(rows: Sequence[PropertyRow], again: Mapping[str, Sequence[str]]) -> Iterator[Element]:
    groups: dict[tuple[str, str, str], list[PropertyRow]] = {}
    for row in rows:
        groups.setdefault((row.property_name, row.case, row.dtype), []).append(row)
    for (name, case, dtype), group in groups.items():
        worst = worst_of(group)
        assert worst is not None, "a group has a row"
        named = {"classname": xml_text(f"properties.{name}"), "name": xml_text(f"{case} [{dtype}]")}
        test = Element("testcase", named)
        _add(test, worst, command_for(worst, again))
        yield test


def _add(test: Element, row: PropertyRow, command: str) -> None:
    text = f"{row.variant}: {row.sentence}" if row.variant else row.sentence
    if row.fails_run:
        add_result(test, "failure", text, row.outcome).text = xml_text(f"{text}\n\n{command}\n")
    elif row.outcome == PropertyOutcome.FAILED:
        add_result(test, "error", text, row.outcome).text = xml_text(text)
    elif row.outcome in (PropertyOutcome.UNSUPPORTED, PropertyOutcome.NOT_JUDGED):
        add_result(test, "skipped", f"{row.outcome}: {text}")
    else:
        SubElement(test, "system-out").text = xml_text(f"{row.outcome}: {text}")
