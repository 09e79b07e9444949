"""Facts of a backend that no check of its numbers sees: names, order, conversion, dtypes, and the order of stages."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from inspect import signature
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from problems import draw

from attncheck.backends import ALL_ENTRIES, BACKENDS, BackendEntry, derived, numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.operations import run_operation
from attncheck.reading.shapes import axis_lengths, stage_shapes
from attncheck.spec import computed_stages

Run = Callable[..., dict[str, NDArray[Any]]]
SERVICES = {"prepare", "describe", "from_numpy", "to_numpy"}
RNG = np.random.default_rng(20170612)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 3, Lq 4, Lk 5, D 6, Dv 7; models 11, 9 and 10 wide, projected to 13.
QUERY, KEY, VALUE = normal(2, 3, 4, 6), normal(2, 3, 5, 6), normal(2, 3, 5, 7)
MASK, BIAS = RNG.random(size=(2, 1, 1, 5)) < 0.7, normal(1, 3, 4, 1)
PROJECTED = {
    **{"query": normal(2, 4, 11), "key": normal(2, 5, 9), "value": normal(2, 5, 10)},
    **{"query_weight": normal(11, 18), "key_weight": normal(9, 18), "value_weight": normal(10, 21)},
    **{"query_bias": normal(18), "key_bias": normal(18), "value_bias": normal(21)},
}
SCORES = (2, 3, 4, 5)
CALLS = (
    *("dot", "general, bias", "additive, bias", "cosine", "softmax", "masking, bias", "masking, all", "attention"),
    *("attention, all", "attention, past", "layer, all", "gradients", "gradients, all", "gate"),
    "gate, rotary gradients",
)
"""Small problems with every stage, whose names and shapes follow from the specification."""


def _entries() -> list[Any]:
    params = []
    for entry in ALL_ENTRIES.values():
        marks = [getattr(pytest.mark, entry.name)] if entry.name != "numpy" else []
        params.append(pytest.param(entry, marks=marks, id=entry.name))
    return params


@pytest.mark.parametrize("entry", [param for param in _entries() if param.id in BACKENDS])
def test_modes_have_the_contracts_functions_parameters_and_order(entry: BackendEntry) -> None:
    wanted = {name: signature(function) for name, function in vars(Backend).items() if not name.startswith("_")}
    assert [*wanted] == [*derived.SERVICES, *derived.FUNCTIONS]  # those that are composed and compiled
    for mode in entry.modes:
        with mock.patch.dict(os.environ, entry.environment):
            backend = entry.load(mode.name)
        found = {name: signature(getattr(backend, name)) for name in wanted if hasattr(backend, name)}
        assert set(found) > SERVICES  # and at least one operation
        # It says whether packed sequences have to become a mask.
        assert mode.folds_sequences == ("attention" in found and "packed_attention" not in found), mode.name
        for name, own in found.items():
            of_contract = wanted[name].parameters
            assert list(own.parameters) == [each for each in of_contract if each in own.parameters], (mode.name, name)
            for parameter in own.parameters.values():
                other = of_contract[parameter.name]
                assert parameter.kind == other.kind, (mode.name, name, parameter)
                optional = parameter.default is not parameter.empty
                assert optional == (other.default is not other.empty), (mode.name, name, parameter)


def test_a_backend_describes_itself_in_words_and_was_prepared_for_one_thread(setting: Any) -> None:
    description = setting.backend.describe()
    assert {"version", "device"} <= set(description)
    assert all(isinstance(value, str) and value for value in description.values())
    assert description.get("threads", "1") == "1"


VIEWS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "whole": lambda array: array,
    "negative strides": lambda array: array[:, ::-1, ::-2],
    "transposed": lambda array: array.swapaxes(0, 2),
    "broadcast": lambda array: np.broadcast_to(array[:, :1], array.shape),
    "empty": lambda array: array[:, :, :0],
    "rank 0": lambda array: array[0, 0, 0],
}


@pytest.mark.parametrize("entry", [param for param in _entries() if param.id in BACKENDS])
def test_arrays_come_back_with_dtype_shape_and_numbers(entry: BackendEntry, prepared: Callable[..., Any]) -> None:
    special = [0.1, -0.0, np.inf, -np.inf, np.nan, 1e-30, *range(18)]
    for dtype in entry.classes:
        with prepared(entry, dtype) as setting:
            numbers = np.array(special).astype(setting.dtype).reshape(2, 3, 4)
            flags = np.arange(24).reshape(2, 3, 4) % 3 == 0
            for name, view in VIEWS.items():
                for array in map(np.asarray, (view(numbers), view(flags))):
                    back = setting.backend.to_numpy(setting.backend.from_numpy(array))
                    assert (back.dtype, back.shape) == (array.dtype, array.shape), name
                    assert back.tobytes() == array.tobytes(), name
            lengths = np.array([5, 0, 2**31 - 1], dtype=np.int64)
            back = setting.backend.to_numpy(setting.backend.from_numpy(lengths))
            assert np.issubdtype(back.dtype, np.signedinteger)
            np.testing.assert_array_equal(back, lengths)
            if setting.dtype.itemsize == 2:
                bits = np.arange(2**16, dtype=np.uint16)
                with np.errstate(invalid="ignore"):  # a signalling NaN is among them
                    numbers = bits.view(setting.dtype)[~np.isnan(bits.view(setting.dtype))]
                back = setting.backend.to_numpy(setting.backend.from_numpy(numbers))
                assert back.dtype == setting.dtype
                np.testing.assert_array_equal(back.view(np.uint16), numbers.view(np.uint16))


def test_stages_come_in_order_with_their_shapes_and_dtype(setting: Any, run: Run) -> None:
    for name in CALLS:
        problem = draw(name).stored(str(setting.dtype)).as_call()
        with np.errstate(invalid="ignore"):  # of sinks of minus infinity
            stages = run_operation(setting.backend, problem.operation, problem.inputs, problem.options)
        arrays = {stage: setting.backend.to_numpy(tensor) for stage, tensor in stages.items()}
        given = {each: array.shape for each, array in problem.inputs.items()}
        shapes = stage_shapes(problem.operation, axis_lengths(problem.operation, problem.options, given))
        shapes |= {f"grad_{each}": shape for each, shape in given.items()}
        wanted = [(each, shapes[each]) for each in computed_stages(problem.operation, problem.options, given)]
        # jax.jit returns them in the order of their names.
        found = [(stage, array.shape) for stage, array in arrays.items()]
        assert found == (sorted(wanted) if setting.name == "jax" else wanted), name
        assert {array.dtype for array in arrays.values()} == {setting.dtype}, name
    assert run("mask_scores", np.zeros(SCORES)) == run("mask_scores", np.zeros(SCORES), mask_fill=-1e9) == {}


def test_no_operation_writes_into_the_arrays_that_it_is_given(setting: Any) -> None:
    backend: Backend = setting.backend
    given = [array.astype(setting.dtype) for array in (QUERY, KEY, VALUE, np.broadcast_to(BIAS, SCORES))]
    kept = [array.copy() for array in given]
    query, key, value, bias = (backend.from_numpy(array) for array in given)
    options = {"mask": backend.from_numpy(MASK), "is_causal": True, "softcap": 2.0}
    backend.attention(query, key, value, bias=bias, **options)
    backend.attention_gradients(query, key, value, value[:, :, :4], bias=bias, **options)
    for array, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_what_may_not_be_attended_changes_no_bit(run: Run) -> None:
    """Where a check allows the numbers to move within their bounds."""
    mask = np.ones((2, 1, 1, 5), dtype=bool)
    mask[0, ..., 2] = False
    garbage, key, value = RNG.uniform(-1e6, 1e6, 13), KEY.copy(), VALUE.copy()
    for forbidden in (np.s_[0, :, 2], np.s_[1, :, 3], np.s_[:, :, 4]):  # masked, beyond the length, in the future
        key[forbidden], value[forbidden] = garbage[:6], garbage[6:]
    options = {"mask": mask, "is_causal": True, "key_lengths": np.array([5, 3])}
    before, after = (run("attention", QUERY, *pair, **options) for pair in ((KEY, VALUE), (key, value)))
    for stage in ("weights", "log_sum_exp", "output"):
        np.testing.assert_array_equal(after[stage], before[stage], err_msg=stage)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, which is what is asked for
def test_a_score_of_nan_or_infinity_shows_in_its_own_row_at_every_place_and_in_no_other(run: Run) -> None:
    """In rows longer than a vector register: a vectorised maximum may lose a NaN in some lanes only."""
    scores = np.zeros((1, 1, 19, 9))
    scores[0, 0, :9], scores[0, 0, 9:18] = 0.5, -np.inf
    for place in range(9):
        scores[0, 0, [place, 9 + place], place] = np.nan
    stages = run("softmax", scores)
    # TensorFlow's float32 kernel confines the NaN to its own weight; all others spread it over the row.
    assert np.isnan(stages["weights"][np.isnan(scores)]).all()
    assert np.isnan(stages["log_sum_exp"][0, 0]).tolist() == [True] * 18 + [False]
    assert not np.isnan(stages["weights"][0, 0, 18]).any()
    stages = run("softmax", np.array([[[[0.0, np.inf, 1.0]]]]))
    np.testing.assert_array_equal(stages["log_sum_exp"], [[[np.inf]]])
    assert np.isnan(stages["weights"][0, 0, 0, 1])


def test_an_equal_shift_and_an_empty_past_change_no_bit_and_an_output_bias_without_a_weight_is_refused(
    run: Run,
) -> None:
    # Quarters plus 8 are exact in bfloat16, so that who subtracts the maximum sees the same differences.
    scores = np.array([[[[0.25, -1.5, 3.0, 0.0, 2.75]]]])
    before, after = (run("softmax", each)["weights"] for each in (scores, scores + 8))
    np.testing.assert_array_equal(after, before)
    past = {"past_key": KEY[:, :, :0], "past_value": VALUE[:, :, :0]}
    with_past, without = run("attention", QUERY, KEY, VALUE, **past), run("attention", QUERY, KEY, VALUE)
    np.testing.assert_array_equal(with_past["output"], without["output"])
    with pytest.raises(ValueError, match="output_bias needs output_weight"):
        run("multi_head_attention", **PROJECTED, output_bias=normal(13), heads=3)


@pytest.mark.parametrize("factor", [1e-309, 1e-160, 1e160, 1e307])
def test_the_reference_knows_the_angle_of_vectors_whose_squares_no_number_holds(factor: float) -> None:
    query, key = np.array([[[[3.0, 4.0]]]]), np.array([[[[4.0, 3.0], [-3.0, -4.0]]]])
    found = numpy_backend.cosine_scores(query, key * factor)["scores"]
    # Of 1e-309 subnormal numbers hold 14 bits less than others.
    np.testing.assert_allclose(found, [[[[0.96, -1.0]]]], rtol=1e-12)


@pytest.mark.torch
def test_a_torch_tensor_has_the_strides_and_the_memory_of_its_array(recwarn: pytest.WarningsRecorder) -> None:
    backend: Any = BACKENDS["torch"].load()
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_):
        for view in (np.s_[...], np.s_[..., ::2], np.s_[:, :1]):
            array = np.arange(24).reshape(2, 3, 4).astype(dtype)[view]
            array = np.broadcast_to(array, (2, 3, 4)) if view == np.s_[:, :1] else array
            for each in (array, array.transpose(0, 2, 1)):
                tensor = backend.from_numpy(each)
                assert tensor.data_ptr() == each.__array_interface__["data"][0]
                assert tuple(stride * each.itemsize for stride in tensor.stride()) == each.strides
    assert not recwarn.list  # of read-only arrays
    # A vector too short for functional.normalize has a direction all the same: 3 of 5, four roundings.
    tiny, one = np.array([[[[3e-13, 4e-13]]]]), np.array([[[[1.0, 0.0]]]])
    scores = backend.cosine_scores(backend.from_numpy(tiny), backend.from_numpy(one))["scores"]
    np.testing.assert_allclose(backend.to_numpy(scores), [[[[0.6]]]], rtol=4 * 2.0**-53)


# bfloat16 and float16, where a backend declares them: sums accumulate in float32. That is the class ``eager`` of
# docs/numerics.md, section 3. A sum that stays in bfloat16 sticks at 256, where adding 1 changes nothing, and one that
# stays in float16 at 2048.

LENGTH = 4096
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def test_sums_of_sixteen_bits_add_up_in_float32(half_setting: Any, run_half: Run) -> None:
    ones = np.ones((1, 1, 1, LENGTH))
    scores = run_half("dot_scores", ones, ones, scale=1.0)["raw_scores"]
    assert float(scores[0, 0, 0, 0]) == LENGTH
    flat, column = np.zeros((1, 1, LENGTH, 1)), np.ones((1, 1, LENGTH, 1))
    # 4,096 weights of 2^-12 and as many values of 1.
    assert float(run_half("attention", np.zeros((1, 1, 1, 1)), flat, column)["output"][0, 0, 0, 0]) == 1

    stages = run_half("softmax", np.zeros((1, 1, 1, LENGTH)))
    np.testing.assert_array_equal(stages["weights"].astype(np.float64), np.full((1, 1, 1, LENGTH), 1 / LENGTH))
    unit = UNITS[str(half_setting.dtype)]
    # A logarithm near 8.3 that is rounded once or twice.
    np.testing.assert_allclose(stages["log_sum_exp"].astype(np.float64), math.log(LENGTH), rtol=4 * unit, atol=0)
    # One key, whose weight is 1 in 4,096 rows.
    query, one, grad_output = np.zeros((1, 1, LENGTH, 2)), np.ones((1, 1, 1, 2)), np.ones((1, 1, LENGTH, 2))
    found = run_half("attention_gradients", query, one, one, grad_output)
    np.testing.assert_array_equal(found["grad_value"].astype(np.float64), np.full((1, 1, 1, 2), LENGTH))


# Weights of 1/2, and with these values logits whose gradients are 1/2 and -1/2.
TWO_KEYS = {"key": np.zeros((1, 1, 2, 1)), "value": np.array([1.0, -1.0]).reshape(1, 1, 2, 1)}


@pytest.fixture
def run_outer_sums(half_setting: Any, run_half: Run, request: pytest.FixtureRequest) -> Run:
    """Return ``run_half`` where sums over an axis that is not the last are known to add up in float32, or not to."""
    if half_setting.name == "tensorflow" and str(half_setting.dtype) == "float16":
        # tf.reduce_sum(tf.fill((4096, 2), tf.cast(0.5, tf.float16)), axis=0) is [1024, 1024]:
        # https://github.com/tensorflow/tensorflow/issues/123299
        request.applymarker(pytest.mark.xfail(reason="tf.reduce_sum adds up float16 in float16"))
    return run_half


def test_the_gradient_of_a_bias_and_of_a_value_that_heads_share_adds_up_in_float32(run_outer_sums: Run) -> None:
    rows = {"query": np.zeros((1, 1, LENGTH, 1)), "grad_output": np.ones((1, 1, LENGTH, 1))}
    found = run_outer_sums("attention_gradients", **rows, **TWO_KEYS, bias=np.zeros((1, 1, 1, 2)))
    np.testing.assert_array_equal(found["grad_bias"].astype(np.float64).ravel(), [LENGTH / 2, -LENGTH / 2])
    heads = {"query": np.zeros((1, LENGTH, 1, 1)), "grad_output": np.ones((1, LENGTH, 1, 1))}
    found = run_outer_sums("attention_gradients", **heads, **TWO_KEYS)
    np.testing.assert_array_equal(found["grad_value"].astype(np.float64).ravel(), [LENGTH / 2, LENGTH / 2])
