"""Random problems, each made from a seed, its number and what is to be drawn alone; those of a search one by one.

A problem is outlined first: its operation, options, inputs and their shapes, by the tables of the specification, so
that every option meets every other, and the next one is drawn without an edit here. Its arrays are drawn when it is
chosen: of several outlines, a search takes the one of which most is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.execution.operations import run_operation
from attncheck.reading.lowering import Array, blocks_spread, check_codes
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import (
    ShapeFault,
    layout_fault,
    several,
)
from attncheck.searching.concrete import Seen, axes_of, count_elements
from attncheck.searching.drawing import GENERIC, REGIMES, DrawnInputs
from attncheck.searching.shapes import Dimensions, Random, axis_lengths, draw_at_edges, some_as_modules
from attncheck.spec import (
    ASKED_BY,
    HEADS,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPTIONS,
    PER_HEAD,
    QUERY_KEY_VALUE,
    SCORE_SPECS,
    STEMS,
    InputSpec,
    Operation,
    computed_stages,
    inputs_of,
    stored_dtype,
)
from attncheck.spec.dtypes import largest_number, rounded_once

DrawShape = Callable[[Operation, frozenset[str], Random], Dimensions]
"""Draws the shape of a problem of an operation, whose inputs have these axes."""
Kind = tuple[str, str | None]
"""An operation, and the kind of score where that is an option."""
Item = TypeVar("Item")

_KINDS: tuple[Kind, ...] = tuple(
    (name, score) for name, own in OPERATIONS.items() for score in (SCORE_SPECS if "score" in own.options else [None])
)
_PLAIN = 5
"""A kind is drawn in proportion to the number of its inputs and options, and so many; one that others become twice."""
_SHARE, _FORBIDDING_SHARE = 0.12, 0.18
"""Of problems that may have an option or input, so many have it; more where few operations have it."""
_NOT_DRAWN = frozenset({"score", "projections", "poison", "swizzle", *HEADS})
"""Options that say how a file writes arrays, that others follow from, or that ask for shapes which no letter has."""
_WHOLE_SHARE = 0.4
"""Of masks and biases, so many are as large as the scores."""


def pick(random: Random, items: Sequence[Item]) -> Item:
    """Return one of some items."""
    return items[random.randint(len(items))]


@dataclass(frozen=True)
class Draw:
    """The source of random problems: a seed, and one operation or all of them."""

    seed: int
    operation: str | None = None

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of problems that are drawn."""
        return tuple(kind for kind in _KINDS if self.operation in (None, kind[0]))


@cache
def _weight(kind: Kind) -> int:
    own = OPERATIONS[kind[0]]
    lowered = OPERATIONS.get(own.lowers_to or "")
    if lowered is not None and lowered.inputs.keys() <= own.inputs.keys():  # all else of it is the other one
        return _PLAIN + len(own.inputs.keys() - lowered.inputs.keys())
    weight = _PLAIN + len(own.options - _NOT_DRAWN) + len(inputs_of(*kind))
    return 2 * weight if any(other.lowers_to == own.name for other in OPERATIONS.values()) else weight


@cache
def _shares() -> Mapping[str, float]:
    """Return how often an operation that has an option or input is drawn with it."""
    counts = Counter(name for own in OPERATIONS.values() for name in (*own.options, *own.inputs))
    masked = ASKED_BY["masked"] | ASKED_BY["biased"]
    return {name: max(_FORBIDDING_SHARE if name in masked else _SHARE, 1 / (1 + n)) for name, n in counts.items()}


def draw_kind(kinds: Sequence[Kind], random: Random) -> Kind:
    """Draw one of some kinds."""
    until = np.cumsum([_weight(kind) for kind in kinds])
    return kinds[int(np.searchsorted(until, random.rand() * until[-1], side="right"))]


