"""The forms of a problem, by the examples in its docstrings."""

from __future__ import annotations

import doctest

from attncheck.reading import problem

FORMS = ("as_call", "canonical", "without_layout")


def test_each_form_of_a_problem_has_an_example_that_runs() -> None:
    tests = {test.name.rpartition(".")[2]: test for test in doctest.DocTestFinder().find(problem.Problem)}
    runner = doctest.DocTestRunner()
    failed = {name: runner.run(tests[name]).failed for name in FORMS}
    assert failed == dict.fromkeys(FORMS, 0)
    assert all(tests[name].examples for name in FORMS)
