"""Random problems, each determined by a seed, its number and the operations to draw.

A problem is outlined first: its operation, options, inputs and their shapes, by the tables of the specification. So
options are drawn in all combinations, and a new option is drawn without an edit here. Of several outlines, a search
takes the one with the highest novelty, and then draws its arrays.
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
from attncheck.reading.lowering import Array, check_code_shapes, repeat_block_numbers
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import (
    ShapeFault,
    find_multi_slice_axes,
    unsupported_layout_reason,
)
from attncheck.searching.concrete import FeatureCounts, count_elements, input_axes
from attncheck.searching.drawing import NOISE_LIKE_REGIMES, REGIMES, DrawnInputs
from attncheck.searching.shapes import Dimensions, Random, axis_lengths, draw_edge_dimensions, give_some_module_shape
from attncheck.spec import (
    HEADS,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPERATIONS_PER_HEAD,
    OPTIONS,
    QUERY_KEY_VALUE,
    REQUESTERS_OF_STAGE,
    SCALE_PREFIX,
    SCORE_SPECS,
    InputSpec,
    Operation,
    computed_stages,
    dtype_of_input,
    input_specs,
)
from attncheck.spec.dtypes import largest_number, round_to

DrawShape = Callable[[Operation, frozenset[str], Random], Dimensions]
"""Draws the shape of a problem of an operation, whose inputs have these axes."""
ProblemKind = tuple[str, str | None]
"""An operation, and the kind of score if that is an option."""
Item = TypeVar("Item")

_PROBLEM_KINDS: tuple[ProblemKind, ...] = tuple(
    (name, score)
    for name, operation in OPERATIONS.items()
    for score in (SCORE_SPECS if "score" in operation.options else [None])
)
_BASE_KIND_WEIGHT = 5
"""The weight of a kind is this plus the number of its inputs and options, doubled if other operations lower to it."""
_OPTION_SHARE, _MASK_OPTION_SHARE = 0.12, 0.18
"""The share of problems with an option or input; larger if few operations have it.

