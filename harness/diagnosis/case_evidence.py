"""The evidence that one failing case contributes to the diagnosis of its implementation.

``diagnosis.examine`` collects the evidence of a case, and ``diagnosis.decision`` decides with that of all failing
cases. The verdict of a case does not depend on its evidence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """A reading that fits a case.

    ``description`` describes this reading, and ``ambiguous_description`` all readings with the same answer in the case.
    ``factor`` is the fitted number divided by the number that the case specifies. ``common_description`` is the
    description to use if it is the same in all cases that the reading explains.
    """

    name: str
    description: str
    first_failing_stage: str
    verdict: str
    result_key: str
    ambiguous_description: str = ""
    is_fitted: bool = False
    factor: float | None = None
    common_description: str = ""


@dataclass(frozen=True)
class Evidence:
    """The readings that fit one failing case, and the names of those that it refutes.

    ``first_failing_stage`` is the first failing stage, ``operation`` the operation of the case.
    """

    matches: tuple[Match, ...] = ()
    refuted_names: frozenset[str] = frozenset()
    first_failing_stage: str = ""
    operation: str = ""
