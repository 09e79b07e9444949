"""Somebody's file and what it imports: what is judged is what they say now."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attncheck.execution.user_source import FromSource, import_user_module

# A kernel, and what it takes its number from: a module beside it, a package's module, and a folder without __init__.
SOURCES = {
    "its own": ("kernel.py", "", "NUMBER = {}"),
    "beside": ("other.py", "from other import NUMBER", "NUMBER = {}"),
    "package": ("parts/inner.py", "from parts.inner import NUMBER", "NUMBER = {}"),
    "namespace": ("spread/inner.py", "from spread.inner import NUMBER", "NUMBER = {}"),
}


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep compiled files, as Python does by default, and let nothing of an import outlive a test."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("path", "path_hooks"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    cached, modules = {*sys.path_importer_cache}, {*sys.modules}
    yield
    for path in {*sys.path_importer_cache} - cached:
        del sys.path_importer_cache[path]
    _forget(modules)


def _forget(before: set[str]) -> None:
    for name in {*sys.modules} - before:
        del sys.modules[name]


def save(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("by_name", [False, True])
def test_what_files_say_now_is_loaded_though_time_and_size_are_those_of_what_was_compiled(
    where: str, by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, imported, text = SOURCES[where]
    save(tmp_path / "kernel.py", imported)
    save(tmp_path / "parts" / "__init__.py", "")
    before = {*sys.modules}
    for number in (1, 2):
        save(tmp_path / name, text.format(number))
        found: Any = import_user_module("kernel" if by_name else str(tmp_path / "kernel.py"))
        assert number == found.NUMBER
        _forget(before)


def test_an_installed_package_is_imported_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    save(installed / "library.py", "")
    save(tmp_path / "kernel.py", "import library, attncheck.errors")
    sys.path.append(str(installed))
    import_user_module(str(tmp_path / "kernel.py"))
    for name in ("library", "attncheck.errors"):
        spec = importlib.import_module(name).__spec__
        assert spec is not None
        assert not isinstance(spec.loader, FromSource)
