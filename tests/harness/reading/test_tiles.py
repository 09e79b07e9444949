"""Cases for a declared tile: the bundled family with a row of its own, found by option, by glob and by id."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncheck.errors import UsageError
from attncheck.oracle.sampling import MAX_ELEMENTS
from attncheck.reading.addresses import NoSuchCase, read_called, select_one
from attncheck.reading.case import Case
from attncheck.reading.selection import bundled_root, select_cases
from attncheck.reading.tiles import (
    MAX_SCORES,
    MAX_TILE,
    MIN_TILE,
    TEMPLATE,
    left_out,
    load_tile,
    read_tiles,
    tiles_named,
)

ONE = f"{TEMPLATE}/no-edge-shows-in-causal-gradients-tile-48-under-by-over"
OWN = """
title: One of my own
source: {kind: derivation, title: Made for the tests}
operation: softmax
cases:
  - {name: A tile-48 of my own, inputs: {scores: {values: [1, 2, 3]}}}
"""


def of_tile(tile: int) -> list[Case]:
    tags = select_cases(["masking"]).tags
    return load_tile(bundled_root() / f"{TEMPLATE}.yaml", f"cases/{TEMPLATE}.yaml", tags, tile)


def ids(cases: object) -> set[str]:
    return {case.id for case in cases}  # type: ignore[attr-defined]


def lengths(tile: int, name: str) -> set[int]:
    return {case.input_shapes[name][-2] for case in of_tile(tile) if name in case.input_shapes}


def test_queries_and_keys_stand_around_the_edges_of_the_tile() -> None:
    assert lengths(48, "query") == {1, 3, 47, 48, 49, 97}
    assert lengths(48, "key") == {3, 47, 48, 49, 97}
    assert lengths(48, "past_key") == {48}


def test_every_tile_has_the_family_that_the_bundled_ones_have() -> None:
    def family(tile: int) -> set[str]:
        return {case.id.replace(f"tile-{tile}", "tile-n") for case in of_tile(tile)}

    assert family(48) == family(16) == family(MIN_TILE) == family(128)
    assert {case.operation for case in of_tile(48)} >= {"attention", "attention_gradients", "softmax"}


def test_a_small_tile_is_judged_at_every_stage_and_a_larger_one_at_the_output() -> None:
    assert all(case.judged_stages is None for case in of_tile(32))
    of_attention = [case for case in of_tile(33) if case.operation == "attention"]
    assert all(case.judged_stages == ("output",) for case in of_attention)


def test_gradients_that_cannot_be_judged_whole_are_left_out_and_that_is_said() -> None:
    assert MAX_SCORES == MAX_ELEMENTS
    whole, large = of_tile(361), of_tile(1024)
    assert len(whole) == len(of_tile(16)) > len(large)
    assert left_out([361]) == ""
    assert "--tile 362,1024: " in left_out([361, 362, 1024])
    kept = [case for case in large if case.operation == "attention_gradients"]
    assert kept
    assert all(case.input_shapes["query"][-2] == 3 for case in kept)


@pytest.mark.parametrize("tile", [MIN_TILE, MAX_TILE])
def test_the_smallest_and_the_largest_tile_can_be_read(tile: int) -> None:
    cases = of_tile(tile)
    assert {case.input_shapes["query"][-2] for case in cases if "query" in case.inputs} >= {tile - 1, 2 * tile + 1}


@pytest.mark.parametrize("given", [0, 1, 4097, -3, "x", "", "4.5", 2.0, True, None, "9" * 50, [16]])
def test_what_is_no_tile_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="--tile: expected a whole number from 2 to 4096, got "):
        read_tiles([given], "--tile")


def test_tiles_are_numbers_or_their_text_each_once() -> None:
    assert read_tiles(["64", 128, 64], "--tile") == (64, 128)


def test_they_come_besides_whatever_is_named_and_none_twice() -> None:
    alone = ids(select_cases(["masking"]).cases)
    assert ids(select_cases(["masking"], tiles=[48]).cases) == alone | ids(of_tile(48))
    corpus = ids(select_cases().cases)
    assert ids(select_cases(tiles=[16, 64, 128]).cases) == corpus
    assert select_cases(tiles=[16, 48]).faults == ()


def test_tags_and_dtypes_narrow_them_too() -> None:
    found = ids(select_cases(["masking"], tags=["decode"], tiles=[48]).cases)
    assert found == {case.id for case in of_tile(48) if "decode" in case.tags}


def test_a_glob_that_names_a_tile_matches_its_cases_and_no_others() -> None:
    found = ids(select_cases([f"{TEMPLATE}/*-tile-12*"]).cases)
    assert found == ids(of_tile(12)) | ids(of_tile(128))
    assert ids(select_cases(["*causal-gradients-tile-48*"]).cases) == {
        case.id for case in of_tile(48) if "causal-gradients" in case.id
    }
    with pytest.raises(UsageError, match="nor a glob that matches a bundled case"):
        select_cases(["*tile-5000*"])


def test_an_id_alone_leads_to_its_case(tmp_path: Path) -> None:
    case, _ = select_one(ONE, base=tmp_path)
    assert (case.id, case.file) == (ONE, f"cases/{TEMPLATE}.yaml")
    assert case.input_shapes["query"][-2:] == (47, 64)
    part = f"{TEMPLATE}.yaml::causal gradients (tile 48, under by over)"
    assert select_one(part, base=tmp_path)[0].id == ONE
    with pytest.raises(NoSuchCase):
        select_one(ONE.replace("48", "5000"), base=tmp_path)


def test_cases_that_a_check_met_are_read_again_by_their_ids(tmp_path: Path) -> None:
    addresses = {each: each for each in (ONE, ONE.replace("48", "16"), "masking/gone")}
    assert read_called(addresses, tmp_path).keys() == {ONE, ONE.replace("48", "16")}


def test_a_name_of_ones_own_is_no_tile(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    assert ids(select_cases(["own.yaml"], base=tmp_path).cases) == {"own/a-tile-48-of-my-own"}
    assert select_one("own/a-tile-48-of-my-own", base=tmp_path)[0].operation == "softmax"


def test_the_tiles_of_ids_and_globs() -> None:
    assert tiles_named([ONE, "*tile-64*", "x-tile-7", "atile-9", "tile-08", "tile-40960", "tile-1"]) == (48, 64, 7)
