"""Case files are loaded whole, or refused in little time and memory, whatever they hold."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import CaseError, Diagnostic, ExitCode
from attncheck.reading import case_maker
from attncheck.reading.case import Case
from attncheck.reading.case_maker import MAX_LOOKED_AT
from attncheck.reading.printed import MAX_NUMBERS, PrintedError, Rounding, parse_printed
from attncheck.reading.yaml_reader import MAX_BYTES, YamlFault, read_yaml

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: A file of cases
source: {kind: derivation, title: Worked out by hand}
operation: attention
"""
# The first line of a case's own text is line 6 of the file.
CASE = HEAD + "cases:\n  - name: The case at hand\n"
INPUTS = """\
inputs:
  query: {values: [[1, 2], [3, 4]]}
  key: {values: [[1, 2], [3, 4]]}
  value: {values: [[1, 2], [3, 4]]}
"""


def _case(body: str, head: str = CASE) -> str:
    return head + "".join(f"    {line}\n" for line in body.splitlines())


def _query(source: str, more: str = "") -> str:
    """A case whose query is this; it stands on line 7."""
    return _case(INPUTS.replace("{values: [[1, 2], [3, 4]]}", source, 1) + more)


def _drawn(source: str, generator: str = "numpy-legacy") -> str:
    return _query(source, f"random: {{generator: {generator}, seed: 1}}\n")


def _only_fault(load_text: Load, text: str | bytes) -> Diagnostic:
    with pytest.raises(CaseError) as error:
        load_text(text)
    [fault] = error.value.faults
    assert str(error.value) == str(fault)
    assert fault.file == "file.yaml"
    assert str(fault).isprintable()
    assert error.value.exit_code == ExitCode.BAD_INPUT
    return fault


NAME = "The case at hand"


