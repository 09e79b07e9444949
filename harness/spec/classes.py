"""Classes of accuracy: rounding models by name, and composed of parts.

    native      float64, float32: everything in the format itself
    fused       16 bit; scores, exponentials and sums in float32, weights rounded to 16 bit before they meet the values
    fused_bwd   as fused; its backward pass stores the weights' gradient and adds up tiles in 16 bit
    fused_fp8   as fused; exponentials are rounded to float8_e4m3fn before they meet the values, on the way forward
    eager       16 bit: every intermediate is stored; products and sums accumulate in float32, functions too, then round
    eager_pre   as eager; the query or key, already scaled, is stored too
    eager_cut   as eager; results of products of matrices are cut off when they are stored, not rounded to nearest

    tf32_products, bf16_products, bf16x3_products    float32 as native; but what meets in a product of matrices has been
                rounded, or cut off, to TensorFloat-32, to bfloat16, or to a sum of two bfloat16 numbers, and partial
                sums may be cut off too, as tensor cores do
    native_lse, fused_lse, eager_lse    as native, fused, eager; weights may be e^(s - L), L a log_sum_exp that was
                stored before, in the format of the computation: they need not add up to 1

The constants are allowances for what libraries do (docs/numerics.md, section 3). A kernel that gives up more for speed
declares it part by part: "fused with tanh 2^-11 and sums float16" is a class as well (``PARTS``), and so are the
``ROUNDING_PRESETS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from attncheck.spec import ROUNDING_MODELS
from attncheck.spec.rounding import (
    FORMATS,
    GRIDS,
    SCALE_FORMATS,
    CodeGrid,
    Format,
    Quantization,
    RoundingModel,
    SumRounding,
)

_EXP_UNITS, _TANH_UNITS, _LOG_UNITS = 4, 8, 4  # allowances for libraries (docs/numerics.md, section 3)


@cache
def rounding_model_named(rounding_model: str, dtype: str) -> RoundingModel:
    """Return a rounding model in a dtype. Raises ``ValueError`` if there is none.

    Example:
        >>> fused, eager = (rounding_model_named(name, "bfloat16") for name in ("fused", "eager"))
        >>> (fused.score_unit, fused.weight_unit) == (2.0**-24, 2.0**-8)  # scores stay in float32, weights do not
        True
        >>> (eager.score_unit, eager.weight_unit) == (2.0**-8, 2.0**-8)
        True
    """
    if dtype not in FORMATS:
        raise ValueError(f"dtype: one of {', '.join(FORMATS)}, not {dtype}")
    text = ROUNDING_PRESETS[rounding_model].parts if rounding_model in ROUNDING_PRESETS else rounding_model
    if PARTS_SEPARATOR in text:
        return replace(_compose_model(text, dtype), rounding_model=rounding_model)
    if rounding_model not in ROUNDING_MODELS:
        raise ValueError(
            f"rounding model: one of {', '.join((*ROUNDING_MODELS, *ROUNDING_PRESETS))}, not {rounding_model}"
        )
    stored = FORMATS[dtype]
    if dtype not in ROUNDING_MODELS[rounding_model]:
        raise ValueError(f"there is no rounding model {rounding_model} in {dtype}")
    if rounding_model in _REDUCED_PRODUCTS:
        return _REDUCED_PRODUCTS[rounding_model].make_rounding_model(rounding_model)
    if rounding_model.endswith(_LOG_SUM_EXP_SUFFIX):
        rounding = rounding_model_named(rounding_model.removesuffix(_LOG_SUM_EXP_SUFFIX), dtype)
        return replace(rounding, rounding_model=rounding_model, from_log_sum_exp=True)
    return _find_model_without_parts(rounding_model, stored)


def _find_model_without_parts(rounding_model: str, stored: Format) -> RoundingModel:
    match rounding_model:
        case "native":
            model = _make_native_model(stored)
        case "fused":
            model = _make_fused_model("fused", stored, stored_gradient=False)
        case "fused_bwd":
            model = _make_fused_model("fused_bwd", stored, stored_gradient=True)
        case "fused_fp8":
            model = _make_fused_model("fused", stored, stored_gradient=False)
            model = _with_narrow_weights(model, "float8_e4m3fn")
        case "eager_pre":
            model = _make_eager_model("eager_pre", stored, FORMATS["float32"], stored)
        case _:
            model = _make_eager_model("eager", stored, FORMATS["float32"], FORMATS["float32"])
    if rounding_model == "eager_cut":
        # A cut is off by less than twice the unit. What is stored without a product before it errs by half of that.
        cut = 2 * stored.unit_roundoff
        model = replace(model, score_unit=cut, output_unit=cut, weight_gradient_unit=cut, mean_truncation_error=cut / 2)
    return replace(model, rounding_model=rounding_model)


_LOG_SUM_EXP_SUFFIX = "_lse"


@dataclass(frozen=True)
class _ReducedProducts:
    """The way products of float32 matrices are taken: ``products_per_product`` products of factors with few bits."""

    precision: int
    unit: float
    products_per_product: int = 1

    def make_rounding_model(self, name: str) -> RoundingModel:
        """Return float32's native model with such products."""
        single = FORMATS["float32"]
        return replace(
            _make_native_model(single),
            rounding_model=name,
            accumulate_unit=(1 if self.products_per_product == 1 else 2) * _truncated_sum_unit(single.precision),
            cuts_sums=True,
            product_precision=self.precision,
            product_unit=self.unit,
            product_underflow=single.underflow,
        )


