"""What the soundness campaign draws, what it leaves out, and what it writes down and counts."""

import importlib
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attncheck.judging.xfail import reason_for
from attncheck.reading.expected_failures import load_expected_failures

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soundness_problems")


def drawn_from(problems: ModuleType, count: int, **changes: Any) -> list[Any]:
    draw = problems.Draw(seed=1, shapes=40, **changes)
    return [problems.draw_problem(draw, number) for number in range(count)]


def test_a_problem_follows_from_its_number(problems: ModuleType) -> None:
    first, again = drawn_from(problems, 5)[4], drawn_from(problems, 5)[4]
    assert (first.id, first.options) == (again.id, again.options)
    assert all(np.array_equal(array, again.inputs[name]) for name, array in first.inputs.items())
    assert len({problem.id for problem in drawn_from(problems, 50)}) == 50


def test_everything_that_can_be_asked_is_drawn(problems: ModuleType) -> None:
    drawn = drawn_from(problems, 600)
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
    assert {problem.operation for problem in drawn} == set(problems.OPERATIONS)


def test_gradients_are_drawn_with_biases_of_many_shapes_and_grouped_heads(problems: ModuleType) -> None:
    drawn = drawn_from(problems, 200, operation="attention_gradients")
    assert {problem.operation for problem in drawn} == {"attention_gradients"}
    biased = [problem for problem in drawn if "bias" in problem.inputs]
    assert len({tuple(length > 1 for length in problem.inputs["bias"].shape) for problem in biased}) > 4
    assert all(problem.stage_shapes["grad_bias"] == problem.inputs["bias"].shape for problem in biased)
    assert any("grouped" in problem.asked for problem in drawn)
    assert all(
        problem.inputs["grad_output"].shape == (*problem.scores[:3], problem.inputs["value"].shape[-1])
        for problem in drawn
    )


def test_shapes_come_from_the_pool(problems: ModuleType) -> None:
    drawn = [problems.draw_problem(problems.Draw(1, 3, "attention_gradients"), number) for number in range(40)]
    assert len({problem.scores for problem in drawn}) <= 3 + 1  # one of them at a kernel's size


def test_a_quarter_of_attention_has_the_size_of_a_kernel(problems: ModuleType) -> None:
    drawn = [problems.draw_problem(problems.Draw(1, 64, "attention"), number) for number in range(200)]
    widths = [problem.inputs["query"].shape[-1] for problem in drawn]
    assert sum(width in (16, 32, 64, 80, 96, 128, 192, 256) for width in widths) >= 0.2 * len(drawn)
    assert max(widths) == 256


def test_what_a_dtype_cannot_hold_on_the_way_is_left_out(problems: ModuleType) -> None:
    small, large = (
        problems.Drawn("", 0, "attention", {"scale": 0.001}, inputs, "normal", "scale", (1, 1, 1, 1))
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


def test_the_gradient_of_the_weights_counts_as_a_step(problems: ModuleType) -> None:
    inputs = {name: np.full((1, 1, 1, 1), 1.0) for name in ("query", "key")}
    inputs |= {name: np.full((1, 1, 1, 1), 300.0) for name in ("value", "grad_output")}
    drawn = problems.Drawn("", 0, "attention_gradients", {}, inputs, "normal", "nothing", (1, 1, 1, 1))
    assert not drawn.fits("float16")  # 300 * 300, though no gradient is larger than 300


def test_a_unit_without_rows_is_done_too(problems: ModuleType, tmp_path: Path) -> None:
    rows = importlib.import_module("soundness_rows")
    files = importlib.import_module("soundness_parts")
    parts = files.Parts(tmp_path, ["float16"], 3)
    for number in range(3):
        parts.add(rows.Unit(number, "float16"), [])
    assert [path.name for path in parts.files] == ["part-000000-000002.csv"]
    assert files.Parts(tmp_path, ["float16"], 4).missing == [3]


def test_a_mean_over_few_causes_is_not_shown(problems: ModuleType) -> None:
    rows, tables = importlib.import_module("soundness_rows"), importlib.import_module("soundness_table")
    row = rows.Row(0, "float32", "numpy.eager", "native", "attention", "normal", "nothing", True, "", "output", "agree")
    many = replace(row, tier="within", rms=0.3, elements=900, causes=30)
    few = replace(many, number=1, rms=0.9, causes=1)
    known = replace(many, number=2, rms=5.0, ratio=7.0, tier="proven", verdict="numeric", xfail=True, reason="a reason")
    frame = pd.DataFrame([{each.name: getattr(one, each.name) for each in fields(one)} for one in (many, few, known)])
    exact = tables.table(frame, ["dtype"]).iloc[0]
    assert exact["rms max"] == 0.3
    assert (exact["tensors"], exact["proven"], exact["xfail"]) == (2, 0, 1)
    assert tables.alarms(frame).empty
    assert tables.explained(frame)["reason"].tolist() == ["a reason"]


def test_a_negative_scale_on_causal_attention_is_known_of_the_flash_kernel_alone(problems: ModuleType) -> None:
    known = load_expected_failures([BENCHMARKS / "soundness_expected_failures.yaml"])
    drawn = drawn_from(problems, 800, operation="attention_gradients")
    expected = [{"causal", "negative scale"} <= set(problem.asked.split(" + ")) for problem in drawn]
    assert any(expected)
    for implementation, excused in (("torch.sdpa", expected), ("torch.eager", [False] * len(drawn))):
        found = [reason_for(known, implementation, each.id, "float32", "output", "nonfinite") for each in drawn]
        assert [each is not None for each in found] == excused
