"""Features that the failing cases of an implementation have in common and the passing ones have not.

A line is made only where it is no story: every failing case has the feature, and no passing case of all has it, or at
least three quarters of those that have it fail. Beyond that, fewer than one in a hundred random choices of so many
failing cases may have anything in common as well: every feature that was looked at counts against the one that fits
(``_Test``). Of two features together, each has to stand that test among the cases that have the other. And the run has
to have made two further problems that bear it out (``attncheck.searching.hints``): without these, nothing is said. What
describes the same cases is said once, in the simplest words. Where all failing cases have nothing in common, those that
fail alike may have: with wrong numbers or none, with one verdict at one stage.

Features are of a case's options, inputs, axes, dtype and tags. A map of lengths shows at which lengths of queries and
keys an implementation fails, and the tile that explains it. Failing cases are sorted from the simplest on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attncheck.common.errors import ExitCode
from attncheck.common.wording import at_stage
from attncheck.reports.cells import State, cell_table
from attncheck.reports.frames import Column, Frames, failing, of_column, once_for_frames
from attncheck.reports.one_failure import lengths_of, shape_text
from attncheck.spec import AXES, DTYPES, HEADS, MEMORY_LAYOUTS, OPERATIONS, OPTIONS, Options, inputs_of
from attncheck.spec.verdicts import Verdict

MIN_CASES = 3
"""That fail, and that pass."""
_MIN_SHARE = 0.75
"""Of the cases with a feature, that fail where not all do."""
_ODDS = 100
"""One in so many random choices may have something in common by chance."""
_MAX_SHOWN = 3
"""Failing cases that are changed to confirm a feature, until one bears it out."""
_MAX_TELLING = 100
"""Features that are tried two by two: the simplest ones."""
_PASSING = frozenset({State.AGREE, State.ERRATUM, State.MISPRINT, State.XPASS})
_FAILS, _IS_WRONG, _CANNOT_RUN = "fails", "is wrong", "could not be run"


@dataclass(frozen=True)
class FailurePattern:
    """Where an implementation fails: in ``failing`` of the ``holding`` that have it, and in none of ``others``.

    ``noun`` is what was counted: cases, or where some fail in some of their dtypes alone, evaluations. ``shown_by``
    are the simplest failing cases, each in a dtype.
    """

    column: Column
    verb: str
    where: str
    failing: int
    holding: int
    others: int
    shown_by: tuple[tuple[str, str], ...]
    noun: str = "case"
    tile: int = 0
    """The tile that explains it, where one does."""
    is_own: bool = False
    """Whether it is a user's function, which can say what it does not take."""

    @property
    def passing_elsewhere(self) -> int:
        """How many pass that have it not: all of them."""
        return self.others

    def text(self, *, with_environment: bool) -> str:
        """Say it as a line, without the last full stop."""
        name = self.column.title(with_environment=with_environment, with_version=False)
        only = "" if self.failing == self.holding else " only"
        counted = "" if self.noun == "case" else f" {self.noun}s"
        takes_none = self.is_own and self.verb == _CANNOT_RUN and not only and self.where not in LACKING
        return (
            f"{name} {self.verb}{only} where {self.where}: {self.failing:,} of {self.holding:,}{counted}; "
            f"passes elsewhere: {self.passing_elsewhere:,} of {self.others:,}"
            f"{'; if it takes none of these, let it raise NotImplementedError' if takes_none else ''}"
        )


@once_for_frames
def in_common(frames: Frames) -> tuple[FailurePattern, ...]:
    """Return what further problems bore out of the candidates."""
    return tuple(
        each
        for each in candidates(frames)
        if each.where in frames.asked[each.column.environment].confirmed.get(each.column.implementation, ())
    )


@once_for_frames
def candidates(frames: Frames) -> tuple[FailurePattern, ...]:
    """Return what failing cases share, at most one for each implementation, or for each way in which it fails."""
    found: list[FailurePattern] = []
    for column in frames.columns:
        judged = _looked_at(frames, column, judged_of(frames, column))
        is_wrong = any(_way(verdict, "") == _IS_WRONG for verdict in judged["verdict"][judged["fails"]])
        verb = _FAILS if is_wrong else _CANNOT_RUN
        found += _told(frames, column, judged, judged["fails"].to_numpy(), verb, (_way, _kind))
    return tuple(found)


