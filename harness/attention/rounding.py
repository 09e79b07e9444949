"""Rounding models: which roundings an implementation may make. A bound means nothing until that is declared.

    native      float64, float32: everything in the format itself
    fused       16 bit; scores, exponentials and sums in float32, weights rounded to 16 bit before they meet the values
    fused_bwd   as fused; its backward pass stores the weights' gradient and adds up tiles in 16 bit
    fused_fp8   as fused; exponentials are rounded to float8_e4m3fn before they meet the values
    eager       16 bit: every intermediate is stored; products and sums accumulate in float32, functions too, then round
    eager_pre   as eager; the query or key, already scaled, is stored too
    eager_cut   as eager; what a product of matrices gives is cut off where it is stored, and not rounded to nearest

    tf32_products, bf16_products, bf16x3_products    float32 as native; but what meets in a product of matrices has been
                rounded, or cut off, to TensorFloat-32, to bfloat16, or to a sum of two bfloat16 numbers, and partial
                sums may be cut off too, as tensor cores do
    native_lse, fused_lse, eager_lse    as native, fused, eager; weights may be e^(s - L), L a log_sum_exp that was
                stored before, in the format of the computation: they need not add up to 1

16-bit accumulation belongs to no class, on purpose. The constants are allowances for what libraries do: exponentials
within 4 u, logarithms within 4 u, hyperbolic tangents within 8 u, blocks of 16 keys or more.

The floating-point formats that attention is stored and computed in, as the few numbers that error bounds need.

IEEE 754-2019, table 3.5 (binary16, binary32, binary64); bfloat16 is binary32 with its last 16 bits left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from attncheck.spec import ROUNDING_MODELS


@dataclass(frozen=True)
class Format:
    """A binary format: ``precision`` counts the bits of the significand, the hidden one included."""

    name: str
    precision: int
    least_exponent: int

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: |fl(x) - x| <= u |x| where nothing under- or overflows."""
        return math.ldexp(1.0, -self.precision)

    @property
    def least_normal(self) -> float:
        """The least number with a whole significand."""
        return math.ldexp(1.0, self.least_exponent)

    @property
    def least_subnormal(self) -> float:
        """The least positive number."""
        return math.ldexp(1.0, self.least_exponent + 1 - self.precision)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2 - math.ldexp(1.0, 1 - self.precision), 1 - self.least_exponent)

    @property
    def underflow(self) -> float:
        """The absolute error of a result too small for the relative one.

        Frameworks and CPUs flush subnormal results to zero in every format but float16, whose subnormals begin at 6e-5
        and are kept: there it is the rounding to the nearest subnormal, half of the least one.
        """
        return self.least_subnormal / 2 if self.name == "float16" else self.least_normal


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("float64", 53, -1022),
        Format("float32", 24, -126),
        Format("bfloat16", 8, -126),
        Format("float16", 11, -14),
    )
}


Folding = Literal["none", "scale", "base"]
"""What may be multiplied into the query or the key before their product: nothing, the scale (or its square root into
both), or the scale times log2(e), with exponentials in base 2 after it."""

_EXP_UNITS, _TANH_UNITS, _LOG_UNITS = 4, 8, 4
_WIDE_ROUNDINGS = 3


