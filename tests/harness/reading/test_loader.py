"""Case files: loaded whole or refused, repeated cases written out, inputs bound to axes and made as they say."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import accumulate, product, repeat
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tables import CASES, tables_beside

from attncheck.common.errors import CaseError, Diagnostic
from attncheck.reading import case_maker
from attncheck.reading.case import Case
from attncheck.reading.for_each import MAX_REPEATED_CASES, expand_cases
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.printed import MAX_NUMBERS, PrintedError, PrintedRounding, parse_printed
from attncheck.reading.shapes import ShapeFault, find_axis_lengths, format_shape, operation_input_shape
from attncheck.reading.yaml_reader import MAX_BYTES, MAX_NODES, FieldPath, YamlFault, read_yaml
from attncheck.spec import OPERATIONS, SCORE_INPUTS, InputSpec, input_specs

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
        f"this makes 1000000000 cases; expected at most {MAX_REPEATED_CASES} in a file",
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
    assert parse_printed("1 " * MAX_NUMBERS, PrintedRounding()).shape == (MAX_NUMBERS,)
    for text in ("1 " * (MAX_NUMBERS + 1), f"[{'1,' * MAX_NUMBERS}1]"):
        with pytest.raises(PrintedError, match=f"{MAX_NUMBERS + 1} numbers; expected at most {MAX_NUMBERS}"):
            parse_printed(text, PrintedRounding())
    # Tried in every way in which digits could be shared out, it would take hours.
    with pytest.raises(PrintedError, match="is not a number"):
        parse_printed("1" * 400_000 + "x", PrintedRounding())


def test_the_numbers_of_a_file_are_counted_however_they_are_written(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, numbers = 2**13, ",".join(["1"] * 512)
    monkeypatch.setattr(case_maker, "MAX_CHECKED_NUMBERS", most)
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
    document, faults = expand_cases(read_yaml(scratch_file))
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
        for part in document.find_place_in_file(path):
            source = source[part]
        if not isinstance(data, dict | list) and path[-1:] != ("name",):
            assert source == data


TABLES = tables_beside(__file__)

KINDS = [("scoring", kind) for kind in SCORE_INPUTS] + [(name, None) for name in OPERATIONS if name != "scoring"]
LETTERS = (*"BPDCAERSWN", *("Hkv", "Lq", "Lk", "Dk", "Dv", "Dr", "K", "Ek", "Ev", "Eo", "Lr", "Np", "Lp"))
MAY_BE_EMPTY = ("B", "Lq", "Lk", "P", "Lr")


def _consistent(lengths: dict[str, int], group: int) -> dict[str, int]:
    """Add the lengths that follow from others: ``group`` query heads share a head of keys."""
    lengths = lengths | {"H": group * lengths["Hkv"], "T": lengths["P"] + lengths["Lk"], "S1": lengths["S"] + 1}
    lengths["D"] += 2 * lengths["R"]  # there are as many positions and elements as are rotated, or more
    lengths |= {"Nq": lengths["D"], "Nk": lengths["D"], "Ts": lengths["W"] * lengths["Lp"]}
    lengths["Lr"] += lengths["P"] + max(lengths["Lq"], lengths["Lk"])
    merged = [(heads, width) for heads in ("H", "Hkv") for width in ("D", "Dv")]
    return lengths | {f"{heads}*{width}": lengths[heads] * lengths[width] for heads, width in merged}


lengths_of_letters = st.builds(
    _consistent,
    st.fixed_dictionaries({letter: st.integers(0 if letter in MAY_BE_EMPTY else 1, 7) for letter in LETTERS}),
    st.integers(1, 3),
)


def _heads(operation: str, lengths: dict[str, int]) -> tuple[int | None, int | None]:
    return (lengths["H"], lengths["Hkv"]) if operation == "multi_head_attention" else (None, None)


def _keys(operation: str, lengths: dict[str, int]) -> int:
    if "block_table" in OPERATIONS[operation].inputs:
        return lengths["Ts"] * (lengths["S"] if "cu_seqlens_q" in OPERATIONS[operation].inputs else 1)
    has_past = "past_key" in OPERATIONS[operation].inputs
    return lengths["T"] if has_past else lengths["Lk"]


def _full_shapes(operation: str, kind: str | None, lengths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    lengths = lengths | {"T": _keys(operation, lengths)}
    return {name: tuple(lengths[letter] for letter in spec.axes) for name, spec in input_specs(operation, kind).items()}


@given(of=st.sampled_from(KINDS), lengths=lengths_of_letters)
def test_every_axis_letter_gets_its_length(of: tuple[str, str | None], lengths: dict[str, int]) -> None:
    operation, kind = of
    specs = input_specs(operation, kind)
    bound = find_axis_lengths(specs, _full_shapes(operation, kind, lengths), *_heads(operation, lengths))
    assert {letter for spec in specs.values() for letter in spec.axes} <= set(bound)
    keys = {} if "N" in bound else {"T": _keys(operation, lengths)}
    assert bound == {letter: lengths[letter] for letter in bound} | keys


def _shared_axes(operation: str, kind: str | None) -> list[tuple[str, int]]:
    """Every axis of every input whose letter another input, one that does not broadcast, has too."""
    specs = input_specs(operation, kind)
    return [
        (name, axis)
        for name, spec in specs.items()
        for axis, letter in enumerate(spec.axes)
        if any(letter in other.axes for key, other in specs.items() if key != name and not other.is_broadcastable)
    ]


@given(
    of=st.sampled_from([(*kind, *axis) for kind in KINDS for axis in _shared_axes(*kind)]), lengths=lengths_of_letters
)
def test_an_axis_that_disagrees_is_blamed(of: tuple[str, str | None, str, int], lengths: dict[str, int]) -> None:
    operation, kind, name, axis = of
    specs = input_specs(operation, kind)
    shapes = _full_shapes(operation, kind, lengths)
    more = 2 if specs[name].is_broadcastable and shapes[name][axis] == 0 else 1  # of none, 1 would be broadcast
    shapes[name] = (*shapes[name][:axis], shapes[name][axis] + more, *shapes[name][axis + 1 :])
    with pytest.raises(ShapeFault) as fault:
        find_axis_lengths(specs, shapes, *_heads(operation, lengths))
    [field] = fault.value.field
    assert specs[name].axes[axis] in specs[field].axes
    assert format_shape(shapes[field]) in str(fault.value)


@given(lengths=lengths_of_letters, ones=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_mask_may_have_length_one_on_any_axis(lengths: dict[str, int], ones: list[bool]) -> None:
    shapes = _full_shapes("attention", None, lengths)
    shapes["mask"] = tuple(1 if one else length for one, length in zip(ones, shapes["mask"], strict=True))
    bound = find_axis_lengths(OPERATIONS["attention"].inputs, shapes, None)
    scores = tuple(lengths[letter] for letter in ("B", "H", "Lq", "T"))
    assert np.broadcast_shapes(shapes["mask"], tuple(bound[letter] for letter in ("B", "H", "Lq", "T"))) == scores


def test_inputs_are_fitted_to_axes() -> None:
    for axes, shape, heads, fitted in TABLES["fitted"]:
        assert operation_input_shape(InputSpec(tuple(axes)), tuple(shape), heads) == tuple(fitted), axes
    with pytest.raises(ValueError, match="4x16x2 is a matrix for each of 4 heads, and there are 3"):
        operation_input_shape(InputSpec(("E", "H*D")), (4, 16, 2), 3)


def _made(load_text: Load, *lines: str) -> NDArray[Any]:
    [case] = load_text(CASES["head of softmax"] + "\n    ".join(["  - name: The case at hand", *lines]))
    return make_exact_inputs(case)["scores"].array


def test_parts_are_drawn_in_the_order_in_which_they_are_listed(load_text: Load) -> None:
    made = _made(
        load_text,
        "random: {generator: numpy-legacy, seed: 5}",
        "arrays: {first: {draw: randn, shape: [1, 3]}}",
        "inputs:",
        "  scores:",
        "    concat: [{draw: rand, shape: [2, 3]}, {ref: first, times: -1}, {sum: [{draw: randn, shape: [3]}, first]}]",
        "    axis: 0",
    )
    state = np.random.RandomState(5)
    first, second, third = state.randn(1, 3), state.rand(2, 3), state.randn(3)
    np.testing.assert_array_equal(made[0, 0], np.concatenate([second, -first, third + first]))


def test_numbers_are_made_one_step_after_another_in_their_own_dtype(load_text: Load) -> None:
    series = _made(load_text, "inputs: {scores: {geometric: [0.1, 1.1], shape: [40]}}")[0, 0, 0]
    assert series.tolist() == list(accumulate(repeat(1.1, 39), mul, initial=0.1))
    random = "random: {generator: torch, seed: 3}"
    plain = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64]}}")
    scaled = _made(load_text, random, "inputs: {scores: {draw: rand, shape: [64], times: 0.1}}")
    assert plain.dtype == scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, plain * np.float32(0.1))
    whole = _made(
        load_text,
        "random: {generator: r, seed: 0}",
        "inputs: {scores: {draw: runif, low: 0, high: 3, shape: [3, 3], floor: true, times: 10}}",
    )
    # set.seed(0); runif(9, 0, 3) begins 2.69 0.80 1.12 1.72 2.72
    assert whole.swapaxes(-1, -2).ravel()[:5].tolist() == [20, 0, 10, 10, 20]


@pytest.mark.parametrize("generator", ["numpy-legacy", "r", "torch"])
def test_an_empty_draw_draws_nothing(load_text: Load, generator: str) -> None:
    kind = "runif, low: 0, high: 1" if generator == "r" else "randn"
    before = f"arrays: {{before: {{draw: {kind}, shape: [0, 6]}}}}"
    random, draw = f"random: {{generator: {generator}, seed: 5}}", f"{{draw: {kind}, shape: [4, 6]}}"
    alone = _made(load_text, random, f"inputs: {{scores: {draw}}}")
    behind = _made(load_text, random, before, f"inputs: {{scores: {{concat: [before, {draw}], axis: 0}}}}")
    np.testing.assert_array_equal(alone, behind)