def outline(
    kind: Kind, dtype: str, random: Random, avoided: Collection[str] = (), shape: DrawShape = draw_at_edges
) -> Problem | None:
    """Draw a problem of a kind without its numbers, none of whose names is ``avoided``; None where none comes of it.

    Its inputs have their shapes and, all of them one number, no memory. Without a ``dtype`` it may be of any.
    """
    own, specs = OPERATIONS[kind[0]], inputs_of(*kind)
    names = [name for name in specs if name not in avoided]
    names = _given_inputs(specs, names, random)
    options: dict[str, Any] = {"score": kind[1]} if kind[1] else {}
    possible = SCORE_SPECS[kind[1]].options if kind[1] else own.options
    for name in OPTIONS:  # in an order that every process has
        if name in possible and name not in _NOT_DRAWN and name not in avoided and random.rand() < _shares()[name]:
            options[name] = _value_of(name, random)
    options, names = _that_say_something(options, names, specs)
    if not computed_stages(kind[0], options, names):
        return None
    letters = frozenset(
        letter for name in names for axis in axes_of(specs[name], options) for letter in axis.split("*")
    )
    dims = shape(own, letters, random)
    if own.has_projections:
        dims = some_as_modules(random, dims)
        options |= dict(zip(HEADS, (dims.H, dims.Hkv), strict=True)) if dims.Hkv < dims.H else {HEADS[0]: dims.H}
    lengths = axis_lengths(dims, letters, random)
    found = Problem(
        kind[0],
        options,
        {name: _stand_in(specs[name], options, lengths, random) for name in names},
        dtype,
        regime=pick(random, _REGIMES),
    )
    try:
        found.lengths  # noqa: B018 # raises where inputs do not fit together
        check_codes(options, {name: array.shape for name, array in found.inputs.items()})
    except ShapeFault:  # too narrow for a pair to be rotated, for instance
        return None
    is_zero = any(value == 0 for value in options.values() if isinstance(value, float))  # and all scores alike
    return replace(found, supports_statistics=found.regime in GENERIC and not is_zero)


_REGIMES = tuple(REGIMES)


def _given_inputs(specs: Mapping[str, InputSpec], possible: Sequence[str], random: Random) -> list[str]:
    """Draw which inputs are given; one that needs another comes with it, or where that is there."""
    given = {name for name, spec in specs.items() if spec.required}
    for name in possible:
        needed = specs[name].needs
        is_pair = needed is not None and specs[needed].needs == name
        if name in given or (needed is not None and not is_pair and needed not in given):
            continue
        is_first = not is_pair or list(specs).index(name) < list(specs).index(str(needed))
        if is_first and needed in (None, *possible) and random.rand() < _shares().get(name, _SHARE):
            given |= {name, needed} if needed else {name}
    return [name for name in specs if name in given]


def _that_say_something(
    options: dict[str, Any], names: list[str], specs: Mapping[str, InputSpec]
) -> tuple[dict[str, Any], list[str]]:
    """Leave out what says something of another option or input, where that is not given."""
    given = {*names, *options}
    kept = [name for name in names if not specs[name].with_one_of or not given.isdisjoint(specs[name].with_one_of)]
    given = {*kept, *options}
    said = {}
    for name, value in options.items():
        spec = OPTIONS[name]
        if spec.needs in (None, *given) and (not spec.with_one_of or not given.isdisjoint(spec.with_one_of)):
            said[name] = value
    for name in kept:
        said.pop(specs[name].instead_of or "", None)
    return said, kept


def _value_of(name: str, random: Random) -> Any:
    spec = OPTIONS[name]
    if spec.type is bool:
        return True
    if spec.type is float:
        number = pick(random, spec.usual) * (random.uniform(0.5, 1.5) if random.rand() < 0.5 else 1)
        return float(np.float32(number))
    if get_origin(spec.type) is tuple:  # a window
        left, right = (None if random.rand() < 0.3 else int(random.randint(0, 9)) for _ in range(2))
        return (4, None) if left is right is None else (left, right)
    return pick(random, get_args(spec.type))


