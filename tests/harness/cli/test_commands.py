"""Commands: what ``properties`` asks, the JSON of every command, and what a shell offers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from kernels import kernel
from tables import tables_beside

from attncheck.cli import completion
from attncheck.errors import ExitCode
from attncheck.execution.implementations import every_implementation
from attncheck.reading.selection import select_cases
from attncheck.reports.machine.other_documents import DOCUMENTS, results_schema
from attncheck.spec import DTYPES

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

Invoke = Callable[..., tuple[int, str, str]]
HEAD = """
title: Calls
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 5}, dtypes: [float32]}
arrays: {words: {draw: randn, shape: [3, 2, 7, 4]}}
cases:
"""
ASKED = """
  - name: A batch
    inputs: {query: words, key: words, value: words}
    properties: [repeated, batch_invariant]
"""
USUAL = """
  - name: A usual case
    inputs: {query: words, key: words, value: words}
"""
KERNEL = kernel("output * query.dtype.type(FACTOR)")
ENTRY = """
- implementation: "kernel.*"
  cases: ["calls/*"]
  property: batch_invariant
  verdict: broken
  decided: numeric
  reason: the last entry of a batch of three is known to be wrong
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "calls.yaml").write_text(HEAD + USUAL + ASKED, encoding="utf-8")
    (tmp_path / "kernel.py").write_text(KERNEL.replace("FACTOR", "1"), encoding="utf-8")
    faulty = KERNEL.replace("FACTOR", "1 + (len(query) == 3) / 8")
    (tmp_path / "faulty.py").write_text(faulty, encoding="utf-8")


