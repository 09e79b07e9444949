"""Documents of YAML: read as plain data with the line of every field, or refused; the schema beside the loader."""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from tables import tables_beside

from attncheck.common.errors import CaseError, ExitCode
from attncheck.reading import yaml_reader
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.schema import case_file_schema, tag_file_schema
from attncheck.reading.yaml_reader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    FieldPath,
    YamlDocument,
    YamlFault,
    compose_with_libyaml,
    read_yaml,
)
from attncheck.spec import DTYPES
from attncheck.spec.dtypes import numpy_dtype

TABLES = tables_beside(__file__)

Load = Callable[[str | bytes], list[Case]]

Group = dict[str, Any]
GROUPS = yaml.load(Path(__file__).with_name("messages.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
MEANINGS = YAML(typ="safe").load(Path(__file__).with_name("meanings.yaml"))


@cache
def case_file_validator() -> jsonschema_rs.Draft202012Validator:
    """Return the schema of case files."""
    return jsonschema_rs.Draft202012Validator(json.loads(case_file_schema()))


def files_of(group: Group) -> Iterator[tuple[str, Any]]:
    """Yield every file of a group, and what is expected of it."""
    base = group.get("file", "<>")
    for text, expected in (group.get("put") or group["change"]).items():
        file = base
        for change in text.split(" && ") if "change" in group else [f"<> => {text}"]:
            before, _, after = change.partition(" => ")
            assert file.count(before) == 1, change
            file = file.replace(before, after)
        yield re.sub(r"(.)\{(\d+)\}", lambda found: found[1] * int(found[2]), file), expected


def held(cases: list[Case], path: str) -> Any:
    """Look up what cases hold below the dots of a path, as plain data or an array."""
    first, *rest = path.split(".")
    if first == "each":
        return [held([case], ".".join(rest)) for case in cases]
    [case] = cases
    made = make_exact_inputs(case) if first not in vars(case) else {}
    if first in ("exact", "radius"):
        return made[rest[0]].array if first == "exact" else made[rest[0]].radius
    dtype, _, radius = first.partition("_")
    if dtype in DTYPES:
        inputs = convert_inputs(case, made, dtype)
        array = inputs.arrays[rest[0]]
        assert array.dtype in (bool, np.int64) or array.dtype == numpy_dtype(dtype)
        assert array.flags.c_contiguous
        return inputs.radius[rest[0]] if radius else array.astype(np.float64)
    found: Any = case
    for part in path.split("."):
        is_mapping, place = isinstance(found, Mapping), int(part) if part.isdigit() else part
        found = found.get(part) if is_mapping else found[place] if part.isdigit() else getattr(found, part)
    return found


def agrees(found: Any, expected: Any, path: str) -> bool:
    if isinstance(found, np.ndarray):
        wanted = np.array(expected, np.float64)
        wanted = wanted.reshape((1,) * (found.ndim - wanted.ndim) + wanted.shape)
        is_radius = "radius" in path or "half_unit" in path
        return found.shape == wanted.shape and np.allclose(
            found, wanted, rtol=1e-14 if is_radius else 0, atol=0, equal_nan=True
        )
    if path == "warnings":
        return is_said(found, expected)
    return bool(json.dumps(found, default=dict) == json.dumps(expected))


@pytest.mark.parametrize("group", MEANINGS, ids=[str(place) for place in range(len(MEANINGS))])
def test_a_file_means_what_is_expected_of_it(load_text: Load, group: Group) -> None:
    offenders = []
    for text, expected in files_of(group):
        cases = load_text(text)
        for path, value in expected.items():
            found = held(cases, path)
            if not agrees(found, value, path):
                offenders.append((text, path, found, value))
    assert offenders == []


def faults_of(read: Callable[[], object]) -> list[str]:
    """Return what is said of a file, without its name, and with the usual case as "case"."""
    with pytest.raises(CaseError) as error:
        read()
    assert error.value.exit_code == ExitCode.BAD_INPUT
    assert str(error.value) == "\n".join(map(str, error.value.faults))
    assert all(str(fault).isprintable() for fault in error.value.faults)
    without_file = [str(fault).removeprefix(f"{fault.file}:").strip() for fault in error.value.faults]
    return [re.sub('case "The case(?: at hand)?": ', "case: ", said) for said in without_file]


def is_said(said: Sequence[str], expected: list[str]) -> bool:
    patterns = [".*".join(map(re.escape, text.split("..."))) for text in expected]
    return len(said) == len(patterns) and all(map(re.fullmatch, patterns, said))


@pytest.mark.parametrize("group", GROUPS, ids=[str(place) for place in range(len(GROUPS))])
def test_a_fault_is_told_once_with_its_place(load_text: Load, tmp_path: Path, group: dict[str, Any]) -> None:
    path = tmp_path / ("tags.yaml" if group.get("reads") == "tags" else "file.yaml")
    readers: dict[str, Callable[[str], object]] = {
        "cases": load_text,
        "tags": lambda _: load_tags(tmp_path, path.name),
        "expected_failures": lambda _: load_expected_failures([path]),
    }
    offenders: list[Any] = []
    if "change" in group:  # one of a good file, or else another fault might hide its own
        path.write_text(group["file"], encoding="utf-8")
        readers[group.get("reads", "cases")](group["file"])
    for text, said_once in files_of(group):
        expected = [said_once] if isinstance(said_once, str) else said_once
        path.write_text(text, encoding="utf-8")
        reader = readers[group.get("reads", "cases")]
        said = faults_of(lambda reader=reader, text=text: reader(text))  # type: ignore[misc]
        if not is_said(said, expected):
            offenders.append((text, said, expected))
        elif "schema" in group and not follows_schema(path, said[0], always=group["schema"] == "refuses"):
            offenders.append((text, said, ["the schema"]))
    assert offenders == []


def follows_schema(path: Path, said: str, *, always: bool) -> bool:
    """Whether the schema refuses a file, always or where a schema can say what is said."""
    try:
        accepted = case_file_validator().is_valid(without_infinity(read_yaml(path).data))
    except YamlFault:
        return not always
    return not accepted or (not always and any(re.search(kind, said) for kind in TABLES["beyond_a_schema"]))


def without_infinity(data: Any) -> Any:
    """Return data with numbers beyond any dtype for those that JSON does not have."""
    if isinstance(data, dict):
        return {name: without_infinity(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [without_infinity(each) for each in data]
    return data if not isinstance(data, float) or isfinite(data) else 10**400 if data > 0 else -(10**400)


ROOT = Path(__file__).resolve().parents[3]
CORPUS = Path(str(files("attncheck.cases")))


def test_the_schemas_are_schemas_which_the_corpus_and_the_examples_of_the_reference_follow() -> None:
    for schema in (case_file_schema(), tag_file_schema()):
        jsonschema_rs.meta.validate(json.loads(schema))
    tags = jsonschema_rs.Draft202012Validator(json.loads(tag_file_schema()))
    paths = sorted([*CORPUS.rglob("*.yaml"), *(ROOT / "examples" / "case_files").glob("*.yaml")])
    for path in paths:
        validator = tags if path.name == "tags.yaml" else case_file_validator()
        errors = validator.iter_errors(without_infinity(read_yaml(path).data))
        assert [f"{error.instance_path}: {error.message[:200]}" for error in errors] == [], path.name


@given(seed=st.integers(0, 2**32))
def test_the_schema_accepts_what_is_loaded(fuzzing: Any, seed: int) -> None:
    path = fuzzing[0]("loader", seed) / "case.yaml"
    with suppress(YamlFault, CaseError):
        data = without_infinity(read_yaml(path).data)
        load_case_file(path, "case.yaml", "case", load_tags(CORPUS, "tags.yaml"))
        assert case_file_validator().is_valid(data)


Reader = Callable[[str | bytes], YamlDocument]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    path = tmp_path_factory.mktemp("yaml") / "file.yaml"

    def read_text(text: str | bytes) -> YamlDocument:
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return read_yaml(path)

    return read_text


def _fields(data: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    yield path
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield from _fields(value, (*path, key))


def test_every_field_has_the_line_on_which_it_stands(read: Reader) -> None:
    document = read("# a comment\na: 1\nb:\n  - x\n  - c: |\n      two\n      lines\n    d: {e: [5,\n      6]}\n")
    assert document.data == {"a": 1, "b": ["x", {"c": "two\nlines\n", "d": {"e": [5, 6]}}]}
    assert document.lines == {tuple(path): line for path, line in TABLES["lines"]}
    located = read("a:\n  b: 1\n")
    for path, found, line in TABLES["located"]:
        assert located.locate(tuple(path)) == (tuple(found), line)


def test_scalars_are_read_by_the_rules_of_yaml_1_2(read: Reader) -> None:
    for text, value in TABLES["scalars"]:
        data = read(f"a: {text}\n").data
        assert (data, type(data["a"])) == ({"a": value}, type(value))
    for content in (b"\xef\xbb\xbfa: 1\n", b"a: 1\r\n", b"a: 1", b"%YAML 1.2\n---\na: 1\n...\n"):
        assert read(content).data == {"a": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an anchor that is used again is no reason to warn
        assert read("a: &x [1]\nb: *x\nc: &x 2\nd: *x\n").data == {"a": [1], "b": [1], "c": 2, "d": 2}


def test_too_many_values_are_refused_with_their_line_and_beside_single_faults_the_rest_is_read(
    read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_reader, "MAX_NODES", 300)
    with pytest.raises(YamlFault, match="more than 300 values") as fault:
        read("a: 1\nb: [" + "1," * 300 + "]\n")
    assert fault.value.line == 2
    assert len(read("a: 1\nb: [" + "1," * 290 + "]\n").data["b"]) == 290
    with pytest.raises(YamlFault) as fault:
        read("a: 1e400\nb: [1, 1e400, 3]\nb: 4\n5: 6\nc: 7\n")
    found = (fault.value, *fault.value.others)
    assert [(each.line, each.path) for each in found] == [(1, ("a",)), (2, ("b", 1)), (3, ("b",)), (4, ())]
    assert fault.value.data == {"a": None, "b": [1, None, 3], "c": 7}


def test_what_cannot_be_read_is_said_and_a_tag_runs_nothing(read: Reader, tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    with pytest.raises(YamlFault):
        read(f"a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]\n")
    assert not marker.exists()
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(YamlFault, match="cannot be read"):
            read_yaml(path)
    for content, message in (
        (b"title: caf\xe9\n", "not UTF-8: byte 0xe9 at position 10"),
        (b"#" * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes; a case file has {MAX_BYTES} at most"),
    ):
        with pytest.raises(YamlFault, match=message):
            read(content)


ALIASES = "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30))
DEEP_ALIASES = "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 430))


def test_a_file_that_would_explode_is_refused_in_little_memory(read: Reader) -> None:
    for text, words in (
        (f"a0: &a0 [x, x, x, x, x, x, x, x, x]\n{ALIASES}", "values (aliases expanded)"),  # 9^30
        (f"a0: &a0 [x]\n{DEEP_ALIASES}", "levels deep"),
        ("[" * 100_000, "levels deep"),  # left to the parser alone, this took three minutes
        ("{a: " * 100_000, "levels deep"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(YamlFault) as fault:
                read(text)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert words in str(fault.value)
        assert peak < 20 * 2**20


MARKS = ("b: ", "- ", "? ", ": ", "\n", "  ", "\t", *"[]{}", ", ", "|\n", ">-\n", '"', "'", "#", "---\n", "...\n")
ITEMS = (*"a1~", "&x ", "*x", "!t ", "!!int ", "%YAML 1.1\n", "<<: ", "0x", "1e999", ".nan", "\\ud800", "\x00", "\x85")
YAML_PIECES = st.sampled_from([*MARKS, *ITEMS])


@given(text=st.lists(YAML_PIECES, max_size=25).map("".join) | st.text(max_size=30) | st.binary(max_size=30))
def test_any_text_is_read_as_plain_data_or_refused(read: Reader, text: str | bytes) -> None:
    try:
        document = read(text)
    except YamlFault as fault:
        assert str(fault)  # noqa: PT017 - not every text is at fault
        return
    assert set(document.lines) == set(_fields(document.data))
    assert all(isinstance(part, str | int) for path in document.lines for part in path)


BUNDLED = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "cases").rglob("*.yaml"))]
LINES = [line for text in BUNDLED for line in text.splitlines()]


def _by_both(read: Reader, text: str) -> tuple[YamlDocument, YamlDocument] | None:
    """Read a text by each reader; None where the fast one leaves it to the other."""
    if compose_with_libyaml(text, MAX_NODES, MAX_DEPTH) is None:
        return None
    fast, composing = read(text), yaml_reader.compose_with_libyaml
    try:
        yaml_reader.compose_with_libyaml = lambda *_: None
        return fast, read(text)
    finally:
        yaml_reader.compose_with_libyaml = composing


@given(
    lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=8),
    pieces=st.lists(st.tuples(st.integers(0, 400), YAML_PIECES), max_size=4),
)
def test_both_readers_read_alike(read: Reader, lines: list[str], pieces: list[tuple[int, str]]) -> None:
    text = "\n".join(lines)
    for position, piece in pieces:
        text = text[:position] + piece + text[position:]
    try:
        pair = _by_both(read, text)
    except YamlFault:
        return  # both say so alike: a field is built by one builder
    assert pair is None or pair[0] == pair[1]
