"""What ``pyproject.toml`` ships: every folder and every data file of the four packages.

An editable install finds files that a wheel does not have, so the lists are held against the folders themselves.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("backends", "cases", "harness", "reports")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = tables["tool"]["setuptools"]
    return found


STAYS_IN_THE_REPOSITORY = ROOT / "reports" / "published"


def _files() -> list[Path]:
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    return [
        path.relative_to(ROOT)
        for path in files
        if "__pycache__" not in path.parts and STAYS_IN_THE_REPOSITORY not in path.parents
    ]


def test_every_folder_with_code_or_cases_is_a_package_or_is_shipped_by_one(setuptools: dict[str, Any]) -> None:
    with_code = {path.parent for path in _files() if path.suffix == ".py"}
    names = {"attncheck." + ".".join(folder.parts) for folder in with_code}
    assert names <= set(setuptools["packages"])


def test_every_file_that_is_no_code_is_shipped_by_its_nearest_package(setuptools: dict[str, Any]) -> None:
    data = setuptools["package-data"]
    packages = set(setuptools["packages"])
    assert sum(path.suffix == ".yaml" for path in _files()) > 30
    for path in (path for path in _files() if path.suffix != ".py"):
        home = next(folder for folder in path.parents if "attncheck." + ".".join(folder.parts) in packages)
        within = path.relative_to(home)
        patterns = [*data["*"], *data.get("attncheck." + ".".join(home.parts), ())]
        assert any(within.match(pattern) and len(within.parts) == len(Path(pattern).parts) for pattern in patterns), (
            f"{path} is not in the wheel: name it under [tool.setuptools.package-data]"
        )
