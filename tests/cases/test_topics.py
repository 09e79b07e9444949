"""Topics of the corpus have what they are named for: every pair of options, sizes with paths of their own, probes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from bundled import bundled
from numpy.typing import NDArray

from attncheck.judging.undefined_rows import empty_rows
from attncheck.plan import EMPTY_ROWS, GivenLevels, Level, levels_of
from attncheck.reading.case import Case
from attncheck.reading.case_maker import ONLY_WITH_SOME_SCORES
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import TEMPLATE, select_cases, tile_row
from attncheck.spec import INSTEAD_OF, OPERATIONS, Operation

CASES = bundled().cases
TILE = 16
CASES_OF_A_PAIR = 2
MEANT_OF_OTHERS = {
    "alignment": "says where a causal query or a window stands",
    EMPTY_ROWS: "says what a mask left open",
}
"""Options that are not counted where few others are to be at fault, each with the reason."""
FEW = {"multi_head_attention": 6}
"""How many options a case of few has at most, where it is not four: projections have biases of their own."""


HANDED_ON = frozenset({"head_scale"})
"""Options that operations which become attention hand on to it as they are, so that they meet the others there."""


Pair = tuple[Level, Level]


def pairs_of(operation: Operation) -> Iterator[Pair]:
    """Yield every pair of levels of two options that can meet."""
    levels = levels_of(operation)
    asked = (own for name, own in levels.items() if not (operation.is_lowered and name in HANDED_ON))
    for one, other in combinations(asked, 2):
        for pair in ((first, second) for first in one for second in other):
            if not why_never(pair):
                yield pair


def why_never(pair: Pair) -> str:
    """Say why two levels cannot meet; empty where they can."""
    texts, options = {level.text for level in pair}, {level.option for level in pair}
    for option, scores in ONLY_WITH_SOME_SCORES.items():
        if option in options and "score" in options and not texts & {f"score {score}" for score in scores}:
            return f"only {', '.join(scores)} have a {option}"
    for option, inputs in INSTEAD_OF.items():
        if option in options and not inputs.isdisjoint(options):
            return f"{' and '.join(inputs)} say what {option} would"
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


def hands_on(operation: Operation) -> bool:
    """Whether an operation hands all that another one takes on to that, which has the pairs."""
    lowered = OPERATIONS.get(operation.lowers_to or "")
    return lowered is not None and lowered.inputs.keys() <= operation.inputs.keys()


WITH_PAIRS = [own for own in OPERATIONS.values() if not hands_on(own) and any(True for _ in pairs_of(own))]


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


SIZED = select_cases(["kernel_shapes"]).cases
WIDTHS = (16, 32, 64, 80, 96, 128, 192, 256)
TILES = (16, 64, 128)
SIZED_OPERATIONS = ("attention", "attention_gradients")
DTYPES = ("float64", "float32", "bfloat16", "float16")
TWICE = 2
"""Cases that have to see a fault which one size alone has."""
MAX_SHAPES = 68


def of(operation: str) -> list[Case]:
    return [case for case in SIZED if case.operation == operation]


def axis(case: Case, name: str, place: int) -> int:
    shape = case.input_shapes[name]
    return shape[place] if len(shape) >= -place else 1


def keys(case: Case) -> int:
    return sum(axis(case, name, -2) for name in ("key", "past_key") if name in case.input_shapes)


def edges(tile: int) -> tuple[int, int, int, int]:
    return tile - 1, tile, tile + 1, 2 * tile + 1


def is_causal(case: Case) -> bool:
    return bool(case.options.get("is_causal"))


def test_the_file_has_the_rows_that_are_made_for_its_tiles() -> None:
    """Else a case of that name would be one thing in the corpus and another with ``--tile``."""
    for tile in TILES:
        made = {case.id: case for case in select_cases(["kernel_shapes/lengths"], tiles=[tile]).cases}
        own = {case.id: case for case in SIZED if f"-tile-{tile}" in case.id and f"-tile-{tile}0" not in case.id}
        assert own.keys() == {identity for identity in made if identity.startswith(f"{TEMPLATE}/")}
        assert all(_same(made[identity], case) for identity, case in own.items())
        assert tile_row(tile)["whole"] == tile


def _same(one: Case, other: Case) -> bool:
    fields = ("name", "inputs", "input_shapes", "options", "dtypes", "tags", "judged_stages", "random", "line")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def test_no_query_is_left_without_a_key_but_at_the_other_corner() -> None:
    """Queries without a key are a convention, of which other files ask; here they would only hide a size."""
    for case in SIZED:
        if case.operation in SIZED_OPERATIONS and "other-corner" not in case.id:
            inputs = convert_inputs(case, make_exact_inputs(case), "float32")
            assert not empty_rows(case.problem(inputs.arrays)).any(), case.id


def test_there_are_few_shapes() -> None:
    """JAX compiles every operation for every shape. A softmax takes the scores of a query that attends elsewhere."""
    shapes = {
        tuple(case.input_shapes[name] for name in ("query", "key", "value") if name in case.inputs)
        for case in SIZED
        if case.operation != "softmax"
    }
    assert len(shapes) <= MAX_SHAPES


Stages = dict[str, NDArray[Any]]
Compute = Callable[[Case, str], tuple[Inputs, Stages]]
Property = Callable[[Inputs, Stages], bool]

PROBES = select_cases(["probes"]).cases
BLOCK = 16


def tagged(tag: str, *operations: str) -> list[Case]:
    return [case for case in PROBES if tag in case.tags and case.operation in (operations or (case.operation,))]


def logits_of(inputs: Inputs, stages: Stages) -> NDArray[Any]:
    """Return what the softmax gets."""
    given = next((stages[name] for name in ("masked", "biased", "scores") if name in stages), None)
    return inputs.arrays["scores"] if given is None else given


def is_poisoned(inputs: Inputs, stages: Stages) -> bool:
    """Whether some row's forbidden values are so large that a weight of a tenth would show."""
    values = np.abs(inputs.arrays["value"]).max(axis=-1)[..., None, :]
    forbidden = np.where(np.isneginf(logits_of(inputs, stages)), values, 0).max(axis=-1)
    return bool((forbidden > 10 * np.abs(stages["output"]).max(axis=-1)).any())


