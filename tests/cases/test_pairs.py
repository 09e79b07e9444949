"""Every two options of an operation meet beyond a tile, in two cases at least, one of which has few others.

The table of pairs follows from the specification: an option that is added there has no case yet, and this fails, naming
its pairs, until ``cases/pairs*.yaml`` have them. An option is whatever a call may have or lack: an option proper, an
optional input, heads that share keys and values, values of another width. Most have one level, that they are given; a
word from a list has one for each word, a mask or bias one for each axis that it goes along or is spread over, counts of
keys one more where 0 is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any, get_args

import pytest

from attncheck.judging.special_rows import empty_rows
from attncheck.reading.canonical import AttentionProblem
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.model import Options
from attncheck.reading.options import ONLY_WITH_SOME_SCORES
from attncheck.reading.selection import select_cases
from attncheck.spec import (
    ASKED_BY,
    DEFAULT_EMPTY_ROWS,
    OPERATIONS,
    SCORE_INPUTS,
    InputSpec,
    Operation,
)

TILE = 16
CASES_OF_A_PAIR = 2
EMPTY_ROWS, SHARED_HEADS, WIDTH = "empty_rows", "shared heads", "width of values"
DEFAULTS = {"score": "scaled_dot", EMPTY_ROWS: DEFAULT_EMPTY_ROWS}
"""What is meant where an option is absent, for options of which every word is a level."""

NOT_ASKED = {
    "heads": "says how wide arrays are cut into heads; what two calls differ by is how many heads share keys",
    "kv_heads": "says how wide arrays are cut into heads; whether heads share keys is an option of its own here",
}
"""Options without pairs, each with the reason."""
MEANT_OF_OTHERS = {
    "alignment": "says where a causal query or a window stands",
    EMPTY_ROWS: "says what a mask left open",
}
"""Options that are not counted where few others are to be at fault, each with the reason."""
FEW = {"multi_head_attention": 6}
"""How many options a case of few has at most, where it is not four: projections have biases of their own."""


@dataclass(frozen=True)
class Level:
    """One way of giving an option."""

    option: str
    text: str


Pair = tuple[Level, Level]


def levels_of(operation: Operation) -> dict[str, list[Level]]:
    """Return the options of an operation as the specification has them, and the levels of each."""
    found = {option: _levels_of_option(option) for option in sorted(operation.options - NOT_ASKED.keys())}
    inputs = _inputs_of(operation)
    for name, spec in inputs.items():
        if not spec.required and not _comes_with_another(name, inputs):
            found[name] = _levels_of_input(name, spec)
    letters = {letter for spec in inputs.values() for axis in spec.axes for letter in axis.split("*")}
    if "Hkv" in letters:
        found[SHARED_HEADS] = [Level(SHARED_HEADS, text) for text in ("some heads share", "all heads share")]
    if {"D", "Dv"} <= letters:
        found[WIDTH] = [Level(WIDTH, "values of another width")]
    return found


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
    if "score_bias" in options:
        if "score" in options and "score additive" not in texts:
            return "score_bias is an input of the additive score alone"
        if options & ONLY_WITH_SOME_SCORES.keys():
            return "the additive score has neither a scale nor a softcap"
    return ""


@dataclass(frozen=True)
class Given:
    """What a case gives of its operation's options."""

    case: Case

    @cached_property
    def levels(self) -> frozenset[Level]:
        """Every level that the case has."""
        operation = OPERATIONS[self.case.operation]
        return frozenset(level for levels in levels_of(operation).values() for level in levels if self._has(level))

    @property
    def has_few(self) -> bool:
        """Whether so few options meet in the case that little else can be at fault."""
        specs = self.case.input_specs
        needed = {(name, specs[name].needs) for name in self.case.inputs}
        brought = {other for name, other in needed if (other, name) not in needed}
        options = {level.option for level in self.levels} - MEANT_OF_OTHERS.keys() - brought
        return len(options) <= FEW.get(self.case.operation, 4)

    def _has(self, level: Level) -> bool:
        case, option, text = self.case, level.option, level.text
        if option == SHARED_HEADS:
            heads, kv_heads = _heads(case)
            return kv_heads < heads and (kv_heads == 1) == (text == "all heads share")
        if option == WIDTH:
            return _widths(case)[0] != _widths(case)[1]
        if option in case.inputs:
            return _has_input(case, option, text)
        given = case.options.get(option, DEFAULTS.get(option))
        if given is None or given is False or (option == EMPTY_ROWS and not self._has_empty_rows):
            return False
        return text in (option, f"{option} {given}")

    @cached_property
    def _has_empty_rows(self) -> bool:
        if not {*self.case.inputs, *self.case.options} & (ASKED_BY["masked"] | ASKED_BY["biased"]):
            return False
        inputs = convert_inputs(self.case, make_exact_inputs(self.case), "float32").arrays
        return bool(empty_rows(self.case.operation, AttentionProblem(self.case.options, inputs)).any())


def is_beyond_a_tile(case: Case) -> bool:
    """Whether a case has more queries and more keys than a tile, and no multiple of it of either."""
    shapes = case.input_shapes
    lengths = shapes["scores"][-2:] if "scores" in shapes else (shapes["query"][-2], shapes["key"][-2])
    return all(length > TILE and length % TILE for length in lengths)


def _inputs_of(operation: Operation) -> Mapping[str, InputSpec]:
    if operation.name != "scoring":
        return operation.inputs
    return {name: spec for inputs in SCORE_INPUTS.values() for name, spec in inputs.items()}


