"""What the results of a check say of one case: how to reach it, what was found, and the calls that came before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from attncheck.errors import ResultsError
from attncheck.reading.addresses import address
from attncheck.results.failed import CaseInDtype
from attncheck.results.parts import read_rows
from attncheck.results.reader import read_environment
from attncheck.results.records import CaseRecords, read_cases
from attncheck.verdicts import Verdict


@dataclass(frozen=True)
class Checked:
    """A check's results: its case records in the order of its plan, and when they were written."""

    directory: Path
    cases: CaseRecords
    again: Mapping[str, list[str]]
    written: float

    def address(self, identity: str) -> str | None:
        """Return what leads to a case of the check; None where it had none of that id."""
        record = self.cases.get(identity)
        return None if record is None else address(identity, record.get("path", ""))

    def asked(self, implementation: str) -> dict[CaseInDtype, str]:
        """Return what became of the stages of every call, in the plan's order; empty text where nothing is wrong."""
        table, _ = read_rows(self.directory)
        kept = pc.and_(pc.equal(table["implementation"], implementation), pc.equal(table["comparison"], "stage"))
        found: dict[CaseInDtype, list[dict[str, Any]]] = {}
        for row in table.filter(kept).to_pylist():
            found.setdefault((row["case"], row["dtype"]), []).append(row)
        in_order = ((identity, dtype) for identity, record in self.cases.items() for dtype in record["dtypes"])
        return {where: what_became(found[where]) for where in in_order if where in found}


def read_checked(directory: Path, *, needed: bool) -> Checked | None:
    """Read what a folder holds; None where there is nothing, unless it is ``needed``. Raises ``ResultsError``."""
    try:
        environment = read_environment(directory)
    except ResultsError:
        if needed:
            raise
        return None
    cases, _ = read_cases(directory / "cases.json")
    return Checked(directory, cases, environment.get("again", {}), (directory / "environment.json").stat().st_mtime)


def killed_the_worker(message: str) -> bool:
    """Whether what became of a call ended the process that it was in: the next call had another."""
    return message.startswith((Verdict.CRASH, Verdict.TIMEOUT))


def what_became(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what a check found wrong in a call, given the rows of its stages, at the one where it begins."""
    failing = [row for row in rows if Verdict(row["verdict"]).exit_code]
    first = next((row for row in failing if row["stage"] == row["begins_at"]), failing[0] if failing else None)
    return "" if first is None else what_was_found(first["verdict"], first["stage"], first["message"])


def what_was_found(verdict: str, stage: str, message: str) -> str:
    """Say in a few words what is wrong."""
    where = f" at {stage}" if stage else ""
    return f"{verdict}{where}{f': {message}' if message else ''}"