A choice: with larger shares, problems have more options, and a combination of few is drawn less often.
"""
_UNDRAWN_OPTIONS = frozenset({"score", "projections", "poison", "swizzle", *HEADS})
"""Options that say how a file writes arrays, that others follow from, or that ask for shapes which no letter has."""
_FULL_SIZE_SHARE = 0.4
"""The share of masks and biases that are as large as the scores."""


def choose_item(random: Random, items: Sequence[Item]) -> Item:
    """Return one of some items."""
    return items[random.randint(len(items))]


@dataclass(frozen=True)
class DrawSettings:
    """The source of random problems: a seed, and one operation or all of them."""

    seed: int
    operation: str | None = None

    @cached_property
    def kinds(self) -> tuple[ProblemKind, ...]:
        """The kinds of problems that may be drawn."""
        return tuple(kind for kind in _PROBLEM_KINDS if self.operation in (None, kind[0]))


@cache
def _kind_weight(kind: ProblemKind) -> int:
    operation = OPERATIONS[kind[0]]
    lowered = OPERATIONS.get(operation.lowers_to or "")
    if lowered is not None and lowered.inputs.keys() <= operation.inputs.keys():  # only the other inputs are new
        return _BASE_KIND_WEIGHT + len(operation.inputs.keys() - lowered.inputs.keys())
    weight = _BASE_KIND_WEIGHT + len(operation.options - _UNDRAWN_OPTIONS) + len(input_specs(*kind))
    return 2 * weight if any(another.lowers_to == operation.name for another in OPERATIONS.values()) else weight


@cache
def _draw_share_by_name() -> Mapping[str, float]:
    """Return how often an operation that has an option or input is drawn with it."""
    counts = Counter(name for operation in OPERATIONS.values() for name in (*operation.options, *operation.inputs))
    masked = REQUESTERS_OF_STAGE["masked"] | REQUESTERS_OF_STAGE["biased"]
    return {
        name: max(_MASK_OPTION_SHARE if name in masked else _OPTION_SHARE, 1 / (1 + n)) for name, n in counts.items()
    }


def draw_problem_kind(kinds: Sequence[ProblemKind], random: Random) -> ProblemKind:
    """Draw one of some kinds."""
    until = np.cumsum([_kind_weight(kind) for kind in kinds])
    return kinds[int(np.searchsorted(until, random.rand() * until[-1], side="right"))]


def draw_problem_outline(
    kind: ProblemKind,
    dtype: str,
    random: Random,
    avoided: Collection[str] = (),
    draw_shape: DrawShape = draw_edge_dimensions,
) -> Problem | None:
    """Draw a problem of a kind without its numbers and without ``avoided`` names; None if the draw is no valid problem.

    Its inputs have their shapes, but take no memory: all elements are one number. ``dtype`` may be empty.
    """
    operation, specs = OPERATIONS[kind[0]], input_specs(*kind)
    names = [name for name in specs if name not in avoided]
    names = _draw_inputs(specs, names, random)
    options: dict[str, Any] = {"score": kind[1]} if kind[1] else {}
    possible = SCORE_SPECS[kind[1]].options if kind[1] else operation.options
    for name in OPTIONS:  # in an order that every process has
        if (
            name in possible
            and name not in _UNDRAWN_OPTIONS
            and name not in avoided
            and random.rand() < _draw_share_by_name()[name]
        ):
            options[name] = _draw_option_value(name, random)
    options, names = _drop_unused(options, names, specs)
    if not computed_stages(kind[0], options, names):
        return None
    letters = frozenset(
        letter for name in names for axis in input_axes(specs[name], options) for letter in axis.split("*")
    )
    dims = draw_shape(operation, letters, random)
    if operation.has_projections:
        dims = give_some_module_shape(random, dims)
        options |= dict(zip(HEADS, (dims.H, dims.Hkv), strict=True)) if dims.Hkv < dims.H else {HEADS[0]: dims.H}
    lengths = axis_lengths(dims, letters, random)
    problem = Problem(
        kind[0],
        options,
        {name: _constant_array(specs[name], options, lengths, random) for name in names},
        dtype,
        drawing_regime=choose_item(random, _REGIMES),
    )
    try:
        problem.axis_lengths  # noqa: B018 # raises if inputs do not fit together
        check_code_shapes(options, {name: array.shape for name, array in problem.inputs.items()})
    except ShapeFault:  # too narrow for a pair to be rotated, for instance
        return None
    is_zero = any(value == 0 for value in options.values() if isinstance(value, float))  # then all scores are equal
    return replace(problem, supports_statistics=problem.drawing_regime in NOISE_LIKE_REGIMES and not is_zero)


_REGIMES = tuple(REGIMES)


def _draw_inputs(specs: Mapping[str, InputSpec], possible_names: Sequence[str], random: Random) -> list[str]:
    """Draw which inputs the problem has; an input that needs another one requires it, or comes in a pair with it."""
    drawn = {name for name, spec in specs.items() if spec.required}
    for name in possible_names:
        needed = specs[name].required_input
        is_pair = needed is not None and specs[needed].required_input == name
        if name in drawn or (needed is not None and not is_pair and needed not in drawn):
            continue
        is_first = not is_pair or list(specs).index(name) < list(specs).index(str(needed))
        if (
            is_first
            and needed in (None, *possible_names)
            and random.rand() < _draw_share_by_name().get(name, _OPTION_SHARE)
        ):
            drawn |= {name, needed} if needed else {name}
    return [name for name in specs if name in drawn]


def _drop_unused(
    options: dict[str, Any], names: list[str], specs: Mapping[str, InputSpec]
) -> tuple[dict[str, Any], list[str]]:
    """Leave out options and inputs that only modify another option or input, if that is absent."""
    present = {*names, *options}
    kept = [
        name for name in names if not specs[name].requires_one_of or not present.isdisjoint(specs[name].requires_one_of)
    ]
    present = {*kept, *options}
    used_options = {}
    for name, value in options.items():
        spec = OPTIONS[name]
        if spec.required_input in (None, *present) and (
            not spec.requires_one_of or not present.isdisjoint(spec.requires_one_of)
        ):
            used_options[name] = value
    for name in kept:
        used_options.pop(specs[name].replaced_option or "", None)
    return used_options, kept


def _draw_option_value(name: str, random: Random) -> Any:
    spec = OPTIONS[name]
    if spec.type is bool:
        return True
    if spec.type is int:
        return int(choose_item(random, spec.typical_values))
    if spec.type is float:
        number = choose_item(random, spec.typical_values) * (random.uniform(0.5, 1.5) if random.rand() < 0.5 else 1)
        return float(np.float32(number))
    if get_origin(spec.type) is tuple:  # a window
        before, after = (None if random.rand() < 0.3 else int(random.randint(0, 9)) for _ in range(2))
        return (4, None) if before is after is None else (before, after)
    return choose_item(random, get_args(spec.type))


def _constant_array(spec: InputSpec, options: Mapping[str, Any], lengths: Mapping[str, int], random: Random) -> Array:
    """Return an array of an input's shape whose elements are all one number."""
    shape = []
    for axis in input_axes(spec, options):
        length = 1
        for letter in axis.split("*"):
            length *= lengths[letter]
        shape.append(length)
    if spec.is_broadcastable and random.rand() >= _FULL_SIZE_SHARE:
        shape = [length if random.rand() < 0.6 else 1 for length in shape]
    zero = np.zeros((), bool if spec.is_boolean else np.int64 if spec.is_count else np.float64)
    return np.broadcast_to(zero, tuple(shape))