@pytest.mark.parametrize(
    "text",
    [
        _query("{constant: 1, shape: [1000000, 1000000]}"),
        _drawn("{draw: rand, shape: [1000000, 1000000]}", "torch"),
    ],
)
def test_an_array_of_a_trillion_numbers_is_refused_before_it_is_made(load_text: Load, text: str) -> None:
    tracemalloc.start()
    try:
        fault = _only_fault(load_text, text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (fault.line, fault.field) == (7, "inputs.query.shape")
    assert fault.message == "1000000x1000000 is 1000000000000 elements; expected at most 67108864"
    assert peak < 20 * 2**20


def test_arrays_that_double_with_each_name_are_refused_before_they_are_made(load_text: Load) -> None:
    doubled = "".join(f"  a{number}: {{sum: [a{number - 1}, a{number - 1}]}}\n" for number in range(1, 60))
    fault = _only_fault(load_text, _case(INPUTS) + "arrays:\n  a0: {identity: 2}\n" + doubled)
    # a0 is one array, and each sum is itself, two references and twice the one before: 5, 13, 29, 61, 125, 253
    assert (fault.line, fault.field) == (17, "arrays.a6")
    assert fault.message == "made of more than 200 arrays, counting the parts of parts"


def test_bytes_that_are_no_text_and_rows_without_end_are_refused(load_text: Load) -> None:
    assert str(_only_fault(load_text, b"title: caf\xe9\n")) == "file.yaml:1: not UTF-8: byte 0xe9 at position 10"
    rows = _query(f"{{constant: 1, shape: [1, 60000000], rows: [{'0, ' * 2000}0]}}")
    assert _only_fault(load_text, rows).message == "2001x60000000 is 120060000000 elements; expected at most 67108864"


def test_of_very_many_literals_out_of_range_the_first_are_told(load_text: Load) -> None:
    with pytest.raises(CaseError) as error:
        load_text(_query(f"{{values: [{', '.join(['1e400'] * 30)}]}}"))
    assert [fault.case for fault in error.value.faults] == [NAME] * 5 + [None]
    assert error.value.faults[-1].message == "and 25 more faults"


def test_a_fault_at_the_top_of_the_file_is_told_once_for_all_cases(load_text: Load) -> None:
    others = "".join(_case(INPUTS, f"  - name: Case {number}\n") for number in range(5))
    fault = _only_fault(load_text, _case(INPUTS) + others + "arrays: {a: {ref: b}}\n")
    assert (fault.case, fault.field) == (None, "arrays.a")


def test_of_very_many_faults_the_first_are_told_and_the_rest_are_counted(load_text: Load) -> None:
    with pytest.raises(CaseError) as error:
        load_text(_case(INPUTS) + "".join(f"operation{number}: 1\n" for number in range(3000)))
    *told, last = error.value.faults
    assert [fault.line for fault in told] == [10, 11, 12, 13, 14]
    assert last.message == "and 2995 more faults"


def test_nan_at_the_top_of_the_file_is_only_for_cases_that_allow_it(load_text: Load) -> None:
    arrays = "arrays: {m: {values: [[.nan, 1]]}}\n"
    probing = _case("inputs: {query: m, key: m, value: m}\nallow_nonfinite: true")
    other = _case(INPUTS, "  - name: Another case\n")
    assert len(load_text(probing + other + arrays)) == 2


def test_a_case_holds_what_the_file_says(load_text: Load) -> None:
    text = _case(
        "operation: scoring\n"
        "inputs: {query: {values: [1, 2]}, key: {values: [[1, 2], [3, 4]]}}\n"
        "options: {scale: 3}\n"
        "dtypes: [float32]\n"
        "tags: [known]\n"
        "notes: [A note.]\n"
        "expect:\n"
        "  - {stage: raw_scores, printed: '5 11', exact: true, called: s}\n"
        "  - {quantity: row_maxima, of: scores, known: '33', because: 3 times 11}\n"
        "  - {stage: scores, unprinted: true}\n"
    )
    defaults = "defaults: {options: {score: dot, scale: 7, heads: 9}, tags: [known]}\n"
    [case] = load_text(text + defaults)
    assert (case.id, case.name, case.file, case.line) == ("prefix/the-case-at-hand", NAME, "file.yaml", 5)
    assert (case.title, case.operation, case.is_document) == ("A file of cases", "scoring", False)
    assert case.options == {"score": "dot", "scale": 3}
    assert (case.dtypes, case.tags, case.notes) == (("float32",), ("known",), ("A note.",))
    assert case.input_shapes == {"query": (1, 1, 1, 2), "key": (1, 1, 2, 2)}
    assert case.stage_shapes["scores"] == (1, 1, 1, 2)
    assert [(expected.name, expected.of, expected.basis) for expected in case.expected] == [
        ("raw_scores", "raw_scores", "printed"),
        ("row_maxima", "scores", "known"),
        ("scores", "scores", "unprinted"),
    ]
    assert case.expected[0].numbers is not None
    assert case.expected[0].numbers.value.tolist() == [[[[5.0, 11.0]]]]
    assert not case.expected[0].numbers.half_unit.any()
    assert case.expected[2].numbers is None


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FUZZ_HEAD = "title: A title\nsource: {kind: derivation, title: t}\noperation: softmax\n"
FUZZ_CASE = "  - name: Case {}\n    inputs: {{scores: {}}}\n"

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="pipes are files on POSIX systems")


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], str]]:
    """Make an input of a target from a seed, and take it; what a reader raises comes through."""
    folder = tmp_path_factory.mktemp("fuzz") / "input"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        make_input: Any = importlib.import_module("fuzz_pool").make_input
        targets: Any = importlib.import_module("fuzz_targets").TARGETS

        def read(target: str, seed: int) -> str:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make_input(target, seed, 0, folder)
            outcome: str = targets[target].take(folder)
            return outcome

        yield read


@settings(max_examples=120)
@given(target=st.sampled_from(["loader", "loader", "expected_failures", "config"]), seed=st.integers(0, 2**32))
def test_any_file_is_read_or_refused(reads: Callable[[str, int], str], target: str, seed: int) -> None:
    assert reads(target, seed) in ("accepted", "refused")


def only_fault(load_text: Load, text: str) -> Diagnostic:
    with pytest.raises(CaseError) as error:
        load_text(text)
    return error.value.faults[0]


@posix_only
def test_a_pipe_or_a_device_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        with pytest.raises(YamlFault, match="no regular file"):
            read_yaml(tmp_path / name)


