"""The distributions that somebody's implementation imports are recorded, so that a comparison names what changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.imports import InstalledPackages
from attncheck.execution.user_code import UserImplementation

Invoke = Callable[..., tuple[int, str, str]]
KERNEL = """
import numpy as np
from typing import TYPE_CHECKING
import helper
import fast_parts

if TYPE_CHECKING:
    import never_there

def attention(query, key, value):
    import lazily
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(query.shape[-1] ** -0.5, query.dtype)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""


def test_what_has_a_package_is_what_the_standard_library_says() -> None:
    expected = {name: set(found) for name, found in packages_distributions().items() if name.isidentifier()}
    installed = InstalledPackages()
    assert {name: set(installed.of(name)) for name in expected} == expected
    assert "numpy" in installed
    assert "nump" not in installed
    assert installed.of("no_such_package") == ()


def install(folder: Path, distribution: str, package: str, number: str, source: str = "") -> None:
    """Leave a package behind as pip does: its module, and a dist-info folder that says what it has."""
    (folder / f"{package}.py").write_text(source, encoding="utf-8")
    for old in folder.glob(f"{package}-*.dist-info/*"):
        old.unlink()
    info = folder / f"{package}-{number}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}\n", encoding="utf-8"
    )
    (info / "top_level.txt").write_text(f"{package}\n", encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A kernel that imports a distribution at its top, one when it is called, and one through a file beside it."""
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "helper.py").write_text("__version__ = '7'\nimport deeper.inside\n", encoding="utf-8")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "__init__.py").touch()
    (tmp_path / "deeper" / "inside.py").write_text("import far_parts\n", encoding="utf-8")
    install(tmp_path, "fast-parts", "fast_parts", "1.0", "import hidden_parts\n")
    install(tmp_path, "lazily", "lazily", "2.0")
    install(tmp_path, "Far.Parts", "far_parts", "3.0")
    install(tmp_path, "hidden-parts", "hidden_parts", "4.0")
    return tmp_path


def versions_of(target: str) -> dict[str, str]:
    (found,) = select_implementations(None, [target]).implementations
    assert isinstance(found.entry, UserImplementation)
    return dict(found.entry.distributions)


def test_what_its_own_modules_import_is_found_and_what_these_import_in_turn_is_not(project: Path) -> None:
    assert versions_of(f"{project / 'kernel.py'}:attention") == {
        "Far.Parts": "3.0",
        "fast-parts": "1.0",
        "helper": "7",
        "lazily": "2.0",
        "numpy": version("numpy"),
    }


def test_a_package_counts_itself(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    install(project, "kernels", "kernels", "5.0", "import lazily\ndef attention(query, key, value): ...\n")
    assert versions_of("kernels:attention") == {"kernels": "5.0", "lazily": "2.0"}


def test_a_function_that_is_sent_by_value_brings_along_what_it_uses() -> None:
    import numpy

    found = select_callable(lambda query, key, value: numpy.zeros(3), None, None)
    assert found.entry.distributions["numpy"] == version("numpy")


def test_an_upgrade_is_named_by_the_comparison_of_two_results(project: Path, invoke: Invoke) -> None:
    command = ("run", "attention/e*", "-i", "kernel.py:attention", "--dtype", "float64", "--quiet", "--output")
    assert invoke(*command, "before")[0] == 0
    install(project, "fast-parts", "fast_parts", "1.1")
    assert invoke(*command, "after")[0] == 0
    versions = json.loads((project / "after" / "environment.json").read_text())["versions"]
    assert versions["fast-parts"] == "1.1"
    _, out, _ = invoke("diff", "before", "after")
    changed = [line for line in out.splitlines() if "fast-parts" in line]
    assert len(changed) == 1
    assert "1.0" in changed[0]
    assert "1.1" in changed[0]
    assert "lazily" not in out


def test_a_run_is_not_resumed_with_another_version(project: Path, invoke: Invoke) -> None:
    command = ("run", "attention/e*", "-i", "kernel.py:attention", "--dtype", "float64", "--quiet", "--output", "out")
    assert invoke(*command)[0] == 0
    install(project, "fast-parts", "fast_parts", "1.1")
    code, _, said = invoke(*command, "--resume")
    assert code == 2
    assert "cannot be resumed: versions" in said