def round_to_stored(
    inputs: Mapping[str, Array], specs: Mapping[str, InputSpec], options: Mapping[str, Any], dtype: str
) -> dict[str, Array]:
    """Round numbers once to a dtype, and statistics, codes and scales to the formats in which they are stored."""
    rounded = {}
    for name, array in inputs.items():
        spec = specs[name]
        if spec.is_number:
            with np.errstate(over="ignore"):
                array = round_to(array, dtype_of_input(spec, inputs, options, dtype))
        rounded[name] = np.ascontiguousarray(array)
    return rounded


_ABOVE_ALL_REGIMES = 1e30
"""Larger than all numbers that regimes draw, and in the range of float32 and bfloat16 (3.4e38), but not of float16."""


def is_wide_dtype(dtype: str) -> bool:
    """Return whether all numbers of the regimes are in the range of a dtype."""
    return largest_number(dtype) > _ABOVE_ALL_REGIMES


def fits_in_dtype(largest: float, dtype: str) -> bool:
    """Return whether twice a number is in the range of a dtype: for roundings, and other orders of multiplication."""
    return largest < largest_number(dtype) / 2


def largest_intermediate(problem: Problem) -> float:
    """Return the largest intermediate number, computed by NumPy in float64."""
    largest = 0.0
    with np.errstate(all="ignore"):
        for array in _intermediate_arrays(problem):
            finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
            largest = max(largest, float(finite.max(initial=0.0)))
    return largest


def _intermediate_arrays(problem: Problem) -> Iterator[Array]:
    operation = OPERATIONS[problem.operation]
    yield from problem.inputs.values()
    yield from _stage_arrays(problem)
    lowered = problem.without_layout()
    for name in QUERY_KEY_VALUE:
        if f"{name}_factor" in lowered.inputs:
            codes = np.abs(lowered.inputs[name]) + np.abs(lowered.inputs.get(f"{name}_shift", 0))
            yield codes * lowered.inputs[f"{name}_factor"]
    for name, stem in SCALE_PREFIX.items():
        if name in problem.inputs and f"{stem}_block_scale" in problem.inputs:  # before the second scale
            codes = np.abs(problem.inputs[name].astype(np.float64))
            zeros = np.abs(problem.inputs.get(f"{stem}_zero", np.zeros((1,) * codes.ndim)).astype(np.float64))
            is_per_block = problem.inputs[f"{stem}_block_scale"].astype(np.float64)
            yield (codes + repeat_block_numbers(zeros, codes.shape)) * repeat_block_numbers(is_per_block, codes.shape)
    if operation.computes_gradients:
        per_head = {
            name: array for name, array in lowered.inputs.items() if name in OPERATIONS[OPERATIONS_PER_HEAD[0]].inputs
        }
        yield from _stage_arrays(Problem(OPERATIONS_PER_HEAD[0], lowered.options, per_head))
        grad_output, value = lowered.inputs["grad_output"], lowered.inputs["value"]
        groups = grad_output.shape[1] // value.shape[1]
        yield grad_output @ np.repeat(value, groups, axis=1).swapaxes(-1, -2)  # the gradient of the weights
    yield from _projection_outputs(problem)


def _stage_arrays(problem: Problem) -> Iterator[Array]:
    called = problem.as_call()
    yield from run_operation(numpy_backend, called.operation, called.inputs, called.options).values()


def _projection_outputs(problem: Problem) -> Iterator[Array]:
    """Yield the outputs of layers of weights, and intermediate arrays if latent vectors are keys themselves."""
    specs, inputs = problem.input_specs, problem.inputs
    for weight, spec in specs.items():
        if weight in inputs and len(spec.axes) == 2 and not spec.is_count:
            operands = (name for name in inputs if specs[name].axes[-1] == spec.axes[0] and len(specs[name].axes) > 2)
            yield from (inputs[name] @ inputs[weight] for name in operands)
    if "latent" in inputs:
        latent, projection = inputs["latent"][:, np.newaxis], inputs["key_projection"]
        yield from (latent @ inputs[f"{name}_projection"] for name in ("key", "value"))
        absorbed = inputs["query"] @ projection.swapaxes(-1, -2)
        yield absorbed
        yield absorbed @ latent.swapaxes(-1, -2)  # the rotated parts may cancel much of it


