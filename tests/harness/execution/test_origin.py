"""One implementation has one name, however it is handed over."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.user_code import name_of, origin_of

KERNELS = """
import functools

def attention(query, key, value):
    return value

def decorated(function):
    @functools.wraps(function)
    def called(*arguments):
        return function(*arguments)
    return called

fast = decorated(attention)

class Kernel:
    def __call__(self, query, key, value):
        return value

ready = Kernel()
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of a package of somebody's, imported."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").touch()
    (tmp_path / "some" / "kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    from importlib import import_module

    yield import_module("some.kernels")
    for name in ("some", "some.kernels"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["attention", "fast", "ready"])
def test_a_function_is_called_alike_by_file_by_module_and_as_an_object(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    targets = [f"some/kernels.py:{name}", f"some.kernels:{name}"]
    names = {item.name for item in select_implementations(None, targets).implementations}
    assert names == {f"some_kernels.{name}"}
    assert select_callable(getattr(kernels, name), None, None).name == f"some_kernels.{name}"


def test_another_name_may_be_given(kernels: Any) -> None:
    assert select_callable(kernels.attention, None, "mine").name == "some_kernels.mine"
    assert select_callable(functools.partial(kernels.attention), None, None).name == "some_kernels.attention"
    assert select_callable(lambda query, key, value: value, None, None).name.endswith(".callable")


@pytest.mark.parametrize(
    ("file", "package"), [("/home/me/my_kernel.py", "my_kernel"), (None, "own"), ("/tmp/notebook", "own")]
)
def test_what_stands_in_a_script_is_called_after_its_file(
    monkeypatch: pytest.MonkeyPatch, file: str | None, package: str
) -> None:
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
