"""ONNX's Attention, by onnxruntime and by the standard's own evaluator: formula, stages, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES, numpy_backend

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(8068)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D 4, whose scale of 1/2 is exact, Dv 6.
INPUTS = {"query": normal(2, 4, 3, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 6)}
MASK = RNG.random((2, 1, 1, 5)) < 0.7
MASK[..., 0] = True
BIAS = normal(1, 4, 3, 1)
LENGTHS = np.array([3, 5])
PAST = {"past_key": normal(2, 2, 4, 4), "past_value": normal(2, 2, 4, 6)}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "causal": (INPUTS, {"is_causal": True, "scale": 0.25}),
    "masked and biased": ({**INPUTS, "mask": MASK, "bias": BIAS}, {}),
    "capped": ({**INPUTS, "bias": BIAS}, {"softcap": 1.5}),
    "lengths": ({**INPUTS, "key_lengths": LENGTHS}, {}),
    "lengths and causal": ({**INPUTS, "key_lengths": LENGTHS}, {"is_causal": True}),
    "behind a past": ({**INPUTS, **PAST}, {"window": (None, 0)}),
    "behind a past with lengths": ({**INPUTS, **PAST, "key_lengths": LENGTHS + 3}, {}),
}
WINDOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": (INPUTS, {"window": (1, 1)}),
    "a window behind a past": ({**INPUTS, **PAST}, {"window": (2, None)}),
    "a window and lengths": ({**INPUTS, "key_lengths": LENGTHS}, {"window": (1, 0)}),
}
PAGED = {
    "query": normal(2, 4, 3, 4),
    "key_pages": normal(5, 2, 2, 4),
    "value_pages": normal(5, 2, 2, 6),
    "block_table": np.array([[3, 0, 99], [4, 1, 2]]),
    "key_lengths": np.array([4, 5]),
}


def implementation(name: str) -> Any:
    library = name.partition(".")[0]
    missing = pytest.mark.skipif(not LIBRARIES[library].is_installed, reason=f"{library} is not installed")
    return pytest.param(name, marks=[getattr(pytest.mark, library), missing])


KERNEL, FUNCTION, REFERENCE = (
    implementation(name) for name in ("onnxruntime.attention", "onnxruntime.function", "onnx.reference")
)
EACH = (KERNEL, FUNCTION, REFERENCE)


def asked(name: str, operation: str, inputs: dict[str, Any], **options: Any) -> dict[str, NDArray[Any]]:
    """Call a mode's function in float32."""
    library, _, mode = name.partition(".")
    backend: Any = LIBRARIES[library].load(mode)
    backend.prepare("float32", 1)
    arrays = {each: array.astype(np.float32) if array.dtype.kind == "f" else array for each, array in inputs.items()}
    found: dict[str, NDArray[Any]] = getattr(backend, operation)(**arrays, **options)
    return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", EACH)
def test_the_operator_is_the_formula(judge_mode: Judge, name: str, call: str) -> None:
    assert judge_mode(name, "float32", "attention", *CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize("call", WINDOWS)
@pytest.mark.parametrize("name", [FUNCTION, REFERENCE])
def test_windows_came_with_opset_25(judge_mode: Judge, name: str, call: str) -> None:
    assert judge_mode(name, "float32", "attention", *WINDOWS[call]) == {"output": "agree"}


@pytest.mark.parametrize("name", [KERNEL, FUNCTION])
@pytest.mark.parametrize("call", ["plainly", "causal", "masked and biased", "capped", "lengths"])
def test_float16_rounds_as_declared(judge_mode: Judge, name: str, call: str) -> None:
    assert judge_mode(name, "float16", "attention", *CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("onnxruntime", "onnx")]
)
def test_each_output_mode_hands_out_its_stage(judge_mode: Judge, library: str) -> None:
    inputs, options = {**INPUTS, "bias": BIAS}, {"softcap": 1.5}
    prefix = "" if library == "onnxruntime" else "reference_"
    for mode, stage in (("capped", "capped"), ("masked", "biased"), ("weights", "weights")):
        found = judge_mode(f"{library}.{prefix}{mode}", "float32", "attention", inputs, options)
        assert found == {stage: "agree", "output": "agree"}
    found = judge_mode(f"{library}.{prefix}scores", "float32", "attention", {**INPUTS, "bias": BIAS}, {})
    assert found == {"scores": "agree", "output": "agree"}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["plainly", "causal"])
@pytest.mark.parametrize("name", EACH)
def test_an_external_cache_counts_from_its_end(judge_mode: Judge, name: str, options: dict[str, Any]) -> None:
    assert judge_mode(name, "float32", "paged_attention", PAGED, options) == {"output": "agree"}


@pytest.mark.parametrize("name", EACH)
def test_what_pages_hold_behind_the_keys_that_are_used_is_not_read(name: str) -> None:
    spoilt = PAGED["key_pages"].copy()
    spoilt[2, 1] = np.nan  # the sixth key of the second sequence, of which five are used
    expected = asked(name, "paged_attention", PAGED)["output"]
    np.testing.assert_array_equal(asked(name, "paged_attention", {**PAGED, "key_pages": spoilt})["output"], expected)


@pytest.mark.parametrize("name", EACH)
def test_a_query_without_a_key_gets_zeros(name: str) -> None:
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    output = asked(name, "attention", {**INPUTS, "mask": mask})["output"]
    assert (output[1, :, 2] == 0).all()
    expected = numpy_backend.attention(**INPUTS)["output"]
    np.testing.assert_allclose(output[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        pytest.param(*KERNEL.values, {"window": (1, 1)}, "since opset 25", marks=KERNEL.marks),
        pytest.param(*KERNEL.values, {"scale": -1.0}, "root of the scale", marks=KERNEL.marks),
        pytest.param(*REFERENCE.values, {"scale": 0.0}, "root of the scale", marks=REFERENCE.marks),
    ],
)
def test_what_the_operator_cannot_express_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        asked(name, "attention", INPUTS, **options)


@pytest.mark.parametrize("name", [FUNCTION, REFERENCE])
def test_an_attribute_that_is_no_float32_is_refused_in_float64(name: str) -> None:
    library, _, mode = name.partition(".")
    backend: Any = LIBRARIES[library].load(mode)
    with pytest.raises(NotImplementedError, match="is a float32"):
        backend.attention(**INPUTS, scale=0.77)
    assert backend.attention(**INPUTS, scale=0.75)["output"].dtype == np.float64


@pytest.mark.onnxruntime
@pytest.mark.parametrize(("mode", "reason"), [("capped", "without a softcap"), ("masked", "without a mask")])
def test_a_stage_that_a_call_does_not_compute_is_none(mode: str, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        asked(f"onnxruntime.{mode}", "attention", INPUTS)
