"""Rows of the catalogue of readings, one case under a reading, and the changes of problems that rows share.

A ``Reading`` is a row: another interpretation of an option or input, for any case. An ``AppliedReading`` is one case
under a reading. The rows are in ``readings.py`` and, if they replace a step, in ``replaced_steps.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.problem import Computation
from attncheck.judging.exact_stages import Stages
from attncheck.judging.truth import Truth
from attncheck.judging.undefined import scores_shape
from attncheck.reading.problem import Problem
from attncheck.spec import CONVENTION_OF_READING, HEADS, OPERATIONS_BY_SCORE, REPLACES, is_option_set, score_kind
from attncheck.spec.verdicts import Verdict

StepReplacement = Callable[[Truth, str, Stages], Truth | None]
"""Makes the truth with another step from the exact answer, a rounding model and the failing stages; None if there is no
such step."""


@dataclass(frozen=True, eq=False)
class ReadingForm:
    """A problem under a reading, the ``text_values`` for the reading's text, and other facts about this case."""

    problem: Problem
    text_values: Mapping[str, object] = field(default_factory=dict)
    first_stage: str = ""
    stage_aliases: Mapping[str, str] = field(default_factory=dict)
    step_replacement: StepReplacement | None = None
    result_key: str = ""
    ambiguous_description: str = ""
    common_description: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class AppliedReading(ReadingForm):
    """One case under another reading.

    ``description`` says what the implementation does and what the case means; ``{stage}`` is the stage that shows it.
    ``first_stage`` is the first stage at which the reading differs from the case, ``problem`` the problem under the
    reading. ``declarable_convention`` is the convention and value that an implementation may declare. ``stage_aliases``
    names the stages to compare with if the problem under the reading lacks a stage. ``step_replacement`` makes the
    stages if no problem has them, because the reading replaces a step, such as by a softmax over queries.

    Names are the same in every case, so that failures of one implementation can be grouped. A case cannot distinguish
    alternatives with the same ``result_key``, such as 1/D and the square of 1/sqrt(D); ``ambiguous_description``
    describes all of them. ``is_fitted`` marks alternatives with a free number, or that are less than a cause: they
    count only if no other fits. ``factor`` is that number, relative to the number that the case means, and ``scale``
    the number itself if it is a scale.
    ``common_description`` is the description if all explained cases leave an option to its default: the default is
    another one.
    """

    name: str = ""
    description: str = ""
    declarable_convention: tuple[str, str] | None = None
    verdict: Verdict = Verdict.SEMANTIC
    is_fitted: bool = False
    factor: float | None = None
    scale: float | None = None

    @property
    def comparison_key(self) -> str:
        """The key of its result: alternatives with equal keys give the same result. By default its name."""
        return self.result_key or self.name

    @property
    def empty_rows(self) -> str | None:
        """The convention of rows without a key, if nothing else differs."""
        name, value = self.declarable_convention or ("", "")
        return value if name == "empty_rows" and self.name == f"empty-rows-{value}" else None


ProblemChange: TypeAlias = Callable[[Problem], Problem | None]
"""Makes the problem under the reading from a problem; None if the reading does not apply."""
Change: TypeAlias = Callable[[Problem], Problem | ReadingForm | Iterable[ReadingForm] | None]
"""The same with words, or in several forms."""


