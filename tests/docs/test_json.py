"""What commands print for programs: the reference and the stored schema are made of the specification.

``python tests/docs/test_json.py`` writes both anew.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pages import DOCS
from test_command_line import GROUP

from attncheck.reports.machine.other_documents import DOCUMENTS
from attncheck.reports.machine.schema import reference, results_schema

PAGE = DOCS / "reference" / "json.md"
SCHEMA = DOCS / "reference" / "results.schema.json"
MARKED = re.compile(r"<!-- fields -->\n.*<!-- end -->\n", re.DOTALL)
HOW_TO_WRITE = "python tests/docs/test_json.py writes it anew"


def with_reference(text: str) -> str:
    """Return the page with its tables made anew."""
    return MARKED.sub(lambda _: f"<!-- fields -->\n{reference()}<!-- end -->\n", text)


def test_the_reference_is_made_of_the_specification() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert with_reference(text) == text, HOW_TO_WRITE


def test_the_stored_schema_is_the_one_that_is_printed() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == results_schema(), HOW_TO_WRITE


def test_the_schema_is_one() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(json.loads(results_schema()))


def test_every_command_with_an_outcome_has_a_document_and_the_option() -> None:
    of_texts = {"schema"}
    """A schema is JSON anyway."""
    assert {name.split()[0] for name in DOCUMENTS} == set(GROUP.commands) - of_texts
    for name, command in GROUP.commands.items():
        options = {option for each in command.params for option in each.opts}
        assert ("--json" in options) == (name not in of_texts), name


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(results_schema(), encoding="utf-8")