def _truncated_sum_unit(bits: int) -> float:
    """Return u_acc of a unit that adds up two products or more and a running sum at once, and cuts them off.

    It aligns them to the largest, cuts off what is below so many bits of it, and cuts the sum to float32's bits or
    fewer: n products in blocks of b are off by (n + ceil(n/b) - 1) 2^(1 - bits), and by ceil(n/b) units of the sum.
    """
    return math.ldexp(1.0, 1 - min(bits, FORMATS["float32"].precision)) + math.ldexp(1.0, 1 - bits)


_REDUCED_PRODUCTS: Mapping[str, _ReducedProducts] = {
    "tf32_products": _ReducedProducts(11, 2.0**-10),
    "bf16_products": _ReducedProducts(8, 2.0**-7),
    # x = high + low + rest: the rests, and the product of both lows, are at most 2^-14 of a product each.
    "bf16x3_products": _ReducedProducts(8, 1.5 * 2.0**-14, products_per_product=3),
}


def _make_native_model(stored: Format) -> RoundingModel:
    return _make_eager_model("native", stored, stored, stored)


def _make_eager_model(name: str, stored: Format, wide: Format, prescaled: Format) -> RoundingModel:
    """Store every intermediate, with sums and functions in a format that may be wider: their results are then rounded.

    ``prescaled`` is the format of the query or key once it is scaled.
    """
    unit, underflow = stored.unit_roundoff, stored.underflow
    once_more = 0.0 if wide is stored else unit
    return RoundingModel(
        rounding_model=name,
        dtype=stored.name,
        accumulate_unit=wide.unit_roundoff,
        sum_unit=wide.unit_roundoff,
        compute_unit=unit,
        score_unit=unit,
        prescale_unit=prescaled.unit_roundoff,
        weight_unit=unit,
        output_unit=unit,
        output_count=2,
        exp_error=once_more + _EXP_UNITS * wide.unit_roundoff,
        tanh_error=once_more + _TANH_UNITS * wide.unit_roundoff,
        log_error=once_more + _LOG_UNITS * wide.unit_roundoff,
        accumulate_underflow=wide.underflow,
        score_underflow=underflow,
        prescale_underflow=prescaled.underflow,
        weight_underflow=underflow,
        output_underflow=underflow,
        weight_gradient_unit=unit,
        recomputes_weights=wide is stored,
        gradient_tile=None,
    )