@dataclass(frozen=True)
class RoundingModel:
    """A rounding model in a dtype; units are unit roundoffs, underflows absolute errors (``Format.underflow``).

    The symbol that the formulas use stands beside each field.
    """

    rounding_model: str
    dtype: str
    accumulate_unit: float  # u_acc: sums of products
    sum_unit: float  # u_sum: sums of exponentials
    compute_unit: float  # u_c: subtraction, division, rescaling
    score_unit: float  # u_s: storage of scores
    prescale_unit: float  # u_pre: a query or key times the scale, and the constant
    weight_unit: float  # u_p: storage of the weights that meet the values
    output_unit: float  # u_o: storage of results, and of projections
    output_count: int  # k_o: how often a result is rounded to it
    exp_error: float  # eps_exp
    tanh_error: float  # eps_tanh
    log_error: float  # eps_log
    accumulate_underflow: float  # eta_acc
    score_underflow: float  # eta_s
    prescale_underflow: float  # eta_pre
    weight_underflow: float  # eta_p
    output_underflow: float  # eta_o
    weight_gradient_unit: float  # u_dp: storage of the weights' gradient
    recomputes: bool  # whether a backward pass may take weights from log_sum_exp and the row sums from the output
    gradient_tile: int | None  # rows per tile whose sums are added up in the output's format; None: never
    folding: Folding = "scale"
    prescale_count: int = 4  # n_pre: roundings of the constant and of what it multiplies
    difference_count: int = 4  # c_x: roundings proportional to |x|, x = score - maximum
    maximum_count: int = 2  # c_m: roundings proportional to |m|, m = maximum
    block: int = 16  # keys per block of an online softmax, at least
    product_precision: int = 0  # bits of what meets in a product of matrices; 0: it is not rounded for that
    product_unit: float = 0.0  # u_t: the largest relative error of that rounding, were it a cut
    product_underflow: float = 0.0  # eta_t
    cut_mean: float = 0.0  # the mean relative error of a stored product that is cut off, at most
    from_log_sum_exp: bool = False  # whether weights may be e^(s - L) in the forward pass, from a stored L
    wide_statistics: bool = False  # whether a log_sum_exp is returned in float32, whatever the other results are in

    @property
    def of_statistics(self) -> RoundingModel:
        """The same for a log_sum_exp that is returned: everything before its own storage is as it is.

        In base 2 its sum, the constant log(2) and their product are rounded once each.
        """
        if not self.wide_statistics:
            return self
        single = FORMATS["float32"]
        return replace(
            self, output_unit=single.unit_roundoff, output_count=_WIDE_ROUNDINGS, output_underflow=single.underflow
        )

    @cached_property
    def unfolded(self) -> RoundingModel:
        """The same for a product that is a stage of its own: nothing is multiplied into the query or the key."""
        return replace(self, folding="none")

    @cached_property
    def coarsest_unit(self) -> float:
        """u*: the largest unit roundoff of the class."""
        return max(
            self.accumulate_unit,
            self.sum_unit,
            self.compute_unit,
            self.score_unit,
            self.prescale_unit,
            self.weight_unit,
            self.output_unit,
            self.product_unit,
        )

    @property
    def product_error(self) -> float:
        """The relative error of a product both of whose factors have been rounded for it: 2 u_t + u_t^2."""
        return self.product_unit * (2 + self.product_unit)

    @property
    def product_spread(self) -> float:
        """v_t: a cut errs by something in an interval of length u_t, a rounding to nearest by at most u_t / 2."""
        return self.product_unit / 2

    @property
    def product_common(self) -> float:
        """The variance of a relative error that all products have in common: what cuts take away on the average.

        That is at most u_t / 2 of each factor, u_t in all, and mostly 0.7 u_t. It is counted twice, because it is no
        noise: where there is nothing else, z is the same everywhere.
        """
        return 2 * self.product_unit**2


@cache
def rounding_model_named(rounding_model: str, dtype: str) -> RoundingModel:
    """Return a rounding model in a dtype. Raises ``ValueError`` where there is none."""
    if rounding_model not in ROUNDING_MODELS:
        raise ValueError(f"rounding model: one of {', '.join(ROUNDING_MODELS)}, not {rounding_model}")
    if dtype not in FORMATS:
        raise ValueError(f"dtype: one of {', '.join(FORMATS)}, not {dtype}")
    stored = FORMATS[dtype]
    if dtype not in ROUNDING_MODELS[rounding_model]:
        raise ValueError(f"there is no rounding model {rounding_model} in {dtype}")
    if rounding_model in _REDUCED:
        return _REDUCED[rounding_model].rounding(rounding_model)
    if rounding_model.endswith(_FROM_LOG_SUM_EXP):
        rounding = rounding_model_named(rounding_model.removesuffix(_FROM_LOG_SUM_EXP), dtype)
        return replace(rounding, rounding_model=rounding_model, from_log_sum_exp=True)
    return _plain(rounding_model, stored)


def _plain(rounding_model: str, stored: Format) -> RoundingModel:
    match rounding_model:
        case "native":
            found = _native(stored)
        case "fused":
            found = _fused("fused", stored, stored_gradient=False)
        case "fused_bwd":
            found = _fused("fused_bwd", stored, stored_gradient=True)
        case "fused_fp8":
            found = _fused("fused", stored, stored_gradient=False)
            found = replace(found, weight_unit=2.0**-4, weight_underflow=2.0**-10)
        case "eager_pre":
            found = _eager("eager_pre", stored, stored)
        case _:
            found = _eager("eager", stored, FORMATS["float32"])
    if rounding_model == "eager_cut":
        # A cut is off by less than twice the unit. What is stored without a product before it errs by half of that.
        cut = 2 * stored.unit_roundoff
        found = replace(found, score_unit=cut, output_unit=cut, weight_gradient_unit=cut, cut_mean=cut / 2)
    return replace(found, rounding_model=rounding_model)


