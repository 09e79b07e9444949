"""What implementations do instead of the norms of queries and keys that a case means, as people are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.judge_implementation import diagnose_case
from attncheck.judging.truth import find_truth
from attncheck.mutation.catalogue import MUTANTS, variant_named

Array = NDArray[Any]
NAMED = [(mutant.name, mutant.diagnosis[0]) for mutant in MUTANTS if mutant.topic == "norms" and mutant.diagnosis]


def drawn() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    return {
        "query": rng.standard_normal((2, 4, 5, 6)) * np.array([0.1, 1, 9, 3]).reshape(-1, 1, 1),
        "key": rng.standard_normal((2, 2, 6, 6)) * np.array([0.3, 4]).reshape(-1, 1, 1),
        "value": rng.standard_normal((2, 2, 6, 4)),
        "rotary_cos": rng.uniform(-1, 1, (6, 2)),
        "rotary_sin": rng.uniform(-1, 1, (6, 2)),
    }


def posed(name: str, diagnosis: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Pose a problem that shows a fault: in a full width, with lengths, or the rotation first, where it is of those."""
    inputs, options, rng = drawn(), {"epsilon": 0.5}, np.random.default_rng(6)
    is_full = name == "a_head_for_the_full_width"
    if is_full:
        options["norm_over"] = "full"
    for each, width in (("query", 24), ("key", 12)):
        inputs[f"{each}_norm_weight"] = rng.uniform(0.3, 3, width if is_full else 6)
    of_length = {"epsilon_as_the_least_square", "epsilon_under_the_root_of_a_length", "root_mean_square_for_length"}
    if name in of_length:
        options |= {"norm": "l2", "epsilon": 2.0}
    if name == "norm_before_the_rotation":
        options["norm_after_rotation"] = True
    return options, inputs


@pytest.mark.parametrize(("name", "diagnosis"), NAMED)
def test_a_fault_of_a_norm_is_named(name: str, diagnosis: str) -> None:
    options, inputs = posed(name, diagnosis)
    truth = find_truth("normalized_attention", options, inputs, "float64", supports_statistics=True)
    returned = variant_named(name).normalized_attention(**inputs, **options)
    failed = {
        stage: array
        for stage, array in returned.items()
        if (np.abs(array - truth.exact[stage].high) > truth.bounds("native")[stage].max_error).any()
    }
    right = {stage: array for stage, array in returned.items() if stage not in failed}
    assert failed
    found = diagnose_case(truth, failed, "native", right)
    assert [each.name for each in found.fits] == [diagnosis]


def test_weights_that_are_not_given_are_not_taken_for_one_plus_anything() -> None:
    inputs = {name: array for name, array in drawn().items() if not name.startswith("rotary")}
    truth = find_truth("normalized_attention", {}, inputs, "float64", supports_statistics=True)
    returned = variant_named("norm_left_out").normalized_attention(**inputs)
    failed = {name: returned[name] for name in ("normalized_query", "normalized_key", "scores", "output")}
    found = diagnose_case(truth, failed, "native")
    assert [each.name for each in found.fits] == ["norm-ignored"]
    assert not any("weight" in name for name in found.refuted)
