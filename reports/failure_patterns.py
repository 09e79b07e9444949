"""Features that the failing cases of an implementation have in common and the passing ones have not.

A report prints a pattern only if all of this is true:

- Every failing case has the feature. No passing case has it, or at least three quarters of the cases that have it fail.
- Fewer than one in a hundred random choices of as many failing cases would share any of the tried features
  (``_ChanceTest``). If a pattern has two features, each passes this test among the cases that have the other.
- The run made two further problems that confirm the pattern (``attncheck.searching.hints``).

If several features describe the same cases, the simplest is printed. If all failing cases share no feature, smaller
groups are tried: wrong numbers or no numbers, then one verdict at one stage.

Features describe a case's options, inputs, axes, dtype and tags. A map of lengths shows at which lengths of queries and
keys an implementation fails, and the tile that explains it. Failing cases are sorted, the simplest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.common.errors import ExitCode
from attncheck.common.wording import format_at_stage
from attncheck.reports.cells import State, cell_table
from attncheck.reports.frames import Column, Frames, cached_for_frames, rows_of_column, select_failing
from attncheck.reports.one_failure import record_axis_lengths, shape_text
from attncheck.spec import (
    ACCURACY_OF_FLOAT32,
    AXES,
    DTYPES,
    HEADS,
    MEMORY_LAYOUTS,
    OPERATIONS,
    OPTIONS,
    Options,
    input_specs,
)
from attncheck.spec.verdicts import Verdict

MIN_CASES = 3
"""The fewest failing cases, and the fewest passing cases, that a pattern needs."""
_MIN_SHARE = 0.75
"""The smallest share of the cases with a feature that fail, if not all fail."""
_MIN_ODDS = 100
"""At most one in this many random choices of cases may have something in common by chance."""
_MAX_SHOWN = 3
"""Failing cases that are changed, one after the other, until one confirms a feature."""
_MAX_PAIRED_FEATURES = 100
"""The number of features, the simplest first, that are tried in pairs."""
_PASSING = frozenset({State.AGREE, State.ERRATUM, State.MISPRINT, State.XPASS})
_FAILS, _IS_WRONG, _CANNOT_RUN = "fails", "is wrong", "could not be run"


@dataclass(frozen=True)
class FailurePattern:
    """A feature ``where`` an implementation fails.

    It fails in ``failing`` of the ``cases_with_feature``, and in none of the ``others``.

    ``noun`` is the counted unit: cases or, if some cases fail only in some of their dtypes, evaluations.
    ``simplest_failures`` has the simplest failing cases, each in a dtype.
    """

    column: Column
    verb: str
    where: str
    failing: int
    cases_with_feature: int
    others: int
    simplest_failures: tuple[tuple[str, str], ...]
    noun: str = "case"
    tile: int = 0
    """The tile that explains the failures; 0 if none does."""
    is_user_function: bool = False
    """Whether the implementation is a user's function, which can declare what it does not accept."""
    failing_otherwise: int = 0
    """The number of cases that fail in another way; the pattern is only about some of the failures."""

    @property
    def passing_elsewhere(self) -> int:
        """The number of passing cases without the feature: all of them."""
        return self.others

    def text(self, *, with_environment: bool) -> str:
        """Return the pattern as a line, without the last full stop."""
        name = self.column.title(with_environment=with_environment, with_version=False)
        only = "" if self.failing == self.cases_with_feature else " only"
        counted = "" if self.noun == "case" else f" {self.noun}s"
        takes_none = (
            self.is_user_function and self.verb == _CANNOT_RUN and not only and self.where not in MISSING_CAPABILITIES
        )
        return (
            f"{name} {self.verb}{only} where {self.where}: {self.failing:,} of {self.cases_with_feature:,}{counted}; "
            f"passes elsewhere: {self.passing_elsewhere:,} of {self.others:,}"
            f"{f'; not counted: {self.failing_otherwise:,} that fail in another way' if self.failing_otherwise else ''}"
            f"{'; if it takes none of these, let it raise NotImplementedError' if takes_none else ''}"
        )


