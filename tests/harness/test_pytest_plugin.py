"""attncheck inside other people's test suites."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from here import own_code_here

from attncheck.spec import DTYPES

RIGHT = """
import numpy as np

def attention(query, key, value, *, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
WRONG = RIGHT.replace("query.shape[-1] ** -0.5", "1.0")
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
def run(project: Path, run_pytest: Run) -> Run:
    """Run pytest, and the kernel, in this process and in the project."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with own_code_here():
            return run_pytest("-p", "no:cacheprovider", *arguments)

    return run


def test_the_option_gives_a_test_per_case_and_dtype_without_a_test_file(project: Path, run: Run) -> None:
    done = run("--attncheck", "right_kernel:attention", "--attncheck-cases", PLAIN, "--junit-xml", "junit.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    # The case has two dtypes more, which no function in NumPy is asked for unless it says that it takes them.
    assert "2 passed, 2 skipped" in done.stdout
    names = [case.attrib["name"] for case in ElementTree.parse(project / "junit.xml").iter("testcase")]
    assert names == [f"right_kernel.attention[{PLAIN}-{dtype}]" for dtype in DTYPES]


def test_a_failure_tells_the_story_and_what_cannot_be_asked_is_skipped(project: Path, run: Run) -> None:
    causal = "attention/a-causal-row-sees-its-own-key-and-earlier-ones"
    words = ("--attncheck-cases", PLAIN, "--attncheck-cases", causal, "-rs", "--attncheck-dtype", "float32")
    done = run("--attncheck", "wrong_kernel.py:attention", *words)
    assert done.returncode == 1
    assert "output  numeric" in done.stdout
    assert "Every dimension is different and none is forgotten" in done.stdout
    assert "takes no is_causal" in done.stdout
    assert "Traceback" not in done.stdout


def test_one_line_in_a_test_file_is_enough(project: Path, run: Run) -> None:
    (project / "test_kernel.py").write_text(
        "from right_kernel import attention\n"
        "from attncheck.pytest_plugin import conformance\n"
        f"test_attention = conformance(attention, cases=[{PLAIN!r}], dtypes=['float32'])\n",
        encoding="utf-8",
    )
    done = run("-vv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"test_kernel.py::test_attention[{PLAIN}-float32] PASSED" in done.stdout


def test_tags_and_dtypes_select(project: Path, run: Run) -> None:
    words = ("--attncheck-tag", "causal", "--attncheck-dtype", "float32", "--collect-only")
    done = run("--attncheck", "right_kernel:attention", "--attncheck-cases", "attention", *words)
    collected = [line for line in done.stdout.splitlines() if "right_kernel.attention[" in line]
    assert collected
    assert all(line.rstrip().endswith("float32]") for line in collected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attncheck", "gone.py:attention", "--attncheck-cases", PLAIN), "no file gone.py"),
        (("--attncheck", "right_kernel:other", "--attncheck-cases", PLAIN), "has no other"),
        (
            ("--attncheck", "right_kernel:attention", "--attncheck-cases", "nothing/*"),
            "neither a file or folder nor a glob",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 4
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_suite_that_asks_for_nothing_loads_nothing_heavy(project: Path) -> None:
    (project / "test_other.py").write_text(
        "import sys\n\ndef test_it():\n    assert not {'pandas', 'flint', 'pydantic'} & set(sys.modules)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, check=False)
    assert done.returncode == 0, done.stdout


NOTHING = 'def attention(query, key, value, *, mask=None):\n    raise NotImplementedError("only on a GPU")\n'


def test_a_session_says_what_was_judged_of_what_was_asked(project: Path, run: Run) -> None:
    done = run("--attncheck", "right_kernel:attention", "--attncheck-cases", "attention")
    assert done.returncode == 1  # it gives NaN for a query without a key
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("right_kernel.attention: ")]
    assert "judged 5 of 12 cases; 7 unsupported: " in line
    assert "unsupported: is_causal 4, " in line
    target = ("--attncheck", "right_kernel:attention", "--attncheck-min-judged")
    least = run(*target, "90%", "--attncheck-cases", "attention/*scale*", "--attncheck-cases", PLAIN)
    assert least.returncode == 1
    assert "too little was judged: right_kernel.attention was judged in 1 of " in least.stdout
    wrong = run(*target, "most")
    assert wrong.returncode == 4
    assert "--attncheck-min-judged: expected a number of cases" in wrong.stdout + wrong.stderr


def test_a_session_in_which_nothing_was_judged_is_not_green(project: Path, run: Run) -> None:
    (project / "nothing_kernel.py").write_text(NOTHING, encoding="utf-8")
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
