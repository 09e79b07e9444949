"""Properties as commands ask them: which cases, of which implementations, and what was expected to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attncheck.config import expected_failures_of, read_config
from attncheck.execution.implementations import Implementation
from attncheck.properties.rows import PropertyOutcome, PropertyRow
from attncheck.properties.run import Asking, Question, ask_implementations
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.selection import PROPERTIES_FILE, Selection, select_cases
from attncheck.store import NO_STORE, Store


def select_property_cases(patterns: Sequence[str], lists: Sequence[Path] = (), store: Store = NO_STORE) -> Selection:
    """Read the cases with properties that are named: by default those bundled, and the project's own.

    Raises ``UsageError`` as ``select_cases`` does.
    """
    config = read_config()
    named = patterns or (PROPERTIES_FILE, *config.cases)
    return select_cases(named, expected_failures=(*config.expected_failures, *lists), store=store, properties=True)


def ask_all(
    implementations: Sequence[Implementation],
    questions: Sequence[Question],
    asking: Asking,
    lists: Sequence[Path] = (),
    on_row: Callable[[PropertyRow], None] = lambda row: None,
    *,
    complete: bool = False,
) -> list[PropertyRow]:
    """Ask every property, and mark what was expected to fail.

    Where the questions are ``complete``, an expected failure that shows in none of them is outdated, and fails. Raises
    ``CaseError`` for lists that cannot be read.
    """
    backends = [item.entry.name for item in implementations]
    expected = [each for each in expected_failures_of(backends, lists) if each.entry.property is not None]
    rows = ask_implementations(implementations, questions, asking, lambda row: on_row(marked(row, expected)))
    return [*(marked(row, expected) for row in rows), *(_no_longer(rows, expected) if complete else ())]


def marked(row: PropertyRow, expected: Iterable[ExpectedFailure]) -> PropertyRow:
    """Mark a row that fails as a list of expected failures says, and say why."""
    entry = next((each for each in expected if _concerns(each, row)), None)
    if entry is None or row.outcome != PropertyOutcome.BROKEN:
        return row
    return replace(row, xfail=True, message=f"{row.message}; expected: {entry.entry.reason}")


def _concerns(expected: ExpectedFailure, row: PropertyRow) -> bool:
    return expected.concerns_property(row.property_name, row.implementation, row.case, row.dtype)


def _no_longer(rows: Sequence[PropertyRow], expected: Sequence[ExpectedFailure]) -> list[PropertyRow]:
    """Return a failing row for every entry that was asked for and did not happen."""
    found = []
    for each in expected:
        asked = [row for row in rows if _concerns(each, row) and row.outcome in _JUDGED]
        if asked and each.must_happen and not any(row.outcome == PropertyOutcome.BROKEN for row in asked):
            message = f"an expected failure ({each.location}) no longer happens; remove it"
            found.append(replace(asked[0], outcome=PropertyOutcome.XPASS.value, message=message, claim=""))
    return found


_JUDGED = (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS, PropertyOutcome.NAN, PropertyOutcome.BROKEN)


def described_call(question: Question) -> str:
    """Say in a line what the first call of a question is."""
    shapes = [f"{name} {'x'.join(map(str, array.shape))}" for name, array in question.problem.inputs.items()]
    options: Mapping[str, object] = question.problem.options
    given = [f"{name}={value}" for name, value in options.items()]
    return f"{question.problem.operation}({', '.join([*shapes, *given])}) in {question.dtype}"
