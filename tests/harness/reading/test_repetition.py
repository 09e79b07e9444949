"""Cases that ``for_each`` repeats: which are made, what they are called, and where their faults are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import tables_beside

from attncheck.errors import CaseError, Diagnostic
from attncheck.reading.case import Case
from attncheck.reading.for_each import MAX_CASES, write_out
from attncheck.reading.yaml_reader import MAX_NODES, FieldPath, read_yaml

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Cases for several values
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
"""
SIZES = """\
for_each: {width: [16, 64], heads: [1, 4]}
cases:
  - name: Heads of a width
    inputs:
      query: {draw: randn, shape: [2, {each: heads}, 3, {each: width}]}
      key: {draw: randn, shape: [2, 1, 5, {each: width}]}
      value: {draw: randn, shape: [2, 1, 5, {each: width}]}
  - name: Of one head
    inputs:
      query: {draw: randn, shape: [3, {each: width}]}
      key: {draw: randn, shape: [5, {each: width}]}
      value: {draw: randn, shape: [5, 7]}
  - name: Once
    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}}
"""
ONE = "cases:\n  - name: The case\n    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}}\n"


def _faults(load_text: Load, text: str) -> list[Diagnostic]:
    with pytest.raises(CaseError) as error:
        load_text(HEAD + text)
    assert all(str(fault).isprintable() for fault in error.value.faults)
    return error.value.faults


def _only_fault(load_text: Load, text: str) -> Diagnostic:
    [fault] = _faults(load_text, text)
    return fault


def test_a_mapping_makes_every_combination_of_the_names_that_a_case_has(load_text: Load) -> None:
    cases = load_text(HEAD + SIZES)
    assert [(case.name, case.id) for case in cases] == [
        ("Heads of a width (width 16, heads 1)", "prefix/heads-of-a-width-width-16-heads-1"),
        ("Heads of a width (width 16, heads 4)", "prefix/heads-of-a-width-width-16-heads-4"),
        ("Heads of a width (width 64, heads 1)", "prefix/heads-of-a-width-width-64-heads-1"),
        ("Heads of a width (width 64, heads 4)", "prefix/heads-of-a-width-width-64-heads-4"),
        ("Of one head (width 16)", "prefix/of-one-head-width-16"),
        ("Of one head (width 64)", "prefix/of-one-head-width-64"),
        ("Once", "prefix/once"),
    ]
    assert [case.input_shapes["query"] for case in cases[:4]] == [
        (2, 1, 3, 16),
        (2, 4, 3, 16),
        (2, 1, 3, 64),
        (2, 4, 3, 64),
    ]
    assert [case.line for case in cases] == [7, 7, 7, 7, 12, 12, 17]


def test_a_value_may_be_anything_that_has_a_name_and_may_have_names_in_turn(load_text: Load) -> None:
    cases = load_text(
        HEAD
        + "for_each: {heads: [2, 3]}\n"
        + "cases:\n  - name: Biases\n    for_each:\n"
        + "      bias: {none: null, per head: {draw: randn, shape: [{each: heads}, 1, 4]}}\n"
        + "      window: {both: [1, 0], left: [1, null]}\n"
        + "    options: {window: {each: window}}\n    inputs:\n"
        + "".join(
            f"      {name}: {{draw: randn, shape: [{{each: heads}}, 4, 2]}}\n" for name in ("query", "key", "value")
        )
        + "      bias: {each: bias}\n"
    )
    assert [case.name for case in cases[:3]] == [
        "Biases (heads 2, bias none, window both)",
        "Biases (heads 2, bias none, window left)",
        "Biases (heads 2, bias per head, window both)",
    ]
    biases = [case.input_shapes.get("bias") for case in cases]
    assert biases == [None, None, (1, 2, 1, 4), (1, 2, 1, 4), None, None, (1, 3, 1, 4), (1, 3, 1, 4)]
    assert [case.options["window"] for case in cases[:2]] == [(1, 0), (1, None)]


def test_a_field_whose_value_is_null_is_left_out(load_text: Load) -> None:
    cases = load_text(
        HEAD
        + "cases:\n  - name: Stored\n    for_each: {storage: [null, float16], scale: [null, 0.5]}\n"
        + "    storage: {each: storage}\n    dtypes: [float32]\n    options: {scale: {each: scale}}\n"
        + "    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}}\n"
    )
    assert [(case.storage, dict(case.options)) for case in cases] == [
        (None, {}),
        (None, {"scale": 0.5}),
        ("float16", {}),
        ("float16", {"scale": 0.5}),
    ]


@pytest.mark.parametrize(("value", "label"), tables_beside(__file__)["labels"])
def test_a_value_stands_in_the_name_such_that_its_id_is_its_own(load_text: Load, value: str, label: str) -> None:
    fields = {"true": "supports_statistics: {each: it}", "float16": "storage: {each: it}"}
    field = fields.get(value, "options: {scale: {each: it}}")
    text = f"{HEAD}for_each: {{it: VALUES}}\n{ONE}    dtypes: [float32]\n    {field}\n"
    [case] = load_text(text.replace("VALUES", f"[{value}]"))
    assert case.name == f"The case (it {label})"
    _, labelled = load_text(text.replace("VALUES", f"{{another: null, '{label}': {value}}}"))
    assert (labelled.name, labelled.id) == (case.name, case.id)


