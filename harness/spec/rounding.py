"""Rounding models: which roundings an implementation may make. A bound means nothing until that is declared.

``classes.py`` has them by name. Formats are those of IEEE 754-2019, table 3.5; bfloat16 is binary32 with its last 16
bits left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Format:
    """A binary format: ``precision`` counts the bits of the significand, the hidden one included."""

    name: str
    precision: int
    least_exponent: int

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: |fl(x) - x| <= u |x| if nothing under- or overflows."""
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
        """The largest finite number.

        Example:
            >>> FORMATS["float16"].largest, FORMATS["float32"].largest == 2.0**128 - 2.0**104
            (65504.0, True)
        """
        return math.ldexp(2 - math.ldexp(1.0, 1 - self.precision), 1 - self.least_exponent)

    @property
    def underflow(self) -> float:
        """The absolute error of a result too small for the relative one.

        Frameworks and CPUs flush subnormal results to zero in every format but float16, whose subnormals begin at 6e-5
        and are kept: there it is the rounding to the nearest subnormal, half of the least one.

        Example:
            >>> FORMATS["float16"].underflow == 2.0**-25, FORMATS["float32"].underflow == 2.0**-126
            (True, True)
        """
        return self.least_subnormal / 2 if self.name == "float16" else self.least_normal


FORMATS: Mapping[str, Format] = {
    spec.name: spec
    for spec in (
        Format("float64", 53, -1022),
        Format("float32", 24, -126),
        Format("bfloat16", 8, -126),
        Format("float16", 11, -14),
    )
}


