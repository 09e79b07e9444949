"""A project's own cases and expected_failures in its pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from attncheck.config import Config, read_config
from attncheck.errors import UsageError


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def test_the_nearest_section_counts_and_its_paths_start_at_its_file(tmp_path: Path) -> None:
    project(tmp_path, '[tool.attncheck]\ncases = ["own"]\nexpected_failures = ["known.yaml"]\n')
    (tmp_path / "own").mkdir()
    (tmp_path / "known.yaml").touch()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    project(inner, "[project]\nname = 'other'\n")
    assert read_config(inner) == Config((str(tmp_path / "own"),), (tmp_path / "known.yaml",))


def test_without_a_section_there_is_nothing(tmp_path: Path) -> None:
    assert read_config(project(tmp_path, "[tool.other]\nx = 1\n")) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.attncheck]\ncase = []\n", "tool.attncheck.case: unknown; expected cases, expected_failures"),
        ("[tool.attncheck]\ncases = 'own'\n", "tool.attncheck.cases: expected a list of paths"),
        ("[tool.attncheck]\ncases = ['gone']\n", "tool.attncheck.cases: there is no"),
        ("[tool]\nattncheck = 3\n", "tool.attncheck: expected a table"),
        ("[tool.attncheck\n", "cannot be read"),
    ],
)
def test_a_section_that_says_nothing_sensible_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_config(project(tmp_path, text))
    assert message in str(error.value)
    assert "pyproject.toml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tool = 3\n", None),
        ("x = " + "[" * 2000 + "]" * 2000 + "\n", "nested too deep"),
        (f"x = {'9' * 5000}\n", "cannot be read"),
        ("[tool.attncheck]\ncases = ['a\\u0000b']\n".replace("'", '"'), "there is no"),
        (f"[tool.attncheck]\ncases = ['{'x' * 5000}']\n", "there is no"),
        ('[tool.attncheck]\n"a\\nb" = 1\n', "tool.attncheck.'a\\nb': unknown"),
    ],
)
def test_what_is_hostile_is_told_in_one_line_or_is_no_section(tmp_path: Path, text: str, words: str | None) -> None:
    project(tmp_path, text)
    if words is None:
        assert read_config(tmp_path) == Config()
        return
    with pytest.raises(UsageError) as error:
        read_config(tmp_path)
    assert words in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