@dataclass(frozen=True)
class Reading:
    """A row of the catalogue: another interpretation that an implementation may have.

    ``message_template`` is the message; words in braces depend on the case, and {stage} is the stage that shows it.
    ``change`` makes the problem under the reading from a case that has the input or option ``option_or_input``. They
    differ from ``first_stage`` on, unless the form has another one. The verdict is ``semantic`` for a convention,
    which is used on purpose, and ``numeric`` for a mistake. A reading ``changes_called_operation`` is one of the called
    operation.
    """

    name: str
    message_template: str
    change: Change
    option_or_input: str = ""
    first_stage: str = "masked"
    verdict: Verdict = Verdict.NUMERIC
    changes_called_operation: bool = False

    @property
    def is_convention(self) -> bool:
        """True if it is used on purpose."""
        return self.verdict is Verdict.SEMANTIC

    @property
    def declarable_convention(self) -> tuple[str, str] | None:
        """The convention and its value by which a function declares it; None if it cannot be declared."""
        return CONVENTION_OF_READING.get(self.name)

    def apply_to_problem(self, problem: Problem) -> Iterator[AppliedReading]:
        """Yield a problem under the reading, in each form; nothing if the reading does not apply."""
        option = problem.options.get(self.option_or_input)
        if self.option_or_input and self.option_or_input not in problem.inputs and (option is None or option is False):
            return
        changed = self.change(problem)
        forms = () if changed is None else (changed,) if isinstance(changed, Problem | ReadingForm) else changed
        for form in (ReadingForm(form) if isinstance(form, Problem) else form for form in forms):
            if form.step_replacement is None and not form.stage_aliases and are_same_problem(form.problem, problem):
                continue
            yield self.make_applied_reading(
                replace(form, problem=form.problem.without_layout()) if self.changes_called_operation else form
            )

    def make_applied_reading(self, form: ReadingForm, **more: Any) -> AppliedReading:
        """Return the reading of a case in one form."""
        description = self.message_template.format_map({"stage": "{stage}", **form.text_values})
        in_form = {
            **vars(form),
            "first_stage": form.first_stage or self.first_stage,
            "declarable_convention": self.declarable_convention,
        }
        row = {"name": self.name, "description": description, "verdict": self.verdict}
        return AppliedReading(**{**in_form, **row, **more})


def are_same_problem(first: Problem, second: Problem) -> bool:
    """Return whether two problems of one operation have the same options and the same numbers."""
    if first is second:
        return True
    if first.options != second.options or first.inputs.keys() != second.inputs.keys():
        return False
    pairs = ((array, second.inputs[name]) for name, array in first.inputs.items())
    return all(a is b or (a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape) for a, b in pairs)


def convention_reading(
    name: str,
    message_template: str,
    change: Change,
    option_or_input: str = "",
    first_stage: str = "masked",
    **more: Any,
) -> Reading:
    """Return a reading that is used on purpose."""
    return Reading(name, message_template, change, option_or_input, first_stage, Verdict.SEMANTIC, **more)


# Changes that rows share.


def set_options(**options: Any) -> ProblemChange:
    """Change options."""
    return lambda problem: problem.with_options(**options)


def change_input(name: str, change: Callable[[Any], Any]) -> ProblemChange:
    """Change one input; the reading does not apply if the change is None."""

    def changed(problem: Problem) -> Problem | None:
        changed_array = change(problem.inputs[name])
        return None if changed_array is None else problem.with_inputs(**{name: changed_array})

    return changed


def change_inputs(names: Iterable[str], change: Callable[[Any], Any]) -> ProblemChange:
    """Change several inputs in the same way, if the problem has them."""
    return lambda problem: problem.with_inputs(
        **{name: change(problem.inputs[name]) for name in names if name in problem.inputs}
    )


def leave_out_input(name: str) -> ProblemChange:
    """Leave an input out."""
    return lambda problem: problem.without_input(name)


def when_applicable(applies: Callable[[Problem], object], change: Change) -> Change:
    """Change only problems for which ``applies`` is true."""
    return lambda problem: change(problem) if applies(problem) else None


def starting_at_stage(stage: Callable[[Problem], str], change: Change) -> Change:
    """Set the first stage of a change, given a function of the problem."""

    def changed(problem: Problem) -> ReadingForm | None:
        changed_problem = change(problem)
        form = ReadingForm(changed_problem) if isinstance(changed_problem, Problem) else changed_problem
        assert form is None or isinstance(form, ReadingForm), "a change in one form"
        return form and replace(form, first_stage=stage(problem))

    return changed


def swap_value(option: str, words: Mapping[Any, str]) -> Change:
    """Swap the two values of an option; ``words`` describes both, and the first is the default."""

    def change(problem: Problem) -> ReadingForm:
        meant = problem.options.get(option) or next(iter(words))
        (taken,) = words.keys() - {meant}
        return ReadingForm(problem.with_options(**{option: taken}), {"taken": words[taken], "meant": words[meant]})

    return change


def swap_inputs(first: str, second: str) -> ProblemChange:
    """Swap two inputs of the same shape."""

    def change(problem: Problem) -> Problem | None:
        if second not in problem.inputs or problem.inputs[first].shape != problem.inputs[second].shape:
            return None
        return problem.with_inputs(**{first: problem.inputs[second], second: problem.inputs[first]})

    return change