def is_poisoned_for_a_finite_fill(inputs: Inputs, stages: Stages) -> bool:
    """Whether a fill of -1e4, put in a masked score's place or added to it, would outweigh a kept one."""
    logits = logits_of(inputs, stages)
    before = stages.get("biased", stages["scores"])
    kept = np.where(np.isneginf(logits), -np.inf, before).max(axis=-1)
    masked = np.where(np.isneginf(logits), before, -np.inf).max(axis=-1)
    return bool(((kept < -1e4) | (masked - 1e4 > kept) | (masked < -1e38)).any())


def maximum_changes_between_blocks(inputs: Inputs, stages: Stages) -> bool:
    row = logits_of(inputs, stages).reshape(-1, stages["weights"].shape[-1])[-1]
    blocks = [row[start : start + BLOCK].max() for start in range(0, len(row), BLOCK)]
    changes = [later != earlier for earlier, later in pairwise(np.maximum.accumulate(blocks))]
    # Falling logits are the counterpart: nothing may be rescaled after the first block.
    return len(blocks) > 4 and (sum(changes) >= 3 or not any(changes))


def has_integers(inputs: Inputs, stages: Stages) -> bool:
    return all((inputs.arrays[name] % 1 == 0).all() for name in ("query", "key"))


def cancels(inputs: Inputs, stages: Stages) -> bool:
    query, key = inputs.arrays["query"], inputs.arrays["key"].swapaxes(-1, -2)
    return bool((np.abs(query) @ np.abs(key) > 20 * np.abs(query @ key)).any())


def has_coinciding_axes(inputs: Inputs, stages: Stages) -> bool:
    shapes = [
        inputs.arrays[name].shape for name in ("query", "key", "value", "weight", "scores") if name in inputs.arrays
    ]
    return any(first == second > 1 for shape in shapes for first, second in pairwise(shape)) or any(
        first[-2] == second[-2] for first, second in pairwise(shapes)
    )


def allows_one_key(inputs: Inputs, stages: Stages) -> bool:
    return bool((np.isfinite(logits_of(inputs, stages)).sum(axis=-1) == 1).any())


