"""Questions asked of an implementation in its worker, and their answers compared with what they may mean."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncheck.conventions.questions import QUESTIONS, Meaning, Question
from attncheck.errors import UsageError
from attncheck.execution.families import FAMILIES
from attncheck.execution.implementations import Implementation
from attncheck.execution.limits import Limits
from attncheck.execution.runner import GroupRunner, group_by_process
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Computed, Failure, Outcome, Task
from attncheck.judging.judge_stages import agrees
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.dtypes import rounded_once
from attncheck.spec import DEFAULT_EMPTY_ROWS, DTYPES

Array = NDArray[Any]
_OTHER_UNIT = 4.0
_NEARER = 25.0
"""What is computed in bfloat16 in place of float32 is a hundredth off, and meanings differ by half."""
_NEAR = 1e-3
Kind = Literal["measured", "open", "unsupported", "failed"]


@dataclass(frozen=True)
class Measured:
    """What an implementation means by one question.

    Attributes:
        question: What was asked.
        kind: ``measured``; ``open`` where what came back is none of the meanings, or several; ``unsupported``, or
            ``failed`` where the call raised, ended or took too long.
        means: The meaning's words; what came back, or why nothing did, where it is none.
        declared: What the implementation declares, in the same words; empty where it declares nothing of this.
        declaration: The value of ``empty_rows`` by which somebody's own function declares what it does; empty where
            nothing has to be declared.
        is_exact: Whether what came back is within the error bounds of what it means, and not merely far nearer to that
            than to anything else.
    """

    question: Question
    kind: Kind
    means: str
    declared: str = ""
    declaration: str = ""
    is_exact: bool = True

    @property
    def departs(self) -> bool:
        """Whether this is not what attncheck's cases mean."""
        return self.kind in ("measured", "open") and self.means != (self.question.expected or self.means)

    @property
    def contradicts(self) -> bool:
        """Whether the implementation declares otherwise."""
        return bool(self.declared) and self.kind in ("measured", "open") and self.declared != self.means

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "convention": self.question.name,
            "asks": self.question.asks,
            "kind": self.kind,
            "means": self.means,
            "cases_mean": self.question.expected,
            "departs": self.departs,
            "declared": self.declared,
            "contradicts": self.contradicts,
            "declaration": self.declaration,
            "is_exact": self.is_exact,
        }


def ask_all(
    implementation: Implementation,
    dtype: str | None = None,
    limits: Limits | None = None,
    questions: Sequence[Question] = QUESTIONS,
) -> list[Measured]:
    """Ask an implementation what it means, in one of its dtypes: the most exact one, unless another is asked for.

    Conventions are asked for by no keyword: what comes back is what it does by itself.

    Raises:
        UsageError: It declares no such dtype.
    """
    family = FAMILIES.get(getattr(implementation.entry, "signature", ""))
    if family is not None and family.corner == "bottom right":
        questions = [each.counted_from_the_end(family.says_causal) for each in questions]
    declared = [name for name in DTYPES if implementation.rounding_model(name)]
    chosen = dtype or next(iter(declared), "")
    if chosen not in declared:
        raise UsageError(
            f"{implementation.name} declares no {chosen or 'dtype'}; expected one of {', '.join(declared)}"
        )
    (group,) = group_by_process(implementation, [chosen])
    with tempfile.TemporaryDirectory() as logs:
        runner: GroupRunner[str] = GroupRunner(group, limits or Limits(), Path(logs))
        try:
            return [_asked(question, implementation, chosen, runner) for question in questions]
        finally:
            runner.close()


def _asked(question: Question, implementation: Implementation, dtype: str, runner: GroupRunner[str]) -> Measured:
    task = task_of_question(question, dtype)
    rounding_model = implementation.rounding_model(dtype)
    assert rounding_model is not None, "the dtype was chosen for that"
    found = _measured(question, runner.evaluate(task), dtype, rounding_model)
    if not question.declaration:
        return found
    own = implementation.declared.conventions.get("empty_rows")
    if own is not None:
        words = next(text for text, value in question.declaration.items() if value == own.value)
        found = replace(found, declared=words)
    is_own = isinstance(implementation.entry, UserImplementation)
    if is_own and (found.contradicts or (found.departs and own is None and not _has_keyword(task, runner))):
        return replace(found, declaration=question.declaration.get(found.means, ""))
    return found


def _has_keyword(task: Task, runner: GroupRunner[str]) -> bool:
    """Return whether the function has a keyword ``empty_rows``, by which cases ask for what they mean."""
    outcome = runner.evaluate(replace(task, options={**task.options, "empty_rows": DEFAULT_EMPTY_ROWS}))
    return isinstance(outcome, Computed) and not outcome.not_asked


