"""What is named of faults whose cause is known: how many rightly, how many wrongly, how many not at all.

Each fault of the catalogue says what it is (``Mutant.diagnosis``). What is diagnosed is decided as in any run, from
the cases that it fails: the first of them that are small, so that naming costs no more than finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attncheck.judging.diagnosis import OR, Decision, Evidence, decide
from attncheck.mutation.findings import UnitFindings, has_wrong_numbers
from attncheck.mutation.mutant import Mutant, Subject

MAX_CASES = 12
"""Failing cases of a fault by which it is named."""
MAX_SCORES = 1 << 11
"""Elements of the score matrix of such a case."""
MAX_WRONGLY = 0.01
"""The share of faults that may be named wrongly: a wrong name is worse than none."""
RIGHTLY, WRONGLY, NOT_NAMED = "rightly", "wrongly", "not"

Unit = tuple[str, str, int]
"""case, dtype, seed"""


@dataclass
class Naming:
    """The evidence about every subject, by the cases that it fails, in their order."""

    evidence: dict[str, dict[Unit, Evidence]] = field(default_factory=dict)

    def add(self, subject: str, unit: Unit, evidence: Evidence) -> None:
        """Take note of what a failing case says."""
        self.evidence.setdefault(subject, {})[unit] = evidence

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the diagnosis of every subject that fails anywhere."""
        return {name: names_of(decide(cases).values()) for name, cases in self.evidence.items()}


def asked_for_names(parts: Iterable[UnitFindings]) -> list[tuple[str, ...]]:
    """Return the subjects whose failure is to be named by each unit: by the first ones that a subject fails."""
    counts: Counter[str] = Counter()
    asked = []
    for part in parts:
        failing = [name for name, findings in part.found if part.serves_naming and has_wrong_numbers(findings)]
        asked.append(tuple(name for name in failing if counts[name] < MAX_CASES))
        counts.update(failing)
    return asked


def names_of(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Return the names that were diagnosed, each once."""
    return tuple(dict.fromkeys(each.fit.name for each in decisions if each.fit is not None))


def how_named(subject: Subject, names: Sequence[str]) -> str:
    """Say whether the diagnosis of a subject is what it is; a control has none."""
    if not names:
        return NOT_NAMED
    right = set(subject.diagnosis) if isinstance(subject, Mutant) else set()
    return RIGHTLY if all(right & set(name.split(OR)) for name in names) else WRONGLY