def _make_fused_model(name: Literal["fused", "fused_bwd"], stored: Format, *, stored_gradient: bool) -> RoundingModel:
    """Keep float32 between 16-bit ends: weights and output, and in one of them the gradient of the weights."""
    single = _make_native_model(FORMATS["float32"])
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


PARTS_SEPARATOR, _PART_SEPARATOR = " with ", " and "
_POWER_PATTERN = re.compile(r"2\^(-?[0-9]+(?:\.[0-9]+)?)")
_BLOCK_PATTERN = re.compile(r"([0-9]+) (rows of a channel|rows|columns)")
_MEAN_PATTERN = re.compile(r"mean(?: of ([1-9][0-9]*) rows)?")
_SCALE_GROUPS = ("none", "tensor", "head", "row", "channel")
_CUT_PATTERN = re.compile(r"cut at ([1-9][0-9]) bits")
_PRODUCT_COUNT_PATTERN = re.compile(r"(.*) per ([1-9][0-9]*) products")
_SUM_FORMATS = ("float32", "bfloat16", "float16")


class RoundingPreset(NamedTuple):
    """A class of a published kernel: its parts, and their source."""

    parts: str
    source: str


ROUNDING_PRESETS: Mapping[str, RoundingPreset] = {
    "tanh_approx": RoundingPreset(
        "fused with tanh 2^-11",
        "a softcap by tanh.approx.f32, as FlashAttention has: PTX ISA, 9.7.3, maximum relative error 2^-11",
    ),
    "flash4": RoundingPreset(
        "fused with exp 8.8e-5",
        "exponentials by a cubic, 8.8e-5 of 2^x: FlashAttention 4 for Blackwell, flash_attn/cute/softmax.py",
    ),
    "flash3_fp8": RoundingPreset(
        "fused with query float8_e4m3fn per head and key float8_e4m3fn per head and value float8_e4m3fn per head "
        "and weights float8_e4m3fn and sums cut at 14 bits",
        "Shah et al. 2024, arXiv 2407.08608, section 3.3: e4m3 with a scale for each head, in Hopper's sums of FP8",
    ),
    "sage1": RoundingPreset(
        "fused with query int8 per 128 rows and key int8 per 64 rows less mean and sums float16 per 64 products "
        "and score_sums int32",
        "Zhang et al. 2024, SageAttention, arXiv 2410.02367: int8 in blocks, smoothed keys, outputs summed in float16, "
        "and of 64 keys each in float32 (thu-ml/SageAttention, triton/attn_qk_int8_per_block.py)",
    ),
    "sage2": RoundingPreset(
        "fused with query int4 per 128 rows and key int4 per 64 rows less mean and value float8_e4m3fn per channel "
        "and weights float8_e4m3fn and sums cut at 14 bits per 64 products and score_sums int32",
        "Zhang et al. 2024, SageAttention2, arXiv 2411.10958: int4 in blocks, smoothed keys, FP8 weights and "
        "values, whose sums of 64 keys are added up in float32; as it is released, sage2 with query int8 per 32 rows "
        "and key int8 per 64 rows less mean (thu-ml/SageAttention, sageattn_qk_int8_pv_fp8_cuda, fp32+fp32)",
    ),
    "sage3": RoundingPreset(
        "fused with query float4_e2m1fn per 16 columns scaled in float8_e4m3fn alone less mean of 128 rows "
        "and key float4_e2m1fn per 16 columns scaled in float8_e4m3fn alone less mean "
        "and value float4_e2m1fn per 16 rows of a channel scaled in float8_e4m3fn alone "
        "and weights float4_e2m1fn per 16 columns scaled in float8_e4m3fn and sums cut at 36 bits",
        "Zhang et al. 2025, SageAttention3, arXiv 2505.11594: NVFP4 throughout, smoothed queries and keys, weights "
        "scaled twice (thu-ml/SageAttention, sageattention3_blackwell); sums of FP4 after Xie et al. 2025, MMA-Sim, "
        "arXiv 2511.10909",
    ),
    "llama_q8_0": RoundingPreset(
        "fused with query int8 per 32 columns scaled in float16 and key int8 per 32 columns scaled in float16 "
        "and value int8 per 32 columns scaled in float16",
        "llama.cpp's caches in Q8_0: blocks of 32 with a scale in float16, which the query meets in the same form",
    ),
    "llama_q4_0": RoundingPreset(
        "fused with query int8 per 32 columns scaled in float16 and key q4_0 per 32 columns scaled in float16 "
        "and value q4_0 per 32 columns scaled in float16",
        "llama.cpp's caches in Q4_0: four bits, -8 to 7, with a scale of the sign for which the largest is -8",
    ),
}
"""Composed classes of published kernels, by name."""


