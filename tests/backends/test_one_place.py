"""A framework is added in one place: what pip, tox, make, CI and the types know of frameworks is the table's."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from attncheck.backends import BACKENDS, EVERYTHING, LIBRARIES, PYTHONS

ROOT = Path(__file__).parents[2]
FRAMEWORKS = [entry for name, entry in BACKENDS.items() if name != "numpy"]  # NumPy is no extra: everything needs it
TOX = {f"py{python.replace('.', '')}": python for python in PYTHONS}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tox(section: str, key: str) -> list[str]:
    """Return the lines of a setting of tox.ini, without comments."""
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return [line for line in parser[section][key].splitlines() if line and not line.startswith("#")]


def by_factor(key: str) -> dict[str, str]:
    """Return what a setting of tox.ini is for each factor."""
    return dict(re.fullmatch(r"([\w-]+): (.+)", line).groups() for line in tox("testenv", key) if ": " in line)  # type: ignore[union-attr]


def environments() -> Iterator[str]:
    """Yield the names of the environments that tox runs, written out."""
    for line in tox("tox", "env_list"):
        prefix, _, choices = line.partition("{")
        yield from (f"{prefix}{each.strip()}" for each in choices.rstrip("}").split(",")) if choices else [line]


def on(python: str) -> list[str]:
    """Return the names of the backends that are tested on a release of Python."""
    return [name for name, entry in BACKENDS.items() if python in entry.pythons]


def test_tox_has_an_environment_for_every_framework_on_every_python_that_it_has_and_one_for_all() -> None:
    wanted = [f"{prefix}-{name}" for prefix, python in TOX.items() for name in (*on(python), "all")]
    assert list(environments()) == ["quality", *wanted, *(f"py311-{name}" for name in LIBRARIES)]


def test_tox_installs_the_extra_of_each_framework() -> None:
    assert by_factor("extras") == {
        **{entry.name: entry.name for entry in FRAMEWORKS},
        **{name: name for name in LIBRARIES},
        **{
            f"{prefix}-all": "all" if len(on(python)) == len(BACKENDS) else ", ".join(on(python)[1:])
            for prefix, python in TOX.items()
        },
    }


def test_tox_selects_the_tests_that_need_the_framework_and_checks_with_it() -> None:
    needing = " or ".join(entry.name for entry in FRAMEWORKS)
    lines = tox("testenv", "set_env")
    selected = dict(line.split(": SELECTED = ") for line in lines if ": SELECTED = " in line)
    checked = dict(line.split(": BACKENDS = ") for line in lines if ": BACKENDS = " in line)
    without = " and ".join(f"not {entry.name}" for entry in FRAMEWORKS)
    alone = {name: name for name in EVERYTHING if name != "numpy"}
    assert selected == {"numpy": without, **alone, "all": needing}
    everywhere = {f"{prefix}-all": ",".join(on(python)) for prefix, python in TOX.items()}
    assert checked == {**{name: name for name in EVERYTHING}, **everywhere}


def test_every_framework_is_an_extra_and_numpy_a_dependency() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    assert {name: extras[name] for name in extras if name not in ("dask", "all", *LIBRARIES)} == {
        entry.name: [entry.requirement] for entry in FRAMEWORKS
    }
    assert {name: extras[name][0] for name in LIBRARIES} == {
        name: entry.requirement for name, entry in LIBRARIES.items()
    }
    assert extras["all"] == [f"attncheck[{','.join(entry.name for entry in FRAMEWORKS)}]"]
    assert BACKENDS["numpy"].requirement in project["dependencies"]


def test_the_pythons_are_those_that_the_package_says() -> None:
    project = pyproject()["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert named == list(PYTHONS)
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert all(set(entry.pythons) <= set(PYTHONS) and entry.pythons for entry in BACKENDS.values())


def test_the_versions_of_what_is_published_are_pinned_and_types_are_checked_without_any_framework() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (override,) = pyproject()["tool"]["mypy"]["overrides"]
    for name, entry in EVERYTHING.items():
        assert set(entry.packages) <= set(pinned), name
        assert re.split(r"[<>=]", entry.requirement)[0] == entry.packages[0], name
        importable = set(entry.packages) - {"jaxlib", "numpy"}  # nothing imports the one, and the other has types
        assert {f"{each}.*" for each in importable} <= set(override["module"]), name


def test_every_module_is_held_against_the_contract_by_the_type_checker() -> None:
    tree = ast.parse((ROOT / "backends" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (
        [each.id for each in node.value.elts if isinstance(each, ast.Name)]
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple)
    )
    assert checked == [entry.module.rpartition(".")[2] for entry in BACKENDS.values()]


def test_every_framework_has_a_marker(pytestconfig: pytest.Config) -> None:
    markers = {each.partition(":")[0] for each in pytestconfig.getini("markers")}
    assert set(EVERYTHING) <= markers


def test_make_reports_and_publishes_every_framework() -> None:
    lists = re.findall(r"--backend (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert lists
    assert set(lists) == {",".join(BACKENDS)}


def test_ci_counts_the_environments_that_make_runs() -> None:
    (listed,) = re.findall(
        r"^TEST_ENVIRONMENTS \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    (counted,) = re.findall(r"^ENVIRONMENTS = \((.*)\)$", (ROOT / ".ci" / "count.py").read_text("utf-8"), re.MULTILINE)
    assert set(listed.split(",")) - {"quality"} == set(re.findall(r'"([^"]+)"', counted))
    assert set(listed.split(",")) <= set(environments())


def test_every_framework_has_a_list_of_expected_failures_or_none_are_known() -> None:
    lists = {path.stem for path in (ROOT / "backends" / "expected_failures").glob("*.yaml")}
    assert lists <= set(EVERYTHING)
