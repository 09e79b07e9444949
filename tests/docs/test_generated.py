"""Tables of the documentation that are made of the code.

``python tests/docs/test_generated.py`` writes them again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jsonschema_rs

sys.path.insert(0, str(Path(__file__).parent))
from pages import DOCS, ROOT, all_pages

sys.path.insert(0, str(DOCS))
from site_tables import table, tables
from test_command_line import GROUP

from attncheck import options
from attncheck.backends.families import FAMILIES, Family
from attncheck.conventions import QUESTIONS
from attncheck.execution.signatures import expected_signature
from attncheck.judging.alternatives import Reading
from attncheck.judging.readings import CATALOGUE, declaration_of
from attncheck.reading.expected_failures import ExpectedFailureEntry, load_expected_failures
from attncheck.reports.build_frames import COLUMNS, NUMBERS, PAIRS, RESULTS
from attncheck.reports.frames import PROPERTIES as PROPERTY_COLUMNS
from attncheck.reports.json_schema import DOCUMENTS, results_schema
from attncheck.results.format import COLUMNS as ROW_COLUMNS
from attncheck.spec import PROPERTIES

SCHEMA = DOCS / "reference" / "results.schema.json"
LAYOUTS = {"BHLD": "(B, H, L, D)", "BLHD": "(B, L, H, D)", "LHD": "(L, H, D), a batch entry to a call"}


def questions() -> str:
    """Every question about conventions with its meanings."""
    rows = (
        (
            each.name,
            each.asks,
            ("" if each.expected else "(-) ") + "; ".join(meaning.words for meaning in each.meanings),
        )
        for each in QUESTIONS
    )
    return table(("question", "asks", "meanings"), *rows)


def signatures() -> str:
    """A line for each family of signatures: its call, its layout, and where its causal calls count from."""
    rows = ((f"`{each.name}`", f"`{each.call}`", _layout(each), _corner(each)) for each in FAMILIES.values())
    return table(("`--signature`", "is called as", "arrays", "causal"), *rows)


def _layout(family: Family) -> str:
    return LAYOUTS[family.layout] + (f"; output {LAYOUTS[family.output_layout]}" if family.output_layout else "")


def _corner(family: Family) -> str:
    return f"from the {family.corner}" if family.causal or family.causal_mask else "as a mask"


def properties() -> str:
    """Every property, with what it says."""
    rows = ((f"`{each.name}`", each.says, each.calls) for each in PROPERTIES.values())
    return table(("property", "what must hold", "further calls"), *rows)


def columns() -> str:
    """Every column of the rows and of the frames."""
    frames = {
        "rows": ROW_COLUMNS,
        "results": RESULTS,
        "pairs": PAIRS,
        "numbers": NUMBERS,
        "properties": PROPERTY_COLUMNS,
    }
    meanings = {**COLUMNS, **{name: column.meaning for name, column in ROW_COLUMNS.items()}}
    having = {name: ", ".join(frame for frame, own in frames.items() if name in own) for name in meanings}
    rows = ((f"`{name}`", having[name], meaning) for name, meaning in meanings.items() if having[name])
    return table(("column", "frames", "meaning"), *rows)


def readings() -> str:
    """Every reading with its message, by what it is about."""
    return "\n".join(f"### {subject}\n\n{_readings_of(rows)}" for subject, rows in CATALOGUE.items())


def _readings_of(readings: Sequence[Reading]) -> str:
    rows = ((f"`{each.name}`", re.sub(r"\{(\w+)\}", r"*\1*", each.says), _kind_of(each)) for each in readings)
    return table(("name", "message", "kind"), *dict.fromkeys(rows))


def _kind_of(reading: Reading) -> str:
    kind = "convention" if reading.is_convention else "mistake"
    option = declaration_of(reading.name)
    return kind if option is None else f'{kind}, unless `{{"{option[0]}": "{option[1]}"}}` is declared'


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "diagnoses.md": ("readings", readings),
    "how-to/conventions.md": ("questions", questions),
    "how-to/kernel.md": ("signatures", signatures),
    "how-to/properties.md": ("properties", properties),
    "reference/results.md": ("columns", columns),
}
"""The pages, with what marks their tables."""


def anew(page: str) -> tuple[str, str]:
    """Return a page as it is, and with its tables made anew."""
    marker, make = GENERATED[page]
    text = (DOCS / page).read_text(encoding="utf-8")
    marked = re.compile(rf"(<!-- {marker} -->\n).*?<!-- end -->\n", re.DOTALL)
    assert marked.search(text), page
    return text, marked.sub(lambda found: f"{found[1]}{make()}<!-- end -->\n", text)


def _pages() -> Iterator[tuple[Path, str, str]]:
    yield from ((DOCS / page, *anew(page)) for page in GENERATED)
    yield SCHEMA, SCHEMA.read_text(encoding="utf-8"), results_schema()


def test_a_signature_that_a_document_shows_is_the_contracts() -> None:
    signature = re.compile(r"attention\(query, key, value, \*, mask=None, bias=None[^)]*\)")
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        shown = {
            " ".join(each.split()).replace('"', "'") for each in signature.findall(path.read_text(encoding="utf-8"))
        }
        assert shown <= {expected_signature("attention")}, path


def test_every_table_is_that_of_the_code_and_those_that_the_site_makes_are_included_once() -> None:
    stale = [path.name for path, text, made in _pages() if text != made]
    assert stale == [], "python tests/docs/test_generated.py writes them again"
    jsonschema_rs.meta.validate(json.loads(results_schema()))
    text = "".join(page.read_text(encoding="utf-8") for page in all_pages())
    made = tables()
    assert sorted(re.findall(r"^```{include} (?:\.\./)+build/tables/(\S+)$", text, re.MULTILINE)) == sorted(made)
    assert [name for name, each in made.items() if each.count("\n| ") < 2] == []


def test_help_names_every_family_and_every_command_with_an_outcome_has_a_document_and_the_option() -> None:
    names = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"
    assert names in options.options_of(options.RunOptions)["signature"].flag.help
    of_texts = {"schema"}  # which is JSON anyway
    assert {name.split()[0] for name in DOCUMENTS} == set(GROUP.commands) - of_texts
    for name, command in GROUP.commands.items():
        assert ("--json" in {option for each in command.params for option in each.opts}) == (name not in of_texts), name


def test_the_page_on_expected_failures_has_every_field_as_the_code_explains_it_and_a_good_list(tmp_path: Path) -> None:
    page = (DOCS / "expected_failures.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == ExpectedFailureEntry.model_fields.keys()
    for name, field in ExpectedFailureEntry.model_fields.items():
        assert str(field.description) in rows[name]
        assert ("(needed)" in rows[name]) == field.is_required()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "known.yaml").write_text(text, encoding="utf-8")
    found = load_expected_failures([tmp_path / "known.yaml"])
    assert set().union(*(each.entry.model_fields_set for each in found)) == ExpectedFailureEntry.model_fields.keys()


if __name__ == "__main__":
    for path, _, made in _pages():
        path.write_text(made, encoding="utf-8")
