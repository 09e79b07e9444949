from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import CaseError, Diagnostic, ExitCode
from attncheck.reading.array_kinds import ARRAY_KINDS
from attncheck.reading.canonical import call_form, canonical_form
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import load_tags

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


def _expect(source: str) -> str:
    """A case with this expectation; it stands on line 11."""
    return _case(f"{INPUTS}expect:\n  - {source}\n")


def _heads(options: str, query_weight: str = "[6, 6]") -> str:
    vectors = "".join(f"  {name}: {{constant: 1, shape: [2, 6]}}\n" for name in ("query", "key", "value"))
    weights = f"  query_weight: {{constant: 1, shape: {query_weight}}}\n"
    weights += "".join(f"  {name}: {{constant: 1, shape: [6, 6]}}\n" for name in ("key_weight", "value_weight"))
    return _case(f"operation: multi_head_attention\ninputs:\n{vectors}{weights}{options}")


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
NAN = "NaN is not allowed here; a case that probes it says `allow_nonfinite: true`"
INFINITY = "infinity is not allowed here; a case that probes it says `allow_nonfinite: true`"
QUOTES = "expected text in quotes, got 1.5: a bare number would lose its last digits"
LOWEST = "the lowest number of a dtype takes no sum, product, times or plus"
A_KIND = f"expected a mapping with exactly one of {', '.join(ARRAY_KINDS)}, got"
A_NAME = "expected a name of letters, digits and underscores that begins with a letter, got"
Row = tuple[str | bytes, int | None, str | None, str | None, str]

THE_FILE: list[Row] = [
    ("", 1, None, None, "the file is empty; expected a title, a source, an operation and a list of cases"),
    ("# nothing\n# to see\n", 1, None, None, "the file is empty"),
    (HEAD + "cases: [\n  - a: b\n", 5, None, None, "not valid YAML: while parsing a flow node"),
    (b"title: caf\xe9\n", 1, None, None, "not UTF-8: byte 0xe9 at position 10"),
    (HEAD + "cases: !!python/object/apply:os.getcwd []\n", 4, None, None, "!!python/object/apply:os.getcwd is not"),
    (HEAD + "cases: &c\n  - *c\n", 4, None, None, "an alias refers to a node that contains it"),
    ("[" * 20_000, 1, None, None, "nested more than 100 levels deep"),
    ("- 1\n- 2\n", 1, None, None, "expected a mapping of fields, got [1, 2]"),
    ("hello\n", 1, None, None, "expected a mapping of fields, got 'hello'"),
    ("5\n", 1, None, None, "expected a mapping of fields, got 5"),
    ("null\n", 1, None, None, "expected a mapping of fields, got nothing"),
    (HEAD, 1, None, "cases", "this field is missing"),
    (HEAD + "cases: 3\n", 4, None, "cases", "expected a list, got 3"),
    (HEAD + "cases: {a: 1}\n", 4, None, "cases", "expected a list, got {'a': 1}"),
    (HEAD + "cases:\n", 4, None, "cases", "expected a list, got nothing"),
    (HEAD + "cases: []\n", 4, None, "cases", "expected at least 1 item, got []"),
    (HEAD + "cases: [3]\n", 4, "number 1", None, "expected a mapping of fields, got 3"),
    (_case(INPUTS).replace("A file of cases", "5"), 1, None, "title", "expected text in quotes, got 5"),
    (_case(INPUTS).replace("kind: derivation, ", ""), 2, None, "source.kind", "this field is missing"),
    (_case(INPUTS).replace("derivation", "book"), 2, None, "source.kind", "'document', 'paper' or 'derivation', got"),
    (_case(INPUTS).replace("attention", "attentoin"), 3, None, "operation", "expected 'scoring', 'softmax', 'masking'"),
    (_case(INPUTS) + "opertion: scoring\n", 10, None, "opertion", "unknown field; did you mean operation?"),
    (_case(INPUTS) + "title: again\n", 10, None, "title", "this field is given twice"),
    (_case(INPUTS) + '"a\\e[31mb": 1\n', 10, None, "'a\\x1b[31mb'", "unknown field"),
    (_case(INPUTS) + "5: 1\n", 10, None, None, "expected the name of a field, got 5"),
    (
        HEAD + "defaults:\n  random: {generator: numpy, seed: 1}\n" + "cases: [{name: abc, inputs: {}}]\n",
        5,
        None,
        "defaults.random.generator",
        "expected 'numpy-legacy', 'r' or 'torch', got 'numpy'",
    ),
    (_case(INPUTS) + "defaults: {tags: [nope]}\n", 10, None, "defaults.tags", "undefined tag 'nope'"),
    (_case(INPUTS) + "defaults: {options: {scale: .inf}}\n", 10, None, "defaults.options.scale", "expected a finite"),
    (
        _case(INPUTS) + "arrays:\n  a: {values: [[1], [1, 2]]}\n",
        11,
        None,
        "arrays.a.values[1]",
        "ragged: row 2 has shape 2, row 1 has shape 1",
    ),
    (_case(INPUTS) + "arrays:\n  a: {ref: b}\n  b: {identity: 2}\n", 11, None, "arrays.a", "no array is named 'b'"),
    (_case(INPUTS) + "arrays:\n  a: {identity: 2, x: 1}\n", 11, None, "arrays.a.x", "unknown field"),
]

