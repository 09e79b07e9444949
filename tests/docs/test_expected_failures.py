"""The page on lists of expected failures: it has every field, as the code explains it, and its example can be read."""

from __future__ import annotations

import re
from pathlib import Path

from attncheck.reading.expected_failures import ExpectedFailureEntry, load_expected_failures

PAGE = Path(__file__).parents[2] / "docs" / "expected_failures.md"
EXAMPLE = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def test_the_table_has_every_field_as_the_code_explains_it() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    found = {row.split("`")[1]: row for row in rows}
    assert found.keys() == ExpectedFailureEntry.model_fields.keys()
    for name, field in ExpectedFailureEntry.model_fields.items():
        assert str(field.description) in found[name]
        assert ("(needed)" in found[name]) == field.is_required()


def test_the_example_is_a_good_list_with_every_field(tmp_path: Path) -> None:
    (text,) = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    path = tmp_path / "known.yaml"
    path.write_text(text, encoding="utf-8")
    found = load_expected_failures([path])
    assert set().union(*(each.entry.model_fields_set for each in found)) == ExpectedFailureEntry.model_fields.keys()
