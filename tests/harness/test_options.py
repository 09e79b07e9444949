"""The options of a run: stated once, taken by every entrance, and read alike."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_type_hints

import pytest
from tables import tables_beside

import attncheck
from attncheck.config import read_config
from attncheck.errors import UsageError
from attncheck.options import CheckKeywords, RecordedOptions, RunOptions, options_of, read_options
from attncheck.pytest_plugin import conformance
from attncheck.run import Settings

OPTIONS = options_of(RunOptions)


def test_every_field_says_how_it_is_given_and_settings_have_those_that_a_run_keeps_to() -> None:
    assert list(OPTIONS) == [*inspect.signature(RunOptions).parameters]
    assert inspect.signature(RecordedOptions).parameters.keys() < inspect.signature(Settings).parameters.keys()


def test_calls_show_their_keywords_with_the_defaults_of_the_options() -> None:
    shown = inspect.signature(attncheck.check).parameters
    assert [*shown] == ["function", *get_type_hints(CheckKeywords)]
    others = {"function", "name", "output"}
    assert {name: each.default for name, each in shown.items() if name not in others} == {
        name: OPTIONS[name].default for name in shown if name not in others
    }
    assert shown.keys() > inspect.signature(conformance).parameters.keys()
    with pytest.raises(TypeError, match="case"):
        attncheck.check("numpy", case=["attention"])  # type: ignore[call-arg]


@pytest.mark.parametrize(("given", "message"), tables_beside(__file__)["unreadable_options"])
def test_what_cannot_be_read_is_said_where_it_was_given(given: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read_options(given)
    assert message in str(error.value)
    if "tiles" in given:
        (tmp_path / "pyproject.toml").write_text("[tool.attncheck]\ntile = 1\n", encoding="utf-8")
        with pytest.raises(UsageError, match=r"tool\.attncheck\.tile: expected a whole number from 2"):
            read_config(tmp_path)
