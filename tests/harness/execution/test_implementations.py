"""Which implementations there are, and how each is named: bundled, published by a package, or somebody's own."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from kernels import ATTENTION
from tables import tables_beside

from attncheck.backends import BACKENDS, LIBRARIES, BackendEntry, Mode, published
from attncheck.errors import UsageError
from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.implementations import (
    Implementation,
    ImplementationSelection,
    bundled_implementations,
    every_implementation,
)
from attncheck.execution.user_code import name_of, origin_of

TABLES = tables_beside(__file__)

pytestmark = pytest.mark.usefixtures("forked_workers")

HERE = BackendEntry("here", "some_module", ("numpy",))

GONE = BackendEntry("gone", "some_module", ("no_such_framework",))

TABLE = {"here": HERE, "gone": GONE}


def test_a_backend_means_its_default_mode_wherever_no_mode_is_named() -> None:
    entry = BackendEntry(
        "here", "some_module", ("numpy",), modes=(Mode("jit", "some_module", "for tests"),), default_mode="jit"
    )
    table = {"here": entry}
    assert Implementation(entry) == Implementation(entry, "jit")
    for chosen in (
        bundled_implementations(None, table),
        bundled_implementations(["here"], table),
        bundled_implementations(None, table, ["here"]),
    ):
        assert [each.name for each in chosen.implementations] == ["here.jit"]
    assert [each.name for each in bundled_implementations(None, table, ["here.*"]).implementations] == [
        "here.eager",
        "here.jit",
    ]
    for entry in BACKENDS.values():
        assert entry.default_mode in entry.all_modes


def test_its_version_is_that_of_the_package_that_the_mode_names_or_of_the_framework() -> None:
    mode = Mode("layer", "some_module", "for tests", package="layers")
    entry = BackendEntry("here", "some_module", ("numpy", "layers"), modes=(mode,))
    assert Implementation(entry).package == "numpy"
    assert Implementation(entry, "layer").package == "layers"
    for implementation in every_implementation():
        assert implementation.package in implementation.entry.packages


def test_what_is_not_installed_is_left_out_unless_it_is_asked_for() -> None:
    here = (Implementation(HERE),)
    for names in (None, []):
        assert bundled_implementations(names, TABLE) == ImplementationSelection(here, left_out=("gone",))
    assert bundled_implementations(["gone", "here"], TABLE) == ImplementationSelection(
        here, missing=("gone",), by_name=("here.eager",)
    )
    assert bundled_implementations(["gone"], TABLE) == ImplementationSelection((), missing=("gone",))
    with pytest.raises(UsageError, match=r"^unknown backend 'nump'; expected here, gone$"):
        bundled_implementations(["here", "nump"], TABLE)


MODES = (Mode("jit", "some_module", "compiled", {"float32": "native"}), Mode("own", "some_module", "a kernel"))

MANY = {
    "here": BackendEntry("here", "some_module", ("numpy",), MODES),
    "gone": GONE,
    "other": BackendEntry("other", "some_module", ("numpy",), MODES[:1]),
}


@pytest.mark.parametrize(("names", "patterns", "chosen"), TABLES["patterns"])
def test_patterns_choose_in_table_order(names: list[str] | None, patterns: list[str] | None, chosen: list[str]) -> None:
    assert [item.name for item in bundled_implementations(names, MANY, patterns).implementations] == chosen


@pytest.mark.parametrize(("names", "patterns", "left_out", "missing"), TABLES["missing"])
def test_what_is_not_installed_is_missing_only_where_a_pattern_names_it(
    names: list[str] | None, patterns: list[str], left_out: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    chosen = bundled_implementations(names, MANY, patterns)
    assert ([*chosen.left_out], [*chosen.missing]) == (left_out, missing)
    assert "gone.eager" not in {item.name for item in chosen.implementations}


EVERY_NAME = "expected one of here, here.eager, here.jit, here.own, gone, gone.eager, other, other.eager, other.jit"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("here.xla", "did you mean here.eager or here? (`attncheck list implementations` lists all)"),
        ("her", "did you mean here? (`attncheck list implementations` lists all)"),
        ("nope.*", EVERY_NAME),
        ("ALL", EVERY_NAME),
        ("", EVERY_NAME),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_names_that_exist(pattern: str, meant: str) -> None:
    with pytest.raises(UsageError) as error:
        bundled_implementations(None, MANY, ["here.jit", pattern])
    glob = "a glob such as 'torch.*', all and file.py:function will do"
    assert str(error.value) == f"no implementation is called {pattern!r}; {meant}; {glob}"


def test_a_file_of_nearly_that_name_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("attention.py").touch()
    Path("attn_kernel.py").touch()
    for name, near in (("atention", "attention.py"), ("attn_kernel:run", "attn_kernel.py")):
        with pytest.raises(UsageError, match=rf"^no implementation is called '{name}'; did you mean {near}\? "):
            bundled_implementations(None, MANY, [name])


def test_a_library_runs_only_where_it_is_named_or_a_pattern_is() -> None:
    standard = bundled_implementations(None)
    assert sorted([item.entry.name for item in standard.implementations] + [*standard.left_out]) == sorted(BACKENDS)
    assert not {item.entry.name for item in bundled_implementations(list(BACKENDS)).implementations} & LIBRARIES.keys()
    for name, entry in LIBRARIES.items():
        default = f"{name}.{entry.default_mode}"
        for chosen in (bundled_implementations([name]), bundled_implementations(None, patterns=[name])):
            assert [item.name for item in chosen.implementations] in ([default], [])
            assert chosen.missing == (() if entry.is_installed else (name,))


def test_a_mode_on_a_device_runs_only_where_a_pattern_names_devices() -> None:
    modes = (Mode("eager@cuda", "some_module", "for tests", device="cuda"),)
    table = {"here": BackendEntry("here", "some_module", ("numpy",), device_modes=modes)}

    def chosen(*patterns: str) -> list[str]:
        return [item.name for item in bundled_implementations(None, table, patterns or None).implementations]

    assert chosen() == chosen("here") == chosen("here.*") == chosen("all") == ["here.eager"]
    assert chosen("here@cuda") == chosen("here.eager@cuda") == chosen("*@cuda") == ["here.eager@cuda"]
    assert chosen("here", "*@*") == ["here.eager", "here.eager@cuda"]
    (item,) = bundled_implementations(None, table, ["here@cuda"]).implementations
    assert item.declared is modes[0]
    assert item.needs == {"here": 1.0, "GPU": 1.0}
    with pytest.raises(UsageError, match=r"^no implementation is called 'here.jit@cuda'"):
        chosen("here.jit@cuda")


def test_a_mode_declares_its_own_numerical_classes() -> None:
    classes = {item.name: item.declared.classes for item in every_implementation(MANY)}
    assert classes["here.jit"] == {"float32": "native"}
    compiled = Implementation(MANY["here"], "jit")
    assert compiled.rounding_model("float32") == "native"
    assert compiled.rounding_model("bfloat16") is None
    assert Implementation(BACKENDS["numpy"]).rounding_model("bfloat16") is None
    assert Implementation(BACKENDS["torch"]).rounding_model("bfloat16") == "eager"


MODULE = (
    ATTENTION
    + """
