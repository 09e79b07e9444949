"""Alternatives to what a case means, each a change of the problem; among them, what rows without a key give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Computation
from attncheck.judging.truth import Stages, Truth
from attncheck.judging.undefined_rows import MAX_AT_A_TIME, empty_rows, scores_shape
from attncheck.reading.lowering import Problem
from attncheck.reading.shapes import score_elements
from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS, without_a_key
from attncheck.verdicts import Verdict

StepReplacement = Callable[[Truth, str, Stages], Truth | None]
"""Makes the truth of another step from the exact answer, given a rounding model and what fails; None where
there is no such step."""


@dataclass(frozen=True, eq=False)
class Alternative:
    """Another reading of a case.

    ``description`` tells people what the implementation does and what the case means; ``{stage}`` is the stage where it
    shows. ``stage`` is the one at which the reading departs from the case, ``problem`` the problem as it is then read.
    ``option`` is what an implementation may declare: the name of a convention and its value. ``stage_aliases`` names
    the stages to compare with where the problem has no such stage any more. ``replacement`` makes the stages of an
    answer that is no problem's: a step that is another one, such as a softmax over queries.

    Names are the same in every case, so that one implementation's failures can be brought together. Alternatives of one
    ``answer`` cannot be told apart by a case, where 1/D is the square of 1/sqrt(D); ``unsure`` says all of them.
    ``is_fitted`` marks those with a free number, or that say less than a cause: they count where nothing else fits.
    ``factor`` is that number, over the one that the case means.
    """

    name: str
    description: str
    stage: str
    problem: Problem
    verdict: Verdict = Verdict.SEMANTIC
    option: tuple[str, str] | None = None
    stage_aliases: Mapping[str, str] = field(default_factory=dict)
    replacement: StepReplacement | None = None
    answer: str = ""
    unsure: str = ""
    is_fitted: bool = False
    factor: float | None = None

    @property
    def its_answer(self) -> str:
        """What tells its answer from others: by default its name."""
        return self.answer or self.name

    @property
    def empty_rows(self) -> str | None:
        """What rows without a key give, where that is the whole difference."""
        name, value = self.option or ("", "")
        return value if name == "empty_rows" and self.name == f"empty-rows-{value}" else None


def mistake(
    name: str,
    description: str,
    problem: Problem,
    stage: str = "masked",
    stage_aliases: Mapping[str, str] | None = None,
) -> Alternative:
    """Return a reading that nobody means."""
    return Alternative(name, description, stage, problem, Verdict.NUMERIC, stage_aliases=stage_aliases or {})


def with_mask(problem: Problem) -> Problem:
    """Give the problem a mask that allows everything, or it would lose the stage when it loses the option."""
    return problem if "mask" in problem.inputs else problem.with_inputs(mask=np.ones((1, 1, 1, 1), dtype=np.bool_))


def with_allowed(problem: Problem, allowed: Any) -> Problem:
    """Return the problem with a mask (Lq, Lk) beside that which it has."""
    mask = problem.inputs.get("mask")
    return problem.with_inputs(mask=allowed[np.newaxis, np.newaxis] if mask is None else mask & allowed)


def queries_and_keys(problem: Problem) -> tuple[int, int]:
    """Return how many queries and keys there are, the past among them."""
    if "scores" in problem.inputs:
        queries, keys = problem.inputs["scores"].shape[-2:]
        return int(queries), int(keys)
    past = problem.inputs["past_key"].shape[-2] if "past_key" in problem.inputs else 0
    return int(problem.inputs["query"].shape[-2]), int(problem.inputs["key"].shape[-2] + past)


def undefined_row_conventions(problem: Problem) -> Iterator[Alternative]:
    """Yield the other conventions for rows that may attend to no key; nothing where there is no such row."""
    own = str(problem.options.get("empty_rows") or DEFAULT_EMPTY_ROWS)
    rows = empty_rows(problem)
    if not rows.any():
        return
    for value in EMPTY_ROWS:
        if value != own:
            description, option = without_a_key(value, own), ("empty_rows", value)
            yield Alternative(
                f"empty-rows-{value}", description, "weights", problem.with_options(empty_rows=value), option=option
            )
    if score_elements(problem.operation, problem.options, problem.inputs) > MAX_AT_A_TIME:
        return  # as a mask, the next one would be of the size of the score matrix
    allowed = allowed_keys(problem)
    if allowed is not None:
        plain = problem.canonical()
        description = f"a query without a key attends to all keys, as if nothing were masked; the case expects {own}"
        unmasked = plain.with_options(is_causal=False).with_inputs(mask=allowed | rows[..., np.newaxis])
        yield Alternative(
            "empty-rows-unmasked",
            description,
            "weights",
            unmasked,
        )


def allowed_keys(problem: Problem) -> NDArray[np.bool_] | None:
    """Return who may attend to whom, of the scores' shape; None where nothing is forbidden."""
    plain = problem.canonical()
    shape = scores_shape(plain)
    return Computation.as_given(plain).allowed(shape)
