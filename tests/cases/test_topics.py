"""Topics of the corpus have what they are named for: every pair of options, sizes with paths of their own, probes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import pytest
from bundled import bundled

from attncheck.judging.undefined_rows import empty_rows
from attncheck.plan import EMPTY_ROWS, GivenLevels, Level, levels_of
from attncheck.reading.case import Case
from attncheck.reading.case_maker import ONLY_WITH_SOME_SCORES
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
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
