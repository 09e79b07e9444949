"""attncheck inside other people's test suites."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from here import own_code_here
from kernels import kernel

RIGHT = kernel()
WRONG = kernel("output * 1.01")
Run = Callable[..., subprocess.CompletedProcess[str]]
PLAIN = "attention/every-dimension-is-different-and-none-is-forgotten"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project with packages that are called as ours are, and must never be imported."""
    for name in ("reports", "backends", "harness", "cases"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not yours')\n", encoding="utf-8")
    (tmp_path / "right_kernel.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong_kernel.py").write_text(WRONG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run_here(run_pytest: Run) -> Run:
    """Run pytest, and the kernel, in this process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with own_code_here():
            return run_pytest(*arguments)

    return run


@pytest.fixture
def run(project: Path, run_here: Run) -> Run:
    """Do so in the project, and keep nothing of it."""
    return partial(run_here, "-p", "no:cacheprovider")


def test_a_failure_tells_the_story_what_cannot_be_asked_is_skipped_and_what_cannot_be_used_is_one_line(
    run: Run,
) -> None:
    causal = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    words = ("--attncheck-cases", PLAIN, "--attncheck-cases", causal, "-rs", "--attncheck-dtype", "float32")
    done = run("--attncheck", "wrong_kernel.py:attention", *words)
    assert done.returncode == 1
    for text in ("output  numeric", "Every dimension is different and none is forgotten", "takes no is_causal"):
        assert text in done.stdout
    assert "Traceback" not in done.stdout
    for target, cases, message in (
        ("gone.py:attention", PLAIN, "no file gone.py"),
        ("right_kernel:other", PLAIN, "has no other"),
        ("right_kernel:attention", "nothing/*", "neither a file or folder nor a glob"),
    ):
        done = run("--attncheck", target, "--attncheck-cases", cases)
        told = done.stdout + done.stderr
        assert (done.returncode, message in told, "Traceback" in told) == (4, True, False)


def test_a_suite_that_asks_for_nothing_loads_nothing_heavy(project: Path) -> None:
    (project / "test_other.py").write_text(
        "import sys\n\ndef test_it():\n    assert not {'pandas', 'flint', 'pydantic'} & set(sys.modules)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, check=False)
    assert done.returncode == 0, done.stdout


def test_a_session_says_what_was_judged_of_what_was_asked_and_is_not_green_where_nothing_was(
    project: Path, run: Run
) -> None:
    target = ("--attncheck", "right_kernel:attention", "--attncheck-min-judged")
    least = run(*target, "90%", "--attncheck-cases", "attention/*scale*", "--attncheck-cases", PLAIN)
    assert least.returncode == 1
    (line,) = [line for line in least.stdout.splitlines() if line.startswith("right_kernel.attention: ")]
    assert "judged 1 of " in line
    assert "unsupported: scale " in line
    assert "too little was judged: right_kernel.attention was judged in 1 of " in least.stdout
    wrong = run(*target, "most")
    assert wrong.returncode == 4
    assert "--attncheck-min-judged: expected a number of cases" in wrong.stdout + wrong.stderr
    nothing = "def attention(query, key, value, *, mask=None):\n    raise NotImplementedError('only on a GPU')\n"
    (project / "nothing_kernel.py").write_text(nothing, encoding="utf-8")
    (project / "test_kernel.py").write_text(
        "from nothing_kernel import attention\n"
        "from attncheck.pytest_plugin import conformance\n"
        f"test_attention = conformance(attention, cases=[{PLAIN!r}])\n",
        encoding="utf-8",
    )
    done = run()
    assert done.returncode == 1
    assert 'unsupported: "only on a GPU" 1' in done.stdout
    assert "too little was judged: no implementation was judged in the only case" in done.stdout
    # Of what somebody left out on purpose nothing is required.
    assert run("-k", "float32").returncode == 0


# Ids: last failures, those that are pasted, keywords, several processes.
# Each pytest release has read them in its own way: tox -e py311-pytest84,py311-pytest90,py311-pytestlatest

FOLDER = "my [own] cases"
TEST = f"""
from kernel import attention
from attncheck.pytest_plugin import conformance

test_attention = conformance(attention, cases=[{FOLDER!r}])
"""
OPTIONS = ["--attncheck", "kernel.py:attention", "--attncheck-cases", FOLDER]
ONE_ID = f"attncheck::kernel.attention[{FOLDER}/row/3-queries-float32]"


@pytest.fixture
def nine_cases(calls_in_a_row: Path) -> Path:
    """A kernel that fails one of nine cases, in a folder whose name has brackets and spaces."""
    wrong = kernel("output * query.dtype.type(1.5 if query.shape[2] == 3 else 1)")
    (calls_in_a_row / "kernel.py").write_text(wrong, encoding="utf-8")
    (calls_in_a_row / FOLDER).mkdir()
    (calls_in_a_row / "row.yaml").rename(calls_in_a_row / FOLDER / "row.yaml")
    return calls_in_a_row


@pytest.fixture(params=["option", "file"])
def asked(request: pytest.FixtureRequest, nine_cases: Path, run_here: Run) -> Callable[..., list[str]]:
    """Run pytest with arguments, by ``--attncheck`` or by a test file, and return its lines."""
    by_file = request.param == "file"
    if by_file:
        (nine_cases / "test_kernel.py").write_text(TEST, encoding="utf-8")

    def ask(*arguments: str) -> list[str]:
        return run_here(*([] if by_file else OPTIONS), *arguments).stdout.splitlines()

    return ask


def failed_ids(lines: list[str]) -> list[str]:
    return [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]


def test_last_failures_and_keywords_select_and_a_pasted_id_runs_its_test(asked: Callable[..., list[str]]) -> None:
    all_lines = asked()
    assert all_lines[-1].startswith("1 failed, 8 passed")
    (failed,) = failed_ids(all_lines)
    again = asked("--last-failed")
    assert failed_ids(again) == [failed]
    assert "passed" not in again[-1]
    assert asked("--failed-first")[0].startswith("F..")
    assert asked("-k", "3-queries")[-1].startswith("1 failed, 8 deselected")
    assert asked(failed)[-1].startswith("1 failed in")


def test_several_processes_have_the_same_ids(nine_cases: Path, run_here: Run) -> None:
    """Those of the option, and of a test file beside it."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (nine_cases / "test_kernel.py").write_text(TEST, encoding="utf-8")
    lines = run_here(*OPTIONS, "-n", "2").stdout.splitlines()
    assert lines[-1].startswith("2 failed, 16 passed")
    failed = failed_ids(lines)
    assert {each.partition("::")[0] for each in failed} == {"attncheck", "test_kernel.py"}


@pytest.mark.usefixtures("nine_cases")
def test_an_id_that_names_no_test_or_lacks_its_option_is_one_line(run_here: Run) -> None:
    done = run_here(*OPTIONS, "attncheck::kernel.attention[gone-float32]")
    assert done.returncode == 4
    assert "not found: attncheck::kernel.attention[gone-float32]; the ids of 9 tests begin with" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    done = run_here(ONE_ID)
    assert done.returncode == 4
    assert f"pytest --attncheck FILE.py:function {shlex.quote(ONE_ID)}" in done.stderr
