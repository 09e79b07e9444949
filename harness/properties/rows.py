"""What is said of a property: one row for each way in which it was asked of an implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from attncheck.errors import ExitCode
from attncheck.wording import counted


class PropertyOutcome(StrEnum):
    """One word per outcome, from harmless to severe."""

    UNSUPPORTED = "unsupported"
    """The implementation has not what the calls need."""
    BITWISE = "bitwise"
    """Every bit is the same."""
    WITHIN_BOUNDS = "within bounds"
    """Some bits differ, and each call is within the error bound of its own exact answer."""
    NOT_JUDGED = "not judged"
    """Some bits differ, and there is no exact answer to hold them against."""
    NAN = "nan"
    """NaN where a query may not read makes its output NaN: a convention, which the mathematics leaves open."""
    FAILED = "failed"
    """A call raised, crashed or ran out of time."""
    BROKEN = "broken"
    XPASS = "xpass"
    """A recorded failure that no longer happens."""

    @property
    def severity(self) -> int:
        """Position from harmless to severe."""
        return list(PropertyOutcome).index(self)


_MEETS = {"": frozenset(PropertyOutcome) - {PropertyOutcome.BROKEN, PropertyOutcome.XPASS}}
_MEETS |= {
    "bitwise": frozenset({PropertyOutcome.BITWISE, PropertyOutcome.UNSUPPORTED, PropertyOutcome.FAILED}),
    "within bounds": _MEETS[""] - {PropertyOutcome.NAN},
}
"""By claim: the outcomes that it allows. What could not be run says nothing of a claim."""


@dataclass(frozen=True)
class PropertyRow:
    """One way in which a property was asked of an implementation, in a case and dtype.

    Attributes:
        implementation: Its name.
        property_name: The property's name.
        case: The case's id.
        dtype: The dtype of the inputs.
        variant: How it was asked: which further calls were made.
        outcome: What came of it.
        claim: What the implementation claims of the property; empty where it claims nothing.
        xfail: Whether a list of expected failures names it.
        stage: The stage of the element that is named.
        index: The element that is named, its axes comma-separated.
        first: What the first call gave there.
        second: What the further calls gave there, mapped back.
        exact: The exact answer there.
        first_bound: How far the first may be from it.
        second_bound: How far the second may be from it.
        differing: In how many elements some bits differ.
        elements: How many elements were compared.
        message: What happened, or why nothing was judged, in a sentence.
    """

    implementation: str
    property_name: str
    case: str
    dtype: str
    variant: str
    outcome: str
    claim: str = ""
    xfail: bool = False
    stage: str = ""
    index: str = ""
    first: float | None = None
    second: float | None = None
    exact: float | None = None
    first_bound: float | None = None
    second_bound: float | None = None
    differing: int = 0
    elements: int = 0
    message: str = ""

    @property
    def fails(self) -> bool:
        """Whether it fails: broken, or less than is claimed; whether or not that was expected."""
        return PropertyOutcome(self.outcome) not in _MEETS[self.claim]

    @property
    def fails_run(self) -> bool:
        """Whether it fails a run."""
        return self.fails and not self.xfail

    @property
    def sentence(self) -> str:
        """What happened, and what was claimed, where that does not hold."""
        if self.fails and self.outcome not in (PropertyOutcome.BROKEN, PropertyOutcome.XPASS):
            return f"claimed to be {self.claim}, and is {self.outcome}: {self.message}"
        return self.message

    def as_record(self) -> dict[str, Any]:
        """Return it as a line of a table has it."""
        return asdict(self)


COLUMNS = tuple(each.name for each in fields(PropertyRow))


def worst_of(rows: Iterable[PropertyRow]) -> PropertyRow | None:
    """Return the row that stands for several: a failing one, or the most severe."""
    ordered = sorted(rows, key=lambda row: (row.fails_run, row.fails, PropertyOutcome(row.outcome).severity))
    return ordered[-1] if ordered else None


def exit_code_of(rows: Sequence[PropertyRow]) -> ExitCode:
    """Return what the rows make of a run: 1 where a property is broken, or less than is claimed."""
    if any(row.fails_run for row in rows):
        return ExitCode.DISAGREE
    judged = [row for row in rows if row.outcome != PropertyOutcome.UNSUPPORTED]
    if not judged or any(row.outcome == PropertyOutcome.FAILED for row in rows):
        return ExitCode.NOT_RUN
    return ExitCode.AGREE


def sentence_of(rows: Sequence[PropertyRow]) -> str:
    """Say in a line what properties come to."""
    asked = [row for row in rows if row.outcome != PropertyOutcome.UNSUPPORTED]
    names = {row.property_name for row in asked}
    failing = [row for row in asked if row.fails_run]
    if not asked:
        return "No property was judged."
    properties = "1 property" if len(names) == 1 else f"{len(names)} properties"
    what = f"{properties}, {counted(len(asked), 'comparison')}"
    if not failing:
        return f"Properties hold: {what}."
    broken = list(dict.fromkeys(f"{row.implementation}: {row.property_name}" for row in failing))
    return f"Properties do not hold: {'; '.join(broken)} ({what})."
