"""The JSON Schema beside the loader: it accepts what the loader accepts, and refuses all that a schema can tell."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import CaseError
from attncheck.reading.case import Case
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.schema import case_schema, tag_schema
from attncheck.reading.yaml_reader import read_yaml
from attncheck.reading.yaml_scalars import YamlFault

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[2] / "benchmarks"
REFERENCE = HERE.parents[2] / "docs" / "cases.md"
CORPUS = Path(str(files("attncheck.cases")))
VALIDATOR = jsonschema.Draft202012Validator(json.loads(case_schema()))

Load = Callable[[str | bytes], list[Case]]

HEAD = "title: A file of cases\nsource: {kind: derivation, title: t}\n"
QKV = "inputs: {query: {identity: 2}, key: {identity: 2}, value: {identity: 2}}"
MHA = "query_weight: {identity: 2}, key_weight: {identity: 2}, value_weight: {identity: 2}"
RANDOM = "random: {generator: numpy-legacy, seed: 1}"


def _file(case: str, operation: str = "attention", defaults: str = "") -> str:
    defaults = f"defaults: {{{defaults}}}\n" if defaults else ""
    return f"{HEAD}operation: {operation}\n{defaults}cases:\n- {{name: The case at hand, {case}}}\n"


def _qkv(query: str, more: str = "") -> str:
    return _file(f"inputs: {{query: {query}, key: {{identity: 2}}, value: {{identity: 2}}}}{more}")


def _with(entry: str) -> str:
    return _file(f"{QKV[:-1]}, {entry}}}")


def _expect(entry: str) -> str:
    return _file(f"{QKV}, expect: [{{{entry}}}]")


def _softmax(scores: str, more: str = "") -> str:
    return _file(f"inputs: {{scores: {scores}}}{more}", "softmax")


def _is_valid(text: str, folder: Path) -> bool:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return bool(VALIDATOR.is_valid(read_yaml(path).data))


def test_the_schemas_are_schemas() -> None:
    for schema in (case_schema(), tag_schema()):
        jsonschema.Draft202012Validator.check_schema(json.loads(schema))


def test_the_bundled_corpus_follows_its_schema() -> None:
    tags = jsonschema.Draft202012Validator(json.loads(tag_schema()))
    found = sorted(CORPUS.rglob("*.yaml"))
    assert len(found) > 15
    for path in found:
        validator = tags if path.name == "tags.yaml" else VALIDATOR
        errors = [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(read_yaml(path).data)]
        assert not errors, path.name


def test_the_examples_of_the_reference_follow_the_schema(tmp_path: Path) -> None:
    head = f"{HEAD}operation: attention\ndefaults: {{{RANDOM}}}\ncases:\n"
    examples = re.findall(r"^```yaml\n(.*?)^```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for text in examples:
        if not text.startswith("tags:"):
            assert _is_valid(text if text.startswith("title:") else head + text, tmp_path), text


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], tuple[bool, bool] | None]]:
    """Make a file of the fuzzing campaign; return whether the loader, and whether the schema, accepts it."""
    folder = tmp_path_factory.mktemp("schema") / "input"
    tags = load_tags(CORPUS, "tags.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        make_input: Any = importlib.import_module("fuzz_pool").make_input

        def made(seed: int) -> tuple[bool, bool] | None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make_input("loader", seed, 0, folder)
            path = folder / "case.yaml"
            try:
                data = read_yaml(path).data
            except YamlFault:
                return None
            try:
                load_case_file(path, "case.yaml", "case", tags)
            except CaseError:
                return False, VALIDATOR.is_valid(data)
            return True, VALIDATOR.is_valid(data)

        yield made


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_loader_accepts_the_schema_accepts(
    outcomes: Callable[[int], tuple[bool, bool] | None], seed: int
) -> None:
    assert outcomes(seed) != (True, False)


REFUSED = {
    "digits of exact numbers": _expect("stage: weights, printed: '1 0', exact: true, digits: truncated"),
    "digits of another kind": _expect("stage: weights, printed: '1 0', digits: cut"),
    "units without a reason": _expect("stage: weights, printed: '1 0', digits: {units: 1}"),
    "digits of a case that prints nothing": _file(f"{QKV}, digits: truncated"),
    "the precision of a case that prints nothing": _file(f"{QKV}, computed_in: float32"),
    "a precision of another name": _file(f"{QKV}, computed_in: double"),
    "an unknown field": _file(f"{QKV}, optoins: {{}}"),
    "a name with a space": _file(f"{QKV}, arrays: {{a b: {{identity: 2}}}}"),
    "a name of 61 letters": _file(f"{QKV}, arrays: {{{'a' * 61}: {{identity: 2}}}}"),
    "two kinds of array": _qkv("{identity: 2, constant: 1, shape: [2, 2]}"),
    "no kind of array": _qkv("{shape: [2, 2]}"),
    "an empty list of values": _qkv("{values: []}"),
    "a row without values": _qkv("{values: [[1, 2], []]}"),
    "text among values": _qkv("{values: [[1, '2'], [3, 4]]}"),
    "a mapping among values": _qkv("{values: [[1, {a: 2}], [3, 4]]}"),
    "nothing as values": _qkv("{values: }"),
    "values of six axes": _qkv("{values: [[[[[[1]]]]]]}"),
    "a negative length": _qkv("{constant: 1, shape: [-2, 2]}"),
    "a length of text": _qkv("{constant: 1, shape: ['2', 2]}"),
    "six lengths": _qkv("{constant: 1, shape: [1, 1, 1, 1, 2, 2]}"),
    "a sum of nothing": _qkv("{sum: []}"),
    "an infinite factor": _qkv("{identity: 2, times: .inf}"),
    "printed numbers": _qkv("{printed: [[1, 2], [3, 4]]}"),
    "an empty print": _qkv("{printed: ' '}"),
    "a print that leaves numbers out": _qkv('{printed: "[1 2 ... 3 4]"}'),
    "two ways of rounding": _qkv("{printed: '1 2', exact: true, decimals: 2}"),
    "a draw without a generator": _qkv("{draw: randn, shape: [2, 2]}"),
    "a draw that the generator does not know": _qkv(
        "{draw: randn, shape: [2, 2]}", ", random: {generator: r, seed: 1}"
    ),
    "a draw that the file's generator does not know": _file(
        QKV.replace("{identity: 2}", "{draw: randn, shape: [2, 2]}", 1),
        defaults="random: {generator: r, seed: 1}",
    ),
    "randint without high": _qkv("{draw: randint, low: 0, shape: [2, 2]}", f", {RANDOM}"),
    "randint of fractions": _qkv("{draw: randint, low: 0.5, high: 2, shape: [2, 2]}", f", {RANDOM}"),
    "rand with low": _qkv("{draw: rand, low: 0, shape: [2, 2]}", f", {RANDOM}"),
    "a missing input": _file("inputs: {query: {identity: 2}, key: {identity: 2}}"),
    "an input of another operation": _with("query_weight: {identity: 2}"),
    "an input of another operation, by the case's own": _file("operation: softmax, inputs: {query: {identity: 2}}"),
    "an input without the one that it needs": _with("past_key: {identity: 2}"),
    "an input of another score": _file(
        "inputs: {query: {identity: 2}, key: {identity: 2}, weight: {identity: 2}}", "scoring"
    ),
    "an input of another score than the file's": _file(
        "inputs: {query: {identity: 2}, key: {identity: 2}}", "scoring", "options: {score: general}"
    ),
    "a mask of twos": _with("mask: {values: [2, 1]}"),
    "a mask of halves": _with("mask: {constant: 0.5, shape: [2, 2]}"),
    "a mask that is a sum": _with("mask: {sum: [{values: [1, 0]}]}"),
    "a mask times something": _with("mask: {values: [1, 0], times: 1}"),
    "a mask drawn from normal numbers": _with("mask: {draw: randn, shape: [2, 2]}").replace(
        "name:", f"{RANDOM}, name:"
    ),
    "a mask with twos inside": _with("mask: {concat: [{values: [2, 1]}], axis: 0}"),
    "negative lengths of keys": _with("key_lengths: {values: [-1]}"),
    "lengths of keys that are drawn": _with("key_lengths: {constant: 1, shape: [1]}"),
    "an option of another operation": _softmax("{identity: 2}", ", options: {is_causal: true}"),
    "an option of another score": _file(
        "inputs: {query: {identity: 2}, key: {identity: 2}}, options: {score: cosine, softcap: 2}", "scoring"
    ),
    "an option of text": _file(f"{QKV}, options: {{scale: '0.5'}}"),
    "an infinite scale": _file(f"{QKV}, options: {{scale: .inf}}"),
    "a window without bounds": _file(f"{QKV}, options: {{window: [null, null]}}"),
    "an alignment of nothing": _file(f"{QKV}, options: {{alignment: top_left}}"),
    "heads of split inputs": _file(f"{QKV}, options: {{heads: 1}}"),
    "multi-head attention without heads": _file(QKV[:-1] + f", {MHA}}}", "multi_head_attention"),
    "a packed projection beside a part of it": _file(
        f"{QKV[:-1]}, in_proj_weight: {{identity: 2}}, key_weight: {{identity: 2}}}}, "
        "options: {heads: 1, projections: linear}",
        "multi_head_attention",
    ),
    "projections of queries and keys alone": _file(
        f"{QKV[:-1]}, query_weight: {{identity: 2}}, key_weight: {{identity: 2}}}}, options: {{heads: 1}}",
        "multi_head_attention",
    ),
    "a packed projection of attention": _with("in_proj_weight: {identity: 2}"),
    "a mask of nothing": _file("inputs: {scores: {identity: 2}}", "masking"),
    "a merged layout without heads": _file(f"{QKV}, layout: merged"),
    "a merged softmax": _softmax("{identity: 2}", ", layout: merged"),
    "memory of what is merged": _file(
        f"{QKV}, layout: merged, options: {{heads: 1}}, memory_layout: {{query: strided}}"
    ),
    "memory of a mask": _file(f"{QKV[:-1]}, mask: {{values: [1, 0]}}}}, memory_layout: {{mask: strided}}"),
    "memory of an input that is not there": _file(f"{QKV}, memory_layout: {{bias: strided}}"),
    "memory of weights that have no heads": _file(
        f"{QKV[:-1]}, {MHA}}}, options: {{heads: 1}}, memory_layout: {{query_weight: transposed}}",
        "multi_head_attention",
    ),
    "a stage of another operation": _file(f"{QKV}, stages: [context]"),
    "storage as wide as the dtypes": _file(f"{QKV}, storage: float32"),
    "storage as wide as the file's dtypes": _file(f"{QKV}, storage: float16", defaults="dtypes: [bfloat16]"),
    "numbers in bfloat16 that were computed in float16": _file(
        f"{QKV}, dtypes: [bfloat16], computed_in: float16, expect: [{{stage: output, printed: '1 0'}}]"
    ),
    "a file with a factor": _expect("stage: output, printed: {file: output.npy, times: 2}"),
    "numbers in bfloat16": _file(f"{QKV}, dtypes: [bfloat16], expect: [{{stage: output, unprinted: true}}]"),
    "numbers in the file's bfloat16": _file(
        f"{QKV}, expect: [{{stage: output, unprinted: true}}]", defaults="dtypes: [bfloat16]"
    ),
    "numbers of gradients": _file(
        f"{QKV[:-1]}, grad_output: {{identity: 2}}}}, expect: [{{stage: grad_key, unprinted: true}}]",
        "attention_gradients",
    ),
    "nothing expected": _expect("stage: output"),
    "two bases": _expect("stage: output, printed: '1', unprinted: true"),
    "a stage and a quantity": _expect("stage: output, quantity: row_maxima, of: output, unprinted: true"),
    "neither stage nor quantity": _expect("unprinted: true"),
    "a quantity of nothing": _expect("quantity: row_maxima, unprinted: true"),
    "an unknown quantity": _expect("quantity: rows, of: output, unprinted: true"),
    "known by nobody": _expect("stage: output, known: '1'"),
    "a stage of another operation expected": _expect("stage: context, unprinted: true"),
    "values of nothing": f"for_each: {{a: []}}\n{_file(QKV)}",
    "names of nothing": f"for_each: {{}}\n{_file(QKV)}",
    "a single value": f"for_each: {{a: 3}}\n{_file(QKV)}",
    "a list among values": f"for_each: {{a: [[1]]}}\n{_file(f'{QKV}, notes: {{each: a}}')}",
    "a list in a row without a name": f"for_each: [{{a: [x]}}]\n{_file(f'{QKV}, notes: {{each: a}}')}",
    "a row of a name alone": f"for_each: [{{name: x}}]\n{_file(QKV)}",
    "a name with a space for values": f"for_each: {{a b: [1]}}\n{_file(QKV)}",
    "a value beside its name": f"for_each: {{a: [1]}}\n{_file(f'{QKV}, options: {{scale: {{each: a, times: 2}}}}')}",
    "a name in the defaults": f"for_each: {{a: [1]}}\n{_file(QKV, defaults='options: {scale: {each: a}}')}",
    "a name in the file's arrays": f"arrays: {{x: {{constant: {{each: a}}, shape: [1]}}}}\n{_file(QKV)}",
    "a name of a case's name": f"for_each: {{a: [x]}}\n{_file(QKV).replace('The case at hand', '{each: a}')}",
    "an empty list of dtypes": _file(f"{QKV}, dtypes: []"),
    "an unknown dtype": _file(f"{QKV}, dtypes: [float8]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_loader_refuses_by_form_the_schema_refuses(load_text: Load, what: str, tmp_path: Path) -> None:
    with pytest.raises(CaseError):
        load_text(REFUSED[what])
    assert not _is_valid(REFUSED[what], tmp_path)


BEYOND_A_SCHEMA = [
    "undefined tag",  # another file
    "duplicate (?:name|id)|already defined|no array is named|with letters or digits",  # names
    "ragged|shape|axis|axes|rows:|no rows|columns cannot|expected .* columns|broadcast|enough|single query",  # shapes
    "elements|too long",  # sizes
    "NaN|infinity|nan$|inf$|inf and -inf",  # numbers that JSON does not have
    "beyond the range|may reach|closer to zero|expected low < high|fewer than",  # sizes of numbers
    "is not a number|every number, '.' leaves one out",  # numbers in a text
    "a mask is boolean .*, got [23t]|takes no sum, (product, )?times or plus|that of each dtype",  # by kind
]
"""What only the loader tells: docs/cases.md, section 11."""


def _refused_rows() -> list[str | bytes]:
    """Return every file that a test of the loader refuses."""
    spec = importlib.util.spec_from_file_location("tests_of_the_loader", HERE / "test_loader.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tables = (module.THE_FILE, module.THE_CASE, module.THE_INPUTS, module.COMBINED, module.DRAWS, module.PRINTED)
    return [row[0] for table in tables for row in table]


@pytest.mark.parametrize("text", [text for text in _refused_rows() if isinstance(text, str)])
def test_what_the_schema_accepts_all_the_same_needs_shapes_names_or_numbers(
    load_text: Load, text: str, tmp_path: Path
) -> None:
    with pytest.raises(CaseError) as error:
        load_text(text)
    try:
        accepted = _is_valid(text, tmp_path)
    except (YamlFault, UnicodeEncodeError):
        return
    if accepted:
        assert any(re.search(kind, error.value.faults[0].message) for kind in BEYOND_A_SCHEMA), error.value
