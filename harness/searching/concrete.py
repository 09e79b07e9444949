"""A case in one dtype with all of its numbers, so that a search can draw it, change it, and write it as a file.

Draws, patterns, merged layouts and linear projections of a case file are evaluated: here are the arrays that the
operation takes, rounded once to the dtype. The ordinary loader reads the judged case from them, and rejects impossible
ones.

The novelty of a problem counts its options, size classes and values, and pairs of them, that earlier problems did not
have. Features that an implementation always refused are drawn less.
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
from attncheck.reading.inputs import make_inputs
from attncheck.reading.loader import make_case_from_data
from attncheck.reading.problem import Problem
from attncheck.searching.shapes import EDGE_LENGTHS
from attncheck.spec import HEADS, OPERATIONS, InputSpec, score_kind

MAX_LISTED_ELEMENTS = 128
"""Arrays of at most so many numbers are passed to the loader as lists; for larger ones a file is quicker."""
_FILE_ONLY_OPTIONS = ("projections", "poison")
"""Options for how a file writes its arrays: here the arrays are evaluated."""


def optional_inputs(problem: Problem) -> tuple[str, ...]:
    """Return the inputs that may be left out."""
    return tuple(name for name in problem.inputs if not problem.input_specs[name].required)


def count_elements(problem: Problem) -> int:
    """Return the number of elements of all inputs."""
    return sum(array.size for array in problem.inputs.values())


def has_nonfinite(problem: Problem) -> bool:
    """Return whether inputs contain NaN or infinity, except for minus infinity that forbids a key.

    Example:
        >>> forbidden, unknown = np.full((1, 1, 1, 2), -np.inf), np.full((1, 1, 1, 2), np.nan)
        >>> [has_nonfinite(Problem("attention", {}, {"bias": bias})) for bias in (forbidden, unknown)]
        [False, True]
    """
    for name, array in problem.inputs.items():
        allowed = problem.input_specs[name].may_be_infinite
        if array.dtype.kind == "f" and not (np.isfinite(array) | (allowed & np.isneginf(array))).all():
            return True
    return False


_HEADS_OF_NORM_WIDTHS = {"Nq": "H", "Nk": "Hkv"}
"""Widths of norms -> the heads that a norm of the full width includes."""


def input_axes(spec: InputSpec, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the letters of an input's axes; weights of norms have one width, or that of all heads."""
    [*_, last] = spec.axes
    if last not in _HEADS_OF_NORM_WIDTHS:
        return spec.axes
    return (f"{_HEADS_OF_NORM_WIDTHS[last]}*D" if options.get("norm_over") == "full" else "D",)


def concrete_problem(case: Case, dtype: str) -> Problem:
    """Return the problem of any case in a dtype, without its expected numbers."""
    inputs = make_inputs(case, dtype).arrays
    specs = case.input_specs
    options = {
        name: value for name, value in case.options.items() if name not in _FILE_ONLY_OPTIONS and value is not False
    }
    if not OPERATIONS[case.operation].has_projections:  # they described a merged layout; here heads have axes
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


def case_file_content(problem: Problem, inputs: Mapping[str, Any], name: str, found_by: str) -> dict[str, Any]:
    """Return the content of a case file; ``inputs`` are in the form in which they are written."""
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


def case_of_problem(
    problem: Problem,
    folder: Path | None,
    case_id: str,
    max_listed: int = MAX_LISTED_ELEMENTS,
    title: str = "A drawn problem",
) -> Case:
    """Return the case that the harness judges. Raises ``CaseError`` if the problem is no case.

    Arrays of more than ``max_listed`` numbers are written to ``folder``, and have to stay there as long as the case is
    used. Without a folder they stay in memory: then only this process can make the inputs of the case.
    """
    inputs, arrays = {}, {}
    for name, array in problem.inputs.items():
        if not array.size:
            inputs[name] = {"constant": 0, "shape": list(array.shape)}
        elif array.size <= max_listed:
            inputs[name] = {"values": array.tolist()}
        else:
            file = f"{case_id.rpartition('/')[2]}-{name}.npy"
            if folder is None:
                arrays[file] = array
            else:
                np.save(folder / file, array)
            inputs[name] = {"file": file}
    return make_case_from_data(case_file_content(problem, inputs, title, "drawn"), folder or Path(), case_id, arrays)


_SIZE_CLASS_LIMITS = (0, 1, 8, 15, 16, 63, 64, 127, 128)
"""The largest size of each class except the last."""
_SIZED_AXES = ("B", "H", "Lq", "Lk", "P", "T", "D", "Dv", "N", "Np", "Lp")
_MIN_NAMED_REFUSALS, _MIN_UNNAMED_REFUSALS = 2, 10
"""A feature that was refused so often, and never computed, counts as missing: if the implementation named it, and if it
did not.
"""


def problem_features(problem: Problem) -> frozenset[str]:
    """Return the features of a problem in words."""
    return frozenset(_iterate_problem_features(problem))


def required_features(problem: Problem) -> frozenset[str]:
    """Return the features that a problem requires besides the operation: options, optional inputs, shared heads.

    Example:
        >>> arrays = {"query": np.ones((1, 4, 2, 8)), "key": np.ones((1, 1, 2, 8)), "value": np.ones((1, 1, 2, 8))}
        >>> sorted(required_features(Problem("attention", {"is_causal": True, "window": (3, None)}, arrays)))
        ['is_causal', 'one head shared', 'window some none']
    """
    return frozenset({*_option_features(problem), *optional_inputs(problem), *_head_features(problem)})