PROPERTIES: list[tuple[str, tuple[str, ...], Property]] = [
    ("poisoned-mask", ("attention",), is_poisoned),
    ("finite-fill", ("attention",), is_poisoned_for_a_finite_fill),
    ("low-logits", (), lambda given, made: bool((logits_of(given, made).max(axis=-1) < -5e4).any())),
    ("running-maximum", (), maximum_changes_between_blocks),
    ("ragged-tail", ("attention",), lambda given, made: given.arrays["key"].shape[-2] % BLOCK > 0),
    ("first-block", (), lambda given, made: bool((made["weights"][..., :BLOCK] == 0).all(axis=-1).any())),
    ("flat-row", (), lambda given, made: made["weights"].shape[-1] >= 4100 and made["weights"].max() < 1.01 / 4100),
    ("no-averaging", (), lambda given, made: made["weights"].shape[-1] <= 3),
    ("peaked", (), lambda given, made: bool(made["weights"].max() > 0.999)),
    (
        "weights-visible",
        (),
        lambda given, made: np.array_equal(given.arrays["value"][0, 0], np.eye(len(made["output"][0, 0].T))),
    ),
    ("exact-scores", (), has_integers),
    ("cancellation", (), cancels),
    ("one-key", (), allows_one_key),
    ("empty-row", (), lambda given, made: bool(np.isneginf(made["log_sum_exp"]).any())),
    ("broadcast-coincidence", ("attention", "softmax", "scoring"), has_coinciding_axes),
    ("underflow", (), lambda given, made: bool((made["weights"] < 1e-38).any())),
    ("head-split", (), lambda given, made: min(made["context"].shape[1:3]) > 1),
]


@pytest.mark.parametrize("operation", SIZED_OPERATIONS)
def test_every_width_and_every_edge_of_a_tile_is_there_twice_and_causal_too(
    operation: str,
) -> None:
    cases = of(operation)
    for width in WIDTHS:
        of_keys, of_values = ([case for case in cases if axis(case, name, -1) == width] for name in ("query", "value"))
        assert len([case for case in of_keys if case in of_values]) >= TWICE, width
        assert any(case not in of_values for case in of_keys), "beside values of another width"
        assert {is_causal(case) for case in of_keys} == {True, False}
        dtypes = Counter(dtype for case in of_keys for dtype in case.dtypes)
        assert all(dtypes[dtype] >= (1 if dtype == "float64" else TWICE) for dtype in DTYPES), dtypes
    for tile in TILES:
        of_tile = [case for case in cases if f"-tile-{tile}-" in f"{case.id}-"]
        for length_of in (keys, lambda case: axis(case, "query", -2)):
            lengths = Counter(map(length_of, cases))
            found = {(length_of(case), is_causal(case)) for case in of_tile}
            assert found >= {(length, causal) for length in edges(tile) for causal in (False, True)}
            assert all(lengths[length] >= TWICE for length in edges(tile))
        assert {True, False} == {axis(case, "mask", -2) > 1 for case in of_tile if "mask" in case.inputs}
        assert {"key_lengths", "window"} <= {name for case in of_tile for name in (*case.inputs, *case.options)}
        assert {case.options.get("alignment") for case in of_tile if is_causal(case)} == {None, "bottom_right"}
    grids = [(axis(case, "query", -4), axis(case, "query", -3), axis(case, "key", -3)) for case in cases]
    groups = Counter(heads // shared for batch, heads, shared in grids if batch * heads > 64)
    assert all(groups[size] >= TWICE for size in (1, 4, 8)), groups


def test_one_query_meets_every_edge_of_keys_in_several_heads_and_entries() -> None:
    several = [case for case in of("attention") if min(axis(case, "query", -4), axis(case, "query", -3)) > 1]
    single = {keys(case) for case in several if axis(case, "query", -2) == 1}
    assert single >= {length for tile in TILES for length in edges(tile)}


def test_a_probe_is_what_its_tag_says_and_is_small(compute: Compute) -> None:
    for tag, operations, holds in PROPERTIES:
        assert tagged(tag, *operations), tag
        others = [case.id for case in tagged(tag, *operations) if not holds(*compute(case, "float32"))]
        assert others == [], tag
    for case in PROBES:
        assert case.tags, case.id
        assert max(map(math.prod, (*case.input_shapes.values(), *case.stage_shapes.values()))) <= 13_000, case.id
        if "query" in case.input_shapes and case.options.get("score") != "dot":
            # A width whose default scale is a binary number has a reason.
            width = case.input_shapes["query"][-1] // int(case.options.get("heads", 1))
            reasons = {"exact-scores", "broadcast-coincidence"} & set(case.tags)
            assert width not in (4, 16, 64, 256) or reasons, case.id
    # About half are generic.
    assert len(PROBES) / 3 < sum(case.supports_statistics for case in PROBES) < 2 * len(PROBES) / 3
