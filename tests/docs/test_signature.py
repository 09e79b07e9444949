"""The signature of attention, wherever a document shows it whole: the contract's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attncheck.execution.signatures import expected_signature

ROOT = Path(__file__).parents[2]
SIGNATURE = re.compile(r"attention\(query, key, value, \*, mask=None, bias=None[^)]*\)")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_signature_that_a_document_shows_is_the_contracts(path: Path) -> None:
    shown = {" ".join(each.split()).replace('"', "'") for each in SIGNATURE.findall(path.read_text(encoding="utf-8"))}
    assert shown <= {expected_signature("attention")}
