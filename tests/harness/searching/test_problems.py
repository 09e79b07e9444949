"""Problems of a search: drawn by number alone, all that can be asked; written as cases, read again, and cut smaller."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from attncheck.errors import CaseError
from attncheck.execution.runner import task_of
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import ShapeFault
from attncheck.searching.concrete import ConcreteCase, asked_of, concrete_case, features_of, identity_of, read_concrete
from attncheck.searching.drawing import REGIMES
from attncheck.searching.findings import holds, write_case
from attncheck.searching.problems import Draw, DrawnProblem, ProblemSource, draw_problem
from attncheck.searching.reduction import cut, extent, letters_of, with_counts_that_fit
from attncheck.searching.shapes import EDGES
from attncheck.spec import DTYPES, MEMORY_LAYOUTS, OPERATIONS, OPTIONS

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
    drawn, problems = drawn_from(400), searched(5)
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
    assert layouts == MEMORY_LAYOUTS.keys() - {"fused", "distant"}
    specials = {each.special.partition(" in ")[0] for each in problems}
    assert {"NaN", "infinity", "zeros", "ones", "equal rows", "large numbers", "small numbers"} <= specials
    read = 0
    for number, problem in enumerate(problems[::5]):
        with suppress(CaseError):
            read_concrete(problem, tmp_path, f"search/drawn-{number}")
            read += 1
    assert read > 0.9 * len(problems[::5])


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


PATTERNS = ["layouts/*", "packed/*", "linear_projections/*", "quantized/*", "mask_fill/*", "merge_states/*", "probes/*"]


def test_the_call_of_every_form_of_case_comes_back(tmp_path: Path) -> None:
    cases = [
        each
        for each in select_cases(PATTERNS).cases
        if sum(int(np.prod(shape)) for shape in each.input_shapes.values()) < 4000
    ]
    assert len(cases) > 100
    for number, case in enumerate(cases):
        dtype = case.dtypes[number % len(case.dtypes)]
        again = read_concrete(concrete_case(case, dtype), tmp_path, f"search/one-{number}")
        one, other = (task_of(each, convert_inputs(each, make_exact_inputs(each), dtype)) for each in (case, again))
        assert one.options == other.options, case.id
        assert one.inputs.keys() == other.inputs.keys()
        for name, array in one.inputs.items():
            assert array.dtype == other.inputs[name].dtype
            np.testing.assert_array_equal(array.astype(np.float64), other.inputs[name].astype(np.float64))
        assert case.stage_shapes == again.stage_shapes


def test_drawn_problems_come_back_from_their_files(tmp_path: Path) -> None:
    source, written = ProblemSource(Draw(7, None), DTYPES), 0
    for number in range(36):
        problem = source.problem(number)
        with suppress(CaseError, ShapeFault):  # what was drawn may not fit together
            case = write_case(problem, tmp_path / f"case-{number}.yaml", "A drawn problem", "a test")
            assert holds(case, problem, tmp_path)
            written += 1
    assert written > 30
    assert list(tmp_path.glob("*.npz"))  # some are large


def test_most_cuts_of_drawn_problems_are_cases_again(tmp_path: Path) -> None:
    source, tried, read = ProblemSource(Draw(3, None), DTYPES), 0, 0
    for number in range(25):
        problem = source.problem(number)
        for letter in letters_of(problem):
            if (length := extent(problem, letter)) > 1:
                tried += 1
                with suppress(CaseError, ShapeFault):
                    shorter = with_counts_that_fit(cut(problem, {letter: np.arange(length - 1)}))
                    read_concrete(shorter, tmp_path, f"search/cut-{tried}")
                    read += 1
    assert tried > 100
    assert read > 0.8 * tried