THE_CASE: list[Row] = [
    (_case(INPUTS).replace(NAME, "5"), 5, "number 1", "name", "expected text in quotes, got 5"),
    (_case(INPUTS).replace(NAME, ""), 5, "number 1", "name", "expected text, got nothing"),
    (_case(INPUTS).replace(NAME, "[a]"), 5, "number 1", "name", "expected text, got ['a']"),
    (_case(INPUTS).replace(NAME, "a"), 5, "a", "name", "expected at least 3 characters, got 'a'"),
    (_case(INPUTS).replace(NAME, '"???"'), 5, "???", "name", "expected a name with letters or digits, got '???'"),
    (_case(INPUTS).replace(NAME, '"a\\nb c"'), 5, "number 1", "name", "one line of text without control characters"),
    (_case(INPUTS).replace(NAME, '"ab\\ud800"'), 5, "number 1", "name", "half a surrogate pair"),
    (HEAD + "cases:\n  - inputs: {}\n", 5, "number 1", "name", "this field is missing"),
    (
        _case(INPUTS) + _case(INPUTS, "  - name: the CASE, at hand!\n"),
        10,
        "the CASE, at hand!",
        "name",
        "duplicate name",
    ),
    (
        _case(INPUTS + "id: the-first") + _case(INPUTS + "id: the-first", "  - name: Another\n"),
        16,
        "Another",
        "id",
        "duplicate id: 'The case at hand' is already there",
    ),
    (
        _case(INPUTS) + _case(INPUTS + "id: the-case-at-hand", "  - name: Another\n"),
        15,
        "Another",
        "id",
        "duplicate id: 'The case at hand' is already there",
    ),
    (_case(INPUTS + "id: Not one"), 10, NAME, "id", "got 'Not one'"),
    (_case(INPUTS + "id: ''"), 10, NAME, "id", "got ''"),
    (_case(INPUTS + "inputs: 3\n"), 10, NAME, "inputs", "this field is given twice"),
    (_case("input: 3\n" + INPUTS), 6, NAME, "input", "unknown field; did you mean inputs?"),
    (_case("zzzz: 3\n" + INPUTS), 6, NAME, "zzzz", "unknown field; see `attncheck schema`"),
    (_case("tags: []"), 5, NAME, "inputs", "this field is missing"),
    (_case("inputs: []"), 6, NAME, "inputs", "expected a mapping, got []"),
    (_case("inputs: 5"), 6, NAME, "inputs", "expected a mapping, got 5"),
    (_case(INPUTS + "dtypes: [float8]"), 10, NAME, "dtypes[0]", "'float32', 'bfloat16' or 'float16', got 'float8'"),
    (_case(INPUTS + "dtypes: []"), 10, NAME, "dtypes", "expected at least 1 item, got []"),
    (_case(INPUTS + "tags: known"), 10, NAME, "tags", "expected a list, got 'known'"),
    (_case(INPUTS + "tags: [known, nope]"), 10, NAME, "tags", "undefined tag 'nope'; define it in tags.yaml"),
    (_case(INPUTS + "allow_nonfinite: 1"), 10, NAME, "allow_nonfinite", "expected true or false, got 1"),
    (_case(INPUTS + "options: {scael: 2}"), 10, NAME, "options.scael", "unknown field; did you mean scale?"),
    (
        _case("operation: softmax\ninputs: {scores: {identity: 2}}\noptions: {heads: 2}"),
        8,
        NAME,
        "options.heads",
        "does not apply to softmax, which takes empty_rows",
    ),
    (_case(INPUTS + "options: {scale: .nan}"), 10, NAME, "options.scale", "expected a finite number, got nan"),
    (_case(INPUTS + f"options: {{scale: 1{'0' * 400}}}"), 10, NAME, "options.scale", "beyond the range of"),
    (_case(INPUTS + "options: {is_causal: 'no'}"), 10, NAME, "options.is_causal", "expected true or false, got 'no'"),
    (_heads("options: {heads: 0}"), 14, NAME, "options.heads", "expected a value greater than 0, got 0"),
    (_heads("options: {heads: 4}"), 11, NAME, "inputs.query_weight", "6 columns cannot be split over 4 heads"),
    (_heads(""), 5, NAME, None, "multi_head_attention needs options.heads"),
    (
        _heads("options: {heads: 2}", "[3, 6, 2]").replace("key_weight: {constant: 1, shape: [6, 6]}", "key_weight: 1"),
        12,
        NAME,
        "inputs.key_weight",
        f"{A_KIND} 1",
    ),
    (
        _heads("options: {heads: 2}", "[6, 9]"),
        11,
        NAME,
        "inputs.query_weight",
        "9 columns cannot be split over 2 heads",
    ),
    (_heads("options: {heads: 2}", "[3, 6, 2]"), 11, NAME, "inputs.query_weight", "each of 3 heads, and there are 2"),
    (
        _heads("options: {heads: 2}", "[2, 6, 4]"),
        12,
        NAME,
        "inputs.key_weight",
        "expected 8 columns, 2 heads of width 4, got 6",
    ),
    (
        _case(
            "operation: scoring\ninputs: {query: {identity: 2}, key: {identity: 2}, weight: {identity: 2}}\n"
            "options: {score: general, scale: 2}"
        ),
        8,
        NAME,
        "options.scale",
        "the general score has no scale",
    ),
    (
        _case("arrays: {a: {constant: 1, shape: [9000, 1]}}\ninputs: {query: a, key: a, value: a}"),
        7,
        NAME,
        "inputs",
        "raw_scores would be 1x1x9000x9000; expected at most 67108864 elements",
    ),
]

