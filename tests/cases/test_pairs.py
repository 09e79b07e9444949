"""Every two options of an operation meet beyond a tile, in two cases at least, one of which has few others.

The table of pairs follows from the specification: an option that is added there has no case yet, and this fails, naming
its pairs, until ``cases/pairs*.yaml`` have them. An option is whatever a call may have or lack: an option proper, an
optional input, heads that share keys and values, values of another width. Most have one level, that they are given; a
word from a list has one for each word, a mask or bias one for each axis that it goes along or is spread over, counts of
keys one more where 0 is among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import pytest

from attncheck.plan import EMPTY_ROWS, GivenLevels, Level, levels_of
from attncheck.reading.case import Case
from attncheck.reading.case_maker import ONLY_WITH_SOME_SCORES
from attncheck.reading.selection import select_cases
from attncheck.spec import (
    OPERATIONS,
    Operation,
)

CASES = select_cases().cases
TILE = 16
CASES_OF_A_PAIR = 2
MEANT_OF_OTHERS = {
    "alignment": "says where a causal query or a window stands",
    EMPTY_ROWS: "says what a mask left open",
}
"""Options that are not counted where few others are to be at fault, each with the reason."""
FEW = {"multi_head_attention": 6}
"""How many options a case of few has at most, where it is not four: projections have biases of their own."""


Pair = tuple[Level, Level]


def pairs_of(operation: Operation) -> Iterator[Pair]:
    """Yield every pair of levels of two options that can meet."""
    for one, other in combinations(levels_of(operation).values(), 2):
        for pair in ((first, second) for first in one for second in other):
            if not why_never(pair):
                yield pair


def why_never(pair: Pair) -> str:
    """Say why two levels cannot meet; empty where they can."""
    texts, options = {level.text for level in pair}, {level.option for level in pair}
    for option, scores in ONLY_WITH_SOME_SCORES.items():
        if option in options and "score" in options and not texts & {f"score {score}" for score in scores}:
            return f"only {', '.join(scores)} have a {option}"
    if {"alignment", "query_offsets"} <= options:
        return "query_offsets say where the queries of each batch entry stand, whatever the alignment"
    if "score_bias" in options:
        if "score" in options and not texts & {"score additive", "score general"}:
            return "score_bias is an input of the additive and the bilinear score alone"
        if options & ONLY_WITH_SOME_SCORES.keys():
            return "the additive and the bilinear score have neither a scale nor a softcap"
    return ""


def has_few(given: GivenLevels) -> bool:
    """Whether so few options meet in the case that little else can be at fault."""
    specs = given.case.input_specs
    needed = {(name, specs[name].needs) for name in given.case.inputs}
    brought = {other for name, other in needed if (other, name) not in needed}
    options = {level.option for level in given.levels} - MEANT_OF_OTHERS.keys() - brought
    return len(options) <= FEW.get(given.case.operation, 4)


def is_beyond_a_tile(case: Case) -> bool:
    """Whether a case has more queries and more keys than a tile, and no multiple of it of either."""
    shapes = case.input_shapes
    if "key_pages" in shapes:
        lengths = shapes["query"][-2], shapes["block_table"][-1] * shapes["key_pages"][1]
    else:
        keys = "latent" if "latent" in shapes else "key"
        lengths = shapes["scores"][-2:] if "scores" in shapes else (shapes["query"][-2], shapes[keys][-2])
    return all(length > TILE and length % TILE for length in lengths)


WITH_PAIRS = [operation for operation in OPERATIONS.values() if any(True for _ in pairs_of(operation))]


@cache
def given_of(operation: str) -> list[tuple[frozenset[Level], bool]]:
    """Return what the bundled cases of an operation that go beyond a tile give, and whether that is little."""
    cases = (case for case in CASES if case.operation == operation and is_beyond_a_tile(case))
    return [(given.levels, has_few(given)) for given in map(GivenLevels, cases)]


def missing(operation: Operation, given: Sequence[tuple[frozenset[Level], bool]]) -> list[str]:
    """Say which pairs stand in too few cases, each in a line."""
    having: dict[Level, set[int]] = defaultdict(set)
    for place, (levels, _) in enumerate(given):
        for level in levels:
            having[level].add(place)
    lines = []
    for first, second in pairs_of(operation):
        both = having[first] & having[second]
        few = sum(given[place][1] for place in both)
        if len(both) < CASES_OF_A_PAIR or not few:
            most = FEW.get(operation.name, 4)
            lines.append(
                f"{operation.name}: {first.text} with {second.text}: in {len(both)} cases beyond a tile, {few} of "
                f"them with at most {most} options; expected {CASES_OF_A_PAIR} and 1"
            )
    return lines


@pytest.mark.parametrize("operation", WITH_PAIRS, ids=lambda operation: operation.name)
def test_every_two_options_meet_beyond_a_tile(operation: Operation) -> None:
    lines = missing(operation, given_of(operation.name))
    assert not lines, "\n".join([*lines, "write cases for them in cases/pairs*.yaml"])


@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
def test_the_levels_are_those_that_kernels_know(operation: str) -> None:
    texts = {level.text for levels in levels_of(OPERATIONS[operation]).values() for level in levels}
    assert texts >= {
        *("is_causal", "alignment top_left", "alignment bottom_right", "window", "scale", "softcap"),
        *("mask along H", "mask along B", "bias spread over B", "bias spread over T", "query_mask along Lq"),
        *("key_lengths", "key_lengths with 0", "some heads share", "all heads share", "values of another width"),
        *("empty_rows zero", "empty_rows uniform", "empty_rows nan"),
    }


def test_a_pair_that_cannot_be_says_why_and_is_in_no_case() -> None:
    levels = levels_of(OPERATIONS["scoring"])
    never = {
        (first, second): why_never((first, second))
        for one in levels.values()
        for other in levels.values()
        if one is not other
        for first in one
        for second in other
        if why_never((first, second))
    }
    assert {reason for reason in never.values() if not reason} == set()
    assert (Level("score", "score general"), Level("scale", "scale")) in never
    assert not any(set(pair) <= levels for pair in never for levels, _ in given_of("scoring"))
