"""Programs as implementations: their messages, and that they are judged and isolated like functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluating import in_worker, own
from here import command_here
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tables import tables_beside

from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.operations import Task
from attncheck.execution.programs import (
    MAX_HEADER,
    WIRE,
    ProtocolError,
    call_request,
    read_answer,
    read_description,
    try_rules,
)
from attncheck.execution.user_code import Target, file_of_program, is_own, words_of_program
from attncheck.execution.worker import Computed, Failure

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

ROOT = Path(__file__).parents[3]

PROGRAMS = ROOT / "examples" / "programs"

PROGRAM = (
    (Path(__file__).parent / "program.py")
    .read_text(encoding="utf-8")
    .replace("import json", "import json, os, signal, time", 1)
)

CASES = [f"attention/{name}*" for name in ("every-dimension-is", "a-causal-row-sees-its", "a-bias-per-head-a-mask")]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the program with a line of its own before it answers, or in place of another; return the command."""

    def written(line: str = "pass", hook: str = "pass  # HOOK") -> str:
        path = tmp_path / "kernel.txt"
        path.write_text(PROGRAM.replace(hook, line), encoding="utf-8")
        return f"{sys.executable} {path}"

    return written


def check(command: str, output: Path, *words: str) -> tuple[int, str]:
    """Check cases of attention on a program; return the exit code and what is printed."""
    given = ["check", *(words or CASES), "-i", command, "--no-report", "-o", output, "--no-cache"]
    return command_here(given)[:2]


def test_a_program_is_named_by_its_path_or_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "attention"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    unfit = r"\./attention cannot be executed; if it is a program, chmod \+x \./attention"
    with pytest.raises(UsageError, match=unfit):
        words_of_program("./attention")
    program.chmod(0o755)
    assert words_of_program("./attention --fast") == (str(program), "--fast")
    assert file_of_program(words_of_program("./attention")) == program
    python, script = Path(sys.executable).name, tmp_path / "kernel.R"
    script.write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    words = words_of_program(f"{python} kernel.R")
    assert words == (shutil.which(python), "kernel.R")
    assert file_of_program(words) == script
    assert Target.of(f"{python} kernel.R").name == "kernel"
    with pytest.raises(UsageError, match=r"\./nothing: no file \./nothing; expected a program"):
        is_own("./nothing")
    for name in ("torch.sdpa", "torch.*", "all", "kernel.py:attention", "./kernel.py:attention", "a:f", "two words"):
        assert words_of_program(name) == ()


def test_a_program_is_judged_as_a_function_is(write: Write, tmp_path: Path) -> None:
    code, out = check(write(), tmp_path / "run")
    assert code == 0
    assert "mine" not in out.partition("kernel.program 7.1")[0], "its version is its own"
    assert "kernel.program 7.1" in out
    assert "unsupported: bias 1, mask 1" in out
    code, out = check(write("output = output * query.dtype.type(1.001)"), tmp_path / "run", CASES[0])
    assert (code, "numeric" in out) == (1, True)


def call(heads: int) -> Task:
    arrays = np.random.default_rng(1).normal(size=(3, 1, heads, 4, 5)).astype(np.float32)
    return Task("attention", {}, dict(zip(("query", "key", "value"), arrays, strict=True)))


def test_what_a_program_does_is_the_outcome_of_that_call_alone(write: Write, tmp_path: Path) -> None:
    does = {"time.sleep(60)": "timeout: not done after 3 s; the worker was stopped", **TABLES["calls"]}
    lines = "\n    ".join(f"if query.shape[1] == {heads}: {line}" for heads, line in enumerate(does, 11))
    tasks = [call(heads) for number in range(len(does)) for heads in (2, 11 + number)] + [call(2)]
    outcomes = in_worker(own(write(lines)), tasks, tmp_path, Limits(case_seconds=3.0))
    for outcome in outcomes[::2]:
        assert isinstance(outcome, Computed), outcome
        np.testing.assert_array_equal(outcome.stages["output"], outcomes[0].stages["output"])  # type: ignore[union-attr]
    for outcome, says in zip(outcomes[1::2], does.values(), strict=True):
        assert isinstance(outcome, Failure)
        assert says in f"{outcome.verdict}: {outcome.message}"


@pytest.mark.parametrize(("line", "rule", "says"), TABLES["broken_rules"])
def test_a_broken_rule_says_what_is_malformed(write: Write, line: str, rule: str, says: str) -> None:
    seconds = 4.0 if "sleep" in line else 60.0
    wrong = (each for each in try_rules(words_of_program(write(line)), seconds=seconds) if each.wrong)
    assert any(each.says.startswith(rule) and says in each.wrong for each in wrong)


@pytest.mark.parametrize("language", ["C", "C, blocked", "R"])
def test_the_examples_are_right(language: str, tmp_path: Path) -> None:
    tool, flags = {"C": ("cc", []), "C, blocked": ("cc", ["-DBLOCK=16"]), "R": ("Rscript", [])}[language]
    if (found := shutil.which(tool)) is None:
        pytest.skip(f"there is no {tool}")
    command = f"Rscript {PROGRAMS / 'attention.R'}"
    if tool == "cc":
        command = str(tmp_path / "attention")
        subprocess.run([found, "-O2", *flags, "-o", command, PROGRAMS / "attention.c", "-lm"], check=True)
    assert [rule for rule in try_rules(words_of_program(command)) if rule.wrong] == []
    least = "5" if tool == "Rscript" else "10"
    assert check(command, tmp_path / "run", "attention", "--min-judged", least)[0] == 0


# Messages

DESCRIBED = {"attncheck": 1, "functions": {"attention": ["mask", "scale"]}}


def line(header: Any) -> bytes:
    return json.dumps(header).encode() + b"\n"


def stage(name: str = "output", dtype: str = "float32", shape: Any = (2, 1)) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape}


@given(st.data(), st.sampled_from(sorted(WIRE)), array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
def test_what_is_sent_as_an_array_is_read_as_a_stage(data: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kind = WIRE[dtype]
    raw = data.draw(arrays(np.uint8, (*shape, kind.itemsize)))
    array = (raw % 2)[..., 0].astype(bool) if dtype == "bool" else raw.view(kind)[..., 0]
    payload = b"".join(call_request("attention", {"output": array}, {})).partition(b"\n")[2]
    found = read_answer(BytesIO(line({"stages": [stage("output", dtype, list(shape))]}) + payload))
    assert isinstance(found, dict)
    assert (found["output"].dtype, found["output"].shape) == (array.dtype, array.shape)
    assert found["output"].tobytes() == array.tobytes()


def test_an_answer_or_description_that_is_none_says_what_was_expected() -> None:
    endless = ["x" * (MAX_HEADER + 9), f"no line end in its first {MAX_HEADER} bytes"]
    for answer, says in [*TABLES["answers"], endless]:
        with pytest.raises(ProtocolError, match=says):
            read_answer(BytesIO(answer.encode("latin-1")))
    for changed, says in TABLES["descriptions"]:
        with pytest.raises(ProtocolError, match=says):
            read_description(BytesIO(line({**DESCRIBED, **changed})))
