"""An element's index is written in one way, and in a document's case as the document counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attncheck import elements
from attncheck.elements import DocumentLayout, index_from, layout_of, stored_index, written_element

PACKAGE = Path(elements.__file__).parent


@pytest.mark.parametrize(
    ("index", "name", "expected"),
    [
        ((0, 2, 8, 4), "output", "output[0, 2, 8, 4]"),
        ("0,2,8,4", "output", "output[0, 2, 8, 4]"),
        ("3", "", "[3]"),
        ("", "largest", "largest"),
        ("", "", "[]"),
    ],
)
def test_an_element_is_written_behind_its_array(index: str | tuple[int, ...], name: str, expected: str) -> None:
    assert written_element(index, name) == expected


def test_what_results_keep_is_read_back() -> None:
    assert stored_index((0, 12, 3)) == "0,12,3"
    assert index_from("0,12,3") == (0, 12, 3)
    assert index_from("") == ()


@pytest.mark.parametrize(
    ("shape", "is_transposed", "expected"),
    [
        ((1, 1, 4, 5), False, "w[2, 3]"),
        ((1, 1, 4, 5), True, "w[3, 2]"),
        ((1, 2, 4, 5), False, "w[0, 2, 3]"),
        ((1, 1, 1, 5), False, "w[3]"),
        ((2, 1, 4, 5), True, "w[0, 0, 3, 2]"),
        ((4, 5), False, "w[0, 0, 2, 3]"),
    ],
)
def test_a_document_counts_without_leading_axes_of_length_1(
    shape: tuple[int, ...], is_transposed: bool, expected: str
) -> None:
    index = (0, 0, 0, 3) if shape == (1, 1, 1, 5) else (0, 0, 2, 3)
    assert written_element(index, "w", DocumentLayout(shape, is_transposed)) == expected


def test_a_single_element_keeps_one_axis() -> None:
    assert written_element("0,0,0,0", layout=DocumentLayout((1, 1, 1, 1))) == "[0]"


def test_only_a_document_has_a_layout_of_its_own() -> None:
    assert layout_of("w", (1, 1, 4, 5), [("w", True)], is_document=False) is None
    assert layout_of("w", (1, 1, 4, 5), [("w", True)], is_document=True) == DocumentLayout((1, 1, 4, 5), True)
    assert layout_of("x", (1, 1, 4, 5), [("w", True)], is_document=True) == DocumentLayout((1, 1, 4, 5), False)


def test_nothing_else_writes_an_index() -> None:
    """Brackets around what is joined with commas, or around an index of a row: that is another way of writing."""
    other_way = re.compile(r"\[\{', ?'\.join\(map\(str|\[\{row(\.index|\['index'\])\}\]|\[\{index\}\]")
    folders = [PACKAGE, *(PACKAGE.parent / name for name in ("reports", "benchmarks"))]
    found = [
        f"{path.name}: {line.strip()}"
        for folder in folders
        for path in folder.rglob("*.py")
        if path.name != "elements.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if other_way.search(line)
    ]
    assert found == []
