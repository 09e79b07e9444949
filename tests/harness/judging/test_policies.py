from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from attncheck.judging.formats import FORMATS
from attncheck.judging.policies import Policy, policy_for
from attncheck.vocabulary import NUMERICAL_CLASSES

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
    policy, unit = policy_for("native", dtype), float(np.finfo(dtype).eps) / 2
    units = {name: value for name, value in dataclasses.asdict(policy).items() if name.endswith("_unit")}
    assert units.pop("product_unit") == 0, "what meets in a product is not rounded for it"
    assert set(units.values()) == {unit}
    assert policy.exp_error == 4 * unit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("numerical_class", SIXTEEN_BIT_CLASSES)
def test_sums_never_accumulate_in_16_bit(numerical_class: str, dtype: str) -> None:
    policy = policy_for(numerical_class, dtype)
    assert policy.accumulate_unit == policy.sum_unit == 2.0**-24
    assert policy.output_unit == policy.weight_unit == FORMATS[dtype].unit_roundoff


def test_classes_differ_in_what_they_store() -> None:
    fused, backward, eager, prescaled = (policy_for(each, "bfloat16") for each in SIXTEEN_BIT_CLASSES)
    assert fused.score_unit < eager.score_unit
    assert eager.prescale_unit < prescaled.prescale_unit
    assert fused.weight_gradient_unit < backward.weight_gradient_unit
    assert (fused.gradient_tile, backward.gradient_tile) == (None, 32)
    assert (fused.recomputes, backward.recomputes, eager.recomputes) == (True, True, False)


def test_a_class_with_coarser_steps_allows_no_less() -> None:
    def units(policy: Policy) -> list[float]:
        return [value for name, value in dataclasses.asdict(policy).items() if name.endswith(("_unit", "_error"))]

    fused, _, eager, prescaled = (units(policy_for(each, "float16")) for each in SIXTEEN_BIT_CLASSES)
    assert all(fine <= coarse for fine, coarse in zip(fused, eager, strict=True))
    assert all(fine <= coarse for fine, coarse in zip(eager, prescaled, strict=True))


@pytest.mark.parametrize("numerical_class", NUMERICAL_CLASSES)
def test_every_class_has_a_policy_in_each_of_its_dtypes(numerical_class: str) -> None:
    for dtype in NUMERICAL_CLASSES[numerical_class]:
        policy = policy_for(numerical_class, dtype)
        assert (policy.numerical_class, policy.dtype) == (numerical_class, dtype)
        assert policy.from_log_sum_exp == numerical_class.endswith("_lse")
        assert (policy.product_unit > 0) == numerical_class.endswith("_products")


@pytest.mark.parametrize(
    ("numerical_class", "dtype"),
    [
        *[("native", "bfloat16"), ("fused", "float32"), ("eager", "float64"), ("exact", "float32")],
        *[("native", "float8"), ("tf32_products", "float64"), ("bf16_products", "bfloat16"), ("native_lse", "float16")],
    ],
)
def test_a_class_that_a_dtype_does_not_have_is_refused(numerical_class: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=r"class|dtype"):
        policy_for(numerical_class, dtype)