def test_a_text_that_aliases_repeat_counts_each_time(load_text: Load) -> None:
    notes = ", ".join([f"&a {'x' * 3999}", *["*a"] * (MAX_BYTES // 3999 + 1)])
    text = f"{FUZZ_HEAD}cases:\n{FUZZ_CASE.format(1, '{constant: 1, shape: [2]}')}    notes: [{notes}]\n"
    assert "characters (aliases expanded)" in only_fault(load_text, text).message


def test_a_long_row_of_digits_that_is_no_number_is_refused_at_once() -> None:
    # Tried in every way in which digits could be shared out, it would take hours.
    with pytest.raises(PrintedError, match="is not a number"):
        parse_printed("1" * 400_000 + "x", Rounding())


def test_more_printed_numbers_than_anybody_types_are_refused() -> None:
    assert parse_printed("1 " * MAX_NUMBERS, Rounding()).shape == (MAX_NUMBERS,)
    for text in ("1 " * (MAX_NUMBERS + 1), f"[{'1,' * MAX_NUMBERS}1]"):
        with pytest.raises(PrintedError, match=f"{MAX_NUMBERS + 1} numbers; expected at most {MAX_NUMBERS}"):
            parse_printed(text, Rounding())


def test_a_window_wider_than_any_array_is_refused(load_text: Load) -> None:
    case = (
        FUZZ_CASE.format(1, "{constant: 1, shape: [2, 2]}") + "    operation: masking\n    options: {window: [%d, 0]}\n"
    )
    assert load_text(f"{FUZZ_HEAD}cases:\n{case % 2**31}")
    fault = only_fault(load_text, f"{FUZZ_HEAD}cases:\n{case % (2**31 + 1)}")
    assert (fault.field, fault.line) == ("options.window[0]", 8)


def refuses_before_it_makes(load_text: Load, text: str) -> Diagnostic:
    tracemalloc.start()
    try:
        fault = only_fault(load_text, text)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
    return fault


@pytest.mark.parametrize(
    "scores",
    [
        f"{{sum: [{', '.join(['{constant: 1, shape: [8192, 8192]}'] * 3)}]}}",
        "{concat: [{constant: 1, shape: [1, 67108864]}], axis: 0, rows: [0], times: 2, plus: 1}",
    ],
)
def test_arrays_that_are_too_large_together_are_refused_before_they_are_made(load_text: Load, scores: str) -> None:
    arrays = "arrays: {a: {constant: 1, shape: [8192, 4096]}}\n"
    fault = refuses_before_it_makes(load_text, f"{FUZZ_HEAD}{arrays}cases:\n{FUZZ_CASE.format(1, scores)}")
    assert "numbers are made for the case; expected at most 134217728" in fault.message
    assert (fault.line, fault.case) == (7, "Case 1")


def test_cases_cannot_refer_to_one_large_array_without_end(load_text: Load) -> None:
    numbers, most = 4096, MAX_LOOKED_AT // 4096 // 2
    arrays = f"arrays: {{a: {{values: [{', '.join(['1'] * numbers)}]}}}}\n"
    cases = [FUZZ_CASE.format(number, "{ref: a}") for number in range(2 * most)]
    assert load_text(FUZZ_HEAD + arrays + "cases:\n" + "".join(cases[: most - 1]))
    fault = only_fault(load_text, FUZZ_HEAD + arrays + "cases:\n" + "".join(cases))
    assert fault.message.startswith(f"the file's cases spell out or refer to more than {MAX_LOOKED_AT} numbers")


def test_printed_numbers_count_however_they_are_set_apart(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2**13
    monkeypatch.setattr(case_maker, "MAX_LOOKED_AT", most)
    row = f"[{','.join(['1'] * 512)}]"
    cases = [FUZZ_CASE.format(number, f'{{printed: "{row}"}}') for number in range(most // 512 // 2 + 9)]
    fault = only_fault(load_text, FUZZ_HEAD + "cases:\n" + "".join(cases))
    assert fault.message.startswith(f"the file's cases spell out or refer to more than {most} numbers")


def test_arrays_that_are_made_to_be_looked_at_count_too(load_text: Load) -> None:
    inputs = "{draw: randn, shape: [4, 262144]}\n    memory_layout: {scores: broadcast}".replace("}\n", "}}\n", 1)
    case = f"  - name: Case 1\n    inputs: {{scores: {inputs}\n"
    text = f"{FUZZ_HEAD}defaults: {{random: {{generator: numpy-legacy, seed: 1}}}}\ncases:\n{case}"
    assert refuses_before_it_makes(load_text, text).field == "memory_layout"


def test_the_arrays_of_a_file_are_checked_once(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from attncheck.reading import arrays

    seen = []
    monkeypatch.setattr(arrays, "_check_parts", lambda source, named, path: seen.append(path))
    group = ", ".join(f"a{number}: {{identity: 1}}" for number in range(200))
    cases = "".join(FUZZ_CASE.format(number, "{ref: a1}") for number in range(20))
    assert len(load_text(f"{FUZZ_HEAD}arrays: {{{group}}}\ncases:\n{cases}")) == 20
    assert len([path for path in seen if path[0] == "arrays"]) == 200
    fault = only_fault(load_text, f"{FUZZ_HEAD}arrays: {{{group}, one_more: {{identity: 1}}}}\ncases:\n{cases}")
    assert "at most 200 items" in fault.message
