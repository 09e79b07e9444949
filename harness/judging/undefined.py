"""Rows and elements without an exact answer: fully masked rows, rows with NaN queries, and what these reach.

``docs/numerics.md``, section 7, says what is right there, and of what nothing is said. A row without a key has no
softmax. What it gives is a convention: ``zero`` weights and output, ``uniform`` (the mean of all values) or ``nan``.
Where query heads or gradients bring rows together, NaN reaches whatever they reach. A row of a query that holds NaN is
NaN in every stage from its scores on, and no other row is touched by it. Before them a rotation brings two elements
together, and others keep their numbers.

NaN and infinity among the inputs (other than -inf in scores and bias, which forbids a key) and a vector of length 0
under a cosine leave undefined what is computed from them, and nothing else: they are followed through the operation as
flags, one per element and stage. The oracle, which knows no NaN, gets ones in their place, and its answer is then
withdrawn where a flag is. A key or value that may not be attended reaches a row only if the row holds NaN or infinity.

Scores may also be too large for the format in which a rounding model stores them, though what they become is not: what
follows from such a score has no bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Bound
from attncheck.attention.exact_array import Enclosure
from attncheck.attention.flags import Flags, any_of
from attncheck.attention.problem import MAY_BE_MINUS_INFINITY, Computation
from attncheck.attention.sampling import Rows, queries_of, sampled_rows
from attncheck.attention.walk import Walk, reach_walk, reach_walk_from, value_walk
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import optional_gradients, score_elements
from attncheck.spec import (
    DEFAULT_EMPTY_ROWS,
    LOGITS,
    MEANS,
    NORMALIZATIONS,
    OPERATIONS,
    PROJECTIONS,
    ROTATIONS,
    STAGE_SPECS,
    SUMS_OF_QUERIES,
    THROUGH_SCORES,
    Shape,
    computed_stages,
    query_axis,
    score_kind,
)
from attncheck.spec.rounding import FORMATS, RoundingModel

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_QUERIES = frozenset(name for name in (*PROJECTIONS, *NORMALIZATIONS, *ROTATIONS) if query_axis(name) is not None)
MAX_AT_A_TIME = 1 << 24
"""Elements of a score matrix of which flags are made at a time, a byte each."""


@dataclass(frozen=True, eq=False)
class UndefinedRows:
    """Which rows are undefined, (..., H, Lq), in one computation, and by which convention the empty ones are judged.

    ``forbidden`` are the elements that a mask forbids, in the scores' shape, and ``nan_elements`` those of the query
    that are NaN; None where there is no NaN, or where a projection brings all elements of a row together.
    """

    problem: Computation
    convention: str
    empty: Flags
    nan_rows: Flags
    forbidden: Flags | None = None
    nan_elements: Flags | None = None
    _unusual_elements: dict[tuple[str, Shape], tuple[Flags, Flags]] = field(default_factory=dict, init=False)
    _of_empty: dict[tuple[str, Shape], Flags] = field(default_factory=dict, init=False)

    @cached_property
    def _hidden(self) -> Flags:
        """Rows with NaN none of whose own keys may be attended: a fill, or a sink, is all that is left of them."""
        if not self.problem.own_keys:
            return self.nan_rows
        return self.nan_rows & (False if self.forbidden is None else self.forbidden.all(axis=-1))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.empty.any() or self.nan_rows.any())

    def apply(self, stage: str, exact: Enclosure) -> Enclosure:
        """Set NaN where it is the exact answer, and take out what has none."""
        nan, open_ = self._unusual(stage, exact.shape)
        if not (nan.any() or open_.any()):
            return exact
        nan = nan & ~open_
        radius = np.where(open_, np.inf, np.where(nan, 0.0, exact.radius))
        return Enclosure(np.where(nan, np.nan, exact.high), np.where(nan, 0.0, exact.low), radius)

    def apply_to_step(self, stage: str, exact: Enclosure, returned: Collection[str]) -> Enclosure:
        """Do the same for the step from an implementation's own stages, where a uniform row follows from no logits."""
        exact = self.apply(stage, exact)
        follows_from_weights = stage in MEANS and not {"weights", MEANS[0]}.isdisjoint(returned)
        if self.convention != "uniform" or stage in LOGITS or follows_from_weights:
            return exact
        open_ = self.affected_by_empty(stage, exact.shape)
        return Enclosure(exact.high, exact.low, np.where(open_, np.inf, exact.radius))

    def by_masking(self, stage: str, exact: Enclosure, selected: Enclosure, returned: Array) -> Enclosure:
        """Say what is right where that depends on the masking: by what was returned, NaN or the number of a selection.

        ``exact`` leaves these elements open, ``selected`` is the answer where a mask selects.
        """
        if self.convention != "nan" or stage not in THROUGH_SCORES:
            return exact
        empty = self.affected_by_empty(stage, exact.shape)
        nan_rows = self.affected_by_nan(stage, exact.shape)
        numbers = empty & ~nan_rows & ~np.isnan(returned.astype(np.float64))
        if not numbers.any():
            return exact
        pairs = ((exact.high, selected.high), (exact.low, selected.low), (exact.radius, selected.radius))
        return Enclosure(*(np.where(numbers, other, own) for own, other in pairs))

    def with_equal_scores(self, options: Options) -> Problem:
        """Return the problem in which rows without a key have every key and equal scores: uniform weights."""
        query, shape = self.problem.inputs["query"], scores_shape(self.problem)
        allowed = replace(self.problem, options=options).allowed(shape)
        empty = self.empty[..., np.newaxis]
        inputs = dict(self.problem.inputs) | {"query": np.where(empty, np.zeros((), query.dtype), query)}
        inputs["mask"] = np.ones(shape, dtype=np.bool_) if allowed is None else allowed | empty
        if "bias" in inputs:
            bias = inputs["bias"]
            inputs["bias"] = np.where(empty, np.zeros((), bias.dtype), np.broadcast_to(bias, shape))
        return Problem(self.problem.operation, {**options, "is_causal": False}, without_nan(inputs))

    def with_equal_logits(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Set the logits of rows without a key to 0, for uniform weights: any number will do, if it is the same."""

        def equal(stage: str, array: Array) -> Array:
            return np.where(self.affected_by_empty(stage, array.shape) & (array == -np.inf), 0, array)

        return {stage: equal(stage, array) if stage in LOGITS else array for stage, array in values.items()}

    def without_undefined(self, stage: str, returned: Array) -> Array:
        """Set to 0 what is NaN by right in a returned stage, so that other rows can be followed from it."""
        nan, _ = self._unusual(stage, returned.shape)
        if not nan.any():
            return returned
        return np.where(nan & np.isnan(returned.astype(np.float64)), np.zeros((), returned.dtype), returned)

    def affected_by_empty(self, stage: str, shape: Shape) -> Flags:
        """Return, in a stage's shape, what the empty rows reach, whoever returned it."""
        if (stage, shape) not in self._of_empty:
            self._of_empty[stage, shape] = self.affected_elements(stage, shape, self.empty)
        return self._of_empty[stage, shape]

    def affected_by_nan(self, stage: str, shape: Shape) -> Flags:
        """Return, in a stage's shape, what the NaN of queries reaches."""
        return self.affected_elements(stage, shape, self.nan_rows, self.nan_elements)

    def affected_elements(self, stage: str, shape: Shape, rows: Flags, elements: Flags | None = None) -> Flags:
        """Return, in a stage's shape, what these rows (..., H, Lq) reach, or these ``elements`` of their queries."""
        if not rows.any():
            return np.zeros(shape, dtype=np.bool_)
        flags = rows[..., np.newaxis]
        known = dict.fromkeys(("query", *LOGITS[:2]), flags)
        if elements is not None:
            known["query"] = elements
        problem = Computation.of(self.problem)
        reached = reach_walk_from(problem, known).node(stage)
        return np.broadcast_to(problem.without_added(stage, reached), shape)

    def _unusual(self, stage: str, shape: Shape) -> tuple[Flags, Flags]:
        """Return where a stage is exactly NaN, and where nothing is to be said of it, whoever returned it."""
        if (stage, shape) not in self._unusual_elements:
            self._unusual_elements[stage, shape] = self._find_unusual(stage, shape)
        return self._unusual_elements[stage, shape]

    def _find_unusual(self, stage: str, shape: Shape) -> tuple[Flags, Flags]:
        empty, nan_rows = self.affected_by_empty(stage, shape), self.affected_by_nan(stage, shape)
        nowhere = np.zeros(shape, dtype=np.bool_)
        if self._hidden.any():
            empty = empty | self.affected_elements(stage, shape, self._hidden)
        if stage in LOGITS or stage in _QUERIES:
            # Where a mask forbids the key it depends on how it does: by selection -inf, by addition NaN.
            forbidden = nowhere if stage != "masked" or self.forbidden is None else self.forbidden
            return nan_rows, nan_rows & forbidden
        if stage == "log_sum_exp":
            return nan_rows, empty & (nan_rows | (self.convention != DEFAULT_EMPTY_ROWS))
        if stage in SUMS_OF_QUERIES or stage in THROUGH_SCORES:
            by_convention = empty if self.convention == "nan" and stage not in THROUGH_SCORES else nowhere
            depends = stage in THROUGH_SCORES and self.convention != DEFAULT_EMPTY_ROWS
            # A kernel that skips what is masked keeps NaN from keys that the row with NaN may not attend to.
            open_ = nowhere if stage == "grad_query" else nan_rows
            return by_convention | nan_rows, open_ | (empty if depends else empty & nan_rows)
        if stage == "weights" and self.forbidden is not None:
            # A softmax may keep a NaN score to its own weight: a key that may not be attended then has none, as ever.
            empty = empty | self.forbidden
        return nan_rows | (empty if self.convention == "nan" else nowhere), empty & nan_rows


def without_nan(inputs: Inputs) -> dict[str, Array]:
    """Return the inputs with ones for all that is not finite in a query row that holds NaN."""
    rows = _rows_with_nan(inputs)
    if not rows.any():
        return dict(inputs)
    query = inputs["query"]
    filled = rows[..., np.newaxis] & ~np.isfinite(query.astype(np.float64))
    return {**inputs, "query": np.where(filled, np.ones((), query.dtype), query)}


def find_undefined_rows(plain: Problem, convention: str) -> UndefinedRows:
    """Find the undefined rows of a problem in canonical form, NaN and all."""
    operation, options, inputs, shape = plain.operation, plain.options, plain.inputs, scores_shape(plain)
    given, problem = (make(plain) for make in (Computation.as_given, Computation.of))
    nan_rows = _rows_with_nan(inputs)
    nan_rows = nan_rows[:, np.newaxis] if OPERATIONS[operation].has_projections else nan_rows
    if options.get("norm_over") == "full":  # one norm of all heads
        nan_rows = any_of(nan_rows, -2)
    nan_rows = np.broadcast_to(nan_rows, shape[:-1])
    empty = np.zeros(shape[:-1], dtype=np.bool_)
    if shape[-1]:  # the mean of no values is 0 in every convention
        *leading, keys = shape
        empty = ~any_of(~problem.unattended((*leading, keys + problem.added_keys)), -1)[..., 0]
    allowed = given.kept(shape) if nan_rows.any() else None
    forbidden = None if allowed is None else ~allowed
    return UndefinedRows(given, convention, empty, nan_rows, forbidden, _nan_elements(operation, inputs))


def empty_rows_convention(problem: Problem) -> str:
    """Return what a query without a key gives in a problem."""
    return str(problem.options.get("empty_rows") or DEFAULT_EMPTY_ROWS)


def empty_rows(problem: Problem) -> Flags:
    """Return which rows of a computation as it was asked for have no key, (B, H, Lq); some rows at a time."""
    queries = queries_of(problem.inputs)
    elements = score_elements(problem.operation, problem.options, problem.inputs)
    size = max(1, MAX_AT_A_TIME * queries // max(elements, 1))
    rows = [np.arange(start, min(start + size, queries)) for start in range(0, max(queries, 1), size)]
    parts = (problem.canonical(part if len(rows) > 1 else None) for part in rows)
    found = [find_undefined_rows(part, DEFAULT_EMPTY_ROWS).empty for part in parts]
    return np.concatenate(found, axis=-1)


def scores_shape(plain: Problem) -> Shape:
    """Return the shape of the scores of a problem in canonical form: (B, H, Lq, T)."""
    inputs = plain.inputs
    if "scores" in inputs:
        return inputs["scores"].shape
    batch, queries = inputs["query"].shape[:-2], inputs["query"].shape[-2]
    keys = sum(inputs[name].shape[-2] for name in ("cached_key", "key") if name in inputs)
    heads = (int(plain.options["heads"]),) if OPERATIONS[plain.operation].has_projections else ()
    return (*batch, *heads, queries, keys)


def _rows_with_nan(inputs: Inputs) -> Flags:
    if "query" not in inputs:
        return np.zeros(inputs["scores"].shape[:-1], dtype=np.bool_)
    return any_of(np.isnan(inputs["query"].astype(np.float64)), -1)[..., 0]


def _nan_elements(operation: str, inputs: Inputs) -> Flags | None:
    if "query" not in inputs or OPERATIONS[operation].has_projections:
        return None
    query = inputs["query"].astype(np.float64)
    flags = np.isnan(query)
    if not flags.any():
        return None
    # Infinity beside NaN may give either: such a row is not told apart.
    return np.asarray(flags | any_of(flags, -1) & any_of(np.isinf(query), -1))


_LOGITS = frozenset({*PROJECTIONS, *NORMALIZATIONS, *ROTATIONS, *LOGITS})
"""Stages of which every key has its own elements: what reaches these is no matter of masks."""

_SPOILT_TOGETHER: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys({*SUMS_OF_QUERIES, *optional_gradients("attention_gradients")}, (-2, -1)),
    **{name: () for name, spec in STAGE_SPECS.items() if spec.axes[-1] in {"Lq", "H"}},
}
"""Axes along which one NaN tells what became of the others: the last one, except for these stages. A softmax may give 0
beside a NaN, as TensorFlow's does, so that a sum over queries is NaN for some keys alone."""

NONFINITE = "holds NaN or an infinity that no mask explains"
NO_DIRECTION = "has a vector of length 0, which has no direction"
BEHIND_A_MASK = (
    "only keys that may not be attended hold NaN or infinity: what adds to their scores or multiplies by their weights "
    "makes NaN of it, and what leaves them out does not"
)


@dataclass(frozen=True, eq=False)
class UndefinedElements:
    """Which elements of inputs are undefined, and of stages; ``reason`` says why, in the words of a message.

    ``by_selection`` are those of them that are undefined even where keys that may not be attended are left out.
    """

    inputs: Mapping[str, Flags]
    reason: str
    stages: Mapping[str, Flags] = field(default_factory=dict)
    by_selection: Mapping[str, Flags] = field(default_factory=dict)

    def filled(self, inputs: Inputs) -> dict[str, Array]:
        """Return the inputs with ones where they are undefined."""
        return {
            name: np.where(self.inputs[name], np.ones((), array.dtype), array) if name in self.inputs else array
            for name, array in inputs.items()
        }

    def of(self, stage: str, shape: Shape) -> Flags:
        """Return which elements of a stage are undefined."""
        return np.broadcast_to(self.stages.get(stage, np.zeros((), dtype=np.bool_)), shape)

    def behind_a_mask(self, stage: str, shape: Shape) -> Flags:
        """Return which elements only keys reach that may not be attended, so that without them these are defined."""
        if stage not in self.by_selection:
            return np.zeros(shape, dtype=np.bool_)
        return self.of(stage, shape) & ~np.broadcast_to(self.by_selection[stage], shape)

    def withdrawn(self, stage: str, exact: Enclosure, returned: Array | None = None) -> Enclosure:
        """Take the exact value back where the stage is undefined.

        Where it is so only behind a mask, that depends on what was ``returned``: a row that holds NaN or infinity there
        is undefined, and so is a head of a sum over queries; any other has its exact value.
        """
        flags = self.of(stage, exact.shape)
        if returned is not None:
            behind = self.behind_a_mask(stage, exact.shape)
            odd = behind & ~np.isfinite(returned.astype(np.float64))
            flags = flags & ~(behind & ~any_of(odd, _SPOILT_TOGETHER.get(stage, -1)))
        if not flags.any():
            return exact
        high, low = np.where(flags, np.nan, exact.high), np.where(flags, 0.0, exact.low)
        return Enclosure(high, low, np.where(flags, np.inf, exact.radius))

    def without_undefined(self, stage: str, returned: Array) -> Array:
        """Set to 0 what is not finite by right in a returned stage, so that other elements can be followed from it."""
        by_right = self.of(stage, returned.shape) & ~np.isfinite(returned.astype(np.float64))
        return np.where(by_right, np.zeros((), returned.dtype), returned)


@dataclass(frozen=True, eq=False)
class Undefined:
    """The query rows and the elements of one problem that have no exact answer; None if there are none."""

    rows: UndefinedRows | None = None
    elements: UndefinedElements | None = None

    @property
    def uniform_rows(self) -> UndefinedRows | None:
        """The rows, if those without a key have uniform weights by convention."""
        return self.rows if self.rows is not None and self.rows.convention == "uniform" else None

    def apply(self, values: Mapping[str, Enclosure]) -> Mapping[str, Enclosure]:
        """Return the exact answer of every stage, given its value as the oracle evaluates it."""
        if self.rows is not None:
            values = {stage: self.rows.apply(stage, value) for stage, value in values.items()}
        if self.elements is not None:
            values = {stage: self.elements.withdrawn(stage, value) for stage, value in values.items()}
        return values

    def apply_to_returned(self, stage: str, value: Enclosure, returned: Array) -> Enclosure:
        """Return the exact answer of a stage; if several are right, the one that was returned."""
        exact = value
        if self.rows is not None:
            exact = self.rows.by_masking(stage, self.rows.apply(stage, exact), value, returned)
        return exact if self.elements is None else self.elements.withdrawn(stage, exact, returned)

    def apply_to_step(self, stage: str, value: Enclosure, earlier: Collection[str]) -> Enclosure:
        """Return the exact answer of a step from the stages before it."""
        exact = value if self.rows is None else self.rows.apply_to_step(stage, value, earlier)
        return exact if self.elements is None else self.elements.withdrawn(stage, exact)

    def without_undefined(self, stage: str, returned: Array) -> Array:
        """Set to 0 what is not finite by right in a returned stage, so that other elements can be followed from it."""
        for part in (self.rows, self.elements):
            returned = returned if part is None else part.without_undefined(stage, returned)
        return returned

    def reason(self, stage: str, shape: Shape, index: tuple[int, ...]) -> str:
        """Say why an element of a stage has no exact answer; empty if it has one."""
        rows, elements = self.rows, self.elements
        if elements is not None and elements.of(stage, shape)[index]:
            return BEHIND_A_MASK if elements.behind_a_mask(stage, shape)[index] else elements.reason
        if rows is not None and rows.affected_elements(stage, shape, rows.empty | rows.nan_rows)[index]:
            return "what a query without a key, or one that holds NaN, gives here is a matter of convention"
        return ""


NOTHING_UNDEFINED = Undefined()


@dataclass(frozen=True, eq=False)
class JudgedProblem:
    """A problem as it was ``called``, laid out (``problem``), and in ``canonical`` form, for the rows that are judged.

    The canonical form has one mask and finite numbers: ones replace NaN in query rows, and undefined elements.
    ``with_nan`` is the same before that. ``query_rows`` are the judged rows if they stand for all.
    """

    called: Problem
    problem: Problem
    query_rows: Rows | None
    with_nan: Problem
    canonical: Problem
    undefined_elements: UndefinedElements | None


def judged_problem(called: Problem, *, whole: bool) -> JudgedProblem:
    """Lay a problem out, choose the query rows that are judged, unless all are, and fill what is undefined there."""
    problem = called.without_layout()
    rows = None if whole else sampled_rows(problem)
    plain = problem.canonical(rows)
    if empty_rows_convention(problem) == "uniform":
        plain = plain.with_options(empty_rows="uniform")
    finite = replace(plain, inputs=without_nan(plain.inputs))
    undefined = find_undefined_elements(finite)
    canonical = finite if undefined is None else replace(finite, inputs=undefined.filled(finite.inputs))
    return JudgedProblem(called, problem, rows, plain, canonical, undefined)


def find_undefined(judged: JudgedProblem) -> Undefined:
    """Find the query rows and the elements that have no exact answer."""
    rows = find_undefined_rows(judged.with_nan, empty_rows_convention(judged.problem))
    return Undefined(rows or None, judged.undefined_elements)


def find_undefined_elements(plain: Problem) -> UndefinedElements | None:
    """Find what is undefined in a problem in canonical form, without NaN in whole query rows; None if nothing is."""
    operation, options, inputs = plain.operation, plain.options, plain.inputs
    flags: dict[str, Flags] = {}
    reasons = []
    for name, array in inputs.items():
        if array.dtype == np.bool_:
            continue
        odd = is_odd(name, array)
        if odd.any():
            reasons.append(f"{name} {NONFINITE}")
        if name in ("query", "key") and score_kind(operation, options) == "cosine":
            without_direction = ~(array != 0).any(axis=-1, keepdims=True)
            if without_direction.any():
                reasons.append(f"{name} {NO_DIRECTION}")
            odd = odd | without_direction
        flags[name] = odd
    if not reasons:
        return None
    found = {name: each for name, each in flags.items() if each.any()}
    problem = Computation.of(plain)
    flags = {name: problem.input_with_added(name, each) for name, each in flags.items()}
    stages = _stages(reach_walk(problem, flags, None), problem)
    if "key" not in inputs or OPERATIONS[operation].has_score_kinds:  # nothing is masked
        return UndefinedElements(found, "; ".join(reasons), stages)
    *leading, keys = scores_shape(plain)
    attended = ~problem.unattended((*leading, keys + problem.added_keys))
    by_selection = _stages(reach_walk(problem, flags, attended), problem)
    return UndefinedElements(
        found, "; ".join(reasons), stages, {stage: by_selection[stage] for stage in by_selection.keys() - _LOGITS}
    )


def holds_nonfinite(problem: Problem) -> bool:
    """Return whether inputs hold NaN or infinity, except for -inf where it forbids a key."""
    return any(is_odd(name, array).any() for name, array in problem.inputs.items())


def is_odd(name: str, array: Array) -> Flags:
    """Return where an input holds NaN or infinity; -inf in scores and bias forbids a key, and is no oddity."""
    odd: Flags = ~np.isfinite(array)
    return odd & (array != -np.inf) if name in MAY_BE_MINUS_INFINITY else odd


def _stages(walk: Walk, problem: Computation) -> dict[str, Flags]:
    """Return the flags of every stage, in shapes that broadcast to the stages' own."""
    stages = computed_stages(problem.operation, problem.options, problem.inputs)
    return {stage: problem.without_added(stage, walk.node(stage)) for stage in stages}


def follow_scores(plain: Problem, scores: Flags) -> dict[str, Flags]:
    """Follow flags of scores, (B, H, Lq, T), to every stage behind them, in shapes that broadcast to the stages'."""
    problem = Computation.of(plain)
    known = {stage: problem.with_added(stage, scores) for stage in ("scores", "raw_scores")}
    return _stages(reach_walk_from(problem, known), problem)


_WIDE_RANGE = 1e30
"""Formats that reach beyond hold the products that others lose."""
_NEARLY = 1 - 2.0**-8
"""A product this near to the largest number may be rounded, or summed up, beyond it."""


def without_overflown(
    plain: Problem,
    rounding: RoundingModel,
    raw_scores: Array | None,
    bounds: Mapping[str, Bound],
) -> dict[str, Bound]:
    """Return the bounds, infinite where they follow from a score that may have overflowed.

    ``raw_scores`` are the exact ones; without them they are worked out from query and key.
    """
    stored = FORMATS[rounding.dtype]
    largest = min(
        rounding.of_scores.largest_sum, stored.largest if rounding.score_unit == stored.unit_roundoff else np.inf
    )
    if largest > _WIDE_RANGE:
        return dict(bounds)
    raw = _raw_scores(plain) if raw_scores is None else raw_scores
    if raw is None:
        return dict(bounds)
    flags = np.abs(raw) > _NEARLY * largest
    if not flags.any():
        return dict(bounds)
    reached = follow_scores(plain, flags)
    infinite = {stage: partial(np.where, flags, np.inf) for stage, flags in reached.items()}
    return {stage: bound.mapped(infinite[stage]) if stage in infinite else bound for stage, bound in bounds.items()}


def _raw_scores(plain: Problem) -> Array | None:
    """Return the products of query and key of ``attention_gradients``, in float64."""
    if plain.operation != "attention_gradients":
        return None
    operands = {name: plain.inputs[name] for name in ("query", "key")}
    with np.errstate(all="ignore"):
        raw: Array = value_walk(Computation.of(Problem(plain.operation, {}, operands)).in_float64()).node("raw_scores")
    return raw
