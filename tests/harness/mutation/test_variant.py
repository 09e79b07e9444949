"""Variants are the backend's own code, with some of its steps replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend, Stages
from attncheck.execution.operations import apply_layout, run_operation
from attncheck.execution.worker import Task
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.variant import Call, PerCall, Variant, numpy_with, within

Array = NDArray[Any]

RNG = np.random.default_rng(20170612)
QUERY, KEY, VALUE = (RNG.normal(size=(2, 4, 3, 5)), *(RNG.normal(size=(2, 2, 6, 5)) for _ in range(2)))
GRAD_OUTPUT = RNG.normal(size=(2, 4, 3, 5))


def doubled(query: Array, key: Array) -> Array:
    return 2 * numpy_backend._dot(query, key)


@pytest.mark.parametrize("variant", [Variant(), Kernel(lambda store: {})])
def test_a_variant_has_the_contracts_functions_with_their_parameters(variant: Variant) -> None:
    contract = {name: member for name, member in vars(Backend).items() if inspect.isfunction(member) and name[0] != "_"}
    assert len(contract) == 23
    for name, member in contract.items():
        assert _parameters(getattr(variant, name)) == _parameters(member)[1:], name


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


def test_a_variant_with_nothing_replaced_is_the_backend_bit_for_bit(tasks: dict[str, Task]) -> None:
    for name, task in tasks.items():
        with np.errstate(all="ignore"):
            given = task.operation, apply_layout(task.inputs, task.memory_layout), task.options
            got, wanted = (run_operation(each, *given) for each in (Variant(), numpy_backend))
        assert list(got) == list(wanted), name
        for stage in wanted:
            np.testing.assert_array_equal(got[stage], wanted[stage], err_msg=f"{name}, {stage}", strict=True)


def test_a_step_is_replaced_wherever_it_is_used_or_in_one_function_alone() -> None:
    everywhere, in_one = Variant({"_dot": doubled}), Variant({"dot_scores._dot": doubled})
    right = numpy_backend.cosine_scores(QUERY, QUERY)["scores"]
    assert np.array_equal(everywhere.cosine_scores(QUERY, QUERY)["scores"], 2 * right)
    assert np.array_equal(in_one.cosine_scores(QUERY, QUERY)["scores"], right)
    raw = numpy_backend.attention(QUERY, KEY, VALUE)["raw_scores"]
    assert np.array_equal(in_one.attention(QUERY, KEY, VALUE)["raw_scores"], 2 * raw)
    gradients = (each.attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT) for each in (numpy_backend, everywhere))
    assert not np.allclose(*(each["grad_query"] for each in gradients))


def test_functions_with_steps_of_their_own_see_each_other() -> None:
    both = Variant(
        {"_softmax_with_sinks.np": numpy_with(exp=np.exp2), "attention._weighted_sum": lambda weights, value: weights}
    )
    stages = both.attention(QUERY, KEY, VALUE)
    np.testing.assert_array_equal(stages["output"], stages["weights"])
    assert not np.allclose(stages["weights"], numpy_backend.attention(QUERY, KEY, VALUE)["weights"])


def test_the_backend_itself_stays_as_it_is() -> None:
    wanted = numpy_backend.attention(QUERY, KEY, VALUE)["output"]
    Variant({"softmax": None, "_dot": None, "attention.mask_scores": None})
    np.testing.assert_array_equal(numpy_backend.attention(QUERY, KEY, VALUE)["output"], wanted)


def test_a_step_that_would_change_nothing_is_refused() -> None:
    for step, message in (
        ("_no_such_step", "no function _no_such_step"),
        ("no_such_function._dot", "no function no_such_function"),
        ("mask_scores._dot", "mask_scores of numpy_backend uses no _dot"),
    ):
        with pytest.raises(KeyError, match=message):
            Variant({step: doubled})
    with pytest.raises(KeyError, match="attention of numpy_backend uses no _dot"):
        Variant({"attention": PerCall(lambda call: {"_dot": doubled})}).attention(QUERY, KEY, VALUE)


def test_steps_may_follow_from_what_a_function_is_called_with() -> None:
    seen: list[Call] = []

    def steps_of(call: Call) -> dict[str, Any]:
        seen.append(call)
        return {"mask_scores": lambda scores, **masks: {"masked": np.where(call.is_causal, -np.inf, scores)}}

    variant = Variant({"attention": PerCall(steps_of)})
    assert np.isneginf(variant.attention(QUERY, KEY, VALUE, is_causal=True)["masked"]).all()
    assert np.isfinite(variant.attention(QUERY, KEY, VALUE, scale=0.5)["masked"]).all()
    variant.attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT, softcap=2.0)
    assert [call.is_causal for call in seen] == [True, False, False]
    assert [call.factor for call in seen] == [1 / np.sqrt(5), 0.5, 1 / np.sqrt(5)]
    assert [call.softcap for call in seen] == [None, None, 2.0]
    assert all(call.has_groups and call.past == 0 and call.scores_shape == (2, 4, 3, 6) for call in seen)


def test_a_call_knows_the_variants_own_forward_pass() -> None:
    stages: list[Stages] = []

    def remembered(call: Call) -> dict[str, Any]:
        stages.append(call.stages)
        assert np.array_equal(call.logits, call.masked)
        assert np.array_equal(call.log_sum_exp[..., 0], call.stages["log_sum_exp"])
        return {}

    mask = RNG.random((2, 1, 3, 6)) < 0.7
    variant = Variant({"dot_scores._dot": doubled, "attention_gradients": PerCall(remembered)})
    variant.attention_gradients(QUERY, KEY, VALUE, GRAD_OUTPUT, mask=mask)
    wanted = variant.attention(QUERY, KEY, VALUE, mask=mask)
    assert list(stages[0]) == list(wanted)
    for stage in wanted:
        np.testing.assert_array_equal(stages[0][stage], wanted[stage])


def test_what_is_hidden_is_not_returned_and_still_computed() -> None:
    variant = Variant(hidden=frozenset({"weights", "raw_scores"}))
    wanted = numpy_backend.attention(QUERY, KEY, VALUE)
    got = variant.attention(QUERY, KEY, VALUE)
    assert list(got) == ["scores", "log_sum_exp", "output"]
    np.testing.assert_array_equal(got["output"], wanted["output"])


def test_a_name_means_something_else_within_a_function_alone() -> None:
    halved = within(numpy_backend.dot_scores, _scale_of=lambda query, scale: 0.5)
    assert np.array_equal(halved(QUERY, QUERY)["scores"], halved(QUERY, QUERY)["raw_scores"] / 2)
    assert numpy_backend._scale_of(QUERY, None) == 1 / np.sqrt(5)
