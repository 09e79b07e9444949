"""The bundled corpus as a whole: it loads, it is complete, and its schemas are those of the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from attncheck.harness.judging.judge import judge
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.schema import case_schema, tag_schema
from attncheck.harness.reading.selection import select_cases
from attncheck.harness.running.worker import Computed
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import OPERATIONS, SCORE_INPUTS

ROOT = Path(str(files("attncheck.cases")))
CORPUS = select_cases()
YAML = sorted(path for path in ROOT.rglob("*.yaml"))
CASE_FILES = [path for path in YAML if path.name != "tags.yaml"]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def cases_of(operation: str) -> list[Case]:
    return [case for case in CORPUS.cases if case.operation == operation]


def test_every_bundled_file_loads_without_fault() -> None:
    assert CORPUS.faults == ()
    assert {case.file for case in CORPUS.cases} == {f"cases/{shown(path)}" for path in CASE_FILES}
    assert len(CASE_FILES) >= 10


def test_no_two_cases_have_the_same_id() -> None:
    assert len({case.id for case in CORPUS.cases}) == len(CORPUS.cases)


@pytest.mark.parametrize("case", CORPUS.cases, ids=lambda case: case.id)
def test_the_name_of_every_case_is_a_sentence(case: Case) -> None:
    assert case.name[0].isupper()
    assert len(case.name.split()) >= 3
    assert not case.name.endswith(".")


def test_every_tag_is_defined_and_every_defined_tag_is_used() -> None:
    assert {tag for case in CORPUS.cases for tag in case.tags} == set(CORPUS.tags)


def test_every_tag_says_what_it_probes_and_which_defect_it_answers() -> None:
    for name, tag in CORPUS.tags.items():
        assert len(tag.probes.split()) >= 3, name
        assert len(tag.defect.split()) >= 3, name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_at_least_five_cases(operation: str) -> None:
    assert len(cases_of(operation)) >= 5


@pytest.mark.parametrize(
    ("operation", "option"), [(name, option) for name, own in OPERATIONS.items() for option in sorted(own.options)]
)
def test_every_option_of_every_operation_appears(operation: str, option: str) -> None:
    assert any(option in case.options for case in cases_of(operation))


@pytest.mark.parametrize("operation", [name for name, own in OPERATIONS.items() if "scale" in own.options])
def test_every_operation_with_a_scale_is_also_asked_for_its_default(operation: str) -> None:
    assert any("scale" not in case.options for case in cases_of(operation))


@pytest.mark.parametrize(
    ("operation", "name"), [(operation, name) for operation, own in OPERATIONS.items() for name in own.inputs]
)
def test_every_input_of_every_operation_appears(operation: str, name: str) -> None:
    assert any(name in case.inputs for case in cases_of(operation))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, own in OPERATIONS.items()
        for name, spec in own.inputs.items()
        if not spec.required
    ],
)
def test_every_optional_input_is_also_left_out(operation: str, name: str) -> None:
    assert any(name not in case.inputs for case in cases_of(operation))


@pytest.mark.parametrize("score", SCORE_INPUTS)
def test_every_kind_of_score_appears_with_every_input_it_takes(score: str) -> None:
    cases = [case for case in cases_of("scoring") if case.options.get("score", "scaled_dot") == score]
    assert {name for case in cases for name in case.inputs} == set(SCORE_INPUTS[score])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_case_runs_in_both_dtypes(dtype: str) -> None:
    assert [case.id for case in CORPUS.cases if dtype not in case.dtypes] == []


def test_known_numbers_say_where_they_come_from() -> None:
    known = [(case.id, own) for case in CORPUS.cases for own in case.expected if own.basis == "known"]
    assert len(known) >= 20
    assert [case_id for case_id, own in known if not own.because or len(own.because.split()) < 3] == []


def test_only_documents_print_numbers_or_leave_them_out() -> None:
    bases = Counter(
        (case.is_document, own.basis) for case in CORPUS.cases for own in case.expected if own.basis != "known"
    )
    assert set(bases) == {(True, "printed"), (True, "unprinted")}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CORPUS.cases, ids=lambda case: case.id)
def test_numpy_gives_every_known_number_and_every_stage_within_its_bounds(
    case: Case, dtype: str, compute: Callable[[Case, str], tuple[Inputs, dict[str, NDArray[Any]]]]
) -> None:
    inputs, stages = compute(case, dtype)
    judged = judge(case, dtype, inputs, {"numpy": Computed(stages)}, {"numpy": "native"})
    assert judged.truth.outside == ""
    rows = judged.rows
    assert {str(row.verdict) for row in rows if row.comparison == "known"} <= {Verdict.AGREE}
    assert {row.stage: str(row.verdict) for row in rows if row.comparison == "stage"} == dict.fromkeys(
        stages, Verdict.AGREE
    )
    given = sum(int(own.numbers.given.sum()) for own in case.expected if own.basis == "known" and own.numbers)
    assert sum(row.comparison == "known" for row in rows) == given


# The published schemas.


@pytest.mark.parametrize(("name", "schema"), [("schema.json", case_schema), ("tags.schema.json", tag_schema)])
def test_the_published_schema_is_that_of_the_code(name: str, schema: Callable[[], str]) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == schema()


@pytest.mark.parametrize("path", YAML, ids=shown)
def test_every_file_begins_by_naming_its_schema_for_editors(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    wanted = "tags.schema.json" if path.name == "tags.yaml" else "schema.json"
    assert (path.parent / first.removeprefix(prefix)).resolve() == (ROOT / wanted).resolve()
    assert (ROOT / wanted).is_file()
