"""Single cases by what people call them, and expressions that select cases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.errors import CaseError, UsageError
from attncheck.reading.case import Case
from attncheck.reading.selection import (
    NoSuchCase,
    Selection,
    address,
    read_called,
    read_expression,
    select_cases,
    select_one,
)

pytestmark = pytest.mark.usefixtures("few_files")

FILE = """\
title: Cases of one's own
source: {kind: derivation, title: Made for the tests}
operation: softmax
cases:
"""
BUNDLED = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"


def write(path: Path, *names: str) -> Path:
    """Write a case file with a case of each name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = "".join(f"  - {{name: {name!r}, inputs: {{scores: {{values: [[1, 2]]}}}}}}\n" for name in names)
    path.write_text(FILE + cases, encoding="utf-8")
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder that somebody is in, with three cases in a file and one in another."""
    folder = tmp_path / "here"
    write(folder / "my cases" / "a.yaml", "Two equal keys", "Two equal keys and a mask", "A mask")
    write(folder / "my cases" / "b.yml", "The only one")
    return folder


@pytest.fixture
def found(here: Path) -> Callable[..., str]:
    """Return the id of the one case that is meant."""
    return lambda wanted, configured=(): select_one(wanted, configured, here)[0].id


@pytest.mark.parametrize(
    "wanted",
    [
        "my cases/a/two-equal-keys",
        "./my cases/a/two-equal-keys",
        "my cases/a.yaml::two-equal-keys",
        "my cases/a.yaml/two-equal-keys",
        "my cases/a.yaml::Two equal keys",
    ],
)
def test_an_id_or_a_file_with_a_whole_name_is_that_case(wanted: str, found: Callable[..., str]) -> None:
    assert found(wanted) == "my cases/a/two-equal-keys"


def test_a_part_of_a_name_is_enough_where_only_one_has_it(found: Callable[..., str]) -> None:
    assert found("my cases/a.yaml::and a") == "my cases/a/two-equal-keys-and-a-mask"
    assert found("my cases/a.yaml/KEYS-AND") == "my cases/a/two-equal-keys-and-a-mask"


def test_a_case_with_an_id_of_its_own_is_found_by_that_and_by_its_name(here: Path, found: Callable[..., str]) -> None:
    case = "  - {name: A sentence, id: my-id, inputs: {scores: {values: [[1, 2]]}}}\n"
    (here / "c.yaml").write_text(FILE + case + case.replace("my-id", "other").replace("A s", "Another s"), "utf-8")
    for wanted in ("c/my-id", "c.yaml::my-id", "c.yaml::A sentence"):
        assert found(wanted) == "c/my-id"


def test_a_file_with_one_case_is_that_case(found: Callable[..., str]) -> None:
    assert found("my cases/b.yml") == found("my cases/b/the-only-one") == "my cases/b/the-only-one"


@pytest.mark.parametrize("wanted", ["my cases/a.yaml", "my cases/a.yaml::equal", "my cases"])
def test_what_several_fit_is_refused_with_their_ids(wanted: str, found: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"matches \d cases; name one of them:\n(.*\n)*  my cases/a/two-equal-keys\n"):
        found(wanted)


def test_a_part_that_no_name_has_is_refused_with_the_names_of_the_file(found: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="has 'gone' in its name; its cases are\n  my cases/a/a-mask"):
        found("my cases/a.yaml::gone")


@pytest.mark.parametrize("wanted", ["my cases/a/gone", "my cases/gone.yaml::a", "gone", "gone/*", "::", "a/", "?"])
def test_what_leads_nowhere_says_what_was_expected(wanted: str, found: Callable[..., str]) -> None:
    with pytest.raises(NoSuchCase, match=r"expected its id, a glob .* FILE\.yaml::PART of a name"):
        found(wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        BUNDLED,
        "cases/attention.yaml::causal row sees",
        "attention.yaml/a-causal-row-sees-its-own-key-and-earlier-ones",
        "attention/a-causal-row-sees*",
    ],
)
def test_bundled_cases_are_reached_in_the_same_ways(wanted: str, found: Callable[..., str]) -> None:
    assert found(wanted) == BUNDLED


def test_ones_own_file_comes_before_a_bundled_one_of_the_same_name(here: Path, found: Callable[..., str]) -> None:
    write(here / "attention.yaml", "Mine")
    assert found("attention/mine") == "attention/mine"
    assert found(BUNDLED) == BUNDLED


def test_the_projects_own_cases_are_reached_by_their_ids(tmp_path: Path, found: Callable[..., str]) -> None:
    configured = [str(write(tmp_path / "conformance" / "c.yaml", "Configured").parent)]
    assert found("conformance/c/configured", configured) == "conformance/c/configured"
    assert found("*/configured", configured) == "conformance/c/configured"
    with pytest.raises(NoSuchCase):
        found("conformance/c/gone", configured)


def test_a_file_that_cannot_be_read_says_why(here: Path, found: Callable[..., str]) -> None:
    (here / "bad.yaml").write_text("title: [\n", encoding="utf-8")
    for wanted in ("bad.yaml", "bad.yaml::x", "bad/x"):
        with pytest.raises(CaseError, match=r"bad\.yaml:2"):
            found(wanted)


def test_a_case_outside_of_the_folder_or_below_cases_has_an_address_that_leads_to_it(
    tmp_path: Path, here: Path, found: Callable[..., str]
) -> None:
    outside = write(tmp_path / "it's outside" / "o.yaml", "One", "Two")
    write(here / "cases" / "attention.yaml", "A causal row sees its own key and earlier ones")
    for pattern, identity in (("../it's outside", "it's outside/o/one"), ("cases", BUNDLED)):
        case = select_cases([pattern], base=here).cases[0]
        assert case.id == identity
        called = address(case.id, case.path)
        assert select_one(called, base=here)[0] == case
        assert read_called({case.id: called}, here) == {case.id: case}
    assert found(f"{outside}::two") == "it's outside/o/two"


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the file system has no such names")
def test_a_name_that_is_no_text_is_reached_as_it_is_shown(here: Path, found: Callable[..., str]) -> None:
    os.rename(write(here / "name.yaml", "Hello"), os.fsencode(here) + b"/n\xffme.yaml")  # noqa: PTH104
    (case,) = select_cases([os.fsdecode(b"n\xffme.yaml")], base=here).cases
    assert case.id == "n?me/hello"
    assert found(case.id) == found("n?me.yaml::hell") == "n?me/hello"


CASES = """
title: Cases of several shapes
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: Equal lengths
    tags: [known]
    inputs:
      query: {draw: randn, shape: [2, 4, 8, 16]}
      key: {draw: randn, shape: [2, 2, 8, 16]}
      value: {draw: randn, shape: [2, 2, 8, 5]}
  - name: A causal row
    options: {is_causal: true}
    inputs:
      query: {draw: randn, shape: [3, 4]}
      key: {draw: randn, shape: [65, 4]}
      value: {draw: randn, shape: [65, 4]}
  - name: Scores alone
    operation: softmax
    inputs: {scores: {draw: randn, shape: [3, 8]}}
