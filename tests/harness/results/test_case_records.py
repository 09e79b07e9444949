"""Case records, packed and read back: whatever is in them, and however the file is laid out."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.results.case_records import CaseRecords, cases_text, read_cases, with_unnamed

MakeRecord = Callable[..., dict[str, Any]]

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


@given(st.dictionaries(TEXTS, CONTENT, max_size=8), st.sampled_from([0, 1, 3000]))
def test_what_is_packed_comes_back(contents: dict[str, Any], longer: int) -> None:
    records = {identity: {"id": identity, "content": [content] * longer} for identity, content in contents.items()}
    packed = CaseRecords(records.values())
    assert dict(packed) == records
    assert list(packed) == list(records)
    assert len(packed) == len(records)


def test_records_put_together_are_in_order_and_the_later_one_stays() -> None:
    one = CaseRecords([{"id": "c", "of": 1}, {"id": "a", "of": 1}])
    other = CaseRecords([{"id": "b", "of": 2}, {"id": "a", "of": 2}])
    both = CaseRecords.together([one, other])
    assert {identity: record["of"] for identity, record in both.items()} == {"a": 2, "b": 2, "c": 1}
    assert list(both) == ["a", "c", "b"]
    assert "d" not in both
    with pytest.raises(KeyError):
        both["d"]


def test_many_records_take_little_memory(make_case_record: MakeRecord) -> None:
    record = json.dumps(make_case_record())
    tracemalloc.start()
    packed = CaseRecords(json.loads(record) | {"id": f"file/{number}"} for number in range(2000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2000 * len(record)
    assert packed["file/1999"] == json.loads(record) | {"id": "file/1999"}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda text: text, id="as it is written"),
        pytest.param(lambda text: json.dumps(json.loads(text)), id="on one line"),
        pytest.param(lambda text: json.dumps(json.loads(text), indent=1), id="a field a line"),
        pytest.param(lambda text: text + "\n", id="a line more"),
        pytest.param(lambda text: text.replace("\n", "\n\n"), id="empty lines"),
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="other line ends"),
    ],
)
def test_every_layout_says_the_same(layout: Callable[[str], str], make_case_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_case_record(id=f"file/{number}", title="Größe ]}\n{") for number in range(3)]
    path = tmp_path / "cases.json"
    path.write_text(layout("".join(cases_text(records))), encoding="utf-8", newline="")
    cases, notes = read_cases(path)
    assert notes == ()
    assert list(cases.values()) == records


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "cannot be read: ", id="cut off"),
        pytest.param(lambda text: text.replace("]}\n", ""), "cannot be read: ", id="no end"),
        pytest.param(lambda text: text + "more", "cannot be read: Extra data", id="more"),
        pytest.param(lambda text: text.replace('"id": "file/1"', '"id": 1'), "1 of 3 cases are not", id="id"),
        pytest.param(
            lambda text: text.replace('"notes": []', f'"notes": {"[" * 99}{"]" * 99}', 1), "nested", id="deep"
        ),
        pytest.param(lambda text: text.replace('"cases"', '"none"'), "it has no cases", id="none"),
        pytest.param(lambda _: "", "cannot be read: Expecting value", id="empty"),
    ],
)
def test_damage_is_noted(damage: Callable[[str], str], note: str, make_case_record: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    text = "".join(cases_text(make_case_record(id=f"file/{number}") for number in range(3)))
    path.write_text(damage(text), encoding="utf-8", newline="")
    cases, notes = read_cases(path)
    assert len(notes) == 1
    (told,) = notes
    assert note in told
    assert len(cases) == (2 if "1 of 3" in note else 0)


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert read_cases(tmp_path / "cases.json") == (CaseRecords(), ())


def test_a_case_without_a_record_gets_a_bare_one(make_case_record: MakeRecord) -> None:
    cases = CaseRecords([make_case_record(id="file/b")])
    named = with_unnamed(cases, ["file/b", "file/a"])
    assert (named["file/a"]["name"], named["file/a"]["operation"]) == ("a", "")
    assert named["file/b"] == cases["file/b"]
    assert with_unnamed(cases, ["file/b"]) is cases
