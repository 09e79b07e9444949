"""A number in the place of masked scores: what is bounded, what goes back through it, and rows of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bound
from attncheck.attention.problem import Problem
from attncheck.attention.radii import propagate
from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.inputs import Inputs

Array = NDArray[Any]
MASK = np.array([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)[np.newaxis, np.newaxis]
NATIVE = rounding_model_named("native", "float32")


def drawn(dtype: type = np.float32, *, gradients: bool = False) -> dict[str, Array]:
    rng = np.random.default_rng(12)
    shapes = {"query": (2, 2, 3, 5), "key": (2, 2, 4, 5), "value": (2, 2, 4, 6)}
    shapes |= {"grad_output": (2, 2, 3, 6)} if gradients else {}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()} | {"mask": MASK}


def exact(operation: str, options: dict[str, Any], inputs: dict[str, Array]) -> dict[str, Array]:
    return {name: each.high for name, each in exact_stages(operation, options, inputs).items()}


def test_a_row_of_fills_has_the_same_weight_for_every_key() -> None:
    weights = exact("attention", {"mask_fill": -1e9}, drawn())["weights"]
    np.testing.assert_array_equal(weights[..., 2, :], 0.25)
    assert (weights[..., 0, 1] == 0).all()


def test_a_fill_of_ordinary_size_is_a_score_like_any_other() -> None:
    inputs = drawn(np.float64)
    found = exact("attention", {"mask_fill": -0.5}, inputs)
    logits = np.where(MASK, found["scores"], -0.5)
    powers = np.exp(logits)
    np.testing.assert_allclose(found["weights"], powers / powers.sum(axis=-1, keepdims=True), rtol=1e-14)


def test_a_fill_replaces_minus_infinity() -> None:
    scores = np.array([[[[-np.inf, 1.0], [-np.inf, -np.inf]]]])
    mask = np.array([[False, True], [True, False]])
    masked = exact("masking", {"mask_fill": -3.0}, {"scores": scores, "mask": mask})["masked"]
    np.testing.assert_array_equal(masked, [[[[-3.0, 1.0], [-np.inf, -3.0]]]])


@pytest.mark.parametrize("fill", [-1e9, -3.4028234663852886e38])
def test_a_row_of_fills_is_bounded_as_if_they_were_nothing(fill: float) -> None:
    inputs, options = drawn(), {"mask_fill": fill}
    bounds = accumulated_bounds("attention", options, inputs, NATIVE, exact("attention", options, inputs))
    assert bounds["weights"].max_error[..., 2, :].max() < 4e-6
    assert bounds["output"].max_error[..., 2, :].max() < 2e-5
    assert (bounds["log_sum_exp"].max_error[..., 2] >= 2.0**-24 * abs(fill)).all()


def test_a_stored_log_sum_exp_loses_what_a_row_of_fills_adds_up_to() -> None:
    inputs, options, stored = drawn(), {"mask_fill": -1e9}, rounding_model_named("native_lse", "float32")
    bounds = accumulated_bounds("attention", options, inputs, stored, exact("attention", options, inputs))
    assert bounds["output"].max_error[..., 2, :].min() > 0.1


def test_a_fill_in_base_two_is_multiplied_like_a_score() -> None:
    inputs, options = drawn(np.float16), {"mask_fill": -4.0}
    bounds = accumulated_bounds(
        "attention", options, inputs, rounding_model_named("fused", "float16"), exact("attention", options, inputs)
    )
    own = accumulated_bounds(
        "attention", options, inputs, rounding_model_named("eager", "float16"), exact("attention", options, inputs)
    )
    masked = ~np.broadcast_to(MASK, (2, 2, 3, 4))
    assert (bounds["masked"].max_error[masked] > 0).all()
    assert (own["masked"].max_error[masked] == 0).all()


@pytest.mark.parametrize("fill", [-1e9, -2.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
def test_numpy_is_within_the_bounds(operation: str, softcap: float | None, fill: float) -> None:
    inputs = drawn(gradients=operation == "attention_gradients")
    options = {"mask_fill": fill, **({} if softcap is None else {"softcap": softcap})}
    found = exact_stages(operation, options, inputs)
    bounds = accumulated_bounds(operation, options, inputs, NATIVE, {name: each.high for name, each in found.items()})
    got = getattr(numpy_backend, operation)(**inputs, **options)
    for stage, bound in bounds.items():
        error = np.abs(got[stage] - found[stage].high)
        assert (error <= bound.max_error).all(), stage


def test_what_follows_from_a_returned_fill_is_not_excused_by_its_size() -> None:
    inputs, options = drawn(), {"mask_fill": -1e9}
    returned = {"masked": numpy_backend.attention(**inputs, **options)["masked"]}
    truth = exact_from("attention", options, inputs, returned, "weights")
    assert truth is not None
    bound = introduced_bound("attention", options, inputs, NATIVE, returned, truth.high, "weights")
    assert bound is not None
    assert bound.max_error.max() < 1e-5


def test_no_gradient_goes_through_a_fill_and_values_have_theirs() -> None:
    inputs = drawn(np.float64, gradients=True)
    found = exact("attention_gradients", {"mask_fill": -1.0}, inputs)
    np.testing.assert_array_equal(found["grad_query"][..., 2, :], 0)
    step = 1e-6
    for name in ("query", "key", "value"):
        moved = np.zeros_like(inputs[name])
        moved[1, 1, 1, 2] = step
        up, down = (
            numpy_backend.attention(**{**_forward(inputs), name: inputs[name] + sign * moved}, mask_fill=-1.0)["output"]
            for sign in (1, -1)
        )
        slope = ((up - down) * inputs["grad_output"]).sum() / (2 * step)
        assert found[f"grad_{name}"][1, 1, 1, 2] == pytest.approx(slope, abs=1e-8)


def _forward(inputs: dict[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in inputs.items() if name != "grad_output"}


def test_a_printed_input_moves_no_fill() -> None:
    inputs = drawn(np.float64)
    radius = {name: np.full(array.shape, 0.01) for name, array in inputs.items() if name != "mask"}
    moved = propagate("attention", {"mask_fill": -7.0}, Inputs(inputs, radius))["masked"].radius
    masked = ~np.broadcast_to(MASK, moved.shape)
    assert (moved[masked] == 0).all()
    assert (moved[~masked] > 0).all()


@pytest.mark.parametrize(
    ("dtype", "fill"), [(np.float64, -1e-9), (np.float32, float(np.float32(-1e-9))), (np.float16, -0.0)]
)
def test_a_fill_is_rounded_to_the_dtype_and_handed_over_so(dtype: type, fill: float) -> None:
    for form in (call_form, canonical_form):
        assert form("attention", {"mask_fill": -1e-9}, drawn(dtype)).options["mask_fill"] == fill


def test_a_fill_beyond_the_dtype_is_minus_infinity() -> None:
    inputs = drawn(np.float16)
    posed = canonical_form("attention", {"mask_fill": -1e9}, inputs)
    assert "mask_fill" not in posed.options
    assert (exact("attention", posed.options, posed.inputs)["weights"][..., 2, :] == 0).all()


def test_every_key_takes_part_beside_a_fill() -> None:
    problem = Problem.of("attention", {"mask_fill": -1e9}, drawn())
    shape = (2, 2, 3, 4)
    assert problem.allowed(shape) is None
    assert not problem.unattended(shape).any()
    kept = problem.kept(shape)
    assert kept is not None
    np.testing.assert_array_equal(kept, np.broadcast_to(MASK, shape))
