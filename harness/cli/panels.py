"""Help in plain text: options and commands in panels, and no word of how they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from attncheck.cli.parameters import with_options

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "What to check": (
        "backend", "implementation", "framework", "signature", "dtype", "tag", "match", "tile", "all_cases", "standard",
        "properties", "expected_failures",
    ),
    "While you change a kernel": ("failed", "failed_first", "exitfirst", "maxfail", "watch"),
    "How it runs": ("output", "label", "resume", "keep_going", "keep_arrays", "cluster", "isa"),
    "Report": (
        "quiet", "verbose", "no_report", "min_judged", "as_json", "junit_xml", "sarif", "ci_summary", "annotations",
        "badge",
    ),
    "Limits": ("time_limit", "memory_limit", "threads"),
    "Caches": ("cache", "cache_size", "compilation_cache"),
    "Help": ("help",),
}  # fmt: skip
"""Panels of options, in the order in which help lists them; a command with few options has one list."""
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Check": {
        "check": "running",
        "report": "publishing",
        **dict.fromkeys(("explain", "repro"), "explaining"),
        "list": "listing",
        "show": "listing",
    },
    "Ask more of a kernel": {
        **dict.fromkeys(("search", "reduce"), "searching"),
        "conventions": "publishing",
        "properties": "properties",
        "protocol": "interchange",
    },
    "Compare": {"diff": "comparing", "bisect": "comparing"},
    "Exchange": {"vectors": "interchange", **dict.fromkeys(("export", "import"), "interchange"), "schema": "listing"},
    "For maintainers": {**dict.fromkeys(("publish", "survey"), "publishing"), "mutants": "listing"},
}
"""Panels of commands, each with the module that it is in, in the order in which help lists them."""
_FEW = 12
_TYPE = re.compile(r" <[^>]*>")
_RANGE = re.compile(r"(?:([\d.]+)<=)?x(?:>=([\d.]+))?(?:<=([\d.]+))?")


class PanelCommand(TyperCommand):
    """A command whose help has its options in panels, where they are many; they stand in that order elsewhere, too."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if sum(each.param_type_name == "option" for each in self.params) >= _FEW:
            places = {name: place for place, name in enumerate(chain.from_iterable(OPTIONS.values()))}
            self.params.sort(key=lambda each: (each.param_type_name == "option", places.get(each.name or "", -1)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        parameters = {each: each.get_help_record(ctx) for each in self.get_params(ctx)}
        shown = {each: _plain(record) for each, record in parameters.items() if record is not None}
        _write(formatter, "Arguments", (shown[each] for each in shown if each.param_type_name == "argument"))
        options = {each.name: shown[each] for each in shown if each.param_type_name == "option"}
        known = {name for names in OPTIONS.values() for name in names} if len(options) > _FEW else set()
        _write(formatter, "Options", [record for name, record in options.items() if name not in known])
        for panel, names in OPTIONS.items():
            _write(formatter, panel, [options[name] for name in names if name in options and name in known])


class PanelGroup(TyperGroup):
    """All commands, in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands that are not hidden."""
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        for panel, names in COMMANDS.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            _write(
                formatter, panel, [(name, each.get_short_help_str(limit)) for name, each in commands.items() if each]
            )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options that go without one."""
        self.format_commands(ctx, formatter)
        records = (each.get_help_record(ctx) for each in self.get_params(ctx))
        _write(formatter, "Options", [_plain(record) for record in records if record is not None])


class Commands(typer.Typer):
    """Commands whose help is in panels."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Add a command; the fields of options that it takes are options of its own."""
        add = super().command(name, **{"cls": PanelCommand, **settings})

        def add_with_options(command: Callable[..., None]) -> Callable[..., None]:
            add(with_options(command))
            return command

        return add_with_options


def _plain(record: tuple[str, str]) -> tuple[str, str]:
    """Drop types, and write the range of a number in words."""
    name, text = record
    return _TYPE.sub("", name), _RANGE.sub(_in_words, text)


def _in_words(found: re.Match[str]) -> str:
    least, most = found[1] or found[2], found[3]
    if least is None and most is None:
        return found[0]
    return f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"


def _write(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if listed := list(rows):
        with formatter.section(title):
            formatter.write_dl(listed)