"""


@pytest.fixture(scope="module")
def cases(load_text: Callable[[str], list[Case]]) -> list[Case]:
    return load_text(CASES)


def matching(cases: list[Case], text: str) -> str:
    """Return the first letters of the names of the cases that match."""
    expression = read_expression(text, "-k")
    return "".join(case.name[0] for case in cases if expression.matches(case))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("causal", "A"),
        ("CAUSAL", "A"),
        ("known", "E"),  # a tag
        ("kno", "E"),
        ("prefix/equal-lengths", "E"),  # an id
        ("'equal lengths'", "E"),
        ('"a causal row" or scores', "AS"),
        ("not causal", "ES"),
        ("not not causal", "A"),
        ("causal or equal and scores", "A"),  # and binds closer than or
        ("(causal or equal) and scores", ""),
        ("not causal and not equal", "S"),  # and not closer than and
        ("Lk=8", "ES"),
        ("Lk == 8", "ES"),
        ("Lk!=8", "A"),
        ("Lk>64", "A"),
        ("Lk>=65 and Lk<=65", "A"),
        ("Lk<65", "ES"),
        ("Lk%8=0", "ES"),
        ("Lk % 8 != 0", "A"),
        ("Lq!=Lk", "AS"),
        ("H!=Hkv", "E"),
        ("Dv<D", "E"),
        ("Lq%3=B", "E"),
        ("Lq%7=B", ""),
        ("Lk%63=B", ""),
        ("Lk%6=B", "E"),
        ("D!=99", "EA"),  # what has no such axis has no length that could differ
        ("not D=99", "EAS"),
        ("P=0", ""),
        ("(((Lk=8)))", "ES"),
        ("-row", "A"),
    ],
)
def test_what_an_expression_matches(cases: list[Case], text: str, names: str) -> None:
    assert matching(cases, text) == names


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("Lk>>8", "expected a whole number or an axis, got '>'", 3),
        ("Lx>8", "unknown axis 'Lx'; expected one of B, H, Hkv, Lq, Lk, ", 0),
        ("Lk=Lx", "unknown axis 'Lx'", 3),
        ("8<Lk", "expected an axis on the left of a comparison, got '8'", 0),
        ("Lk=-1", "expected a whole number or an axis, got '-1'", 3),
        ("Lk=", "expected a whole number or an axis, got the end", 3),
        ("Lk=and", "expected a whole number or an axis, got 'and'", 3),
        ("Lk%0=1", "expected a whole number larger than 0, got '0'", 3),
        ("Lk%8", "expected =, !=, <, <=, > or >=, got the end", 4),
        ("a b", "expected 'and', 'or' or the end, got 'b'", 2),
        ("a and or b", "expected a word, an axis or '(', got 'or'", 6),
        ("not", "expected a word, an axis or '(', got the end", 3),
        ("(a or b", "expected ')', got the end", 7),
        ("a)", "expected 'and', 'or' or the end, got ')'", 1),
        ("a and 'b", 'expected a closing quote, got "\'b"', 6),
        ("a or !b", "expected a word, an axis or a comparison, got '!b'", 5),
        ("a or ''", "expected a text between the quotes", 6),
        ("", "expected a word, an axis or '(', got the end", 0),
        ("(" * 51 + "a" + ")" * 51, "expected at most 50 levels of parentheses and 'not'", 50),
        ("not " * 51 + "a", "expected at most 50 levels", 200),
    ],
)
def test_a_wrong_expression_is_one_error_that_points_at_the_place(text: str, message: str, column: int) -> None:
    with pytest.raises(UsageError) as error:
        read_expression(text, "-k")
    first, shown, pointer = str(error.value).split("\n")
    assert first.startswith(f"-k: {message}")
    assert shown == f"  {text}"
    assert pointer == f"  {' ' * column}^"


def test_what_cannot_be_shown_on_a_line_is_pointed_at_by_its_column() -> None:
    with pytest.raises(UsageError) as error:
        read_expression("a and\n)", "match")
    assert str(error.value) == "match: expected a word, an axis or '(', got ')' (column 7)"
    with pytest.raises(UsageError, match="expected at most 1000 characters, got 1001"):
        read_expression("a" * 1001, "-k")


_PARTS = [*"abLkD()%=!<>'\" 019\x00\n", " and ", " or ", "not ", "Lk", "Lq>", "%8="]


@given(st.lists(st.sampled_from(_PARTS), max_size=30).map("".join))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert read_expression(text, "-k").text == text


def test_it_selects_beside_patterns_tags_and_dtypes_and_nothing_is_the_same_error() -> None:
    whole: Selection = select_cases(["attention"])
    causal = select_cases(["attention"], expression=read_expression("causal", "-k"))
    rest = select_cases(["attention"], expression=read_expression("not causal", "-k"))
    assert {case.id for case in whole.cases} == {case.id for case in causal.cases} | {case.id for case in rest.cases}
    assert 0 < len(causal.cases) < len(whole.cases) == len(causal.cases) + len(rest.cases)
    with pytest.raises(UsageError, match="no case matches the paths, globs, tags and dtypes that were given, and the "):
        select_cases(["attention"], expression=read_expression("Lk>99999", "-k"))
    with pytest.raises(UsageError, match="'causl and not mask'; did you mean causal\\?"):
        select_cases(["attention"], expression=read_expression("causl and not mask", "-k"))