_FROM_LOG_SUM_EXP = "_lse"


@dataclass(frozen=True)
class _Reduced:
    """The way products of float32 matrices are taken: ``terms`` products for each, of factors with so many bits.

    A unit adds up four products or more and a running sum at once: it aligns them to the largest, cuts off what is
    below its last bit, and cuts the sum. n terms in blocks of b >= 4 are off by (n + 2 ceil(n/b) - 1) 2u <= 4 n u.
    """

    precision: int
    unit: float
    terms: int = 1

    def rounding(self, name: str) -> RoundingModel:
        """Return float32's native model with such products."""
        single = FORMATS["float32"]
        return replace(
            _native(single),
            rounding_model=name,
            accumulate_unit=(4 if self.terms == 1 else 8) * single.unit_roundoff,
            product_precision=self.precision,
            product_unit=self.unit,
            product_underflow=single.underflow,
        )


_REDUCED: Mapping[str, _Reduced] = {
    "tf32_products": _Reduced(11, 2.0**-10),
    "bf16_products": _Reduced(8, 2.0**-7),
    # x = high + low + rest: the rests, and the product of both lows, are at most 2^-14 of a product each.
    "bf16x3_products": _Reduced(8, 1.5 * 2.0**-14, terms=3),
}


def _native(stored: Format) -> RoundingModel:
    unit, underflow = stored.unit_roundoff, stored.underflow
    return RoundingModel(
        rounding_model="native",
        dtype=stored.name,
        accumulate_unit=unit,
        sum_unit=unit,
        compute_unit=unit,
        score_unit=unit,
        prescale_unit=unit,
        weight_unit=unit,
        output_unit=unit,
        output_count=2,
        exp_error=_EXP_UNITS * unit,
        tanh_error=_TANH_UNITS * unit,
        log_error=_LOG_UNITS * unit,
        accumulate_underflow=underflow,
        score_underflow=underflow,
        prescale_underflow=underflow,
        weight_underflow=underflow,
        output_underflow=underflow,
        weight_gradient_unit=unit,
        recomputes=True,
        gradient_tile=None,
    )


def _fused(name: Literal["fused", "fused_bwd"], stored: Format, *, stored_gradient: bool) -> RoundingModel:
    """Keep float32 between 16-bit ends: weights and output, and in one of them the gradient of the weights."""
    single = _native(FORMATS["float32"])
    return replace(
        single,
        rounding_model=name,
        dtype=stored.name,
        weight_unit=stored.unit_roundoff,
        output_unit=stored.unit_roundoff,
        output_count=1,
        weight_underflow=stored.underflow,
        output_underflow=stored.underflow,
        weight_gradient_unit=stored.unit_roundoff if stored_gradient else single.weight_gradient_unit,
        gradient_tile=32 if stored_gradient else None,
        # Fused kernels are where exponentials in base 2 are at home.
        folding="base",
    )


def _eager(name: Literal["eager", "eager_pre"], stored: Format, prescaled: Format) -> RoundingModel:
    single = FORMATS["float32"]
    unit, underflow = stored.unit_roundoff, stored.underflow
    return RoundingModel(
        rounding_model=name,
        dtype=stored.name,
        accumulate_unit=single.unit_roundoff,
        sum_unit=single.unit_roundoff,
        compute_unit=unit,
        score_unit=unit,
        prescale_unit=prescaled.unit_roundoff,
        weight_unit=unit,
        output_unit=unit,
        output_count=2,
        # A function is evaluated in float32, and its result is stored.
        exp_error=unit + _EXP_UNITS * single.unit_roundoff,
        tanh_error=unit + _TANH_UNITS * single.unit_roundoff,
        log_error=unit + _LOG_UNITS * single.unit_roundoff,
        accumulate_underflow=single.underflow,
        score_underflow=underflow,
        prescale_underflow=prescaled.underflow,
        weight_underflow=underflow,
        output_underflow=underflow,
        weight_gradient_unit=unit,
        recomputes=False,
        gradient_tile=None,
    )
