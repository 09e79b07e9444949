"""The decorators that put subjects into the catalogue."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import (
    EVERY,
    Control,
    Equivalent,
    Mutant,
    control,
    equivalent,
    mutant,
    subjects_of_module,
)
from attncheck.mutation.variant import Steps, Variant

Array = NDArray[Any]

SCORES = np.array([[[[0.0, 1.0]]]])


@mutant("softcap", "_cap", at="capped", defect="no cap", diagnosis="softcap-ignored")
def uncapped(scores: Array, softcap: float) -> Array:
    return scores


def _doubled(step: Any) -> Steps:
    return {"_cap": lambda scores, softcap: step(scores, 2 * softcap)}


mutant("softcap", _doubled, at="capped", defect="another cap", dtypes=("float64",), name="cap_of_two")(np.minimum)
control(why="nothing is replaced", hidden=frozenset({"log_sum_exp"}), name="same")({})


@control(Kernel, why="nothing is replaced between the ends")
def widened(store: Any) -> Steps:
    return {}


equivalent(defect="none", proof="nothing is replaced", name="nothing")({})


def test_subjects_are_those_of_a_module_in_the_order_of_its_lines() -> None:
    found = subjects_of_module(__name__)
    assert [each.name for each in found] == ["uncapped", "cap_of_two", "same", "widened", "nothing"]
    assert [type(each) for each in found] == [Mutant, Mutant, Control, Control, Equivalent]
    assert subjects_of_module("no.such.module") == ()


def test_what_a_decorator_says_is_what_the_subject_says() -> None:
    first, second, *_ = subjects_of_module(__name__)
    assert isinstance(first, Mutant)
    assert isinstance(second, Mutant)
    assert (first.topic, first.first_wrong_stage, first.defect) == ("softcap", "capped", "no cap")
    assert (first.dtypes, first.diagnosis) == (EVERY, ("softcap-ignored",))
    assert (second.dtypes, second.diagnosis) == (("float64",), ())


def test_a_form_is_a_steps_name_or_makes_steps_or_a_variant_or_is_left_out() -> None:
    first, second, same, kernel, _ = subjects_of_module(__name__)
    one = np.full((1, 1, 1, 1), 3.0)
    assert first.backend.dot_scores(one, one, softcap=2.0)["capped"] == 9
    assert second.backend.dot_scores(one, one, softcap=2.0)["capped"] == 4
    assert list(same.backend.softmax(SCORES)) == ["weights"]
    assert isinstance(kernel.backend, Kernel)
    assert not isinstance(same.backend, Kernel)
    assert isinstance(same.backend, Variant)


def test_what_is_decorated_stays_what_it_is() -> None:
    assert uncapped(SCORES, 1.0) is SCORES
