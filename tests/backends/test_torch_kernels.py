"""torch's own kernels and modules: against NumPy's backend, which is the paper's formula, and what only they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, numpy_backend

TORCH = BACKENDS["torch"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not TORCH.is_installed, reason="torch is not installed"),
]

Run = Callable[..., dict[str, NDArray[Any]]]

RNG = np.random.default_rng(2205)
DTYPES = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def eighths(*shape: int) -> NDArray[Any]:
    """Draw numbers of at most 1 that are the same in all four dtypes."""
    return RNG.integers(-8, 9, size=shape) / 8


def caller(mode: str, dtype: str) -> Run:
    """Return what calls a mode's function with NumPy arrays and gives its stages back as float64."""
    backend = TORCH.load(mode)

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return backend.from_numpy(value if value.dtype in (bool, np.int64) else value.astype(DTYPES[dtype]))

    def call(operation: str, **inputs: Any) -> dict[str, NDArray[Any]]:
        stages = getattr(backend, operation)(**{name: convert(name, value) for name, value in inputs.items()})
        arrays = {name: backend.to_numpy(stage) for name, stage in stages.items()}
        assert {array.dtype for array in arrays.values()} == {np.dtype(DTYPES[dtype])}
        return {name: array.astype(np.float64) for name, array in arrays.items()}

    return call


# B 2, H 6 in 3 groups, Lq 4, Lk 5, D 7.
INPUTS = {"query": eighths(2, 6, 4, 7), "key": eighths(2, 3, 5, 7), "value": eighths(2, 3, 5, 7)}
MASK = np.array([True, True, False, True, True, True, False, True, True, True]).reshape(2, 1, 1, 5)
BIAS = eighths(1, 6, 4, 1)
LENGTHS = np.array([4, 2])
PAST = {"past_key": eighths(2, 3, 3, 7), "past_value": eighths(2, 3, 3, 7)}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "narrow values": {"value": INPUTS["value"][..., :3]},
    "one head per query head": {name: INPUTS[name][:, [0, 0, 1, 1, 2, 2]] for name in ("key", "value")},
    "scale": {"scale": 0.75},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS},
    "mask and bias": {"mask": MASK, "bias": BIAS},
    "window": {"window": (1, 0)},
    "lengths": {"key_lengths": LENGTHS},
    "past and window": {**PAST, "window": (2, None)},
    "mask, bias, window, lengths": {"mask": MASK, "bias": BIAS, "window": (None, 1), "key_lengths": LENGTHS},
}

# Entries are at most 1 and 7 wide: 150 u as in test_attention.py, where everything is in the format itself. In 16 bits
# the weights and the output are rounded, and nothing before them: 4 u. A wrong mask, head or scale is off by 1e-1.
TOLERANCES = {"float64": 150, "float32": 150, "bfloat16": 4, "float16": 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("mode", ["sdpa", "sdpa_math"])
def test_scaled_dot_product_attention_is_the_formula(mode: str, options: dict[str, Any], dtype: str) -> None:
    inputs = {**INPUTS, **options}
    found, expected = caller(mode, dtype)("attention", **inputs), numpy_backend.attention(**inputs)["output"]
    assert list(found) == ["output"]
    np.testing.assert_allclose(found["output"], expected, rtol=0, atol=TOLERANCES[dtype] * UNITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "lengths", "mask, bias, window, lengths"])
@pytest.mark.parametrize("mode", ["sdpa", "sdpa_math"])
def test_its_gradients_are_those_of_the_formula(mode: str, name: str, dtype: str) -> None:
    inputs = {**INPUTS, "grad_output": eighths(2, 6, 4, 7), **OPTIONS[name]}
    found, expected = caller(mode, dtype)("attention_gradients", **inputs), numpy_backend.attention_gradients(**inputs)
    assert list(found) == list(expected)
    for stage, gradient in expected.items():
        # Of a weight at most 7, and at most 8 rows or keys of them add up: 56 times what a weight is off by.
        atol = 56 * TOLERANCES[dtype] * UNITS[dtype]
        np.testing.assert_allclose(found[stage], gradient, rtol=0, atol=atol, err_msg=stage)