def transpose_input(name: str) -> ProblemChange:
    """Swap the last two axes of an input, if they are equally long."""
    return change_input(
        name,
        lambda array: np.swapaxes(array, -1, -2) if array.ndim > 1 and array.shape[-2] == array.shape[-1] else None,
    )


def identity_like(weight: Any) -> Any:
    """Return identity matrices of the weights' shape; None if they are not square."""
    *_, rows, columns = weight.shape
    return np.broadcast_to(np.eye(rows, dtype=weight.dtype), weight.shape) if rows == columns else None


def with_all_allowed_mask(problem: Problem) -> Problem:
    """Add a mask that allows everything, so that the problem keeps the stage without the option."""
    return problem if "mask" in problem.inputs else problem.with_inputs(mask=np.ones((1, 1, 1, 1), dtype=np.bool_))


def with_combined_mask(problem: Problem, allowed: Any) -> Problem:
    """Return the problem with its mask combined with another one, (Lq, Lk) or of four axes."""
    four_axes = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    return problem.with_inputs(mask=four_axes & problem.inputs.get("mask", True))


def canonical_with_empty_rows(problem: Problem) -> Problem:
    """Return the canonical form of a problem, with its convention for rows without a key."""
    kept = {name: problem.options[name] for name in ("empty_rows",) if name in problem.options}
    return problem.canonical().with_options(**kept)


def as_call_with_head_options(problem: Problem) -> Problem:
    """Return a problem as the call passes it, with its options for heads and for rows without a key."""
    kept = {name: problem.options[name] for name in ("empty_rows", *HEADS) if name in problem.options}
    return problem.as_call().with_options(**kept)


# Entries that belong to another index.


Order = Callable[[int], Any]
"""Returns the index of the entry that is taken for each of ``count`` entries."""
TAKE_FIRST: Order = lambda count: np.zeros(count, int)  # noqa: E731
TAKE_NEXT: Order = lambda count: np.roll(np.arange(count), -1)  # noqa: E731

_ORDERS: Mapping[str, tuple[str, Order]] = {
    "of-first": ("of the first {} is taken for all", TAKE_FIRST),
    "of-next": ("of the next {} is taken", TAKE_NEXT),
    "in-reverse-of": (
        "of each {} is that of the last one before: they are taken in reverse",
        lambda count: np.arange(count)[::-1],
    ),
}


def reorder_entries(names: Sequence[str], axis: int, order: Order, max_unchanged_length: int = 1) -> ProblemChange:
    """Reorder entries of an axis of some inputs.

    The axis must have more than ``max_unchanged_length`` entries; with fewer it would be another reading.
    """
    return change_inputs(
        names,
        lambda array: (
            array.take(order(array.shape[axis]), axis)
            if array.ndim >= -axis and array.shape[axis] > max_unchanged_length
            else array
        ),
    )


def reordering_readings(
    name_prefix: str,
    input_description: str,
    names: Sequence[str],
    axes: Mapping[str, int],
    stage: str,
    *orders: str,
    when: Callable[[Problem], bool] = lambda problem: True,
) -> Iterator[Reading]:
    """Yield the readings that reorder an input, or several together, for each axis and order."""
    for word, axis in axes.items():
        for order in orders or ("of-first", "of-next"):
            says, taken_for_each = _ORDERS[order]
            change = reorder_entries(names, axis, taken_for_each, 2 if order == "in-reverse-of" else 1)
            yield Reading(
                f"{name_prefix}-{order}-{word.replace(' ', '-')}",
                f"{input_description} {says.format(word)}",
                when_applicable(when, change),
                names[0],
                stage,
            )


# Properties of a problem.


def flag_allowed_keys(problem: Problem) -> NDArray[np.bool_] | None:
    """Return flags of allowed keys in the scores' shape; None if no key is forbidden."""
    plain = problem.canonical()
    return Computation.from_problem_without_added_key(plain).flag_allowed(scores_shape(plain))


_OPERATIONS_WITH_SCALE = frozenset({"attention", "attention_gradients", "multi_head_attention"})


def has_scale(problem: Problem) -> bool:
    """Return whether the scores are a product of query and key times one number."""
    if not REPLACES["scale"].isdisjoint(problem.inputs):
        return False
    is_scored = problem.operation in ("scoring", *OPERATIONS_BY_SCORE)
    return problem.operation in _OPERATIONS_WITH_SCALE or (
        is_scored and score_kind(problem.operation, problem.options) in ("dot", "scaled_dot", "cosine")
    )