def _with_function_error(field: str, model: RoundingModel, declared: str) -> RoundingModel:
    """Return the model with a larger relative error of a function: (1 + d) with |d| at most the declared number."""
    power = _POWER_PATTERN.fullmatch(declared)
    try:
        error = 2.0 ** float(power[1]) if power else float(declared)
    except (ValueError, OverflowError):
        error = math.nan
    if not 0 < error < 1:
        raise ValueError(f"{declared!r} is no relative error; expected a number between 0 and 1, as 2^-11 or 8.8e-5")
    permitted = getattr(model, field)
    if error < permitted:
        raise ValueError(
            f"{declared} is less than the {permitted:.2g} that {model.rounding_model} permits already; leave it out"
        )
    # An exponential off by the factor 1 - d is one of an argument that is off by -log(1 - d).
    changes: dict[str, Any] = {field: -math.log1p(-error) if field == "exp_error" else error}
    return replace(model, **changes)


def _with_storage_format(unit: str, underflow: str, model: RoundingModel, declared: str) -> RoundingModel:
    """Return the model with the unit roundoff and the underflow of a coarser format for one kind of number."""
    form = FORMATS.get(declared)
    if form is None:
        raise ValueError(f"{declared!r} is no format of sums or stages; expected one of {', '.join(_SUM_FORMATS)}")
    if form.unit_roundoff < getattr(model, unit):
        raise ValueError(f"{declared} is finer than what {model.rounding_model} permits already; leave it out")
    changes: dict[str, Any] = {unit: form.unit_roundoff, **({underflow: form.underflow} if underflow else {})}
    return replace(model, **changes)


def _parse_sums(declared: str) -> SumRounding:
    """Return a way to add products up: in a format, within its range, exactly, or by a unit that cuts off."""
    single, promoted = FORMATS["float32"], _PRODUCT_COUNT_PATTERN.fullmatch(declared)
    if promoted:
        unit, within = single.unit_roundoff, _parse_sums(promoted[1])
        return within._replace(
            accumulate_unit=within.accumulate_unit + unit, sum_length=float(promoted[2]), promoted_unit=unit
        )
    if declared in FORMATS:
        kept = FORMATS[declared]
        return SumRounding(kept.unit_roundoff, kept.underflow, kept.largest if declared == "float16" else math.inf)
    if declared == "int32":  # and rounded once
        return SumRounding(single.unit_roundoff, single.underflow, sum_length=1)
    if cut := _CUT_PATTERN.fullmatch(declared):
        return SumRounding(_truncated_sum_unit(int(cut[1])), single.underflow, cuts_sums=True)
    expected = f"{', '.join(_SUM_FORMATS)}, cut at 14 bits, or cut at 14 bits per 128 products"
    raise ValueError(f"{declared!r} is no way to add products up; expected one of {expected}")


