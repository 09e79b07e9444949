"""Faults of the softmax: maximum, exponential, denominator, axis, logarithm; and of precision behind it.

The last are about how weights, values and output are stored and summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _row_maximum, _row_sum, _softmax_with_sinks, softmax
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store, sequential_matmul
from attncheck.mutation.forward_forms import (
    in_attention,
    inputs_changed,
    logits_read_as,
    maximum_read_as,
    normalised,
    outputs_read_as,
    reciprocal_read_as,
    values_read_as,
    weights_read_as,
    with_exponentials,
)
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, EVERY, WIDE, equivalent, mutant
from attncheck.mutation.variant import Call, Steps, numpy_with, within

_faulty_softmax = partial(mutant, "softmax")
_faulty_denominator = partial(mutant, "denominator", at="weights")
_faulty_precision = partial(mutant, "precision")


@_faulty_softmax(maximum_read_as, at="weights", defect="exp overflows above 88 (709 in float64)")
def maximum_not_subtracted(logits: Array) -> Array:
    return np.zeros_like(_row_maximum(logits))


@_faulty_softmax(in_attention, at="weights", defect="the maximum includes what is masked: everything kept underflows")
def maximum_over_masked_keys(call: Call) -> Steps:
    steps = maximum_read_as(lambda logits: _row_maximum(call.unmasked))
    return {"_softmax_with_sinks": within(_softmax_with_sinks, **steps)}


@_faulty_softmax(maximum_read_as, at="weights", defect="the running maximum starts at 0: rows far below it underflow")
def maximum_starts_at_zero(logits: Array) -> Array:
    return np.maximum(_row_maximum(logits), 0)


@_faulty_softmax(maximum_read_as, at="weights", defect="a finite sentinel for -inf: flashinfer#4267")
def maximum_starts_at_minus_5e4(logits: Array) -> Array:
    return np.asarray(np.maximum(_row_maximum(logits), np.asarray(-5e4, logits.dtype)))


def _exponential(exp: Callable[[Array], Array]) -> Steps:
    """Use another exponential."""
    return {"_softmax_with_sinks.np": numpy_with(exp=exp)}


_ERRORS = (
    (1e-6, "1e_6", "a polynomial exp of six digits: pytorch#115151's kind", ()),
    (1e-5, "1e_5", "a polynomial exp of five digits", ()),
    (1e-4, "1e_4", "a polynomial exp of four digits", ACCURACY_OF_16_BITS),
)


def _with_relative_error(size: float) -> Callable[[Array], Array]:
    """Let every exponential err by up to ``size``, each by another amount, so that it does not cancel."""
    return lambda shifted: np.asarray(np.exp(shifted) * (1 + size * np.sin(97 * shifted + 1)))


for _size, _digits, _defect, _diagnosis in _ERRORS:
    _faulty_softmax(
        _exponential, at="weights", defect=_defect, dtypes=WIDE, diagnosis=_diagnosis, name=f"exp_off_by_{_digits}"
    )(_with_relative_error(_size))


@_faulty_softmax(_exponential, at="weights", defect="exp2(1.4427 x): five digits of log2(e)", dtypes=WIDE)
def exp_with_coarse_log2e(shifted: Array) -> Array:
    return np.asarray(np.exp2(shifted * 1.4427))


@_faulty_softmax(
    _exponential, at="weights", defect="2^fraction by a quadratic", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def exp_by_a_parabola(shifted: Array) -> Array:
    power = shifted * math.log2(math.e)
    whole = np.floor(np.maximum(power, -1000))
    fraction = power - whole
    return np.where(power < -1000, 0, np.exp2(whole) * (1 + fraction * (0.6565 + 0.3435 * fraction)))


@_faulty_softmax(
    _exponential, at="weights", defect="exp evaluated in float16", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def exp_in_float16(shifted: Array) -> Array:
    return arithmetic.float16(np.exp(arithmetic.float16(shifted)))


@_faulty_softmax(
    _exponential, at="weights", defect="exp rounded to bfloat16", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def exp_in_bfloat16(shifted: Array) -> Array:
    return arithmetic.bfloat16(np.exp(shifted))


@_faulty_softmax(_exponential, at="weights", defect="a clamp keeps weights of 2e-9 alive")
def exp_floored_at_minus_20(shifted: Array) -> Array:
    return np.asarray(np.exp(np.where(np.isfinite(shifted), np.maximum(shifted, -20), shifted)))


@_faulty_softmax(logits_read_as, at="weights", defect="a clamp against overflow levels the largest logits")
def logits_clipped_at_60(logits: Array) -> Array:
    return np.asarray(np.minimum(logits, np.asarray(60, logits.dtype)))


def _over_axis(axis: int) -> Steps:
    """Normalise the weights over a wrong axis."""

    def normalise(logits: Array) -> Stages:
        turned = np.swapaxes(logits, axis, -1)
        return softmax(logits) | {"weights": np.swapaxes(softmax(turned)["weights"], axis, -1)}

    return normalised(normalise)


for _axis, _which, _defect in (
    (-2, "queries", "wrong axis: annotated_deep_learning#146"),
    (1, "heads", "wrong axis: fastNLP#254"),
    (0, "batch", "wrong axis: PyTorch-NLP#2"),
):
    _faulty_softmax(
        _over_axis, at="weights", defect=_defect, diagnosis=f"softmax-over-{_which}", name=f"softmax_over_{_which}"
    )(_axis)


_faulty_softmax(
    "_softmax_with_sinks.np",
    at="log_sum_exp",
    defect="log2 for log: flashinfer#2113, sglang#35045",
    diagnosis="log-sum-exp-mixed-base",
    name="log_sum_exp_in_base_two",
)(numpy_with(log=np.log2))


@_faulty_softmax(
    normalised, at="log_sum_exp", defect="log of the shifted sum alone", diagnosis="log-sum-exp-without-maximum"
)
def log_sum_exp_without_maximum(logits: Array) -> Stages:
    stages, exponentials = with_exponentials(logits)
    maximum = _row_maximum(logits)
    total = np.where(maximum == -np.inf, 1, _row_sum(exponentials))
    return stages | {"log_sum_exp": np.where(np.isinf(maximum), maximum, np.log(total))[..., 0]}


@_faulty_softmax(
    normalised, at="log_sum_exp", defect="statistics kept in 16 bits", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def log_sum_exp_in_float16(logits: Array) -> Stages:
    stages = softmax(logits)
    return stages | {"log_sum_exp": arithmetic.float16(stages["log_sum_exp"])}


def _total(total: Callable[[Array], Array]) -> Steps:
    """Add the exponentials up in another way."""
    return {"_softmax_with_sinks._row_sum": total}


def _plus(epsilon: float) -> Steps:
    return _total(lambda exponentials: np.asarray(_row_sum(exponentials) + epsilon))


_EPSILON = "an epsilon against division by zero"
for _name, _defect, _dtypes, _epsilon in (
    ("one_added_to_the_sum", "1 for exp(-max): AttentionIsOFFByOne#5", EVERY, 1.0),
    ("sum_plus_1e_9", _EPSILON, ("float64",), 1e-9),
    ("sum_plus_1e_6", _EPSILON, WIDE, 1e-6),
    ("sum_plus_1e_3", _EPSILON, WIDE, 1e-3),
):
    _faulty_denominator(_plus, defect=_defect, dtypes=_dtypes, name=_name)(_epsilon)


@_faulty_denominator(
    _total, defect="the row sum sticks at 2048: tract#2586", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def sum_accumulated_in_float16(exponentials: Array) -> Array:
    return arithmetic.sequential_sum(exponentials, arithmetic.float16)


@_faulty_denominator(
    _total, defect="the row sum sticks at 256: executorch#20090, mlx#4178", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def sum_accumulated_in_bfloat16(exponentials: Array) -> Array:
    return arithmetic.sequential_sum(exponentials, arithmetic.bfloat16)


@_faulty_denominator(
    _total, defect="the finished sum is stored in bfloat16: tt-metal#52045", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def sum_stored_in_bfloat16(exponentials: Array) -> Array:
    return arithmetic.bfloat16(_row_sum(exponentials))


@_faulty_denominator(
    _total,
    defect="float64 in, float32 statistics: jax#37422, jax#34114",
    dtypes=("float64",),
    diagnosis="accuracy-of-float32",
)
def sum_in_float32(exponentials: Array) -> Array:
    return arithmetic.float32(_row_sum(arithmetic.float32(exponentials)))


@_faulty_denominator(
    reciprocal_read_as,
    defect="an approximate reciprocal without a Newton step",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def reciprocal_in_tf32(total: Array) -> Array:
    return arithmetic.tf32(1 / total)


@_faulty_denominator(_total, defect="terms below 1e-4 are skipped as negligible", dtypes=WIDE)
def sum_without_its_smallest_terms(exponentials: Array) -> Array:
    return _row_sum(np.where(exponentials < 1e-4, 0, exponentials))


equivalent(
    _plus,
    defect=_EPSILON,
    proof="The largest term is exp(0) = 1 exactly, so the sum is at least 1, where half a unit in the last place is "
    "6e-8 in float32 and more in 16 bits: adding 1e-9 to it rounds to the sum itself, bit for bit.",
    dtypes=("float32", "float16"),
    name="sum_plus_1e_9_below_the_last_place",
)(1e-9)


@equivalent(
    normalised,
    defect="a clamp that has nothing to clamp",
    proof="All terms are at least 0, so every rounded partial sum is at least each of its terms (rounding is "
    "monotone), and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def weights_clipped_at_one(logits: Array) -> Stages:
    stages = softmax(logits)
    return stages | {"weights": np.minimum(stages["weights"], 1)}


@equivalent(
    _exponential,
    defect="a clamp against overflow that has nothing to clamp",
    proof="A difference s - m with s <= m is at most 0, and rounding keeps its sign: min(s - m, 0) is s - m, bit for "
    "bit. NaN stays NaN.",
)
def exponent_clipped_at_zero(shifted: Array) -> Array:
    return np.asarray(np.exp(np.minimum(shifted, 0)))


def _accumulated(store: Store) -> Steps:
    """Average the values with running sums that are stored."""
    return {"attention._weighted_sum": lambda weights, value: sequential_matmul(weights, value, store=store)}


_Stored = tuple[str, str, Store]
_WEIGHTS: tuple[_Stored, ...] = (
    ("weights_in_bfloat16", "P is stored in bfloat16 before P V", arithmetic.bfloat16),
    ("weights_in_float16", "P is stored in float16 before P V: pytorch#158979's reference", arithmetic.float16),
    ("weights_in_tf32", "P V in TF32: pytorch#161022", arithmetic.tf32),
    ("weights_truncated_to_bfloat16", "a shift for a rounding conversion", arithmetic.truncated_bfloat16),
)
_VALUES_AND_OUTPUT: tuple[tuple[*_Stored, Callable[[Store], Steps]], ...] = (
    ("value_in_bfloat16", "the value is cast down on the way in", arithmetic.bfloat16, values_read_as),
    ("value_in_tf32", "P V in TF32: triton#3498", arithmetic.tf32, values_read_as),
    ("output_in_bfloat16", "the output passes through bfloat16", arithmetic.bfloat16, outputs_read_as),
    ("output_truncated", "a shift for a rounding conversion", arithmetic.truncated_tf32, outputs_read_as),
    (
        "values_accumulated_in_float16",
        "P V with float16 running sums: metal-flash-attention#8",
        arithmetic.float16,
        _accumulated,
    ),
    ("values_accumulated_in_bfloat16", "P V with bfloat16 running sums", arithmetic.bfloat16, _accumulated),
)

for _name, _defect, _store in _WEIGHTS:
    _faulty_precision(
        weights_read_as, at="weights", defect=_defect, dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS, name=_name
    )(_store)


@_faulty_precision(weights_read_as, at="weights", defect="weights below 1e-5 are skipped as negligible", dtypes=WIDE)
def small_weights_dropped(weights: Array) -> Array:
    return np.where(weights < 1e-5, 0, weights)


for _name, _defect, _store, _form in _VALUES_AND_OUTPUT:
    _faulty_precision(_form, at="context", defect=_defect, dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS, name=_name)(
        _store
    )


@_faulty_precision(
    inputs_changed,
    at="raw_scores",
    defect="float64 attention computed from float32 inputs: jax#37422's kind",
    dtypes=("float64",),
    diagnosis="accuracy-of-float32",
)
def inputs_in_float32(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    return arithmetic.float32(query), arithmetic.float32(key), arithmetic.float32(value)