def _stand_in(spec: InputSpec, options: Mapping[str, Any], lengths: Mapping[str, int], random: Random) -> Array:
    """Return an array of an input's shape, of one number."""
    shape = []
    for axis in axes_of(spec, options):
        length = 1
        for letter in axis.split("*"):
            length *= lengths[letter]
        shape.append(length)
    if spec.broadcast and random.rand() >= _WHOLE_SHARE:
        shape = [length if random.rand() < 0.6 else 1 for length in shape]
    zero = np.zeros((), bool if spec.boolean else np.int64 if spec.whole else np.float64)
    return np.broadcast_to(zero, tuple(shape))


def stored(
    inputs: Mapping[str, Array], specs: Mapping[str, InputSpec], options: Mapping[str, Any], dtype: str
) -> dict[str, Array]:
    """Round numbers once to a dtype, statistics to theirs, and codes and their scales to their format's."""
    found = {}
    for name, array in inputs.items():
        spec = specs[name]
        if spec.is_number:
            with np.errstate(over="ignore"):
                array = rounded_once(array, stored_dtype(spec, inputs, options, dtype))
        found[name] = np.ascontiguousarray(array)
    return found


_BEYOND_ALL = 1e30


def is_wide(dtype: str) -> bool:
    """Return whether a dtype holds whatever the regimes can draw."""
    return largest_number(dtype) > _BEYOND_ALL


def fits(largest: float, dtype: str) -> bool:
    """Return whether a dtype holds a number, and twice that: roundings, and other orders of multiplying."""
    return largest < largest_number(dtype) / 2


def largest_step(problem: Problem) -> float:
    """Return the largest number that is stored on the way, by NumPy in float64."""
    found = 0.0
    with np.errstate(all="ignore"):
        for array in _steps(problem):
            finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
            found = max(found, float(finite.max(initial=0.0)))
    return found


def _steps(problem: Problem) -> Iterator[Array]:
    own = OPERATIONS[problem.operation]
    yield from problem.inputs.values()
    yield from _stages(problem)
    lowered = problem.without_layout()
    for name in QUERY_KEY_VALUE:
        if f"{name}_factor" in lowered.inputs:
            codes = np.abs(lowered.inputs[name]) + np.abs(lowered.inputs.get(f"{name}_shift", 0))
            yield codes * lowered.inputs[f"{name}_factor"]
    for name, stem in STEMS.items():
        if name in problem.inputs and f"{stem}_block_scale" in problem.inputs:  # before the second scale
            codes = np.abs(problem.inputs[name].astype(np.float64))
            zeros = np.abs(problem.inputs.get(f"{stem}_zero", np.zeros((1,) * codes.ndim)).astype(np.float64))
            of_blocks = problem.inputs[f"{stem}_block_scale"].astype(np.float64)
            yield (codes + blocks_spread(zeros, codes.shape)) * blocks_spread(of_blocks, codes.shape)
    if own.has_gradients:
        given = {name: array for name, array in lowered.inputs.items() if name in OPERATIONS[PER_HEAD[0]].inputs}
        yield from _stages(Problem(PER_HEAD[0], lowered.options, given))
        grad_output, value = lowered.inputs["grad_output"], lowered.inputs["value"]
        groups = grad_output.shape[1] // value.shape[1]
        yield grad_output @ np.repeat(value, groups, axis=1).swapaxes(-1, -2)  # the gradient of the weights
    yield from _projected(problem)


def _stages(problem: Problem) -> Iterator[Array]:
    called = problem.as_call()
    yield from run_operation(numpy_backend, called.operation, called.inputs, called.options).values()


