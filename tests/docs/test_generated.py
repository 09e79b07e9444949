"""Tables that the site makes of the code, the schema of results, and the examples of case files, which are good cases.

``python tests/docs/test_generated.py`` writes the schema of results again.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jsonschema_rs
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))
from pages import DOCS, ROOT, pages

sys.path.insert(0, str(DOCS))
from site_tables import models_of_cases, tables
from test_command_line import GROUP

from attncheck.backends import numpy_backend
from attncheck.backends.families import FAMILIES
from attncheck.execution.signatures import signature_text
from attncheck.execution.worker import Computed, evaluate_on_backend
from attncheck.judging.compare import absolute_difference, flag_differing_nonfinite
from attncheck.reading import array_kinds, model
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailureEntry, load_expected_failures
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.model import TAG_FILE
from attncheck.settings import options
from attncheck.showing.json_schema import DOCUMENTS, results_schema
from attncheck.spec import OPERATIONS

SCHEMA = DOCS / "reference" / "results.schema.json"
EXAMPLES = ROOT / "examples" / "case_files"


def test_a_signature_that_a_document_shows_is_the_contracts() -> None:
    signature = re.compile(r"attention\(query, key, value, \*, mask=None, bias=None[^)]*\)")
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        shown = {
            " ".join(each.split()).replace('"', "'") for each in signature.findall(path.read_text(encoding="utf-8"))
        }
        assert shown <= {signature_text("attention")}, path


def test_the_schema_of_results_is_that_of_the_code() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == results_schema(), "python tests/docs/test_generated.py writes it again"
    jsonschema_rs.meta.validate(json.loads(results_schema()))


def test_every_table_can_be_made_stands_on_one_page_and_says_what_each_field_means() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    made = tables()
    assert sorted(re.findall(r"^```{include} (?:\.\./)+build/tables/(\S+)\.md$", text, re.MULTILINE)) == sorted(made)
    assert [name for name, each in made.items() if each.count("\n| ") < 2] == ["findings"]
    described: list[type[BaseModel]] = [*models_of_cases(), *array_kinds.MODEL_OF_KIND.values(), ExpectedFailureEntry]
    for each in described:
        each.model_rebuild()  # fields of models that name each other are complete from then on
        assert [field for field, value in each.model_fields.items() if not value.description] == [], each.__name__
        assert f"fields-{each.__name__}" in made or each in array_kinds.MODEL_OF_KIND.values()


def test_help_names_every_family_and_every_command_with_an_outcome_has_a_document_and_the_option() -> None:
    names = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"
    assert names in options.find_options(options.RunOptions)["signature"].flag.help
    of_texts = {"schema"}  # which is JSON anyway
    assert {name.split()[0] for name in DOCUMENTS} == set(GROUP.commands) - of_texts
    for name, command in GROUP.commands.items():
        assert ("--json" in {option for each in command.params for option in each.opts}) == (name not in of_texts), name


def test_the_list_on_the_page_of_expected_failures_is_good_and_has_every_field(tmp_path: Path) -> None:
    page = (DOCS / "expected_failures.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "known.yaml").write_text(text, encoding="utf-8")
    found = load_expected_failures([tmp_path / "known.yaml"])
    assert set().union(*(each.entry.model_fields_set for each in found)) == ExpectedFailureEntry.model_fields.keys()


def _cases() -> list[Case]:
    return [
        case
        for path in sorted(EXAMPLES.glob("*.yaml"))
        if path.name != TAG_FILE
        for case in load_case_file(path, path.name, path.stem, load_tags(EXAMPLES, TAG_FILE))
    ]


def test_every_option_input_and_field_has_an_example_which_the_reference_shows() -> None:
    cases = _cases()
    assert {option for case in cases for option in case.options} == {
        option for operation in OPERATIONS.values() for option in operation.options
    }
    assert {case.operation for case in cases} == set(OPERATIONS)
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.yaml")}
    page, text = (DOCS / "cases.md").read_text(encoding="utf-8"), "\n".join(files.values())
    assert sorted(re.findall(r"^```{literalinclude} \.\./examples/case_files/(.*)$", page, re.MULTILINE)) == sorted(
        files
    )
    models = (model.CaseFile, model.CaseEntry, model.Expectation, model.Defaults, model.TagEntry, model.Source)
    fields = {
        field for each in (*models, model.Random, *array_kinds.MODEL_OF_KIND.values()) for field in each.model_fields
    }
    fields |= {name for operation in OPERATIONS.values() for name in operation.inputs} | {"score_vector", "weight"}
    assert [field for field in sorted(fields) if not re.search(rf"\b{field}:", text)] == []
    assert list(load_tags(EXAMPLES, TAG_FILE)) == ["uniform"]


def test_every_example_runs_and_the_numbers_that_it_knows_hold() -> None:
    for case in _cases():
        dtype = "float64" if "float64" in case.dtypes else "float32"
        outcome = evaluate_on_backend(numpy_backend, make_problem_of_case(case, make_inputs(case, dtype)).as_call())
        assert isinstance(outcome, Computed), outcome
        for expected in case.expected:
            if expected.numbers is None or expected.erratum or expected.name != expected.of:
                continue
            given, known = expected.numbers.given, expected.numbers
            computed = outcome.stages[expected.of]
            rounding = 2.0**-20 if case.computed_in == "float32" else 1e-12
            off = absolute_difference(computed, known.value)[given]
            assert not flag_differing_nonfinite(computed, known.value)[given].any()
            assert (off <= known.radius_on_side_of(computed)[given] + rounding).all(), (
                case.name,
                expected.name,
                computed,
            )


if __name__ == "__main__":
    SCHEMA.write_text(results_schema(), encoding="utf-8")