THE_INPUTS: list[Row] = [
    (_case("inputs: {}"), 6, NAME, "inputs.query", "attention needs this input: query is missing"),
    (_case("inputs:\n  query: {identity: 2}\n  key: {identity: 2}"), 6, NAME, "inputs.value", "value is missing"),
    (_case(INPUTS + "  valeu: {identity: 2}"), 10, NAME, "inputs.valeu", "attention has no input 'valeu'; expected"),
    (_case(INPUTS + "  '3 x': {identity: 2}"), 10, NAME, "inputs.3 x", f"{A_NAME} '3 x'"),
    (_query("{values: [[1, 2, 3]]}"), 8, NAME, "inputs.key", "expected axis D of (B, Hkv, Lk, D) to be 3 as in query"),
    (_query("{values: [[[[[[1, 2]]]]]]}"), 7, NAME, "inputs.query", "expected at most 5 axes, got 6"),
    (_query(f"{{values: {'[' * 80}1{']' * 80}}}"), 7, NAME, "inputs.query", "expected at most 5 axes, got 80"),
    (_query("{}"), 7, NAME, "inputs.query", f"{A_KIND} {{}}"),
    (_query("{values: [1], printed: '1'}"), 7, NAME, "inputs.query", A_KIND),
    (_query("5"), 7, NAME, "inputs.query", f"{A_KIND} 5"),
    (_query(""), 7, NAME, "inputs.query", f"{A_KIND} nothing"),
    (_query("[1, 2]"), 7, NAME, "inputs.query", f"{A_KIND} [1, 2]"),
    (_query("'3 x'"), 7, NAME, "inputs.query", f"{A_NAME} '3 x'"),
    (_query("nope"), 7, NAME, "inputs.query", "no array is named 'nope'; arrays defined before it: none"),
    (_query("{ref: 5}"), 7, NAME, "inputs.query.ref", "expected text in quotes, got 5"),
    (_query("{identity: 2, transposed: true}"), 7, NAME, "inputs.query.transposed", "did you mean transpose?"),
    (_query("{identity: 2, transpose: 1}"), 7, NAME, "inputs.query.transpose", "expected true or false, got 1"),
    (_query("{values: [1, 2], transpose: true}"), 7, NAME, "inputs.query", "transpose needs two axes"),
    (_query("{values: [[1, 2]], rows: [1]}"), 7, NAME, "inputs.query", "rows: row 1 of 1 (rows count from 0)"),
    (_query("{values: [[1, 2]], rows: [-1]}"), 7, NAME, "inputs.query.rows[0]", "greater than or equal to 0, got -1"),
    (_query("{values: [[1, 2]], rows: []}"), 7, NAME, "inputs.query.rows", "expected at least 1 item, got []"),
    (_query("{values: 1, rows: [0]}"), 7, NAME, "inputs.query", "a single number has no rows to take"),
    (
        _query(f"{{constant: 1, shape: [1, 60000000], rows: [{'0, ' * 2000}0]}}"),
        7,
        NAME,
        "inputs.query",
        "2001x60000000 is 120060000000 elements; expected at most 67108864",
    ),
    (
        _query("\n    values:\n      - [1, 2]\n      - [3]"),
        10,
        NAME,
        "inputs.query.values[1]",
        "ragged: row 2 has shape 1",
    ),
    (_query("{values: [[1, 2], 3]}"), 7, NAME, "inputs.query.values[1]", "ragged: row 2 has shape scalar, row 1 has"),
    (
        _query("\n    values:\n      - [1, 2]\n      - [3, a]"),
        10,
        NAME,
        "inputs.query.values[1][1]",
        "a number or a list",
    ),
    (
        _query("{values: []}"),
        7,
        NAME,
        "inputs.query.values",
        "a number or a list of numbers, got []; an array of length 0 is a `constant` with its `shape`",
    ),
    (_query("{values: {a: 1}}"), 7, NAME, "inputs.query.values", "a list of numbers, got {'a': 1}"),
    (_query("{values: }"), 7, NAME, "inputs.query.values", "a list of numbers, got nothing"),
    (_query("\n    values:\n      - [1, 2]\n      - [3, .nan]"), 10, NAME, "inputs.query.values[1][1]", NAN),
    (_query("\n    values:\n      - [1, 2]\n      - [-.inf, 4]"), 10, NAME, "inputs.query.values[1][0]", INFINITY),
    (_query(f"{{values: [[1{'0' * 400}, 2]]}}"), 7, NAME, "inputs.query.values[0][0]", "beyond the range of"),
    (_query(f"{{values: [[{'9' * 5000}, 2]]}}"), 7, NAME, "inputs.query.values[0][0]", "beyond the range of"),
    (_query("{values: [[5.77e-340, 2]]}"), 7, NAME, "inputs.query.values[0][0]", "too small for float64"),
    (_query("{constant: .nan, shape: [2, 2]}"), 7, NAME, "inputs.query.constant", NAN),
    (_query("{constant: true, shape: [2, 2]}"), 7, NAME, "inputs.query.constant", "expected a number, got true"),
    (_query("{lowest: 2}"), 7, NAME, "inputs.query.lowest", "expected a list, got 2"),
    (_query("{lowest: [2, 2], times: 0.5}"), 7, NAME, "inputs.query", LOWEST),
    (_query("{sum: [{lowest: [2, 2]}, {constant: 1, shape: [2, 2]}]}"), 7, NAME, "inputs.query", LOWEST),
    (_query("{product: [{concat: [{lowest: [2, 2]}], axis: 0}]}"), 7, NAME, "inputs.query", LOWEST),
    (_case(INPUTS + "  mask: {lowest: [2]}"), 10, NAME, "inputs.mask", "got the lowest number of a dtype"),
    (
        _query("{lowest: [2, 2]}", "storage: bfloat16\n"),
        7,
        NAME,
        "inputs.query",
        "the lowest number is that of each dtype; that of bfloat16 is a `constant`",
    ),
    (_query("{ascending: [0, .inf], shape: [2, 2]}"), 7, NAME, "inputs.query.ascending", INFINITY),
    (_query("{ascending: [0, 1.0e308], shape: [2, 2]}"), 7, NAME, "inputs.query.ascending", INFINITY),
    (_query("{ascending: [0], shape: [2, 2]}"), 7, NAME, "inputs.query.ascending", "expected at least 2 items, got"),
    (_query("{constant: 1}"), 7, NAME, "inputs.query.shape", "this field is missing"),
    (_query("{constant: 1, shape: 4}"), 7, NAME, "inputs.query.shape", "expected a list, got 4"),
    (_query("{constant: 1, shape: [2, -1]}"), 7, NAME, "inputs.query.shape[1]", "greater than or equal to 0, got -1"),
    (_query("{constant: 1, shape: [2, 0]}"), 7, NAME, "inputs.query", "axis D of (B, H, Lq, D) is 0; only the batch"),
    (
        _query("{constant: 1, shape: [0, 70000000]}"),
        7,
        NAME,
        "inputs.query.shape",
        "too long, though empty; expected at",
    ),
    (_query("{constant: 1, shape: [a]}"), 7, NAME, "inputs.query.shape[0]", "expected a whole number, got 'a'"),
    (
        _query("{constant: 1, shape: [1, 1, 1, 1, 1, 2]}"),
        7,
        NAME,
        "inputs.query.shape",
        "expected at most 5 items, got",
    ),
    (_query("{identity: 1000000}"), 7, NAME, "inputs.query.identity", "1000000x1000000 is 1000000000000 elements"),
    (_case("arrays:\n  a: {ref: b}\n  b: {identity: 2}\n" + INPUTS), 7, NAME, "arrays.a", "no array is named 'b'"),
    (_case("arrays:\n  a: {ref: a}\n" + INPUTS), 7, NAME, "arrays.a", "no array is named 'a'"),
    (
        _case("arrays: {a: {identity: 2}}\n" + INPUTS) + "arrays: {a: {identity: 2}}\n",
        6,
        NAME,
        "arrays.a",
        "the array 'a' is already defined at the top of the file",
    ),
    (_case("arrays: {m: {values: [.nan]}}\ninputs: {query: m, key: m, value: m}"), 7, NAME, "inputs.query", NAN),
    (_case("arrays: {m: {values: [.inf]}}\ninputs: {query: m, key: m, value: m}"), 7, NAME, "inputs.query", INFINITY),
    (_case(INPUTS + "  bias: {values: [0, .nan]}"), 10, NAME, "inputs.bias.values[1]", NAN),
    (_case(INPUTS + "  mask: {values: [[1, 2], [0, 1]]}"), 10, NAME, "inputs.mask.values[0][1]", "a mask is boolean"),
    (_case(INPUTS + "  mask: {values: [0.5, 1]}"), 10, NAME, "inputs.mask.values[0]", "a mask is boolean (true = may"),
    (
        _case(INPUTS + "  mask: {values: [.nan, 1]}\nallow_nonfinite: true"),
        10,
        NAME,
        "inputs.mask.values[0]",
        "a mask is boolean (true = may attend), got nan",
    ),
    (_case(INPUTS + "  mask: m\narrays: {m: {values: [1, 2]}}"), 10, NAME, "inputs.mask", "a mask is boolean"),
    (
        _case(INPUTS + "  mask: m\narrays: {n: {constant: 2, shape: [2]}, m: {ref: n}}"),
        10,
        NAME,
        "inputs.mask",
        "a mask is boolean (true = may attend), got 2",
    ),
    (_case(INPUTS + "  mask: {ascending: [0, 1], shape: [2, 2]}"), 10, NAME, "inputs.mask.ascending", "got 3.0"),
    (_case(INPUTS + "  mask: {printed: '1 2'}"), 10, NAME, "inputs.mask.printed", "a mask is boolean"),
    (_case(INPUTS + "  mask: {values: [1, 0, 1]}"), 10, NAME, "inputs.mask", "1x1x1x3 does not broadcast to 1x1x2x2"),
    (
        _case(INPUTS + "  mask: {draw: rand, shape: [2, 2]}\nrandom: {generator: torch, seed: 1}"),
        10,
        NAME,
        "inputs.mask",
        "a mask is boolean; a drawn one is `draw: randint, low: 0, high: 2`",
    ),
]