LACKING = {"H differs from Hkv": "grouped_heads", "D differs from Dv": "value_width"}
"""The capability that a function lacks that fails there."""


def in_common_lines(frames: Frames) -> list[str]:
    """Say it, a line each."""
    return [found.text(with_environment=frames.has_several_environments) for found in in_common(frames)]


_Label = Callable[[str, str], str]


def _way(verdict: str, stage: str) -> str:
    return _IS_WRONG if Verdict(verdict).exit_code is ExitCode.DISAGREE else _CANNOT_RUN


def _kind(verdict: str, stage: str) -> str:
    way = _way(verdict, stage)
    return f"{way} ({at_stage(verdict, stage)})" if way == _IS_WRONG else way


def _told(
    frames: Frames, column: Column, judged: pd.DataFrame, failing: Holds, verb: str, finer: Sequence[_Label]
) -> Iterator[FailurePattern]:
    """Yield what some failing evaluations have in common against all that pass, or else what smaller groups have."""
    chosen = judged[failing | ~judged["fails"].to_numpy()]
    if min(chosen["case"][chosen["fails"] == fails].nunique() for fails in (True, False)) < MIN_CASES:
        return
    if found := _separated(frames, column, chosen, verb):
        yield found
    elif finer:
        of = zip(judged["verdict"], judged["stage"], judged["fails"], strict=True)
        labels = np.array([finer[0](verdict, stage) if fails else "" for verdict, stage, fails in of])
        for label in dict.fromkeys(labels[failing]):
            yield from _told(frames, column, judged, failing & (labels == label), label, finer[1:])


def judged_of(frames: Frames, column: Column) -> pd.DataFrame:
    """Return what passes or fails, a row for each evaluation; what was not judged, or is expected, says nothing."""
    rows = [
        (case, dtype, cell.verdict, cell.stage, cell.state is State.FAILING)
        for case, cells in cell_table(frames).items()
        for dtype, cell in cells.get(column, {}).items()
        if cell.state in _PASSING or (cell.state is State.FAILING and cell.verdict != Verdict.UNTRIED)
    ]
    return pd.DataFrame(rows, columns=["case", "dtype", "verdict", "stage", "fails"]).astype({"fails": bool})


def _looked_at(frames: Frames, column: Column, judged: pd.DataFrame) -> pd.DataFrame:
    """Leave out what passes and has none of the stages that fail elsewhere: nobody looked there."""
    results = of_column(frames.results, column)
    stages = set(failing(results)["stage"])
    seen = pd.MultiIndex.from_frame(results.loc[results["stage"].isin(stages), ["case", "dtype"]])
    is_seen = pd.MultiIndex.from_frame(judged[["case", "dtype"]]).isin(seen)
    return judged if "" in stages else judged[judged["fails"] | is_seen]


def _separated(frames: Frames, column: Column, judged: pd.DataFrame, verb: str) -> FailurePattern | None:
    """Return the simplest that every failing evaluation has, or nearly every one, and no passing one, or few."""
    failing = judged["fails"].to_numpy()
    of_case, names = pd.factorize(judged["case"])
    cases = [frames.cases[case] for case in names]
    fails, passes = np.zeros(len(cases), dtype=bool), np.zeros(len(cases), dtype=bool)
    fails[of_case[failing]] = passes[of_case[~failing]] = True
    ways: list[tuple[str, Holds, Iterator[Feature], float]] = [("case", fails, case_features(cases), 1.0)]
    if (fails & passes).any():  # some dtypes of a case fail: at first these count, then cases of which any does
        of_evaluations = (Feature(each.text, each.holds[of_case], each.tile) for each in case_features(cases))
        features = (each for part in (dtype_features(judged["dtype"].tolist()), of_evaluations) for each in part)
        # Dtypes of a case are no cases of their own.
        ways = [("evaluation", failing, features, len(cases) / len(failing)), *ways]
    fitting = ((*way[:2], _fitting(*way[1:], looks=len(ways))) for way in ways)
    noun, of, found = next((way for way in fitting if way[2]), ("", failing, None))
    if found is None:
        return None
    failed, held = int((of & found.holds).sum()), int(found.holds.sum())
    return FailurePattern(
        column,
        verb,
        found.text,
        failing=failed,
        holding=held,
        others=len(found.holds) - held,
        shown_by=_simplest(frames, judged[failing]),
        noun=noun,
        tile=found.tile,
        is_own=column.implementation in frames.asked[column.environment].own,
    )


