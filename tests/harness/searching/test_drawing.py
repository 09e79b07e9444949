"""The problems of a search: all that can be asked, by number alone; what is new counts, what fails counts less."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.errors import CaseError
from attncheck.searching.concrete import ConcreteCase, Seen, asked_of, features_of, identity_of, read_concrete
from attncheck.searching.problems import OPERATIONS as DRAWN
from attncheck.searching.problems import Draw, DrawnProblem, draw_problem
from attncheck.searching.shapes import EDGES
from attncheck.searching.variations import ProblemSource
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS


def drawn_from(count: int, **changes: Any) -> list[DrawnProblem]:
    draw = Draw(seed=1, shapes=40, **changes)
    return [draw_problem(draw, number) for number in range(count)]


def test_a_problem_follows_from_its_number() -> None:
    first, again = drawn_from(5)[4], drawn_from(5)[4]
    assert (first.id, first.options) == (again.id, again.options)
    assert all(np.array_equal(array, again.inputs[name]) for name, array in first.inputs.items())
    assert len({problem.id for problem in drawn_from(50)}) == 50


def test_everything_that_can_be_asked_is_drawn() -> None:
    drawn = drawn_from(300)
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
    assert {problem.operation for problem in drawn} == set(DRAWN)


def test_gradients_are_drawn_with_biases_of_many_shapes_and_grouped_heads() -> None:
    drawn = drawn_from(200, operation="attention_gradients")
    assert {problem.operation for problem in drawn} == {"attention_gradients"}
    biased = [problem for problem in drawn if "bias" in problem.inputs]
    assert len({tuple(length > 1 for length in problem.inputs["bias"].shape) for problem in biased}) > 4
    assert all(problem.stage_shapes["grad_bias"] == problem.inputs["bias"].shape for problem in biased)
    assert any("grouped" in problem.asked for problem in drawn)
    for problem in drawn:
        assert problem.inputs["grad_output"].shape == (*problem.scores[:3], problem.inputs["value"].shape[-1])


def test_shapes_come_from_the_pool_and_a_quarter_of_attention_has_the_size_of_a_kernel() -> None:
    drawn = [draw_problem(Draw(1, 3, "attention_gradients"), number) for number in range(40)]
    assert len({problem.scores for problem in drawn}) <= 3 + 1  # one of them at a kernel's size
    drawn = [draw_problem(Draw(1, 64, "attention"), number) for number in range(200)]
    widths = [problem.inputs["query"].shape[-1] for problem in drawn]
    assert sum(width in (16, 32, 64, 80, 96, 128, 192, 256) for width in widths) >= 0.2 * len(drawn)
    assert max(widths) == 256


def test_what_a_dtype_cannot_hold_on_the_way_is_left_out() -> None:
    small, large = (
        DrawnProblem("attention", {"scale": 0.001}, inputs, "", 0, "normal", "scale", (1, 1, 1, 1))
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
    drawn = DrawnProblem("attention_gradients", {}, inputs, "", 0, "normal", "nothing", (1, 1, 1, 1))
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


COUNT = 250


def drawn(seed: int = 1, count: int = COUNT) -> list[ConcreteCase]:
    source = ProblemSource(Draw(seed, None), DTYPES)
    return [source.problem(number) for number in range(count)]


def test_a_problem_follows_from_seed_and_number() -> None:
    one, other = drawn(count=20), drawn(count=20)
    for first, second in zip(one, other, strict=True):
        assert (first.operation, first.options, first.dtype) == (second.operation, second.options, second.dtype)
        assert all(first.inputs[name].tobytes() == second.inputs[name].tobytes() for name in first.inputs)
    assert features_of(drawn(seed=2, count=1)[0]) != features_of(one[0])


def test_everything_that_can_be_asked_is_soon_asked(tmp_path: Path) -> None:
    problems = drawn()
    assert {each.operation for each in problems} == set(OPERATIONS)
    assert {each.dtype for each in problems} == set(DTYPES)
    options = {name for each in problems for name in each.options}
    assert set(OPTIONS) - options == {"projections", "poison"}  # which say how a file is written
    inputs = {name for operation in OPERATIONS.values() for name in operation.inputs}
    assert inputs <= {name for each in problems for name in each.inputs}
    lengths = Counter(length for each in problems for length in each.lengths.values())
    assert set(EDGES) <= set(lengths)
    assert {layout for each in problems for layout in each.memory_layout.values()} == {
        *("strided", "transposed", "broadcast")
    }
    specials = {each.special.partition(" in ")[0] for each in problems}
    assert {"NaN", "infinity", "zeros", "ones", "equal rows", "large numbers", "small numbers"} <= specials
    read, some = 0, problems[::5]
    for number, problem in enumerate(some):
        with suppress(CaseError):
            read_concrete(problem, tmp_path, f"search/drawn-{number}")
            read += 1
    assert read > 0.9 * len(some)


def test_what_is_lacking_is_not_drawn_but_seldom() -> None:
    def lacks(problem: ConcreteCase) -> tuple[str, ...]:
        return tuple(name for name in ("window", "softcap") if name in problem.options)

    source = ProblemSource(Draw(1, None, "attention"), ("float32",), lacks_of=lacks)
    found = [lacks(source.problem(number)) for number in range(100)]
    assert sum(map(bool, found)) < 15


def test_what_is_known_to_fail_is_asked_less() -> None:
    def is_causal(problem: ConcreteCase) -> bool:
        return bool(problem.options.get("is_causal"))

    counts = [
        sum(is_causal(source.problem(number)) for number in range(80))
        for source in (
            ProblemSource(Draw(1, None, "attention"), ("float32",)),
            ProblemSource(Draw(1, None, "attention"), ("float32",), is_known=is_causal),
        )
    ]
    assert counts[1] < 0.5 * counts[0]
    assert np.isfinite(counts).all()


def problem(options: dict[str, object] | None = None, keys: int = 3, dtype: str = "float32") -> ConcreteCase:
    inputs = {
        "query": np.ones((1, 4, 2, 3)),
        "key": np.ones((1, 2, keys, 3)),
        "value": np.ones((1, 2, keys, 5)),
        "bias": np.ones((1, 1, 2, keys)),
    }
    return ConcreteCase("attention", options or {}, inputs, dtype)


def test_features_are_options_inputs_sizes_and_forms_by_which_lists_can_name_what_is_drawn() -> None:
    found = features_of(problem({"window": (0, None), "scale": -1.0}, keys=17))
    assert {"window zero none", "scale negative", "bias along Lq T", "heads shared", "Lk = 17"} <= found
    assert "another width of values" in found
    assert asked_of(problem({"is_causal": True})) == {"is_causal", "bias", "heads shared"}
    assert identity_of(problem(), "problem-3") == "search/attention/bias-heads-shared/problem-3"
    causal = problem({"is_causal": True, "scale": -0.5})
    causal.inputs["query"][0, 0, 0, 0] = np.nan
    named = "search/attention/bias-heads-shared-is-causal-scale-negative-nonfinite/problem-4"
    assert identity_of(causal, "problem-4") == named
    assert "-scale-zero/" in identity_of(problem({"scale": 0.0}), "problem-5")


def test_what_was_asked_is_less_new_and_pairs_count() -> None:
    seen = Seen()
    plain, windowed = problem(), problem({"window": (1, 1)})
    assert seen.novelty(windowed) > seen.novelty(plain)
    before = seen.novelty(plain)
    seen.add(plain)
    assert seen.novelty(plain) < before / 2
    seen.add(problem({"window": (1, 1)}, keys=64))
    assert seen.novelty(problem({"softcap": 1.0}, keys=64)) > seen.novelty(problem({"window": (1, 1)}, keys=64))
    seen.note(plain, is_refused=False)
    assert Seen.of(seen.record()) == seen  # what is kept comes back


def test_what_is_refused_whenever_it_is_asked_is_known() -> None:
    seen, other = Seen(), Seen()
    for _ in range(2):
        seen.note(problem({"softcap": 1.0}), is_refused=True, lacks=("softcap",))
        other.note(problem(), is_refused=True, lacks=("attention()",))
    assert seen.is_likely_refused(problem({"softcap": 3.0, "scale": 1.0}))
    assert not seen.is_likely_refused(problem({"scale": 1.0}))
    seen.note(problem({"softcap": 2.0}), is_refused=False)
    assert not seen.is_likely_refused(problem({"softcap": 3.0}))
    # A function that is not there refuses an operation.
    assert other.is_likely_refused(problem({"scale": 1.0}))
