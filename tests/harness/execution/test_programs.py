"""Programs as implementations: their messages, and that they are judged and isolated like functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tables import tables_beside

from attncheck import cli
from attncheck.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.operations import Task
from attncheck.execution.programs import (
    MAX_HEADER,
    WIRE,
    Description,
    ProtocolError,
    Refused,
    call_request,
    describe_request,
    read_answer,
    read_description,
)
from attncheck.execution.runner import GroupRunner, group_by_process
from attncheck.execution.user_code import Target, file_of_program, is_own, words_of_program
from attncheck.execution.worker import Computed, Failure
from attncheck.protocol_rules import try_rules

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

cli.app.load()  # all commands, whichever another test has loaded

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


def check(command: str, output: Path, *words: str) -> int:
    """Check the cases of attention on a program; return the exit code."""
    given = ["check", *CASES, "-i", command, "--no-report", "-o", str(output), "--no-cache", *words]
    with pytest.raises(SystemExit) as ended:
        cli.app(given, standalone_mode=True)
    return int(ended.value.code or 0)


def test_a_program_is_named_by_its_path_or_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "attention"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"\./attention cannot be executed; if it is a program, chmod \+x \./attention"
    ):
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
    for name in (
        "torch.sdpa",
        "torch.*",
        "all",
        "kernel.py:attention",
        "./kernel.py:attention",
        "a.module:f",
        "two words",
    ):
        assert words_of_program(name) == ()


def test_a_program_is_judged_as_a_function_is(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(write(), tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "mine" not in out.partition("kernel.program 7.1")[0], "its version is its own"
    assert "kernel.program 7.1" in out
    assert "unsupported: bias 1, mask 1" in out
    assert check(write("output = output * query.dtype.type(1.001)"), tmp_path / "run", "-d", "float32") == 1
    assert "numeric" in capsys.readouterr().out


def call(heads: int) -> Task:
    arrays = np.random.default_rng(1).normal(size=(3, 1, heads, 4, 5)).astype(np.float32)
    return Task("attention", {}, dict(zip(("query", "key", "value"), arrays, strict=True)))


def runner_of(command: str, folder: Path, seconds: float) -> GroupRunner[str]:
    (group,) = group_by_process(*select_implementations(None, [command]).implementations, ["float32"])
    return GroupRunner(group, Limits(case_seconds=seconds), folder)


def test_what_a_program_does_is_the_outcome_of_that_call_alone(write: Write, tmp_path: Path) -> None:
    does = "\n    ".join(f"if query.shape[1] == {n}: {line}" for n, line in enumerate(TABLES["calls"], 11))
    command = write(f"{does}\n    if query.shape[1] == 9: time.sleep(60)")
    with closing(runner_of(command, tmp_path, 3.0)) as runner:
        right = runner.evaluate(call(2))
        assert isinstance(right, Computed), right
        for heads, says in (
            (9, "timeout: not done after 3 s; the worker was stopped"),
            *enumerate(TABLES["calls"].values(), 11),
        ):
            outcome = runner.evaluate(call(heads))
            assert isinstance(outcome, Failure)
            assert says in f"{outcome.verdict}: {outcome.message}"
            again = runner.evaluate(call(2))
            assert isinstance(again, Computed), again
            np.testing.assert_array_equal(again.stages["output"], right.stages["output"])


@pytest.mark.skipif(not Path("/bin/cat").is_file(), reason="there is no /bin/cat")
def test_what_speaks_no_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not speak the protocol \(docs/protocol.md\)"):
        cli.app(["check", "attention", "-i", "/bin/cat", "-o", str(tmp_path / "run")], standalone_mode=False)


def test_an_honest_program_keeps_every_rule(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    rules = list(try_rules(words_of_program(write())))
    assert [rule for rule in rules if rule.wrong] == []
    assert len(rules) > 8
    cli.app(["protocol", write()], standalone_mode=False)
    assert "It speaks the protocol. Judge its numbers: attncheck check -i" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no program; expected a path to one"):
        cli.app(["protocol", "nothing"], standalone_mode=False)


@pytest.mark.parametrize(("line", "rule", "says"), TABLES["broken_rules"])
def test_a_broken_rule_says_what_is_malformed(write: Write, line: str, rule: str, says: str) -> None:
    seconds = 1.5 if "sleep" in line else 60.0
    found = [each for each in try_rules(words_of_program(write(line)), seconds=seconds) if each.wrong]
    assert any(each.says.startswith(rule) and says in each.wrong for each in found), found


def test_a_program_that_prints_at_every_call_is_told_where_to(write: Write) -> None:
    command = write("calls += 1; print('called', flush=True)", "calls += 1")
    broken = {rule.says: rule.wrong for rule in try_rules(words_of_program(command)) if rule.wrong}
    assert "an unknown function is refused, and the program goes on" in broken
    assert "it ends when its input ends" not in broken, "it is started for that"
    assert all("write debugging output to standard error" in wrong for wrong in broken.values())


@pytest.mark.parametrize("language", ["C", "C, blocked", "R"])
def test_the_examples_are_right(language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CASES", ["attention"])
    tool, flags = {"C": ("cc", []), "C, blocked": ("cc", ["-DBLOCK=16"]), "R": ("Rscript", [])}[language]
    if (found := shutil.which(tool)) is None:
        pytest.skip(f"there is no {tool}")
    command = f"Rscript {PROGRAMS / 'attention.R'}"
    if tool == "cc":
        command = str(tmp_path / "attention")
        subprocess.run([found, "-O2", *flags, "-o", command, PROGRAMS / "attention.c", "-lm"], check=True)
    assert [rule for rule in try_rules(words_of_program(command)) if rule.wrong] == []
    assert check(command, tmp_path / "run", "--min-judged", "5" if tool == "Rscript" else "10") == 0


DESCRIBED = {"attncheck": 1, "functions": {"attention": ["mask", "scale"]}}


def line(header: Any) -> bytes:
    return json.dumps(header).encode() + b"\n"


def stage(name: str = "output", dtype: str = "float32", shape: Any = (2, 1)) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape}


def test_a_request_is_a_line_and_the_arrays_behind_it() -> None:
    query, mask = np.array([[1, -2.5]], np.float32), np.array([True, False])
    sent = b"".join(call_request("attention", {"query": query.T, "mask": mask}, {"scale": 0.1, "window": [2, None]}))
    header, _, rest = sent.partition(b"\n")
    assert json.loads(header) == {
        "attncheck": 1,
        "ask": "call",
        "function": "attention",
        "options": {"scale": 0.1, "window": [2, None]},
        "arrays": [stage("query", "float32", [2, 1]), stage("mask", "bool", [2])],
    }
    assert b" " not in header, "a search for a name finds its value right behind it"
    assert rest == b"\0\0\x80?\0\0 \xc0\1\0"
    assert json.loads(describe_request()) == {"attncheck": 1, "ask": "describe"}


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


def test_several_stages_and_the_next_answer_lie_one_behind_the_other() -> None:
    one = line({"stages": [stage("weights", "float64", [1]), stage()]}) + np.array([0.5]).tobytes() + b"\0" * 8
    stream = BytesIO(one + line({"unsupported": "no softcap"}) + line({"error": "no memory"}))
    found = read_answer(stream)
    assert isinstance(found, dict)
    assert list(found) == ["weights", "output"]
    assert read_answer(stream) == Refused("unsupported", "no softcap")
    assert read_answer(stream) == Refused("error", "no memory")
    with pytest.raises(EOFError):
        read_answer(stream)


def test_what_json_cannot_say_is_not_asked() -> None:
    with pytest.raises(NotImplementedError, match="cannot be written as JSON"):
        list(call_request("attention", {}, {"scale": float("inf")}))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"hello\n", r"expected a line of JSON; got b'hello\\n'"),
        (b'{"stages":[', "an end before the line's"),
        (b"x" * (MAX_HEADER + 9), f"no line end in its first {MAX_HEADER} bytes"),
        (b"[1]\n", "expected a JSON object"),
        (b"{}\n", 'expected "stages".*; got an empty object'),
        (line({"output": 1}), "got 'output'"),
        (line({"stages": []}), 'expected "stages", a list with an entry for each array'),
        (line({"stages": [3]}), 'a stage has "name", "dtype" and "shape"; got 3'),
        (line({"stages": [stage(dtype="f32")]}), "stage output: unknown dtype 'f32'; expected float64, float32"),
        (line({"stages": [stage(shape=[2, -1])]}), r"stage output: shape: expected a list of lengths; got \[2, -1\]"),
        (line({"stages": [stage(shape=[True])]}), "expected a list of lengths"),
        (line({"stages": [stage(shape=[2**20, 2**20])]}), "is larger than 2,147,483,648 bytes"),
        (line({"stages": [stage(), stage()]}), "stage output is there twice"),
        (line({"stages": [stage()]}) + b"1234567", "expected 8 bytes for shape .2, 1.; got 7, and the end"),
        (line({"stages": [stage(dtype="bool", shape=[1])]}) + b"\2", "a bool is a byte of 0 or 1; got 2"),
    ],
)
def test_an_answer_that_is_none_says_what_was_expected(answer: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_answer(BytesIO(answer))


def test_a_description_is_read_with_what_is_not_said_left_as_it_is() -> None:
    assert read_description(BytesIO(line(DESCRIBED))) == Description({"attention": ("mask", "scale")})
    said = {
        "name": "mine",
        "version": "2",
        "dtypes": ["float16"],
        "grouped_heads": False,
        "classes": {"float16": "fused"},
    }
    found = read_description(BytesIO(line({**DESCRIBED, **said})))
    assert (found.name, found.version, found.dtypes, found.grouped_heads) == ("mine", "2", ("float16",), False)
    assert found.classes == {"float16": "fused"}


def test_a_description_that_is_none_says_what_was_expected() -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"attncheck": 2}, 'expected "attncheck": 1'),
        ({"functions": None}, 'expected "functions", such as'),
        ({"functions": {"attention": "mask"}}, 'expected "functions", such as'),
        ({"dtypes": ["f32"]}, "unknown dtype 'f32'"),
        ({"dtypes": "float32"}, "dtypes: expected a list; got 'float32'"),
        ({"grouped_heads": 1}, "grouped_heads: expected true or false; got 1"),
        ({"colour": "red"}, "unknown field 'colour'"),
    )
    for changed, says in changes:
        with pytest.raises(ProtocolError, match=says):
            read_description(BytesIO(line({**DESCRIBED, **changed})))
