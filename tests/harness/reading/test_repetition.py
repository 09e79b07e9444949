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
ONE = "cases:\n  - name: The case\n    inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}}\n"


def _only_fault(load_text: Load, text: str) -> Diagnostic:
    with pytest.raises(CaseError) as error:
        load_text(HEAD + text)
    [fault] = error.value.faults
    return fault


def test_more_cases_or_values_than_a_file_may_have_are_refused_before_they_are_made(load_text: Load) -> None:
    thousand = ", ".join(map(str, range(1000)))
    billion = f"for_each: {{a: [{thousand}], b: [{thousand}], c: [{thousand}]}}\n{ONE}"
    doubled, nested = (
        f"for_each: {{a0: [1], {', '.join(f'a{n}: {{x: [{value.format(n - 1)}]}}' for n in range(1, count))}}}\n{ONE}"
        for count, value in ((60, "{{each: a{0}}}, {{each: a{0}}}"), (2000, "{{each: a{0}}}"))
    )
    some = f"for_each: {{scale: [{', '.join(map(str, range(600)))}]}}\n"
    case = ONE.partition("\n")[2] + "    options: {scale: {each: scale}}\n    dtypes: [float64]\n"
    assert len(load_text(f"{HEAD}{some}cases:\n{case}")) == 600
    for text, message in (
        (
            billion + "    notes: [{each: a}, {each: b}, {each: c}]\n",
            f"1000000000 cases; expected at most {MAX_CASES}",
        ),
        (
            f"{some}cases:\n{case}{case.replace('The case', 'Another')}",
            "600 cases and 600 before them",
        ),
        (doubled + "    notes: {each: a59}\n", f"more than {MAX_NODES} values, written out"),
        (nested + "    notes: {each: a1999}\n", "nested more than 100 levels deep, written out"),
    ):
        assert message in _only_fault(load_text, text).message


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
