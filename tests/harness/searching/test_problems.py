"""What is drawn at random: everything that can be asked, by number alone, and within the range of a dtype."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from attncheck.searching.problems import OPERATIONS, Draw, Drawn, draw_problem


def drawn_from(count: int, **changes: Any) -> list[Drawn]:
    draw = Draw(seed=1, shapes=40, **changes)
    return [draw_problem(draw, number) for number in range(count)]


def test_a_problem_follows_from_its_number() -> None:
    first, again = drawn_from(5)[4], drawn_from(5)[4]
    assert (first.id, first.options) == (again.id, again.options)
    assert all(np.array_equal(array, again.inputs[name]) for name, array in first.inputs.items())
    assert len({problem.id for problem in drawn_from(50)}) == 50


def test_everything_that_can_be_asked_is_drawn() -> None:
    drawn = drawn_from(600)
    asked = Counter(name for problem in drawn for name in problem.asked.split(" + "))
    every = ["causal", "padding", "random", "bias", "bias with -inf", "window", "key lengths", "query mask", "past"]
    assert set(asked) == {
        *every,
        "bottom right",
        "rotated part",
        "fill",
        "scale",
        "negative scale",
        "softcap",
        "grouped",
        "nothing",
        "none",
    } | {"sinks", "rotary", "lengths", "of attention", "empty parts", "base 2"} | {
        *("query offsets", "rms", "l2", "head", "full", "rotated first"),
    }
    assert {problem.operation for problem in drawn} == set(OPERATIONS)


def test_gradients_are_drawn_with_biases_of_many_shapes_and_grouped_heads() -> None:
    drawn = drawn_from(200, operation="attention_gradients")
    assert {problem.operation for problem in drawn} == {"attention_gradients"}
    biased = [problem for problem in drawn if "bias" in problem.inputs]
    assert len({tuple(length > 1 for length in problem.inputs["bias"].shape) for problem in biased}) > 4
    assert all(problem.stage_shapes["grad_bias"] == problem.inputs["bias"].shape for problem in biased)
    assert any("grouped" in problem.asked for problem in drawn)
    assert all(
        problem.inputs["grad_output"].shape == (*problem.scores[:3], problem.inputs["value"].shape[-1])
        for problem in drawn
    )


def test_shapes_come_from_the_pool() -> None:
    drawn = [draw_problem(Draw(1, 3, "attention_gradients"), number) for number in range(40)]
    assert len({problem.scores for problem in drawn}) <= 3 + 1  # one of them at a kernel's size


def test_a_quarter_of_attention_has_the_size_of_a_kernel() -> None:
    drawn = [draw_problem(Draw(1, 64, "attention"), number) for number in range(200)]
    widths = [problem.inputs["query"].shape[-1] for problem in drawn]
    assert sum(width in (16, 32, 64, 80, 96, 128, 192, 256) for width in widths) >= 0.2 * len(drawn)
    assert max(widths) == 256


def test_what_a_dtype_cannot_hold_on_the_way_is_left_out() -> None:
    small, large = (
        Drawn("", 0, "attention", {"scale": 0.001}, inputs, "normal", "scale", (1, 1, 1, 1))
        for inputs in (
            {name: np.full((1, 1, 1, 1), size) for name in ("query", "key", "value")} for size in (100.0, 300.0)
        )
    )
    assert small.fits("float16")  # 100 * 100 can be stored
    assert not large.fits("float16")  # 300 * 300 cannot, though its scaled score, 90, could
    assert large.fits("bfloat16")
    assert replace(
        large, operation="attention_gradients", inputs={**small.inputs, "grad_output": large.inputs["value"] * 10}
    ).fits("float32")


def test_the_gradient_of_the_weights_counts_as_a_step() -> None:
    inputs = {name: np.full((1, 1, 1, 1), 1.0) for name in ("query", "key")}
    inputs |= {name: np.full((1, 1, 1, 1), 300.0) for name in ("value", "grad_output")}
    drawn = Drawn("", 0, "attention_gradients", {}, inputs, "normal", "nothing", (1, 1, 1, 1))
    assert not drawn.fits("float16")  # 300 * 300, though no gradient is larger than 300


def test_some_projections_are_those_of_modules_and_some_of_these_attend_to_themselves() -> None:
    drawn = [draw_problem(Draw(1, None, "multi_head_attention"), number).inputs for number in range(120)]
    weights = [{name: array for name, array in inputs.items() if name.endswith("_weight")} for inputs in drawn]
    of_modules = [
        len(each) == 4 and len({length for array in each.values() for length in array.shape}) == 1 for each in weights
    ]
    assert 0.2 * len(drawn) < sum(of_modules) < 0.8 * len(drawn)
    alike = [inputs["query"].tobytes() == inputs["key"].tobytes() == inputs["value"].tobytes() for inputs in drawn]
    assert sum(alike) > 5


def test_some_packs_have_sequences_of_different_lengths_and_no_lengths_of_keys() -> None:
    drawn = [draw_problem(Draw(1, None, "packed_attention"), number).inputs for number in range(60)]
    ragged = [inputs for inputs in drawn if "key_lengths" not in inputs]
    assert 0 < len(ragged) < len(drawn)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert any(len(set(np.diff(inputs[name]))) > 1 for inputs in ragged)
        assert all(inputs[name][-1] == inputs["query" if name.endswith("q") else "key"].shape[2] for inputs in drawn)