COMBINED: list[Row] = [
    (_query("{concat: [{identity: 2}]}"), 7, NAME, "inputs.query.axis", "this field is missing"),
    (_query("{concat: [], axis: 0}"), 7, NAME, "inputs.query.concat", "expected at least 1 item, got []"),
    (
        _query("{concat: {identity: 2}, axis: 0}"),
        7,
        NAME,
        "inputs.query.concat",
        "expected a list, got {'identity': 2}",
    ),
    (_query("{concat: [{identity: 2}], axis: 4}"), 7, NAME, "inputs.query.axis", "less than or equal to 3, got 4"),
    (
        _query("{concat: [{identity: 2}], axis: 2}"),
        7,
        NAME,
        "inputs.query.concat",
        "axis 2 does not exist in arrays of 2",
    ),
    (
        _query("{concat: [{identity: 2}, {identity: 3}], axis: 0}"),
        7,
        NAME,
        "inputs.query.concat",
        "expected arrays that differ in length along axis 0 alone, got 2x2, 3x3",
    ),
    (
        _query("{concat: [{identity: 2}, {values: [1, 2]}], axis: -1}"),
        7,
        NAME,
        "inputs.query.concat",
        "expected arrays that differ in length along axis 1 alone, got 2x2, 2",
    ),
    (
        _query("{sum: [{identity: 2}, {identity: 3}]}"),
        7,
        NAME,
        "inputs.query.sum",
        "expected shapes that broadcast to each other, got 2x2, 3x3",
    ),
    (
        _query("{product: [{constant: 1, shape: [60000, 1]}, {constant: 1, shape: [1, 60000]}]}"),
        7,
        NAME,
        "inputs.query",
        "60000x60000 is 3600000000 elements; expected at most 67108864",
    ),
    (_query("{sum: [{identity: 2}, nope]}"), 7, NAME, "inputs.query.sum[1]", "no array is named 'nope'"),
    (_query("{sum: [{identity: 2}, 5]}"), 7, NAME, "inputs.query.sum[1]", f"{A_KIND} 5"),
    (_query("{sum: [{identity: 2}, '3 x']}"), 7, NAME, "inputs.query.sum[1]", f"{A_NAME} '3 x'"),
    (_query("{sum: [{identity: 2, plsu: 1}]}"), 7, NAME, "inputs.query.sum[0].plsu", "did you mean plus?"),
    (_query("{sum: [{identity: 2}], axis: 0}"), 7, NAME, "inputs.query.axis", "unknown field"),
    (
        _query("{sum: [{concat: [{ref: 5}], axis: 0}]}"),
        7,
        NAME,
        "inputs.query.sum[0].concat[0].ref",
        "expected text in quotes, got 5",
    ),
    (
        _query("\n    sum:\n      - {identity: 2}\n      - product:\n          - {values: [1, .nan]}"),
        11,
        NAME,
        "inputs.query.sum[1].product[0].values[1]",
        NAN,
    ),
    (_query("{identity: 2, times: .inf}"), 7, NAME, "inputs.query.times", "expected a finite number, got inf"),
    (_query("{identity: 2, plus: .nan}"), 7, NAME, "inputs.query.plus", "expected a finite number, got nan"),
    (_query("{geometric: [1, .inf], shape: [2, 2]}"), 7, NAME, "inputs.query.geometric", INFINITY),
    (_query("{geometric: [1, 1.0e200], shape: [2, 2]}"), 7, NAME, "inputs.query.geometric", INFINITY),
    (
        _query("{geometric: [1, 1.0e15], shape: [2, 2]}"),
        7,
        NAME,
        "inputs.query.geometric",
        "1e+45 is beyond the range of",
    ),
    (_query("{geometric: [1], shape: [2, 2]}"), 7, NAME, "inputs.query.geometric", "expected at least 2 items, got"),
    (
        _query("{values: [[1.0e30, 1]], times: -1.0e10}"),
        7,
        NAME,
        "inputs.query",
        "may reach 1e+40, beyond the range of",
    ),
    (_query("{values: [[1.0e38, 1]], plus: 3.0e38}"), 7, NAME, "inputs.query", "may reach 4e+38, beyond the range of"),
    (
        _query("{product: [{values: [[1.0e30, 1]]}, {values: [1.0e10, 1]}]}"),
        7,
        NAME,
        "inputs.query",
        "may reach 1e+40, beyond the range of float32",
    ),
    (_drawn("{draw: randn, times: 1.0e38, shape: [2, 2]}"), 7, NAME, "inputs.query", "may reach 1.3e+39, beyond the"),
    (
        _case(INPUTS + "  bias: {product: [{values: [0, -.inf]}, {values: [0, 1]}]}"),
        10,
        NAME,
        "inputs.bias.product[0].values[1]",
        INFINITY,
    ),
    (_case(INPUTS + "  bias: {values: [0, -.inf], times: 2}"), 10, NAME, "inputs.bias.values[1]", INFINITY),
    (
        _case(INPUTS + "  bias: {sum: [{values: [0, -.inf]}, {values: [0, .inf]}]}"),
        10,
        NAME,
        "inputs.bias",
        "a sum with inf and -inf may become NaN",
    ),
    (
        _case(INPUTS + "  mask: {concat: [{values: [1]}, {values: [2]}], axis: 0}"),
        10,
        NAME,
        "inputs.mask.concat[1].values[0]",
        "a mask is boolean (true = may attend), got 2",
    ),
    (_case(INPUTS + "  mask: {sum: [{identity: 2}]}"), 10, NAME, "inputs.mask", "it takes no sum, times or plus"),
    (_case(INPUTS + "  mask: {identity: 2, times: 1}"), 10, NAME, "inputs.mask", "it takes no sum, times or plus"),
    (_case(INPUTS + "  mask: {identity: 2, plus: 0}"), 10, NAME, "inputs.mask", "it takes no sum, times or plus"),
    (
        _case(INPUTS + "  mask: m\narrays: {n: {identity: 2}, m: {ref: n, times: 1}}"),
        10,
        NAME,
        "inputs.mask",
        "it takes no sum, times or plus",
    ),
    (_case(INPUTS + "supports_statistics: 1"), 10, NAME, "supports_statistics", "expected true or false, got 1"),
]

