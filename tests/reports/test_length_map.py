"""Where in (Lq, Lk) an implementation fails: counted, with the tile that explains it, and with none where none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.reading.record import case_record
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames
from attncheck.reports.html.length_maps import drawn_lengths
from attncheck.reports.in_common import in_common_lines
from attncheck.reports.length_map import LengthMap, explaining_tile, length_maps
from attncheck.reports.simplest import lengths_of
from attncheck.results.format import Row

Lengths = Mapping[str, int]
JudgedWhere = Callable[[Callable[[Lengths], object]], Frames]


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    selection = select_cases(["attention/*", "kernel_shapes/*"])
    return [case_record(case, selection.tags) for case in selection.cases if case.operation == "attention"]


@pytest.fixture
def judged(
    records: list[dict[str, Any]],
    make_row: Callable[..., Row],
    write_run: Callable[..., Path],
    frames_of: Callable[..., Frames],
) -> JudgedWhere:
    """Return the frames of a run in which those cases fail whose lengths do."""

    def make(fails: Callable[[Lengths], object]) -> Frames:
        rows = [
            make_row(case=case["id"], verdict="numeric" if fails(lengths_of(case)) else "agree", stage="output")
            for case in records
        ]
        return frames_of(write_run(rows, cases=[dict(case) for case in records]))

    return make


def past(tile: int) -> Callable[[Lengths], bool]:
    return lambda lengths: lengths["Lk"] > tile and bool(lengths["Lk"] % tile)


@pytest.mark.parametrize("tile", [16, 64])
def test_a_forgotten_tail_is_said_in_words_and_its_tile_is_drawn(
    records: list[dict[str, Any]], judged: JudgedWhere, tile: int
) -> None:
    frames = judged(past(tile))
    count = sum(past(tile)(lengths_of(case)) for case in records)
    others = len(records) - count
    line = (
        f"numpy.eager fails where keys lie past the last full tile of {tile}: {count} of {count}; "
        f"passes elsewhere: {others} of {others}"
    )
    assert in_common_lines(frames) == [line]
    (found,) = length_maps(frames)
    assert (found.tile, found.explained) == (tile, line)
    assert (int(found.failing.sum()), int(found.cases.sum())) == (count, len(records))
    for (row, column), failing in np.ndenumerate(found.failing):
        expected = found.cases[row, column] if past(tile)({"Lk": found.keys[column]}) else 0
        assert failing == expected
    (drawn,) = drawn_lengths(frames)
    assert drawn.grid == f"Lines are drawn where a tile of {tile} ends."
    assert 'class="lt"' in drawn.picture
    assert f'aria-label="{line}. {count} of {len(records)} cases fail' in drawn.picture


def test_where_no_tile_explains_anything_none_is_drawn(judged: JudgedWhere) -> None:
    (drawn,) = drawn_lengths(judged(lambda lengths: lengths["D"] % 3 == 0))
    assert drawn.grid == "No tile of 16, 32, 64, 128 or 256 tells what fails from what passes."
    assert drawn.explained == ""
    assert 'class="lt"' not in drawn.picture
    assert 'class="ls"' in drawn.picture
    assert 'class="lp"' in drawn.picture


def test_what_fails_nowhere_has_no_map(judged: JudgedWhere) -> None:
    assert length_maps(judged(lambda lengths: False)) == ()


def test_lines_stand_behind_whole_tiles(judged: JudgedWhere) -> None:
    (found,) = length_maps(judged(past(64)))
    assert {63, 64, 65, 128, 129} <= set(found.keys)
    path = drawn_lengths(judged(past(64)))[0].picture.partition('class="lt" d="')[2].partition('"')[0]
    places = {int(part.split()[0]) for part in path.split("M")[1:] if "V" in part}
    assert {52 + 14 * found.keys.index(length) for length in (65, 129)} <= places
    assert not {52 + 14 * found.keys.index(length) for length in (63, 64, 128)} & places


@pytest.mark.parametrize(
    ("fails", "tile"),
    [(lambda q, k: k > 64 and k % 64, 64), (lambda q, k: q % 32 == 0, 32), (lambda q, k: (q * 7 + k * 3) % 5 == 0, 0)],
)
def test_the_tile_that_tells_most_is_found(fails: Callable[[int, int], object], tile: int) -> None:
    lengths = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    places = [(queries, keys) for queries in lengths for keys in lengths]
    assert explaining_tile(places, np.array([bool(fails(*place)) for place in places])) == tile


def test_a_long_list_of_places_is_cut(judged: JudgedWhere) -> None:
    (found,) = length_maps(judged(past(16)))
    assert isinstance(found, LengthMap)
    words = found.words()
    assert words.count("Lq=") == 12
    assert words.endswith(" more")
