"""Programs as implementations: judged like functions, and isolated like them; and the rules that authors can try."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck import cli
from attncheck.errors import UsageError
from attncheck.execution.user_code import Target, file_of_program, is_own, words_of_program
from attncheck.protocol_rules import try_rules

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "examples" / "programs"

PROGRAM = (
    (Path(__file__).parent / "program.py")
    .read_text(encoding="utf-8")
    .replace("import json", "import json, os, signal, time", 1)
)
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the program with a line of its own before it answers; return the command."""

    def written(line: str = "pass") -> str:
        path = tmp_path / "kernel.txt"
        path.write_text(PROGRAM.replace("pass  # HOOK", line), encoding="utf-8")
        return f"{sys.executable} {path}"

    return written


def check(command: str, output: Path, *words: str) -> int:
    """Check the cases of attention on a program; return the exit code."""
    given = ["check", "attention", "-i", command, "--no-report", "-o", str(output), "--no-cache", *words]
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
    assert "kernel.program" in out
    assert "mine" not in out.partition("kernel.program 7.1")[0], "its version is its own"
    assert "kernel.program 7.1" in out
    assert "need mask" in out


def test_a_wrong_number_of_a_program_is_found(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(write("output = output * query.dtype.type(1.001)"), tmp_path / "run") == 1
    assert "numeric" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash"),
        ("sys.exit(3)", "crash"),
        ("time.sleep(60)", "timeout"),
        ("sink.write(b'hello there\\n'); sink.flush(); continue", "expected a line of JSON; got b'hello there"),
        ('sink.write(b\'{"error":"out of luck"}\\n\'); sink.flush(); continue', "out of luck"),
    ],
)
def test_what_a_program_does_instead_of_answering_is_its_verdict(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    assert (
        check(write(line), tmp_path / "run", "-k", "causal", "-d", "float32", "--maxfail", "2", "--time-limit", "1")
        == 3
    )
    assert says in capsys.readouterr().out


def test_a_program_that_refuses_a_call_is_unsupported(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 'sink.write(b\'{"unsupported":"not today"}\\n\'); sink.flush(); continue'
    assert check(write(line), tmp_path / "run") == 3
    assert "not today" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["/bin/true"], ["/bin/cat"]])
def test_what_speaks_no_protocol_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path(words[0]).is_file():
        pytest.skip(f"there is no {words[0]}")
    with pytest.raises(UsageError, match=r"ended without an answer|does not speak the protocol \(docs/protocol.md\)"):
        cli.app(["check", "attention", "-i", words[0], "-o", str(tmp_path / "run")], standalone_mode=False)


def test_every_rule_holds_for_an_honest_program(write: Write) -> None:
    rules = list(try_rules(words_of_program(write())))
    assert [rule for rule in rules if rule.wrong] == []
    assert len(rules) > 8


@pytest.mark.parametrize(
    ("line", "rule", "says"),
    [
        ("output = output[..., :1]", "float32", "expected shape [1, 2, 3, 4]; got [1, 2, 3, 1]"),
        ("output = output.astype(np.float64)", "float32", "expected float32, as the query; got float64"),
        ("if calls == 2: sys.exit(4)", "float32", "it ended in place of an answer, with exit code 4"),
        ("if calls == 2: time.sleep(60)", "float32", "no answer after 1 s"),
        ("if query.shape[2] == 0: output = output[:, :, :0, :0]", "no query", "expected shape [1, 2, 0, 4]"),
        (
            "sink.write(b'x' * 100_000) if key.size > 20_000 else None",
            "a request of",
            "no line end in its first 65536",
        ),
    ],
)
def test_a_broken_rule_says_what_is_malformed(write: Write, line: str, rule: str, says: str) -> None:
    found = [each for each in try_rules(words_of_program(write(line)), seconds=1.0) if each.wrong]
    assert any(each.says.startswith(rule) and says in each.wrong for each in found), found


def test_the_command_tells_an_author(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["protocol", write()], standalone_mode=False)
    assert "It speaks the protocol. Judge its numbers: attncheck check -i" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no program; expected a path to one"):
        cli.app(["protocol", "nothing"], standalone_mode=False)


@pytest.mark.parametrize("flags", [[], ["-DBLOCK=16"]], ids=["loop", "blocked"])
def test_attention_in_c_is_right_wherever_it_is_judged(flags: list[str], tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = tmp_path / "attention"
    subprocess.run([compiler, "-O2", *flags, "-o", program, PROGRAMS / "attention.c", "-lm"], check=True)
    assert [rule for rule in try_rules((str(program),)) if rule.wrong] == []
    assert check(str(program), tmp_path / "run", "--min-judged", "10") == 0


def test_attention_in_r_is_right_wherever_it_is_judged(tmp_path: Path) -> None:
    if shutil.which("Rscript") is None:
        pytest.skip("there is no R")
    command = f"Rscript {PROGRAMS / 'attention.R'}"
    assert [rule for rule in try_rules(words_of_program(command)) if rule.wrong] == []
    assert check(command, tmp_path / "run", "--min-judged", "5") == 0


def test_the_examples_are_short() -> None:
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 120 for path in PROGRAMS.iterdir())
