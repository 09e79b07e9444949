"""JSON of the command line: every command prints one document that the schema allows, also where it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.machine.other_documents import DOCUMENTS, results_schema

pytestmark = pytest.mark.usefixtures("forked_workers")

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
Invoke = Callable[..., tuple[int, str, str]]
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
    ran = read("run", CASE, "-i", *WHO, "--output", "results/b")
    assert (ran["attncheck"]["command"], len(ran["failures"]), ran["report"]) == ("check", 1, None)
    assert read("diff", "results/a", "results/b")["verdicts"] == []
    assert read("publish", "results/b", "--published", "kept")["checked"] is False
    assert read("publish", "results/b", "--published", "kept", "--check")["differences"] == []
    assert read("survey", "results/b", "--output", "survey")["compared"] == 1
    assert read("survey", "results/b", "--output", "survey", "--check")["differences"] == []


def test_one_case_explained_reproduced_and_reduced(read: Read) -> None:
    explained = read("explain", CASE, *WHO)
    [failure] = explained["failures"]
    assert (explained["verdict"], explained["begins_at"]) == (failure["verdict"], failure["stage"])
    [weights] = [each for each in explained["stages"] if each["stage"] == "weights"]
    assert float.fromhex(weights["computed_hex"]) == weights["computed"] == failure["computed"]
    assert [command.split()[1] for command in explained["next"]] == ["repro", "reduce"]
    script = read("repro", CASE, *WHO, "--output", "repro.py", "--no-reduce")
    assert Path(script["script"]).is_file()
    assert script["next"] == [script["command"]] == ["python repro.py"]
    reduced = read("reduce", CASE, *WHO, "--output", "small.yaml")
    assert [each["case"] for each in reduced["failures"]] == ["small.yaml"]
    nothing = read("reduce", CASE, "numpy")
    assert (nothing["file"], nothing["failures"]) == (None, [])


def test_a_case_with_its_numbers(read: Read) -> None:
    shown = read("show", "documents/base_r_vignette/four-words-attend-to-each-other")
    arrays = {each["name"]: each for each in (*shown["inputs"], *shown["stages"])}
    assert arrays["weights"]["shape"] == [1, 1, 4, 4] or arrays["weights"]["shape"][-2:] == [4, 4]
    assert shown["numbers"]
    assert {each["outcome"] for each in shown["numbers"]} <= {"holds", "erratum", "not compared", "does not hold"}
    only = read("show", CASE, "--stage", "weights")
    assert ([each["name"] for each in only["stages"]], only["inputs"]) == (["weights"], [])


def test_what_an_implementation_means_holds_and_fails_at(read: Read) -> None:
    meant = read("conventions", *WHO)
    assert {each["convention"] for each in meant["implementations"]["kernel.attention"]} >= {"mask"}
    asked = read("properties", *WHO, "--property", "repeated")
    assert asked["properties"][0]["property_name"] == "repeated"
    found = read("search", *WHO, "--problems", "2", "--operation", "attention")
    assert len(found["failures"]) == len(found["findings"]) > 0
    assert found["failures"][0]["computed"] is not None


def test_what_can_be_chosen_and_vectors(read: Read) -> None:
    [listed] = read("list", "cases", CASE)["items"]
    assert (listed["id"], listed["name"]) == (CASE, "A causal row sees its own key and earlier ones")
    assert (listed["operation"], listed["tags"]) == ("attention", ["causal"])
    exported = read("vectors", "export", "vectors", CASE, "--dtype", "float32")
    assert (exported["attncheck"]["command"], exported["written"]) == ("vectors export", 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("check", "no-such-file"), "UsageError", "'no-such-file' is neither a file or folder"),
        (("check", "--no-such-option"), "UsageError", "No such option: --no-such-option"),
        (("explain",), "UsageError", "Missing argument"),
        (("no-such-command",), "UsageError", "No such command 'no-such-command'"),
        (("explain", "bad.yaml", "numpy"), "CaseError", "bad.yaml"),
        (("diff", "nothing", "nowhere"), "ResultsError", "nothing"),
    ],
)
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
