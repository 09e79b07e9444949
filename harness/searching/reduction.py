"""The smallest case that fails as a given one does: fewer options, shorter axes, simpler numbers, until nothing helps.

Every case that is tried is judged as any other, and counts where it fails with the same verdict at the same first stage
(``Symptom``). It works on any case, whoever wrote it: what a case is made of is known from the specification alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from attncheck.searching.attempts import Attempts, ExhaustedError
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.simplification import simplify_counts, simplify_masks, simplify_numbers, simplify_options
from attncheck.searching.slicing import cut, extent, letters_of, with_counts_that_fit, without_sequence

MAX_TRIES = 1500
MAX_SECONDS = 60.0
_FIRST = ("B", "N", "Hkv", "H", "Np", "W", "Lk", "P", "Lq", "Lp")
"""Axes in the order in which they are cut; all others follow."""
_SINGLES = 32
"""Of longer axes no single position is left out."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """The simplest problem that fails, after so many tries; ``is_smallest`` says that nothing was left to try.

    ``steps`` are those before it that fail too, the first one first.
    """

    problem: ConcreteCase
    tries: int
    is_smallest: bool
    steps: tuple[ConcreteCase, ...]


def reduce_problem(
    problem: ConcreteCase,
    fails: Callable[[ConcreteCase], bool],
    tries: int = MAX_TRIES,
    seconds: float = MAX_SECONDS,
) -> Reduced:
    """Return the simplest problem that still fails, of those that come of one that does."""
    attempts = Attempts(problem, fails, tries, time.monotonic() + seconds)
    is_smallest = True
    try:
        while _pass(attempts):
            pass
    except ExhaustedError:
        is_smallest = False
    return Reduced(attempts.failing, attempts.made, is_smallest, (problem, *attempts.accepted))


def _pass(attempts: Attempts) -> bool:
    """Try everything once; whether anything helped."""
    before = attempts.failing
    for simplify in (_drop, _cut_sequences, _cut_alike, _cut_axes, simplify_options, simplify_masks):
        simplify(attempts)
    simplify_counts(attempts)
    simplify_numbers(attempts)
    return attempts.failing is not before


def _drop(attempts: Attempts) -> None:
    """Leave out what may be absent: everything at once, or one after the other."""
    problem = attempts.failing
    attempts.take(lambda each: each.changed(supports_statistics=False))
    attempts.take(lambda each: each.changed(memory_layout={}))
    attempts.take(lambda each: each.changed(stages=None))
    groups = list(_optional_groups(problem))
    attempts.take(partial(_without, names={name for group in groups for name in group}))
    for group in groups:
        attempts.take(partial(_without, names=group))
    for name in problem.memory_layout:
        attempts.take(partial(_as_it_comes, name=name))


def _optional_groups(problem: ConcreteCase) -> Iterator[set[str]]:
    """Yield options and inputs that may be left out, each with what needs it."""
    for name in problem.options:
        if name not in ("heads", "score"):
            yield {name}
    specs = problem.specs
    for name in problem.optional_inputs:
        yield {name, *(other for other in problem.optional_inputs if specs[other].needs == name)}
    if "rotary_cos" in problem.inputs:
        yield {"rotary_cos", "rotary_sin", "rotary_interleaved", "norm_after_rotation"}


def _without(problem: ConcreteCase, names: set[str]) -> ConcreteCase:
    kept = {name: array for name, array in problem.inputs.items() if name not in names}
    if "past_key" in problem.inputs and "past_key" not in kept:  # what goes along all keys loses those of the past
        past = problem.inputs["past_key"].shape[-2]
        keys = np.arange(past, problem.lengths["T"])
        whole = cut(problem.changed(inputs=kept | _past(problem)), {"T": keys})
        kept = {name: array for name, array in whole.inputs.items() if name not in names}
    return problem.changed(
        inputs=kept,
        options={name: value for name, value in problem.options.items() if name not in names},
        memory_layout={name: each for name, each in problem.memory_layout.items() if name in kept},
    )


def _past(problem: ConcreteCase) -> dict[str, np.ndarray]:
    return {name: problem.inputs[name] for name in ("past_key", "past_value")}


def _as_it_comes(problem: ConcreteCase, name: str) -> ConcreteCase:
    return problem.changed(memory_layout={each: kind for each, kind in problem.memory_layout.items() if each != name})


def _cut_sequences(attempts: Attempts) -> None:
    """Leave packed sequences out, the last one first."""
    if "cu_seqlens_q" not in attempts.failing.inputs:
        return
    for number in reversed(range(len(attempts.failing.inputs["cu_seqlens_q"]) - 1)):
        if len(attempts.failing.inputs["cu_seqlens_q"]) > 2:
            attempts.take(partial(without_sequence, number=number))


def _cut_alike(attempts: Attempts) -> None:
    """Cut axes that are equally long together: what needs them alike would not fail after one alone."""
    letters = _letters(attempts.failing)
    for position, one in enumerate(letters):
        for other in letters[position + 1 :]:
            lengths = attempts.failing.lengths
            if one in lengths and lengths[one] == lengths.get(other, 0) > 1 and not {one, other} & {"H", "Hkv"}:
                _find_shortest(attempts, (one, other))


def _cut_axes(attempts: Attempts) -> None:
    for letter in _letters(attempts.failing):
        if letter in attempts.failing.lengths:
            _cut_axis(attempts, letter)


def _letters(problem: ConcreteCase) -> list[str]:
    found = letters_of(problem)
    return [*(each for each in _FIRST if each in found), *(each for each in found if each not in _FIRST)]


def _cut_axis(attempts: Attempts, letter: str) -> None:
    """Keep one position, or the first few, then leave out parts, smaller and smaller ones."""
    length = extent(attempts.failing, letter)
    if length < 2:
        return
    if attempts.take(partial(_kept, {letter: np.array([0])})):
        return
    if attempts.take(partial(_kept, {letter: np.array([length - 1])})):
        return
    _find_shortest(attempts, (letter,))
    size = extent(attempts.failing, letter) // 2
    while size:
        if size == 1 and extent(attempts.failing, letter) > _SINGLES:
            return
        position = 0
        while position < (length := extent(attempts.failing, letter)):
            rest = np.delete(np.arange(length), np.s_[position : position + size])
            if not (len(rest) and attempts.take(partial(_kept, {letter: rest}))):
                position += size
        size //= 2


def _find_shortest(attempts: Attempts, letters: tuple[str, ...]) -> None:
    """Look by halves for the fewest first positions that fail, as if whatever is longer failed too."""
    too_short, enough = 0, extent(attempts.failing, letters[0])
    while too_short + 1 < enough:
        middle = (too_short + enough) // 2
        if attempts.take(partial(_kept, dict.fromkeys(letters, np.arange(middle)))):
            enough = middle
        else:
            too_short = middle


def _kept(kept: dict[str, np.ndarray], problem: ConcreteCase) -> ConcreteCase:
    return with_counts_that_fit(cut(problem, kept))
