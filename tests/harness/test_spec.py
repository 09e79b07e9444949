"""The specification: one table, which the contract, the readings and the documents are held against."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from attncheck.backends.contract import AXES, Backend
from attncheck.execution.operations import call_of
from attncheck.execution.signatures import FUNCTIONS, INPUTS, expected_signature
from attncheck.judging.conventions import conventions_of
from attncheck.reading.canonical import AttentionProblem
from attncheck.spec import (
    ASKED_BY,
    GRADIENTS,
    HEADS,
    IGNORABLE,
    OPERATIONS,
    OPTIONS,
    SCORE_SPECS,
    STAGE_SPECS,
    STAGES,
    InputSpec,
    Options,
    computed_stages,
    inputs_of,
    query_axis,
    result_stages,
)

KINDS = [(name, score) for name in OPERATIONS for score in (SCORE_SPECS if name == "scoring" else [None])]
EVERYTHING: dict[str, Any] = {"is_causal": True, "window": (1, 0), "softcap": 2.0}


def keywords_of(operation: str, score: str | None) -> frozenset[str]:
    """Return the options that reach the contract's function."""
    own = OPERATIONS[operation]
    named = own.options if score is None else SCORE_SPECS[score].options
    return frozenset(
        name for name in named if not OPTIONS[name].for_reading and (own.has_projections or name not in HEADS)
    )


@pytest.mark.parametrize(("operation", "score"), KINDS)
def test_the_contract_has_the_inputs_and_options_of_the_specification_and_no_others(
    operation: str, score: str | None
) -> None:
    function, _ = call_of(operation, {} if score is None else {"score": score})
    parameters = dict(list(inspect.signature(getattr(Backend, function)).parameters.items())[1:])
    inputs = {name: spec for name, spec in inputs_of(operation, score).items() if not spec.for_reading}
    assert set(parameters) == {*inputs, *keywords_of(operation, score)}
    for name, spec in inputs.items():
        assert parameters[name].default is (inspect.Parameter.empty if spec.required else None), name
    assert all(inputs[name].required for name in INPUTS[function])


def test_every_function_that_computes_is_an_operations_or_a_scores() -> None:
    others = {"prepare", "describe", "from_numpy", "to_numpy"}
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert set(FUNCTIONS) == public - others


def test_the_expected_signature_is_the_contracts() -> None:
    assert expected_signature("attention") == (
        "attention(query, key, value, *, mask=None, bias=None, sinks=None, rotary_cos=None, rotary_sin=None, "
        "rotary_interleaved=False, is_causal=False, scale=None, softcap=None, window=None, key_lengths=None, "
        "past_key=None, past_value=None, query_offsets=None, mask_fill=None, empty_rows='zero')"
    )


def test_axes_are_named_by_letters_that_are_declared() -> None:
    inputs = [axes for name, score in KINDS for axes in (spec.axes for spec in inputs_of(name, score).values())]
    others = [axes for own in OPERATIONS.values() for choices in own.stage_axes.values() for axes in choices]
    used = [*inputs, *others, *(spec.axes for spec in STAGE_SPECS.values())]
    assert {letter for axes in used for axis in axes for letter in axis.split("*")} == set(AXES)


def test_stages_come_in_the_order_of_computation() -> None:
    for own in OPERATIONS.values():
        assert list(own.stages) == sorted(own.stages, key=STAGES.index)
        assert own.stages == computed_stages(own.name, EVERYTHING, own.inputs) or own.name == "scoring"


def test_a_gradient_has_the_axes_of_its_input() -> None:
    inputs = OPERATIONS["attention_gradients"].inputs
    assert tuple(f"grad_{name}" for name, spec in inputs.items() if spec.differentiable) == GRADIENTS
    assert all(STAGE_SPECS[f"grad_{name}"].axes == spec.axes for name, spec in inputs.items() if spec.differentiable)


