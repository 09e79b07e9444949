"""Templates that were compiled before give the same page, and what is no such template is compiled again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from attncheck.reports.html.compiled import CompiledTemplates

TEMPLATE = "{% for each in range(3) %}<{{ each }}>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a template, in which what it is compiled to is kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "page.html").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path


def render(folder: Path, *, compiles: bool, autoescape: bool = True) -> str:
    """Render the template, and see whether it was compiled for that."""
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=autoescape, bytecode_cache=CompiledTemplates(folder)
    )
    compiled: list[object] = []
    plain = environment.compile
    environment.compile = lambda *given: compiled.append(given) or plain(*given)  # type: ignore[method-assign, assignment, func-returns-value]
    text = environment.get_template("page.html").render()
    assert bool(compiled) is compiles
    return text


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "__pycache__").iterdir())


def test_a_template_is_compiled_once(folder: Path) -> None:
    assert [render(folder, compiles=compiles) for compiles in (True, False, False)] == ["<0><1><2>"] * 3
    assert len(kept(folder)) == 1


def test_another_source_and_other_options_are_compiled(folder: Path) -> None:
    render(folder, compiles=True)
    render(folder, autoescape=False, compiles=True)
    (folder / "page.html").write_text(f"{TEMPLATE}!", encoding="utf-8")
    assert render(folder, autoescape=False, compiles=True) == "<0><1><2>!"
    assert render(folder, autoescape=False, compiles=False) == "<0><1><2>!"


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:40], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[16:]],
)
def test_a_damaged_one_is_compiled_again_and_replaced(damage: Callable[[bytes], bytes], folder: Path) -> None:
    render(folder, compiles=True)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert render(folder, compiles=True) == "<0><1><2>"
    assert path.read_bytes() == whole
    render(folder, compiles=False)


def test_nothing_is_kept_where_python_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for _ in range(2):
        render(folder, compiles=True)
    assert not (folder / "__pycache__").exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path) -> None:
    (folder / "__pycache__").write_text("no folder")
    for _ in range(2):
        assert render(folder, compiles=True) == "<0><1><2>"