DRAWS: list[Row] = [
    (_query("{draw: rand, shape: [2, 2]}"), 7, NAME, "inputs.query", "needs a generator and a seed: give the case or"),
    (_case("random: {generator: mt, seed: 1}\n" + INPUTS), 6, NAME, "random.generator", "'numpy-legacy', 'r' or"),
    (_case("random: {generator: r}\n" + INPUTS), 6, NAME, "random.seed", "this field is missing"),
    (_case("random: {generator: r, seed: -1}\n" + INPUTS), 6, NAME, "random.seed", "greater than or equal to 0, got"),
    (_case(f"random: {{generator: r, seed: {2**32}}}\n" + INPUTS), 6, NAME, "random.seed", "less than 4294967296"),
    (_case("random: {generator: r, seed: 1.5}\n" + INPUTS), 6, NAME, "random.seed", "expected a whole number, got 1.5"),
    (_drawn("{draw: normal, shape: [2]}"), 7, NAME, "inputs.query.draw", "expected 'rand', 'randn', 'randint' or"),
    (_drawn("{draw: randn, shape: [3, 5]}", "torch"), 7, NAME, "inputs.query.draw", "torch draws fewer than 16 normal"),
    (_drawn("{draw: randn, shape: [4, 4]}", "r"), 7, NAME, "inputs.query.draw", "r has no randn; expected one of"),
    (_drawn("{draw: randint, low: 0, shape: [2]}"), 7, NAME, "inputs.query.draw", "randint of numpy-legacy needs high"),
    (_drawn("{draw: rand, low: 0, shape: [2]}"), 7, NAME, "inputs.query.draw", "rand of numpy-legacy takes no low"),
    (_drawn("{draw: runif, low: 3, high: 3, shape: [2]}"), 7, NAME, "inputs.query.draw", "expected low < high, got 3"),
    (_drawn("{draw: runif, low: 0, high: .inf, shape: [2]}"), 7, NAME, "inputs.query.high", "a finite number, got inf"),
    (_drawn("{draw: runif, low: .nan, high: 1, shape: [2]}"), 7, NAME, "inputs.query.low", "a finite number, got nan"),
    (_drawn("{draw: rand, times: .inf, shape: [2]}"), 7, NAME, "inputs.query.times", "a finite number, got inf"),
    (
        _drawn("{draw: runif, low: -1.7e308, high: 1.7e308, shape: [2]}"),
        7,
        NAME,
        "inputs.query.high",
        "high - low is beyond the range of float64",
    ),
    (_drawn("{draw: randint, low: 0.5, high: 2, shape: [2]}"), 7, NAME, "inputs.query.low", "a whole number of at"),
    (_drawn(f"{{draw: randint, low: 0, high: {10**30}, shape: [2]}}"), 7, NAME, "inputs.query.high", "at most 63 bits"),
]

