"""Hostile case files, lists of expected failures and configurations: accepted or refused with a message, in bounds.

The files are those of ``benchmarks/fuzz.py``, which makes two hundred thousand of them; below are those that it found.
"""

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

from attncheck.errors import CaseError, Diagnostic
from attncheck.reading.case import Case
from attncheck.reading.case_maker import MAX_LOOKED_AT
from attncheck.reading.printed import MAX_NUMBERS, Rounding, parse_printed
from attncheck.reading.printed_text import PrintedError
from attncheck.reading.selection import exists
from attncheck.reading.yaml_reader import MAX_BYTES, read_yaml
from attncheck.reading.yaml_scalars import YamlFault

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HEAD = "title: A title\nsource: {kind: derivation, title: t}\noperation: softmax\n"
CASE = "  - name: Case {}\n    inputs: {{scores: {}}}\n"

Load = Callable[[str | bytes], list[Case]]
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


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_any_case_file_is_loaded_and_made_or_refused_with_its_name(reads: Callable[[str, int], str], seed: int) -> None:
    assert reads("loader", seed) in ("accepted", "refused")


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_list_of_expected_failures_is_read_or_refused(reads: Callable[[str, int], str], seed: int) -> None:
    assert reads("expected_failures", seed) in ("accepted", "refused")


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_configuration_is_read_or_refused(reads: Callable[[str, int], str], seed: int) -> None:
    assert reads("config", seed) in ("accepted", "refused")


def only_fault(load_text: Load, text: str) -> Diagnostic:
    with pytest.raises(CaseError) as error:
        load_text(text)
    return error.value.faults[0]


def test_a_character_that_no_machine_counts_to_is_refused(load_text: Load) -> None:
    assert "not valid YAML" in only_fault(load_text, 'title: "\\UFFFFFFFF"\n').message


@posix_only
def test_a_pipe_or_a_device_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        with pytest.raises(YamlFault, match="no regular file"):
            read_yaml(tmp_path / name)


def test_a_text_that_aliases_repeat_counts_each_time(load_text: Load) -> None:
    notes = ", ".join([f"&a {'x' * 3999}", *["*a"] * (MAX_BYTES // 3999 + 1)])
    text = f"{HEAD}cases:\n{CASE.format(1, '{constant: 1, shape: [2]}')}    notes: [{notes}]\n"
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
    case = CASE.format(1, "{constant: 1, shape: [2, 2]}") + "    operation: masking\n    options: {window: [%d, 0]}\n"
    assert load_text(f"{HEAD}cases:\n{case % 2**31}")
    fault = only_fault(load_text, f"{HEAD}cases:\n{case % (2**31 + 1)}")
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
    fault = refuses_before_it_makes(load_text, f"{HEAD}{arrays}cases:\n{CASE.format(1, scores)}")
    assert "numbers are made for the case; expected at most 134217728" in fault.message
    assert (fault.line, fault.case) == (7, "Case 1")


def test_a_long_context_is_not_too_large(load_text: Load) -> None:
    arrays = ", ".join(f"{name}: {{draw: randn, shape: [1, 1, 32768, 64]}}" for name in ("key", "value"))
    query = "query: {draw: randn, shape: [1, 1, 1024, 64]}"
    case = f"  - {{name: Long, operation: attention, inputs: {{{query}, {arrays}}}}}\n"
    [loaded] = load_text(f"{HEAD}defaults: {{random: {{generator: numpy-legacy, seed: 1}}}}\ncases:\n{case}")
    assert loaded.input_shapes["key"] == (1, 1, 32768, 64)


def test_cases_cannot_refer_to_one_large_array_without_end(load_text: Load) -> None:
    numbers, most = 4096, MAX_LOOKED_AT // 4096 // 2
    arrays = f"arrays: {{a: {{values: [{', '.join(['1'] * numbers)}]}}}}\n"
    cases = [CASE.format(number, "{ref: a}") for number in range(2 * most)]
    assert load_text(HEAD + arrays + "cases:\n" + "".join(cases[: most - 1]))
    fault = only_fault(load_text, HEAD + arrays + "cases:\n" + "".join(cases))
    assert fault.message.startswith(f"the file's cases spell out or refer to more than {MAX_LOOKED_AT} numbers")


def test_printed_numbers_count_however_they_are_set_apart(load_text: Load) -> None:
    row = f"[{','.join(['1'] * 8192)}]"
    cases = [CASE.format(number, f'{{printed: "{row}"}}') for number in range(MAX_LOOKED_AT // 8192 // 2 + 9)]
    fault = only_fault(load_text, HEAD + "cases:\n" + "".join(cases))
    assert fault.message.startswith(f"the file's cases spell out or refer to more than {MAX_LOOKED_AT} numbers")


def test_arrays_that_are_made_to_be_looked_at_count_too(load_text: Load) -> None:
    inputs = "{draw: randn, shape: [4, 262144]}\n    memory_layout: {scores: broadcast}".replace("}\n", "}}\n", 1)
    case = f"  - name: Case 1\n    inputs: {{scores: {inputs}\n"
    text = f"{HEAD}defaults: {{random: {{generator: numpy-legacy, seed: 1}}}}\ncases:\n{case}"
    assert refuses_before_it_makes(load_text, text).field == "memory_layout"


def test_the_arrays_of_a_file_are_checked_once_and_not_with_every_case(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attncheck.reading import arrays

    seen = []
    monkeypatch.setattr(arrays, "_check_parts", lambda source, named, path: seen.append(path))
    group = ", ".join(f"a{number}: {{identity: 1}}" for number in range(200))
    cases = "".join(CASE.format(number, "{ref: a1}") for number in range(20))
    assert len(load_text(f"{HEAD}arrays: {{{group}}}\ncases:\n{cases}")) == 20
    assert len([path for path in seen if path[0] == "arrays"]) == 200
    fault = only_fault(load_text, f"{HEAD}arrays: {{{group}, one_more: {{identity: 1}}}}\ncases:\n{cases}")
    assert "at most 200 items" in fault.message


def test_what_no_file_can_be_called_does_not_exist(tmp_path: Path) -> None:
    assert exists(tmp_path)
    assert not exists(tmp_path / ("x" * 5000))
    assert not exists(tmp_path / "a\0b")
