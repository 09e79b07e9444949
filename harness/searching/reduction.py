"""Reduction of a failing case: fewer options, shorter axes, simpler numbers, until no change helps.

A failing case with eight heads, a mask and random numbers hides its cause. The same failure with one head, two keys
and numbers such as 1 and 2 often shows it. ``reduce_problem`` searches for such a case. It proposes a simpler problem,
runs and judges it like any other case, and keeps it if two conditions are true:

- It is simpler: its ``simplicity_key`` is lower. The key compares the number of options and optional inputs first,
  then the number of elements, then how complex the numbers are to read.
- It fails in the same way: with the same verdict at the same first stage (``Symptom`` in ``findings.py``).

Each accepted change lowers the key, so the reduction cannot go in circles. It proposes large changes first, because a
smaller problem makes all later tries cheaper:

1. Drop options and optional inputs, all at once, then one by one; drop packed sequences.
2. Shorten axes. For each axis, keep only the first or the last position. If that does not fail, bisect for the fewest
   first positions that fail, then drop halves, quarters, and so on to single positions. Axes of equal length are
   first shortened together, since some failures need equal lengths, such as as many queries as keys.
3. Give options simpler values, broadcast masks and biases, allow more keys.
4. Simplify numbers: round whole arrays (zeros, ones, small integers, two digits), then parts, then single numbers.

Then it starts again, until a whole pass changes nothing. The result is a local minimum: no change of this list makes
it simpler (``Reduction.is_smallest``). The smallest problem of all would need a search over all subsets of options,
positions and numbers. A bisection can also miss a shorter axis, if a failure does not grow with the length; the later
drops of parts find most of these.

A try costs one call and one judgement, far more than the change itself. So a problem is tried once (``Attempts``), and
the tries and the time are limited (``MAX_TRIES``, ``MAX_SECONDS``); the simplest problem so far is then the result.

The changes use only the specification: an axis is cut in every input that has its letter. So the reduction works on
any case of any file. A library for property-based testing can only shrink problems that it has drawn itself.
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
from attncheck.reading.lowering import Array, count_key_blocks, name_keys_once
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import count_elements, input_axes, optional_inputs
from attncheck.searching.problems import round_to_stored
from attncheck.spec import HEADS, OPTIONS, InputSpec, OptionSpec

MAX_TRIES = 1500
"""Limit of tries. Reductions of 171 drawn problems, by four synthetic failures, needed 9 to 54 at the median and 321 at
most. So the limit only stops failures that are not deterministic, or that need most of their numbers.
"""
MAX_SECONDS = 60.0
"""Limit of time. A choice: a search spends this time on one finding instead of new problems. With less time, reduced
cases of slow implementations are larger.
"""
_FIRST_AXES = ("B", "N", "Hkv", "H", "Np", "W", "Lk", "P", "Lq", "Lp")
"""Axes in the order in which they are cut; all others follow."""
_MAX_LENGTH_FOR_SINGLE_CUTS = 32
"""Longer axes are not cut by single positions. A choice: each position costs a try."""


@dataclass(frozen=True, eq=False)
class Reduction:
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
) -> Reduction:
    """Simplify a failing problem as long as it still fails.

    Example:
        >>> arrays = {name: np.ones((2, 3, 5, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {"is_causal": True, "scale": 0.7}, arrays, "float64")
        >>> fails = lambda simpler: simpler.axis_lengths["Lk"] > 2 and "scale" in simpler.options
        >>> reduction = reduce_problem(problem, fails)
        >>> reduction.problem.axis_lengths["Lk"], reduction.problem.axis_lengths["Lq"], reduction.problem.options
        (3, 1, {'scale': 0.0})
    """
    attempts = Attempts(problem, fails, tries, time.monotonic() + seconds)
    cuts = (_drop_options, _drop_sequences, _cut_equal_axes, _cut_axes)
    before: Problem | None = None
    is_smallest = True
    try:
        while attempts.failing_problem is not before:
            before = attempts.failing_problem
            for simplify in (*cuts, simplify_options, simplify_masks, simplify_counts, simplify_numbers):
                simplify(attempts)
    except ExhaustedError:
        is_smallest = False
    return Reduction(attempts.failing_problem, attempts.tries_made, is_smallest, (problem, *attempts.accepted_problems))


def _drop_options(attempts: Attempts) -> None:
    """Leave out options and inputs that may be absent: all at once, or one after the other."""
    problem = attempts.failing_problem
    attempts.try_change(lambda failing: replace(failing, supports_statistics=False))
    attempts.try_change(lambda failing: replace(failing, memory_layout={}))
    attempts.try_change(lambda failing: replace(failing, stages=None))
    groups = list(removable_groups(problem))
    for group in (set[str]().union(*groups), *groups):
        attempts.try_change(partial(drop_options_and_inputs, names=group))
    for dropped in problem.memory_layout:
        layout = {name: kind for name, kind in attempts.failing_problem.memory_layout.items() if name != dropped}
        attempts.try_change(partial(replace, memory_layout=layout))


def removable_groups(problem: Problem) -> Iterator[set[str]]:
    """Yield options and inputs that may be left out, each with the inputs that need it."""
    for name in problem.options:
        if name not in ("heads", "score"):
            yield {name}
    specs = problem.input_specs
    for name in optional_inputs(problem):
        yield {name, *(dependent for dependent in optional_inputs(problem) if specs[dependent].required_input == name)}
    if "rotary_cos" in problem.inputs:
        yield {"rotary_cos", "rotary_sin", "rotary_interleaved", "norm_after_rotation"}


def drop_options_and_inputs(problem: Problem, names: set[str]) -> Problem:
    """Leave options and inputs out."""
    kept = {name: array for name, array in problem.inputs.items() if name not in names}
    if "past_key" in problem.inputs and "past_key" not in kept:  # inputs along all keys lose the keys of the past
        past = problem.inputs["past_key"].shape[-2]
        keys = np.arange(past, problem.axis_lengths["T"])
        both = {name: problem.inputs[name] for name in ("past_key", "past_value")}
        whole = keep_positions(replace(problem, inputs=kept | both), {"T": keys})
        kept = {name: array for name, array in whole.inputs.items() if name not in names}
    return replace(
        problem,
        inputs=kept,
        options={name: value for name, value in problem.options.items() if name not in names},
        memory_layout={name: kind for name, kind in problem.memory_layout.items() if name in kept},
    )


def _drop_sequences(attempts: Attempts) -> None:
    """Leave packed sequences out, the last one first."""
    if "cu_seqlens_q" not in attempts.failing_problem.inputs:
        return
    for number in reversed(range(len(attempts.failing_problem.inputs["cu_seqlens_q"]) - 1)):
        if len(attempts.failing_problem.inputs["cu_seqlens_q"]) > 2:
            attempts.try_change(partial(drop_sequence, number=number))


def _cut_equal_axes(attempts: Attempts) -> None:
    """Cut equally long axes together: a failure that needs equal lengths would not survive a cut of one."""
    letters = _axes_in_cut_order(attempts.failing_problem)
    for position, first in enumerate(letters):
        for second in letters[position + 1 :]:
            lengths = attempts.failing_problem.axis_lengths
            if first in lengths and lengths[first] == lengths.get(second, 0) > 1 and not {first, second} & {"H", "Hkv"}:
                _bisect_axis_length(attempts, (first, second))


def _cut_axes(attempts: Attempts) -> None:
    for letter in _axes_in_cut_order(attempts.failing_problem):
        if letter in attempts.failing_problem.axis_lengths:
            _cut_axis(attempts, letter)


def _axes_in_cut_order(problem: Problem) -> list[str]:
    letters = cuttable_axes(problem)
    first = [letter for letter in _FIRST_AXES if letter in letters]
    return [*first, *(letter for letter in letters if letter not in first)]


def _cut_axis(attempts: Attempts, letter: str) -> None:
    """Keep one position, or the first few, then leave out parts, smaller and smaller ones."""
    length = position_count(attempts.failing_problem, letter)
    if length < 2:
        return
    if any(
        attempts.try_change(partial(_keep_positions_and_clip_counts, {letter: np.array([position])}))
        for position in (0, length - 1)
    ):
        return
    _bisect_axis_length(attempts, (letter,))
    size = position_count(attempts.failing_problem, letter) // 2
    while size:
        if size == 1 and position_count(attempts.failing_problem, letter) > _MAX_LENGTH_FOR_SINGLE_CUTS:
            return
        position = 0
        while position < (length := position_count(attempts.failing_problem, letter)):
            rest = np.delete(np.arange(length), np.s_[position : position + size])
            if not (len(rest) and attempts.try_change(partial(_keep_positions_and_clip_counts, {letter: rest}))):
                position += size
        size //= 2


def _bisect_axis_length(attempts: Attempts, letters: tuple[str, ...]) -> None:
    """Bisect for the fewest first positions that fail, assuming that more positions fail too."""
    too_short, enough = 0, position_count(attempts.failing_problem, letters[0])
    while too_short + 1 < enough:
        middle = (too_short + enough) // 2
        if attempts.try_change(partial(_keep_positions_and_clip_counts, dict.fromkeys(letters, np.arange(middle)))):
            enough = middle
        else:
            too_short = middle


def _keep_positions_and_clip_counts(kept: dict[str, np.ndarray], problem: Problem) -> Problem:
    return clip_counts_to_lengths(keep_positions(problem, kept))


class ExhaustedError(Exception):
    """No tries or no time are left."""


@dataclass
class Attempts:
    """Tries simpler problems, none twice, as long as tries and seconds remain.

    ``failing_problem`` is the simplest so far.
    """

    failing_problem: Problem
    fails: Callable[[Problem], bool]
    remaining_tries: int
    deadline: float
    tries_made: int = 0
    accepted_problems: list[Problem] = field(default_factory=list)
    _tried_digests: set[str] = field(default_factory=set)

    def try_change(self, change: Callable[[Problem], Problem]) -> bool:
        """Change the failing problem; return whether it is simpler and still fails. Raises ``ExhaustedError``."""
        try:
            simpler = change(self.failing_problem)
            if simplicity_key(simpler) >= simplicity_key(self.failing_problem):
                return False
        except (ValueError, KeyError, IndexError):  # axes that no longer fit together
            return False
        digest = _digest_problem(simpler)
        if digest in self._tried_digests:
            return False
        self._tried_digests.add(digest)
        if self.remaining_tries <= 0 or time.monotonic() > self.deadline:
            raise ExhaustedError
        self.remaining_tries, self.tries_made = self.remaining_tries - 1, self.tries_made + 1
        if not self.fails(simpler):
            return False
        self.failing_problem = simpler
        self.accepted_problems.append(simpler)
        return True


def _digest_problem(problem: Problem) -> str:
    inputs = [(name, array) for name, array in sorted(problem.inputs.items())]
    layout = sorted(problem.memory_layout.items())
    options = sorted((name, repr(value)) for name, value in problem.options.items())
    return digest_of(inputs, layout, options, problem.supports_statistics, problem.stages)


KeptPositions = Mapping[str, NDArray[np.intp]]
"""Axis letter -> the positions that are kept."""


def cuttable_axes(problem: Problem) -> list[str]:
    """Return the letters of the axes along which a problem can be cut: all but those that follow from other axes."""
    letters = dict.fromkeys(
        letter
        for name in problem.inputs
        for axis in input_axes(problem.input_specs[name], problem.options)
        for letter in axis.split("*")
    )
    cuttable = [letter for letter in letters if letter != "T" or "Lk" not in letters]
    return [letter for letter in cuttable if letter not in ("S", "S1", "Ts")]


def position_count(problem: Problem, letter: str) -> int:
    """Return the number of positions of an axis; for query heads, of those that share a head of keys and values.

    Example:
        >>> arrays = {"query": np.ones((1, 6, 2, 4)), "key": np.ones((1, 2, 2, 4)), "value": np.ones((1, 2, 2, 4))}
        >>> [position_count(Problem("attention", {}, arrays), letter) for letter in ("H", "Hkv")]
        [3, 2]
    """
    lengths = problem.axis_lengths
    return lengths[letter] // lengths["Hkv"] if letter == "H" and "Hkv" in lengths else lengths[letter]


def keep_positions(problem: Problem, kept: KeptPositions) -> Problem:
    """Keep these positions along these axes; keys and values of a past come before the others.

    Raises ``ShapeFault`` for axes that do not fit together.

    Example:
        >>> arrays = {"query": np.ones((1, 6, 2, 4)), "key": np.ones((1, 2, 2, 4)), "value": np.ones((1, 2, 2, 4))}
        >>> one_head = keep_positions(Problem("attention", {}, arrays), {"Hkv": np.array([0])})
        >>> one_head.inputs["query"].shape, one_head.inputs["key"].shape
        ((1, 3, 2, 4), (1, 1, 2, 4))
    """
    lengths = problem.axis_lengths
    whole = dict(_add_head_positions(problem, dict(kept)))
    if "T" in lengths and "T" not in whole and whole.keys() & {"P", "Lk"}:
        past = whole.get("P", np.arange(lengths.get("P", 0)))
        new = whole.get("Lk", np.arange(lengths.get("Lk", 0)))
        whole["T"] = np.concatenate([past, lengths.get("P", 0) + new])
    if "Ts" in lengths and whole.keys() & {"W", "Lp"}:
        pages, slots = (whole.get(letter, np.arange(lengths[letter])) for letter in ("W", "Lp"))
        whole["Ts"] = (pages[:, np.newaxis] * lengths["Lp"] + slots).ravel()
    inputs = {name: _cut_input_array(problem, name, array, whole) for name, array in problem.inputs.items()}
    options = dict(problem.options)
    for option, letter in zip(HEADS, ("H", "Hkv"), strict=True):
        if option in options and letter in whole:
            options[option] = len(whole[letter])
    return replace(problem, inputs=inputs, options=options)


def _add_head_positions(problem: Problem, kept: dict[str, NDArray[np.intp]]) -> dict[str, NDArray[np.intp]]:
    """Add the positions of query heads: each head of keys and values keeps the same number of query heads."""
    lengths = problem.axis_lengths
    if "Hkv" not in lengths or "H" not in lengths:
        return kept
    group = lengths["H"] // lengths["Hkv"]
    if "Hkv" in kept and "H" not in kept:
        kept["H"] = (kept["Hkv"][:, np.newaxis] * group + np.arange(group)).ravel()
    elif "H" in kept and "Hkv" not in kept:  # positions within every group
        kept["H"] = (np.arange(lengths["Hkv"])[:, np.newaxis] * group + kept["H"]).ravel()
    return kept


def _cut_input_array(problem: Problem, name: str, array: Array, kept: KeptPositions) -> Array:
    spec, lengths = problem.input_specs[name], problem.axis_lengths
    if spec.is_index and spec.max_value_axis in kept and problem.options.get("block_size") is None:
        # What is left of the keys has another number; the last entry of the table is that of an index of -1.
        moved = np.full(lengths[spec.max_value_axis] + 1, -1)
        moved[kept[spec.max_value_axis][::-1]] = np.arange(len(kept[spec.max_value_axis]))[::-1]
        array = moved[array]
    elif array.dtype.kind in "iu" and spec.max_value_axis in kept and not spec.is_index:
        array = np.searchsorted(kept[spec.max_value_axis], array).astype(np.int64)
    for position, axis in enumerate(input_axes(problem.input_specs[name], problem.options)):
        parts = axis.split("*")
        if not kept.keys() & set(parts) or (spec.is_broadcastable and array.shape[position] == 1):
            continue
        array = array.take(_combined_positions(parts, kept, lengths), position)
    return array


def _combined_positions(letters: Sequence[str], kept: KeptPositions, lengths: Mapping[str, int]) -> NDArray[np.intp]:
    """Return the positions that are kept of an axis that combines letters, such as heads and widths."""
    positions = np.zeros(1, np.intp)
    for letter in letters:
        of_letter = kept.get(letter)
        of_letter = np.arange(lengths[letter]) if of_letter is None else of_letter
        positions = (positions[:, np.newaxis] * lengths[letter] + of_letter).ravel()
    return positions


_LIMITS = {"cu_seqlens_q": "Lq", "cu_seqlens_k": "Lk"}
"""Limits of sequences, and the axis along which each lies."""


def drop_sequence(problem: Problem, number: int) -> Problem:
    """Leave out one of several packed sequences."""
    limits = {name: letter for name, letter in _LIMITS.items() if name in problem.inputs}
    kept = {}
    for name, letter in limits.items():
        begin, end = problem.inputs[name][number : number + 2]
        kept[letter] = np.delete(np.arange(problem.axis_lengths[letter]), np.s_[int(begin) : int(end)])
    by_sequence = {name: problem.inputs[name] for name in ("key_lengths", "block_table") if name in problem.inputs}
    inputs = {**keep_positions(problem, kept).inputs}
    for name in limits:
        inputs[name] = np.delete(inputs[name], number + 1 if number == 0 else number)
    return replace(problem, inputs=inputs | {name: np.delete(rows, number, 0) for name, rows in by_sequence.items()})


def clip_counts_to_lengths(problem: Problem) -> Problem:
    """Limit counts to the lengths of the axes that they count."""
    lengths, inputs = problem.axis_lengths, dict(problem.inputs)
    for name, array in inputs.items():
        spec: InputSpec = problem.input_specs[name]
        if spec.is_index:
            inputs[name] = name_keys_once(array, count_key_blocks(problem.options, lengths[spec.max_value_axis]))
        elif spec.is_count and spec.max_value_axis in lengths:
            inputs[name] = np.minimum(array, lengths[spec.max_value_axis])
    return replace(problem, inputs=inputs)


_MAX_SIZE_FOR_SINGLE_NUMBERS = 64
"""In larger arrays, no single numbers are replaced. A choice: each number costs up to four tries."""
_SIMPLE_NUMBERS = (0.0, 1.0, 2.0, 0.5, 10.0, -1.0, -10.0)
"""Values that replace those of options, the simplest to read first."""
_SIMPLE_WINDOWS = ((0, 0), (0, None), (None, 0), (1, 0), (0, 1), (1, 1), (1, None), (None, 1))


def simplify_options(attempts: Attempts) -> None:
    """Give options simpler values."""
    for name in list(attempts.failing_problem.options):
        for value in _simpler_option_values(OPTIONS[name]):
            if attempts.try_change(partial(Problem.with_options, **{name: value})):
                break


def _simpler_option_values(spec: OptionSpec) -> Sequence[Any]:
    if get_origin(spec.type) is tuple:
        return _SIMPLE_WINDOWS
    if spec.type is int:
        return tuple(range(1, int(min(spec.typical_values, default=0)) + 1))
    return (
        [number for number in _SIMPLE_NUMBERS if number > 0 or not spec.must_be_positive] if spec.type is float else ()
    )


def simplify_masks(attempts: Attempts) -> None:
    """Broadcast masks and biases along axes, and allow more keys."""
    for name in list(optional_inputs(attempts.failing_problem)):
        if attempts.failing_problem.input_specs[name].is_broadcastable:
            for axis in range(attempts.failing_problem.inputs[name].ndim):
                attempts.try_change(partial(_keep_first_slice, name=name, axis=axis))
        if attempts.failing_problem.input_specs[name].is_boolean:
            _replace_parts(attempts, name, lambda part: np.ones_like(part))


def _keep_first_slice(problem: Problem, name: str, axis: int) -> Problem:
    return _replace_input(problem, name, problem.inputs[name].take([0], axis))


def simplify_counts(attempts: Attempts) -> None:
    """Set all numbers of an optional input of counts to 0 or 1."""
    for name, array in list(attempts.failing_problem.inputs.items()):
        spec = attempts.failing_problem.input_specs[name]
        if spec.is_count and not spec.required:
            for number in (0, 1):
                attempts.try_change(partial(_replace_input, name=name, array=np.full_like(array, number)))


def simplify_numbers(attempts: Attempts) -> None:
    """Round whole arrays, to the simplest numbers first; then parts of arrays, and single numbers."""
    names = [name for name in attempts.failing_problem.inputs if attempts.failing_problem.input_specs[name].is_number]
    for rounding in _SIMPLER_ROUNDINGS:
        attempts.try_change(partial(_round_inputs, names=names, rounding=rounding))
    for name in names:
        for rounding in _SIMPLER_ROUNDINGS:
            if attempts.try_change(partial(_round_input, name=name, rounding=rounding)):
                break
        _replace_parts(attempts, name, np.zeros_like)
        _replace_parts(attempts, name, np.ones_like)
        _replace_parts(attempts, name, lambda part: np.clip(np.rint(_replace_nonfinite(part)), -2, 2))
        _replace_parts(attempts, name, _round_to_two_digits)


def _replace_nonfinite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0.0)


def _round_to_two_digits(array: Array) -> Array:
    short = [float(f"{number:.2g}") for number in array.ravel().tolist()]
    return np.array(short).reshape(array.shape)


def _round_to_power_of_two(array: Array) -> Array:
    exponent = np.round(np.log2(np.where(array == 0, 1, np.abs(_replace_nonfinite(array)) + (array == 0) + 1e-300)))
    return np.where(np.isfinite(array) & (array != 0), np.sign(array) * 2.0 ** np.clip(exponent, -126, 126), array)


_SIMPLER_ROUNDINGS: Sequence[Callable[[Array], Array]] = (
    np.zeros_like,
    np.ones_like,
    _replace_nonfinite,
    lambda array: np.clip(np.rint(_replace_nonfinite(array)), -2, 2),
    lambda array: np.sign(array) if np.isfinite(array).all() else array,
    np.rint,
    lambda array: np.arange(1, array.size + 1, dtype=np.float64).reshape(array.shape),
    _round_to_power_of_two,
    _round_to_two_digits,
)


def _round_inputs(problem: Problem, names: Sequence[str], rounding: Callable[[Array], Array]) -> Problem:
    for name in names:
        problem = _round_input(problem, name, rounding)
    return problem


def _round_input(problem: Problem, name: str, rounding: Callable[[Array], Array]) -> Problem:
    return _replace_input(problem, name, rounding(problem.inputs[name]))


def _replace_input(problem: Problem, name: str, array: Array) -> Problem:
    """Replace an input, rounded to the format in which it is stored; statistics no longer apply to numbers."""
    spec = problem.input_specs[name]
    if spec.is_number:
        numbers = {name: np.asarray(array, np.float64)}
        array = round_to_stored(numbers, problem.input_specs, problem.options, problem.dtype)[name].astype(np.float64)
    layout = {key: kind for key, kind in problem.memory_layout.items() if key != name or kind != "broadcast"}
    return replace(
        problem,
        inputs={**problem.inputs, name: array},
        memory_layout=layout,
        supports_statistics=problem.supports_statistics and not spec.is_number,
    )


def _replace_parts(attempts: Attempts, name: str, simplify: Callable[[Array], Array]) -> None:
    """Replace parts of an array if that makes it simpler: halves, quarters, and so on to single numbers."""
    size = attempts.failing_problem.inputs[name].size
    if size < 2 or size > _MAX_SIZE_FOR_SINGLE_NUMBERS * 8:
        return
    for length in _halving_sizes(size, 1 if size <= _MAX_SIZE_FOR_SINGLE_NUMBERS else size // 8):
        for begin in range(0, size, length):
            array = attempts.failing_problem.inputs[name]
            part = array.ravel()[begin : begin + length]
            simple_part = simplify(part)
            if array_complexity(simple_part) < array_complexity(part):
                attempts.try_change(partial(_replace_part, name=name, begin=begin, part=simple_part))


def _halving_sizes(size: int, min_size: int) -> Iterator[int]:
    length = (size + 1) // 2
    while length >= max(min_size, 1):
        yield length
        if length == 1:
            return
        length = (length + 1) // 2


def _replace_part(problem: Problem, name: str, begin: int, part: Array) -> Problem:
    array = problem.inputs[name].copy()
    array.ravel()[begin : begin + part.size] = part
    return _replace_input(problem, name, array)


SimplicityKey = tuple[int, int, float]


def simplicity_key(problem: Problem) -> SimplicityKey:
    """Return a sort key: options and optional inputs first, then elements, then the complexity of numbers."""
    asked = len(problem.options.keys() - {*HEADS, "score"}) + len(optional_inputs(problem))
    forms = len(problem.memory_layout) + (problem.stages is not None) + problem.supports_statistics
    numbers = sum(array_complexity(array) for array in problem.inputs.values())
    options = sum(_option_complexity(value) for value in problem.options.values())
    return asked + forms, count_elements(problem), numbers + options


def array_complexity(array: NDArray[Any]) -> float:
    """Return how complex an array is to read: 0 for zeros, little for small integers.

    Example:
        >>> [round(array_complexity(np.array(numbers)), 2) for numbers in ([0.0, 0.0], [1.0, 2.0], [0.25], [0.123])]
        [0.0, 2.15, 2.0, 4.0]
    """
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
