"""A case in one dtype with all of its numbers at hand, so that a search can draw it, change it, and write it as a file.

Whatever a case file says in other words (a draw, a pattern, a merged layout, linear projections) is here what it comes
to: arrays as the operation takes them, rounded once to the dtype. The case that the harness judges is read from that by
the ordinary loader, which refuses what cannot be.

New of a problem, beside those that were asked before, is every option, class of sizes and value, and every pair. What
an implementation refused whenever it was asked is drawn less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.common.wording import slug
from attncheck.reading.case import Case
from attncheck.reading.inputs import inputs_in
from attncheck.reading.loader import case_of_data
from attncheck.reading.problem import Problem
from attncheck.searching.shapes import EDGES
from attncheck.spec import HEADS, OPERATIONS, InputSpec, score_kind

MAX_SPELLED = 128
"""Numbers of an array that are handed to the loader one by one; larger ones go by way of a file, which is quicker."""
_FOR_FILES = ("projections", "poison")
"""Options that say how a file writes its arrays: here they are as they come to be."""


def optional_inputs(problem: Problem) -> tuple[str, ...]:
    """Return the inputs that may be left out."""
    return tuple(name for name in problem.inputs if not problem.specs[name].required)


def count_elements(problem: Problem) -> int:
    """Return the number of elements of all inputs."""
    return sum(array.size for array in problem.inputs.values())


def has_nonfinite(problem: Problem) -> bool:
    """Return whether NaN or infinity is in the inputs, except for minus infinity in those that forbid by it."""
    for name, array in problem.inputs.items():
        allowed = problem.specs[name].may_be_infinite
        if array.dtype.kind == "f" and not (np.isfinite(array) | (allowed & np.isneginf(array))).all():
            return True
    return False


_OF_NORMS = {"Nq": "H", "Nk": "Hkv"}
"""Widths of norms, and the heads that the full width goes over."""


def axes_of(spec: InputSpec, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the letters of an input's axes; weights of norms go along widths, perhaps of all heads."""
    [*_, last] = spec.axes
    if last not in _OF_NORMS:
        return spec.axes
    return (f"{_OF_NORMS[last]}*D" if options.get("norm_over") == "full" else "D",)


def concrete_case(case: Case, dtype: str) -> Problem:
    """Return any case as it is in a dtype; the numbers that it expects of a result are left out."""
    inputs = inputs_in(case, dtype).arrays
    specs = case.input_specs
    options = {name: value for name, value in case.options.items() if name not in _FOR_FILES and value is not False}
    if not OPERATIONS[case.operation].has_projections:  # of a merged layout: here are axes of heads
        options = {name: value for name, value in options.items() if name not in HEADS}
    return Problem(
        case.operation,
        options,
        {name: array.astype(np.float64) if specs[name].is_number else array for name, array in inputs.items()},
        dtype,
        {name: layout for name, layout in case.memory_layout.items() if name in inputs},
        case.judged_stages,
        case.supports_statistics,
    )


def case_data(problem: Problem, inputs: Mapping[str, Any], name: str, found_by: str) -> dict[str, Any]:
    """Return what stands in a case file, with its ``inputs`` as they are to be written."""
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in problem.options.items()}
    numbers = (array for array in problem.inputs.values() if array.dtype.kind == "f")
    odd = {"allow_nonfinite": True} if any(not np.isfinite(array).all() for array in numbers) else {}
    entry = {
        "name": name,
        "dtypes": [problem.dtype],
        "inputs": dict(inputs),
        **({"options": options} if options else {}),
        **({"memory_layout": dict(problem.memory_layout)} if problem.memory_layout else {}),
        **({"stages": list(problem.stages)} if problem.stages else {}),
        **({"supports_statistics": True} if problem.supports_statistics else {}),
        **odd,
    }
    source = {"kind": "derivation", "title": found_by}
    return {"title": "Found by a search", "source": source, "operation": problem.operation, "cases": [entry]}


def read_concrete(
    problem: Problem,
    folder: Path,
    identity: str,
    max_spelled: int = MAX_SPELLED,
    title: str = "A drawn problem",
) -> Case:
    """Return the case that the harness judges. Raises ``CaseError`` where there is no such case.

    Arrays of more than ``max_spelled`` numbers are put into ``folder``, where they have to stay as long as the case is
    used.
    """
    inputs = {}
    for name, array in problem.inputs.items():
        if not array.size:
            inputs[name] = {"constant": 0, "shape": list(array.shape)}
        elif array.size <= max_spelled:
            inputs[name] = {"values": array.tolist()}
        else:
            file = f"{identity.rpartition('/')[2]}-{name}.npy"
            np.save(folder / file, array)
            inputs[name] = {"file": file}
    return case_of_data(case_data(problem, inputs, title, "drawn"), folder, identity)


_SIZES = (0, 1, 8, 15, 16, 63, 64, 127, 128)
"""The largest of each class of sizes but the last."""
_SIZED = ("B", "H", "Lq", "Lk", "P", "T", "D", "Dv", "N", "Np", "Lp")
_SURE, _SURE_UNNAMED = 2, 10
"""So often refused and never answered, a feature is taken for one that an implementation has not: where that named it,
and where it did not.
"""


def features_of(problem: Problem) -> frozenset[str]:
    """Return what a problem has, in words; all but its dtype and operation are of that operation."""
    return frozenset(_features(problem))


