"""No list of stages beside the specification: what names three of them in one literal has to derive from it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from attncheck.spec import STAGES

ROOT = Path(__file__).parents[2]
MAY_NAME_STAGES = (
    "backends/",  # implementations return their stages by name, each in its framework's own idiom
    "harness/spec/",
)
# What states the graph of attention's steps, and what each step reads. These numbers may only become smaller.
LEFT = {
    "harness/attention/gradients.py": 2,
    "harness/attention/graph.py": 2,
    "harness/attention/problem.py": 1,
}


def literals(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line of every literal with three stage names or more, and the names, those of keys and of values."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                members = elements
            case ast.Dict(keys=keys, values=values):
                members = [each for each in (*keys, *values) if each is not None]
            case _:
                continue
        names = {each.value for each in members if isinstance(each, ast.Constant)} & set(STAGES)
        if len(names) >= 3:
            yield node.lineno, sorted(names)


def found() -> dict[str, list[tuple[int, list[str]]]]:
    """Return the literals of the product outside what may name stages, by file."""
    files = [path for folder in ("backends", "harness", "reports") for path in (ROOT / folder).rglob("*.py")]
    by_name = {path.relative_to(ROOT).as_posix(): path for path in files}
    return {
        name: lines
        for name, path in sorted(by_name.items())
        if not name.startswith(MAY_NAME_STAGES) and (lines := list(literals(path.read_text(encoding="utf-8"))))
    }


def test_lists_of_stages_follow_from_the_specification() -> None:
    own = {name: lines for name, lines in found().items() if name not in LEFT}
    assert own == {}, "use attncheck.spec: LOGITS, ON_SCORES, PROJECTIONS, GRADIENTS, stages_of(part), computed_stages"


def test_what_is_left_only_becomes_less() -> None:
    counts = Counter({name: len(lines) for name, lines in found().items()})
    assert {name: counts[name] for name, most in LEFT.items() if counts[name] > most} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = ('query', 'key', 'value')", [["key", "query", "value"]]),
        ("x = {'scores': 1, 'bias': 'masked', 'weights': 2}", [["masked", "scores", "weights"]]),
        ("x = frozenset({'biased', *more, 'masked', f(), 'capped'})", [["biased", "capped", "masked"]]),
        ("x = ['query', 'key', 'bias']", []),
        ("x = ('query', 'query', 'query')", []),
    ],
    ids=["tuple", "keys and values", "within a call", "two stages", "one stage three times"],
)
def test_a_literal_is_found(source: str, names: list[list[str]]) -> None:
    assert [each for _, each in literals(source)] == names