def test_a_kernel_that_holds_ends_with_0_and_unfit_questions_are_refused(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("properties", "kernel.py:attention", "--cases")
    code, out, _ = invoke(*asked, "calls.yaml")
    assert code == ExitCode.AGREE
    assert "Properties hold: 2 properties, 3 comparisons." in out
    (tmp_path / "unfit.yaml").write_text((HEAD + ASKED).replace("batch_invariant", "decoding"), encoding="utf-8")
    for words, message in (
        (("calls.yaml", "--property", "splendour"), "unknown property 'splendour'"),
        (("calls.yaml", "--dtype", "float7"), "unknown dtype 'float7'"),
        (("calls.yaml", "--property", "decoding"), "no case asks for these properties"),
        (("unfit.yaml",), 'unfit.yaml:9: case "A batch": properties: decoding: the case has no is_causal'),
    ):
        code, _, error = invoke(*asked, *words)
        assert code == ExitCode.BAD_INPUT
        assert message in error


def test_a_broken_one_ends_with_1_is_explained_and_may_be_expected(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke("properties", "faulty.py:attention", "--cases", "calls.yaml", "--explain")
    assert code == ExitCode.DISAGREE
    assert "faulty.attention  batch_invariant  calls/a-batch  float32: output[" in out
    assert "attncheck properties faulty.py:attention --cases calls/a-batch --property batch_invariant" in out
    assert "each batch entry alone" in out
    assert "the exact answer" in out
    (tmp_path / "expected.yaml").write_text(ENTRY.replace("kernel.*", "faulty.*"), encoding="utf-8")
    words = ("--cases", "calls.yaml", "--expected-failures", "expected.yaml")
    code, out, _ = invoke("properties", "faulty.py:attention", *words)
    assert (code, "broken, expected" in out) == (ExitCode.AGREE, True)


def test_rows_are_written_and_printed_as_json(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke(
        *("properties", "faulty.py:attention", "--cases", "calls.yaml", "--json"),
        *("--output", "found", "--junit-xml", "found/junit.xml"),
    )
    assert code == ExitCode.DISAGREE
    rows = json.loads(out)["properties"]
    assert {row["property_name"] for row in rows if row["fails"]} == {"batch_invariant"}
    assert (tmp_path / "found" / "properties.csv").read_text(encoding="utf-8").count("\n") == len(rows) + 1
    assert 'type="broken"' in (tmp_path / "found" / "junit.xml").read_text(encoding="utf-8")


def test_a_plain_check_leaves_cases_with_properties_out(invoke: Invoke) -> None:
    code, out, _ = invoke("check", "calls.yaml", "--implementation", "faulty.py:attention", "--json", "--no-report")
    assert list(json.loads(out)["verdicts"]) == ["calls/a-usual-case"]
    assert code == ExitCode.DISAGREE


def test_a_check_with_properties_counts_them_in_its_exit_code(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.attncheck]\ncases = ["calls.yaml"]\n', encoding="utf-8")
    once = KERNEL.replace("FACTOR", "1 + (len(query) == 1) / 8")  # which no usual case shows
    (tmp_path / "once.py").write_text(once, encoding="utf-8")
    words = ("check", "calls.yaml", "--implementation", "once.py:attention", "--dtype", "float32")
    assert invoke(*words)[0] == ExitCode.AGREE
    assert not (tmp_path / "results" / "latest" / "properties.csv").exists()
    code, out, _ = invoke(*words, "--properties")
    assert code == ExitCode.DISAGREE
    assert "once.attention  batch_invariant  calls/a-batch  float32" in out
    results = tmp_path / "results" / "latest"
    assert json.loads((results / "summary.json").read_text(encoding="utf-8"))["exit_code"] == 1
    assert "## Properties" in (results / "report" / "report.md").read_text(encoding="utf-8")
    assert invoke(*words)[0] == ExitCode.AGREE
    assert not (results / "properties.csv").exists()


# JSON: every command prints one document that the schema allows, also where it fails


Read = Callable[..., Any]

WRONG = """
import numpy as np


def attention(query, key, value, *, mask=None, is_causal=False):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return {"weights": (weights := weights / weights.sum(axis=-1, keepdims=True)), "output": weights @ value}
"""
"""It takes a mask, and ignores it."""
CASE = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
WHO = ("kernel.py:attention", "--dtype", "float32")


@pytest.fixture(scope="module")
def schema() -> Any:
    """The schema of what is printed, as what holds documents against it."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
    return jsonschema_rs.Draft202012Validator(json.loads(results_schema()))


@pytest.fixture
def read(invoke: Invoke, schema: Any) -> Read:
    """Run a command with --json; return what it printed, compared with the schema and its exit code."""
    Path("kernel.py").write_text(WRONG, encoding="utf-8")

    def run(*arguments: str) -> Any:
        code, out, _ = invoke(*arguments, "--json")
        found = json.loads(out, parse_constant=pytest.fail)
        schema.validate(found)
        assert found["exit_code"] == code
        return found

    return run


def test_a_check_and_what_reads_its_results(read: Read) -> None:
    checked = read("check", "attention/a-causal*", "-i", *WHO, "--output", "results/a")
    [failure] = [each for each in checked["failures"] if each["case"] == CASE]
    assert (failure["verdict"], failure["stage"], failure["diagnosis"]) == ("numeric", "masked", "causality-ignored")
    assert failure["element_stage"] == "weights", "it returns no masked scores"
    assert len(failure["element"]) == 4
    assert failure["error"] > failure["bound"]
    assert failure["error"] == pytest.approx(abs(failure["computed"] - failure["exact"]))
    assert failure["next"][0].startswith(f"attncheck explain {CASE} kernel.py:attention")
    assert read("report", "results/a")["failures"] == checked["failures"]
    read("run", CASE, "-i", *WHO, "--output", "results/b")
    assert read("diff", "results/a", "results/b")["verdicts"] == []
    assert read("publish", "results/b", "--published", "kept")["checked"] is False
    assert read("publish", "results/b", "--published", "kept", "--check")["differences"] == []
    read("survey", "results/b", "--output", "survey")
    assert read("survey", "results/b", "--output", "survey", "--check")["differences"] == []


def test_every_command_prints_a_document_that_the_schema_allows(read: Read) -> None:
    """What they print, ``tests/net`` holds."""
    explained = read("explain", CASE, *WHO)
    [weights] = [each for each in explained["stages"] if each["stage"] == "weights"]
    assert float.fromhex(weights["computed_hex"]) == weights["computed"] == explained["failures"][0]["computed"]
    script = read("repro", CASE, *WHO, "--output", "repro.py", "--no-reduce")
    assert script["next"] == [script["command"]] == ["python repro.py"]
    nothing = read("reduce", CASE, "numpy")
    assert (nothing["file"], nothing["failures"]) == (None, [])
    assert read("show", "documents/base_r_vignette/four-words-attend-to-each-other")["numbers"]
    only = read("show", CASE, "--stage", "weights")
    assert ([each["name"] for each in only["stages"]], only["inputs"]) == (["weights"], [])
    found = read("search", *WHO, "--problems", "2", "--operation", "attention")
    assert len(found["failures"]) == len(found["findings"]) > 0
    for words in (
        ("reduce", CASE, *WHO, "--output", "small.yaml"),
        ("conventions", *WHO),
        ("properties", *WHO, "--property", "repeated"),
        ("list", "cases", CASE),
        ("vectors", "export", "vectors", CASE, "--dtype", "float32"),
    ):
        read(*words)


@pytest.mark.parametrize(("arguments", "kind", "message"), TABLES["errors"])
def test_an_error_is_a_document_too(arguments: tuple[str, ...], kind: str, message: str, read: Read) -> None:
    Path("bad.yaml").write_text("title: 3\n", encoding="utf-8")
    found = read(*arguments)
    assert (found["exit_code"], found["error"]["kind"], found["attncheck"]["command"]) == (2, kind, arguments[0])
    assert message in found["error"]["message"]
    assert found["answer"] in found["error"]["message"]


def test_an_interrupted_command_says_that_it_has_no_outcome(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attncheck.cli.listing.list_backends", interrupted)
    assert read("list", "backends")["error"]["kind"] == "Interrupted"


def test_documents_say_which_command_they_are_of() -> None:
    schema = json.loads(results_schema())
    assert [each.get("title") for each in schema["oneOf"]] == [*DOCUMENTS, None]


# What a shell offers: every name there is, and nothing heavy behind it


@pytest.fixture(autouse=True)
def called_attncheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program's name be its own where pytest runs as a module."""
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_offered_names(shell: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ATTNCHECK_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for words, offered in TABLES["offered"].items():
        # As a shell asks; nothing is typed behind the last word.
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
        assert offered in invoke()[1]


def test_the_script_for_a_shell_asks_by_that_protocol(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ATTNCHECK_COMPLETE", "source_bash")
    script = invoke()[1]
    assert "_ATTNCHECK_COMPLETE=complete_bash" in script
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_every_bundled_case_is_offered_and_everything_offered_is_a_case() -> None:
    files = completion.complete_cases("")
    offered = {name for file in files for name in completion.complete_cases(f"{file}/")}
    ids = [case.id for case in select_cases([]).cases]
    plain, globs = {each for each in offered if "*" not in each}, [each for each in offered if "*" in each]
    assert [each for each in ids if each not in plain and not any(fnmatchcase(each, glob) for glob in globs)] == []
    asked_otherwise = "properties/"
    unknown = [each for each in plain - set(ids) if not each.startswith(asked_otherwise)]
    unknown += [glob for glob in globs if not any(fnmatchcase(each, glob) for each in ids)]
    assert unknown == []


def test_implementations_dtypes_and_tags_are_those_that_there_are() -> None:
    assert {item.name for item in every_implementation()} <= set(completion.complete_implementation(""))
    assert completion.complete_dtypes("float64,") == [f"float64,{dtype}" for dtype in DTYPES]
    assert completion.complete_tags("") == list(select_cases([]).tags)
    assert completion.complete_implementations("numpy,torch.sdpa_f") == ["numpy,torch.sdpa_flash"]


def test_nothing_heavy_is_imported_to_offer_names() -> None:
    code = (
        "import sys, attncheck.cli; from attncheck.cli import completion\n"
        "for name in dir(completion):\n"
        "    if name.startswith('complete_'): assert getattr(completion, name)(''), name\n"
        "assert completion.complete_cases('attention/')\n"
        "print(sorted({'numpy', 'pandas', 'pydantic', 'yaml', 'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
