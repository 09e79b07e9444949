"""The bundled corpus as a whole: it loads, it is complete, and its schemas are those of the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from bundled import bundled
from numpy.typing import NDArray

from attncheck.backends import EVERYTHING
from attncheck.judging.undefined_rows import find_undefined_rows
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import bundled_expected_failures
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.schema import case_schema, tag_schema
from attncheck.reading.selection import select_cases
from attncheck.spec import OPERATIONS, SCORE_INPUTS

ROOT = Path(str(files("attncheck.cases")))
CORPUS = bundled()
YAML_FILES = sorted(path for path in ROOT.rglob("*.yaml"))
CASE_FILES = [path for path in YAML_FILES if path.name != "tags.yaml"]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def cases_of(operation: str) -> list[Case]:
    return [case for case in CORPUS.cases if case.operation == operation]


def test_every_case_runs_in_float32_and_in_float64_unless_it_is_about_sizes_or_narrow_formats() -> None:
    assert [case.id for case in CORPUS.cases if "float32" not in case.dtypes] == []
    narrow = [case for case in CORPUS.cases if "float64" not in case.dtypes]
    # What shows at a size is the path that a kernel takes there, and few have fast ones in float64.
    about = ("kernel_shapes/", "precision/", "designs/")
    assert [case.id for case in narrow if "half-precision" not in case.tags and not case.id.startswith(about)] == []


def test_known_numbers_say_where_they_come_from_and_only_documents_print_numbers_or_leave_them_out() -> None:
    known = [(case.id, own) for case in CORPUS.cases for own in case.expected if own.basis == "known"]
    assert len(known) >= 20
    assert [case_id for case_id, own in known if not own.because or len(own.because.split()) < 3] == []
    bases = {(case.is_document, own.basis) for case in CORPUS.cases for own in case.expected if own.basis != "known"}
    assert bases == {(True, "printed"), (True, "unprinted")}


def test_every_expected_failure_names_cases_that_there_are() -> None:
    with_properties = select_cases(["properties"], properties=True).cases
    for expected in bundled_expected_failures(list(EVERYTHING)):
        cases = with_properties if expected.entry.property else CORPUS.cases
        for glob in expected.entry.cases:
            if glob.startswith("search/"):  # problems that a search draws: attncheck.searching.concrete
                continue
            dtypes = {dtype for case in cases if fnmatchcase(case.id, glob) for dtype in case.dtypes}
            assert dtypes & set(expected.entry.dtypes or dtypes), f"{expected.location}: {glob}"


# Lengths that could be taken for each other.

TOPICS = (
    *("windows", "grouped_heads", "caches", "softcap", "lengths", "layouts", "half_precision"),
    *("gradients", "coincidences", "combinations"),
)
EQUAL_ON_PURPOSE = {
    "broadcast-coincidence": "lengths that coincide are what the case is about",
    "mask-axis": "as many queries as keys are what the case is about",
    "cache": "the new tokens are queries and keys",
    "fused-projection": "queries, keys and values come of the same tokens",
}
SHAPED = [case for case in select_cases(TOPICS).cases if case.operation in ("attention", "attention_gradients")]


def has_distinct_lengths(case: Case) -> bool:
    (batch, heads, queries, width), (_, kv_heads, keys, _) = case.input_shapes["query"], case.input_shapes["key"]
    past = case.input_shapes["past_key"][2] if "past_key" in case.inputs else 0
    lengths = [batch, heads, queries, width, keys, past, *([kv_heads] if kv_heads != heads else [])]
    counts = Counter(length for length in lengths if length > 1)
    is_allowed = width not in (4, 16, 64, 256) or "exact-scores" in case.tags
    return is_allowed and bool(max(counts.values()) == 1 or EQUAL_ON_PURPOSE.keys() & set(case.tags))


def test_the_dimensions_of_a_topics_case_are_pairwise_distinct_unless_a_tag_says_why_not() -> None:
    assert [case.id for case in SHAPED if not has_distinct_lengths(case)] == []


# A tag of a topic's case holds.


def given(case: Case) -> dict[str, NDArray[Any]]:
    return {name: own.array for name, own in make_exact_inputs(case).items()}


def converted(case: Case) -> dict[str, NDArray[Any]]:
    return dict(convert_inputs(case, make_exact_inputs(case), "float32").arrays)


def test_the_published_schemas_are_those_of_the_code_every_file_names_its_own_and_every_named_array_is_used() -> None:
    for name, schema in (("schema.json", case_schema), ("tags.schema.json", tag_schema)):
        assert (ROOT / name).read_text(encoding="utf-8") == schema()
    for path in YAML_FILES:
        text = path.read_text(encoding="utf-8")
        first = text.splitlines()[0]
        wanted = ROOT / ("tags.schema.json" if path.name == "tags.yaml" else "schema.json")
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.partition("=")[2]).resolve() == wanted.resolve(), path
        if path.parent.name != "documents":
            content = yaml.load(text, yaml.CSafeLoader)
            assert set(content.get("arrays", {})) <= set(_words(content)), path


def test_a_topics_case_has_rows_without_a_key_where_it_says_so_and_only_there() -> None:
    def is_empty(case: Case) -> bool:
        plain = case.problem(converted(case)).canonical()
        empty = find_undefined_rows(plain, "zero").empty
        return plain.inputs["key"].shape[-2] == 0 or bool(empty.any())

    assert [case.id for case in SHAPED if ("empty-row" in case.tags) != is_empty(case)] == []


def _words(node: Any) -> Iterator[str]:
    """Yield every string of a document that is a value, at any depth."""
    if isinstance(node, str):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _words(each)


def test_every_bundled_file_loads_without_fault_and_warning_and_every_name_is_a_sentence() -> None:
    assert CORPUS.faults == ()
    of_properties = {"cases/properties.yaml"}  # what holds between two calls is asked by itself
    assert {case.file for case in CORPUS.cases} | of_properties == {f"cases/{shown(path)}" for path in CASE_FILES}
    assert len({case.id for case in CORPUS.cases}) == len(CORPUS.cases)
    assert [warning for case in CORPUS.cases for warning in case.warnings] == []
    names = [case.name for case in CORPUS.cases]
    assert [name for name in names if not name[0].isupper() or len(name.split()) < 3 or name.endswith(".")] == []
    assert {tag for case in CORPUS.cases for tag in case.tags} == set(CORPUS.tags)
    short = [name for name, tag in CORPUS.tags.items() if min(len(tag.probes.split()), len(tag.defect.split())) < 3]
    assert short == []


def test_every_option_and_input_of_every_operation_and_score_is_asked_for_and_left_out() -> None:
    missing = []
    for operation, own in OPERATIONS.items():
        cases = cases_of(operation)
        given = [{*case.options, *case.inputs} for case in cases]
        optional = {name for name, spec in own.inputs.items() if not spec.required} | ({"scale"} & own.options)
        lowered = OPERATIONS.get(own.lowers_to or "")
        is_more = lowered is not None and lowered.inputs.keys() <= own.inputs.keys()  # what both take is held there
        handed_on = {*lowered.inputs, *lowered.options} if lowered is not None and is_more else set()
        missing += [(operation, name) for name in {*own.options, *own.inputs} - set().union(*given, handed_on)]
        missing += [(operation, "without", name) for name in optional & set.intersection(*given)]
        missing += [(operation, "five cases")] * (len(cases) < 5)
        narrow = (sum(dtype in case.dtypes for case in cases) for dtype in ("bfloat16", "float16"))
        missing += [(operation, "sixteen bits")] * (min(narrow) < 2)
    assert missing == []
    asked = {score: set[str]() for score in SCORE_INPUTS}
    for case in cases_of("scoring"):
        asked[case.options.get("score", "scaled_dot")] |= case.inputs.keys()
    assert asked == {score: set(inputs) for score, inputs in SCORE_INPUTS.items()}
