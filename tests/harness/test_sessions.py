"""Sessions of somebody at the command line: files that are written, commands, and what these end with, print and leave.

``sessions.yaml`` has them. A step writes files, where a text may be one of another name with something replaced and
below it, or runs a command:

- ``run``, ``pytest``, ``python``: its words, and ``ends`` its exit code, where that is not 0; what runs ``in`` workers
  has fresh processes;
- ``begins``, ``says``, ``never``: what standard output begins with, has somewhere, and has nowhere;
- with ``--json`` it prints a document that the schema allows, of its exit code;
- ``with``: variables of the environment;
- ``warns``: what standard error has; it is empty where that is not given;
- ``judged``: the cases of which ``results/latest`` has verdicts, by the ends of their ids;
- ``leaves``: files that are there, with what they hold, or which are not there where that is null.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from evaluating import own
from here import own_code_here
from tables import CASES

from attncheck.execution import suggested_requirements
from attncheck.execution.call import Limits
from attncheck.reading.selection import select_cases
from attncheck.results.reader import read_run
from attncheck.showing.json_schema import results_schema

DATA: dict[str, Any] = yaml.load(Path(__file__).with_name("sessions.yaml").read_text("utf-8"), yaml.CSafeLoader)
TEXTS, SESSIONS = CASES | DATA["texts"], DATA["sessions"]
Invoke = Callable[..., tuple[int, str, str]]
RunPytest = Callable[..., Any]


def text_of(given: str | Mapping[str, str]) -> str:
    """Return a text that is written, or one of another name with something replaced."""
    if isinstance(given, str):
        return str(TEXTS.get(given, given))
    changes = dict(given)
    text, below = str(TEXTS[changes.pop("text")]), changes.pop("below", "")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return f"{text}{below}\n"


def as_list(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []


@cache
def schema() -> Any:
    """Return what holds printed documents against their schema."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
    return jsonschema_rs.Draft202012Validator(json.loads(results_schema()))


def wrong(step: Mapping[str, Any], code: int, out: str, err: str) -> Iterator[str]:
    """Yield what is otherwise than a step says."""
    if code != step.get("ends", 0):
        yield f"it ended with {code}"
    if not out.startswith(step.get("begins", "")):
        yield f"it does not begin with {step['begins']!r}"
    yield from (f"nowhere {text!r}" for text in as_list(step.get("says")) if text not in out)
    yield from (f"somewhere {text!r}" for text in as_list(step.get("never")) if text in out)
    yield from (f"no warning {text!r}" for text in as_list(step.get("warns")) if text not in err)
    if "--json" in (words := step.get("run", "").split()):
        found = json.loads(out, parse_constant=pytest.fail)
        schema().validate(found)
        if found["exit_code"] != code or (code == 2 and found["attncheck"]["command"] != words[0]):
            yield "the document is of another exit code or command"
    if "warns" not in step and err:
        yield "standard error is not empty"
    if "judged" in step:
        found = sorted({case.rpartition("/")[2] for case in read_run(Path("results/latest")).rows["case"]})
        if found != step["judged"]:
            yield f"judged: {found}"
    for name, texts in step.get("leaves", {}).items():
        if (texts is not None) != Path(name).exists():
            yield f"{name} is there, or is not"
        else:
            yield from (
                f"{name}: nowhere {text!r}" for text in as_list(texts) if text not in Path(name).read_text("utf-8")
            )


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_goes_as_it_is_written(name: str, invoke: Invoke, run_pytest: RunPytest) -> None:
    for step in SESSIONS[name]:
        for path, given in step.get("write", {}).items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text_of(given), encoding="utf-8")
        if "later" in step:
            os.utime(step["later"], (time.time() + 10,) * 2)
        with nullcontext() if "in" in step else own_code_here(), mock.patch.dict(os.environ, step.get("with", {})):
            if "run" in step:
                code, out, err = invoke(*shlex.split(step["run"]))
            elif "pytest" in step:
                done = run_pytest(*shlex.split(step["pytest"]))
                code, out, err = done.returncode, done.stdout, done.stderr
            elif "python" in step:
                ran = subprocess.run([sys.executable, step["python"]], capture_output=True, text=True, check=False)
                code, out, err = ran.returncode, ran.stdout, ran.stderr
            else:
                continue
        assert list(wrong(step, code, out, err)) == [], f"{step}\n{out}{err}"


RESTRICTED = "query.shape[2] != key.shape[2] or query.shape[3] != value.shape[3] or query.shape[2] % 16"


def test_the_loosest_requirements_are_advised_unless_to_find_them_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.py").write_text(TEXTS["refusing"].replace("REFUSES", RESTRICTED), encoding="utf-8")
    cases = select_cases(["attention/*", "values/*", "kernel_shapes/lengths/*"]).cases
    with own_code_here():
        kernel = own(f"{tmp_path / 'kernel.py'}:attention")
        found = suggested_requirements.suggest_requirements(kernel, cases, Limits())
        monkeypatch.setattr(suggested_requirements, "_MAX_SECONDS", 0.0)
        assert suggested_requirements.suggest_requirements(kernel, cases, Limits()) is None
    assert found is not None
    assert found.requires.items() >= {("lengths", "equal"), ("value_width", "equal")}
    assert max(value for value in found.requires.values() if isinstance(value, int)) == 16
    assert 0 < found.computed_cases <= found.tried_cases
