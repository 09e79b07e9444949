"""The command line: which commands there are, how their help is laid out in panels, and how a failure is reported."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from attncheck.cli.output import print_error, print_error_document, wants_json
from attncheck.cli.parameters import with_options
from attncheck.cli.process import as_memory_error, guard_streams, open_closed_streams, require_memory
from attncheck.common.errors import AttncheckError, ExitCode

OPTION_PANELS: Mapping[str, tuple[str, ...]] = {
    "What to check": (
        "backend", "implementation", "framework", "signature", "declare", "dtype", "tag", "match", "tile", "all_cases",
        "standard", "properties", "expected_failures",
    ),
    "While you change a kernel": ("failed", "failed_first", "exitfirst", "maxfail", "watch"),
    "How it runs": ("output", "label", "resume", "keep_going", "keep_arrays", "cluster", "isa"),
    "Report": (
        "quiet", "verbose", "no_report", "min_judged", "as_json", "junit_xml", "sarif", "ci_summary", "annotations",
        "badge", "open",
    ),
    "Limits": ("time_limit", "memory_limit", "threads"),
    "Caches": ("cache", "cache_size", "compilation_cache"),
    "Help": ("help",),
}  # fmt: skip
"""Panels of options, in the order in which help lists them; a command with few options has one list."""
COMMAND_PANELS: Mapping[str, Mapping[str, str]] = {
    "Check": {
        "check": "running",
        "gate": "gating",
        "report": "reporting",
        **dict.fromkeys(("explain", "repro"), "explaining"),
        **dict.fromkeys(("list", "show"), "listing"),
    },
    "Ask more of a kernel": dict.fromkeys(
        ("search", "design", "reduce", "conventions", "accuracy", "properties", "protocol"), "probing"
    ),
    "Compare": dict.fromkeys(("diff", "bisect"), "reporting"),
    "Exchange": {**dict.fromkeys(("vectors", "export", "import"), "interchange"), "schema": "listing"},
    "For maintainers": {**dict.fromkeys(("publish", "survey"), "reporting"), "mutants": "listing"},
}
"""Panels of commands, each with the module that it is in, in the order in which help lists them."""
_MIN_OPTIONS_FOR_PANELS = 12
_TYPE_PATTERN = re.compile(r" <[^>]*>")
_RANGE_PATTERN = re.compile(r"(?:([\d.]+)<=)?x(?:>=([\d.]+))?(?:<=([\d.]+))?")


_CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""The error that typer raises for a command line that it cannot read, from whichever copy of click typer uses."""
_PYDANTIC_WORDS = {
    "Input should be a valid number, unable to parse string as a number": "expected a number",
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Value error, ": "",
}
"""Messages of pydantic, which typer passes on, and what the command line prints instead."""


def plain_error_message(message: str) -> str:
    """Return a message of the command line without pydantic's words, with a suggestion for a misspelt choice.

    >>> plain_error_message("Value error, 'case' is not one of 'cases', 'tags'.")
    "'case' is not one of 'cases', 'tags'. Did you mean 'cases'?"
    """
    for words, plain in _PYDANTIC_WORDS.items():
        message = message.replace(words, plain)
    if " is not one of " not in message:
        return message
    value, *choices = re.findall(r"'([^']*)'", message)
    nearest = get_close_matches(value, choices, n=1)
    return f"{message} Did you mean {nearest[0]!r}?" if nearest else message