PRINTED: list[Row] = [
    (_query("{printed: 1.50}"), 7, NAME, "inputs.query.printed", QUOTES),
    (_query("{printed: [1.50, 2]}"), 7, NAME, "inputs.query.printed", QUOTES),
    (_query("{printed: {a: 1}}"), 7, NAME, "inputs.query.printed", "expected text, got {'a': 1}"),
    (_query("{printed: []}"), 7, NAME, "inputs.query.printed", "no number is given"),
    (_query('{printed: ""}'), 7, NAME, "inputs.query.printed", "no number is given"),
    (_query('{printed: "1 2\\n3"}'), 7, NAME, "inputs.query.printed", "ragged rows: 1 in row 2, 2 in row 1"),
    (_query("\n    printed: |\n      1 2\n      3 x"), 8, NAME, "inputs.query.printed", "row 2, number 2: 'x' is not"),
    (_query("{printed: '1 .'}"), 7, NAME, "inputs.query.printed", "an input must give every number, '.' leaves one"),
    (_query("{printed: '1 nan'}"), 7, NAME, "inputs.query.printed", NAN),
    (_query("{printed: '1 inf'}"), 7, NAME, "inputs.query.printed", INFINITY),
    (_query("{printed: '1 1e400'}"), 7, NAME, "inputs.query.printed", "number 2: '1e400' is beyond the range of"),
    (_query("{printed: '1 1e-999999999'}"), 7, NAME, "inputs.query.printed", "'1e-999999999' is closer to zero than"),
    (_query("{printed: '1', decimals: -1}"), 7, NAME, "inputs.query.decimals", "greater than or equal to 0, got -1"),
    (_query("{printed: '1', exact: true, decimals: 2}"), 7, NAME, "inputs.query", "at most one of exact, decimals,"),
    (_expect("{stage: output, printed: 1.5}"), 11, NAME, "expect[0].printed", QUOTES),
    (_expect("{stage: output, known: [[1.5]]}"), 11, NAME, "expect[0].known", "known numbers need `because`"),
    (_expect("{stage: output, known: [[1.5]], because: it is}"), 11, NAME, "expect[0].known", QUOTES),
    (_expect("{stage: output, printed: '1 2 3'}"), 11, NAME, "expect[0].printed", "shape 1x1x2x2, got 3"),
    (_expect("{stage: output, printed: '1 2 3 4'}"), 11, NAME, "expect[0].printed", "shape 1x1x2x2, got 4"),
    (_expect('{stage: output, printed: "1 2\\n3"}'), 11, NAME, "expect[0].printed", "ragged rows: 1 in row 2"),
    (_expect("{stage: output, printed: '1', transpose: true}"), 11, NAME, "expect[0].printed", "transpose needs two"),
    (_expect("{stage: output, printed: []}"), 11, NAME, "expect[0].printed", "no number is given"),
    (_expect("{stage: output}"), 11, NAME, "expect[0]", "exactly one of printed, known, unprinted, got none"),
    (_expect("{stage: output, printed: '1', unprinted: true}"), 11, NAME, "expect[0]", "got printed, unprinted"),
    (_expect("{printed: '1'}"), 11, NAME, "expect[0]", "expected either `stage`, or `quantity` with `of`"),
    (_expect("{quantity: row_maxima, printed: '1'}"), 11, NAME, "expect[0]", "either `stage`, or `quantity` with `of`"),
    (_expect("{stage: outptu, printed: '1'}"), 11, NAME, "expect[0].stage", "got 'outptu'"),
    (_expect("{stage: context, printed: '1'}"), 11, NAME, "expect[0].stage", "no stage context here, only"),
    (_expect("{quantity: rows, of: weights, printed: '1'}"), 11, NAME, "expect[0].quantity", "no quantity 'rows';"),
    (_expect("{quantity: row_maxima, of: key, printed: '1'}"), 11, NAME, "expect[0].of", "attention has no stage key"),
    (
        _expect("{quantity: applied_values, of: weights, printed: '1'}"),
        11,
        NAME,
        "expect[0].quantity",
        "applied_values needs a single query, got 2",
    ),
    (_expect(""), 11, NAME, "expect[0]", "expected a mapping of fields, got nothing"),
]


@pytest.mark.parametrize(
    ("text", "line", "case", "field", "words"), [*THE_FILE, *THE_CASE, *THE_INPUTS, *COMBINED, *DRAWS, *PRINTED]
)
def test_a_fault_is_told_once_with_its_line_case_and_field(
    load_text: Load, text: str | bytes, line: int | None, case: str | None, field: str | None, words: str
) -> None:
    fault = _only_fault(load_text, text)
    assert words in fault.message
    assert (fault.line, fault.case, fault.field) == (line, case, field)


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


def test_a_product_within_range_is_accepted_whatever_its_parts(load_text: Load) -> None:
    [case] = load_text(_query("{product: [{values: [[1.0e+200, 1.0e+190]]}, {values: 1.0e-190}], times: 0.5}"))
    assert case.input_shapes["query"] == (1, 1, 1, 2)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("1e400", "'1e400' is beyond the range of float64"),
        ("-1e400", "'-1e400' is beyond the range of float64"),
        ("1e-400", "'1e-400' is too small for float64, which would read it as 0"),
        (str(10**309), f"'1{'0' * 36}...' is beyond the range of float64"),
        ("9" * 5000, f"'{'9' * 37}...' is beyond the range of float64"),
    ],
)
def test_a_literal_out_of_range_names_its_case_also_where_the_name_comes_behind_it(
    load_text: Load, number: str, words: str
) -> None:
    text = (
        HEAD
        + "cases:\n"
        + "".join(
            f"  - inputs: {{query: {{values: [1, {each}]}}}}\n    name: Case {name}\n"
            for name, each in (("one", number), ("two", 1), ("three", number))
        )
    )
    with pytest.raises(CaseError) as error:
        load_text(text)
    assert [(fault.line, fault.case, fault.field) for fault in error.value.faults] == [
        (5, "Case one", "inputs.query.values[1]"),
        (9, "Case three", "inputs.query.values[1]"),
    ]
    assert {fault.message for fault in error.value.faults} == {words}