def _simplest(frames: Frames, failing: pd.DataFrame) -> tuple[tuple[str, str], ...]:
    """Return the simplest failing cases, each in one dtype."""
    dtypes = dict(zip(failing["case"], failing["dtype"], strict=True))
    cases = sorted(dtypes, key=lambda case: (simplicity(frames.cases[case]), case))
    return tuple((case, dtypes[case]) for case in cases[:_MAX_SHOWN])


def _fitting(failing: Holds, features: Iterator[Feature], weight: float, *, looks: int) -> Feature | None:
    """Return the feature that tells failing from passing, else what comes closest, of single features and pairs.

    It is one of so many ``looks`` at the same failing cases.
    """
    shared: list[Feature] = []
    seen: set[bytes] = set()
    for feature in features:
        count = int(feature.holds.sum())
        mark = blake2b(np.packbits(feature.holds).tobytes(), digest_size=16).digest()
        if not 0 < count < len(failing) or mark in seen:
            continue
        seen.add(mark)
        if feature.holds[failing].all():
            shared.append(feature)
    test = _Test(int(failing.sum()), len(failing), len(seen) * looks, weight)
    for feature in shared:
        if int(feature.holds.sum()) == test.failing:
            return feature if test.is_evident(test.failing, test.all) else None
    near = [
        feature
        for feature in shared
        if test.failing >= _MIN_SHARE * int(feature.holds.sum()) and test.is_evident(int(feature.holds.sum()), test.all)
    ]
    near += _pairs(shared, test)
    return min(near, key=lambda feature: int(feature.holds.sum()), default=None)


@dataclass(frozen=True)
class _Test:
    """So many evaluations fail of all, and so many features were looked at; each has the weight of a part of a case."""

    failing: int
    all: int
    features: int
    weight: float

    def is_evident(self, holding: int, among: int) -> bool:
        """Whether it is no chance that the failing of ``among`` cases are all in the ``holding`` of them."""
        bits = _bits(among, self.failing) - _bits(holding, self.failing)
        return bits * self.weight >= math.log2(self.features * _ODDS)


def _pairs(shared: Sequence[Feature], test: _Test) -> Iterator[Feature]:
    """Yield two together that hold wherever something fails, and hardly anywhere else, the simplest first.

    Each of the two has to tell something among the cases that have the other.
    """
    held = [(feature, int(feature.holds.sum())) for feature in shared]
    telling = [each for each in held if test.is_evident(test.failing, each[1])][:_MAX_TELLING]
    for one, other in sorted(combinations(range(len(telling)), 2), key=sum):
        (first, of_first), (second, of_second) = telling[one], telling[other]
        both = first.holds & second.holds
        holding = int(both.sum())
        if test.failing >= _MIN_SHARE * holding and test.is_evident(holding, min(of_first, of_second)):
            yield Feature(f"{first.text} and {second.text}", both, first.tile or second.tile)


def _bits(of: int, chosen: int) -> float:
    """Return the logarithm, to base 2, of the number of ways to choose."""
    return (math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)) / math.log(2)


Holds = NDArray[np.bool_]
Record = Mapping[str, Any]

_MULTIPLES = (2, 4, 8, 16, 32, 64, 128)
TILES = (16, 32, 64, 128, 256)
"""Tiles that kernels have."""
_ALONG = {"Lk": "keys", "Lq": "queries"}
_COUNTS = ("B", "H", "Hkv")
"""Axes of which no kernel has tiles."""
_PAIRS = (("H", "Hkv"), ("Lq", "Lk"), ("Lq", "T"), ("D", "Dv"), ("D", "Dk"))
_SPREAD = {"B": "the batch", "H": "heads", "Lq": "queries", "T": "keys"}
_MAX_BORDERS = 64
"""Of one axis; of many different lengths some are taken."""
_MAX_VALUES = 12
"""Different values of one option, or of one width, that are told apart."""