class PanelCommand(TyperCommand):
    """A command whose help has its options in panels, where they are many; they stand in that order elsewhere, too."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if sum(parameter.param_type_name == "option" for parameter in self.params) >= _MIN_OPTIONS_FOR_PANELS:
            places = {name: place for place, name in enumerate(chain.from_iterable(OPTION_PANELS.values()))}
            self.params.sort(key=lambda item: (item.param_type_name == "option", places.get(item.name or "", -1)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command; errors suggest what the user probably meant."""
        try:
            return list(super().parse_args(ctx, args))
        except _CommandLineError as error:
            if unknown := getattr(error, "option_name", None):
                names = [name for parameter in self.params for name in parameter.opts]
                longer = [name for name in names if name.startswith(unknown)]
                error.possibilities = longer or error.possibilities
            error.message = plain_error_message(error.message)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        records = {parameter: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        rows = [
            (parameter, _simplify_help_record(record)) for parameter, record in records.items() if record is not None
        ]
        _write_help_section(
            formatter, "Arguments", (row for parameter, row in rows if parameter.param_type_name == "argument")
        )
        options = {parameter.name: row for parameter, row in rows if parameter.param_type_name == "option"}
        known = (
            {name for names in OPTION_PANELS.values() for name in names}
            if len(options) > _MIN_OPTIONS_FOR_PANELS
            else set()
        )
        _write_help_section(formatter, "Options", [record for name, record in options.items() if name not in known])
        for panel, names in OPTION_PANELS.items():
            _write_help_section(
                formatter, panel, [options[name] for name in names if name in options and name in known]
            )


class PanelGroup(TyperGroup):
    """All commands, in panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands that are not hidden."""
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        for panel, names in COMMAND_PANELS.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            rows = [(name, command.get_short_help_str(limit)) for name, command in commands.items() if command]
            _write_help_section(formatter, panel, rows)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options that go without one."""
        self.format_commands(ctx, formatter)
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        _write_help_section(
            formatter, "Options", [_simplify_help_record(record) for record in records if record is not None]
        )


class Commands(typer.Typer):
    """Commands whose help is in panels."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Add a command; the fields of options that it takes are options of its own."""
        add = super().command(name, **{"cls": PanelCommand, **settings})

        def add_with_options(command: Callable[..., None]) -> Callable[..., None]:
            add(with_options(command))
            return command

        return add_with_options


def _simplify_help_record(record: tuple[str, str]) -> tuple[str, str]:
    """Drop types, and write the range of a number in words."""
    name, text = record
    return _TYPE_PATTERN.sub("", name), _RANGE_PATTERN.sub(_range_in_words, text)


def _range_in_words(match: re.Match[str]) -> str:
    least, most = match[1] or match[2], match[3]
    if least is None and most is None:
        return match[0]
    return f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"


def _write_help_section(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if listed := list(rows):
        with formatter.section(title):
            formatter.write_dl(listed)


def examples_epilog(*commands: str) -> str:
    """Return commands as the end of a help text: a line each, at any width. The tests run all of them."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


COMMAND_MODULES = {name: module for commands in COMMAND_PANELS.values() for name, module in commands.items()}


class _CommandLine(Commands):
    """The commands; a listing of commands imports all modules, and a command only its module."""

    _is_loaded = False

    @property
    def registered_commands(self) -> list[CommandInfo]:
        """All commands, or those that were loaded."""
        if not self._is_loaded:
            self.load()
        self._commands.sort(key=_help_position)
        return self._commands

    @registered_commands.setter
    def registered_commands(self, commands: list[CommandInfo]) -> None:
        self._commands = commands

    def load(self, command: str = "") -> None:
        """Import the module of a command, or all modules for an unknown one. Tests run several in one process."""
        self._is_loaded = True
        for name in (
            [COMMAND_MODULES[command]] if command in COMMAND_MODULES else dict.fromkeys(COMMAND_MODULES.values())
        ):
            import_module(f"attncheck.cli.{name}")


def _help_position(command: CommandInfo) -> int:
    return list(COMMAND_MODULES).index(str(command.name or getattr(command.callback, "__name__", "")))


app = _CommandLine(
    name="attncheck",
    cls=PanelGroup,
    help="Check implementations of attention against the exact answer, number by number.",
    epilog="Exit codes: 0 everything agrees; 1 something disagrees; 2 a case file or the command line is wrong; 3 "
    "something could not be run, or too few cases were judged.\n\n"
    + examples_epilog(
        "attncheck check", "attncheck check --implementation my_kernel.py:attention", "attncheck check --help"
    ),
    # Plain text is readable at 80 columns and in pipes, and leaves [brackets] as they are.
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed_version

        typer.echo(f"attncheck {installed_version('attncheck')}")
        raise typer.Exit


_GC_THRESHOLD = 100_000
"""New objects before Python collects cyclic garbage. By default it does so 700 times in a run, with little effect."""


_RUN_EXPANSION = ["check", "--no-report", "--keep-arrays", "all"]
"""The words that `run` abbreviates: judge now, and report or compare later."""


def main() -> None:
    """Run the command line; every failure of the user's is one line, and its exit code."""
    gc.set_threshold(_GC_THRESHOLD)
    # OpenBLAS reads this when NumPy is imported. The products of judging are small, and its threads wait for each other
    # if other processes use the processors. Workers set the threads of implementations themselves (--threads).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    open_closed_streams()
    with guard_streams():
        _run_command_line()


def _run_command_line() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was judged is said, as after Ctrl-C
    if sys.argv[1:2] == ["run"]:
        sys.argv[1:2] = _RUN_EXPANSION
    try:
        try:
            command = next(iter(sys.argv[1:]), "")
            require_memory(only_lists=COMMAND_MODULES.get(command, "listing") == "listing" and command != "mutants")
            app.load(command)
            if wants_json(sys.argv[1:]):
                _run_with_json_errors()
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except AttncheckError as error:
        _exit_with_error(error)
    except Exception as error:
        if out_of_memory := as_memory_error(error):
            _exit_with_error(out_of_memory)
        raise


def _exit_with_error(error: AttncheckError) -> NoReturn:
    print_error(error)
    sys.exit(error.exit_code)


def _run_with_json_errors() -> NoReturn:
    """Run the command line; what is wrong with the line itself is a document, too."""
    try:
        code = app(standalone_mode=False)
    except _CommandLineError as error:
        error.show()
        print_error_document(error.format_message())
        sys.exit(error.exit_code)
    if code == ExitCode.INTERRUPTED:
        print_error_document("interrupted before there was an outcome", "Interrupted", ExitCode.INTERRUPTED)
    sys.exit(code or 0)
