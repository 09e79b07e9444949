"""Verdicts on comparisons, and what they mean for the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attncheck.common.errors import ExitCode

ALL_CASES = "--all-cases"
"""What an implementation is said to need that is asked by default for cases alone that stand for all."""


class _Outcome(StrEnum):
    @property
    def severity(self) -> int:
        """Position from harmless to severe."""
        return list(type(self)).index(self)


class Verdict(_Outcome):
    """One word per outcome, from harmless to severe."""

    AGREE = "agree"
    UNVERIFIED = "unverified"
    """Computed, but there is no exact answer to hold it against."""
    UNSUPPORTED = "unsupported"
    MISPRINT = "misprint"
    """The document prints a number that the exact answer misses."""
    SEMANTIC = "semantic"
    """The exact answer of another convention than the case's own."""
    NUMERIC = "numeric"
    NONFINITE = "nonfinite"
    DTYPE = "dtype"
    SHAPE = "shape"
    XPASS = "xpass"
    """A recorded erratum or expected failure that no longer happens."""
    UNTRIED = "untried"
    """Not evaluated: what came before it had ended alike too often."""
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a run with this verdict, when it is not an expected failure.

        Example:
            >>> [int(Verdict(word).exit_code) for word in ("unsupported", "semantic", "numeric", "timeout")]
            [0, 1, 1, 3]
        """
        return _EXIT_CODES.get(self, ExitCode.DISAGREE)


class PropertyOutcome(_Outcome):
    """The verdicts on a property: one word per outcome, from harmless to severe."""

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


_OUTCOMES_WITHOUT_FAILURE = frozenset(PropertyOutcome) - {PropertyOutcome.BROKEN, PropertyOutcome.XPASS}
OUTCOMES_MEETING_CLAIM: Mapping[str, frozenset[PropertyOutcome]] = {
    "": _OUTCOMES_WITHOUT_FAILURE,
    "bitwise": frozenset({PropertyOutcome.BITWISE, PropertyOutcome.UNSUPPORTED, PropertyOutcome.FAILED}),
    "within bounds": _OUTCOMES_WITHOUT_FAILURE - {PropertyOutcome.NAN},
}
"""By claim: the outcomes that it allows. What could not be run says nothing of a claim."""


HARMLESS_VERDICTS = frozenset({Verdict.AGREE, Verdict.UNVERIFIED, Verdict.UNSUPPORTED})
"""What makes no run fail; a plain text is found here too, and every row asks."""
_EXIT_CODES = {
    **dict.fromkeys(HARMLESS_VERDICTS, ExitCode.AGREE),
    **dict.fromkeys((Verdict.UNTRIED, Verdict.ERROR, Verdict.TIMEOUT, Verdict.CRASH), ExitCode.NOT_RUN),
}
WRONG_NUMBER_VERDICTS = (Verdict.NUMERIC, Verdict.NONFINITE)
"""What a wrong number can be; a wrong shape or dtype is no convention."""