def test_of_very_many_literals_out_of_range_the_first_are_told(load_text: Load) -> None:
    with pytest.raises(CaseError) as error:
        load_text(_query(f"{{values: [{', '.join(['1e400'] * 30)}]}}"))
    assert [fault.case for fault in error.value.faults] == [NAME] * 5 + [None]
    assert error.value.faults[-1].message == "and 25 more faults"


def test_a_whole_message_reads_as_file_line_case_field_and_what_was_expected(load_text: Load) -> None:
    fault = _only_fault(load_text, _query("{values: [[1, 2], [3]]}"))
    assert str(fault) == (
        'file.yaml:7: case "The case at hand": inputs.query.values[1]: ragged: row 2 has shape 1, row 1 has shape 2'
    )


def test_the_faults_of_several_cases_are_told_together(load_text: Load) -> None:
    second = _case("inputs: {query: nope}", "  - name: Another case\n")
    third = _case(INPUTS, "  - name: A good case\n")
    with pytest.raises(CaseError) as error:
        load_text(_query("{identity: 9000000}") + second + third)
    assert [(fault.line, fault.case) for fault in error.value.faults] == [(7, NAME), (11, "Another case")]


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


def test_infinity_is_a_bias_like_any_other(load_text: Load) -> None:
    [case] = load_text(_case(INPUTS + "  bias: {values: [0, -.inf]}"))
    assert np.isneginf(make_exact_inputs(case)["bias"].array[0, 0, 0, 1])


@pytest.mark.parametrize(
    "mask",
    [
        "{values: [[true, false], [1, 0]]}",
        "{constant: 1, shape: [2, 2]}",
        "{identity: 2}",
        "{ascending: [0, 1], shape: [2]}",
        "{draw: randint, low: 0, high: 2, shape: [2, 2]}",
        "m",
    ],
)
def test_a_mask_may_be_anything_of_ones_and_zeros(load_text: Load, mask: str) -> None:
    more = f"  mask: {mask}\nrandom: {{generator: numpy-legacy, seed: 1}}\narrays: {{m: {{values: [true, false]}}}}"
    [case] = load_text(_case(INPUTS + more))
    assert set(np.unique(make_exact_inputs(case)["mask"].array)) <= {0.0, 1.0}


def test_an_id_of_a_cases_own_stays_when_its_name_is_reworded(load_text: Load) -> None:
    for name in (NAME, "Another sentence"):
        (case,) = load_text(_case(INPUTS + "id: stable-2").replace(NAME, name))
        assert (case.id, case.name) == ("prefix/stable-2", name)


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


def test_expected_numbers_are_laid_out_as_the_stage_is(load_text: Load) -> None:
    text = _case(
        "inputs:\n  query: {identity: 2}\n  key: {constant: 1, shape: [3, 2]}\n  value: {constant: 1, shape: [3, 1]}\n"
        'expect:\n  - {stage: weights, transpose: true, printed: "1 2\\n3 4\\n5 6"}\n'
        "  - {stage: output, printed: '7 8'}\n"
    )
    [case] = load_text(text)
    weights, output = (expected.numbers for expected in case.expected)
    assert weights is not None
    assert weights.value.tolist() == [[[[1, 3, 5], [2, 4, 6]]]]
    assert output is not None
    assert output.value.tolist() == [[[[7], [8]]]]


def test_a_folder_without_tags_has_none(tmp_path: Path) -> None:
    assert load_tags(tmp_path, "tags.yaml") == {}


def test_tags_are_read_with_what_they_probe(tmp_path: Path) -> None:
    (tmp_path / "tags.yaml").write_text("tags:\n  far-apart: {probes: large scores, defect: exp overflows}\n")
    tags = load_tags(tmp_path, "tags.yaml")
    assert {name: (tag.probes, tag.defect) for name, tag in tags.items()} == {
        "far-apart": ("large scores", "exp overflows")
    }


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("tags:\n  far-apart: {probes: large scores}\n", 2, "tags.far-apart.defect", "this field is missing"),
        ("tags:\n  Far: {probes: a, defect: b}\n", 2, "tags.Far", "small letters, digits and hyphens"),
        ("tags: [a]\n", 1, "tags", "expected a mapping, got ['a']"),
        ("- a\n", 1, None, "expected a mapping of fields"),
    ],
)
def test_a_fault_in_the_tags_is_told_as_one_in_a_case(
    tmp_path: Path, text: str, line: int, field: str | None, words: str
) -> None:
    (tmp_path / "tags.yaml").write_text(text)
    with pytest.raises(CaseError) as error:
        load_tags(tmp_path, "folder/tags.yaml")
    [fault] = error.value.faults
    assert (fault.file, fault.line, fault.field) == ("folder/tags.yaml", line, field)
    assert words in fault.message