def _with_sums(model: RoundingModel, declared: str) -> RoundingModel:
    """Return the model with all products added up in the declared way."""
    sums = _parse_sums(declared)
    if declared == "int32":
        raise ValueError("int32 adds up products of codes alone, those of query and key; say score_sums int32")
    if sums.accumulate_unit < model.accumulate_unit:
        raise ValueError(f"{declared} is finer than what {model.rounding_model} permits already; leave it out")
    return replace(model, **sums._asdict())


_SCALE_GROUPS_OF_WHOLE_ROWS = ("none", "tensor", "head", "row", "rows")
"""Scales that all products of a sum share, so that int32 can add up products of whole codes."""


def _with_narrow_weights(model: RoundingModel, declared: str) -> RoundingModel:
    """Return the model with exponentials, at most 1, in a narrow format before they multiply the values."""
    if declared in FORMATS:
        return _with_storage_format("weight_unit", "weight_underflow", model, declared)
    if " per " in declared:
        return _with_quantized_operand("weights", model, declared)
    grid = _find_grid(declared)
    if not grid.precision:  # multiplied by the largest code, which is that of 1
        return replace(model, weight_step=0.5 / grid.largest)
    return replace(model, weight_unit=max(model.weight_unit, grid.unit_roundoff), weight_step=grid.smallest_step / 2)


def _with_quantized_operand(name: str, model: RoundingModel, declared: str) -> RoundingModel:
    """Return the model with an operand in codes with scales: ``int8 per 64 rows scaled in float16 less mean``."""
    text, less, mean = declared.partition(" less ")
    text, _, scale_in = text.partition(" scaled in ")
    grid, _, per = text.partition(" per ")
    centred = _MEAN_PATTERN.fullmatch(mean)
    if less and not centred:
        raise ValueError(f"less {mean}: expected less mean, the mean of the head's rows, or less mean of 128 rows")
    if less and name not in ("query", "key"):
        raise ValueError("less mean is for query and key, whose scores differ by what a row of them has in common")
    if name == "key" and centred and centred[1]:
        raise ValueError(f"less {mean}: keys lose the mean of all of a head, which no weight notices")
    if name == "weights" and not per.endswith(" columns"):
        raise ValueError(f"per {per}: weights share scales among columns, which are keys, as 16 columns")
    block = _BLOCK_PATTERN.fullmatch(per)
    if (int(block[1]) < 1) if block else (per and per not in _SCALE_GROUPS[1:]):
        raise ValueError(
            f"per {per}: expected per {', '.join(_SCALE_GROUPS[1:])}, or a number of rows or columns, as 64 rows"
        )
    if not per and not _find_grid(grid).precision:
        raise ValueError(f"{grid} needs a scale; say what shares it, as {grid} per 64 rows")
    if scale_in and (not per or scale_in not in SCALE_FORMATS):
        raise ValueError(f"scaled in {scale_in}: expected what shares a scale, and one of {', '.join(SCALE_FORMATS)}")
    shared, count = (block[2], int(block[1])) if block else (per or "none", 1)
    mean_of = int(centred[1]) if centred and centred[1] else 0
    quantization = Quantization(_find_grid(grid), shared, count, bool(less), scale_in or "float32", mean_of)
    return replace(model, quantized_operands=(*model.quantized_operands, (name, quantization)))


def _find_grid(name: str) -> CodeGrid:
    if name not in GRIDS:
        raise ValueError(f"{name!r} is no narrow format; expected one of {', '.join(GRIDS)}")
    return GRIDS[name]


class RoundingPart(NamedTuple):
    """One accuracy that a class may give up: its meaning, and a function from a model and a text to a model."""

    meaning: str
    apply: Callable[[RoundingModel, str], RoundingModel]


