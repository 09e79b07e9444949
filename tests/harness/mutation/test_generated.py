"""Faults that follow from the specification: an option or an input that nobody has thought of has them by its row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Window
from attncheck.mutation.catalogue import (
    BY_HAND,
    MET,
    MUTANTS,
    arguments_of,
    faults_of,
    of_input,
    of_option,
)
from attncheck.mutation.kernel import argument_read_as
from attncheck.mutation.mutant import Variant
from attncheck.spec import OPERATIONS, OptionSpec
from attncheck.spec.inputs import optional


def test_a_new_option_has_its_faults_by_its_row() -> None:
    temperature = OptionSpec("A number that divides the logits.", positive=True, type=float)
    assert [fault.name for fault in of_option(temperature)] == ["left_out", "taken_twice"]
    edges = [fault.change((2, None)) for fault in of_option(OptionSpec("A second window.", type=Window))]
    assert edges == [None, (3, None), (1, None), (2, None), (2, None), (None, 2)]


def test_a_new_input_has_its_faults_by_its_row() -> None:
    names = {fault.name for fault in of_input(optional("B", "H", "Lq"))}
    assert names >= {"left_out", "neutral", "taken_twice", "of_the_next_head", "with_head_and_query_exchanged"}
    assert names.isdisjoint({"zero", "inverted", "one_more"})


def test_an_operation_that_takes_one_more_argument_has_faults_of_it() -> None:
    attention = OPERATIONS["attention"]
    scales = optional("H", neutral=1)
    wider = replace(attention, inputs={**attention.inputs, "head_scales": scales})
    found = {fault.name for fault in faults_of(wider, "head_scales", scales)}
    assert found >= {"left_out", "neutral", "taken_twice", "negated", "in_bfloat16", "of_the_next_head"}
    assert "head_scales" not in dict(arguments_of(wider)), "the NumPy backend does not take it yet"


def test_an_argument_is_changed_where_it_is_given() -> None:
    query = np.arange(6.0).reshape(1, 1, 2, 3)
    variant = Variant(argument_read_as("dot_scores", "scale", lambda scale: 2 * scale))
    for scale, factor in ((None, 1), (0.5, 2)):
        right = numpy_backend.dot_scores(query, query, scale=scale)["scores"]
        assert np.array_equal(variant.dot_scores(query, query, scale=scale)["scores"], factor * right)


def test_every_operation_has_faults_and_none_has_two_of_a_name() -> None:
    generated = [fault for fault in MUTANTS if fault.of is not None]
    assert {fault.of[0] for fault in generated if fault.of} == set(OPERATIONS)
    met = [fault for fault in generated if fault in BY_HAND]
    assert {fault.name for fault in met} == MET.keys()
    assert len({fault.name for fault in MUTANTS}) == len(MUTANTS) == len(BY_HAND) + len(generated) - len(met)
