from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from attncheck.attention.formats import FORMATS
from attncheck.attention.rounding import RoundingModel, rounding_model_named
from attncheck.spec import ROUNDING_MODELS

SIXTEEN_BIT_CLASSES = ("fused", "fused_bwd", "eager", "eager_pre")


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_numbers_that_their_libraries_state(name: str) -> None:
    limits = ml_dtypes.finfo(name)  # type: ignore[no-untyped-call]
    stated = FORMATS[name]
    assert stated.unit_roundoff == float(limits.eps) / 2
    assert stated.least_normal == float(limits.smallest_normal)
    assert stated.least_subnormal == float(limits.smallest_subnormal)
    assert stated.largest == float(limits.max)


def test_only_float16_keeps_its_subnormals() -> None:
    assert {name for name, each in FORMATS.items() if each.underflow < each.least_normal} == {"float16"}
    assert FORMATS["float16"].underflow == 2.0**-25


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_native_class_rounds_to_its_own_format_alone(dtype: str) -> None:
    rounding, unit = rounding_model_named("native", dtype), float(np.finfo(dtype).eps) / 2
    units = {name: value for name, value in dataclasses.asdict(rounding).items() if name.endswith("_unit")}
    assert units.pop("product_unit") == 0, "what meets in a product is not rounded for it"
    assert set(units.values()) == {unit}
    assert rounding.exp_error == 4 * unit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounding_model", SIXTEEN_BIT_CLASSES)
def test_sums_never_accumulate_in_16_bit(rounding_model: str, dtype: str) -> None:
    rounding = rounding_model_named(rounding_model, dtype)
    assert rounding.accumulate_unit == rounding.sum_unit == 2.0**-24
    assert rounding.output_unit == rounding.weight_unit == FORMATS[dtype].unit_roundoff


def test_classes_differ_in_what_they_store() -> None:
    fused, backward, eager, prescaled = (rounding_model_named(each, "bfloat16") for each in SIXTEEN_BIT_CLASSES)
    assert fused.score_unit < eager.score_unit
    assert eager.prescale_unit < prescaled.prescale_unit
    assert fused.weight_gradient_unit < backward.weight_gradient_unit
    assert (fused.gradient_tile, backward.gradient_tile) == (None, 32)
    assert (fused.recomputes, backward.recomputes, eager.recomputes) == (True, True, False)


def test_a_class_with_coarser_steps_allows_no_less() -> None:
    def units(rounding: RoundingModel) -> list[float]:
        return [value for name, value in dataclasses.asdict(rounding).items() if name.endswith(("_unit", "_error"))]

    fused, _, eager, prescaled = (units(rounding_model_named(each, "float16")) for each in SIXTEEN_BIT_CLASSES)
    assert all(fine <= coarse for fine, coarse in zip(fused, eager, strict=True))
    assert all(fine <= coarse for fine, coarse in zip(eager, prescaled, strict=True))


@pytest.mark.parametrize("rounding_model", ROUNDING_MODELS)
def test_every_class_has_a_policy_in_each_of_its_dtypes(rounding_model: str) -> None:
    for dtype in ROUNDING_MODELS[rounding_model]:
        rounding = rounding_model_named(rounding_model, dtype)
        assert (rounding.rounding_model, rounding.dtype) == (rounding_model, dtype)
        assert rounding.from_log_sum_exp == rounding_model.endswith("_lse")
        assert (rounding.product_unit > 0) == rounding_model.endswith("_products")


@pytest.mark.parametrize(
    ("rounding_model", "dtype"),
    [
        *[("native", "bfloat16"), ("fused", "float32"), ("eager", "float64"), ("exact", "float32")],
        *[("native", "float8"), ("tf32_products", "float64"), ("bf16_products", "bfloat16"), ("native_lse", "float16")],
    ],
)
def test_a_class_that_a_dtype_does_not_have_is_refused(rounding_model: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=r"rounding model|dtype"):
        rounding_model_named(rounding_model, dtype)