def test_a_billion_cases_are_refused_before_one_is_made(load_text: Load) -> None:
    names = ("a", "b", "c")
    values = ", ".join(f"{name}: [{', '.join(map(str, range(1000)))}]" for name in names)
    used = f"    notes: [{', '.join(f'{{each: {name}}}' for name in names)}]\n"
    fault = _only_fault(load_text, f"for_each: {{{values}}}\n{ONE}{used}")
    assert fault.message == f"this makes 1000000000 cases; expected at most {MAX_CASES} in a file"


def test_the_cases_of_a_file_are_counted_together(load_text: Load) -> None:
    values = f"for_each: {{scale: [{', '.join(map(str, range(600)))}]}}\n"
    case = ONE.partition("\n")[2] + "    options: {scale: {each: scale}}\n    dtypes: [float64]\n"
    assert len(load_text(f"{HEAD}{values}cases:\n{case}")) == 600
    fault = _only_fault(load_text, f"{values}cases:\n{case}{case.replace('The case', 'Another')}")
    assert fault.message == f"this makes 600 cases and 600 before them; expected at most {MAX_CASES} in a file"


def test_values_that_double_with_each_name_are_refused_before_they_are_made(load_text: Load) -> None:
    names = ", ".join(
        f"a{number}: {{x: [{{each: a{number - 1}}}, {{each: a{number - 1}}}]}}" for number in range(1, 60)
    )
    fault = _only_fault(load_text, f"for_each: {{a0: [1], {names}}}\n{ONE}    notes: {{each: a59}}\n")
    assert fault.message == f"more than {MAX_NODES} values, written out"


def test_values_that_nest_with_each_name_are_refused(load_text: Load) -> None:
    names = ", ".join(f"a{number}: {{x: [{{each: a{number - 1}}}]}}" for number in range(1, 2000))
    fault = _only_fault(load_text, f"for_each: {{a0: [1], {names}}}\n{ONE}    notes: {{each: a1999}}\n")
    assert "nested more than 100 levels deep, written out" in fault.message


# Any data: what is put in a place is what stands there in the file.

scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["x", "float16", "a text"])
references = st.sampled_from(["a", "b", "c"]).map(lambda name: {"each": name})


def _trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.sampled_from(["p", "q", "r"])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=3), max_leaves=6
    )


values_of_a = st.lists(_trees(scalars), min_size=1, max_size=3)
values_of_b = st.lists(_trees(scalars | st.just({"each": "a"})), min_size=1, max_size=2)


def _filled(data: Any, values: dict[str, Any]) -> Any:
    """What a case should be, the obvious way."""
    if isinstance(data, dict) and set(data) == {"each"}:
        return _filled(values[data["each"]], values)
    if isinstance(data, list):
        return [_filled(each, values) for each in data]
    if not isinstance(data, dict):
        return data
    return {
        field: _filled(each, values)
        for field, each in data.items()
        if not (isinstance(each, dict) and set(each) == {"each"} and _filled(each, values) is None)
    }


def _paths(data: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    yield path, data
    for part, inner in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _paths(inner, (*path, part))


@settings(max_examples=80)
@given(
    first=values_of_a,
    second=values_of_b,
    body=st.dictionaries(
        st.sampled_from(["p", "q", "r"]), _trees(scalars | references.filter(lambda each: each["each"] != "c"))
    ),
)
def test_any_data_is_filled_in(scratch_file: Path, first: list[Any], second: list[Any], body: dict[str, Any]) -> None:
    body = {**body, "all": [{"each": "a"}, {"each": "b"}]}
    labelled = [{f"value {place}": each for place, each in enumerate(values)} for values in (first, second)]
    written = {
        "for_each": dict(zip("ab", labelled, strict=True)),
        "cases": [{"name": "Plain"}, {"name": "Case", **body}],
    }
    scratch_file.write_text(json.dumps(written, indent=1), encoding="utf-8")
    document, faults = write_out(read_yaml(scratch_file))
    assert not faults
    wanted = [_filled(body, {"a": one, "b": other}) for one, other in product(first, second)]
    made = [{field: each for field, each in case.items() if field != "name"} for case in document.data["cases"]]
    assert made == [{}, *wanted]
    lines = scratch_file.read_text(encoding="utf-8").splitlines()
    for path, data in _paths(document.data):
        found, line = document.locate(path)
        assert found == path
        assert line is not None
        assert 1 <= line <= len(lines)
        source: Any = written
        for part in document.source(path):
            source = source[part]
        if not isinstance(data, dict | list) and path[-1:] != ("name",):
            assert source == data