_CANDIDATE_OUTLINES = 4
"""Outlines from which the newest is chosen. A choice: more spread features faster, and cost time."""
_MAX_OUTLINES = 64
"""Outlines for a problem: many are needed if an implementation refuses most."""
_MAX_ELEMENTS = 1 << 16
"""Limit for all inputs together: exact answers of larger ones take seconds."""
_ANY_OUTLINE_SHARE = 0.05
"""The share of problems for which any outline is taken, even if the implementation seems to refuse it."""
_KNOWN_FAILURE_FACTOR = 0.25
"""Factor of the novelty of a problem that probably fails in a known way."""
_SPECIAL_VALUES_SHARE = 0.12
"""Share of problems with special values. A choice: special values may hide other faults."""
_MEMORY_LAYOUT_SHARE = 0.15
"""Share of problems with another memory layout. A choice: more are refused by implementations."""
_UNDRAWN_LAYOUTS = frozenset({"fused", "distant"})
"""Layouts that need other inputs, or much memory."""


@dataclass
class ProblemSource:
    """Draws problems by number; the same seed and the same notes give the same problems.

    ``is_probably_known`` returns whether an earlier failure probably explains a failure of the problem, and
    ``missing_features`` the features that an implementation lacks for it, as far as that is known without a call.
    """

    settings: DrawSettings
    dtypes: Sequence[str]
    feature_counts: FeatureCounts = field(default_factory=FeatureCounts)
    is_probably_known: Callable[[Problem], bool] = lambda problem: False
    missing_features: Callable[[Problem], Collection[str]] = lambda problem: ()
    _random: Random = field(default_factory=lambda: np.random.RandomState(0), init=False)
    """Seeded for each problem: a new generator would first read random numbers of the system."""

    def draw_problem(self, number: int) -> Problem:
        """Return the problem of a number, and count its features as drawn."""
        random = self._random
        random.seed([self.settings.seed, number])
        while True:
            novelty_of = lambda outlined: (  # noqa: E731
                self.feature_counts.novelty(outlined)
                * (_KNOWN_FAILURE_FACTOR if self.is_probably_known(outlined) else 1)
            )
            for chosen in sorted(self._draw_outlines(random), key=novelty_of, reverse=True):
                problem = draw_numbers(chosen, random)
                if is_wide_dtype(problem.dtype) or fits_in_dtype(largest_intermediate(problem), problem.dtype):
                    self.feature_counts.count_features(problem)
                    return problem

    def _draw_outlines(self, random: Random) -> list[Problem]:
        """Return several outlines that an implementation may accept, or any if there is none."""
        takes_any = random.rand() < _ANY_OUTLINE_SHARE
        refused = frozenset() if takes_any else self.feature_counts.always_refused
        kinds = [
            kind for kind in self.settings.kinds if " ".join(filter(None, kind)) not in refused
        ] or self.settings.kinds
        dtypes = [dtype for dtype in self.dtypes if f"dtype {dtype}" not in refused] or self.dtypes
        wanted: list[Problem] = []
        others: list[Problem] = []
        for _ in range(_MAX_OUTLINES):
            outlined = draw_problem_outline(
                draw_problem_kind(kinds, random), choose_item(random, dtypes), random, refused
            )
            if outlined is None or count_elements(outlined) > _MAX_ELEMENTS:
                continue
            outlined = _choose_memory_layout(_choose_special_values(outlined, random), random)
            (wanted if takes_any or self._may_be_accepted(outlined) else others).append(outlined)
            if len(wanted) == _CANDIDATE_OUTLINES:
                break
        return wanted or others[:_CANDIDATE_OUTLINES]

    def _may_be_accepted(self, problem: Problem) -> bool:
        if self.feature_counts.is_likely_refused(problem):
            return False
        lacks = self.missing_features(problem)
        if lacks:
            self.feature_counts.record_answer(problem, is_refused=True, missing_features=lacks)
        return not lacks


