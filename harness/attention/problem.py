"""The problem as it is computed: some of its query rows and keys, and stages already known, as stored numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.double_words import DoubleWords
from attncheck.attention.exact_array import ExactArray
from attncheck.reading.problem import Problem
from attncheck.spec import (
    FOLDED_INPUTS,
    OPERATIONS,
    OPTIONS,
    SCORE_INPUTS,
    STAGE_SPECS,
    STAGES,
    InputSpec,
    Shape,
    key_axis,
    score_kind,
)

LOGITS = STAGES[STAGES.index("scores") : STAGES.index("weights")]
"""The stages that the softmax may follow from, in order."""
_CANONICAL_OPERATIONS = [operation for operation in OPERATIONS.values() if not operation.is_lowered]
_INPUT_SPECS: Mapping[str, InputSpec] = {
    name: spec for operation in _CANONICAL_OPERATIONS for name, spec in operation.inputs.items()
}
_INPUTS_THAT_ADD_KEY = tuple(name for name, spec in _INPUT_SPECS.items() if spec.adds_key)
_KEY_AXES: Mapping[str, int] = {
    **{"key": -2, "value": -2, "mask": -1},
    **{name: spec.axes.index("T") - len(spec.axes) for name, spec in FOLDED_INPUTS.items() if "T" in spec.axes},
}
"""Inputs that have a key more if one is added, and the axis that counts keys."""


class OutsideDomain(Exception):
    """The mathematics has no value for these inputs; ``input_name`` says whose fault it is."""

    def __init__(self, input_name: str, reason: str) -> None:
        super().__init__(input_name, reason)  # both, or the exception could not cross into another process
        self.input_name = input_name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.input_name} {self.reason}"


@dataclass(frozen=True, eq=False)
class Computation(Problem):
    """A problem in canonical form, restricted to some of its query rows and keys.

    Stages that are ``returned_stages`` count as inputs, too.

    ``row_indices`` are the indices of the query rows that the arrays hold, and ``first_key`` is the index of the first
    key: causality compares the two. If a problem ``uses_magnitudes``, every number is replaced by its magnitude, so
    that each stage becomes the sum of its absolute terms. (tanh increases, so the tanh of a magnitude bounds the
    magnitude of the tanh.) The radius of a stage is compared with this sum.

    The last ``added_keys`` (one or none) are not keys of the case: a key of zeros with a value of zeros represents an
    input that ``adds_key``. Outside the oracle and the bounds, no stage has this key (``without_added_key``). A
    problem that ``is_float64`` is for bounds, in float64.
    """

    row_indices: NDArray[np.intp] = field(kw_only=True)
    returned_stages: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    uses_magnitudes: bool = False
    first_key: int = 0
    added_keys: int = 0
    arithmetic: type[ExactArray] = DoubleWords
    is_float64: bool = False

    @classmethod
    def from_problem(cls, problem: Problem) -> Computation:
        """Return the whole problem as it is computed: every query row, nothing known yet, and the key that is added."""
        computation = cls.from_problem_without_added_key(problem)
        if problem.inputs.keys().isdisjoint(_INPUTS_THAT_ADD_KEY):
            return computation
        more = replace(computation, added_keys=1)
        return replace(
            more, inputs={name: more.input_with_added_key(name, array) for name, array in computation.inputs.items()}
        )

    @classmethod
    def from_problem_without_added_key(cls, problem: Problem) -> Computation:
        """Return the whole problem without the key that an input adds, for questions about masks.

        Raises ``ValueError`` for an operation, option or input that no step knows.
        """
        operation, options, inputs = problem.operation, problem.options, problem.inputs
        unknown = {name for name, value in options.items() if value is not None} - _KNOWN_OPTIONS
        if operation not in OPERATIONS or unknown or inputs.keys() - _KNOWN_INPUTS:
            # Left out of the computation, it would make a wrong truth.
            strange = sorted(unknown | (inputs.keys() - _KNOWN_INPUTS))
            raise ValueError(f"the oracle knows no {operation} with {', '.join(strange) or 'anything'}")
        queries = inputs["query" if "query" in inputs else "scores"].shape[-2]
        return cls(operation, options, inputs, row_indices=np.arange(queries))

    @property
    def score(self) -> str:
        """The kind of score."""
        return score_kind(self.operation, self.options)

    @property
    def softcap_follows(self) -> str:
        """The stage that the softcap is applied to: scores, unless someone's convention puts it elsewhere."""
        return str(self.options.get("softcap_follows", "scores"))

    @property
    def mask_fill(self) -> float | None:
        """The number that replaces a score that a mask or causality forbids; None for -inf."""
        fill = self.options.get("mask_fill")
        return None if fill is None else float(fill)

    @property
    def head_width(self) -> int:
        """D, the width of a head's queries and keys."""
        if OPERATIONS[self.operation].has_projections:
            return int(self.inputs["query_weight"].shape[-1]) // self.count_heads_of_projection("query")
        return int(self.input_array("query").shape[-1])

    @property
    def has_uniform_rows(self) -> bool:
        """True if a row without a key attends to all keys alike."""
        return self.options.get("empty_rows") == "uniform"

    def input_array(self, name: str) -> NDArray[Any]:
        """Return an input as stored. Raises ``ValueError`` if the operation has none of that name."""
        if name not in self.inputs:
            raise ValueError(f"{self.operation} has no {name}, from which the stage asked for follows")
        return self.inputs[name]

    def to_exact_array(self, array: NDArray[Any], shape: Shape | None = None) -> ExactArray:
        """Take an array as exact, broadcast to a shape."""
        array = array if shape is None else np.broadcast_to(array, shape)
        if self.uses_magnitudes:
            array = np.where(array == -np.inf, array, np.abs(array))
        return self.arithmetic.wrap_stored_numbers(np.atleast_2d(array))

    def in_float64(self) -> Computation:
        """Widen all numbers, exactly."""
        return replace(
            self,
            inputs={
                name: array if array.dtype == np.bool_ else array.astype(np.float64)
                for name, array in self.inputs.items()
            },
        )

    def with_arithmetic(self, arithmetic: type[ExactArray]) -> Computation:
        """Evaluate in another arithmetic."""
        return self if self.arithmetic is arithmetic else replace(self, arithmetic=arithmetic)

    def without_mask(self) -> Computation:
        """Leave out the inputs and options that forbid keys."""
        return self.without_input("mask").with_options(is_causal=False)

    def magnitude_if_absolute(self, value: float) -> float:
        """Return an option, or its magnitude."""
        return abs(float(value)) if self.uses_magnitudes else float(value)

    def flag_allowed(self, shape: Shape) -> NDArray[np.bool_] | None:
        """Flag the keys that may be attended to, in the scores' shape; None for all, as with a fill."""
        return self.flag_unmasked_scores(shape) if self.mask_fill is None else None

    def flag_unmasked_scores(self, shape: Shape) -> NDArray[np.bool_] | None:
        """Flag the scores that mask and causality leave unchanged, in their shape; None without both."""
        mask = self.inputs.get("mask")
        if self.options.get("is_causal"):
            causal = (
                np.arange(self.first_key, self.first_key + shape[-1]) <= self.row_indices[:, np.newaxis]
            )  # (Lq, Lk)
            causal[:, shape[-1] - self.added_keys :] = True
            mask = causal if mask is None else mask & causal
        return None if mask is None else np.broadcast_to(mask, shape)

    def flag_unattended(self, shape: Shape) -> NDArray[np.bool_]:
        """Flag the keys without a weight, in the scores' shape: the mask forbids them, or their score is -inf.

        With a fill, only scores that are not replaced can be -inf.
        """
        allowed = self.flag_allowed(shape)
        unattended = np.zeros(shape, dtype=np.bool_) if allowed is None else ~allowed
        for name in INPUTS_WITH_MINUS_INFINITY & self.inputs.keys():
            forbidden = self.inputs[name] == -np.inf
            if name in _INPUTS_THAT_ADD_KEY:
                unattended[..., -1:] |= lift_per_head(forbidden)
            else:
                unattended |= self.broadcast_to_scores(forbidden, shape)
        kept = None if self.mask_fill is None else self.flag_unmasked_scores(shape)
        return unattended if kept is None else unattended & kept

    def broadcast_to_scores(self, array: NDArray[Any], shape: Shape) -> NDArray[Any]:
        """Broadcast a mask or bias of the own keys to the scores' shape, with 0 for the key that is added."""
        broadcast = np.broadcast_to(array, (*shape[:-1], shape[-1] - self.added_keys))
        return _append_constant(broadcast, -1, self.added_keys, 0) if self.added_keys else broadcast

    def with_added_key(self, stage: str, array: NDArray[Any]) -> NDArray[Any]:
        """Append the added key to a stage, as zeros: no later step uses its numbers."""
        axis = key_axis(stage) if self.added_keys else None
        return array if axis is None else _append_constant(array, axis, self.added_keys, 0)

    @property
    def key_count_of_case(self) -> int:
        """The number of keys without the one that is added; what is projected has that behind the projection."""
        return _count_keys(self.inputs) - self._keys_added_to_input

    def without_added_key(self, stage: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return a stage without the key that is added; flags of one for all keys stay."""
        axis = key_axis(stage) if self.added_keys else None
        if axis is None:
            return array
        is_new = "Lk" in STAGE_SPECS[stage].axes  # without the keys of a cache
        keys = self.inputs["key"].shape[-2] - self._keys_added_to_input if is_new else self.key_count_of_case
        return array if array.shape[axis] == 1 and keys else np.delete(array, -1, axis)

    @property
    def _keys_added_to_input(self) -> int:
        """The number of keys of the input that are added; what is projected has them behind the projection."""
        return 0 if OPERATIONS[self.operation].has_projections else self.added_keys

    def input_with_added_key(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return an input, or something of its shape, with the key that is added: it may always be attended.

        What is projected has that key behind the projection.
        """
        has_none = name in ("key", "value") and OPERATIONS[self.operation].has_projections
        if not self.added_keys or name not in _KEY_AXES or has_none:
            return array
        axis = _KEY_AXES[name]
        if name == "mask" and array.shape[axis] == 1:
            array = np.broadcast_to(array, (*array.shape[:-1], _count_keys(self.inputs)))
        return _append_constant(array, axis, self.added_keys, name == "mask")

    def count_heads_of_projection(self, name: str) -> int:
        """Return how many heads a projection of multi_head_attention has: query, key or value."""
        heads, shared = self.options["heads"], self.options.get("kv_heads")
        return int(heads if name == "query" or shared is None else shared)

    def select_rows(self, rows: NDArray[np.intp]) -> Computation:
        """Keep only these query rows, which are independent of the others; key and value stay whole."""
        inputs = {name: _select_input_rows(name, array, rows) for name, array in self.inputs.items()}
        returned = {name: _select_input_rows(name, array, rows) for name, array in self.returned_stages.items()}
        return replace(self, inputs=inputs, row_indices=self.row_indices[rows], returned_stages=returned)

    def select_keys(self, start: int, stop: int) -> Computation:
        """Keep only the keys and values from ``start`` up to ``stop``: part of what a row's softmax is a sum over.

        None of them may have been added.
        """
        inputs = {name: _select_input_keys(name, array, start, stop) for name, array in self.inputs.items()}
        return replace(self, inputs=inputs, first_key=self.first_key + start)

    def as_predecessor(self, name: str, array: NDArray[Any], stage: str) -> NDArray[Any] | None:
        """Return the returned stage ``name`` as predecessor of ``stage``; None if no exact value follows from it.

        Masked elements are not attended, whatever their value. -inf is a score only if nothing is attended there.
        """
        if name not in LOGITS:
            return array if np.isfinite(array).all() else None
        allowed = self.flag_allowed(array.shape)
        if allowed is not None and name != "masked" and stage not in LOGITS[:-1]:
            array = np.where(allowed, array.astype(np.float64), -np.inf)
        unattended = array == -np.inf
        if name != "masked":
            unattended &= self.flag_unattended(array.shape)
        return array if (np.isfinite(array) | unattended).all() else None


_KNOWN_OPTIONS = {name for name, spec in OPTIONS.items() if not spec.only_in_files} - {"window"} | {
    "score",
    "softcap_follows",
}
_KNOWN_OPTIONS |= {"epsilon_at", "unnormalized"}  # what other readings of a norm have
# What the caller folds first: into one mask, joined keys, and rows for each query and key.
_FOLDED_AWAY_INPUTS = {name for name, spec in _INPUT_SPECS.items() if spec.folds_into_input}
_KNOWN_INPUTS = {name for score in SCORE_INPUTS.values() for name in score}.union(
    *(operation.inputs for operation in _CANONICAL_OPERATIONS), FOLDED_INPUTS
) - _FOLDED_AWAY_INPUTS
_QUERY_AXES: Mapping[str, int] = {
    name: axes.index("Lq") - len(axes)
    for name, axes in [(name, spec.axes) for specs in (STAGE_SPECS, FOLDED_INPUTS) for name, spec in specs.items()]
    if "Lq" in axes[:-1]
}
"""The axis that counts query rows; log_sum_exp is no input, and nothing follows from it."""
INPUTS_WITH_MINUS_INFINITY = {name for name, spec in _INPUT_SPECS.items() if spec.may_be_infinite}


def _count_keys(inputs: Mapping[str, NDArray[Any]]) -> int:
    """Return how many keys the inputs hold, those of a cache among them."""
    return sum(int(inputs[name].shape[-2]) for name in ("cached_key", "key") if name in inputs)


def lift_per_head(array: NDArray[Any]) -> NDArray[Any]:
    """Lift an array with one number per head, (H,), to the rank of scores: (H, 1, 1)."""
    return array[:, np.newaxis, np.newaxis]


def _append_constant(array: NDArray[Any], axis: int, count: int, value: int) -> NDArray[Any]:
    """Append ``count`` slices of one number along an axis."""
    shape = list(array.shape)
    shape[axis] = count
    return np.concatenate([array, np.full(shape, value, array.dtype)], axis)


def check_domain(problem: Problem) -> None:
    """Raise ``OutsideDomain`` for NaN, for infinities except a -inf that forbids a key, and for divisions by zero."""
    for name, array in problem.inputs.items():
        if array.dtype == np.bool_:
            continue
        finite = np.isfinite(array)
        if not finite.all() and not (name in INPUTS_WITH_MINUS_INFINITY and (finite | (array == -np.inf)).all()):
            raise OutsideDomain(name, "holds NaN or an infinity that no mask explains")
    if problem.options.get("softcap") == 0:
        raise OutsideDomain("softcap", "is 0, by which the scores would be divided")
    if score_kind(problem.operation, problem.options) == "cosine":
        for name in ("query", "key"):
            if not (problem.inputs[name] != 0).any(axis=-1).all():
                raise OutsideDomain(name, "has a vector of length 0, which has no direction")


def _select_input_rows(name: str, array: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
    """Take rows of the axis that counts queries; the one row of a mask or bias stands for all."""
    if name in _QUERY_AXES:
        return array.take(rows, _QUERY_AXES[name])
    one_per_query = name in ("mask", "bias") and array.ndim > 1 and array.shape[-2] != 1
    return array[..., rows, :] if one_per_query else array


def _select_input_keys(name: str, array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """Take keys of an input's axis that counts them; the one column of a mask or bias stands for all."""
    if _KEY_AXES.get(name) == -2:
        return array[..., start:stop, :]
    return array[..., start:stop] if name in ("mask", "bias") and array.shape[-1] != 1 else array