attention.capabilities = {"dtypes": ["float64"]}
"""
)

POINTS = """\
[attncheck.implementations]
my.flash = my_kernels.fast:attention
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

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
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


@pytest.mark.usefixtures("installed")
def test_one_is_chosen_by_its_published_name_and_called_so_in_reports(invoke: Invoke) -> None:
    assert {"my.flash", "plain", "gone"} <= published().keys()
    assert "my.command" not in published()
    found = select_implementations(None, ["my.flash", "plain"]).implementations
    assert [each.name for each in found] == ["my.flash", "plain.attention"]
    assert [dict(each.declared.classes) for each in found] == [{"float64": "native"}] * 2
    assert found[0].declared.description == "my_kernels.fast:attention"
    with pytest.raises(UsageError, match=r"my_kernels\.fast:no_such_function: .* has no no_such_function"):
        select_implementations(None, ["gone"])
    code, out, _ = invoke("list", "implementations", "--json")
    assert code == 0
    (listed,) = [each for each in json.loads(out)["items"] if each["name"] == "my.flash"]
    assert (listed["version"], listed["is"]) == ("1.2", "published as my_kernels.fast:attention")


@pytest.mark.usefixtures("installed")
def test_a_run_judges_them_beside_the_frameworks(invoke: Invoke) -> None:
    code, out, _ = invoke("check", "small.yaml", "-i", "my.flash,numpy.eager", "-o", "right")
    assert (code, out.splitlines()[0]) == (0, "numpy and my.flash agree. Judged 1 of 1 case on each.")


KERNELS = """
class Kernel:
    def __call__(self, query, key, value):
        return value

ready = Kernel()
def attention(query, key, value):
    return value
"""


def test_functions_are_called_alike_by_file_module_and_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").touch()
    (tmp_path / "some" / "kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    kernels = importlib.import_module("some.kernels")
    for name in ("attention", "ready"):
        targets = [f"some/kernels.py:{name}", f"some.kernels:{name}"]
        names = {item.name for item in select_implementations(None, targets).implementations}
        assert names == {f"some_kernels.{name}"}
        assert select_callable(getattr(kernels, name), None, None).name == f"some_kernels.{name}"
    assert select_callable(kernels.attention, None, "mine").name == "some_kernels.mine"
    assert select_callable(functools.partial(kernels.attention), None, None).name == "some_kernels.attention"
    assert select_callable(lambda query, key, value: value, None, None).name.endswith(".callable")
    for name in ("some", "some.kernels"):
        sys.modules.pop(name, None)


def test_what_stands_in_a_script_is_called_after_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, package in (("/home/me/my_kernel.py", "my_kernel"), (None, "own"), ("/tmp/notebook", "own")):
        main = ModuleType("__main__")
        if file is not None:
            main.__file__ = file
        exec("def attention(query, key, value): ...", vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        found = origin_of(main.attention)
        assert (found.package, found.function) == (package, "attention")


def test_a_file_of_a_package_is_called_as_its_module_is(tmp_path: Path) -> None:
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    assert name_of(str(inner / "kernel.py")) == "kernel"
    (inner / "__init__.py").touch()
    assert name_of(str(inner / "kernel.py")) == "inner_kernel"
    (tmp_path / "package" / "__init__.py").touch()
    assert name_of(str(inner / "kernel.py")) == name_of("package.inner.kernel") == "package_inner_kernel"
    assert name_of(str(inner / "__init__.py")) == name_of("package.inner") == "package_inner"