def asked_of(problem: Problem) -> frozenset[str]:
    """Return what a problem asks of an implementation besides the operation: options, optional inputs, shared heads."""
    return frozenset({*_options(problem), *optional_inputs(problem), *_heads(problem)})


def identity_of(problem: Problem, name: str) -> str:
    """Return what lists of expected failures call a drawn problem: search/<operation>/<what it asks>/<name>."""
    words = [*sorted(asked_of(problem)), *(["nonfinite"] if has_nonfinite(problem) else [])]
    return f"search/{problem.operation}/{slug(' '.join(words)) or 'plain'}/{name}"


def _features(problem: Problem) -> Iterator[str]:
    yield f"dtype {problem.dtype}"
    yield f"regime {problem.regime}"
    yield f"special {problem.special}"
    yield from _options(problem)
    yield from _heads(problem)
    for name in optional_inputs(problem):
        spread = problem.specs[name].broadcast
        along = [
            axis
            for axis, length in zip(problem.specs[name].axes, problem.inputs[name].shape, strict=True)
            if spread and length > 1
        ]
        yield f"{name} along {' '.join(along)}" if spread else name
    for name, layout in problem.memory_layout.items():
        yield f"{name} {layout}"
    lengths = problem.lengths
    for letter in _SIZED:
        if letter in lengths:
            length = lengths[letter]
            yield f"{letter} class {sum(length > most for most in _SIZES)}"
            if length > 8 and length in EDGES:
                yield f"{letter} = {length}"
    if lengths.get("D") != lengths.get("Dv", lengths.get("D")):
        yield "another width of values"
    if lengths.get("Lq") == lengths.get("T"):
        yield "as many queries as keys"


def _options(problem: Problem) -> Iterator[str]:
    for name, value in problem.options.items():
        match value:
            case str():
                yield f"{name} {value}"
            case tuple():
                sides = ("none" if side is None else "some" if side else "zero" for side in value)
                yield f"{name} {' '.join(sides)}"
            case bool():
                yield name
            case float():
                yield f"{name} {'zero' if value == 0 else 'negative' if value < 0 else 'positive'}"
            case _ if name not in HEADS:
                yield name


def _heads(problem: Problem) -> Iterator[str]:
    lengths = problem.lengths
    if "Hkv" in lengths and lengths["Hkv"] < lengths.get("H", 0):
        yield "one head shared" if lengths["Hkv"] == 1 else "heads shared"


def kind_of(problem: Problem) -> str:
    """Return the operation, with the kind of score where that is an option."""
    own = f" {score_kind(problem.operation, problem.options)}" if OPERATIONS[problem.operation].has_score_kinds else ""
    return f"{problem.operation}{own}"


_KIND_WEIGHT = 30
"""An operation of few inputs has few features: while it is new, it counts as much as the pairs of eight features."""


@dataclass
class Seen:
    """The features, and pairs of them, that were asked, each with how often, and those refused or answered."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)

    def novelty(self, problem: Problem) -> float:
        """Return how much of a problem is new: what was never asked counts 1, and less each time that it was."""
        of_kind = _KIND_WEIGHT / (1 + self.counts[kind_of(problem)]) ** 2
        return of_kind + sum(1 / (1 + self.counts[key]) ** 2 for key in _keys(problem))

    def add(self, problem: Problem) -> None:
        """Count a problem that is asked."""
        self.counts.update(_keys(problem))

    def note(self, problem: Problem, *, is_refused: bool, lacks: Collection[str] = ()) -> None:
        """Remember whether an implementation took a problem; ``lacks`` is what it said that it has not.

        A function that it has not is the operation's; what names nothing that was asked may be of anything.
        """
        asked = _refusable(problem)
        if not is_refused:
            self.answered |= asked
            return
        named = {each for each in asked if each.partition(" ")[0] in lacks}
        if any(lack.endswith("()") for lack in lacks):
            named.add(kind_of(problem))
        self.refused.update(named or {f"{kind_of(problem)}: {each}" for each in asked})

    def is_likely_refused(self, problem: Problem) -> bool:
        """Return whether something of a problem was refused whenever it was asked."""
        kind, asked = kind_of(problem), _refusable(problem)
        return any(self.refused[each] >= _SURE and each not in self.answered for each in asked) or any(
            self.refused[f"{kind}: {each}"] >= _SURE_UNNAMED and each not in self.answered for each in asked
        )

    @property
    def surely_refused(self) -> frozenset[str]:
        """The words that were refused whenever they were asked, by an implementation that named them."""
        return frozenset(name for name, count in self.refused.items() if count >= _SURE and name not in self.answered)

    def record(self) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"counts": dict(self.counts), "refused": dict(self.refused), "answered": sorted(self.answered)}


def _refusable(problem: Problem) -> set[str]:
    """Return what an implementation may not have: the operation, the dtype, an option, an input, shared heads."""
    return {kind_of(problem), f"dtype {problem.dtype}", *asked_of(problem)}


def _keys(problem: Problem) -> Iterator[str]:
    kind, features = kind_of(problem), sorted(features_of(problem))
    yield kind
    for feature in features:
        yield f"{kind}: {feature}"
    for one, other in combinations(features, 2):
        yield f"{kind}: {one} + {other}"
