"""What a row of the catalogue is, what it makes of one case, and the changes of problems that rows share.

A ``Reading`` is a row: another reading of what a case says, whatever the case. An ``Alternative`` is one case as it is
then read. Rows are in ``readings.py`` and, where a step is another one, in ``replaced_steps.py``.
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
from attncheck.spec import BY_SCORE, DECLARED_READINGS, HEADS, INSTEAD_OF, is_said, score_kind
from attncheck.spec.verdicts import Verdict

StepReplacement = Callable[[Truth, str, Stages], Truth | None]
"""Makes the truth of another step from the exact answer, given a rounding model and what fails; None where
there is no such step."""


@dataclass(frozen=True, eq=False)
class Form:
    """A problem as a reading takes it, with the ``words`` that its text asks for, and what else depends on the case."""

    problem: Problem
    words: Mapping[str, object] = field(default_factory=dict)
    stage: str = ""
    stage_aliases: Mapping[str, str] = field(default_factory=dict)
    replacement: StepReplacement | None = None
    answer: str = ""
    unsure: str = ""
    shared: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Alternative(Form):
    """Another reading of a case.

    ``description`` tells people what the implementation does and what the case means; ``{stage}`` is the stage where it
    shows. ``stage`` is the one at which the reading departs from the case, ``problem`` the problem as it is then read.
    ``option`` is what an implementation may declare: the name of a convention and its value. ``stage_aliases`` names
    the stages to compare with where the problem has no such stage any more. ``replacement`` makes the stages of an
    answer that is no problem's: a step that is another one, such as a softmax over queries.

    Names are the same in every case, so that one implementation's failures can be brought together. Alternatives of one
    ``answer`` cannot be told apart by a case, where 1/D is the square of 1/sqrt(D); ``unsure`` says all of them.
    ``is_fitted`` marks those with a free number, or that say less than a cause: they count where nothing else fits.
    ``factor`` is that number, over the one that the case means. ``shared`` describes it where all cases that it
    explains say that: they leave an option to its default, which is another one.
    """

    name: str = ""
    description: str = ""
    option: tuple[str, str] | None = None
    verdict: Verdict = Verdict.SEMANTIC
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


Changed: TypeAlias = Callable[[Problem], Problem | None]
"""Makes of a problem the one that is read instead; None where there is nothing of it."""
Change: TypeAlias = Callable[[Problem], Problem | Form | Iterable[Form] | None]
"""The same with words, or in several forms."""


@dataclass(frozen=True)
class Reading:
    """A row of the catalogue: what an implementation may do instead of what a case says.

    ``says`` is the message, in which words in braces depend on the case, and {stage} is where it shows. ``change``
    makes the problem as it is then read, of a case that has an input or option of the name ``of``. It departs at
    ``stage``, unless its form says otherwise. The verdict is ``semantic`` of a convention, which somebody means, and
    ``numeric`` of a mistake. A reading ``before_lowering`` is one of the operation that is called.
    """

    name: str
    says: str
    change: Change
    of: str = ""
    stage: str = "masked"
    verdict: Verdict = Verdict.NUMERIC
    before_lowering: bool = False

    @property
    def is_convention(self) -> bool:
        """Whether somebody means it."""
        return self.verdict is Verdict.SEMANTIC

    @property
    def option(self) -> tuple[str, str] | None:
        """The convention and its value by which a function declares it; None if it cannot be declared."""
        return DECLARED_READINGS.get(self.name)

    def of_problem(self, problem: Problem) -> Iterator[Alternative]:
        """Yield a problem as it is read so, in each form; nothing where it has nothing of it."""
        option = problem.options.get(self.of)
        if self.of and self.of not in problem.inputs and (option is None or option is False):
            return
        found = self.change(problem)
        forms = () if found is None else (found,) if isinstance(found, Problem | Form) else found
        for form in (Form(each) if isinstance(each, Problem) else each for each in forms):
            if form.replacement is None and not form.stage_aliases and is_same(form.problem, problem):
                continue
            yield self.alternative(
                replace(form, problem=form.problem.without_layout()) if self.before_lowering else form
            )

    def alternative(self, form: Form, **more: Any) -> Alternative:
        """Return the reading of a case in one form."""
        description = self.says.format_map({"stage": "{stage}", **form.words})
        own = {"stage": form.stage or self.stage, "option": self.option}
        told = {"name": self.name, "description": description, "verdict": self.verdict}
        return Alternative(**{**vars(form), **own, **told, **more})


def is_same(one: Problem, other: Problem) -> bool:
    """Return whether two problems of one operation have the same options and the same numbers."""
    if one is other:
        return True
    if one.options != other.options or one.inputs.keys() != other.inputs.keys():
        return False
    pairs = ((array, other.inputs[name]) for name, array in one.inputs.items())
    return all(a is b or (a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape) for a, b in pairs)


def convention(name: str, says: str, change: Change, of: str = "", stage: str = "masked", **more: Any) -> Reading:
    """Return a reading that somebody means."""
    return Reading(name, says, change, of, stage, Verdict.SEMANTIC, **more)


# Changes that rows share.


def set_to(**options: Any) -> Changed:
    """Change options."""
    return lambda problem: problem.with_options(**options)


def with_input(name: str, change: Callable[[Any], Any]) -> Changed:
    """Change one input, where the change is not None."""

    def changed(problem: Problem) -> Problem | None:
        other = change(problem.inputs[name])
        return None if other is None else problem.with_inputs(**{name: other})

    return changed


def with_each(names: Iterable[str], change: Callable[[Any], Any]) -> Changed:
    """Change several inputs alike, those that are there."""
    return lambda problem: problem.with_inputs(
        **{name: change(problem.inputs[name]) for name in names if name in problem.inputs}
    )


def without(name: str) -> Changed:
    """Leave an input out."""
    return lambda problem: problem.without_input(name)


def only(applies: Callable[[Problem], object], change: Change) -> Change:
    """Change problems of some kind alone."""
    return lambda problem: change(problem) if applies(problem) else None


def shown_at(stage: Callable[[Problem], str], change: Change) -> Change:
    """Let a change show first at a stage that follows from the problem."""

    def changed(problem: Problem) -> Form | None:
        found = change(problem)
        form = Form(found) if isinstance(found, Problem) else found
        assert form is None or isinstance(form, Form), "a change in one form"
        return form and replace(form, stage=stage(problem))

    return changed


def toggled(option: str, words: Mapping[Any, str]) -> Change:
    """Take the other one of two values of an option, of which the first is the default, each in ``words``."""

    def change(problem: Problem) -> Form:
        own = problem.options.get(option) or next(iter(words))
        (other,) = words.keys() - {own}
        return Form(problem.with_options(**{option: other}), {"taken": words[other], "meant": words[own]})

    return change


def exchanged(one: str, other: str) -> Changed:
    """Take one of two inputs of one shape for the other, and the other way round."""

    def change(problem: Problem) -> Problem | None:
        if other not in problem.inputs or problem.inputs[one].shape != problem.inputs[other].shape:
            return None
        return problem.with_inputs(**{one: problem.inputs[other], other: problem.inputs[one]})

    return change


def transposed(name: str) -> Changed:
    """Swap the last two axes of an input, where they are equally long."""
    return with_input(
        name,
        lambda array: np.swapaxes(array, -1, -2) if array.ndim > 1 and array.shape[-2] == array.shape[-1] else None,
    )


def identity(weight: Any) -> Any:
    """Return the matrices that leave all as it is, where they are square."""
    *_, rows, columns = weight.shape
    return np.broadcast_to(np.eye(rows, dtype=weight.dtype), weight.shape) if rows == columns else None


def with_mask(problem: Problem) -> Problem:
    """Give the problem a mask that allows everything, or it would lose the stage when it loses the option."""
    return problem if "mask" in problem.inputs else problem.with_inputs(mask=np.ones((1, 1, 1, 1), dtype=np.bool_))


def with_allowed(problem: Problem, allowed: Any) -> Problem:
    """Return the problem with a mask, (Lq, Lk) or of four axes, beside that which it has."""
    own = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    return problem.with_inputs(mask=own & problem.inputs.get("mask", True))


def folded(problem: Problem) -> Problem:
    """Return the canonical form of a problem, with what it says of rows without a key."""
    kept = {name: problem.options[name] for name in ("empty_rows",) if name in problem.options}
    return problem.canonical().with_options(**kept)


def delivered(problem: Problem) -> Problem:
    """Return a problem as the call has it, with what it says of heads and of rows without a key."""
    kept = {name: problem.options[name] for name in ("empty_rows", *HEADS) if name in problem.options}
    return problem.as_call().with_options(**kept)


# What belongs to another entry.


Order = Callable[[int], Any]
"""Of so many entries, the number of the one that is taken for each."""
FIRST: Order = lambda count: np.zeros(count, int)  # noqa: E731
NEXT: Order = lambda count: np.roll(np.arange(count), -1)  # noqa: E731

_ORDERS: Mapping[str, tuple[str, Order]] = {
    "of-first": ("of the first {} is taken for all", FIRST),
    "of-next": ("of the next {} is taken", NEXT),
    "in-reverse-of": (
        "of each {} is that of the last one before: they are taken in reverse",
        lambda count: np.arange(count)[::-1],
    ),
}


def taken(names: Sequence[str], axis: int, order: Order, fewest: int = 1) -> Changed:
    """Take of some inputs, for each entry of an axis, what belongs to another one.

    There have to be more than the ``fewest`` entries, or it would be another reading.
    """
    return with_each(
        names,
        lambda array: (
            array.take(order(array.shape[axis]), axis) if array.ndim >= -axis and array.shape[axis] > fewest else array
        ),
    )


def entries(slug: str, called: str, names: Sequence[str], axes: Mapping[str, int], stage: str, *orders: str,
            when: Callable[[Problem], bool] = lambda problem: True) -> Iterator[Reading]:  # fmt: skip
    """Yield the readings of an input, or of several together, by each axis and order."""
    for word, axis in axes.items():
        for order in orders or ("of-first", "of-next"):
            says, taken_for_each = _ORDERS[order]
            change = taken(names, axis, taken_for_each, 2 if order == "in-reverse-of" else 1)
            yield Reading(
                f"{slug}-{order}-{word.replace(' ', '-')}",
                f"{called} {says.format(word)}",
                only(when, change),
                names[0],
                stage,
            )


# What a problem has.


def allowed_keys(problem: Problem) -> NDArray[np.bool_] | None:
    """Return who may attend to whom, of the scores' shape; None where nothing is forbidden."""
    plain = problem.canonical()
    return Computation.as_given(plain).allowed(scores_shape(plain))


