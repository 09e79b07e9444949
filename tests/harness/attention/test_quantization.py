"""Classes that trade accuracy for speed: names and parts, errors of codes with scales, and which hold for a kernel."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traded_kernels
from evaluating import own
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem
from tables import tables_beside
from traded_kernels import (
    KERNELS,
    OF_16_BITS,
    codes_of,
    codes_with_scales,
    declared,
    gradients,
    product_in_float16,
    scales_of,
    tensor_core,
)

from attncheck import check
from attncheck.asking.accuracy import format_accuracy, measure_accuracy, small_cases
from attncheck.attention.errors import Operand, logits_from_values, quantize_operand
from attncheck.attention.softmax import compute_softmax_error, softmax
from attncheck.attention.weighted_mean import max_mean_change
from attncheck.execution.call import Limits
from attncheck.reading.selection import select_cases
from attncheck.reports.summary import headline
from attncheck.spec.classes import ROUNDING_PRESETS, rounding_model_named, validate_class_name
from attncheck.spec.rounding import GRIDS, SCALE_FORMATS, Quantization
from attncheck.spec.verdicts import Verdict

PER = ("none", "tensor", "head", "row", "channel", "rows", "columns", "rows of a channel")
INT8 = "fused with key int8 per 64 rows"


def test_a_class_is_composed_of_its_parts_and_is_otherwise_the_one_that_it_is_like() -> None:
    fused = rounding_model_named("fused", "float16")

    def changed(name: str) -> dict[str, Any]:
        found = rounding_model_named(name, "float16")
        assert found.rounding_model == name
        values = {each.name: getattr(found, each.name) for each in fields(found)}
        return {each: value for each, value in values.items() if value != getattr(fused, each)} | {"rounding_model": ""}

    def only(**fields: Any) -> dict[str, Any]:
        return {"rounding_model": "", **fields}

    assert changed("tanh_approx") == only(tanh_error=2.0**-11)
    assert changed("fused with exp 0.25") == only(exp_error=pytest.approx(np.log(4 / 3)))
    in_half = {"accumulate_unit": 2.0**-11, "accumulate_underflow": 2.0**-25, "largest_sum": 65504.0}
    assert changed("fused with sums float16") == only(**in_half)
    cut = {"accumulate_unit": 2.5 * 2.0**-24, "cuts_sums": True}
    assert changed("fused with sums cut at 26 bits") == only(**cut)
    promoted = {"accumulate_unit": 2.0**-12 + 2.0**-24, "sum_length": 128.0, "promoted_unit": 2.0**-24}
    assert changed("fused with sums cut at 14 bits per 128 products") == only(**cut | promoted)
    assert changed("fused with weights int8") == only(weight_step=1 / 254)
    assert changed(INT8) == only(quantized_operands=(("key", Quantization(GRIDS["int8"], "rows", 64)),))
    eight = {"weight_unit": 2.0**-4, "weight_step": 2.0**-10}
    per_query = Quantization(GRIDS["int8"], "rows of a channel", 16, subtracts_mean=True, mean_block_rows=128)
    assert changed("fused with query int8 per 16 rows of a channel less mean of 128 rows") == only(
        quantized_operands=(("query", per_query),)
    )
    assert changed("fused_fp8") == changed("fused with weights float8_e4m3fn") == only(**eight)
    for name in ROUNDING_PRESETS:
        assert rounding_model_named(name, "bfloat16").rounding_model == name


def test_a_class_is_declared_by_its_name_or_by_its_parts() -> None:
    for given_class, name in (
        ("fused", "fused"),
        ("flash4", "flash4"),
        ({"like": "fused", "tanh": "2^-11"}, "fused with tanh 2^-11"),
        ({"like": "eager", "exp": 0.001, "sums": "float16"}, "eager with exp 0.001 and sums float16"),
        ({"like": "fused", "key": "int8 per 64 rows  less mean"}, f"{INT8} less mean"),
    ):
        assert validate_class_name(given_class, "float16") == name
    for wrong, message in tables_beside(__file__)["no_classes"]:
        with pytest.raises(ValueError, match=re.escape(message)):
            validate_class_name(wrong, "float16")


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(GRIDS)),
    st.sampled_from(PER),
    st.booleans(),
    st.sampled_from(sorted(SCALE_FORMATS)),
)
def test_codes_with_scales_stay_within_their_error(
    seed: int, grid: str, per: str, is_centred: bool, scale_in: str
) -> None:
    random = np.random.default_rng(seed)
    shape = (2, 2, int(random.integers(1, 9)), int(random.integers(1, 7)))
    array = (random.normal(size=shape) * 10.0 ** random.uniform(-2, 3) + 5 * random.normal(size=shape[-1])).astype("f4")
    array[..., 0] *= 10.0 ** int(random.integers(0, 4))
    array = np.clip(array, -1.5e5, 1.5e5)  # above, less a mean, a scale in float16 overflows
    quantization = Quantization(GRIDS[grid], per, int(random.integers(1, 5)), is_centred, scale_in)
    mean = array.mean(axis=-2, keepdims=True) if is_centred else np.zeros((), np.float32)
    found = codes_with_scales(array - mean, quantization).astype(np.float64) + mean
    rounding = replace(rounding_model_named("fused", "float16"), quantized_operands=(("key", quantization),))
    operand = quantize_operand("key", Operand(array.astype(np.float64)), rounding)
    assert operand.max_error is not None
    assert (np.abs(found - array) <= operand.max_error).all()
    assert quantize_operand("query", operand, rounding) is operand


def test_right_kernels_hold_the_class_that_they_declare_and_are_told_of_without_it() -> None:
    offenders, told = [], set()
    for name, kernel in {**KERNELS, **OF_16_BITS}.items():
        traded: Any = kernel
        for turn in range(12):
            random = np.random.default_rng(turn)
            keys, width, options = 5 + 23 * turn, (8, 16, 64)[turn % 3], {"is_causal": True} if turn % 2 else {}
            options |= {"softcap": 3.0} if turn % 4 < 2 else {}
            dtype = "float16" if turn % 3 else "bfloat16"
            shapes = {"query": (1, 2, 7, width), "key": (1, 2, keys, width), "value": (1, 2, keys, 6)}
            inputs = {each: random.normal(size=shape) for each, shape in shapes.items()}
            inputs["key"] += 2 * random.normal(size=width)
            problem = Problem("attention", options, inputs).stored(dtype)
            output, log_sum_exp = traded.kernel(**problem.inputs, **options)
            stages = {"output": output, "log_sum_exp": log_sum_exp}
            judged = problem.judged(stages, dtype, traded.classes[dtype])
            offenders += [(name, turn, each) for each in judged.judgements if each.verdict is not Verdict.AGREE]
            if name not in told:
                undeclared = problem.judged(stages, dtype, "fused")
                told |= {name for each in undeclared.judgements if each.verdict is not Verdict.AGREE}
    assert offenders == []
    assert told == set(KERNELS)


def test_what_queries_and_keys_have_in_common_is_given_back() -> None:
    shapes = {"query": (1, 2, 150, 16), "key": (1, 2, 40, 16), "value": (1, 2, 40, 6)}
    for name, of_query, of_keys in (("sage1", 2, 200), ("sage3", 20, 5)):
        random = np.random.default_rng(6)
        direction = np.abs(random.normal(size=16))
        inputs = {each: random.normal(size=shape) for each, shape in shapes.items()}
        inputs["query"] += of_query * direction
        inputs["key"] += of_keys * direction
        problem = Problem("attention", {"scale": 0.03}, inputs).stored("float16")
        kernel: Any = KERNELS[name]
        for is_given_back in (True, False):
            output, log_sum_exp = kernel.kernel(**problem.inputs, scale=0.03, is_given_back=is_given_back)
            judged = problem.judged({"output": output, "log_sum_exp": log_sum_exp}, "float16", name).judgements
            assert all(each.verdict is Verdict.AGREE for each in judged) == is_given_back, name
    # Within a whole block, codes are finer by as much as the mean takes away.
    query = Operand(problem.inputs["query"].astype(np.float64))
    errors = quantize_operand("query", query, rounding_model_named("sage3", "float16")).max_error
    assert errors is not None
    assert 5 * errors[..., :128, :].mean() < errors[..., 128:, :].mean()


def test_a_mean_moves_furthest_where_weights_are_at_their_ends() -> None:
    random = np.random.default_rng(8)
    logits, value = random.normal(size=(1, 2, 3, 7)), random.normal(size=(1, 2, 7, 2))
    logits[0, 0, 1, 3:] = -np.inf
    error = logits_from_values(logits, np.abs(random.normal(size=logits.shape)))
    both = softmax(logits)
    rows, mean = compute_softmax_error(error, *both, rounding_model_named("fused", "float16")), both.weights @ value
    largest = np.zeros_like(mean)
    for signs in itertools.product((-1, 1), repeat=7):
        weights = rows.weights * np.exp(rows.max_exponent_error * signs)
        largest = np.maximum(largest, np.abs(weights @ value / weights.sum(axis=-1, keepdims=True) - mean))
    np.testing.assert_allclose(max_mean_change(rows, value, mean), largest, rtol=1e-9)


def test_sums_of_8_bits_that_are_not_promoted_are_found_over_many_keys() -> None:
    random = np.random.default_rng(5)
    shapes = {"query": (1, 1, 1, 8), "key": (1, 1, 1 << 15, 8), "value": (1, 1, 1 << 15, 3)}
    inputs = {name: random.normal(size=shape) for name, shape in shapes.items()}
    inputs["value"] = np.abs(inputs["value"])
    problem = Problem("attention", {}, inputs).stored("float16")
    eight = "fused with value float8_e4m3fn per head and weights float8_e4m3fn and sums "
    for promoted, held in (
        (128, {"cut at 14 bits per 128 products": True}),
        (np.inf, {"cut at 14 bits per 128 products": False, "cut at 14 bits": True, "float32": False}),
    ):
        product = tensor_core(14, 32, promoted)
        kernel: Any = declared(f"{eight}float32", product=product, weights_in="float8_e4m3fn")
        stages = {"output": kernel(**problem.inputs)}
        for sums, holds in held.items():
            (judged,) = problem.judged(stages, "float16", eight + sums).judgements
            assert (judged.verdict is Verdict.AGREE) == holds, (promoted, sums, judged)


def test_operands_of_products_on_the_way_back_are_held_to_their_codes() -> None:
    operands = ("grad_output", "backward_value", "backward_weights", "grad_scores", "backward_query", "backward_key")
    offenders = []
    for turn, codes in enumerate(("int8 per 64 rows", "float8_e4m3fn per head", "int8 per head scaled in float16") * 3):
        random, keys = np.random.default_rng(turn), (5, 64, 130)[turn // 3]
        shapes = {"query": (1, 2, 70, 16), "key": (1, 2, keys, 16), "value": (1, 2, keys, 6)}
        inputs = {each: random.normal(size=shape) for each, shape in shapes.items()}
        inputs["grad_output"] = random.normal(size=(1, 2, 70, 6)) + turn % 2
        problem = Problem("attention_gradients", {}, inputs).stored("float16")
        name = "fused with " + " and ".join(f"{operand} {codes}" for operand in operands)
        stored = dict(rounding_model_named(name, "float16").quantized_operands)
        for coding, holds in ((codes_with_scales, True), (_with_the_scales_of_the_next_head, False)):
            found = gradients(**problem.inputs, stored=stored, coding=coding)
            verdicts = {each.stage: each.verdict for each in problem.judged(found, "float16", name).judgements}
            offenders += [(turn, stage) for stage, found in verdicts.items() if (found is Verdict.AGREE) != holds]
    assert offenders == []


def _with_the_scales_of_the_next_head(array: Any, quantization: Quantization) -> Any:
    scales = scales_of(array * [[[1.0]], [[3.0]]], quantization)
    return codes_of(array / scales, quantization.grid) * np.roll(scales, 1, axis=1)


def test_what_is_traded_without_being_declared_is_named_by_its_accuracy() -> None:
    sums: Any = declared("fused with sums float16", product=product_in_float16)
    for kernel, name in (
        (KERNELS["tanh_approx"], "approximate-tanh"),
        (KERNELS["flash3_fp8"], "fp8-operands"),
        (sums, "float16-sums"),
    ):
        traded: Any = kernel
        random, fits = np.random.default_rng(7), set[str]()
        for keys in (40, 90):
            shapes = {"query": (1, 2, 9, 64), "key": (1, 2, keys, 64), "value": (1, 2, keys, 8)}
            inputs = {each: 2 * random.normal(size=shape) for each, shape in shapes.items()}
            problem = Problem("attention", {"softcap": 3.0}, inputs).stored("float16")
            output, log_sum_exp = traded.kernel(**problem.inputs, softcap=3.0)
            stages = {"log_sum_exp": log_sum_exp} if name == "approximate-tanh" else {"output": output}
            fits |= {each.name for each in problem.judged(stages, "float16", "fused").findings.matches}
        assert f"accuracy-of-{name}" in fits, fits


# Which classes hold for an implementation.


def test_the_tightest_class_that_holds_is_the_one_that_a_kernel_is_right_to() -> None:
    kernels = Path(traded_kernels.__file__)
    cases = small_cases(select_cases(["attention", "half_precision", "values"]).cases)
    for name, wrong, tightest in (  # of few rows, blocks of rows hold what blocks of columns hold
        ("sage1", "fused", "llama_q8_0"),
        ("flash3_fp8", "sage1", "flash3_fp8"),
        ("flash4", "", "fused"),
    ):
        found = measure_accuracy(own(f"{kernels}:{name}"), cases, "float16", Limits())
        uses = {each.name: each for each in found.classes}
        assert found.is_measured
        assert found.holds_declared == (not found.wrong_anyhow)
        assert found.declared == name
        assert 0 < uses[name].used < 1
        assert found.tightest == tightest
        if wrong:
            assert uses[wrong].wrong
            assert uses[wrong].used > 1
            # An infinity leaves those that share its scale no code, whatever is permitted.
            assert any("infinity" in each for each in found.wrong_anyhow)
        else:  # an output alone does not show a cubic
            assert '  attention.classes = {"float16": "fused"}' in format_accuracy(found)


def test_the_first_line_names_what_a_verdict_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, cases = (
        f"{traded_kernels.__file__}:tanh_approx",
        ["attention/logits-of-eighty-*", "attention/an-explicit-*"],
    )
    for dtype, held in (("float16", ", held to tanh_approx in float16"), ("float32", "")):
        frames = check(target, cases=cases, dtypes=[dtype]).frames
        assert headline(frames) == f"traded_kernels.tanh_approx agrees with the exact answer{held}"
