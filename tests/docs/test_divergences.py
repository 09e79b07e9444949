"""The page on lists of known divergences: it has every field, as the code explains it, and its example can be read."""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.reading.divergences import DivergenceEntry, load_divergences

PAGE = Path(__file__).parents[2] / "docs" / "divergences.md"
EXAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def test_the_table_has_every_field_as_the_code_explains_it() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    found = {row.split("`")[1]: row for row in rows}
    assert found.keys() == DivergenceEntry.model_fields.keys()
    for name, field in DivergenceEntry.model_fields.items():
        assert str(field.description) in found[name]
        assert ("(needed)" in found[name]) == field.is_required()


def test_the_example_is_a_good_list_with_every_field(tmp_path: Path) -> None:
    (text,) = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    path = tmp_path / "known.yaml"
    path.write_text(text, encoding="utf-8")
    found = load_divergences([path])
    assert set().union(*(each.entry.model_fields_set for each in found)) == DivergenceEntry.model_fields.keys()
