"""The evidence that one failing case contributes to the diagnosis of its implementation.

``diagnosis.examine`` collects the evidence of a case, and ``diagnosis.decision`` decides with that of all failing
cases. The verdict of a case does not depend on its evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low


@dataclass(frozen=True)
class Match:
    """A reading that fits a case.

    ``description`` describes this reading, and ``ambiguous_description`` all readings with the same answer in the case.
    ``factor`` is the fitted number divided by the number that the case specifies, and ``scale`` the number itself if it
    is a scale. ``common_description`` is the description to use if it is the same in all cases that the reading
    explains.
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
    scale: float | None = None


@dataclass(frozen=True)
class FittedNumber:
    """The number that the cases of one reading share: a ``factor`` of the right number, or else one ``scale``.

    Both are None if the cases share none, or if the reading has no number.
    """

    factor: float | None = None
    scale: float | None = None

    @classmethod
    def shared_by(cls, matches: Sequence[Match]) -> FittedNumber:
        """Return the number that more than half of the matches share.

        A case whose scores hardly depend on the number fits another one.

        Example:
            >>> matches = [Match("scale-fitted", "", "scores", "numeric", "", factor=n, scale=1 / 8) for n in (1, 2)]
            >>> FittedNumber.shared_by(matches)
            FittedNumber(factor=None, scale=0.125)
        """
        return cls(
            _shared_number([match.factor for match in matches if match.factor is not None]),
            _shared_number([match.scale for match in matches if match.scale is not None]),
        )


_FITTED_TOLERANCE = 0.01
"""Maximum relative difference of numbers that count as one: a case of few scores fits a number to few digits."""


def _shared_number(numbers: Sequence[float]) -> float | None:
    if not numbers:
        return None
    middle = median_low(numbers)
    # The first case has the most precise number.
    near = [number for number in numbers if abs(number - middle) <= _FITTED_TOLERANCE * abs(middle)]
    return near[0] if 2 * len(near) > len(numbers) else None


@dataclass(frozen=True)
class Evidence:
    """The readings that fit one failing case, and the names of those that it refutes.

    ``first_failing_stage`` is the first failing stage, ``operation`` the operation of the case.
    """

    matches: tuple[Match, ...] = ()
    refuted_names: frozenset[str] = frozenset()
    first_failing_stage: str = ""
    operation: str = ""