_WITH_SCALE = frozenset({"attention", "attention_gradients", "multi_head_attention"})


def has_scale(problem: Problem) -> bool:
    """Whether the scores are a product of query and key times one number."""
    if not INSTEAD_OF["scale"].isdisjoint(problem.inputs):
        return False
    is_scored = problem.operation in ("scoring", *BY_SCORE)
    return problem.operation in _WITH_SCALE or (
        is_scored and score_kind(problem.operation, problem.options) in ("dot", "scaled_dot", "cosine")
    )


def scale_of(problem: Problem) -> float:
    """Return the factor of the scores that a case means, 1 where each head has its own."""
    if not INSTEAD_OF["scale"].isdisjoint(problem.inputs):
        return 1.0
    return float(problem.scale(lambda: widths_of(problem)["D"]))


def has_default_scale(problem: Problem) -> bool:
    """Whether a case leaves the scale to its default, 1/sqrt(D)."""
    if is_said("scale", problem.options, problem.inputs):
        return False
    return math.isclose(scale_of(problem) * math.sqrt(widths_of(problem)["D"]), 1)


def default_scale(words: str) -> str:
    """Say that the default scale is another one."""
    return f"the default scale is {words}: give scale, or divide by sqrt(D)"


def widths_of(problem: Problem) -> dict[str, int]:
    """Return the widths that a scale may be made of: D of a head, Dv of values, H D of all heads, E of the inputs.

    Of latent vectors, C is their own width, and Dn that of a query's part that is not rotated.
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


# Numbers that are taken for others.

Number = tuple[str, str, Callable[[Problem], float | None]]
"""A name, in words what the number is, and the number for a problem; None where there is none."""


def numbered(
    says: Callable[[str], str],
    answer: str,
    rows: Sequence[Number],
    change: Callable[[Problem, float, str], Form | Sequence[Form]],
    meant: Callable[[Problem], float] = lambda problem: 1.0,
    **more: Any,
) -> tuple[Reading, ...]:
    """Return readings that are numbers in the place of one: of one number they are one answer, which says them all."""

    def row(name: str, words: str, number: Callable[[Problem], float | None]) -> Reading:
        def forms(problem: Problem) -> Iterator[Form]:
            value = number(problem)
            if value is None or _same(value) == _same(meant(problem)):
                return
            others = ((other, of(problem)) for _, other, of in rows)
            alike = [other for other, of_it in others if of_it is not None and _same(of_it) == _same(value)]
            found = change(problem, value, words)
            for form in (found,) if isinstance(found, Form) else found:
                unsure = says(" or ".join(dict.fromkeys(filter(None, alike)))).format_map(
                    {"stage": "{stage}", **form.words}
                )
                yield replace(form, answer=f"{answer} {_same(value)}", unsure=unsure)

        return Reading(name, says(words), forms, **more)

    return tuple(row(*each) for each in rows)


def _same(number: float) -> str:
    """Write numbers that are one except for roundings, as 1/8 and the square of 1/sqrt(8), alike."""
    return f"{number:.12g}"


def scales_in_words(*scales: float) -> list[str]:
    """Write scales with four digits, or with more where they would look the same."""
    short = [f"{scale:.4g}" for scale in scales]
    return short if len(set(short)) == len(set(scales)) else [f"{scale:.9g}" for scale in scales]
