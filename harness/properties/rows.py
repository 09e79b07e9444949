"""What is said of a property: one row for each way in which it was asked of an implementation.

Rows of properties on disk: one table beside the rows of a run, in CSV, as text and numbers in full.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from attncheck.errors import ExitCode, OutputError, ResultsError
from attncheck.results.format import PROPERTIES_TABLE
from attncheck.spec.properties import CLAIMS, PROPERTIES
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


_MAX_BYTES = 1 << 28


def write_property_rows(directory: Path, rows: Sequence[PropertyRow]) -> Path:
    """Write the rows of a run beside its others. Raises ``OutputError``."""
    path = directory / PROPERTIES_TABLE
    unfinished = path.with_suffix(".part")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({name: _text(value) for name, value in row.as_record().items()} for row in rows)
        unfinished.replace(path)
    except OSError as error:
        raise OutputError.of(path, error) from None
    return path


def read_property_rows(directory: Path) -> list[PropertyRow]:
    """Read the rows of a run; none where it asked for no properties. Raises ``ResultsError``."""
    path = directory / PROPERTIES_TABLE
    if path.is_symlink() or not path.is_file():
        return []
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ResultsError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ResultsError(f"{path}: expected the columns {', '.join(COLUMNS)}")
            return [_row(record) for record in reader]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None


def note_exit_code(directory: Path, code: ExitCode) -> None:
    """Let the summary of a run say what the run came to with its properties. Raises ``OutputError``."""
    path = directory / "summary.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        unfinished = path.with_suffix(".part")
        unfinished.write_text(
            json.dumps({**content, "exit_code": int(code)}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        unfinished.replace(path)
    except OSError as error:
        raise OutputError.of(path, error) from None


def _text(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "bool": _flag,
    "int": int,
    "float | None": lambda text: float(text) if text else None,
}


def _row(record: Mapping[str, str]) -> PropertyRow:
    row = PropertyRow(**{each.name: _READ[str(each.type)](record[each.name]) for each in fields(PropertyRow)})
    if row.property_name not in PROPERTIES or row.claim not in ("", *CLAIMS):
        raise ValueError(f"an unknown property or claim: {row.property_name} {row.claim}")
    PropertyOutcome(row.outcome)
    return row
