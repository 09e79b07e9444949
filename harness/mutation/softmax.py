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
from attncheck.mutation.variant import Steps, numpy_with, within

_faulty_softmax = partial(mutant, "softmax", at="weights")
_faulty_denominator = partial(mutant, "denominator", at="weights")
_faulty_precision = partial(mutant, "precision", at="weights")


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


@_faulty_softmax(
    _exponential, at="weights", defect="2^fraction by a quadratic", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS
)
def exp_by_a_parabola(shifted: Array) -> Array:
    power = shifted * math.log2(math.e)
    whole = np.floor(np.maximum(power, -1000))
    fraction = power - whole
    return np.where(power < -1000, 0, np.exp2(whole) * (1 + fraction * (0.6565 + 0.3435 * fraction)))


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
    _faulty_denominator(_plus, defect=_defect, dtypes=_dtypes, diagnosis=f"denominator-plus-{_epsilon:g}", name=_name)(
        _epsilon
    )


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


for _name, _defect, _store, _form in _VALUES_AND_OUTPUT:
    _faulty_precision(_form, at="context", defect=_defect, dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS, name=_name)(
        _store
    )


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_softmax(maximum_read_as, "maximum_not_subtracted", "exp overflows above 88 (709 in float64)",
    lambda logits: np.zeros_like(_row_maximum(logits)))
_faulty_softmax(in_attention, "maximum_over_masked_keys",
    "the maximum includes what is masked: everything kept underflows",
    lambda call: {"_softmax_with_sinks": within(_softmax_with_sinks, **maximum_read_as(lambda logits:
        _row_maximum(call.unmasked)))})
_faulty_softmax(maximum_read_as, "maximum_starts_at_zero",
    "the running maximum starts at 0: rows far below it underflow",
    lambda logits: np.maximum(_row_maximum(logits), 0))
_faulty_softmax(maximum_read_as, "maximum_starts_at_minus_5e4", "a finite sentinel for -inf: flashinfer#4267",
    lambda logits: np.asarray(np.maximum(_row_maximum(logits), np.asarray(-5e4, logits.dtype))))
_faulty_softmax(_exponential, "exp_with_coarse_log2e", "exp2(1.4427 x): five digits of log2(e)",
    lambda shifted: np.asarray(np.exp2(shifted * 1.4427)), dtypes=WIDE)
_faulty_softmax(_exponential, "exp_in_float16", "exp evaluated in float16",
    lambda shifted: arithmetic.float16(np.exp(arithmetic.float16(shifted))), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_softmax(_exponential, "exp_in_bfloat16", "exp rounded to bfloat16",
    lambda shifted: arithmetic.bfloat16(np.exp(shifted)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_softmax(_exponential, "exp_floored_at_minus_20", "a clamp keeps weights of 2e-9 alive",
    lambda shifted: np.asarray(np.exp(np.where(np.isfinite(shifted), np.maximum(shifted, -20), shifted))))
_faulty_softmax(logits_read_as, "logits_clipped_at_60", "a clamp against overflow levels the largest logits",
    lambda logits: np.asarray(np.minimum(logits, np.asarray(60, logits.dtype))))
_faulty_softmax("_softmax_with_sinks.np", "log_sum_exp_in_base_two", "log2 for log: flashinfer#2113, sglang#35045",
    numpy_with(log=np.log2), at="log_sum_exp", diagnosis="log-sum-exp-mixed-base")
_faulty_denominator(_total, "sum_accumulated_in_float16", "the row sum sticks at 2048: tract#2586",
    lambda exponentials: arithmetic.sequential_sum(exponentials, arithmetic.float16), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_denominator(_total, "sum_accumulated_in_bfloat16", "the row sum sticks at 256: executorch#20090, mlx#4178",
    lambda exponentials: arithmetic.sequential_sum(exponentials, arithmetic.bfloat16), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_denominator(_total, "sum_stored_in_bfloat16", "the finished sum is stored in bfloat16: tt-metal#52045",
    lambda exponentials: arithmetic.bfloat16(_row_sum(exponentials)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_denominator(_total, "sum_in_float32", "float64 in, float32 statistics: jax#37422, jax#34114",
    lambda exponentials: arithmetic.float32(_row_sum(arithmetic.float32(exponentials))), dtypes=("float64",),
    diagnosis="accuracy-of-float32")
_faulty_denominator(reciprocal_read_as, "reciprocal_in_tf32", "an approximate reciprocal without a Newton step",
    lambda total: arithmetic.tf32(1 / total), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_denominator(_total, "sum_without_its_smallest_terms", "terms below 1e-4 are skipped as negligible",
    lambda exponentials: _row_sum(np.where(exponentials < 1e-4, 0, exponentials)), dtypes=WIDE)
_faulty_precision(weights_read_as, "small_weights_dropped", "weights below 1e-5 are skipped as negligible",
    lambda weights: np.where(weights < 1e-05, 0, weights), dtypes=WIDE)
_faulty_precision(inputs_changed, "inputs_in_float32",
    "float64 attention computed from float32 inputs: jax#37422's kind",
    lambda query, key, value: (arithmetic.float32(query), arithmetic.float32(key), arithmetic.float32(value)),
    at="raw_scores", dtypes=("float64",), diagnosis="accuracy-of-float32")
