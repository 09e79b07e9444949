"""Honest attention, computed in every right way that the catalogue has, never exceeds its bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import NAMES, Problem, draw

from attncheck.execution.operations import run_operation
from attncheck.judging.judge_stages import judge_stages
from attncheck.mutation.catalogue import CONTROLS
from attncheck.mutation.judgement import REFERENCE_CLASSES
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Change = Callable[[np.random.Generator, Array], Array]
DTYPES = ("float64", "float32", "float16", "bfloat16")
GENERIC = ("normal", "peaky", "small")
REGIMES: dict[str, dict[str, Change]] = {
    "normal": {},
    "peaky": {"query": lambda _, query: 6 * query, "log_sum_exps": lambda _, totals: 100 * totals},
    "small": {"query": lambda _, query: query / 20, "value": lambda _, value: value / 100},
    "tiny": dict.fromkeys(("query", "key", "value"), lambda _, array: array / 1000),
    "huge": {"query": lambda _, query: 60 * query, "log_sum_exps": lambda _, totals: 1000 * totals},
    "cancelling": {"query": lambda random, query: query + 20 * random.choice([-1, 1], query.shape[-1])},
    "repeated": {"key": lambda _, key: np.repeat(key[..., :1, :], key.shape[-2], axis=-2)},
    "whole": dict.fromkeys(("query", "key"), lambda random, array: random.integers(-3, 4, array.shape) * 1.0),
    "offset keys": {"key": lambda _, key: key / 10 + 3, "log_sum_exps": lambda _, totals: totals - 800},
    "offset values": {"value": lambda _, value: value / 100 + 50, "log_sum_exps": lambda _, totals: totals + 90},
}
"""What numbers of inputs are like. Statistics are held where they are generic."""
ONE_IN = 4
"""Of the right ways, so many are taken for a problem in a dtype and a regime, in turn."""


def in_regime(problem: Problem, regime: str, random: np.random.Generator) -> Problem:
    changes = REGIMES[regime].items()
    drawn = {name: problem.inputs[name] for name, _ in changes if name in problem.inputs}
    return problem.with_inputs(
        **{name: change(random, drawn[name]) for name, change in changes if drawn.get(name, MASK).dtype == np.float64}
    )


MASK = np.zeros(1, bool)


@pytest.mark.parametrize("name", NAMES)
def test_no_right_way_to_compute_exceeds_its_bounds(name: str) -> None:
    turn, offenders, count = NAMES.index(name), [], 0
    for dtype in DTYPES:
        for _ in range(2):
            turn += 1
            regime = list(REGIMES)[turn % len(REGIMES)]
            random = np.random.default_rng(turn)
            problem = in_regime(draw(name, turn), regime, random).stored(dtype)
            with np.errstate(all="ignore"):
                truth = problem.truth(dtype, supports_statistics=regime in GENERIC)
                called = problem.called()
                for control in CONTROLS[turn % ONE_IN :: ONE_IN]:
                    if dtype not in control.dtypes:
                        continue
                    try:
                        stages = run_operation(control.backend, problem.operation, called.inputs, called.options)
                    except NotImplementedError:  # it lacks something that the problem has
                        continue
                    count += 1
                    shapes = {stage: exact.shape for stage, exact in truth.exact.items()}
                    model = control.classes.get(dtype, REFERENCE_CLASSES.get(dtype, ""))
                    found = judge_stages(truth.for_returned(stages), stages, shapes, model)
                    offenders += [
                        (control.name, dtype, regime, each.stage, each.message)
                        for each in found
                        if each.verdict is not Verdict.AGREE
                    ]
    assert offenders == []
    assert count > 40


def test_heads_added_up_in_16_bits_are_within_the_bounds_of_such_kernels_alone() -> None:
    """64 heads share a key and a value; float16 adds them up one after the other, as torch's flash kernel does."""
    beyond = 0
    for seed in range(10):
        random = np.random.RandomState(seed).standard_normal
        shapes = {"query": (1, 64, 1, 4), "key": (1, 1, 3, 4), "value": (1, 1, 3, 4), "grad_output": (1, 64, 1, 4)}
        inputs = {name: random(shape).astype(np.float16) for name, shape in shapes.items()}
        inputs["grad_output"] = np.abs(inputs["grad_output"])  # no term takes away what another has added
        query, key, upstream = (inputs[name].astype(np.float64) for name in ("query", "key", "grad_output"))
        powers = np.exp(query @ key.swapaxes(-1, -2) / 2)
        weights = powers / powers.sum(axis=-1, keepdims=True)
        total = np.zeros((1, 1, 3, 4), np.float16)
        for head in range(64):
            part = weights[:, head : head + 1].swapaxes(-1, -2) @ upstream[:, head : head + 1]
            total = (total + part).astype(np.float16)
        truth = Problem("attention_gradients", {}, inputs).truth("float16")
        error = truth.exact["grad_value"].error_of(total)
        assert (error <= truth.bounds("fused_bwd")["grad_value"].max_error).all()
        beyond += (error > truth.bounds("fused")["grad_value"].max_error).any()
    assert beyond > 0


# Caches and fills.


def assert_agrees(problem: Problem, dtype: str = "float32") -> None:
    stages = problem.returned()
    shapes = {stage: array.shape for stage, array in stages.items()}
    judged = judge_stages(problem.truth(dtype, supports_statistics=False), stages, shapes, "native")
    assert {each.verdict for each in judged} == {Verdict.AGREE}


@pytest.mark.parametrize(("new", "past"), [(0, 3), (6, 0)])
def test_a_cache_may_be_empty_or_all_that_there_is(new: int, past: int) -> None:
    problem = draw("layer, rotated cache").stored("float32")
    shorter = {name: problem.inputs[name][:, :new] for name in ("key", "value")}
    shorter |= {name: problem.inputs[name][:, :, :past] for name in ("past_key", "past_value")}
    assert_agrees(problem.with_inputs(**shorter))


@pytest.mark.parametrize("fill", [-1e9, 0.25])
def test_numpy_is_within_the_bounds_of_fills_of_any_size(fill: float) -> None:
    for name in ("fill", "gradients, rotary"):
        problem = draw(name).stored("float32")
        assert_agrees(Problem(problem.operation, {**problem.options, "mask_fill": fill}, problem.inputs))


def test_a_fill_is_rounded_to_the_dtype_and_beyond_it_is_minus_infinity() -> None:
    def filled(fill: float, dtype: str) -> Problem:
        return Problem("attention", {"mask_fill": fill}, draw("fill").stored(dtype).inputs)

    for dtype, fill in (("float64", -1e-9), ("float32", float(np.float32(-1e-9))), ("float16", -0.0)):
        for form in (Problem.called, Problem.canonical):
            assert form(filled(-1e-9, dtype)).options["mask_fill"] == fill
    assert "mask_fill" not in filled(-1e9, "float16").canonical().options