ROUNDING_PARTS: Mapping[str, RoundingPart] = {
    "exp": RoundingPart("relative error of an exponential", partial(_with_function_error, "exp_error")),
    "log": RoundingPart("relative error of a logarithm", partial(_with_function_error, "log_error")),
    "tanh": RoundingPart("relative error of a hyperbolic tangent", partial(_with_function_error, "tanh_error")),
    "sums": RoundingPart(
        "format in which products of matrices are added up, or bits at which they are cut", _with_sums
    ),
    "score_sums": RoundingPart(
        "the same of query and key alone, where it is finer",
        lambda model, declared: replace(model, score_sums=_parse_sums(declared)),
    ),
    "scores": RoundingPart(
        "format in which scores are stored", partial(_with_storage_format, "score_unit", "score_underflow")
    ),
    "weights": RoundingPart(
        "format of the exponentials that meet the values, on the way forward", _with_narrow_weights
    ),
    "weight_gradients": RoundingPart(
        "format in which gradients of weights are stored", partial(_with_storage_format, "weight_gradient_unit", "")
    ),
    **{
        name: RoundingPart(f"codes and scales of the {words}", partial(_with_quantized_operand, name))
        for name, words in {
            "query": "query that meets the keys",
            "key": "keys that meet the query",
            "value": "values that meet the weights",
            "grad_output": "output's gradient that meets values and weights",
            "backward_value": "values that meet the output's gradient",
            "backward_weights": "weights that meet the output's gradient",
            "grad_scores": "scores' gradient that meets query and keys",
            "backward_query": "query that meets the scores' gradient",
            "backward_key": "keys that meet the scores' gradient",
        }.items()
    },
}
"""The parts in which a class may be less accurate than the class it is like (docs/numerics.md, section 3.1)."""


def is_composed_class(name: str | None) -> bool:
    """Return whether a class permits more than the classes of frameworks: it has parts, or is a preset."""
    return name is not None and (PARTS_SEPARATOR in name or name in ROUNDING_PRESETS)


def validate_class_name(declared: object, dtype: str) -> str:
    """Return the name of a declared class: a name, or the class that it is like with parts.

    ``{"like": "fused", "tanh": "2^-11"}`` is ``fused with tanh 2^-11``. Raises ``ValueError`` for what is none.

    Example:
        >>> validate_class_name({"like": "fused", "tanh": "2^-11", "sums": "float16"}, "bfloat16")
        'fused with tanh 2^-11 and sums float16'
    """
    if isinstance(declared, Mapping):
        parts = {str(name): " ".join(str(part).split()) for name, part in declared.items()}
        like = parts.pop("like", "")
        if not like or not parts:
            raise ValueError('expected the class that it is like and its parts, as {"like": "fused", "tanh": "2^-11"}')
        declared = like + PARTS_SEPARATOR + _PART_SEPARATOR.join(f"{name} {part}" for name, part in parts.items())
    if not isinstance(declared, str):
        raise ValueError(f"expected the name of a class or its parts, not {declared!r}")
    rounding_model_named(declared, dtype)
    return declared


def _compose_model(text: str, dtype: str) -> RoundingModel:
    like, _, parts = text.partition(PARTS_SEPARATOR)
    model = rounding_model_named(like, dtype)
    seen: set[str] = set()
    for part in parts.split(_PART_SEPARATOR):
        name, _, declared = part.strip().partition(" ")
        if name not in ROUNDING_PARTS or name in seen:
            problem = "stands twice" if name in seen else "is no part of a class"
            raise ValueError(f"{name!r} {problem}; expected {', '.join(ROUNDING_PARTS)}, each once")
        seen.add(name)
        try:
            model = ROUNDING_PARTS[name].apply(model, declared)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    codes = (model.quantization_of("query"), model.quantization_of("key"))
    are_whole = all(
        code and not code.grid.precision and code.scale_group in _SCALE_GROUPS_OF_WHOLE_ROWS for code in codes
    )
    if model.score_sums == _parse_sums("int32") and not are_whole:
        raise ValueError("score_sums: int32 needs query and key in int8 or int4, with a scale per tensor, head or rows")
    if model.for_score_product.accumulate_unit > model.accumulate_unit:
        raise ValueError("score_sums: coarser than the sums of all products; say it of sums")
    return model
