"""The problems of a search, one after the other: of several that are drawn, the one of which most is new."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.novelty import Seen
from attncheck.searching.problems import Draw, draw_problem
from attncheck.searching.variations import vary

_CANDIDATES = 4
_TRIES = 256
"""Draws for a problem: many are needed where an implementation refuses most, or a dtype cannot hold them."""
_MAX_ELEMENTS = 1 << 16
"""Of all inputs together: exact answers of larger ones take seconds."""
_REFUSED_SHARE = 0.05
"""Of problems that an implementation seems to refuse, so many are asked all the same."""
_KNOWN_SHARE = 0.25
"""What is new of a problem that most likely fails as is known already counts so much."""


@dataclass
class ProblemSource:
    """Draws problems by number; the same ones for the same seed, as long as the same is noted of them.

    ``is_known`` says of a problem that a failure that was found explains what goes wrong in it, most likely, and
    ``lacks_of`` what an implementation lacks for it, as far as that is known without a call.
    """

    draw: Draw
    dtypes: Sequence[str]
    seen: Seen = field(default_factory=Seen)
    is_known: Callable[[ConcreteCase], bool] = lambda problem: False
    lacks_of: Callable[[ConcreteCase], Collection[str]] = lambda problem: ()

    def problem(self, number: int) -> ConcreteCase:
        """Return the problem of a number, and count it as asked."""
        candidates: list[ConcreteCase] = []
        others: list[ConcreteCase] = []
        takes_any = np.random.RandomState([self.draw.seed, number]).rand() < _REFUSED_SHARE
        for attempt in range(_TRIES):
            if len(candidates) == _CANDIDATES:
                break
            random = np.random.RandomState([self.draw.seed, number, attempt])
            drawn = draw_problem(self.draw, _TRIES * number + attempt)
            found = vary(drawn, self.dtypes, random)
            if found is not None and found.elements <= _MAX_ELEMENTS:
                (candidates if takes_any or self._is_wanted(found) else others).append(found)
        chosen = max(candidates or others[:_CANDIDATES], key=self._worth)
        self.seen.add(chosen)
        return chosen

    def _is_wanted(self, problem: ConcreteCase) -> bool:
        if self.seen.is_likely_refused(problem):
            return False
        lacks = self.lacks_of(problem)
        if lacks:
            self.seen.note(problem, is_refused=True, lacks=lacks)
        return not lacks

    def _worth(self, problem: ConcreteCase) -> float:
        return self.seen.novelty(problem) * (_KNOWN_SHARE if self.is_known(problem) else 1)