def task_of_question(question: Question, dtype: str) -> Task:
    """Return the call of a question in a dtype."""
    return Task("attention", dict(question.call.options), _stored(question.call.inputs, dtype))


def _measured(question: Question, outcome: Outcome, dtype: str, rounding_model: str) -> Measured:
    if isinstance(outcome, Failure):
        is_unsupported = outcome.verdict == "unsupported"
        return Measured(question, "unsupported" if is_unsupported else "failed", outcome.message)
    assert isinstance(outcome, Computed), "an outcome is one or the other"
    array = outcome.stages.get(question.stage)
    if array is None:
        return Measured(question, "unsupported", f"it does not return {question.stage}")
    found = [each.words for each in question.meanings if is_meant(question, each, array, dtype, rounding_model)]
    if len(found) == 1:
        return Measured(question, "measured", found[0])
    if found:
        return Measured(question, "open", " or ".join(found))
    nearest = _nearest(question, array, dtype)
    if nearest is None:
        return Measured(question, "open", f"something else: {_described(question, array)}")
    return Measured(question, "measured", nearest.words, is_exact=False)


def _nearest(question: Question, array: Array, dtype: str) -> Meaning | None:
    """Return the meaning that what came back is far nearer to than to any other; None where there is none."""
    distances = sorted(
        (_distance(question, each, array, dtype), number)
        for number, each in enumerate(question.meanings)
        if each.problem is not None
    )
    if not distances or not np.isfinite(distances[0][0]):
        return None
    (least, number), *others = distances
    if others:
        return question.meanings[number] if least * _NEARER < others[0][0] else None
    # Of one alone nobody can say that others are farther: it has to be near in itself.
    largest = float(np.abs(array, dtype=np.float64).max(initial=0.0))
    return question.meanings[number] if least < _NEAR * largest else None


def _distance(question: Question, meaning: Meaning, array: Array, dtype: str) -> float:
    """Return the largest error against a meaning; infinite where NaN and infinity are elsewhere."""
    exact = truth_of_meaning(meaning, dtype).exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return float("inf")
    own = array.astype(np.float64) * meaning.factor
    is_odd = ~np.isfinite(exact.high)
    if not np.array_equal(own[is_odd], exact.high[is_odd], equal_nan=True) or not np.isfinite(own[~is_odd]).all():
        return float("inf")
    return float(np.abs(own - exact.high)[~is_odd].max(initial=0.0))


def is_meant(question: Question, meaning: Meaning, array: Array, dtype: str, rounding_model: str) -> bool:
    """Return whether what came back is what a meaning gives, within the bounds of the rounding model."""
    if meaning.problem is None:
        own = array[:, :, meaning.rows]
        return bool(np.array_equal(own, np.full_like(own, meaning.constant), equal_nan=True))
    truth = truth_of_meaning(meaning, dtype)
    exact = truth.exact.get(question.stage)
    if exact is None or exact.high.shape != array.shape:
        return False
    truth = truth.for_returned({question.stage: array})
    if meaning.factor == 1:
        return agrees(truth, question.stage, array, rounding_model)
    # Another unit is rounded elsewhere, to a neighbouring exponent at most, and so is what it is made of.
    allowed = _OTHER_UNIT * (truth.bounds(rounding_model)[question.stage].max_error + exact.radius)
    return bool((np.abs(array.astype(np.float64) * meaning.factor - exact.high) <= allowed).all())


@lru_cache(maxsize=256)
def truth_of_meaning(meaning: Meaning, dtype: str) -> Truth:
    """Return the exact answer of what a call may mean."""
    problem = meaning.problem
    assert problem is not None, "a constant has no problem"
    return find_truth(
        "attention", problem.options, _stored(problem.inputs, dtype), dtype, supports_statistics=False, whole=True
    )


def _stored(inputs: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Round inputs to a dtype, except for masks and counts."""
    return {name: array if array.dtype.kind in "bi" else rounded_once(array, dtype) for name, array in inputs.items()}


def _described(question: Question, array: Array) -> str:
    """Say of what came back what can be said without knowing what it is."""
    if (nan := np.isnan(array)).any():
        return f"{np.count_nonzero(nan)} of {array.size} numbers are NaN"
    if question.stage == "log_sum_exp":
        return f"{float(np.ravel(array[:, :, 1:2])[0]):.6g}"
    return f"shape {array.shape}, first number {float(np.ravel(array)[0]):.6g}" if array.size else "nothing"