@cached_for_frames
def confirmed_patterns(frames: Frames) -> tuple[FailurePattern, ...]:
    """Return the candidates that further problems confirmed."""
    return tuple(
        pattern
        for pattern in candidate_patterns(frames)
        if pattern.where
        in frames.requests[pattern.column.environment].confirmed_features.get(pattern.column.implementation, ())
    )


@cached_for_frames
def candidate_patterns(frames: Frames) -> tuple[FailurePattern, ...]:
    """Return the features that failing cases share, at most one per implementation, or per way in which it fails."""
    patterns: list[FailurePattern] = []
    for column in frames.columns:
        judged = _with_judged_stages(frames, column, judged_evaluations(frames, column))
        judged = _without_float64_of_float32(frames, column, judged)
        is_wrong = any(_failure_way(verdict, "") == _IS_WRONG for verdict in judged["verdict"][judged["fails"]])
        verb = _FAILS if is_wrong else _CANNOT_RUN
        patterns += _patterns_among(
            frames, column, judged, judged["fails"].to_numpy(), verb, (_failure_way, _failure_kind)
        )
    return tuple(patterns)


MISSING_CAPABILITIES = {"H differs from Hkv": "grouped_heads", "D differs from Dv": "value_width"}
"""The capability that a function lacks if it fails in all cases with this feature."""


def pattern_lines(frames: Frames) -> list[str]:
    """Return each pattern as a line."""
    return [pattern.text(with_environment=frames.has_several_environments) for pattern in confirmed_patterns(frames)]


_FailureLabel = Callable[[str, str], str]


def _failure_way(verdict: str, stage: str) -> str:
    return _IS_WRONG if Verdict(verdict).exit_code is ExitCode.DISAGREE else _CANNOT_RUN


def _failure_kind(verdict: str, stage: str) -> str:
    way = _failure_way(verdict, stage)
    return f"{way} ({format_at_stage(verdict, stage)})" if way == _IS_WRONG else way


def _patterns_among(
    frames: Frames, column: Column, judged: pd.DataFrame, failing: CaseMask, verb: str, finer: Sequence[_FailureLabel]
) -> Iterator[FailurePattern]:
    """Yield the feature that some failing evaluations share and passing ones lack, or else those of smaller groups."""
    chosen = judged[failing | ~judged["fails"].to_numpy()]
    if min(chosen["case"][chosen["fails"] == fails].nunique() for fails in (True, False)) < MIN_CASES:
        return
    if pattern := _find_pattern(frames, column, chosen, verb):
        fails_otherwise = judged["fails"].to_numpy() & ~failing
        others = set(judged["case"][fails_otherwise]) - set(judged["case"][failing])
        yield replace(pattern, failing_otherwise=len(others))
    elif finer:
        of = zip(judged["verdict"], judged["stage"], judged["fails"], strict=True)
        labels = np.array([finer[0](verdict, stage) if fails else "" for verdict, stage, fails in of])
        for label in dict.fromkeys(labels[failing]):
            yield from _patterns_among(frames, column, judged, failing & (labels == label), label, finer[1:])


def judged_evaluations(frames: Frames, column: Column) -> pd.DataFrame:
    """Return a row for each evaluation that passes or fails, without unjudged evaluations and expected failures."""
    rows = [
        (case, dtype, cell.verdict, cell.stage, cell.state is State.FAILING)
        for case, cells in cell_table(frames).items()
        for dtype, cell in cells.get(column, {}).items()
        if cell.state in _PASSING or (cell.state is State.FAILING and cell.verdict != Verdict.UNTRIED)
    ]
    return pd.DataFrame(rows, columns=["case", "dtype", "verdict", "stage", "fails"]).astype({"fails": bool})


def _with_judged_stages(frames: Frames, column: Column, judged: pd.DataFrame) -> pd.DataFrame:
    """Leave out passing evaluations that compared none of the stages that fail elsewhere."""
    results = rows_of_column(frames.results, column)
    stages = set(select_failing(results)["stage"])
    seen = pd.MultiIndex.from_frame(results.loc[results["stage"].isin(stages), ["case", "dtype"]])
    is_seen = pd.MultiIndex.from_frame(judged[["case", "dtype"]]).isin(seen)
    return judged if "" in stages else judged[judged["fails"] | is_seen]


