"""Which cases run: by path, glob, tag, dtype, tile, by what people call one, and by an expression."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import CASES, tables_beside

from attncheck.attention.sampling import MAX_UNSAMPLED_ELEMENTS
from attncheck.common.errors import CaseError, UsageError
from attncheck.reading import selection
from attncheck.reading.case import Case
from attncheck.reading.expressions import parse_expression
from attncheck.reading.selection import (
    MAX_JUDGED_SCORES,
    TILE_TEMPLATE,
    CaseSelection,
    NoSuchCaseError,
    describe_unjudged_tiles,
    find_bundled_cases_folder,
    find_tiles_in_names,
    load_tile_cases,
    read_cases_at_addresses,
    read_tiles,
    select_case,
    select_cases,
)

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("few_files")

FILE = CASES["head of softmax"]


def write_cases(path: Path, *names: str, more: str = "") -> Path:
    """Write a case file with a case of each name, and more fields in each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = "".join(f"  - {{name: {name!r}, inputs: {{scores: {{values: [[1, 2]]}}}}{more}}}\n" for name in names)
    path.write_text(FILE + cases, encoding="utf-8")
    return path


def ids(selection: CaseSelection) -> list[str]:
    assert not selection.faults
    return [case.id for case in selection.cases]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of somebody's, with a tag of its own."""
    folder = write_cases(tmp_path / "mine" / "cases.yaml", "In double", "Plain", more=", tags: [my-tag]").parent
    text = (folder / "cases.yaml").read_text().replace("tags: [my-tag]", "dtypes: [float64]", 1)
    (folder / "cases.yaml").write_text(text)
    (folder / "tags.yaml").write_text("tags:\n  my-tag: {probes: Mine., defect: Mine too.}\n")
    return folder


@pytest.fixture(scope="module")
def everything(few_files: Path, tmp_path_factory: pytest.TempPathFactory) -> CaseSelection:
    """All that is bundled."""
    return select_cases(base=tmp_path_factory.mktemp("empty"))


def test_bundled_cases_are_read_in_a_fixed_order_and_found_under_any_of_their_names(
    tmp_path: Path, everything: CaseSelection, few_files: Path
) -> None:
    assert ids(everything) == sorted(ids(everything))
    assert {few_files.parent / case.file for case in everything.cases} == {
        path for path in few_files.rglob("*.yaml") if path.name not in ("tags.yaml", "properties.yaml")
    }
    (tmp_path / "softmax").write_bytes(b"ELF")  # a program of that name hides none
    for patterns, prefix in (
        ("softmax softmax* cases/softmax.yaml cases/softmax softmax.yaml soft?ax", "softmax/"),
        ("documents documents/ cases/documents/* documents/*", "documents/"),
        ("softmax/*eighth* softmax/eight-equal-scores-give-an-eighth-each-exactly", "softmax/eight-equal"),
    ):
        wanted = [identity for identity in ids(everything) if identity.startswith(prefix)]
        assert wanted
        assert [each for each in patterns.split() if ids(select_cases([each], base=tmp_path)) != wanted] == []


def test_what_holds_no_cases_is_refused(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "notes.txt").write_text("")
    (own / "empty").mkdir()
    (tmp_path / "kernel.py").write_text("def attention(query, key, value): ...\n")
    monkeypatch.chdir(tmp_path)
    unknown = ("nonsense", "softmax/nonsense*", "cases/nonsense.yaml", "./softmax", "*tile-5000*")
    for patterns, message in (
        *((name, "is neither a file or folder nor a glob that matches a bundled case") for name in unknown),
        ("mine/tags.yaml", "is no case file"),
        ("mine/notes.txt", "is no case file"),
        ("mine/empty", "holds no case files"),
        ("kernel.py", "--implementation kernel.py"),
        ("kernel.py:attention scoring", "--implementation kernel.py:attention"),
    ):
        with pytest.raises(UsageError, match=message):
            select_cases(patterns.split(), base=tmp_path)
    monkeypatch.setattr(selection, "_MAX_FILES_BELOW", 2)
    with pytest.raises(UsageError, match="more than 2 files and folders below it; expected case files"):
        select_cases(["mine"], base=tmp_path)


def test_a_folder_of_ones_own_is_read_with_its_tags_and_what_lies_below(own: Path, tmp_path: Path) -> None:
    for name in ("deeper/further.yml", ".git/hidden.yaml", "deeper/.cache/hidden.yaml"):
        write_cases(own / name, "Tagged", more=", tags: [uniform]")  # a bundled tag
    both = ["mine/cases/in-double", "mine/cases/plain"]
    whole = select_cases(["mine"], base=tmp_path)
    assert "my-tag" in whole.tags
    assert ids(whole) == [*both, "mine/deeper/further/tagged"]
    for name in ("mine/", "./mine", "mine/../mine", str(own)):
        assert ids(select_cases([name, "mine/cases.yaml"], base=tmp_path)) == ids(whole)
    assert ids(select_cases(["mine/cases.yaml"], base=tmp_path)) == both
    for choice in ({"tags": ["my-tag"]}, {"dtypes": ["float32"]}):
        assert ids(select_cases(["mine/cases.yaml"], base=tmp_path, **choice)) == both[1:]
    with pytest.raises(UsageError, match="undefined tag 'my-tag'"):
        select_cases(["softmax"], tags=["my-tag"], base=tmp_path)


