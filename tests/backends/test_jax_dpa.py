"""``jax.nn.dot_product_attention``, called directly and compiled: what it is asked, and what it documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.backends import BACKENDS, PADDED_BY, numpy_backend
from attncheck.execution.limits import Limits
from attncheck.execution.operations import parameters_of, run_operation
from attncheck.execution.runner import Group, GroupRunner
from attncheck.execution.worker import Computed, Task
from attncheck.explain import find_implementation

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(not BACKENDS["jax"].is_installed, reason="jax is not installed"),
]

Judge = Callable[..., dict[str, str]]

RNG = np.random.default_rng(2137)
INPUTS = {
    "query": RNG.normal(size=(2, 4, 3, 6)),
    "key": RNG.normal(size=(2, 2, 5, 6)),
    "value": RNG.normal(size=(2, 2, 5, 6)),
}
MASKS = {
    "mask": np.array([True, True, False, True, True, True, True, True, True, True]).reshape(2, 1, 1, 5),
    "bias": RNG.normal(size=(1, 4, 1, 5)),
    "key_lengths": np.array([5, 3]),
}
PAST = {"past_key": RNG.normal(size=(2, 2, 2, 6)), "past_value": RNG.normal(size=(2, 2, 2, 6))}
GRAD_OUTPUT = {"grad_output": RNG.normal(size=(2, 4, 3, 6))}

CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plainly": ("attention", INPUTS, {}),
    "causal": ("attention", INPUTS, {"is_causal": True}),
    "window": ("attention", INPUTS, {"window": (1, 0)}),
    "window without an end": ("attention", INPUTS, {"window": (None, 1)}),
    "window without a beginning": ("attention", INPUTS, {"window": (0, None)}),
    "key lengths": ("attention", {**INPUTS, "key_lengths": np.array([2, 4])}, {}),
    "all together": ("attention", {**INPUTS, **MASKS}, {"scale": 0.3, "is_causal": True, "window": (2, 1)}),
    "past": ("attention", {**INPUTS, **PAST, "key_lengths": np.array([7, 3])}, {}),
    "gradients": ("attention_gradients", {**INPUTS, **MASKS, **GRAD_OUTPUT}, {"scale": 0.3, "window": (2, 1)}),
}

# The softmax is computed in float32 whatever the inputs are; see the review of https://github.com/jax-ml/jax/pull/34112
DOUBLE = pytest.param("float64", marks=pytest.mark.xfail(reason="a float64 softmax is computed in float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", DOUBLE])
@pytest.mark.parametrize("call", CALLS)
def test_the_call_agrees_with_the_exact_answer(judge_mode: Judge, call: str, dtype: str) -> None:
    operation, *_ = CALLS[call]
    verdicts = judge_mode("jax.dpa", dtype, *CALLS[call])
    assert set(verdicts.values()) == {"agree"}, verdicts
    wanted = {"grad_query", "grad_key", "grad_value", "grad_bias"}
    assert set(verdicts) == ({"log_sum_exp", "output"} if operation == "attention" else wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", ["all together", "past", "gradients"])
def test_the_compiled_call_agrees_with_the_exact_answer(judge_mode: Judge, call: str, dtype: str) -> None:
    verdicts = judge_mode("jax.dpa_jit", dtype, *CALLS[call])
    assert set(verdicts.values()) == {"agree"}, verdicts


@pytest.mark.parametrize("mode", ["jax.dpa", "jax.dpa_jit"])
@pytest.mark.parametrize(("narrow", "padded"), [(("value", "grad_output"), "Dv"), (("query", "key"), "D")])
def test_values_of_another_width_than_the_keys_are_padded(
    mode: str, narrow: tuple[str, ...], padded: str, tmp_path: Path
) -> None:
    given = {name: array.astype(np.float32) for name, array in {**INPUTS, **GRAD_OUTPUT}.items()}
    given |= {name: given[name][..., :5] for name in narrow}
    runner: GroupRunner[str] = GroupRunner(Group(find_implementation(mode), ("float32",)), Limits(), tmp_path)
    right = {}
    try:
        for operation in ("attention_gradients", "attention"):
            inputs = {name: array for name, array in given.items() if name != "grad_output" or "grad" in operation}
            outcome = runner.evaluate(Task(operation, {}, inputs))
            right |= run_operation(numpy_backend, operation, inputs, {})
            assert isinstance(outcome, Computed), outcome
            assert outcome.padded == f"zero columns ({padded} 5 to 6)"
            for stage, array in outcome.stages.items():
                np.testing.assert_allclose(array, right[stage], rtol=1e-4, atol=1e-5, err_msg=stage)
    finally:
        runner.close()


def test_a_window_behind_a_past_is_refused_because_the_call_counts_from_the_first_key(judge_mode: Judge) -> None:
    with pytest.raises(NotImplementedError, match="does not count a past"):
        judge_mode("jax.dpa", "float32", "attention", {**INPUTS, **PAST}, {"window": (2, 1)})


def test_there_is_no_softcap(judge_mode: Judge) -> None:
    with pytest.raises(NotImplementedError, match="takes no softcap"):
        judge_mode("jax.dpa", "float32", "attention", INPUTS, {"softcap": 30.0})


@pytest.mark.parametrize("how", ["mask", "key_lengths"])
def test_a_row_without_a_key_attends_to_all_of_them_alike_as_is_known(
    how: str, given_without_a_key: Callable[[str, str], dict[str, str]]
) -> None:
    from attncheck.backends import jax_dpa

    assert given_without_a_key("jax.dpa", "float32") == {"empty_rows": "uniform"}
    value = np.arange(24, dtype=np.float32).reshape(1, 1, 4, 6)  # the mean of 4 whole numbers is exact
    arrays = {"query": value[:, :, :2] / 8, "key": value / 8, "value": value}
    forbidden = {"mask": np.zeros((1, 1, 1, 1), dtype=bool), "key_lengths": np.array([0])}[how]
    tensors = {name: jax_dpa.from_numpy(array) for name, array in {**arrays, how: forbidden}.items()}
    output = jax_dpa.to_numpy(jax_dpa.attention(**tensors)["output"])
    np.testing.assert_array_equal(output, np.broadcast_to(value.mean(axis=2, keepdims=True), (1, 1, 2, 6)))


def test_versions_that_return_no_log_sum_exp_return_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from attncheck.backends import jax_dpa

    def older(*arrays: Any, **options: Any) -> Any:
        assert "return_residual" not in options
        return called(*arrays, **options)

    called = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", older)
    monkeypatch.setattr(jax_dpa, "_HAS_RESIDUAL", False)
    tensors = {name: jax_dpa.from_numpy(array.astype(np.float32)) for name, array in INPUTS.items()}
    stages = jax_dpa.attention(**tensors)
    assert list(stages) == ["output"]
    right = run_operation(numpy_backend, "attention", INPUTS, {})["output"]
    np.testing.assert_allclose(jax_dpa.to_numpy(stages["output"]), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["jax_dpa", "jax_dpa_jit"])
def test_what_requires_shapes_takes_what_pads_to_them(name: str) -> None:
    from importlib import import_module

    module = import_module(f"attncheck.backends.{name}")
    for function in (module.attention, module.attention_gradients):
        assert parameters_of(function).accepted(PADDED_BY) == PADDED_BY