def _without_float64_of_float32(frames: Frames, column: Column, judged: pd.DataFrame) -> pd.DataFrame:
    """Leave out float64 evaluations that are as accurate as float32, if others fail, too."""
    results = rows_of_column(frames.results, column)
    is_accuracy = results["diagnosis"].eq(ACCURACY_OF_FLOAT32) & results["dtype"].eq("float64")
    cases = set(results.loc[is_accuracy, "case"])
    others = judged[~(judged["fails"] & judged["dtype"].eq("float64") & judged["case"].isin(cases))]
    return others if others["fails"].any() else judged


def _find_pattern(frames: Frames, column: Column, judged: pd.DataFrame, verb: str) -> FailurePattern | None:
    """Return the pattern of the simplest feature of all failing evaluations that no or few passing ones have."""
    failing = judged["fails"].to_numpy()
    of_case, names = pd.factorize(judged["case"])
    cases = [frames.cases[case] for case in names]
    fails, passes = np.zeros(len(cases), dtype=bool), np.zeros(len(cases), dtype=bool)
    fails[of_case[failing]] = passes[of_case[~failing]] = True
    ways: list[tuple[str, CaseMask, Iterator[Feature], float]] = [("case", fails, case_features(cases), 1.0)]
    if (fails & passes).any():  # some dtypes of a case fail: at first these count, then cases of which any does
        of_evaluations = (
            Feature(feature.text, feature.case_mask[of_case], feature.tile) for feature in case_features(cases)
        )
        features = (feature for part in (dtype_features(judged["dtype"].tolist()), of_evaluations) for feature in part)
        # Dtypes of a case are no cases of their own.
        ways = [("evaluation", failing, features, len(cases) / len(failing)), *ways]
    fitting = ((*way[:2], _find_separating_feature(*way[1:], looks=len(ways))) for way in ways)
    noun, fails_here, feature = next((way for way in fitting if way[2]), ("", failing, None))
    if feature is None:
        return None
    dtypes = dict(zip(judged["case"][failing], judged["dtype"][failing], strict=True))
    simplest = sorted(dtypes, key=lambda case: (simplicity_sort_key(frames.cases[case]), case))[:_MAX_SHOWN]
    failed, held = int((fails_here & feature.case_mask).sum()), int(feature.case_mask.sum())
    return FailurePattern(
        column,
        verb,
        feature.text,
        failing=failed,
        cases_with_feature=held,
        others=len(feature.case_mask) - held,
        simplest_failures=tuple((case, dtypes[case]) for case in simplest),
        noun=noun,
        tile=feature.tile,
        is_user_function=column.implementation in frames.requests[column.environment].user_implementations,
    )


def _find_separating_feature(
    failing: CaseMask, features: Iterator[Feature], weight: float, *, looks: int
) -> Feature | None:
    """Return the feature, or else the pair of features, that best separates failing from passing.

    ``looks`` is the number of such searches of the same failing cases.
    """
    shared: list[Feature] = []
    seen: set[bytes] = set()
    for feature in features:
        count = int(feature.case_mask.sum())
        mark = blake2b(np.packbits(feature.case_mask).tobytes(), digest_size=16).digest()
        if not 0 < count < len(failing) or mark in seen:
            continue
        seen.add(mark)
        if feature.case_mask[failing].all():
            shared.append(feature)
    test = _ChanceTest(int(failing.sum()), len(failing), len(seen) * looks, weight)
    for feature in shared:
        if int(feature.case_mask.sum()) == test.failing:
            return feature if test.is_significant(test.failing, test.all) else None
    near = [
        feature
        for feature in shared
        if test.failing >= _MIN_SHARE * int(feature.case_mask.sum())
        and test.is_significant(int(feature.case_mask.sum()), test.all)
    ]
    near += _feature_pairs(shared, test)
    return min(near, key=lambda feature: int(feature.case_mask.sum()), default=None)


