"""Old releases: each in an environment of its own, with the rest from around it; what one changed is said."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from attncheck import releases
from attncheck.releases import Release, ReleaseError, check, install

# To import pip, or to look where it is, would take setuptools' distutils from other tests of this process.
pytestmark = pytest.mark.skipif(not list(distributions(name="pip")), reason="pip is not there to install releases with")

KERNEL = """
import toy_attention

def attention(query, key, value, *, is_causal=False):
    return toy_attention.attend(query, key, value, is_causal)
"""
ATTEND = """
import numpy as np

def attend(query, key, value, is_causal):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if is_causal:
        scores = np.where({allowed}, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
RIGHT = "np.tri(*scores.shape[-2:], dtype=bool)"
WRONG = "np.tri(*scores.shape[-2:], k=1, dtype=bool)"
INPUTS = """
    inputs:
      query: {draw: randn, shape: [1, 2, 4, 3]}
      key: {draw: randn, shape: [1, 2, 4, 3]}
      value: {draw: randn, shape: [1, 2, 4, 3]}
"""
CASES = f"""
title: Small
source: {{kind: derivation, title: Made for the tests}}
operation: attention
defaults: {{random: {{generator: numpy-legacy, seed: 5}}}}
cases:
  - name: Plain{INPUTS}
  - name: Causal
    options: {{is_causal: true}}{INPUTS}
"""


def write_wheel(folder: Path, version: str, source: str) -> None:
    info = f"toy_attention-{version}.dist-info"
    with zipfile.ZipFile(folder / f"toy_attention-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_attention.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-attention\nVersion: {version}\n")
        tags = "Generator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip installs from, and a cache of the test's own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, allowed in (("1.0", RIGHT), ("1.1", WRONG), ("2.0", RIGHT)):
        write_wheel(folder, version, ATTEND.format(allowed=allowed))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("ATTNCHECK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(CASES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return folder


def bisected(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attncheck", "bisect", "kernel.py:attention", "small.yaml", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_says_which_release_changed_which_verdict(index: Path) -> None:
    done = bisected("--package", "toy-attention", "--versions", "1.0,1.1,2.0", "-d", "float64", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["missed"] == {}
    columns = ("release", "right", "failing", "worse", "better")
    assert [tuple(row[column] for column in columns) for row in found["releases"]] == [
        ("1.0", 2, 0, None, None),
        ("1.1", 1, 1, 1, 0),
        ("2.0", 2, 0, 0, 1),
    ]
    changes = [(step["before"], step["after"], _changed(step)) for step in found["steps"]]
    assert changes == [("1.0", "1.1", [("worse", "small/causal")]), ("1.1", "2.0", [("better", "small/causal")])]
    text = bisected("--package", "toy-attention", "--versions", "1.0,1.1", "-d", "float64").stdout
    assert "toy-attention 1.1 changed, against 1.0:" in text
    assert "small/causal" in text
    assert "right" in text.splitlines()[0]


def _changed(step: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["change"], row["case"]) for row in step["verdicts"]]


def test_a_release_that_cannot_be_installed_is_said_and_the_others_are_compared(index: Path) -> None:
    done = bisected("--package", "toy-attention", "--versions", "1.0,1.5,2.0", "-d", "float64")
    assert done.returncode == 3
    assert "toy-attention 1.5 cannot be installed: ERROR: No matching distribution found" in done.stdout
    assert "No release changed a verdict." in done.stdout
    assert "Traceback" not in done.stderr


def test_an_environment_is_made_once_and_half_an_environment_is_made_anew(index: Path) -> None:
    release = Release("toy-attention", "1.0")
    assert install(release)
    assert not install(release)
    (release.folder / releases._READY).unlink()
    assert install(release)
    assert Release("toy-attention", "1.0", ("numpy<9",)).folder != release.folder


def test_what_is_around_it_is_there_and_the_release_comes_first(index: Path) -> None:
    release = Release("toy-attention", "2.0")
    install(release)
    script = "import attncheck, numpy, toy_attention; print(numpy.__version__, toy_attention.__file__)"
    done = subprocess.run([str(release.python), "-c", script], capture_output=True, text=True, check=True)
    version, file = done.stdout.split()
    import numpy as np

    assert version == np.__version__
    assert Path(file).is_relative_to(release.folder)


def test_a_check_that_cannot_run_says_why(index: Path) -> None:
    release = Release("toy-attention", "2.0")
    install(release)
    with pytest.raises(ReleaseError, match=r"toy-attention 2\.0 cannot be checked: attncheck: .*no_such\.yaml"):
        check(release, ["no_such.yaml"], index / "results")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--versions", "1.0"], "--versions: expected at least two releases, such as --versions 1.0,1.1,2.0"),
        (["--versions", "1.0,2.0"], "--package: expected the distribution whose releases kernel.py:attention is run"),
    ],
)
def test_what_is_asked_wrongly_is_said(arguments: list[str], message: str, index: Path) -> None:
    done = bisected(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