def draw_numbers(problem: Problem, random: Random) -> Problem:
    """Return an outlined problem with its numbers, rounded to its dtype."""
    drawing = DrawnInputs(problem, random)
    inputs, specs, layout = dict(drawing.inputs), problem.input_specs, dict(problem.memory_layout)
    is_generic = problem.supports_statistics and drawing.has_noise_like_errors and not problem.special_value
    if problem.special_value:
        kind, _, name = problem.special_value.partition(" in ")
        inputs[name] = _SPECIAL_VALUES[kind](inputs[name].copy(), problem.dtype, random)
    for name, kind_of_layout in layout.items():
        if kind_of_layout == "broadcast":  # which needs equal slices
            axis = choose_item(random, find_multi_slice_axes(inputs[name].shape))
            inputs[name] = np.broadcast_to(inputs[name].take([0], axis), inputs[name].shape).copy()
            is_generic = False
    exact = {
        name: array.astype(np.float64) if specs[name].is_number else array
        for name, array in round_to_stored(inputs, specs, problem.options, problem.dtype).items()
    }
    return replace(problem, inputs=exact, supports_statistics=is_generic)


def _numeric_input_names(problem: Problem) -> list[str]:
    return [name for name in problem.inputs if problem.input_specs[name].is_number]


def _choose_special_values(problem: Problem, random: Random) -> Problem:
    """Mark one input of few problems for special values: zeros, ties, the ends of the range, NaN and infinity."""
    if random.rand() >= _SPECIAL_VALUES_SHARE:
        return problem
    input_specs = problem.input_specs
    plain = [
        name
        for name in _numeric_input_names(problem)
        if not (input_specs[name].is_row_statistic or input_specs[name].is_narrow)
    ]
    if not plain:
        return problem
    name, kind = choose_item(random, plain), choose_item(random, tuple(_SPECIAL_VALUES))
    stand_in = np.broadcast_to(np.float64(_NONFINITE_STAND_INS.get(kind, 0.0)), problem.inputs[name].shape)
    return replace(problem, inputs={**problem.inputs, name: stand_in}, special_value=f"{kind} in {name}")


def _choose_memory_layout(problem: Problem, random: Random) -> Problem:
    """Give inputs of few problems another memory layout than row by row; equal slices may have a stride of 0."""
    if random.rand() >= _MEMORY_LAYOUT_SHARE:
        return problem
    layout = {}
    for name in _numeric_input_names(problem):
        shape = problem.inputs[name].shape
        possible = [
            kind
            for kind in MEMORY_LAYOUTS
            if kind not in _UNDRAWN_LAYOUTS and not unsupported_layout_reason(kind, shape)
        ]
        possible = [kind for kind in possible if kind != "broadcast" or find_multi_slice_axes(shape)]
        if random.rand() < 0.5:
            layout[name] = choose_item(random, possible)
    return replace(problem, memory_layout=layout)


PutSpecialValues = Callable[[Array, str, Random], Array]


def _set_one_element(value: float) -> PutSpecialValues:
    """Put a number into one element of one row."""

    def set_element(array: Array, dtype: str, random: Random) -> Array:
        rows = array.reshape(-1, array.shape[-1])
        rows[random.randint(len(rows)), random.randint(rows.shape[1])] = value
        return rows.reshape(array.shape)

    return set_element


def _rescale_to_size(wanted_size: Callable[[str], float], reduce_sizes: Callable[[Array], float]) -> PutSpecialValues:
    """Scale an array so that ``reduce_sizes`` of its nonzero magnitudes becomes ``wanted_size``."""

    def rescale(array: Array, dtype: str, random: Random) -> Array:
        sizes = np.abs(array[np.isfinite(array) & (array != 0)])
        return np.asarray(array * (wanted_size(dtype) / max(reduce_sizes(sizes), 1e-30) if sizes.size else 1.0))

    return rescale


_SPECIAL_VALUES: Mapping[str, PutSpecialValues] = {
    "NaN": _set_one_element(np.nan),
    "infinity": _set_one_element(np.inf),
    "minus infinity": _set_one_element(-np.inf),
    "zeros": lambda array, dtype, random: np.zeros_like(array),
    "ones": lambda array, dtype, random: np.ones_like(array),
    "minus zeros": lambda array, dtype, random: np.where(random.rand(*array.shape) < 0.5, -0.0, array),
    "equal rows": lambda array, dtype, random: (
        np.broadcast_to(array[..., :1, :], array.shape).copy() if array.ndim > 1 else array
    ),
    "large numbers": _rescale_to_size(lambda dtype: largest_number(dtype) ** 0.4, np.max),
    # The least is just above the least normal number: many implementations flush smaller ones to 0.
    "small numbers": _rescale_to_size(lambda dtype: 4 / largest_number(dtype), np.min),
}
_NONFINITE_STAND_INS = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
"""Numbers of an outline for special values that are not finite."""
