"""Implementations that an installed package publishes: found by name, listed, and run like any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck import cli
from attncheck.errors import UsageError
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.published import published

MODULE = """
import numpy as np

def attention(query, key, value, *, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value

def transposed(query, key, value):
    return attention(query, key, value)[..., ::-1, :]

attention.capabilities = {"dtypes": ["float64"]}
transposed.capabilities = {"dtypes": ["float64"]}
"""
POINTS = """\
[attncheck.implementations]
my.flash = my_kernels.fast:attention
my.wrong = my_kernels.fast:transposed
plain = my_kernels.fast:attention
gone = my_kernels.fast:no_such_function

[console_scripts]
my.command = my_kernels.fast:main
"""
CASE = """\
title: Small
source: {kind: derivation, title: Made for the tests}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 5}}
cases:
  - name: One
    inputs:
      query: {draw: randn, shape: [2, 3, 4]}
      key: {draw: randn, shape: [2, 5, 4]}
      value: {draw: randn, shape: [2, 5, 6]}
"""
Attncheck = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package as pip leaves it behind: its modules, and what it publishes in its dist-info folder."""
    site = tmp_path / "site"
    package, record = site / "my_kernels", site / "my_kernels-1.2.dist-info"
    for folder in (package, record):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "fast.py").write_text(MODULE, encoding="utf-8")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.2\n", encoding="utf-8")
    (record / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CASE, encoding="utf-8")


@pytest.fixture
def attncheck(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Attncheck:
    """Run the command in this process; return its exit code and what it prints."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["attncheck", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capfd.readouterr().out

    return run


def test_only_the_group_of_implementations_is_published() -> None:
    assert {"my.flash", "my.wrong", "plain", "gone"} <= published().keys()
    assert "my.command" not in published()


def test_one_is_chosen_by_its_published_name_and_called_so_in_reports() -> None:
    found = select_implementations(None, ["my.flash", "plain"]).implementations
    assert [each.name for each in found] == ["my.flash", "plain.attention"]
    assert [dict(each.declared.classes) for each in found] == [{"float64": "native"}] * 2
    assert found[0].declared.description == "my_kernels.fast:attention"


def test_one_that_is_published_and_not_there_says_so() -> None:
    with pytest.raises(UsageError, match=r"my_kernels\.fast:no_such_function: .* has no no_such_function"):
        select_implementations(None, ["gone"])


def test_they_are_listed_with_the_version_of_their_package(attncheck: Attncheck) -> None:
    code, out = attncheck("list", "implementations", "--json")
    assert code == 0
    (listed,) = [each for each in json.loads(out)["items"] if each["name"] == "my.flash"]
    assert listed["version"] == "1.2"
    assert listed["is"] == "published as my_kernels.fast:attention"


def test_a_run_judges_them_beside_the_frameworks(attncheck: Attncheck) -> None:
    code, out = attncheck("check", "small.yaml", "-i", "my.flash,numpy.eager", "-o", "right")
    assert (code, out.splitlines()[0]) == (0, "numpy and my.flash agree. Judged 1 of 1 case on each.")
    code, out = attncheck("check", "small.yaml", "-i", "my.wrong", "-o", "wrong", "--dtype", "float64")
    assert code == 1
    assert "[float64] my.wrong: output: " in out