@dataclass(frozen=True)
class _ChanceTest:
    """A test that a shared feature is no chance: the counts of evaluations and of tried features.

    ``weight`` is the part of a case that one evaluation counts.
    """

    failing: int
    all: int
    features: int
    weight: float

    def is_significant(self, with_feature: int, among: int) -> bool:
        """Return whether chance does not explain that all failing cases are among the cases ``with_feature``.

        ``among`` is the number of all cases.
        """
        bits = _log2_choices(among, self.failing) - _log2_choices(with_feature, self.failing)
        return bits * self.weight >= math.log2(self.features * _MIN_ODDS)


def _feature_pairs(shared: Sequence[Feature], test: _ChanceTest) -> Iterator[Feature]:
    """Yield pairs of features that all failing cases have and few others, the simplest first.

    Each of the two is evident among the cases that have the other.
    """
    held = [(feature, int(feature.case_mask.sum())) for feature in shared]
    telling = [entry for entry in held if test.is_significant(test.failing, entry[1])][:_MAX_PAIRED_FEATURES]
    for i, j in sorted(combinations(range(len(telling)), 2), key=sum):
        (first, of_first), (second, of_second) = telling[i], telling[j]
        both = first.case_mask & second.case_mask
        holding = int(both.sum())
        if test.failing >= _MIN_SHARE * holding and test.is_significant(holding, min(of_first, of_second)):
            yield Feature(f"{first.text} and {second.text}", both, first.tile or second.tile)


def _log2_choices(of: int, chosen: int) -> float:
    """Return the logarithm, to base 2, of the number of ways to choose."""
    return (math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)) / math.log(2)


CaseMask = NDArray[np.bool_]
Record = Mapping[str, Any]

_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
TILES = (16, 32, 64, 128, 256)
"""Tiles that kernels have."""
_TILED_AXES = {"Lk": "keys", "Lq": "queries"}
_COUNTED_AXES = ("B", "H", "Hkv")
"""Axes of which no kernel has tiles."""
_COMPARED_AXES = (("H", "Hkv"), ("Lq", "Lk"), ("Lq", "T"), ("D", "Dv"), ("D", "Dk"))
_BROADCAST_AXES = {"B": "the batch", "H": "heads", "Lq": "queries", "T": "keys"}
_MAX_BORDERS = 64
"""Of one axis; of many different lengths some are taken."""
_MAX_VALUES = 12
"""Different values of one option, or of one width, that are told apart."""


@dataclass(frozen=True)
class Feature:
    """A predicate: its words, which follow *where*, and the cases for which it is true. Simpler features come first."""

    text: str
    case_mask: CaseMask
    tile: int = 0
    """The tile of the feature, if it has one."""


def evaluate_feature_parts(
    where: str, known: Sequence[Record], records: Sequence[Record], dtypes: Sequence[str]
) -> list[list[bool]]:
    """Return, for each further record, which parts of a feature are true; empty if a part is unknown.

    A part is looked up by its words, which may need lengths that only the ``known`` records have.
    """
    together = [*known, *records]
    of_dtypes = {feature.text: feature.case_mask for feature in dtype_features(dtypes)}
    of_cases = {feature.text: feature.case_mask[len(known) :] for feature in case_features(together)}
    truths = [of_dtypes.get(part, of_cases.get(part)) for part in where.split(" and ")]
    if any(holds is None for holds in truths):
        return []
    return [[bool(holds[number]) for holds in truths if holds is not None] for number in range(len(records))]


def dtype_features(dtypes: Sequence[str]) -> Iterator[Feature]:
    """Yield the features of the dtypes of evaluations."""
    dtype_names = np.array(dtypes)
    for dtype in DTYPES:
        yield Feature(f"the dtype is {dtype}", dtype_names == dtype)
    yield Feature("the dtype has 16 bits", np.isin(dtype_names, ("bfloat16", "float16")))
    yield Feature("the dtype is float64 or float32", np.isin(dtype_names, ("float64", "float32")))
    for dtype in DTYPES:
        yield Feature(f"the dtype is not {dtype}", dtype_names != dtype)