def test_a_tag_chooses_the_cases_that_have_it_and_several_add_up(tmp_path: Path, everything: CaseSelection) -> None:
    among = [case for case in everything.cases if case.file in ("cases/softmax.yaml", "cases/attention.yaml")]
    for wanted in (["axis"], ["axis", "underflow"]):
        chosen = select_cases(["softmax", "attention"], tags=wanted, base=tmp_path).cases
        assert [case.id for case in chosen] == [case.id for case in among if set(case.tags) & set(wanted)]
        assert len(chosen) < len(among)


def test_a_file_with_a_fault_or_with_ids_of_another_one_is_left_out(own: Path, tmp_path: Path) -> None:
    write_cases(own / "bad.yaml", "Plain", more=", tags: [no-such-tag]")
    selection = select_cases(["mine"], base=tmp_path)
    assert {case.file for case in selection.cases} == {"mine/cases.yaml"}
    (fault,) = selection.faults
    assert str(fault).startswith('mine/bad.yaml:5: case "Plain": ')
    assert "undefined tag 'no-such-tag'" in str(fault)
    (own / "bad.yaml").unlink()
    (tmp_path / "here").mkdir()
    shutil.copytree(own, tmp_path / "other" / "mine")
    selection = select_cases(["../mine", "../other/mine"], base=tmp_path / "here")
    assert len(selection.cases) == 2
    assert [(fault.file, fault.message) for fault in selection.faults] == [
        ("mine/cases.yaml", f"the same case id as in {own / 'cases.yaml'}: mine/cases/{name}")
        for name in ("in-double", "plain")
    ]


ONE = f"{TILE_TEMPLATE}/no-edge-shows-in-causal-gradients-tile-48-under-by-over"


def of_tile(tile: int) -> list[Case]:
    tags = select_cases(["masking"]).tags
    return load_tile_cases(
        find_bundled_cases_folder() / f"{TILE_TEMPLATE}.yaml", f"cases/{TILE_TEMPLATE}.yaml", tags, tile
    )


def ids_of(cases: Iterable[Case]) -> set[str]:
    return {case.id for case in cases}


def test_gradients_that_cannot_be_judged_whole_are_left_out_and_what_is_no_tile_is_refused() -> None:
    assert MAX_JUDGED_SCORES == MAX_UNSAMPLED_ELEMENTS
    whole, large = of_tile(361), of_tile(1024)
    assert len(whole) == len(of_tile(16)) > len(large)
    assert describe_unjudged_tiles([361]) == ""
    assert "--tile 362,1024: " in describe_unjudged_tiles([361, 362, 1024])
    assert {case.input_shapes["query"][-2] for case in large if case.operation == "attention_gradients"} == {3}
    for tile in (0, 1, 4097, -3, "x", "", "4.5", 2.0, True, None, "9" * 50, [16]):
        with pytest.raises(UsageError, match="--tile: expected a whole number from 2 to 4096, got "):
            read_tiles([tile], "--tile")


def test_cases_of_tiles_come_besides_others_by_a_glob_or_by_their_ids(tmp_path: Path) -> None:
    named = ids_of(select_cases(["masking"]).cases)
    assert ids_of(select_cases(["masking"], tiles=[48]).cases) == named | ids_of(of_tile(48))
    assert ids_of(select_cases(tiles=[128]).cases) == ids_of(select_cases().cases)  # those of the corpus
    by_glob = ids_of(select_cases([f"{TILE_TEMPLATE}/*-tile-12*"]).cases)
    assert by_glob == ids_of(of_tile(12)) | ids_of(of_tile(128))
    case, _ = select_case(ONE, base=tmp_path)
    assert (case.id, case.file, case.input_shapes["query"][-2:]) == (ONE, f"cases/{TILE_TEMPLATE}.yaml", (47, 64))
    part = f"{TILE_TEMPLATE}.yaml::causal gradients (tile 48, under by over)"
    assert select_case(part, base=tmp_path)[0].id == ONE
    with pytest.raises(NoSuchCaseError):
        select_case(ONE.replace("48", "5000"), base=tmp_path)
    addresses = {each: each for each in (ONE, ONE.replace("48", "16"), "masking/gone")}
    assert read_cases_at_addresses(addresses, tmp_path).keys() == {ONE, ONE.replace("48", "16")}
    assert find_tiles_in_names([ONE, "*tile-64*", "x-tile-7", "atile-9", "tile-08", "tile-40960", "tile-1"]) == (
        48,
        64,
        7,
    )


# Single cases by what people call them.