def drawn_case_id(problem: Problem, name: str) -> str:
    """Return the id of a drawn problem in lists of expected failures: search/<operation>/<its features>/<name>."""
    words = [*sorted(required_features(problem)), *(["nonfinite"] if has_nonfinite(problem) else [])]
    return f"search/{problem.operation}/{slug(' '.join(words)) or 'plain'}/{name}"


def _iterate_problem_features(problem: Problem) -> Iterator[str]:
    yield f"dtype {problem.dtype}"
    yield f"regime {problem.drawing_regime}"
    yield f"special {problem.special_value}"
    yield from _option_features(problem)
    yield from _head_features(problem)
    for name in optional_inputs(problem):
        spread = problem.input_specs[name].is_broadcastable
        along = [
            axis
            for axis, length in zip(problem.input_specs[name].axes, problem.inputs[name].shape, strict=True)
            if spread and length > 1
        ]
        yield f"{name} along {' '.join(along)}" if spread else name
    for name, layout in problem.memory_layout.items():
        yield f"{name} {layout}"
    lengths = problem.axis_lengths
    for letter in _SIZED_AXES:
        if letter in lengths:
            length = lengths[letter]
            yield f"{letter} class {sum(length > most for most in _SIZE_CLASS_LIMITS)}"
            if length > 8 and length in EDGE_LENGTHS:
                yield f"{letter} = {length}"
    if lengths.get("D") != lengths.get("Dv", lengths.get("D")):
        yield "another width of values"
    if lengths.get("Lq") == lengths.get("T"):
        yield "as many queries as keys"


def _option_features(problem: Problem) -> Iterator[str]:
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


def _head_features(problem: Problem) -> Iterator[str]:
    lengths = problem.axis_lengths
    if "Hkv" in lengths and lengths["Hkv"] < lengths.get("H", 0):
        yield "one head shared" if lengths["Hkv"] == 1 else "heads shared"


def operation_and_score(problem: Problem) -> str:
    """Return the operation, with the kind of score if that is an option."""
    if not OPERATIONS[problem.operation].has_score_option:
        return problem.operation
    return f"{problem.operation} {score_kind(problem.operation, problem.options)}"


_NEW_OPERATION_WEIGHT = 30
"""An operation of few inputs has few features: while it is new, it counts as much as the pairs of eight features."""


@dataclass
class FeatureCounts:
    """Counts of drawn features and pairs of features, and the features that were refused or computed."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)

    def novelty(self, problem: Problem) -> float:
        """Return the novelty of a problem: a feature or pair counts 1 if it was never drawn, and less each time.

        Example:
            >>> counts, problem = FeatureCounts(), Problem("softmax", {}, {"scores": np.ones((1, 1, 2, 3))})
            >>> before = counts.novelty(problem)
            >>> counts.count_features(problem)
            >>> counts.novelty(problem) / before
            0.25
        """
        count_of = self.counts.get  # a Counter calls a Python function for a missing key
        of_kind = _NEW_OPERATION_WEIGHT / (1 + count_of(operation_and_score(problem), 0)) ** 2
        return of_kind + sum([1 / (1 + count_of(key, 0)) ** 2 for key in _feature_and_pair_keys(problem)])

    def count_features(self, problem: Problem) -> None:
        """Count the features of a problem that is run."""
        self.counts.update(_feature_and_pair_keys(problem))

    def record_answer(self, problem: Problem, *, is_refused: bool, missing_features: Collection[str] = ()) -> None:
        """Record if an implementation refused a problem; ``missing_features`` are the features that it named.

        A missing function counts for the operation. If no named feature is one of the problem, any may be the reason.
        """
        asked = _refusable_features(problem)
        if not is_refused:
            self.answered |= asked
            return
        named = {word for word in asked if word.partition(" ")[0] in missing_features}
        if any(lack.endswith("()") for lack in missing_features):
            named.add(operation_and_score(problem))
        self.refused.update(named or {f"{operation_and_score(problem)}: {word}" for word in asked})

    def is_likely_refused(self, problem: Problem) -> bool:
        """Return whether a feature of a problem was always refused."""
        kind, asked = operation_and_score(problem), _refusable_features(problem)
        return any(self.refused[word] >= _MIN_NAMED_REFUSALS and word not in self.answered for word in asked) or any(
            self.refused[f"{kind}: {word}"] >= _MIN_UNNAMED_REFUSALS and word not in self.answered for word in asked
        )

    @property
    def always_refused(self) -> frozenset[str]:
        """The features that were always refused, by an implementation that named them."""
        return frozenset(
            name for name, count in self.refused.items() if count >= _MIN_NAMED_REFUSALS and name not in self.answered
        )

    def as_record(self) -> dict[str, Any]:
        """Return the content of the file that stores the state."""
        return {"counts": dict(self.counts), "refused": dict(self.refused), "answered": sorted(self.answered)}


def _refusable_features(problem: Problem) -> set[str]:
    """Return the features that an implementation may lack: operation, dtype, options, inputs, shared heads."""
    return {operation_and_score(problem), f"dtype {problem.dtype}", *required_features(problem)}


def _feature_and_pair_keys(problem: Problem) -> Iterator[str]:
    kind, features = operation_and_score(problem), sorted(problem_features(problem))
    yield kind
    for feature in features:
        yield f"{kind}: {feature}"
    for first, second in combinations(features, 2):
        yield f"{kind}: {first} + {second}"
