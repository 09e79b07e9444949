"""What ``pyproject.toml`` ships: every folder and every data file of the four packages, but the faults.

An editable install finds files that a wheel does not have, so the lists are compared with the folders themselves.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck.cli.app import main
from attncheck.errors import ExitCode

ROOT = Path(__file__).resolve().parent.parent
STAYS_IN_THE_REPOSITORY = {ROOT / "reports" / "published", ROOT / "harness" / "mutation"}


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = tables["tool"]["setuptools"]
    return found


def _files() -> list[Path]:
    files = (path for name in ("backends", "cases", "harness", "reports") for path in (ROOT / name).rglob("*"))
    kept = (path for path in files if path.is_file() and STAYS_IN_THE_REPOSITORY.isdisjoint(path.parents))
    return [path.relative_to(ROOT) for path in kept if "__pycache__" not in path.parts]


def _package(folder: Path) -> str:
    """Return what a folder of the repository is called once it is installed."""
    first, *rest = folder.parts
    return ".".join(["attncheck", *([] if first == "harness" else [first]), *rest])


def test_every_folder_with_code_is_a_package(setuptools: dict[str, Any]) -> None:
    names = {_package(path.parent) for path in _files() if path.suffix == ".py"}
    assert names <= set(setuptools["packages"])


def test_the_faults_are_no_part_of_the_wheel_and_their_command_says_that_it_needs_a_checkout(
    setuptools: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "attncheck.mutation" not in setuptools["packages"]
    monkeypatch.delitem(sys.modules, "attncheck.mutation.score", raising=False)
    monkeypatch.setitem(sys.modules, "attncheck.mutation", None)  # what is not there cannot be imported
    monkeypatch.setattr(sys, "argv", ["attncheck", "mutants"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "attncheck mutants needs a checkout of the repository, installed by pip install --editable ." in said


def test_every_file_that_is_no_code_is_shipped_by_its_nearest_package(setuptools: dict[str, Any]) -> None:
    data, packages = setuptools["package-data"], set(setuptools["packages"])
    assert sum(path.suffix == ".yaml" for path in _files()) > 30
    for path in (path for path in _files() if path.suffix != ".py"):
        home = next(folder for folder in path.parents if _package(folder) in packages)
        within = path.relative_to(home)
        patterns = [*data["*"], *data.get(_package(home), ())]
        assert any(within.match(pattern) and len(within.parts) == len(Path(pattern).parts) for pattern in patterns), (
            f"{path} is not in the wheel: name it under [tool.setuptools.package-data]"
        )


def test_the_version_is_one_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    headings = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == headings[0]
    assert project["version"] == headings[0][0]