@dataclass(frozen=True)
class Feature:
    """A predicate: its words, behind *where*, and of which cases it holds. Features come simplest first."""

    text: str
    holds: Holds
    tile: int = 0
    """The tile that it is about, where it is about one."""


def parts_that_hold(
    where: str, known: Sequence[Record], records: Sequence[Record], dtypes: Sequence[str]
) -> list[list[bool]]:
    """Return which parts of a feature hold of further records, beside those that are known; empty where none is known.

    A feature is known by its words, which may need lengths that other cases have.
    """
    together = [*known, *records]
    of_dtypes = {each.text: each.holds for each in dtype_features(dtypes)}
    of_cases = {each.text: each.holds[len(known) :] for each in case_features(together)}
    found = [of_dtypes.get(part, of_cases.get(part)) for part in where.split(" and ")]
    if any(holds is None for holds in found):
        return []
    return [[bool(holds[number]) for holds in found if holds is not None] for number in range(len(records))]


def dtype_features(dtypes: Sequence[str]) -> Iterator[Feature]:
    """Yield what can be said of the dtypes of evaluations."""
    given = np.array(dtypes)
    for dtype in DTYPES:
        yield Feature(f"the dtype is {dtype}", given == dtype)
    yield Feature("the dtype has 16 bits", np.isin(given, ("bfloat16", "float16")))
    yield Feature("the dtype is float64 or float32", np.isin(given, ("float64", "float32")))
    for dtype in DTYPES:
        yield Feature(f"the dtype is not {dtype}", given != dtype)


def case_features(cases: Sequence[Record]) -> Iterator[Feature]:
    """Yield what can be said of case records: what needs fewer words and says more of a kernel comes first."""
    lengths = [lengths_of(case) for case in cases]
    axes = {
        letter: np.array([each.get(letter, -1) for each in lengths])
        for letter in AXES
        if any(letter in each for each in lengths)
    }
    yield from _given(cases)
    yield from _pairs_of_axes(axes)
    for letter, values in axes.items():
        for number in (1, 0):
            yield Feature(f"{letter} is {number}", values == number)
    yield from _past_tiles(axes)
    yield from _lengths(axes)
    yield from _values(cases)
    yield from _spread(cases, lengths)
    yield from _words(cases)


def _given(cases: Sequence[Record]) -> Iterator[Feature]:
    """Options that are set, and inputs that need not be given."""
    given = [frozenset(given_of(case)) for case in cases]
    for name in sorted(frozenset().union(*given) - set(HEADS)):
        holds = np.array([name in each for each in given])
        is_option = name in OPTIONS
        verb = "set" if is_option else "given"
        yield Feature(f"{name} is {verb}", holds)
        yield Feature(f"{name} is not {verb}", ~holds)