@pytest.mark.parametrize("mode", ["sdpa", "sdpa_math"])
def test_a_query_that_may_attend_nothing_gets_zeros_and_gives_no_gradient(mode: str) -> None:
    run, inputs = caller(mode, "float32"), {**INPUTS, "key_lengths": np.array([0, 2]), "bias": BIAS}
    assert (run("attention", **inputs)["output"][0] == 0).all()
    gradients = run("attention_gradients", **inputs, grad_output=eighths(2, 6, 4, 7))
    assert all((gradients[f"grad_{name}"][0] == 0).all() for name in ("query", "key", "value"))


def test_each_mode_runs_its_kernel() -> None:
    names = []
    for mode in ("sdpa", "sdpa_math", "sdpa_flash"):
        backend = TORCH.load(mode)
        tensors = {name: backend.from_numpy(array).requires_grad_() for name, array in INPUTS.items()}
        names.append(backend.attention(**tensors)["output"].grad_fn.name())
    assert ["FlashAttention" in name for name in names] == [True, False, True]


def test_the_math_kernel_refuses_a_mask_beside_causality_and_the_other_takes_both() -> None:
    inputs = {**INPUTS, "mask": MASK, "is_causal": True}
    with pytest.raises(NotImplementedError, match="attn_mask or is_causal, not both"):
        caller("sdpa_math", "float64")("attention", **inputs)
    found, expected = caller("sdpa", "float64")("attention", **inputs), numpy_backend.attention(**inputs)
    np.testing.assert_allclose(found["output"], expected["output"], rtol=0, atol=150 * UNITS["float64"])


@pytest.mark.parametrize(
    ("operation", "changed"),
    [
        ("attention", {"value": INPUTS["value"][..., :3]}),
        ("attention_gradients", {"bias": BIAS, "grad_output": eighths(2, 6, 4, 7)}),
    ],
)
def test_the_flash_kernel_by_itself_refuses_what_it_cannot_compute(operation: str, changed: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="flash kernel"):
        caller("sdpa_flash", "float32")(operation, **{**INPUTS, **changed})
    assert caller("sdpa", "float32")(operation, **{**INPUTS, **changed})


def test_another_mistake_is_not_taken_for_something_unsupported() -> None:
    with pytest.raises(RuntimeError):
        caller("sdpa", "float64")("attention", **{**INPUTS, "key": eighths(2, 3, 5, 6)})


# B 2, H 2, Lq 4, Lk 5, D 3: E is 6 wherever the module has one width.
CROSS = {"query": eighths(2, 4, 6), "key": eighths(2, 5, 7), "value": eighths(2, 5, 9)}
CROSS_WEIGHTS = {"query_weight": eighths(6, 6), "key_weight": eighths(7, 6), "value_weight": eighths(9, 6)}
MODEL = eighths(2, 4, 6)
SELF = {"query": MODEL, "key": MODEL, "value": MODEL}
SELF_WEIGHTS = {f"{name}_weight": eighths(6, 6) for name in ("query", "key", "value")}
OUTPUT_WEIGHT = {"output_weight": eighths(6, 6) / 4}
BIASES = {f"{name}_bias": eighths(6) for name in ("query", "key", "value", "output")}
HEADS_MASK = RNG.random(size=(2, 2, 4, 4)) < 0.6
HEADS_MASK[..., 0] = True
MHA_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "mask of every head": {"mask": HEADS_MASK},
    "mask of one row": {"mask": np.array([True, False, True, True]).reshape(1, 1, 1, 4)},
    "lengths": {"key_lengths": np.array([3, 1])},
    "mask, lengths and causal": {"mask": HEADS_MASK, "key_lengths": np.array([3, 1]), "is_causal": True},
    "window and causal": {"window": (1, None), "is_causal": True},
}
MODES = ("mha", "mha_weights", "mha_fast")