@pytest.mark.parametrize(
    ("stage", "axis"),
    [("query", -2), ("key", None), ("value", None), ("masked", -2), ("log_sum_exp", -1), ("output", -2), ("mine", -2)],
)
def test_the_axis_of_queries_is_counted_from_the_end(stage: str, axis: int | None) -> None:
    assert query_axis(stage) == axis


@pytest.mark.parametrize("stage", ASKED_BY)
def test_a_stage_is_computed_only_where_something_asks_for_it(stage: str) -> None:
    own = next(each for each in OPERATIONS.values() if stage in each.stages)
    required = [name for name, spec in own.inputs.items() if spec.required]
    assert stage not in computed_stages(own.name, {}, required)
    for name in ASKED_BY[stage]:
        options = {name: EVERYTHING[name]} if name in EVERYTHING else {}
        assert stage in computed_stages(own.name, options, [*required, name])


def test_what_a_result_needs_is_the_last_stage_but_for_gradients_and_softmax() -> None:
    inputs = OPERATIONS["attention_gradients"].inputs
    assert result_stages("attention_gradients", {}, inputs) == GRADIENTS
    assert result_stages("softmax", {}, ["scores"]) == ("weights",)
    assert result_stages("attention", {}, ["query", "key", "value"]) == ("output",)
    assert result_stages("scoring", {"softcap": 2.0}, ["query", "key"]) == ("capped",)


# Options.


def test_options_hold_what_is_given_alone() -> None:
    options = Options(scale=0.5, is_causal=False, window=(None, 2))
    assert dict(options) == {"scale": 0.5, "is_causal": False, "window": (None, 2)} == options
    assert (options.scale, options.softcap, options.get("softcap"), len(options)) == (0.5, None, None, 3)
    assert "softcap" not in options
    assert {**options, "scale": 1.0} == {"scale": 1.0, "is_causal": False, "window": (None, 2)}


@pytest.mark.parametrize("name", ["softcap", "scael", "__class__"])
def test_what_is_not_given_or_no_option_is_no_key(name: str) -> None:
    with pytest.raises(KeyError):
        Options(scale=1.0)[name]


def test_options_are_frozen_and_know_their_names() -> None:
    with pytest.raises(TypeError):
        Options(scael=2.0)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        Options().scale = 1.0  # type: ignore[misc]


def test_every_option_is_described_and_belongs_to_an_operation() -> None:
    assert [each.name for each in fields(Options)] == list(OPTIONS)
    assert {name for own in OPERATIONS.values() for name in own.options} == set(OPTIONS)
    assert all(spec.description.endswith(".") or "`" in spec.description for spec in OPTIONS.values())


# What follows.


def posed_with(name: str) -> AttentionProblem:
    """Return attention of two heads in which one input or option is given."""
    shapes = {"B": 1, "H": 2, "Hkv": 2, "Lq": 3, "Lk": 3, "T": 3, "D": 4, "Dv": 4}
    specs = OPERATIONS["attention"].inputs
    arrays: dict[str, Any] = {}
    for each, spec in specs.items():
        if spec.required or each == name:
            shape = tuple(shapes[letter] for letter in spec.axes)
            dtype = np.bool_ if spec.boolean else np.int64 if spec.whole else np.float64
            arrays[each] = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return AttentionProblem({name: EVERYTHING[name]} if name in EVERYTHING else {}, arrays)


@pytest.mark.parametrize("name", IGNORABLE)
def test_whatever_may_be_ignored_is_offered_as_ignored(name: str) -> None:
    posed = posed_with(name)
    (found,) = [each for each in conventions_of("attention", posed) if each.name.endswith("-ignored")]
    spec = IGNORABLE[name]
    assert found.stage == (spec.asks_for or "weights")
    assert str(spec.called) in found.description
    own = found.posed.inputs if isinstance(spec, InputSpec) else found.posed.options
    given = posed.inputs if isinstance(spec, InputSpec) else posed.options
    assert not np.array_equal(own.get(name), given[name])