def _projected(problem: Problem) -> Iterator[Array]:
    """Yield what layers of weights give, and what is stored where latent vectors are attended to as they are."""
    specs, inputs = problem.specs, problem.inputs
    for weight, spec in specs.items():
        if weight in inputs and len(spec.axes) == 2 and not spec.whole:
            operands = (name for name in inputs if specs[name].axes[-1] == spec.axes[0] and len(specs[name].axes) > 2)
            yield from (inputs[name] @ inputs[weight] for name in operands)
    if "latent" in inputs:
        latent, projection = inputs["latent"][:, np.newaxis], inputs["key_projection"]
        yield from (latent @ inputs[f"{name}_projection"] for name in ("key", "value"))
        absorbed = inputs["query"] @ projection.swapaxes(-1, -2)
        yield absorbed
        yield absorbed @ latent.swapaxes(-1, -2)  # the rotated parts may cancel much of it


_CANDIDATES = 4
_TRIES = 64
"""Outlines for a problem: many are needed where an implementation refuses most."""
_MAX_ELEMENTS = 1 << 16
"""Of all inputs together: exact answers of larger ones take seconds."""
_REFUSED_SHARE = 0.05
"""Of problems that an implementation seems to refuse, so many are asked all the same."""
_KNOWN_SHARE = 0.25
"""News of a problem that most likely fails as is known already count so much."""
_SPECIAL = 0.12
_LAYOUT = 0.15
_NEVER_DRAWN = frozenset({"fused", "distant"})
"""Layouts that need other inputs beside them, or much memory."""


@dataclass
class ProblemSource:
    """Draws problems by number; the same ones for the same seed, as long as the same is noted of them.

    ``is_known`` says of a problem that a failure that was found explains what goes wrong in it, most likely, and
    ``lacks_of`` what an implementation lacks for it, as far as that is known without a call.
    """

    draw: Draw
    dtypes: Sequence[str]
    seen: Seen = field(default_factory=Seen)
    is_known: Callable[[Problem], bool] = lambda problem: False
    lacks_of: Callable[[Problem], Collection[str]] = lambda problem: ()

    def problem(self, number: int) -> Problem:
        """Return the problem of a number, and count it as asked."""
        random = np.random.RandomState([self.draw.seed, number])
        while True:
            for chosen in sorted(self._outlines(random), key=self._worth, reverse=True):
                found = filled(chosen, random)
                if is_wide(found.dtype) or fits(largest_step(found), found.dtype):
                    self.seen.add(found)
                    return found

    def _outlines(self, random: Random) -> list[Problem]:
        """Return several outlines that an implementation may take, or any where there is none."""
        takes_any = random.rand() < _REFUSED_SHARE
        refused = frozenset() if takes_any else self.seen.surely_refused
        kinds = [kind for kind in self.draw.kinds if " ".join(filter(None, kind)) not in refused] or self.draw.kinds
        dtypes = [dtype for dtype in self.dtypes if f"dtype {dtype}" not in refused] or self.dtypes
        wanted: list[Problem] = []
        others: list[Problem] = []
        for _ in range(_TRIES):
            found = outline(draw_kind(kinds, random), pick(random, dtypes), random, refused)
            if found is None or count_elements(found) > _MAX_ELEMENTS:
                continue
            found = _as_it_lies(_with_special(found, random), random)
            (wanted if takes_any or self._is_wanted(found) else others).append(found)
            if len(wanted) == _CANDIDATES:
                break
        return wanted or others[:_CANDIDATES]

    def _is_wanted(self, problem: Problem) -> bool:
        if self.seen.is_likely_refused(problem):
            return False
        lacks = self.lacks_of(problem)
        if lacks:
            self.seen.note(problem, is_refused=True, lacks=lacks)
        return not lacks

    def _worth(self, problem: Problem) -> float:
        return self.seen.novelty(problem) * (_KNOWN_SHARE if self.is_known(problem) else 1)


