"""The problems of a search: the same by number, varied, and not what an implementation lacks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from attncheck.errors import CaseError
from attncheck.searching.concrete import ConcreteCase, read_concrete
from attncheck.searching.novelty import features_of
from attncheck.searching.problems import Draw
from attncheck.searching.source import ProblemSource
from attncheck.searching.tile_edges import EDGES
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS

COUNT = 500


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
    read = 0
    for number, problem in enumerate(problems):
        try:
            read_concrete(problem, tmp_path, f"search/drawn-{number}")
            read += 1
        except CaseError:
            continue
    assert read > 0.9 * len(problems)


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
        sum(is_causal(source.problem(number)) for number in range(150))
        for source in (
            ProblemSource(Draw(1, None, "attention"), ("float32",)),
            ProblemSource(Draw(1, None, "attention"), ("float32",), is_known=is_causal),
        )
    ]
    assert counts[1] < 0.5 * counts[0]
    assert np.isfinite(counts).all()
