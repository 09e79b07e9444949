"""What ``pyproject.toml`` ships: every folder and every data file of the four packages, but the faults.

An editable install finds files that a wheel does not have, so the lists are compared with the folders themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck.cli.app import main
from attncheck.common.errors import ExitCode

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STAYS_IN_THE_REPOSITORY = {ROOT / "reports" / "published", ROOT / "harness" / "mutation"}


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    tables = PYPROJECT
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


BASE = """\
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "pyarrow"]))
from attncheck.cli import main

for arguments, code in (
    ("check softmax/a* attention/a-causal-row-sees-* -b numpy --dtype float32 -q --keep-arrays all", 0),
    ("report results/latest", 0),
    ("diff results/latest results/latest --output difference", 0),
    ("show attention/a-causal-row-sees-* --save case.png", 2),
):
    sys.argv = ["attncheck", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == code, (arguments, end.code)
    else:
        assert code == 0, arguments
"""


def test_a_check_its_reports_and_a_difference_need_neither_matplotlib_nor_pyarrow(tmp_path: Path) -> None:
    project = PYPROJECT["project"]
    assert not [name for name in project["dependencies"] if re.match("matplotlib|pyarrow", name)]
    done = subprocess.run([sys.executable, "-c", BASE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "show --save needs the extra draw: pip install 'attncheck[draw]'" in " ".join(done.stderr.split())
    report = {path.name for path in (tmp_path / "results" / "latest" / "report").iterdir()}
    assert {"report.html", "report.md", "junit.xml", "results.csv", "pairs.csv"} <= report
    assert not list(tmp_path.rglob("*.parquet"))


def test_every_change_since_the_last_release_is_a_list_item_of_a_known_kind() -> None:
    kinds = {kind["directory"] for kind in PYPROJECT["tool"]["towncrier"]["type"]}
    files = [file for file in (ROOT / "changes").iterdir() if file.name not in ("README.md", "template.md.jinja")]
    named = {file.name for file in files if file.name.split(".")[-2] in kinds and file.suffix == ".md"}
    assert {file.name for file in files} == named
    assert [file.name for file in files if not file.read_text(encoding="utf-8").startswith("- ")] == []


def test_the_version_is_one_everywhere() -> None:
    project = PYPROJECT["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    headings = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == headings[0]
    assert project["version"] == headings[0][0]