@dataclass(frozen=True)
class CodeGrid:
    """The numbers of a narrow format, before they are multiplied by a scale.

    ``precision`` counts bits of the significand, 0 if the numbers are whole; ``step`` is the distance of the smallest
    ones. If one end of the range is ``shorter``, the sign of the scale is chosen such that the largest element is at
    the other.
    """

    name: str
    largest: float
    precision: int
    smallest_step: float
    shorter_end: float = math.inf

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff; 0 if the numbers are whole."""
        return math.ldexp(1.0, -self.precision) if self.precision else 0.0


GRIDS: Mapping[str, CodeGrid] = {
    spec.name: spec
    for spec in (
        # OCP 8-bit Floating Point Specification 1.0, section 5; Open Compute Microscaling Formats 1.0, section 5.3
        CodeGrid("float8_e4m3fn", 448.0, 4, 2.0**-9),
        CodeGrid("float8_e5m2", 57344.0, 3, 2.0**-16),
        CodeGrid("float4_e2m1fn", 6.0, 2, 0.5),
        # Noune et al. 2022, arXiv 2206.02915: an exponent one larger, no negative zero
        CodeGrid("float8_e4m3fnuz", 240.0, 4, 2.0**-10),
        CodeGrid("float8_e5m2fnuz", 57344.0, 3, 2.0**-17),
        # symmetric, so that -128 and -8 are not used
        CodeGrid("int8", 127.0, 0, 1.0),
        CodeGrid("int4", 7.0, 0, 1.0),
        # ggml, quantize_row_q4_0_ref: -8 to 7
        CodeGrid("q4_0", 8.0, 0, 1.0, shorter_end=7.0),
    )
}


class ScaleFormat(NamedTuple):
    """The format of a scale.

    ``unit_roundoff`` is its unit roundoff, and ``absolute_error`` an absolute error in addition. If it
    ``has_second_scale``, ``absolute_error`` is relative to the largest scale, which the second scale maps to the code
    448. Scales saturate at ``largest``.
    """

    unit_roundoff: float
    absolute_error: float = 0.0
    has_second_scale: bool = False
    is_power_of_two: bool = False
    largest: float = math.inf


SCALE_FORMATS: Mapping[str, ScaleFormat] = {
    "float32": ScaleFormat(0.0),
    **{name: ScaleFormat(FORMATS[name].unit_roundoff, FORMATS[name].underflow) for name in ("float16", "bfloat16")},
    "float8_e4m3fn": ScaleFormat(2.0**-4, 2.0**-10 / 448, has_second_scale=True),
    "float8_e4m3fn alone": ScaleFormat(2.0**-4, 2.0**-10, largest=448.0),
    # powers of two: below, as OCP Microscaling Formats 1.0, section 6.3, has them, or above
    "float8_e8m0fnu": ScaleFormat(1.0, is_power_of_two=True),
}


@dataclass(frozen=True)
class Quantization:
    """The way an operand of a product is stored: codes of a narrow format, times a scale that elements share.

    ``scale_group`` names what shares one: nothing ("none"), a "tensor", "head", "row" or "channel" of a head, or
    ``group_size`` "rows" or "columns" in a block, or so many "rows of a channel". ``subtracts_mean`` tells whether a
    mean is subtracted before, that of the head's rows or of blocks of ``mean_block_rows`` rows, and ``scale_format``
    names the format of the scale.
    """

    grid: CodeGrid
    scale_group: str = "none"
    group_size: int = 1
    subtracts_mean: bool = False
    scale_format: str = "float32"
    mean_block_rows: int = 0

    @property
    def scale_error(self) -> float:
        """The relative error of the largest element if its scale is rounded down, so that its code saturates."""
        kept = SCALE_FORMATS[self.scale_format]
        return 1 - math.frexp(self.grid.largest)[0] if kept.is_power_of_two else kept.unit_roundoff


class SumRounding(NamedTuple):
    """The way products of matrices are added up, in fields of ``RoundingModel``."""

    accumulate_unit: float
    accumulate_underflow: float
    largest_sum: float = math.inf
    cuts_sums: bool = False
    sum_length: float = math.inf
    promoted_unit: float = 0.0


Folding = Literal["none", "scale", "base"]
"""What may be multiplied into the query or the key before their product: nothing, the scale (or its square root into
both), or the scale times log2(e), with exponentials in base 2 after it."""

_WIDE_ROUNDINGS = 3  # of a log_sum_exp in base 2: its sum, the constant log(2) and their product


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
    recomputes_weights: (
        bool  # whether a backward pass may take weights from log_sum_exp and the row sums from the output
    )
    gradient_tile: int | None  # rows per tile whose sums are added up in the output's format; None: never
    folding: Folding = "scale"
    prescale_count: int = 4  # n_pre: roundings of the constant and of what it multiplies
    difference_count: int = 4  # c_x: roundings proportional to |x|, x = score - maximum
    maximum_count: int = 2  # c_m: roundings proportional to |m|, m = maximum
    min_block_keys: int = 16  # keys per block of an online softmax, at least
    product_precision: int = 0  # bits of what meets in a product of matrices; 0: it is not rounded for that
    product_unit: float = 0.0  # u_t: the largest relative error of that rounding, were it a cut
    product_underflow: float = 0.0  # eta_t
    mean_truncation_error: float = 0.0  # the mean relative error of a stored product that is cut off, at most
    from_log_sum_exp: bool = False  # whether weights may be e^(s - L) in the forward pass, from a stored L
    wide_statistics: bool = False  # whether a log_sum_exp is returned in float32, whatever the other results are in
    weight_step: float = 0.0  # h: the absolute error of what meets the values, which is not that in the row's sum
    largest_sum: float = math.inf  # what a sum of products may be, where its format has less range than the results
    quantized_operands: tuple[tuple[str, Quantization], ...] = ()  # operands of the products of the forward pass
    cuts_sums: bool = False  # whether sums of products are cut off, and not rounded to nearest
    sum_length: float = math.inf  # N: products that are added up so, before their sum is added to others
    promoted_unit: float = 0.0  # what that costs for each product beyond N
    score_sums: SumRounding | None = None  # sums of products of query and key, if they are finer

    def quantization_of(self, operand: str) -> Quantization | None:
        """Return how an operand of a product is stored; None if it is used as it is."""
        return dict(self.quantized_operands).get(operand)

    @property
    def has_narrow_weights(self) -> bool:
        """True if the weights that meet the values lose more than a share of each."""
        return self.weight_step > 0 or self.quantization_of("weights") is not None

    @property
    def for_log_sum_exp(self) -> RoundingModel:
        """The same for a log_sum_exp that is returned: everything before its own storage is as it is.

        In base 2 its sum, the constant log(2) and their product are rounded once each.
        """
        if not self.wide_statistics:
            return self
        single = FORMATS["float32"]
        return replace(
            self, output_unit=single.unit_roundoff, output_count=_WIDE_ROUNDINGS, output_underflow=single.underflow
        )

    @property
    def stores_exponentials(self) -> bool:
        """True if exponentials, at most 1, multiply the values and are divided by their sum afterwards."""
        return self.compute_unit < self.output_unit and not self.from_log_sum_exp

    @cached_property
    def for_score_product(self) -> RoundingModel:
        """The same for the product of query and key."""
        return self if self.score_sums is None else replace(self, **self.score_sums._asdict())

    @cached_property
    def without_folding(self) -> RoundingModel:
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
    def common_product_variance(self) -> float:
        """The variance of a relative error that all products have in common: what cuts take away on the average.

        That is at most u_t / 2 of each factor, u_t in all, and mostly 0.7 u_t. It is counted twice, because it is no
        noise: if there is nothing else, z is the same everywhere.
        """
        return 2 * self.product_unit**2
