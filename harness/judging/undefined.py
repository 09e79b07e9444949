"""Rows and elements without an exact answer: fully masked rows, rows with NaN queries, and what these reach.

``docs/numerics.md``, section 7, defines which results are right there, and which are open. A row without a key has no
softmax. Its result is a convention: ``zero`` weights and output, ``uniform`` (the mean of all values) or ``nan``. If
query heads or gradients add rows up, NaN reaches the whole sum. A row of a query with NaN is NaN in every stage from
its scores on, and affects no other row. Before the scores, a rotation combines two elements, and the others keep their
numbers.

NaN and infinity among the inputs (other than -inf in scores and bias, which forbids a key) and a vector of length 0
under a cosine make undefined only the elements that are computed from them. Flags, one per element and stage, follow
them through the operation. The oracle, which does not accept NaN, gets ones instead, and flagged elements of its answer
are withdrawn. A key or value that may not be attended reaches a row only if the row is NaN or infinite.

Scores may also be too large for the format in which a rounding model stores them, even if later stages are not: stages
that depend on such a score have no bound.
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
from attncheck.attention.flags import Flags, any_over_axes
from attncheck.attention.problem import INPUTS_WITH_MINUS_INFINITY, Computation
from attncheck.attention.sampling import RowIndices, choose_sampled_rows, count_queries
from attncheck.attention.walk import Walk, flag_walk, flag_walk_from_nodes, value_walk
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores, input_of_optional_gradients
from attncheck.spec import (
    DEFAULT_EMPTY_ROWS,
    GRADIENTS_SUMMING_QUERIES,
    GRADIENTS_THROUGH_SCORES,
    LOGITS,
    MEANS,
    NORMALIZATIONS,
    OPERATIONS,
    PROJECTIONS,
    ROTATIONS,
    STAGE_SPECS,
    Shape,
    computed_stages,
    query_axis,
    score_kind,
)
from attncheck.spec.rounding import FORMATS, RoundingModel

Array = NDArray[Any]
Inputs = Mapping[str, Array]
Options = Mapping[str, Any]

_QUERY_STAGES = frozenset(name for name in (*PROJECTIONS, *NORMALIZATIONS, *ROTATIONS) if query_axis(name) is not None)
MAX_FLAGS_AT_A_TIME = 1 << 24
"""Flags of so many elements of a score matrix are made at a time, a byte each: 16 MiB. A choice: more take more memory,
fewer more passes over the rows."""


@dataclass(frozen=True, eq=False)
class UndefinedRows:
    """The undefined rows of one computation, (..., H, Lq), and the convention by which empty ones are judged.

    ``forbidden_scores`` are the elements that a mask forbids, in the scores' shape, and ``nan_elements`` the elements
    of the query that are NaN; None without NaN, or if a projection adds all elements of a row up.
    """

    problem: Computation
    empty_rows_convention: str
    empty_rows: Flags
    nan_rows: Flags
    forbidden_scores: Flags | None = None
    nan_elements: Flags | None = None
    _unusual_elements: dict[tuple[str, Shape], tuple[Flags, Flags]] = field(default_factory=dict, init=False)
    _elements_of_empty_rows: dict[tuple[str, Shape], Flags] = field(default_factory=dict, init=False)

    @cached_property
    def _fully_masked_nan_rows(self) -> Flags:
        """Rows with NaN none of whose own keys may be attended: only a fill, or a sink, remains."""
        if not self.problem.key_count_of_case:
            return self.nan_rows
        return self.nan_rows & (False if self.forbidden_scores is None else self.forbidden_scores.all(axis=-1))

    def __bool__(self) -> bool:
        """True if any row is undefined."""
        return bool(self.empty_rows.any() or self.nan_rows.any())

    def withdraw_undefined(self, stage: str, exact: Enclosure) -> Enclosure:
        """Set elements whose exact answer is NaN, and withdraw elements without an exact answer."""
        nan, open_ = self._flag_nan_and_unanswered(stage, exact.shape)
        if not (nan.any() or open_.any()):
            return exact
        nan = nan & ~open_
        radius = np.where(open_, np.inf, np.where(nan, 0.0, exact.radius))
        return Enclosure(np.where(nan, np.nan, exact.high), np.where(nan, 0.0, exact.low), radius)

    def withdraw_undefined_of_step(self, stage: str, exact: Enclosure, returned: Collection[str]) -> Enclosure:
        """Do the same for a step from an implementation's stages: a uniform row does not follow from its logits."""
        exact = self.withdraw_undefined(stage, exact)
        follows_from_weights = stage in MEANS and not {"weights", MEANS[0]}.isdisjoint(returned)
        if self.empty_rows_convention != "uniform" or stage in LOGITS or follows_from_weights:
            return exact
        open_ = self.flag_affected_by_empty_rows(stage, exact.shape)
        return Enclosure(exact.high, exact.low, np.where(open_, np.inf, exact.radius))

    def select_by_returned(self, stage: str, exact: Enclosure, selected: Enclosure, returned: Array) -> Enclosure:
        """Return the exact answer of elements that depend on how a kernel masks: NaN, or the number of a selection.

        ``returned`` shows which. ``exact`` leaves these elements open, ``selected`` is the answer if a mask selects.
        """
        if self.empty_rows_convention != "nan" or stage not in GRADIENTS_THROUGH_SCORES:
            return exact
        empty = self.flag_affected_by_empty_rows(stage, exact.shape)
        nan_rows = self.flag_affected_by_nan(stage, exact.shape)
        numbers = empty & ~nan_rows & ~np.isnan(returned.astype(np.float64))
        if not numbers.any():
            return exact
        pairs = ((selected.high, exact.high), (selected.low, exact.low), (selected.radius, exact.radius))
        return Enclosure(*(np.where(numbers, *pair) for pair in pairs))

    def with_equal_scores(self, options: Options) -> Problem:
        """Return the problem in which rows without a key have every key and equal scores: uniform weights."""
        query, shape = self.problem.inputs["query"], scores_shape(self.problem)
        allowed = replace(self.problem, options=options).flag_allowed(shape)
        empty = self.empty_rows[..., np.newaxis]
        inputs = dict(self.problem.inputs) | {"query": np.where(empty, np.zeros((), query.dtype), query)}
        inputs["mask"] = np.ones(shape, dtype=np.bool_) if allowed is None else allowed | empty
        if "bias" in inputs:
            bias = inputs["bias"]
            inputs["bias"] = np.where(empty, np.zeros((), bias.dtype), np.broadcast_to(bias, shape))
        return Problem(self.problem.operation, {**options, "is_causal": False}, replace_nan_query_rows(inputs))

    def zero_logits_of_empty_rows(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Set the logits of rows without a key to 0, for uniform weights: any equal numbers would do."""

        def equal(stage: str, array: Array) -> Array:
            return np.where(self.flag_affected_by_empty_rows(stage, array.shape) & (array == -np.inf), 0, array)

        return {stage: equal(stage, array) if stage in LOGITS else array for stage, array in values.items()}

    def zero_undefined(self, stage: str, returned: Array) -> Array:
        """Set elements of a returned stage that are rightly NaN to 0, so that others can be computed from it."""
        nan, _ = self._flag_nan_and_unanswered(stage, returned.shape)
        if not nan.any():
            return returned
        return np.where(nan & np.isnan(returned.astype(np.float64)), np.zeros((), returned.dtype), returned)

    def flag_affected_by_empty_rows(self, stage: str, shape: Shape) -> Flags:
        """Flag the elements of a stage that the empty rows reach."""
        if (stage, shape) not in self._elements_of_empty_rows:
            self._elements_of_empty_rows[stage, shape] = self.flag_affected_elements(stage, shape, self.empty_rows)
        return self._elements_of_empty_rows[stage, shape]

    def flag_affected_by_nan(self, stage: str, shape: Shape) -> Flags:
        """Flag the elements of a stage that NaN of queries reaches."""
        return self.flag_affected_elements(stage, shape, self.nan_rows, self.nan_elements)

    def flag_affected_elements(self, stage: str, shape: Shape, rows: Flags, elements: Flags | None = None) -> Flags:
        """Flag the elements of a stage that ``rows`` (..., H, Lq) reach, or the ``elements`` of their queries."""
        if not rows.any():
            return np.zeros(shape, dtype=np.bool_)
        flags = rows[..., np.newaxis]
        known = dict.fromkeys(("query", *LOGITS[:2]), flags)
        if elements is not None:
            known["query"] = elements
        problem = Computation.from_problem(self.problem)
        reached = flag_walk_from_nodes(problem, known).evaluate(stage)
        return np.broadcast_to(problem.without_added_key(stage, reached), shape)

    def _flag_nan_and_unanswered(self, stage: str, shape: Shape) -> tuple[Flags, Flags]:
        """Flag the elements of a stage that are exactly NaN, and those without an exact answer."""
        if (stage, shape) not in self._unusual_elements:
            self._unusual_elements[stage, shape] = self._compute_nan_and_unanswered(stage, shape)
        return self._unusual_elements[stage, shape]

    def _compute_nan_and_unanswered(self, stage: str, shape: Shape) -> tuple[Flags, Flags]:
        empty, nan_rows = self.flag_affected_by_empty_rows(stage, shape), self.flag_affected_by_nan(stage, shape)
        nowhere = np.zeros(shape, dtype=np.bool_)
        if self._fully_masked_nan_rows.any():
            empty = empty | self.flag_affected_elements(stage, shape, self._fully_masked_nan_rows)
        if stage in LOGITS or stage in _QUERY_STAGES:
            # A masked element depends on how the kernel masks: by selection -inf, by addition NaN.
            forbidden = nowhere if stage != "masked" or self.forbidden_scores is None else self.forbidden_scores
            return nan_rows, nan_rows & forbidden
        if stage == "log_sum_exp":
            return nan_rows, empty & (nan_rows | (self.empty_rows_convention != DEFAULT_EMPTY_ROWS))
        if stage in GRADIENTS_SUMMING_QUERIES or stage in GRADIENTS_THROUGH_SCORES:
            by_convention = (
                empty if self.empty_rows_convention == "nan" and stage not in GRADIENTS_THROUGH_SCORES else nowhere
            )
            depends = stage in GRADIENTS_THROUGH_SCORES and self.empty_rows_convention != DEFAULT_EMPTY_ROWS
            # In a kernel that skips masked keys, a row with NaN does not reach keys that it may not attend to.
            open_ = nowhere if stage == "grad_query" else nan_rows
            return by_convention | nan_rows, open_ | (empty if depends else empty & nan_rows)
        if stage == "weights" and self.forbidden_scores is not None:
            # A softmax may restrict a NaN score to its own weight: then a masked key has weight 0, as always.
            empty = empty | self.forbidden_scores
        return nan_rows | (empty if self.empty_rows_convention == "nan" else nowhere), empty & nan_rows


def replace_nan_query_rows(inputs: Inputs) -> dict[str, Array]:
    """Return the inputs with ones instead of nonfinite elements in query rows with NaN."""
    rows = _flag_nan_rows(inputs)
    if not rows.any():
        return dict(inputs)
    query = inputs["query"]
    filled = rows[..., np.newaxis] & ~np.isfinite(query.astype(np.float64))
    return {**inputs, "query": np.where(filled, np.ones((), query.dtype), query)}


def find_undefined_rows(plain: Problem, convention: str) -> UndefinedRows:
    """Find the undefined rows of a problem in canonical form, which may have NaN."""
    operation, options, inputs, shape = plain.operation, plain.options, plain.inputs, scores_shape(plain)
    as_given, problem = (make(plain) for make in (Computation.from_problem_without_added_key, Computation.from_problem))
    nan_rows = _flag_nan_rows(inputs)
    nan_rows = nan_rows[:, np.newaxis] if OPERATIONS[operation].has_projections else nan_rows
    if options.get("norm_over") == "full":  # one norm of all heads
        nan_rows = any_over_axes(nan_rows, -2)
    nan_rows = np.broadcast_to(nan_rows, shape[:-1])
    empty = np.zeros(shape[:-1], dtype=np.bool_)
    if shape[-1]:  # the mean of no values is 0 in every convention
        *leading, keys = shape
        empty = ~any_over_axes(~problem.flag_unattended((*leading, keys + problem.added_keys)), -1)[..., 0]
    allowed = as_given.flag_unmasked_scores(shape) if nan_rows.any() else None
    forbidden = None if allowed is None else ~allowed
    return UndefinedRows(as_given, convention, empty, nan_rows, forbidden, _flag_nan_query_elements(operation, inputs))


def find_empty_rows_convention(problem: Problem) -> str:
    """Return the convention of a problem for a query without a key."""
    return str(problem.options.get("empty_rows") or DEFAULT_EMPTY_ROWS)


def flag_empty_rows(problem: Problem) -> Flags:
    """Flag the rows without a key, (B, H, Lq), of a problem that is not canonical; computed some rows at a time.

    Example:
        >>> ones = {name: np.ones((1, 1, 2, 4)) for name in ("query", "key", "value")}
        >>> mask = np.array([[True, True], [False, False]])
        >>> flag_empty_rows(Problem("attention", {}, {**ones, "mask": mask})).tolist()
        [[[False, True]]]
    """
    queries = count_queries(problem.inputs)
    elements = count_scores(problem.operation, problem.options, problem.inputs)
    size = max(1, MAX_FLAGS_AT_A_TIME * queries // max(elements, 1))
    rows = [np.arange(start, min(start + size, queries)) for start in range(0, max(queries, 1), size)]
    parts = (problem.canonical(part if len(rows) > 1 else None) for part in rows)
    empty = [find_undefined_rows(part, DEFAULT_EMPTY_ROWS).empty_rows for part in parts]
    return np.concatenate(empty, axis=-1)


def scores_shape(plain: Problem) -> Shape:
    """Return the shape of the scores of a problem in canonical form: (B, H, Lq, T)."""
    inputs = plain.inputs
    if "scores" in inputs:
        return inputs["scores"].shape
    batch, queries = inputs["query"].shape[:-2], inputs["query"].shape[-2]
    keys = sum(inputs[name].shape[-2] for name in ("cached_key", "key") if name in inputs)
    heads = (int(plain.options["heads"]),) if OPERATIONS[plain.operation].has_projections else ()
    return (*batch, *heads, queries, keys)


def _flag_nan_rows(inputs: Inputs) -> Flags:
    if "query" not in inputs:
        return np.zeros(inputs["scores"].shape[:-1], dtype=np.bool_)
    return any_over_axes(np.isnan(inputs["query"].astype(np.float64)), -1)[..., 0]


def _flag_nan_query_elements(operation: str, inputs: Inputs) -> Flags | None:
    if "query" not in inputs or OPERATIONS[operation].has_projections:
        return None
    query = inputs["query"].astype(np.float64)
    flags = np.isnan(query)
    if not flags.any():
        return None
    # A row with infinity and NaN may become either in any element: all of it is flagged.
    return np.asarray(flags | any_over_axes(flags, -1) & any_over_axes(np.isinf(query), -1))


_STAGES_BEFORE_SOFTMAX = frozenset({*PROJECTIONS, *NORMALIZATIONS, *ROTATIONS, *LOGITS})
"""Stages with separate elements for every key: masks do not change what reaches them."""

_AXES_SHARING_NAN: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys({*GRADIENTS_SUMMING_QUERIES, *input_of_optional_gradients("attention_gradients")}, (-2, -1)),
    **{name: () for name, spec in STAGE_SPECS.items() if spec.axes[-1] in {"Lq", "H"}},
}
"""Axes along which one NaN shows that all elements are affected: the last one, except for these stages. A softmax may
return 0 next to NaN, as TensorFlow's does, so that a sum over queries is NaN only for some keys."""

NONFINITE_REASON = "holds NaN or an infinity that no mask explains"
NO_DIRECTION_REASON = "has a vector of length 0, which has no direction"
NONFINITE_BEHIND_MASK_REASON = (
    "only keys that may not be attended hold NaN or infinity: what adds to their scores or multiplies by their weights "
    "makes NaN of it, and what leaves them out does not"
)


@dataclass(frozen=True, eq=False)
class UndefinedElements:
    """The undefined elements of inputs and of stages; ``reason`` says why, in the words of a message.

    ``stages_without_masked_keys`` are those that are undefined even if keys that may not be attended are left out.
    """

    inputs: Mapping[str, Flags]
    reason: str
    stages: Mapping[str, Flags] = field(default_factory=dict)
    stages_without_masked_keys: Mapping[str, Flags] = field(default_factory=dict)

    def fill_with_ones(self, inputs: Inputs) -> dict[str, Array]:
        """Return the inputs with ones instead of undefined elements."""
        return {
            name: np.where(self.inputs[name], np.ones((), array.dtype), array) if name in self.inputs else array
            for name, array in inputs.items()
        }

    def flag_undefined_in_stage(self, stage: str, shape: Shape) -> Flags:
        """Flag the undefined elements of a stage."""
        return np.broadcast_to(self.stages.get(stage, np.zeros((), dtype=np.bool_)), shape)

    def flag_undefined_behind_mask(self, stage: str, shape: Shape) -> Flags:
        """Flag the elements that are undefined only because of keys that may not be attended."""
        if stage not in self.stages_without_masked_keys:
            return np.zeros(shape, dtype=np.bool_)
        return self.flag_undefined_in_stage(stage, shape) & ~np.broadcast_to(
            self.stages_without_masked_keys[stage], shape
        )

    def withdraw_undefined(self, stage: str, exact: Enclosure, returned: Array | None = None) -> Enclosure:
        """Withdraw the exact value of undefined elements.

        Elements that are undefined only because of masked keys depend on ``returned``: a row with NaN or infinity there
        is undefined, and so is a head of a sum over queries; any other row has its exact value.
        """
        flags = self.flag_undefined_in_stage(stage, exact.shape)
        if returned is not None:
            behind = self.flag_undefined_behind_mask(stage, exact.shape)
            odd = behind & ~np.isfinite(returned.astype(np.float64))
            flags = flags & ~(behind & ~any_over_axes(odd, _AXES_SHARING_NAN.get(stage, -1)))
        if not flags.any():
            return exact
        high, low = np.where(flags, np.nan, exact.high), np.where(flags, 0.0, exact.low)
        return Enclosure(high, low, np.where(flags, np.inf, exact.radius))

    def zero_undefined(self, stage: str, returned: Array) -> Array:
        """Set elements of a returned stage that are rightly not finite to 0, so that others can be computed from it."""
        by_right = self.flag_undefined_in_stage(stage, returned.shape) & ~np.isfinite(returned.astype(np.float64))
        return np.where(by_right, np.zeros((), returned.dtype), returned)


@dataclass(frozen=True, eq=False)
class UndefinedParts:
    """The query rows and the elements of one problem that have no exact answer; None if there are none."""

    rows: UndefinedRows | None = None
    elements: UndefinedElements | None = None

    @property
    def uniform_rows(self) -> UndefinedRows | None:
        """The rows, if those without a key have uniform weights by convention."""
        return self.rows if self.rows is not None and self.rows.empty_rows_convention == "uniform" else None

    def withdraw_undefined(self, values: Mapping[str, Enclosure]) -> Mapping[str, Enclosure]:
        """Return the exact answer of every stage, given its value as the oracle evaluates it."""
        if self.rows is not None:
            values = {stage: self.rows.withdraw_undefined(stage, value) for stage, value in values.items()}
        if self.elements is not None:
            values = {stage: self.elements.withdraw_undefined(stage, value) for stage, value in values.items()}
        return values

    def withdraw_or_select_returned(self, stage: str, value: Enclosure, returned: Array) -> Enclosure:
        """Return the exact answer of a stage; if several are right, the one that was returned."""
        exact = value
        if self.rows is not None:
            exact = self.rows.select_by_returned(stage, self.rows.withdraw_undefined(stage, exact), value, returned)
        return exact if self.elements is None else self.elements.withdraw_undefined(stage, exact, returned)

    def withdraw_undefined_of_step(self, stage: str, value: Enclosure, earlier: Collection[str]) -> Enclosure:
        """Return the exact answer of a step from the stages before it."""
        exact = value if self.rows is None else self.rows.withdraw_undefined_of_step(stage, value, earlier)
        return exact if self.elements is None else self.elements.withdraw_undefined(stage, exact)

    def zero_undefined(self, stage: str, returned: Array) -> Array:
        """Set elements of a returned stage that are rightly not finite to 0, so that others can be computed from it."""
        for part in (self.rows, self.elements):
            returned = returned if part is None else part.zero_undefined(stage, returned)
        return returned

    def describe_reason(self, stage: str, shape: Shape, index: tuple[int, ...]) -> str:
        """Return why an element of a stage has no exact answer; empty if it has one."""
        rows, elements = self.rows, self.elements
        if elements is not None and elements.flag_undefined_in_stage(stage, shape)[index]:
            return (
                NONFINITE_BEHIND_MASK_REASON
                if elements.flag_undefined_behind_mask(stage, shape)[index]
                else elements.reason
            )
        if rows is not None and rows.flag_affected_elements(stage, shape, rows.empty_rows | rows.nan_rows)[index]:
            return "what a query without a key, or one that holds NaN, gives here is a matter of convention"
        return ""


NOTHING_UNDEFINED = UndefinedParts()


@dataclass(frozen=True, eq=False)
class JudgedProblem:
    """One problem in the forms that judging uses; the last two have only the judged query rows."""

    called_problem: Problem
    """The operation that is called, such as ``packed_attention``, with the dtype of the case."""
    problem_without_layout: Problem
    """The same with keys and values in one array per batch entry (``Problem.without_layout``): ``attention``."""
    judged_rows: RowIndices | None
    """The judged rows if they stand for all; None if all rows are judged."""
    canonical_with_nan: Problem
    """The canonical form before undefined elements are replaced."""
    canonical: Problem
    """The form that the oracle evaluates: one mask, and ones instead of NaN in query rows and undefined elements."""
    undefined_elements: UndefinedElements | None


def make_judged_problem(called: Problem, *, whole: bool) -> JudgedProblem:
    """Make the forms of a problem for judging: choose the judged query rows, and fill undefined elements."""
    problem = called.without_layout()
    rows = None if whole else choose_sampled_rows(problem)
    plain = problem.canonical(rows)
    if find_empty_rows_convention(problem) == "uniform":
        plain = plain.with_options(empty_rows="uniform")
    finite = replace(plain, inputs=replace_nan_query_rows(plain.inputs))
    undefined = find_undefined_elements(finite)
    canonical = finite if undefined is None else replace(finite, inputs=undefined.fill_with_ones(finite.inputs))
    return JudgedProblem(called, problem, rows, plain, canonical, undefined)


def find_undefined(judged: JudgedProblem) -> UndefinedParts:
    """Find the query rows and the elements that have no exact answer."""
    rows = find_undefined_rows(judged.canonical_with_nan, find_empty_rows_convention(judged.problem_without_layout))
    return UndefinedParts(rows or None, judged.undefined_elements)


def find_undefined_elements(plain: Problem) -> UndefinedElements | None:
    """Find the undefined elements of a canonical problem without NaN in whole query rows; None if there are none."""
    operation, options, inputs = plain.operation, plain.options, plain.inputs
    flags: dict[str, Flags] = {}
    reasons = []
    for name, array in inputs.items():
        if array.dtype == np.bool_:
            continue
        odd = flag_nonfinite(name, array)
        if odd.any():
            reasons.append(f"{name} {NONFINITE_REASON}")
        if name in ("query", "key") and score_kind(operation, options) == "cosine":
            without_direction = ~(array != 0).any(axis=-1, keepdims=True)
            if without_direction.any():
                reasons.append(f"{name} {NO_DIRECTION_REASON}")
            odd = odd | without_direction
        flags[name] = odd
    if not reasons:
        return None
    undefined = {name: elements for name, elements in flags.items() if elements.any()}
    problem = Computation.from_problem(plain)
    flags = {name: problem.input_with_added_key(name, elements) for name, elements in flags.items()}
    stages = _walk_stage_flags(flag_walk(problem, flags, None), problem)
    if "key" not in inputs or OPERATIONS[operation].has_score_option:  # nothing is masked
        return UndefinedElements(undefined, "; ".join(reasons), stages)
    *leading, keys = scores_shape(plain)
    attended = ~problem.flag_unattended((*leading, keys + problem.added_keys))
    by_selection = _walk_stage_flags(flag_walk(problem, flags, attended), problem)
    return UndefinedElements(
        undefined,
        "; ".join(reasons),
        stages,
        {stage: by_selection[stage] for stage in by_selection.keys() - _STAGES_BEFORE_SOFTMAX},
    )


def has_nonfinite_inputs(problem: Problem) -> bool:
    """Return whether inputs contain NaN or infinity, except for -inf that forbids a key."""
    return any(flag_nonfinite(name, array).any() for name, array in problem.inputs.items())


def flag_nonfinite(name: str, array: Array) -> Flags:
    """Flag NaN and infinity in an input, except for -inf in scores and bias, which forbids a key."""
    odd: Flags = ~np.isfinite(array)
    return odd & (array != -np.inf) if name in INPUTS_WITH_MINUS_INFINITY else odd


def _walk_stage_flags(walk: Walk, problem: Computation) -> dict[str, Flags]:
    """Return the flags of every stage, in shapes that broadcast to the stages' own."""
    stages = computed_stages(problem.operation, problem.options, problem.inputs)
    return {stage: problem.without_added_key(stage, walk.evaluate(stage)) for stage in stages}


def flag_stages_reached_by_scores(plain: Problem, scores: Flags) -> dict[str, Flags]:
    """Follow flags of scores, (B, H, Lq, T), to every later stage, in shapes that broadcast to the stages'."""
    problem = Computation.from_problem(plain)
    known = {stage: problem.with_added_key(stage, scores) for stage in ("scores", "raw_scores")}
    return _walk_stage_flags(flag_walk_from_nodes(problem, known), problem)


_WIDE_RANGE = 1e30
"""Sums that may be larger do not overflow where those of other formats do: it separates float16 (6.6e4) from bfloat16,
float32 (3.4e38) and float64."""
_OVERFLOW_MARGIN = 1 - 2.0**-8
"""A score this near to the largest number may overflow when it is rounded or summed. A choice: the margin is 8 units of
float16, the only format with a narrow range; a larger one leaves more elements without a bound."""


def remove_bounds_of_overflown(
    plain: Problem,
    rounding: RoundingModel,
    raw_scores: Array | None,
    bounds: Mapping[str, Bound],
) -> dict[str, Bound]:
    """Return the bounds, infinite for elements that depend on a score that may have overflowed.

    ``raw_scores`` are the exact ones; without them they are computed from query and key.
    """
    stored = FORMATS[rounding.dtype]
    largest = min(
        rounding.for_score_product.largest_sum,
        stored.largest if rounding.score_unit == stored.unit_roundoff else np.inf,
    )
    if largest > _WIDE_RANGE:
        return dict(bounds)
    raw = _approximate_raw_scores(plain) if raw_scores is None else raw_scores
    if raw is None:
        return dict(bounds)
    flags = np.abs(raw) > _OVERFLOW_MARGIN * largest
    if not flags.any():
        return dict(bounds)
    reached = flag_stages_reached_by_scores(plain, flags)
    infinite = {stage: partial(np.where, flags, np.inf) for stage, flags in reached.items()}
    return {stage: bound.map_arrays(infinite[stage]) if stage in infinite else bound for stage, bound in bounds.items()}


def _approximate_raw_scores(plain: Problem) -> Array | None:
    """Return the products of query and key of ``attention_gradients``, in float64."""
    if plain.operation != "attention_gradients":
        return None
    operands = {name: plain.inputs[name] for name in ("query", "key")}
    with np.errstate(all="ignore"):
        raw: Array = value_walk(Computation.from_problem(Problem(plain.operation, {}, operands)).in_float64()).evaluate(
            "raw_scores"
        )
    return raw
