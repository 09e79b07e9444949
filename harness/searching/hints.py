"""Confirmation of hints: problems made from a failing case, with and without its common features.

All failing cases of an implementation, and hardly any other case, may share a feature by accident, while another shared
feature is the cause. So for each part of the feature, the simplest failing case is changed in one thing so that it
loses that part: it has to pass. Then all options that the feature does not need are left out, and the numbers are drawn
again: it has to fail. Features that both confirm are written to the results (environment.json), and reports show only
these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from attncheck.asking.answer import Answer
from attncheck.asking.engine import Engine
from attncheck.common.errors import CaseError
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.model import TagEntry
from attncheck.reading.problem import Problem
from attncheck.reports.failure_patterns import FailurePattern, candidate_patterns, evaluate_feature_parts
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.merge import merge_runs
from attncheck.results.reader import read_runs
from attncheck.results.writer import store_confirmed_features
from attncheck.searching.concrete import concrete_problem, count_elements
from attncheck.searching.findings import ProblemSubject, symptom_of
from attncheck.searching.problems import draw_numbers
from attncheck.searching.reduction import (
    clip_counts_to_lengths,
    cuttable_axes,
    drop_options_and_inputs,
    keep_positions,
    position_count,
    removable_groups,
)

_MAX_CHANGES_TRIED = 4
"""Changes that remove a part of a feature from a case are tried until one is judged, at most so many."""
_MAX_ELEMENTS = 1 << 18
"""Cases with larger inputs are not changed."""
_NEAR_STEPS = (1, 2, 3, 4)
"""Differences of lengths that are tried: one of four successive lengths is not a multiple of 2, 3 or 4."""
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
"""Lengths are rounded down to these multiples: vector widths and tile sizes of kernels."""


def confirm_hints(
    output: Path,
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    limits: Limits,
    tags: Mapping[str, TagEntry],
) -> None:
    """Write the common features of failing cases that further problems confirm. Raises ``OutputError``."""
    frames = make_frames(merge_runs(read_runs([output])))
    patterns = candidate_patterns(frames)
    named, by_id = {item.name: item for item in implementations}, {case.id: case for case in cases}
    confirmed: dict[str, list[str]] = {}
    for pattern in patterns:
        item = named.get(pattern.column.implementation)
        shown = [(by_id[case], dtype) for case, dtype in pattern.simplest_failures if case in by_id]
        if item is None or not shown:
            continue
        subject = ProblemSubject(item, Engine(limits, expected_failures=()))
        try:
            if any(_HintCheck(pattern, case, dtype, subject, frames).is_confirmed() for case, dtype in shown):
                confirmed.setdefault(item.name, []).append(pattern.where)
        except CaseError:
            continue
        finally:
            subject.close()
    if confirmed:
        store_confirmed_features(output, confirmed)


@dataclass(frozen=True)
class _HintCheck:
    """The confirmation of one feature by changes of one case."""

    pattern: FailurePattern
    case: Case
    dtype: str
    subject: ProblemSubject
    frames: Frames

    def is_confirmed(self) -> bool:
        """Return whether the case passes without each part of the feature, and fails with only the feature."""
        problem = concrete_problem(self.case, self.dtype)
        if count_elements(problem) > _MAX_ELEMENTS:
            return False
        changed = [*_single_changes(problem, self.case)]
        held = self._parts_present(changed)
        for part in range(len(held[0]) if held else 0):
            without = (
                simpler
                for simpler, holds in zip(changed, held, strict=True)
                if holds.count(False) == 1 and not holds[part]
            )
            # The first changes are run until one is judged: it has to pass.
            answers = (self._run_and_judge(simpler) for simpler in islice(without, _MAX_CHANGES_TRIED))
            answer = next((answer for answer in answers if answer is not None), None)
            if answer is None or symptom_of(answer) is not None:
                return False
        return bool(held) and self._fails_with_only_feature(problem)

    def _fails_with_only_feature(self, problem: Problem) -> bool:
        """Return whether a problem fails with only the options that the feature needs, and other numbers."""
        for group in removable_groups(problem):
            try:
                simpler = drop_options_and_inputs(problem, group)
                [held] = self._parts_present([simpler])
            except (ValueError, KeyError, IndexError):
                continue
            problem = simpler if all(held) else problem
        plain = replace(problem, memory_layout={}, drawing_regime="normal", special_value="", supports_statistics=False)
        drawn = draw_numbers(plain, np.random.RandomState(1))
        answer = self._run_and_judge(drawn)
        return answer is not None and symptom_of(answer) is not None

    def _run_and_judge(self, problem: Problem) -> Answer | None:
        """Run and judge a problem; None if it is no valid case, or unsupported."""
        try:
            answer = self.subject.run_and_judge(problem, "hint")
        except CaseError:
            return None
        return None if answer.is_unsupported else answer

    def _parts_present(self, problems: Sequence[Problem]) -> list[list[bool]]:
        """Return for each problem which parts of the feature it has."""
        records = [
            {
                **make_case_record(self.case, {}),
                "options": {key: list(of) if isinstance(of, tuple) else of for key, of in problem.options.items()},
                "inputs": {name: list(array.shape) for name, array in problem.inputs.items()},
                "memory_layout": dict(problem.memory_layout),
                "merged": [],
            }
            for problem in problems
        ]
        return evaluate_feature_parts(
            self.pattern.where, [*self.frames.cases.values()], records, [p.dtype for p in problems]
        )


def _single_changes(problem: Problem, case: Case) -> Iterator[Problem]:
    """Yield a case with one change: without an option, another length of an axis, with a mask, another dtype."""
    for group in removable_groups(problem):
        yield drop_options_and_inputs(problem, group)
    for letter in cuttable_axes(problem):
        if not (count := position_count(problem, letter)):
            continue  # an axis without positions has none to repeat
        for length in _nearby_lengths(count, problem.axis_lengths):
            kept = {letter: np.arange(length) % count}
            try:
                changed = clip_counts_to_lengths(keep_positions(problem, kept))
                changed.axis_lengths  # noqa: B018 # raises if axes no longer fit together
            except (ValueError, KeyError, IndexError):
                continue
            yield changed
    if "mask" in problem.input_specs and "mask" not in problem.inputs:
        yield replace(problem, inputs={**problem.inputs, "mask": np.ones((1, 1, 1, 1), np.bool_)})
    for dtype in case.dtypes:
        if dtype != problem.dtype:
            yield concrete_problem(case, dtype)


def _nearby_lengths(length: int, all_lengths: Mapping[str, int]) -> list[int]:
    """Return other lengths of an axis, the nearest first; ``all_lengths`` are those of all axes."""
    near = {length - step for step in _NEAR_STEPS} | {length + step for step in _NEAR_STEPS}
    whole = {length // multiple * multiple for multiple in _MULTIPLES} | {length // 2, 1, *all_lengths.values()}
    return sorted((new for new in near | whole if 0 < new != length), key=lambda new: abs(new - length))