def filled(problem: Problem, random: Random) -> Problem:
    """Return an outlined problem with its numbers, rounded to its dtype."""
    drawing = DrawnInputs(problem, random)
    inputs, specs, layout = dict(drawing.inputs), problem.specs, dict(problem.memory_layout)
    is_generic = problem.supports_statistics and drawing.is_generic and not problem.special
    if problem.special:
        kind, _, name = problem.special.partition(" in ")
        inputs[name] = _SPECIALS[kind](inputs[name].copy(), problem.dtype, random)
    for name, lies in layout.items():
        if lies == "broadcast":  # which needs slices that are alike
            axis = pick(random, several(inputs[name].shape))
            inputs[name] = np.broadcast_to(inputs[name].take([0], axis), inputs[name].shape).copy()
            is_generic = False
    exact = {
        name: array.astype(np.float64) if specs[name].is_number else array
        for name, array in stored(inputs, specs, problem.options, problem.dtype).items()
    }
    return replace(problem, inputs=exact, supports_statistics=is_generic)


def _numbers_of(problem: Problem) -> list[str]:
    return [name for name in problem.inputs if problem.specs[name].is_number]


def _with_special(problem: Problem, random: Random) -> Problem:
    """Ask, seldom, for odd values in one input: zeros, ties, the ends of the range, NaN and infinity."""
    if random.rand() >= _SPECIAL:
        return problem
    specs = problem.specs
    plain = [name for name in _numbers_of(problem) if not (specs[name].statistics or specs[name].is_narrow)]
    if not plain:
        return problem
    name, kind = pick(random, plain), pick(random, tuple(_SPECIALS))
    stand_in = np.broadcast_to(np.float64(_STAND_INS.get(kind, 0.0)), problem.inputs[name].shape)
    return replace(problem, inputs={**problem.inputs, name: stand_in}, special=f"{kind} in {name}")


def _as_it_lies(problem: Problem, random: Random) -> Problem:
    """Lay inputs, seldom, out otherwise than row by row; where all slices are alike, along a stride of 0."""
    if random.rand() >= _LAYOUT:
        return problem
    layout = {}
    for name in _numbers_of(problem):
        shape = problem.inputs[name].shape
        possible = [kind for kind in MEMORY_LAYOUTS if kind not in _NEVER_DRAWN and not layout_fault(kind, shape)]
        possible = [kind for kind in possible if kind != "broadcast" or several(shape)]
        if random.rand() < 0.5:
            layout[name] = pick(random, possible)
    return replace(problem, memory_layout=layout)


Special = Callable[[Array, str, Random], Array]


def _of_row(value: float) -> Special:
    """Put a number into one row of the last axis but one, or somewhere in it."""

    def put(array: Array, dtype: str, random: Random) -> Array:
        rows = array.reshape(-1, array.shape[-1])
        rows[random.randint(len(rows)), random.randint(rows.shape[1])] = value
        return rows.reshape(array.shape)

    return put


def _scaled_to(size: Callable[[str], float], of: Callable[[Array], float]) -> Special:
    """Scale an array so that one of the sizes of its numbers, but for zeros, becomes another."""

    def put(array: Array, dtype: str, random: Random) -> Array:
        sizes = np.abs(array[np.isfinite(array) & (array != 0)])
        return np.asarray(array * (size(dtype) / max(of(sizes), 1e-30) if sizes.size else 1.0))

    return put


_SPECIALS: Mapping[str, Special] = {
    "NaN": _of_row(np.nan),
    "infinity": _of_row(np.inf),
    "minus infinity": _of_row(-np.inf),
    "zeros": lambda array, dtype, random: np.zeros_like(array),
    "ones": lambda array, dtype, random: np.ones_like(array),
    "minus zeros": lambda array, dtype, random: np.where(random.rand(*array.shape) < 0.5, -0.0, array),
    "equal rows": lambda array, dtype, random: (
        np.broadcast_to(array[..., :1, :], array.shape).copy() if array.ndim > 1 else array
    ),
    "large numbers": _scaled_to(lambda dtype: largest_number(dtype) ** 0.4, np.max),
    # The least is hardly above the least normal number: many implementations take smaller ones for 0.
    "small numbers": _scaled_to(lambda dtype: 4 / largest_number(dtype), np.min),
}
_STAND_INS = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
"""Numbers of an outline in place of those that are not finite."""