WHOLE: dict[str, Any] = {
    "title": "A whole file",
    "source": {"kind": "paper", "title": "A paper", "notes": ["a note"]},
    "operation": "attention",
    "defaults": {"random": {"generator": "torch", "seed": 1}, "options": {"scale": 2}, "dtypes": ["float32"]},
    "arrays": {"table": {"printed": "1 2\n3 4", "decimals": 2}},
    "cases": [
        {
            "name": "Attention itself",
            "arrays": {"drawn": {"draw": "rand", "shape": [3, 2]}},
            "inputs": {
                "query": {"ref": "table", "rows": [1, 0], "transpose": True},
                "key": "drawn",
                "value": {"values": [[1, 2.5], [3, 4], [5, 6]]},
                "mask": {"values": [[True, False, True]]},
                "bias": {"constant": 0.5, "shape": [3]},
            },
            "options": {"is_causal": True},
            "expect": [
                {"stage": "weights", "printed": ["1 2 3\n4 5 6"], "significant_digits": 1},
                {"quantity": "row_maxima", "of": "weights", "known": "1\n2", "because": "it is so"},
            ],
            "tags": ["known"],
        },
        {
            "name": "Heads",
            "operation": "multi_head_attention",
            "random": {"generator": "r", "seed": 3},
            "options": {"heads": 2},
            "inputs": {
                "query": {"identity": 4},
                "key": {"identity": 4},
                "value": {"ascending": [0, 1], "shape": [4, 4]},
                "query_weight": {"draw": "runif", "low": 0, "high": 2, "shape": [2, 4, 3]},
                "key_weight": {"constant": 1, "shape": [4, 6]},
                "value_weight": {"constant": 1, "shape": [4, 6], "rows": [0, 1, 2, 3]},
            },
        },
        {
            "name": "Behind a past",
            "options": {"heads": 2, "kv_heads": 1, "window": [1, None], "alignment": "top_left", "softcap": 2.5},
            "layout": "merged",
            "storage": "float16",
            "stages": ["output"],
            "inputs": {
                "query": {"identity": 4},
                "key": {"constant": 1, "shape": [0, 2]},
                "value": {"constant": 2, "shape": [0, 1]},
                "past_key": {"ascending": [0, 1], "shape": [3, 2]},
                "past_value": {"ascending": [0, 1], "shape": [3, 1]},
                "key_lengths": {"values": [2]},
                "query_mask": {"values": [True, False, True, True]},
            },
        },
        {
            "name": "Gradients",
            "operation": "attention_gradients",
            "dtypes": ["float64", "bfloat16"],
            "supports_statistics": False,
            "options": {"is_causal": True, "empty_rows": "zero"},
            "memory_layout": {"query": "strided", "key": "broadcast"},
            "inputs": {
                "query": {"draw": "rand", "shape": [3, 2]},
                "key": {"constant": 1, "shape": [2, 2]},
                "value": {"identity": 2},
                "grad_output": {"draw": "rand", "shape": [3, 2]},
            },
        },
    ],
}


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield from _places(value, (*path, key))


SMALL = st.sampled_from([0, 1, 2, 3, -1, 0.5, 1e308, 2**64, True, False, None, "", "1", "1 2", "nan", "1e999", "table"])
ANYTHING = SMALL | st.recursive(
    SMALL | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("az09_.- \n\u00e9", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["values", "printed", "draw", "shape", "ref", "rows", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
CHANGES = st.lists(st.tuples(st.sampled_from(list(_places(WHOLE))[1:]), st.none() | ANYTHING), min_size=1, max_size=2)


def test_the_whole_file_that_is_changed_below_is_good(load_text: Load) -> None:
    assert [case.name for case in load_text(json.dumps(WHOLE))] == [
        "Attention itself",
        "Heads",
        "Behind a past",
        "Gradients",
    ]


@settings(max_examples=400)
@given(changes=CHANGES)
def test_a_good_file_with_anything_anywhere_is_loaded_and_made_or_refused(
    load_text: Load, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    data = copy.deepcopy(WHOLE)
    for path, value in changes:
        holder: Any = data
        for part in path[:-1]:
            try:
                holder = holder[part]
            except (KeyError, IndexError, TypeError):
                break
        if isinstance(holder, dict) or (isinstance(holder, list) and path[-1] in range(len(holder))):
            holder[path[-1]] = value
    _load_and_make(load_text, json.dumps(data))


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 20), splice=st.text(max_size=4) | st.sampled_from("{[:-,&*!"))
def test_a_good_file_with_a_piece_replaced_is_loaded_and_made_or_refused(
    load_text: Load, seed: int, cut: int, splice: str
) -> None:
    text = _expect("{stage: output, printed: '1 2', note: a}") + "arrays:\n  a: {draw: rand, shape: [2]}\n"
    start = random.Random(seed).randrange(len(text))
    _load_and_make(load_text, text[:start] + splice + text[start + cut :])


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_line_or_the_files_name(load_text: Load, content: bytes) -> None:
    with pytest.raises(CaseError) as error:
        load_text(content)
    assert all(str(fault).startswith("file.yaml") and fault.message for fault in error.value.faults)


def _load_and_make(load_text: Load, text: str) -> None:
    faults: list[Diagnostic] = []
    cases: list[Case] = []
    try:
        cases = load_text(text)
    except CaseError as error:
        faults = error.faults
    assert bool(cases) != bool(faults)
    assert all(str(fault).isprintable() for fault in faults)
    assert len(set(faults)) == len(faults)
    for case in cases:
        made = make_exact_inputs(case)
        assert {name: exact.array.shape for name, exact in made.items()} == dict(case.input_shapes)
        inputs = convert_inputs(case, made, case.dtypes[-1])
        call_form(case.operation, case.options, inputs.arrays)
        posed = canonical_form(case.operation, case.options, inputs.arrays)
        assert "masked" not in case.stage_shapes or _spreads(posed.inputs, case.stage_shapes["masked"])


def _spreads(inputs: dict[str, Any], scores: tuple[int, ...]) -> bool:
    return "mask" not in inputs or np.broadcast_shapes(inputs["mask"].shape, scores) == scores


SCORES = "operation: masking\ninputs: {scores: {values: [[1, 2], [3, 4]]}}\n"
BIAS_ALONE = "  output_bias: {constant: 1, shape: [6]}\noptions: {heads: 2}\n"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (_case(SCORES), "inputs", "masking needs a mask, a bias, key_lengths, a query_mask, options.is_causal or a"),
        (_case(SCORES + "options: {is_causal: false}"), "inputs", "masking needs a mask"),
        (_heads(BIAS_ALONE), "inputs.output_bias", "needs output_weight, which is missing"),
        (
            _query("{values: [[1e300, 2], [3, 4]]}"),
            "inputs.query.values[0][0]",
            "1e+300 is beyond the range of float32",
        ),
        (_query("{constant: 1e39, shape: [2, 2]}"), "inputs.query.constant", "1e+39 is beyond the range of float32"),
    ],
)
def test_an_input_that_no_operation_could_use_is_refused(load_text: Load, text: str, field: str, words: str) -> None:
    fault = _only_fault(load_text, text)
    assert (fault.case, fault.field) == (NAME, field)
    assert words in fault.message


def test_a_number_beyond_float32_is_welcome_in_a_case_for_float64(load_text: Load) -> None:
    [case] = load_text(_query("{values: [[1e300, 2], [3, 4]]}", "dtypes: [float64]\n"))
    assert case.dtypes == ("float64",)