BUNDLED = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder that somebody is in, with three cases in a file and one in another."""
    folder = tmp_path / "here"
    write_cases(folder / "my cases" / "a.yaml", "Two equal keys", "Two equal keys and a mask", "A mask")
    write_cases(folder / "my cases" / "b.yml", "The only one")
    return folder


@pytest.fixture
def found(here: Path) -> Callable[..., str]:
    """Return the id of the one case that is meant."""
    return lambda wanted, configured=(): select_case(wanted, configured, here)[0].id


def test_a_case_is_found_by_its_id_or_a_part_of_its_name(here: Path, found: Callable[..., str]) -> None:
    case = "  - {name: A sentence, id: my-id, inputs: {scores: {values: [[1, 2]]}}}\n"
    (here / "c.yaml").write_text(FILE + case + case.replace("my-id", "other").replace("A s", "Another s"), "utf-8")
    for identity, names in TABLES["identities"].items():
        assert [name for name in names if found(name) != identity] == []


SEVERAL = r"matches \d cases; name one of them:\n(.*\n)*  my cases/a/two-equal-keys\n"
NOWHERE = r"expected its id, a glob .* FILE\.yaml::PART of a name"


def test_what_leads_to_none_or_several_or_cannot_be_read_is_refused(here: Path, found: Callable[..., str]) -> None:
    for names, message in (
        (["my cases/a.yaml", "my cases/a.yaml::equal", "my cases"], SEVERAL),
        (["my cases/a.yaml::gone"], "has 'gone' in its name; its cases are\n  my cases/a/a-mask"),
        (["my cases/a/gone", "my cases/gone.yaml::a", "gone", "gone/*", "::", "a/", "?"], NOWHERE),
    ):
        for name in names:
            with pytest.raises(UsageError, match=message) as error:
                found(name)
            assert isinstance(error.value, NoSuchCaseError) == (message == NOWHERE)
    (here / "bad.yaml").write_text("title: [\n", encoding="utf-8")
    for wanted in ("bad.yaml", "bad.yaml::x", "bad/x"):
        with pytest.raises(CaseError, match=r"bad\.yaml:2"):
            found(wanted)


def test_cases_of_ones_own_come_before_bundled_ones_and_those_of_the_project_are_reached_too(
    tmp_path: Path, here: Path, found: Callable[..., str]
) -> None:
    write_cases(here / "attention.yaml", "Mine")
    assert found("attention/mine") == "attention/mine"
    assert found(BUNDLED) == BUNDLED
    configured = [str(write_cases(tmp_path / "conformance" / "c.yaml", "Configured").parent)]
    for wanted in ("conformance/c/configured", "*/configured"):
        assert found(wanted, configured) == "conformance/c/configured"
    with pytest.raises(NoSuchCaseError):
        found("conformance/c/gone", configured)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the file system has no such names")
def test_a_name_that_is_no_text_is_reached_as_it_is_shown(here: Path, found: Callable[..., str]) -> None:
    os.rename(write_cases(here / "name.yaml", "Hello"), os.fsencode(here) + b"/n\xffme.yaml")  # noqa: PTH104
    (case,) = select_cases([os.fsdecode(b"n\xffme.yaml")], base=here).cases
    assert case.id == "n?me/hello"
    assert found(case.id) == found("n?me.yaml::hell") == "n?me/hello"


@pytest.fixture(scope="module")
def cases(load_text: Callable[[str], list[Case]]) -> list[Case]:
    return load_text(TABLES["shapes_file"])


def test_what_an_expression_matches(cases: list[Case]) -> None:
    for names, texts in TABLES["matched"].items():  # the first letters of the names of the cases
        for text in texts:
            expression = parse_expression(text, "-k")
            assert {case.name[0] for case in cases if expression.matches(case)} == set(names), text


def test_a_wrong_expression_is_one_error_that_points_at_the_place() -> None:
    deep = {"(" * 51 + "a" + ")" * 51: ("expected at most 50 levels", 50), "not " * 51 + "a": ("expected at most", 200)}
    for text, (message, column) in (TABLES["wrong_expressions"] | deep).items():
        with pytest.raises(UsageError) as error:
            parse_expression(text, "-k")
        first, shown, pointer = str(error.value).split("\n")
        assert first.startswith(f"-k: {message}")
        assert (shown, pointer) == (f"  {text}", f"  {' ' * column}^")
    for text, message in (("a and\n)", r", got '\)' \(column 7\)$"), ("a" * 1001, "at most 1000 characters, got 1001")):
        with pytest.raises(UsageError, match=message):
            parse_expression(text, "-k")


_PARTS = [*"abLkD()%=!<>'\" 019\x00\n", " and ", " or ", "not ", "Lk", "Lq>", "%8="]


@given(st.lists(st.sampled_from(_PARTS), max_size=30).map("".join))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_expression(text, "-k").text == text


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")
def test_a_link_to_a_file_elsewhere_is_named_as_it_is_and_shows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password: hunter2\n", encoding="utf-8")
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "cases.yaml").symlink_to(tmp_path / "secret")
    [fault] = selection.select_cases(["cases.yaml"], base=folder).faults
    assert str(fault).startswith("cases.yaml: a link to a file in another folder")
    assert "password" not in str(fault)