def _pairs_of_axes(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    for one, other in _PAIRS:
        if one in axes and other in axes:
            first, second = axes[one], axes[other]
            known = (first >= 0) & (second >= 0)
            yield Feature(f"{one} differs from {other}", known & (first != second))
            yield Feature(f"{one} equals {other}", known & (first == second))
            yield Feature(f"{one} is smaller than {other}", known & (first < second))
            yield Feature(f"{one} is larger than {other}", known & (first > second))


def past_last_full(lengths: NDArray[Any], tile: int | NDArray[Any]) -> Holds:
    """Whether there are full tiles, and some elements past the last of them."""
    past: Holds = (lengths > tile) & (lengths % tile != 0)
    return past


def _past_tiles(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """What a kernel that handles full tiles alone gets wrong."""
    for letter, what in _ALONG.items():
        for tile in TILES if letter in axes else ():
            text = f"{what} lie past the last full tile of {tile}"
            yield Feature(text, past_last_full(axes[letter], tile), tile)
        if {letter, "D"} <= axes.keys():
            width = np.maximum(axes["D"], 1)
            yield Feature(f"{what} lie past the last full tile of D", past_last_full(axes[letter], width))


def _lengths(axes: Mapping[str, NDArray[Any]]) -> Iterator[Feature]:
    """Yield multiples, widths and numbers of heads, for which kernels are compiled, and what lies beside lengths."""
    for letter, values in axes.items():
        known = values >= 0
        for divisor in () if letter in _COUNTS else _MULTIPLES:
            whole = values % divisor == 0
            said, other = ("is even", "is odd") if divisor == 2 else (f"is a multiple of {divisor}", "")
            yield Feature(f"{letter} {other or f'is no multiple of {divisor}'}", known & ~whole)
            yield Feature(f"{letter} {said}", known & whole)
    for letter in ("D", "Dv", "Dk", *_COUNTS):
        for number in np.unique(axes.get(letter, np.zeros(0)))[-_MAX_VALUES:]:
            yield Feature(f"{letter} is {number}", axes[letter] == number)
    for letter, values in axes.items():
        known = values >= 0
        found = np.unique(values[known])
        if len(found) > _MAX_BORDERS:
            found = found[np.linspace(0, len(found) - 1, _MAX_BORDERS).astype(int)]
        for value in found:
            yield Feature(f"{letter} > {value}", known & (values > value))
            yield Feature(f"{letter} < {value}", known & (values < value))


def _values(cases: Sequence[Record]) -> Iterator[Feature]:
    """What options are set to: one of a few words or numbers, a sign, a window that is open."""
    for name in OPTIONS:
        given = [case["options"].get(name) for case in cases]
        words = sorted({each for each in given if isinstance(each, str)})
        yield from _one_of(f"{name} is {{}}", [(each,) for each in given], words[:_MAX_VALUES]) if words else ()
        numbers = np.array([_number(each) for each in given])
        yield Feature(f"{name} is 0", numbers == 0)
        yield Feature(f"{name} is negative", numbers < 0)
        for side, index in (("left", 0), ("right", 1)):
            is_open = [isinstance(each, list) and len(each) == 2 and each[index] is None for each in given]
            yield Feature(f"the {name} is open to the {side}", np.array(is_open))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def _spread(cases: Sequence[Record], lengths: Sequence[Mapping[str, int]]) -> Iterator[Feature]:
    """Along which axes a mask or bias has one slice for all."""
    for name in ("mask", "bias"):
        shapes = [case["inputs"].get(name, ()) for case in cases]
        for position, (letter, called) in enumerate(_SPREAD.items()):
            holds = [
                len(shape) == len(_SPREAD) and shape[position] == 1 and of.get(letter, 0) > 1
                for shape, of in zip(shapes, lengths, strict=True)
            ]
            yield Feature(f"the {name} is spread over {called}", np.array(holds))


def _words(cases: Sequence[Record]) -> Iterator[Feature]:
    """The operation, how inputs are kept and lie in memory, and the tags."""
    yield from _one_of("the operation is {}", [{str(case["operation"])} for case in cases])
    yield from _one_of("storage is {}", [{case.get("storage")} for case in cases], DTYPES)
    layouts = [dict(case.get("memory_layout") or {}).values() for case in cases]
    yield from _one_of("an input is {} in memory", layouts, MEMORY_LAYOUTS)
    yield Feature("heads come side by side", np.array([bool(case.get("merged")) for case in cases]))
    yield from _one_of("the tag is {}", [case["tags"] for case in cases])


def _one_of(text: str, found: Sequence[Collection[Any]], names: Iterable[str] = ()) -> Iterator[Feature]:
    """Yield which cases have each of some names, or of all that there are."""
    for name in names or sorted(set().union(*found)):
        yield Feature(text.format(name), np.array([name in each for each in found]))


def simplicity(case: Record) -> tuple[int, int]:
    """Sort key of a case record: how many elements its inputs have, then how much is given that need not be."""
    return sum(math.prod(shape) for shape in case["inputs"].values()), len(given_of(case))


def given_of(case: Record) -> list[str]:
    """Return the options and inputs of a case record that need not be given, by name."""
    options = case["options"]
    optional = () if case["operation"] not in OPERATIONS else _optional(case)
    return [
        *(name for name in Options.__dataclass_fields__ if options.get(name) not in (None, False)),
        *(name for name in case["inputs"] if name in optional),
    ]


def _optional(case: Record) -> list[str]:
    score = case["options"].get("score")
    try:
        return [name for name, spec in inputs_of(case["operation"], score).items() if not spec.required]
    except (KeyError, TypeError):  # a record that somebody else wrote
        return []


def described(case: Record) -> str:
    """Say what shape a case record has, and what it probes."""
    probes = f"probes {', '.join(case['tags'])}" if case["tags"] else ""
    return "; ".join(filter(None, (shape_text(case), probes)))


_MIN_PLACES = 2
_MAX_LISTED = 12
WIDTHS = (8, 32, 64, 128)
"""Up to which a width D belongs to one range; the last range has no end."""


@dataclass(frozen=True, eq=False)
class LengthMap:
    """The cases of an implementation by their lengths of queries and keys.

    ``cases`` has a row for each: ``row`` and ``column`` of its lengths, whether it ``fails`` in any dtype and is
    ``causal``, and the number of the range of its ``width``, from 1 on. ``tile`` is 0 where no tile explains anything,
    and ``explained`` the sentence that it is said in, where it explains all.
    """

    column: Column
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    tile: int
    explained: str
    cases: pd.DataFrame

    def words(self) -> str:
        """Say in words what the map shows."""
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

        Of one causality or range alone there is no view of its own.
        """
        causal, widths = self.cases["causal"], sorted(self.cases["width"].unique())
        kinds = [self.cases, self.cases[causal], self.cases[~causal]]
        for causality, chosen in enumerate(kinds if causal.nunique() > 1 else kinds[:1]):
            for width in (0, *(widths if len(widths) > 1 else ())):
                yield causality, int(width), chosen[chosen["width"].eq(width)] if width else chosen

    def grid_words(self) -> str:
        """Say which tiles are drawn."""
        if not self.tile:
            return f"No tile of {', '.join(map(str, TILES[:-1]))} or {TILES[-1]} tells what fails from what passes."
        return f"Lines are drawn where a tile of {self.tile} ends."


@once_for_frames
def length_maps(frames: Frames) -> tuple[LengthMap, ...]:
    """Return a map for every implementation that fails somewhere, and was judged at several lengths."""
    return tuple(found for column in frames.columns if (found := _map_of(frames, column)))


def _map_of(frames: Frames, column: Column) -> LengthMap | None:
    rows = [
        (of["Lq"], of["Lk"], bool(fails), bool(frames.cases[str(case)]["options"].get("is_causal")), of.get("D", 0))
        for case, fails in judged_of(frames, column).groupby("case", sort=False)["fails"].any().items()
        if {"Lq", "Lk"} <= (of := lengths_of(frames.cases[str(case)])).keys()
    ]
    cases = pd.DataFrame(rows, columns=["Lq", "Lk", "fails", "causal", "width"])
    if not cases["fails"].any() or len(cases[["Lq", "Lk"]].drop_duplicates()) < _MIN_PLACES:
        return None
    (places, queries), (across, keys) = (pd.factorize(cases[name], sort=True) for name in ("Lq", "Lk"))
    found = next((each for each in in_common(frames) if each.tile and each.column == column), None)
    tile = found.tile if found else _explaining_tile(cases)
    explained = found.text(with_environment=frames.has_several_environments) if found else ""
    cases = cases.assign(row=places, column=across, width=1 + np.searchsorted(WIDTHS, cases["width"]))
    return LengthMap(column, tuple(queries), tuple(keys), tile, explained, cases)


def _explaining_tile(cases: pd.DataFrame) -> int:
    """Return the tile whose edges tell most of what fails from what passes; 0 where none does.

    Lengths are told apart by how they lie to a tile: below it, whole tiles, or past the last full one. A case is told
    where most of those do as it does that lie alike. Of two tiles that tell as much, the larger.
    """
    lengths, fails = cases[["Lq", "Lk"]].to_numpy(), cases["fails"].to_numpy()
    right = {}
    for tile in TILES:
        kinds = np.where(lengths < tile, 0, np.where(lengths % tile == 0, 1, 2)) @ np.array([3, 1])
        right[tile] = int(pd.crosstab(kinds, fails).max(axis=1).sum())
    best = max(TILES, key=lambda tile: (right[tile], tile))
    wrong, guessed = len(cases) - right[best], max(int(fails.sum()), int((~fails).sum()))
    return best if 2 * wrong <= len(cases) - guessed else 0
