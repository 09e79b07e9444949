"""Confirmation of hints: two problems are made of a failing case, with its common features and without.

A feature that all failing cases of an implementation have, and hardly any other case, may still be an accident of how
cases were chosen: another feature that they share may be the cause. So the simplest failing case is changed in one
thing that takes the feature from it, for each part of the feature: it has to pass. And all options that the feature
does not need are left out of it, and its numbers drawn again: it has to fail. What both confirm is written down with
the results (environment.json), and reports tell nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attncheck.asking.answer import Answer
from attncheck.asking.engine import Engine
from attncheck.common.errors import CaseError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reading.case import Case, case_record
from attncheck.reading.model import TagEntry
from attncheck.reading.problem import Problem
from attncheck.reports.failure_patterns import FailurePattern, candidates, parts_that_hold
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.merge import merge_runs
from attncheck.results.reader import read_runs
from attncheck.results.writer import note_confirmed
from attncheck.searching.concrete import concrete_case, count_elements
from attncheck.searching.findings import ProblemSubject, symptom_of
from attncheck.searching.problems import filled
from attncheck.searching.reduction import cut, letters_of, optional_groups, with_counts_that_fit, without_options

_MOST_TRIES = 4
"""Changes that take a part of a feature from a case, until one is judged."""
_MAX_ELEMENTS = 1 << 18
"""Of the inputs of a case that is changed."""
_NEAR = (1, 2, 3, 4)
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)


def confirm_hints(
    output: Path,
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    limits: Limits,
    tags: Mapping[str, TagEntry],
) -> None:
    """Write down which common features of failing cases two more problems confirm. Raises ``OutputError``."""
    frames = make_frames(merge_runs(read_runs([output])))
    patterns = candidates(frames)
    named, by_id = {item.name: item for item in implementations}, {case.id: case for case in cases}
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        item = named.get(pattern.column.implementation)
        shown = [(by_id[case], dtype) for case, dtype in pattern.shown_by if case in by_id]
        if item is None or not shown:
            continue
        subject = ProblemSubject(item, Engine(limits, expected_failures=()))
        try:
            if any(_Confirmation(pattern, case, dtype, subject, frames).is_borne_out() for case, dtype in shown):
                found.setdefault(item.name, []).append(pattern.where)
        except CaseError:
            continue
        finally:
            subject.close()
    if found:
        note_confirmed(output, found)


@dataclass(frozen=True)
class _Confirmation:
    """One feature, and the case that is changed."""

    pattern: FailurePattern
    case: Case
    dtype: str
    subject: ProblemSubject
    frames: Frames

    def is_borne_out(self) -> bool:
        """Return whether the case passes without each part of the feature, and fails with nothing but the feature."""
        problem = concrete_case(self.case, self.dtype)
        if count_elements(problem) > _MAX_ELEMENTS:
            return False
        changed = [*_changed(problem, self.case)]
        held = self._parts(changed)
        for part in range(len(held[0]) if held else 0):
            others = (each for each, holds in zip(changed, held, strict=True) if holds.count(False) == 1)
            without = [each for each in others if not held[_index(changed, each)][part]]
            if not self._passes(without):
                return False
        return bool(held) and self._fails_alone(problem)

    def _passes(self, problems: Sequence[Problem]) -> bool:
        """Return whether the first of some problems that is judged passes."""
        for problem in problems[:_MOST_TRIES]:
            if (answer := self._answer(problem)) is not None:
                return symptom_of(answer) is None
        return False

    def _fails_alone(self, problem: Problem) -> bool:
        """Return whether a problem fails with no option that the feature does not need, and other numbers."""
        for group in optional_groups(problem):
            try:
                simpler = without_options(problem, group)
                [held] = self._parts([simpler])
            except (ValueError, KeyError, IndexError):
                continue
            problem = simpler if all(held) else problem
        plain = replace(problem, memory_layout={}, regime="normal", special="", supports_statistics=False)
        drawn = filled(plain, np.random.RandomState(1))
        answer = self._answer(drawn)
        return answer is not None and symptom_of(answer) is not None

    def _answer(self, problem: Problem) -> Answer | None:
        """Have a problem judged; None where it is none, or the implementation does not take it."""
        try:
            answer = self.subject.ask(problem, "hint")
        except CaseError:
            return None
        return None if answer.is_unsupported else answer

    def _parts(self, problems: Sequence[Problem]) -> list[list[bool]]:
        """Return which parts of the feature hold of problems."""
        records = [{**case_record(self.case, {}), **_record_of(each)} for each in problems]
        return parts_that_hold(self.pattern.where, [*self.frames.cases.values()], records, [p.dtype for p in problems])


def _index(problems: Sequence[Problem], problem: Problem) -> int:
    return next(number for number, each in enumerate(problems) if each is problem)


def _record_of(problem: Problem) -> dict[str, object]:
    """Return what the record of a case says of a problem."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in problem.options.items()}
    shapes = {name: list(array.shape) for name, array in problem.inputs.items()}
    return {"options": options, "inputs": shapes, "memory_layout": dict(problem.memory_layout), "merged": []}


def _changed(problem: Problem, case: Case) -> Iterator[Problem]:
    """Yield a case changed in one thing: an option less, an axis of another length, a mask more, another dtype."""
    for group in optional_groups(problem):
        yield without_options(problem, group)
    for letter in letters_of(problem):
        for length in _lengths_beside(problem.lengths[letter], problem.lengths, letter):
            kept = {letter: np.arange(length) % _extent(problem, letter)}
            try:
                changed = with_counts_that_fit(cut(problem, kept))
                changed.lengths  # noqa: B018 # raises where axes no longer fit together
            except (ValueError, KeyError, IndexError):
                continue
            yield changed
    if "mask" in problem.specs and "mask" not in problem.inputs:
        yield replace(problem, inputs={**problem.inputs, "mask": np.ones((1, 1, 1, 1), np.bool_)})
    for dtype in case.dtypes:
        if dtype != problem.dtype:
            yield concrete_case(case, dtype)


def _extent(problem: Problem, letter: str) -> int:
    lengths = problem.lengths
    return lengths[letter] // lengths["Hkv"] if letter == "H" and "Hkv" in lengths else lengths[letter]


def _lengths_beside(length: int, lengths: Mapping[str, int], letter: str) -> list[int]:
    """Return other lengths of an axis, the nearest first; of heads of queries, how many share a head of keys."""
    own = length // lengths["Hkv"] if letter == "H" and "Hkv" in lengths else length
    near = {own - step for step in _NEAR} | {own + step for step in _NEAR}
    whole = {own // multiple * multiple for multiple in _MULTIPLES} | {own // 2, 1, *lengths.values()}
    return sorted((each for each in near | whole if 0 < each != own), key=lambda each: abs(each - own))
