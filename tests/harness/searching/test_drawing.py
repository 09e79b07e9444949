"""The problems of a search: all that can be asked, by number alone; what is new counts, what fails counts less."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from attncheck.errors import CaseError
from attncheck.searching.concrete import ConcreteCase, Seen, asked_of, features_of, identity_of, read_concrete
from attncheck.searching.drawing import REGIMES
from attncheck.searching.problems import Draw, DrawnProblem, ProblemSource, draw_problem
from attncheck.searching.shapes import EDGES
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS

FILE_ALONE = {"projections", "poison"}
"""Options that say how a file is written."""


def drawn_from(count: int, operation: str | None = None, shapes: int | None = 40) -> list[DrawnProblem]:
    return [draw_problem(Draw(1, shapes, operation), number) for number in range(count)]


def searched(seed: int = 1, count: int = 250) -> list[ConcreteCase]:
    source = ProblemSource(Draw(seed, None), DTYPES)
    return [source.problem(number) for number in range(count)]


def test_a_problem_follows_from_seed_and_number() -> None:
    for one, again in ((drawn_from(5), drawn_from(5)), (searched(count=20), searched(count=20))):
        for first, second in zip(one, again, strict=True):
            assert (first.operation, first.options) == (second.operation, second.options)
            assert all(first.inputs[name].tobytes() == second.inputs[name].tobytes() for name in first.inputs)
    assert len({problem.id for problem in drawn_from(50)}) == 50
    assert features_of(searched(2, 1)[0]) != features_of(searched(1, 1)[0])


def test_whatever_the_specification_has_is_drawn_and_soon_searched(tmp_path: Path) -> None:
    drawn, problems = drawn_from(400), searched()
    for some in (drawn, problems):
        assert {problem.operation for problem in some} == set(OPERATIONS)
        assert set(OPTIONS) - {name for problem in some for name in problem.options} == FILE_ALONE
    assert {problem.regime for problem in drawn} == set(REGIMES)
    forms = {word for problem in drawn for word in problem.asked.split(" + ")}
    assert forms >= {
        *(f"mask {form}" for form in ("padding", "random", "blocks", "documents")),
        *(f"bias {form}" for form in ("with -inf", "ALiBi", "of buckets", "lowest")),
        *("of attention", "empty parts", "self", "nothing", "heads shared", "one head shared"),
    }
    assert {each.dtype for each in problems} == set(DTYPES)
    inputs = {name for operation in OPERATIONS.values() for name in operation.inputs}
    assert inputs <= {name for each in problems for name in each.inputs}
    assert set(EDGES) <= {length for each in problems for length in each.lengths.values()}
    layouts = {layout for each in problems for layout in each.memory_layout.values()}
    assert layouts == {"strided", "transposed", "broadcast"}
    specials = {each.special.partition(" in ")[0] for each in problems}
    assert {"NaN", "infinity", "zeros", "ones", "equal rows", "large numbers", "small numbers"} <= specials
    read = 0
    for number, problem in enumerate(problems[::5]):
        with suppress(CaseError):
            read_concrete(problem, tmp_path, f"search/drawn-{number}")
            read += 1
    assert read > 0.9 * len(problems[::5])


def test_what_a_campaign_draws_has_many_shapes() -> None:
    for problem in (gradients := drawn_from(200, "attention_gradients")):
        assert problem.inputs["grad_output"].shape == (*problem.scores[:3], problem.inputs["value"].shape[-1])
    biased = [problem for problem in gradients if "bias" in problem.inputs]
    assert len({tuple(length > 1 for length in problem.inputs["bias"].shape) for problem in biased}) > 4
    assert all(problem.stage_shapes["grad_bias"] == problem.inputs["bias"].shape for problem in biased)
    # A few shapes come from a pool; a quarter has the size of a kernel.
    assert len({problem.scores for problem in drawn_from(40, "attention_gradients", shapes=3)}) <= 3 + 1
    widths = [problem.inputs["query"].shape[-1] for problem in drawn_from(200, "attention", shapes=64)]
    assert sum(width in (16, 32, 64, 80, 96, 128, 192, 256) for width in widths) >= 0.2 * len(widths)
    limits = [problem.inputs["cu_seqlens_k"] for problem in drawn_from(60, "packed_attention", shapes=None)]
    assert 10 < sum(len(set(np.diff(each))) > 1 for each in limits) < 50
    projected = [problem.inputs for problem in drawn_from(120, "multi_head_attention", shapes=None)]
    weights = [{array.shape for name, array in inputs.items() if name.endswith("_weight")} for inputs in projected]
    of_modules = [len(shapes) == 1 and len(set(*shapes)) == 1 for shapes in weights]
    assert 0.2 * len(projected) < sum(of_modules) < 0.8 * len(projected)


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
    # The gradient of the weights counts, though no gradient that is returned is larger than 300.
    inputs = {name: np.full((1, 1, 1, 1), 1.0) for name in ("query", "key")}
    inputs |= {name: np.full((1, 1, 1, 1), 300.0) for name in ("value", "grad_output")}
    drawn = DrawnProblem("attention_gradients", {}, inputs, "", 0, "normal", "nothing", (1, 1, 1, 1))
    assert not drawn.fits("float16")


def test_what_is_lacking_or_known_to_fail_is_seldom_drawn() -> None:
    def lacks(problem: ConcreteCase) -> tuple[str, ...]:
        return tuple(name for name in ("window", "softcap") if name in problem.options)

    def is_causal(problem: ConcreteCase) -> bool:
        return bool(problem.options.get("is_causal"))

    draw = Draw(1, None, "attention")
    free, lacking, known = (
        [source.problem(number) for number in range(100)]
        for source in (
            ProblemSource(draw, ("float32",)),
            ProblemSource(draw, ("float32",), lacks_of=lacks),
            ProblemSource(draw, ("float32",), is_known=is_causal),
        )
    )
    assert sum(map(bool, map(lacks, lacking))) < 15
    assert sum(map(is_causal, known)) < 0.5 * sum(map(is_causal, free))


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
