"""When to stop asking: what ends its process in every call costs a new worker, or a minute, each time.

After ten equal ends in a row (a crash or a timeout with the same reason) its remaining evaluations are not tried. What
is unsupported says nothing either way; any answer begins the count anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncheck.execution.worker import Computed, Failure, Outcome

MAX_EQUAL_ENDS = 10
_ENDS = ("crash", "timeout")


@dataclass
class EqualEnds:
    """How often in a row a worker has ended in the same way."""

    keep_going: bool = False
    _verdict: str = ""
    _reason: str = ""
    _count: int = 0

    def instead(self) -> Failure | None:
        """Return what is said of an evaluation that is not worth trying; None where it is."""
        if self.keep_going or self._count < MAX_EQUAL_ENDS:
            return None
        return Failure(
            "untried",
            f"not tried: the {MAX_EQUAL_ENDS} evaluations before ended alike ({self._verdict}: {self._reason}); "
            "--keep-going tries all",
        )

    def note(self, outcome: Outcome, reason: str) -> None:
        """Take note of an evaluation that was tried; ``reason`` is the part of its message that repeats."""
        if isinstance(outcome, Computed) or outcome.verdict not in (*_ENDS, "unsupported"):
            self._count = 0
        elif outcome.verdict in _ENDS:
            same = (outcome.verdict, reason) == (self._verdict, self._reason)
            self._verdict, self._reason, self._count = outcome.verdict, reason, self._count + 1 if same else 1
