"""What one failing case says of its implementation: which readings fit, and which it refutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncheck.judging.alternatives import Alternative
from attncheck.verdicts import Verdict


@dataclass(frozen=True, eq=False)
class Findings:
    """What one failing case says: the readings that fit, nearest first, and the names of those that it refutes.

    Those that are ``open`` may fit as well: they were not tried, because there were too many as near.
    """

    fits: tuple[Alternative, ...] = ()
    refuted: frozenset[str] = frozenset()
    open: frozenset[str] = frozenset()

    @property
    def named(self) -> Alternative | None:
        """What this case names by itself: the reading that fits, if it is the only one, and a convention in any case.

        A result that is right under another convention is that, whatever else gives the same numbers here.
        """
        answers = {each.its_answer: each for each in reversed(self.fits)}
        if not answers:
            return None
        if len(answers) == 1:
            first = self.fits[0]
            return replace(first, description=first.unsure) if len(self.fits) > 1 and first.unsure else first
        convention = next((each for each in self.fits if each.verdict is Verdict.SEMANTIC), None)
        if convention is None:
            return None
        others = [each.description for each in answers.values() if each.its_answer != convention.its_answer][::-1]
        description = f"{convention.description} (or {', or '.join(others)}: this case does not tell them apart)"
        return replace(convention, description=description)


NO_FINDINGS = Findings()
