"""The tries of a reduction: what is simpler and fails in the same way takes the place of what failed before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from attncheck.digests import digest_of
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.simplicity import measure


class ExhaustedError(Exception):
    """There have been tries enough."""


@dataclass
class Attempts:
    """Tries simpler problems, none twice, until there are no tries or no seconds left; ``failing`` is the simplest."""

    failing: ConcreteCase
    fails: Callable[[ConcreteCase], bool]
    left: int
    until: float
    made: int = 0
    accepted: list[ConcreteCase] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def take(self, change: Callable[[ConcreteCase], ConcreteCase]) -> bool:
        """Change what fails; whether the outcome is simpler and still fails. Raises ``ExhaustedError``."""
        try:
            simpler = change(self.failing)
            if measure(simpler) >= measure(self.failing):
                return False
        except (ValueError, KeyError, IndexError):  # what cannot be cut so: axes that no longer fit together
            return False
        digest = _digest(simpler)
        if digest in self._seen:
            return False
        self._seen.add(digest)
        if self.left <= 0 or time.monotonic() > self.until:
            raise ExhaustedError
        self.left, self.made = self.left - 1, self.made + 1
        if not self.fails(simpler):
            return False
        self.failing = simpler
        self.accepted.append(simpler)
        return True


def _digest(problem: ConcreteCase) -> str:
    inputs = [(name, array) for name, array in sorted(problem.inputs.items())]
    layout = sorted(problem.memory_layout.items())
    options = sorted((name, repr(value)) for name, value in problem.options.items())
    return digest_of(inputs, layout, options, problem.supports_statistics, problem.stages)
