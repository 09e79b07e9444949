"""What a wrong merge of parts is recognised as: another base, an average, a part that is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends.numpy_backend import merge_states
from attncheck.judging.judge_implementation import judge_and_diagnose
from attncheck.judging.truth import find_truth
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]
SHAPES = {"weights": (2, 3, 5, 4), "log_sum_exp": (2, 3, 5), "output": (2, 3, 5, 6)}
RNG = np.random.default_rng(4)
OUTPUTS, TOTALS = RNG.standard_normal((4, 2, 3, 5, 6)), 3 * RNG.standard_normal((4, 2, 3, 5))
OF_SOME = np.where(np.arange(5) == 2, -np.inf, TOTALS)
"""Log-sum-exps of parts that are all empty for one query."""


def named(stages: Stages, base: str = "e", totals: Array = TOTALS) -> tuple[str, set[Verdict]]:
    inputs = {"outputs": OUTPUTS, "log_sum_exps": totals}
    truth = find_truth("merge_states", {"lse_base": base}, inputs, "float64", supports_statistics=True)
    judged = judge_and_diagnose(truth, stages, SHAPES, "native")
    wrong = {each.verdict for each in judged.judgements if each.verdict is not Verdict.AGREE}
    return judged.diagnosis.name if judged.diagnosis else "", wrong


def natural(stages: Stages) -> Stages:
    return stages | {"log_sum_exp": stages["log_sum_exp"] * np.log(2)}


@pytest.mark.parametrize(("base", "taken"), [("e", "2"), ("2", "e")])
def test_another_base_is_another_convention(base: str, taken: Any) -> None:
    name, verdicts = named(merge_states(OUTPUTS, TOTALS, lse_base=taken), base)
    assert (name, verdicts) == (f"lse-base-{taken}", {Verdict.SEMANTIC})


@pytest.mark.parametrize("hidden", [(), ("weights",), ("weights", "log_sum_exp")])
def test_the_base_is_named_by_the_output_alone(hidden: tuple[str, ...]) -> None:
    stages = {
        stage: array for stage, array in merge_states(OUTPUTS, TOTALS, lse_base="2").items() if stage not in hidden
    }
    assert named(stages)[0] == "lse-base-2"


def test_a_whole_that_is_returned_in_another_base_is_named() -> None:
    right, binary = merge_states(OUTPUTS, TOTALS), merge_states(OUTPUTS, TOTALS, lse_base="2")
    assert named(right | {"log_sum_exp": right["log_sum_exp"] / np.log(2)})[0] == "log-sum-exp-base-2"
    assert named(natural(binary), "2")[0] == "log-sum-exp-base-e"


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: merge_states(OUTPUTS, np.zeros_like(TOTALS)), "parts-averaged"),
        (lambda: merge_states(OUTPUTS[::-1], TOTALS), "parts-reversed"),
    ],
)
def test_other_weights_are_named_by_the_output(wrong: Callable[[], Stages], name: str) -> None:
    assert named({"output": wrong()["output"]}) == (name, {Verdict.NUMERIC})


def test_a_part_that_is_lost_is_named() -> None:
    lost = merge_states(OUTPUTS, np.concatenate([TOTALS[:-1], np.full_like(TOTALS[-1:], -np.inf)]))
    assert named(lost) == ("last-part-lost", {Verdict.NUMERIC})


def test_nan_where_every_part_is_empty_is_a_convention_of_rows_without_a_key() -> None:
    right = merge_states(OUTPUTS, OF_SOME)
    assert named(right, totals=OF_SOME) == ("", set())
    empty = (np.arange(5) == 2)[:, np.newaxis]
    spoilt = {stage: np.where(empty, np.nan, right[stage]) for stage in ("weights", "output")}
    assert named(right | spoilt, totals=OF_SOME) == ("empty-rows-nan", {Verdict.SEMANTIC})


def test_plus_infinity_where_every_part_is_empty_is_wrong() -> None:
    right = merge_states(OUTPUTS, OF_SOME)
    total = np.where(np.isneginf(right["log_sum_exp"]), np.inf, right["log_sum_exp"])
    assert named(right | {"log_sum_exp": total}, totals=OF_SOME) == ("", {Verdict.NONFINITE})


def test_log_sum_exp_in_sixteen_bits_has_to_be_float32() -> None:
    inputs = {"outputs": OUTPUTS.astype(np.float16), "log_sum_exps": TOTALS.astype(np.float32)}
    truth = find_truth("merge_states", {}, inputs, "float16", supports_statistics=True)
    stages = merge_states(**inputs)
    right = judge_and_diagnose(truth, stages, SHAPES, "eager")
    assert {each.verdict for each in right.judgements} == {Verdict.AGREE}
    narrow = stages | {"log_sum_exp": stages["log_sum_exp"].astype(np.float16)}
    found = {each.stage: each for each in judge_and_diagnose(truth, narrow, SHAPES, "eager").judgements}
    assert found["log_sum_exp"].verdict is Verdict.DTYPE
    assert found["log_sum_exp"].message == "expected float32, got float16"
