"""Case files are loaded whole, their repeated cases written out, or refused in little time and memory."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import CASES

from attncheck.errors import CaseError, Diagnostic
from attncheck.reading import case_maker
from attncheck.reading.case import Case
from attncheck.reading.for_each import MAX_CASES, write_out
from attncheck.reading.printed import MAX_NUMBERS, PrintedError, Rounding, parse_printed
from attncheck.reading.yaml_reader import MAX_BYTES, MAX_NODES, FieldPath, YamlFault, read_yaml

Load = Callable[[str | bytes], list[Case]]

DEFAULTS = "defaults: {random: {generator: torch, seed: 1}}\narrays: {large: {constant: 1, shape: [8192, 4096]}}\n"
HEAD = CASES["head of softmax"].replace("cases:\n", f"{DEFAULTS}cases:\n")


def file_of(*scores: str, more: str = "") -> str:
    """Write a file with a case of each scores; those of the first stand on line 7."""
    cases = "".join(
        f"  - name: Case {number}\n    inputs: {{scores: {source}}}\n" for number, source in enumerate(scores)
    )
    return HEAD + cases + more


def faults_of(load_text: Load, text: str) -> list[Diagnostic]:
    with pytest.raises(CaseError) as error:
        load_text(text)
    return error.value.faults


TRILLION = "1000000x1000000 is 1000000000000 elements; expected at most 67108864"
TOGETHER = "numbers are made for the case; expected at most 134217728"
DOUBLED = "".join(f"      a{number}: {{sum: [a{number - 1}, a{number - 1}]}}\n" for number in range(1, 60))
NOTES = ", ".join([f"&a {'x' * 3999}", *["*a"] * (MAX_BYTES // 3999 + 1)])


def repeated(values: str, *scores: str, more: str = "") -> str:
    """Write a file of cases that are made for several values."""
    return f"for_each: {{{values}}}\n{file_of(*scores, more=more)}"


THOUSAND = ", ".join(map(str, range(1000)))
DOUBLED_VALUES = ", ".join(f"a{n}: {{x: [{{each: a{n - 1}}}, {{each: a{n - 1}}}]}}" for n in range(1, 60))
NESTED_VALUES = ", ".join(f"a{n}: {{x: [{{each: a{n - 1}}}]}}" for n in range(1, 2000))
REPEATED = (
    (
        repeated(f"a: [{THOUSAND}], b: [{THOUSAND}], c: [{THOUSAND}]", "{values: [{each: a}, {each: b}, {each: c}]}"),
        f"this makes 1000000000 cases; expected at most {MAX_CASES} in a file",
    ),
    (repeated(f"a: [{THOUSAND}]", *["{values: [{each: a}]}"] * 2), "this makes 1000 cases and 1000 before them"),
    (repeated(f"a0: [1], {DOUBLED_VALUES}", "{values: {each: a59}}"), f"more than {MAX_NODES} values, written out"),
    (repeated(f"a0: [1], {NESTED_VALUES}", "{values: {each: a1999}}"), "nested more than 100 levels deep, written out"),
)
HUGE = (
    *((text, None, None, message) for text, message in REPEATED),
    (file_of("{constant: 1, shape: [1000000, 1000000]}"), 8, "inputs.scores.shape", TRILLION),
    (file_of("{draw: rand, shape: [1000000, 1000000]}"), 8, "inputs.scores.shape", TRILLION),
    (
        file_of(f"{{constant: 1, shape: [1, 60000000], rows: [{'0, ' * 2000}0]}}"),
        8,
        "inputs.scores",
        "2001x60000000 is 120060000000 elements; expected at most 67108864",
    ),
    # a0 is one array, and each sum is itself, two references and twice the one before: 5, 13, 29, 61, 125, 253
    (
        file_of("{identity: 2}", more=f"    arrays:\n      a0: {{identity: 2}}\n{DOUBLED}"),
        16,
        "arrays.a6",
        "made of more than 200 arrays, counting the parts of parts",
    ),
    (file_of(f"{{sum: [{', '.join(['{constant: 1, shape: [8192, 8192]}'] * 3)}]}}"), 8, "inputs.scores", TOGETHER),
    (
        file_of("{concat: [{constant: 1, shape: [1, 67108864]}], axis: 0, rows: [0], times: 2, plus: 1}"),
        8,
        "inputs.scores",
        TOGETHER,
    ),
    (
        file_of("{draw: randn, shape: [4, 262144]}", more="    memory_layout: {scores: broadcast}\n"),
        9,
        "memory_layout",
        "",
    ),
    (file_of("{identity: 2}", more=f"    notes: [{NOTES}]\n"), None, None, "characters (aliases expanded)"),
    (file_of(f"{{values: [{', '.join(['1e400'] * 30)}]}}"), None, None, "and 25 more faults"),
    (file_of("{identity: 2}", more="".join(f"more{n}: 1\n" for n in range(3000))), None, None, "and 2995 more faults"),
)


def test_what_is_too_large_is_refused_before_it_is_made(load_text: Load) -> None:
    for text, line, field, message in HUGE:
        tracemalloc.start()
        try:
            fault = faults_of(load_text, text)[-1]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert message in fault.message
        assert line is None or (fault.line == line and str(fault.field).startswith(str(field))), message
        assert peak < 40 * 2**20, message


def test_a_fault_at_the_top_is_told_once_for_all_cases_and_a_window_wider_than_any_array(load_text: Load) -> None:
    [fault] = faults_of(load_text, file_of(*["{identity: 2}"] * 5).replace("large: ", "a: {ref: b}, large: "))
    assert (fault.case, fault.field) == (None, "arrays.a")
    text = file_of("{constant: 1, shape: [2, 2]}", more="    operation: masking\n    options: {window: [%d, 0]}\n")
    assert load_text(text % 2**31)
    [fault] = faults_of(load_text, text % (2**31 + 1))
    assert fault.field == "options.window[0]"


@given(target=st.sampled_from(["loader", "loader", "expected_failures", "config"]), seed=st.integers(0, 2**32))
def test_any_file_is_read_or_refused(fuzzing: Any, target: str, seed: int) -> None:
    make, targets = fuzzing
    assert targets[target].take(make(target, seed)) in ("accepted", "refused")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are files on POSIX systems")
def test_a_pipe_or_a_device_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        with pytest.raises(YamlFault, match="no regular file"):
            read_yaml(tmp_path / name)


def test_more_printed_numbers_than_anybody_types_are_refused_and_a_long_row_of_digits_at_once() -> None:
    assert parse_printed("1 " * MAX_NUMBERS, Rounding()).shape == (MAX_NUMBERS,)
    for text in ("1 " * (MAX_NUMBERS + 1), f"[{'1,' * MAX_NUMBERS}1]"):
        with pytest.raises(PrintedError, match=f"{MAX_NUMBERS + 1} numbers; expected at most {MAX_NUMBERS}"):
            parse_printed(text, Rounding())
    # Tried in every way in which digits could be shared out, it would take hours.
    with pytest.raises(PrintedError, match="is not a number"):
        parse_printed("1" * 400_000 + "x", Rounding())


def test_the_numbers_of_a_file_are_counted_however_they_are_written(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, numbers = 2**13, ",".join(["1"] * 512)
    monkeypatch.setattr(case_maker, "MAX_LOOKED_AT", most)
    shared = HEAD.replace("large: ", f"shared: {{values: [{numbers}]}}, large: ")
    for scores in ("{ref: shared}", f'{{printed: "[{numbers}]"}}'):
        cases = [scores] * (most // 512)
        assert load_text(file_of(*cases[: most // 1024 - 1]).replace(HEAD, shared))
        fault = faults_of(load_text, file_of(*cases, *cases).replace(HEAD, shared))[0]
        assert fault.message.startswith(f"the file's cases spell out or refer to more than {most} numbers")


# Cases that for_each repeats, of any data: what is put in a place is what stands there in the file.

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