def _comes_with_another(name: str, inputs: Mapping[str, InputSpec]) -> bool:
    """Whether two inputs need each other and the other stands for both."""
    other = inputs[name].needs
    return other is not None and inputs[other].needs == name and other < name


def _levels_of_option(option: str) -> list[Level]:
    field = Options.model_fields.get(option)
    texts = [text for text in _words(field and field.annotation) if isinstance(text, str)]
    return [Level(option, f"{option} {text}") for text in texts] or [Level(option, option)]


def _words(annotation: Any) -> Iterator[Any]:
    """Yield the words of a Literal, wherever it stands in an annotation."""
    for each in get_args(annotation):
        yield each
        yield from _words(each)


def _levels_of_input(name: str, spec: InputSpec) -> list[Level]:
    if spec.broadcast:
        return [Level(name, f"{name} {how} {axis}") for axis in spec.axes for how in ("along", "spread over")]
    return [Level(name, name), *([Level(name, f"{name} with 0")] if spec.whole else [])]


def _has_input(case: Case, name: str, text: str) -> bool:
    spec = case.input_specs[name]
    if spec.whole and text.endswith(" with 0"):
        return 0 in make_exact_inputs(case)[name].array
    if not spec.broadcast:
        return True
    _, how, axis = text.replace("spread over", "spread").split(" ")
    length = case.input_shapes[name][spec.axes.index(axis)]
    return (length > 1) == (how == "along")


def _heads(case: Case) -> tuple[int, int]:
    if case.operation == "multi_head_attention":
        return int(case.options["heads"]), int(case.options.get("kv_heads") or case.options["heads"])
    return case.input_shapes["query"][1], case.input_shapes["key"][1]


def _widths(case: Case) -> tuple[int, int]:
    if case.operation == "multi_head_attention":
        return case.stage_shapes["key"][-1], case.stage_shapes["value"][-1]
    return case.input_shapes["key"][-1], case.input_shapes["value"][-1]


WITH_PAIRS = [operation for operation in OPERATIONS.values() if any(True for _ in pairs_of(operation))]


@cache
def given_of(operation: str) -> list[Given]:
    """Return what the bundled cases of an operation that go beyond a tile give."""
    return [Given(case) for case in select_cases().cases if case.operation == operation and is_beyond_a_tile(case)]


def missing(operation: Operation, given: Sequence[Given]) -> list[str]:
    """Say which pairs stand in too few cases, each in a line."""
    lines = []
    for pair in pairs_of(operation):
        having = [each for each in given if set(pair) <= each.levels]
        few = sum(each.has_few for each in having)
        if len(having) < CASES_OF_A_PAIR or not few:
            most = FEW.get(operation.name, 4)
            lines.append(
                f"{operation.name}: {pair[0].text} with {pair[1].text}: in {len(having)} cases beyond a tile, {few} of "
                f"them with at most {most} options; expected {CASES_OF_A_PAIR} and 1"
            )
    return lines


@pytest.mark.parametrize("operation", WITH_PAIRS, ids=lambda operation: operation.name)
def test_every_two_options_meet_beyond_a_tile(operation: Operation) -> None:
    lines = missing(operation, given_of(operation.name))
    assert not lines, "\n".join([*lines, "write cases for them in cases/pairs*.yaml"])


def test_gradients_meet_all_pairs_of_attention_but_those_of_a_past() -> None:
    of_attention, of_gradients = (set(pairs_of(OPERATIONS[name])) for name in ("attention", "attention_gradients"))
    assert {option for pair in of_attention - of_gradients for option in _options(pair)} - {"past_key"} == {
        option for option in levels_of(OPERATIONS["attention"]) if option != "past_key"
    }
    assert all("past_key" in _options(pair) for pair in of_attention - of_gradients)
    assert of_gradients < of_attention


def _options(pair: Pair) -> set[str]:
    return {level.option for level in pair}


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"options": frozenset({"temperature"})}, {"temperature"}),
        ({"inputs": {"slopes": InputSpec(("H",), required=False)}}, {"slopes"}),
        (
            {"inputs": {"gate": InputSpec(("B", "Lq"), required=False, broadcast=True)}},
            {"gate along B", "gate spread over B", "gate along Lq", "gate spread over Lq"},
        ),
        ({"inputs": {"counts": InputSpec(("B",), required=False, whole=True)}}, {"counts", "counts with 0"}),
    ],
    ids=["an option", "an input", "a broadcast input", "counts"],
)
def test_what_is_added_to_the_specification_is_missed_with_everything(changes: dict[str, Any], texts: set[str]) -> None:
    attention = OPERATIONS["attention"]
    changed = replace(attention, **{field: getattr(attention, field) | added for field, added in changes.items()})
    lines = missing(changed, given_of("attention"))
    others = {level.text for levels in levels_of(attention).values() for level in levels}
    assert len(others) >= 30
    assert len(lines) == len(texts) * len(others)
    for text in texts:
        assert all(any(text in line and other in line for line in lines) for other in others)


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
    assert not any(set(pair) <= each.levels for pair in never for each in given_of("scoring"))


def test_what_is_not_asked_is_an_option_somewhere_and_has_a_reason() -> None:
    every = {option for operation in OPERATIONS.values() for option in operation.options}
    assert NOT_ASKED.keys() | MEANT_OF_OTHERS.keys() <= every
    assert all(len(reason.split()) > 3 for reason in [*NOT_ASKED.values(), *MEANT_OF_OTHERS.values()])
    assert FEW.keys() <= OPERATIONS.keys()