# Projections are exact in sixty-fourths and below 8, a score is below 3 * 8^2 / sqrt(3) and off by 110 (3 + 3) u, a
# weight by twice that, and 4 values below 8 add up, projected by 6 weights below 1/4: 6e4 u. Typical errors are a
# hundredth of it; a wrong head or mask is off by 1e-1.
MHA_TOLERANCE = 1000


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("options", MHA_OPTIONS.values(), ids=MHA_OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_self_attention_of_the_module_is_the_formula(mode: str, options: dict[str, Any], dtype: str) -> None:
    inputs = {**SELF, **SELF_WEIGHTS, **OUTPUT_WEIGHT, **BIASES, **options, "heads": 2}
    found, expected = (
        caller(mode, dtype)("multi_head_attention", **inputs),
        numpy_backend.multi_head_attention(**inputs),
    )
    assert list(found) == (["weights", "output"] if mode == "mha_weights" else ["output"])
    for stage, array in found.items():
        np.testing.assert_allclose(array, expected[stage], rtol=0, atol=MHA_TOLERANCE * UNITS[dtype], err_msg=stage)


@pytest.mark.parametrize("biases", [{}, BIASES, {"value_bias": BIASES["value_bias"]}], ids=["no", "all", "one"])
@pytest.mark.parametrize("mode", ["mha", "mha_weights"])
def test_cross_attention_of_the_module_with_a_bias_and_lengths_is_the_formula(
    mode: str, biases: dict[str, Any]
) -> None:
    options = {"bias": eighths(1, 2, 4, 1), "mask": MASK, "key_lengths": LENGTHS, "heads": 2}
    inputs = {**CROSS, **CROSS_WEIGHTS, **OUTPUT_WEIGHT, **biases, **options}
    found, expected = (
        caller(mode, "float64")("multi_head_attention", **inputs),
        numpy_backend.multi_head_attention(**inputs),
    )
    np.testing.assert_allclose(found["output"], expected["output"], rtol=0, atol=MHA_TOLERANCE * UNITS["float64"])


@pytest.mark.parametrize(("mode", "taken"), [("mha", 0), ("mha_weights", 0), ("mha_fast", 1)])
def test_only_the_fast_mode_takes_the_fast_path(mode: str, taken: int) -> None:
    import torch

    inputs = {**SELF, **SELF_WEIGHTS, **OUTPUT_WEIGHT, **BIASES, "heads": 2, **MHA_OPTIONS["mask, lengths and causal"]}
    with mock.patch.object(torch, "_native_multi_head_attention", wraps=torch._native_multi_head_attention) as fast:
        caller(mode, "float32")("multi_head_attention", **inputs)
    assert fast.call_count == taken


@pytest.mark.parametrize("mode", MODES)
def test_a_query_that_may_attend_nothing_gets_what_is_declared_or_known_of_the_mode(
    mode: str, given_without_a_key: Callable[[str, str], dict[str, str]]
) -> None:
    mask = np.array([True, False, True, True]).reshape(1, 1, 4, 1)
    inputs = {**SELF, **SELF_WEIGHTS, **OUTPUT_WEIGHT, **BIASES, "mask": mask, "heads": 2}
    output = caller(mode, "float64")("multi_head_attention", **inputs)["output"]
    if given_without_a_key(f"torch.{mode}", "float64") == {"empty_rows": "nan"}:
        assert np.isnan(output[:, 1]).all()
    else:
        np.testing.assert_array_equal(output[:, 1], np.broadcast_to(BIASES["output_bias"], (2, 6)))
    assert np.isfinite(output[:, [0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("mode", "changed", "reason"),
    [
        ("mha", {"output_weight": None}, "always has an output projection"),
        ("mha_weights", {"value_weight": eighths(6, 8)}, "H Dv"),
        ("mha", {"output_weight": eighths(6, 5)}, "output's width"),
        ("mha_fast", {"key": MODEL + 1}, "one tensor"),
        ("mha_fast", dict.fromkeys(BIASES), "biases"),
        ("mha_fast", {"heads": 3}, "even number of heads"),
        ("mha_fast", {"bias": eighths(1, 1, 4, 4)}, "boolean masks alone"),
    ],
)
def test_what_the_module_cannot_express_is_refused_with_the_reason(
    mode: str, changed: dict[str, Any], reason: str
) -> None:
    inputs = {**SELF, **SELF_WEIGHTS, **OUTPUT_WEIGHT, **BIASES, "heads": 2, **changed}
    with pytest.raises(NotImplementedError, match=reason):
        caller(mode, "float64")("multi_head_attention", **inputs)


@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
def test_no_keys_give_zeros(operation: str) -> None:
    inputs = {**INPUTS, **{name: INPUTS[name][:, :, :0] for name in ("key", "value")}, "bias": np.zeros((1, 6, 1, 0))}
    options = {"grad_output": eighths(2, 6, 4, 7)} if operation == "attention_gradients" else {}
    for mode in ("sdpa", "sdpa_math"):
        found = caller(mode, "float32")(operation, **inputs, **options)
        assert all((array == 0).all() for array in found.values())
        assert next(iter(found.values())).shape == (2, 6, 4, 7)