def case_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield the features of case records; shorter ones, and ones that tell more about a kernel, come first."""
    lengths = [record_axis_lengths(case) for case in cases]
    axes = {
        letter: np.array([axis_lengths.get(letter, -1) for axis_lengths in lengths])
        for letter in AXES
        if any(letter in axis_lengths for axis_lengths in lengths)
    }
    yield from _option_features(cases)
    yield from _axis_pair_features(axes)
    for letter, values in axes.items():
        for number in (1, 0):
            yield Feature(f"{letter} is {number}", values == number)
    yield from _tile_features(axes)
    yield from _length_features(axes)
    yield from _value_features(cases)
    yield from _broadcast_features(cases, lengths)
    yield from _word_features(cases)


def _option_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield which options are set, and which optional inputs are given."""
    names_of_cases = [frozenset(set_options_and_inputs(case)) for case in cases]
    for name in sorted(frozenset().union(*names_of_cases) - set(HEADS)):
        holds = np.array([name in names for names in names_of_cases])
        is_option = name in OPTIONS
        verb = "set" if is_option else "given"
        yield Feature(f"{name} is {verb}", holds)
        yield Feature(f"{name} is not {verb}", ~holds)


def _axis_pair_features(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    for one, other in _COMPARED_AXES:
        if one in axes and other in axes:
            first, second = axes[one], axes[other]
            known = (first >= 0) & (second >= 0)
            yield Feature(f"{one} differs from {other}", known & (first != second))
            yield Feature(f"{one} equals {other}", known & (first == second))
            yield Feature(f"{one} is smaller than {other}", known & (first < second))
            yield Feature(f"{one} is larger than {other}", known & (first > second))


def is_past_last_tile(lengths: NDArray[Any], tile: int | NDArray[Any]) -> CaseMask:
    """Return whether there are full tiles, and some elements past the last of them.

    Example:
        >>> is_past_last_tile(np.array([8, 16, 17, 32, 40]), 16).tolist()
        [False, False, True, False, True]
    """
    past: CaseMask = (lengths > tile) & (lengths % tile != 0)
    return past


def _tile_features(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """Yield the lengths that a kernel for full tiles only gets wrong."""
    for letter, what in _TILED_AXES.items():
        for tile in TILES if letter in axes else ():
            text = f"{what} lie past the last full tile of {tile}"
            yield Feature(text, is_past_last_tile(axes[letter], tile), tile)
        if {letter, "D"} <= axes.keys():
            width = np.maximum(axes["D"], 1)
            yield Feature(f"{what} lie past the last full tile of D", is_past_last_tile(axes[letter], width))


def _length_features(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """Yield multiples, widths and numbers of heads, for which kernels are compiled, and ranges of lengths."""
    for letter, values in axes.items():
        known = values >= 0
        for divisor in () if letter in _COUNTED_AXES else _MULTIPLES:
            whole = values % divisor == 0
            phrase, opposite = ("is even", "is odd") if divisor == 2 else (f"is a multiple of {divisor}", "")
            yield Feature(f"{letter} {opposite or f'is no multiple of {divisor}'}", known & ~whole)
            yield Feature(f"{letter} {phrase}", known & whole)
    for letter in ("D", "Dv", "Dk", *_COUNTED_AXES):
        for number in np.unique(axes.get(letter, np.zeros(0)))[-_MAX_VALUES:]:
            yield Feature(f"{letter} is {number}", axes[letter] == number)
    for letter, values in axes.items():
        known = values >= 0
        borders = np.unique(values[known])
        if len(borders) > _MAX_BORDERS:
            borders = borders[np.linspace(0, len(borders) - 1, _MAX_BORDERS).astype(int)]
        for value in borders:
            yield Feature(f"{letter} > {value}", known & (values > value))
            yield Feature(f"{letter} < {value}", known & (values < value))


def _value_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield the values of options: one of a few words or numbers, a sign, an open window."""
    for name in OPTIONS:
        values = [case["options"].get(name) for case in cases]
        words = sorted({value for value in values if isinstance(value, str)})
        if words:
            yield from _membership_features(f"{name} is {{}}", [(value,) for value in values], words[:_MAX_VALUES])
        numbers = np.array([_float_or_nan(value) for value in values])
        yield Feature(f"{name} is 0", numbers == 0)
        yield Feature(f"{name} is negative", numbers < 0)
        for side, index in (("left", 0), ("right", 1)):
            is_open = [isinstance(value, list) and len(value) == 2 and value[index] is None for value in values]
            yield Feature(f"the {name} is open to the {side}", np.array(is_open))


def _float_or_nan(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def _broadcast_features(cases: Sequence[Record], lengths: Sequence[Mapping[str, int]]) -> Iterator[Feature]:
    """Yield the axes along which a mask or bias is broadcast."""
    for name in ("mask", "bias"):
        shapes = [case["inputs"].get(name, ()) for case in cases]
        for position, (letter, called) in enumerate(_BROADCAST_AXES.items()):
            holds = [
                len(shape) == len(_BROADCAST_AXES) and shape[position] == 1 and of.get(letter, 0) > 1
                for shape, of in zip(shapes, lengths, strict=True)
            ]
            yield Feature(f"the {name} is spread over {called}", np.array(holds))


def _word_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield the operation, the storage and memory layout of inputs, and the tags."""
    yield from _membership_features("the operation is {}", [{str(case["operation"])} for case in cases])
    yield from _membership_features("storage is {}", [{case.get("storage")} for case in cases], DTYPES)
    layouts = [dict(case.get("memory_layout") or {}).values() for case in cases]
    yield from _membership_features("an input is {} in memory", layouts, MEMORY_LAYOUTS)
    yield Feature("heads come side by side", np.array([bool(case.get("merged")) for case in cases]))
    yield from _membership_features("the tag is {}", [case["tags"] for case in cases])


def _membership_features(
    text: str, values_of_cases: Sequence[Collection[Any]], names: Iterable[str] = ()
) -> Iterator[Feature]:
    """Yield, for each name, the cases that have it; without names, for each value of any case."""
    for name in names or sorted(set().union(*values_of_cases)):
        yield Feature(text.format(name), np.array([name in values for values in values_of_cases]))


def simplicity_sort_key(case: Record) -> tuple[int, int]:
    """Sort key of a case record: the number of elements of its inputs, then of options and optional inputs."""
    return sum(math.prod(shape) for shape in case["inputs"].values()), len(set_options_and_inputs(case))


def set_options_and_inputs(case: Record) -> list[str]:
    """Return the names of the options that a case record sets, and of its optional inputs."""
    options, optional = case["options"], set[str]()
    if case["operation"] in OPERATIONS:
        score = options.get("score")
        with suppress(KeyError, TypeError):  # a record that another program wrote
            optional = {name for name, spec in input_specs(case["operation"], score).items() if not spec.required}
    return [
        *(name for name in Options.__dataclass_fields__ if options.get(name) not in (None, False)),
        *(name for name in case["inputs"] if name in optional),
    ]


def describe_case(case: Record) -> str:
    """Return the shape of a case record and its tags, in words."""
    probes = f"probes {', '.join(case['tags'])}" if case["tags"] else ""
    return "; ".join(filter(None, (shape_text(case), probes)))


_MIN_PLACES = 2
_MAX_LISTED = 12
WIDTH_LIMITS = (8, 32, 64, 128)
"""The largest widths D of the ranges; the last range has no end."""


@dataclass(frozen=True, eq=False)
class LengthMap:
    """The cases of an implementation by their lengths of queries and keys.

    ``cases`` has a row for each case: ``row`` and ``column`` of its lengths, whether it ``fails`` in any dtype and is
    ``causal``, and the number of the range of its ``width``, from 1 on. ``tile`` is 0 if no tile explains anything.
    ``explained`` is the sentence of the tile if it explains all.
    """

    column: Column
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tile: int
    explained: str
    cases: pd.DataFrame

    def words(self) -> str:
        """Return the counts and the lengths of the failing cases."""
        counts = self.cases.groupby(["row", "column"])["fails"].agg(["sum", "size"])
        places = [
            f"Lq={self.queries[row]} Lk={self.keys[column]} ({failing} of {number})"
            for (row, column), failing, number in counts[counts["sum"] > 0].itertuples()
        ]
        more = f" and {len(places) - _MAX_LISTED} more" if len(places) > _MAX_LISTED else ""
        shown = f"{', '.join(places[:_MAX_LISTED])}{more}"
        return f"{self.cases['fails'].sum():,} of {len(self.cases):,} cases fail, at {shown}"

    def views(self) -> Iterator[tuple[int, int, pd.DataFrame]]:
        """Yield the cases of each causality (all, causal, not causal) with each range of widths, of which 0 is all.

        If all cases have one causality or one range, only the view of all is yielded.
        """
        causal, widths = self.cases["causal"], sorted(self.cases["width"].unique())
        kinds = [self.cases, self.cases[causal], self.cases[~causal]]
        for causality, chosen in enumerate(kinds if causal.nunique() > 1 else kinds[:1]):
            for width in (0, *(widths if len(widths) > 1 else ())):
                yield causality, int(width), chosen[chosen["width"].eq(width)] if width else chosen

    def drawn_tiles_text(self) -> str:
        """Return which tiles are drawn."""
        if not self.tile:
            return f"No tile of {', '.join(map(str, TILES[:-1]))} or {TILES[-1]} tells what fails from what passes."
        return f"Lines are drawn where a tile of {self.tile} ends."


@cached_for_frames
def length_maps(frames: Frames) -> tuple[LengthMap, ...]:
    """Return a map for every implementation that fails in some case, and was judged at several lengths."""
    return tuple(length_map for column in frames.columns if (length_map := _make_length_map(frames, column)))


def _make_length_map(frames: Frames, column: Column) -> LengthMap | None:
    rows = [
        (of["Lq"], of["Lk"], bool(fails), bool(frames.cases[str(case)]["options"].get("is_causal")), of.get("D", 0))
        for case, fails in judged_evaluations(frames, column).groupby("case", sort=False)["fails"].any().items()
        if {"Lq", "Lk"} <= (of := record_axis_lengths(frames.cases[str(case)])).keys()
    ]
    cases = pd.DataFrame(rows, columns=["Lq", "Lk", "fails", "causal", "width"])
    if not cases["fails"].any() or len(cases[["Lq", "Lk"]].drop_duplicates()) < _MIN_PLACES:
        return None
    (places, queries), (across, keys) = (pd.factorize(cases[name], sort=True) for name in ("Lq", "Lk"))
    pattern = next(
        (pattern for pattern in confirmed_patterns(frames) if pattern.tile and pattern.column == column), None
    )
    tile = pattern.tile if pattern else _explaining_tile(cases)
    explained = pattern.text(with_environment=frames.has_several_environments) if pattern else ""
    cases = cases.assign(row=places, column=across, width=1 + np.searchsorted(WIDTH_LIMITS, cases["width"]))
    return LengthMap(column, tuple(queries), tuple(keys), tile, explained, cases)


def _explaining_tile(cases: pd.DataFrame) -> int:
    """Return the tile whose edges separate failing from passing cases best; 0 if none does.

    Lengths are below a tile, whole tiles, or past the last full one. A case is explained if most cases of its kind have
    its outcome. Of two tiles that explain as many cases, the larger wins.
    """
    lengths, fails = cases[["Lq", "Lk"]].to_numpy(), cases["fails"].to_numpy()
    right = {}
    for tile in TILES:
        kinds = np.where(lengths < tile, 0, np.where(lengths % tile == 0, 1, 2)) @ np.array([3, 1])
        right[tile] = int(pd.crosstab(kinds, fails).max(axis=1).sum())
    best = max(TILES, key=lambda tile: (right[tile], tile))
    wrong, guessed = len(cases) - right[best], max(int(fails.sum()), int((~fails).sum()))
    return best if 2 * wrong <= len(cases) - guessed else 0
