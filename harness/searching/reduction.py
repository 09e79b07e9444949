"""Reduction of a failing case: fewer options, shorter axes, simpler numbers, until no change helps.

Every simpler case is judged like any other, and counts if it fails with the same verdict at the same first stage
(``Symptom``). A case that is simpler (``measure``: by its options and inputs, its size, its numbers) and fails in the
same way replaces the failing case. The reduction works on any case of any file, since it uses only the specification:
an axis is cut in every input that has its letter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from attncheck.common.store import digest_of
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import axes_of, count_elements, optional_inputs
from attncheck.searching.problems import stored
from attncheck.spec import HEADS, OPTIONS, InputSpec, OptionSpec

MAX_TRIES = 1500
MAX_SECONDS = 60.0
_FIRST = ("B", "N", "Hkv", "H", "Np", "W", "Lk", "P", "Lq", "Lp")
"""Axes in the order in which they are cut; all others follow."""
_SINGLES = 32
"""Longer axes are not cut by single positions."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """The simplest problem that fails, after so many tries; ``is_smallest`` if no change was left to try.

    ``steps`` are all failing problems from the first to the simplest.
    """

    problem: Problem
    tries: int
    is_smallest: bool
    steps: tuple[Problem, ...]


def reduce_problem(
    problem: Problem,
    fails: Callable[[Problem], bool],
    tries: int = MAX_TRIES,
    seconds: float = MAX_SECONDS,
) -> Reduced:
    """Simplify a failing problem as long as it still fails."""
    attempts = Attempts(problem, fails, tries, time.monotonic() + seconds)
    cuts = (_leave_out_options, _cut_sequences, _cut_equal_axes, _cut_axes)
    before: Problem | None = None
    is_smallest = True
    try:
        while attempts.failing is not before:
            before = attempts.failing
            for simplify in (*cuts, simplify_options, simplify_masks, simplify_counts, simplify_numbers):
                simplify(attempts)
    except ExhaustedError:
        is_smallest = False
    return Reduced(attempts.failing, attempts.made, is_smallest, (problem, *attempts.accepted))


def _leave_out_options(attempts: Attempts) -> None:
    """Leave out options and inputs that may be absent: all at once, or one after the other."""
    problem = attempts.failing
    attempts.take(lambda failing: replace(failing, supports_statistics=False))
    attempts.take(lambda failing: replace(failing, memory_layout={}))
    attempts.take(lambda failing: replace(failing, stages=None))
    groups = list(optional_groups(problem))
    for group in (set[str]().union(*groups), *groups):
        attempts.take(partial(without_options, names=group))
    for name in problem.memory_layout:
        attempts.take(partial(_without_memory_layout, name=name))


def optional_groups(problem: Problem) -> Iterator[set[str]]:
    """Yield options and inputs that may be left out, each with the inputs that need it."""
    for name in problem.options:
        if name not in ("heads", "score"):
            yield {name}
    specs = problem.specs
    for name in optional_inputs(problem):
        yield {name, *(dependent for dependent in optional_inputs(problem) if specs[dependent].needs == name)}
    if "rotary_cos" in problem.inputs:
        yield {"rotary_cos", "rotary_sin", "rotary_interleaved", "norm_after_rotation"}


def without_options(problem: Problem, names: set[str]) -> Problem:
    """Leave options and inputs out."""
    kept = {name: array for name, array in problem.inputs.items() if name not in names}
    if "past_key" in problem.inputs and "past_key" not in kept:  # inputs along all keys lose the keys of the past
        past = problem.inputs["past_key"].shape[-2]
        keys = np.arange(past, problem.lengths["T"])
        both = {name: problem.inputs[name] for name in ("past_key", "past_value")}
        whole = cut(replace(problem, inputs=kept | both), {"T": keys})
        kept = {name: array for name, array in whole.inputs.items() if name not in names}
    return replace(
        problem,
        inputs=kept,
        options={name: value for name, value in problem.options.items() if name not in names},
        memory_layout={name: kind for name, kind in problem.memory_layout.items() if name in kept},
    )


def _without_memory_layout(problem: Problem, name: str) -> Problem:
    return replace(problem, memory_layout={key: kind for key, kind in problem.memory_layout.items() if key != name})


def _cut_sequences(attempts: Attempts) -> None:
    """Leave packed sequences out, the last one first."""
    if "cu_seqlens_q" not in attempts.failing.inputs:
        return
    for number in reversed(range(len(attempts.failing.inputs["cu_seqlens_q"]) - 1)):
        if len(attempts.failing.inputs["cu_seqlens_q"]) > 2:
            attempts.take(partial(without_sequence, number=number))


def _cut_equal_axes(attempts: Attempts) -> None:
    """Cut equally long axes together: a failure that needs equal lengths would not survive a cut of one."""
    letters = _letters_in_order(attempts.failing)
    for position, first in enumerate(letters):
        for second in letters[position + 1 :]:
            lengths = attempts.failing.lengths
            if first in lengths and lengths[first] == lengths.get(second, 0) > 1 and not {first, second} & {"H", "Hkv"}:
                _find_shortest(attempts, (first, second))


def _cut_axes(attempts: Attempts) -> None:
    for letter in _letters_in_order(attempts.failing):
        if letter in attempts.failing.lengths:
            _cut_axis(attempts, letter)


def _letters_in_order(problem: Problem) -> list[str]:
    letters = letters_of(problem)
    first = [letter for letter in _FIRST if letter in letters]
    return [*first, *(letter for letter in letters if letter not in first)]


def _cut_axis(attempts: Attempts, letter: str) -> None:
    """Keep one position, or the first few, then leave out parts, smaller and smaller ones."""
    length = extent(attempts.failing, letter)
    if length < 2:
        return
    if any(attempts.take(partial(_cut_to_fit, {letter: np.array([position])})) for position in (0, length - 1)):
        return
    _find_shortest(attempts, (letter,))
    size = extent(attempts.failing, letter) // 2
    while size:
        if size == 1 and extent(attempts.failing, letter) > _SINGLES:
            return
        position = 0
        while position < (length := extent(attempts.failing, letter)):
            rest = np.delete(np.arange(length), np.s_[position : position + size])
            if not (len(rest) and attempts.take(partial(_cut_to_fit, {letter: rest}))):
                position += size
        size //= 2


def _find_shortest(attempts: Attempts, letters: tuple[str, ...]) -> None:
    """Bisect for the fewest first positions that fail, assuming that more positions fail too."""
    too_short, enough = 0, extent(attempts.failing, letters[0])
    while too_short + 1 < enough:
        middle = (too_short + enough) // 2
        if attempts.take(partial(_cut_to_fit, dict.fromkeys(letters, np.arange(middle)))):
            enough = middle
        else:
            too_short = middle


def _cut_to_fit(kept: dict[str, np.ndarray], problem: Problem) -> Problem:
    return with_counts_that_fit(cut(problem, kept))


class ExhaustedError(Exception):
    """No tries or no time are left."""


@dataclass
class Attempts:
    """Tries simpler problems, none twice, as long as tries and seconds remain; ``failing`` is the simplest so far."""

    failing: Problem
    fails: Callable[[Problem], bool]
    remaining: int
    until: float
    made: int = 0
    accepted: list[Problem] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def take(self, change: Callable[[Problem], Problem]) -> bool:
        """Change the failing problem; return whether it is simpler and still fails. Raises ``ExhaustedError``."""
        try:
            simpler = change(self.failing)
            if measure(simpler) >= measure(self.failing):
                return False
        except (ValueError, KeyError, IndexError):  # axes that no longer fit together
            return False
        digest = _digest(simpler)
        if digest in self._seen:
            return False
        self._seen.add(digest)
        if self.remaining <= 0 or time.monotonic() > self.until:
            raise ExhaustedError
        self.remaining, self.made = self.remaining - 1, self.made + 1
        if not self.fails(simpler):
            return False
        self.failing = simpler
        self.accepted.append(simpler)
        return True


def _digest(problem: Problem) -> str:
    inputs = [(name, array) for name, array in sorted(problem.inputs.items())]
    layout = sorted(problem.memory_layout.items())
    options = sorted((name, repr(value)) for name, value in problem.options.items())
    return digest_of(inputs, layout, options, problem.supports_statistics, problem.stages)


Kept = Mapping[str, NDArray[np.intp]]
"""Axis letter -> the positions that are kept."""


def letters_of(problem: Problem) -> list[str]:
    """Return the letters of the axes along which a problem can be cut: all but those that follow from other axes."""
    letters = dict.fromkeys(
        letter
        for name in problem.inputs
        for axis in axes_of(problem.specs[name], problem.options)
        for letter in axis.split("*")
    )
    cuttable = [letter for letter in letters if letter != "T" or "Lk" not in letters]
    return [letter for letter in cuttable if letter not in ("S", "S1")]


def extent(problem: Problem, letter: str) -> int:
    """Return the number of positions of an axis; for query heads, of those that share a head of keys and values."""
    lengths = problem.lengths
    return lengths[letter] // lengths["Hkv"] if letter == "H" and "Hkv" in lengths else lengths[letter]


def cut(problem: Problem, kept: Kept) -> Problem:
    """Keep these positions along these axes; keys and values of a past come before the others.

    Raises ``ShapeFault`` for axes that do not fit together.
    """
    lengths = problem.lengths
    whole = dict(_with_heads(problem, dict(kept)))
    if "T" in lengths and "T" not in whole and whole.keys() & {"P", "Lk"}:
        past = whole.get("P", np.arange(lengths.get("P", 0)))
        new = whole.get("Lk", np.arange(lengths.get("Lk", 0)))
        whole["T"] = np.concatenate([past, lengths.get("P", 0) + new])
    inputs = {name: _cut_input(problem, name, array, whole) for name, array in problem.inputs.items()}
    options = dict(problem.options)
    for option, letter in zip(HEADS, ("H", "Hkv"), strict=True):
        if option in options and letter in whole:
            options[option] = len(whole[letter])
    return replace(problem, inputs=inputs, options=options)


def _with_heads(problem: Problem, kept: dict[str, NDArray[np.intp]]) -> dict[str, NDArray[np.intp]]:
    """Add the positions of query heads: each head of keys and values keeps the same number of query heads."""
    lengths = problem.lengths
    if "Hkv" not in lengths or "H" not in lengths:
        return kept
    group = lengths["H"] // lengths["Hkv"]
    if "Hkv" in kept and "H" not in kept:
        kept["H"] = (kept["Hkv"][:, np.newaxis] * group + np.arange(group)).ravel()
    elif "H" in kept and "Hkv" not in kept:  # positions within every group
        kept["H"] = (np.arange(lengths["Hkv"])[:, np.newaxis] * group + kept["H"]).ravel()
    return kept


def _cut_input(problem: Problem, name: str, array: Array, kept: Kept) -> Array:
    spec, lengths = problem.specs[name], problem.lengths
    if array.dtype.kind in "iu" and spec.at_most in kept:
        array = np.searchsorted(kept[spec.at_most], array).astype(np.int64)
    for position, axis in enumerate(axes_of(problem.specs[name], problem.options)):
        parts = axis.split("*")
        if not kept.keys() & set(parts) or (spec.broadcast and array.shape[position] == 1):
            continue
        array = array.take(_positions(parts, kept, lengths), position)
    return array


def _positions(letters: Sequence[str], kept: Kept, lengths: Mapping[str, int]) -> NDArray[np.intp]:
    """Return the positions that are kept of an axis that combines letters, such as heads and widths."""
    positions = np.zeros(1, np.intp)
    for letter in letters:
        of_letter = kept.get(letter)
        of_letter = np.arange(lengths[letter]) if of_letter is None else of_letter
        positions = (positions[:, np.newaxis] * lengths[letter] + of_letter).ravel()
    return positions


def without_sequence(problem: Problem, number: int) -> Problem:
    """Leave out one of several packed sequences."""
    kept = {}
    for name, letter in (("cu_seqlens_q", "Lq"), ("cu_seqlens_k", "Lk")):
        begin, end = problem.inputs[name][number : number + 2]
        kept[letter] = np.delete(np.arange(problem.lengths[letter]), np.s_[int(begin) : int(end)])
    lengths = problem.inputs.get("key_lengths")
    shorter = cut(problem.without_input("key_lengths"), kept)
    inputs = {**shorter.inputs}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        inputs[name] = np.delete(inputs[name], number + 1 if number == 0 else number)
    if lengths is not None:
        inputs["key_lengths"] = np.delete(lengths, number)
    return replace(problem, inputs=inputs)


def with_counts_that_fit(problem: Problem) -> Problem:
    """Limit counts to the lengths of the axes that they count."""
    lengths, inputs = problem.lengths, dict(problem.inputs)
    for name, array in inputs.items():
        spec: InputSpec = problem.specs[name]
        if spec.whole and spec.at_most in lengths:
            inputs[name] = np.minimum(array, lengths[spec.at_most])
    return replace(problem, inputs=inputs)


_ONE_BY_ONE = 64
"""In larger arrays, no single numbers are replaced."""
_SIMPLE_NUMBERS = (0.0, 1.0, 2.0, 0.5, 10.0, -1.0, -10.0)
_SIMPLE_WINDOWS = ((0, 0), (0, None), (None, 0), (1, 0), (0, 1), (1, 1), (1, None), (None, 1))


def simplify_options(attempts: Attempts) -> None:
    """Give options simpler values."""
    for name in list(attempts.failing.options):
        for value in _simpler_values(OPTIONS[name]):
            if attempts.take(partial(_with_option, name=name, value=value)):
                break


def _simpler_values(spec: OptionSpec) -> Sequence[Any]:
    if get_origin(spec.type) is tuple:
        return _SIMPLE_WINDOWS
    return [number for number in _SIMPLE_NUMBERS if number > 0 or not spec.positive] if spec.type is float else ()


def _with_option(problem: Problem, name: str, value: Any) -> Problem:
    return problem.with_options(**{name: value})


def simplify_masks(attempts: Attempts) -> None:
    """Broadcast masks and biases along axes, and allow more keys."""
    for name in list(optional_inputs(attempts.failing)):
        if attempts.failing.specs[name].broadcast:
            for axis in range(attempts.failing.inputs[name].ndim):
                attempts.take(partial(_keep_first_slice, name=name, axis=axis))
        if attempts.failing.specs[name].boolean:
            _replace_parts(attempts, name, lambda part: np.ones_like(part))


def _keep_first_slice(problem: Problem, name: str, axis: int) -> Problem:
    return _with_input(problem, name, problem.inputs[name].take([0], axis))


def simplify_counts(attempts: Attempts) -> None:
    """Set all numbers of an optional input of counts to 0 or 1."""
    for name, array in list(attempts.failing.inputs.items()):
        spec = attempts.failing.specs[name]
        if spec.whole and not spec.required:
            for number in (0, 1):
                attempts.take(partial(_with_input, name=name, array=np.full_like(array, number)))


def simplify_numbers(attempts: Attempts) -> None:
    """Round whole arrays, to the simplest numbers first; then parts of arrays, and single numbers."""
    names = [name for name in attempts.failing.inputs if attempts.failing.specs[name].is_number]
    for simpler in _ROUNDINGS:
        attempts.take(partial(_round_inputs, names=names, simpler=simpler))
    for name in names:
        for simpler in _ROUNDINGS:
            if attempts.take(partial(_round_input, name=name, simpler=simpler)):
                break
        _replace_parts(attempts, name, np.zeros_like)
        _replace_parts(attempts, name, np.ones_like)
        _replace_parts(attempts, name, lambda part: np.clip(np.rint(_finite(part)), -2, 2))
        _replace_parts(attempts, name, _in_two_digits)


def _finite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0.0)


def _in_two_digits(array: Array) -> Array:
    short = [float(f"{number:.2g}") for number in array.ravel().tolist()]
    return np.array(short).reshape(array.shape)


def _power_of_two(array: Array) -> Array:
    exponent = np.round(np.log2(np.where(array == 0, 1, np.abs(_finite(array)) + (array == 0) + 1e-300)))
    return np.where(np.isfinite(array) & (array != 0), np.sign(array) * 2.0 ** np.clip(exponent, -126, 126), array)


_ROUNDINGS: Sequence[Callable[[Array], Array]] = (
    np.zeros_like,
    np.ones_like,
    _finite,
    lambda array: np.clip(np.rint(_finite(array)), -2, 2),
    lambda array: np.sign(array) if np.isfinite(array).all() else array,
    np.rint,
    lambda array: np.arange(1, array.size + 1, dtype=np.float64).reshape(array.shape),
    _power_of_two,
    _in_two_digits,
)


def _round_inputs(problem: Problem, names: Sequence[str], simpler: Callable[[Array], Array]) -> Problem:
    for name in names:
        problem = _round_input(problem, name, simpler)
    return problem


def _round_input(problem: Problem, name: str, simpler: Callable[[Array], Array]) -> Problem:
    return _with_input(problem, name, simpler(problem.inputs[name]))


def _with_input(problem: Problem, name: str, array: Array) -> Problem:
    """Replace an input, rounded to the format in which it is stored; statistics no longer apply to numbers."""
    spec = problem.specs[name]
    if spec.is_number:
        numbers = {name: np.asarray(array, np.float64)}
        array = stored(numbers, problem.specs, problem.options, problem.dtype)[name].astype(np.float64)
    layout = {key: kind for key, kind in problem.memory_layout.items() if key != name or kind != "broadcast"}
    return replace(
        problem,
        inputs={**problem.inputs, name: array},
        memory_layout=layout,
        supports_statistics=problem.supports_statistics and not spec.is_number,
    )


def _replace_parts(attempts: Attempts, name: str, simpler: Callable[[Array], Array]) -> None:
    """Replace parts of an array if that makes it simpler: halves, quarters, and so on to single numbers."""
    size = attempts.failing.inputs[name].size
    if size < 2 or size > _ONE_BY_ONE * 8:
        return
    for length in _sizes(size, 1 if size <= _ONE_BY_ONE else size // 8):
        for begin in range(0, size, length):
            array = attempts.failing.inputs[name]
            part = array.ravel()[begin : begin + length]
            simple_part = simpler(part)
            if complexity(simple_part) < complexity(part):
                attempts.take(partial(_with_part, name=name, begin=begin, part=simple_part))


def _sizes(size: int, least: int) -> Iterator[int]:
    length = (size + 1) // 2
    while length >= max(least, 1):
        yield length
        if length == 1:
            return
        length = (length + 1) // 2


def _with_part(problem: Problem, name: str, begin: int, part: Array) -> Problem:
    array = problem.inputs[name].copy()
    array.ravel()[begin : begin + part.size] = part
    return _with_input(problem, name, array)


Measure = tuple[int, int, float]


def measure(problem: Problem) -> Measure:
    """Return a sort key: options and optional inputs first, then elements, then the complexity of numbers."""
    asked = len(problem.options.keys() - {*HEADS, "score"}) + len(optional_inputs(problem))
    forms = len(problem.memory_layout) + (problem.stages is not None) + problem.supports_statistics
    numbers = sum(complexity(array) for array in problem.inputs.values())
    options = sum(_option_complexity(value) for value in problem.options.values())
    return asked + forms, count_elements(problem), numbers + options


def complexity(array: NDArray[Any]) -> float:
    """Return how complex an array is to read: 0 for zeros, little for small integers."""
    if array.dtype.kind == "b":
        return float(np.count_nonzero(~array))
    numbers = array.astype(np.float64).ravel()
    return float(sum(_number_complexity(number) for number in numbers.tolist()))


def _number_complexity(number: float) -> float:
    """Return 0 for 0, about 1 for small integers, 2 for numbers of few digits, 4 for others."""
    if number == 0:
        return 0.1 if math.copysign(1, number) < 0 else 0.0
    if not math.isfinite(number):
        return 2.0
    sign = 0.1 if number < 0 else 0.0
    if number == int(number) and abs(number) <= 10:
        return 1 + abs(number) / 20 + sign
    if float(f"{number:.2g}") == number:
        return 2 + sign
    if math.frexp(number)[0] in (0.5, -0.5):
        return 2.5 + sign
    return 4 + sign


def _option_complexity(value: Any) -> float:
    match value:
        case bool() | str():
            return 0.0
        case tuple():
            return sum(0.5 if side is None else _number_complexity(side) for side in value)
    return _number_complexity(float(value))