def intended_scale(problem: Problem) -> float:
    """Return the factor of the scores that a case means, 1 if each head has another."""
    if not REPLACES["scale"].isdisjoint(problem.inputs):
        return 1.0
    return float(problem.score_scale(lambda: widths_for_scale(problem)["D"]))


def has_default_scale(problem: Problem) -> bool:
    """Return whether a case leaves the scale to its default, 1/sqrt(D)."""
    if is_option_set("scale", problem.options, problem.inputs):
        return False
    return math.isclose(intended_scale(problem) * math.sqrt(widths_for_scale(problem)["D"]), 1)


def describe_default_scale(words: str) -> str:
    """Return the description of another default scale."""
    return f"the default scale is {words}: give scale, or divide by sqrt(D)"


def widths_for_scale(problem: Problem) -> dict[str, int]:
    """Return the widths that a scale may be made of: D of a head, Dv of values, H D of all heads, E of the inputs.

    With latent vectors, C is their width, and Dn the width of the part of a query that is not rotated.
    """
    inputs = problem.inputs
    if problem.operation == "multi_head_attention":
        heads = int(problem.options["heads"])
        shared = int(problem.options.get("kv_heads") or heads)
        return {
            "D": inputs["query_weight"].shape[-1] // heads,
            "Dv": inputs["value_weight"].shape[-1] // shared,
            "H D": inputs["query_weight"].shape[-1],
            "E": inputs["query"].shape[-1],
        }
    query = inputs["query"]
    widths = {"D": query.shape[-1]}
    if "key_projection" in inputs:
        widths |= {"C + Dr": inputs["key"].shape[-1], "Dn": inputs["key_projection"].shape[-1]}
        widths |= {"C": inputs["value"].shape[-1], "Dv": inputs["value_projection"].shape[-1]}
    elif "value" in inputs:
        widths["Dv"] = inputs["value"].shape[-1]
    heads = query.shape[-3] if query.ndim > 2 else 1
    return widths | {"H D": heads * query.shape[-1]}


# Numbers that are used instead of others.

NumberRow = tuple[str, str, Callable[[Problem], float | None]]
"""A name, the number in words, and the number for a problem; None if there is none."""


def number_readings(
    describe_number: Callable[[str], str],
    result_key_prefix: str,
    rows: Sequence[NumberRow],
    change: Callable[[Problem, float, str], ReadingForm | Sequence[ReadingForm]],
    expected_number: Callable[[Problem], float] = lambda problem: 1.0,
    **more: Any,
) -> tuple[Reading, ...]:
    """Return readings that use another number; readings with the same number have one answer, which lists them all."""

    def row(name: str, words: str, number: Callable[[Problem], float | None]) -> Reading:
        def forms(problem: Problem) -> Iterator[ReadingForm]:
            value = number(problem)
            if value is None or _format_for_comparison(value) == _format_for_comparison(expected_number(problem)):
                return
            text, others = _format_for_comparison(value), ((row_words, of(problem)) for _, row_words, of in rows)
            alike = [
                row_words for row_words, same in others if same is not None and _format_for_comparison(same) == text
            ]
            changed = change(problem, value, words)
            for form in (changed,) if isinstance(changed, ReadingForm) else changed:
                unsure = describe_number(" or ".join(dict.fromkeys(filter(None, alike)))).format_map(
                    {"stage": "{stage}", **form.text_values}
                )
                yield replace(form, result_key=f"{result_key_prefix} {text}", ambiguous_description=unsure)

        return Reading(name, describe_number(words), forms, **more)

    return tuple(row(*number) for number in rows)


def _format_for_comparison(number: float) -> str:
    """Format a number so that numbers that differ by rounding, such as 1/8 and 1/sqrt(8) squared, are equal."""
    return f"{number:.12g}"


def format_scales(*scales: float) -> list[str]:
    """Format scales with four digits, or with more if they would look the same.

    Example:
        >>> format_scales(0.125, 0.35355339), format_scales(0.5, 0.50001)
        (['0.125', '0.3536'], ['0.5', '0.50001'])
    """
    short = [f"{scale:.4g}" for scale in scales]
    return short if len(set(short)) == len(set(scales)) else [f"{scale:.9g}" for scale in scales]
