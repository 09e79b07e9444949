"""Files that are refused: messages.yaml has each of them, and all that is said of it; the schema beside the loader."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from attncheck.errors import CaseError, ExitCode
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.loader import load_case_file, load_tags
from attncheck.reading.schema import case_schema, tag_schema
from attncheck.reading.yaml_reader import YamlFault, read_yaml

Load = Callable[[str | bytes], list[Case]]

GROUPS: list[dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("messages.yaml"))
SCHEMA = jsonschema_rs.Draft202012Validator(json.loads(case_schema()))
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


def files_of(group: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield every file of a group, and its messages."""
    base = group.get("file", "<>")
    for text, said in (group.get("put") or group["change"]).items():
        file = base
        for change in text.split(" && ") if "change" in group else [f"<> => {text}"]:
            before, _, after = change.partition(" => ")
            assert file.count(before) == 1, change
            file = file.replace(before, after)
        written = re.sub(r"(.)\{(\d+)\}", lambda found: found[1] * int(found[2]), file)
        yield written, [said] if isinstance(said, str) else said


def faults_of(read: Callable[[], object]) -> list[str]:
    """Return what is said of a file, without its name, and with the usual case as "case"."""
    with pytest.raises(CaseError) as error:
        read()
    assert error.value.exit_code == ExitCode.BAD_INPUT
    assert str(error.value) == "\n".join(map(str, error.value.faults))
    assert all(str(fault).isprintable() for fault in error.value.faults)
    without_file = [str(fault).removeprefix(f"{fault.file}:").strip() for fault in error.value.faults]
    return [re.sub('case "The case(?: at hand)?": ', "case: ", said) for said in without_file]


def is_said(said: list[str], expected: list[str]) -> bool:
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
    for text, expected in files_of(group):
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
        accepted = SCHEMA.is_valid(without_infinity(read_yaml(path).data))
    except YamlFault:
        return not always
    return not accepted or (not always and any(re.search(kind, said) for kind in BEYOND_A_SCHEMA))


def without_infinity(data: Any) -> Any:
    """Return data with numbers beyond any dtype for those that JSON does not have."""
    if isinstance(data, dict):
        return {name: without_infinity(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [without_infinity(each) for each in data]
    return data if not isinstance(data, float) or isfinite(data) else 10**400 if data > 0 else -(10**400)


HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[2] / "benchmarks"
REFERENCE = HERE.parents[2] / "docs" / "cases.md"
CORPUS = Path(str(files("attncheck.cases")))


HEAD = "title: A file of cases\nsource: {kind: derivation, title: t}\n"
RANDOM = "random: {generator: numpy-legacy, seed: 1}"


def _is_valid(text: str, folder: Path) -> bool:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return SCHEMA.is_valid(without_infinity(read_yaml(path).data))


def test_the_schemas_are_schemas() -> None:
    for schema in (case_schema(), tag_schema()):
        jsonschema_rs.meta.validate(json.loads(schema))


def test_the_bundled_corpus_follows_its_schema() -> None:
    tags = jsonschema_rs.Draft202012Validator(json.loads(tag_schema()))
    found = sorted(CORPUS.rglob("*.yaml"))
    assert len(found) > 15
    for path in found:
        validator, data = tags if path.name == "tags.yaml" else SCHEMA, without_infinity(read_yaml(path).data)
        errors = [f"{error.instance_path}: {error.message[:200]}" for error in validator.iter_errors(data)]
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
                data = without_infinity(read_yaml(path).data)
            except YamlFault:
                return None
            try:
                load_case_file(path, "case.yaml", "case", tags)
            except CaseError:
                return False, SCHEMA.is_valid(data)
            return True, SCHEMA.is_valid(data)

        yield made


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_the_schema_accepts_what_is_loaded(outcomes: Callable[[int], tuple[bool, bool] | None], seed: int) -> None:
    assert outcomes(seed) != (True, False)
