"""The command line: which commands there are, how their help is laid out in panels, and how a failure is reported."""

from __future__ import annotations

import gc
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

from attncheck.cli.output import print_error, print_no_outcome, wants_json
from attncheck.cli.parameters import with_options
from attncheck.cli.process import guarded_streams, memory_error, open_closed_streams, require_memory
from attncheck.common.errors import AttncheckError, ExitCode

OPTIONS: Mapping[str, tuple[str, ...]] = {
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
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Check": {
        "check": "running",
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
_FEW = 12
_TYPE = re.compile(r" <[^>]*>")
_RANGE = re.compile(r"(?:([\d.]+)<=)?x(?:>=([\d.]+))?(?:<=([\d.]+))?")


_CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""The error that typer raises for a command line that it cannot read, from whichever copy of click typer uses."""
_PYDANTIC_WORDS = {
    "Input should be a valid number, unable to parse string as a number": "expected a number",
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Value error, ": "",
}
"""Messages of pydantic, which typer passes on, and what the command line prints instead."""


def in_plain_words(message: str) -> str:
    """Return a message of the command line without pydantic's words, with a suggestion for a misspelt choice.

    >>> in_plain_words("Value error, 'case' is not one of 'cases', 'tags'.")
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
        if sum(parameter.param_type_name == "option" for parameter in self.params) >= _FEW:
            places = {name: place for place, name in enumerate(chain.from_iterable(OPTIONS.values()))}
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
            error.message = in_plain_words(error.message)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        records = {parameter: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        rows = [(parameter, _plain(record)) for parameter, record in records.items() if record is not None]
        _write(formatter, "Arguments", (row for parameter, row in rows if parameter.param_type_name == "argument"))
        options = {parameter.name: row for parameter, row in rows if parameter.param_type_name == "option"}
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
            rows = [(name, command.get_short_help_str(limit)) for name, command in commands.items() if command]
            _write(formatter, panel, rows)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options that go without one."""
        self.format_commands(ctx, formatter)
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
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


def _in_words(match: re.Match[str]) -> str:
    least, most = match[1] or match[2], match[3]
    if least is None and most is None:
        return match[0]
    return f"{least} to {most}" if least and most else f"at least {least}" if least else f"at most {most}"


def _write(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if listed := list(rows):
        with formatter.section(title):
            formatter.write_dl(listed)


def examples(*commands: str) -> str:
    """Return commands as the end of a help text: a line each, at any width. The tests run all of them."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


MODULES = {name: module for commands in COMMANDS.values() for name, module in commands.items()}


class _CommandLine(Commands):
    """The commands; a listing of commands imports all modules, and a command only its module."""

    _is_loaded = False

    @property
    def registered_commands(self) -> list[CommandInfo]:
        """All commands, or those that were loaded."""
        if not self._is_loaded:
            self.load()
        self._commands.sort(key=_position)
        return self._commands

    @registered_commands.setter
    def registered_commands(self, commands: list[CommandInfo]) -> None:
        self._commands = commands

    def load(self, command: str = "") -> None:
        """Import the module of a command, or all modules for an unknown one. Tests run several in one process."""
        self._is_loaded = True
        for name in [MODULES[command]] if command in MODULES else dict.fromkeys(MODULES.values()):
            import_module(f"attncheck.cli.{name}")


def _position(command: CommandInfo) -> int:
    return list(MODULES).index(str(command.name or getattr(command.callback, "__name__", "")))


app = _CommandLine(
    name="attncheck",
    cls=PanelGroup,
    help="Check implementations of attention against the exact answer, number by number.",
    epilog="Exit codes: 0 everything agrees; 1 something disagrees; 2 a case file or the command line is wrong; 3 "
    "something could not be run, or too few cases were judged.\n\n"
    + examples("attncheck check", "attncheck check --implementation my_kernel.py:attention", "attncheck check --help"),
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


_ALLOCATED = 100_000
"""New objects before Python collects cyclic garbage. By default it does so 700 times in a run, with little effect."""


_RUN = ["check", "--no-report", "--keep-arrays", "all"]
"""The words that `run` abbreviates: judge now, and report or compare later."""


def main() -> None:
    """Run the command line; every failure of the user's is one line, and its exit code."""
    gc.set_threshold(_ALLOCATED)
    open_closed_streams()
    with guarded_streams():
        _run()


def _run() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was judged is said, as after Ctrl-C
    if sys.argv[1:2] == ["run"]:
        sys.argv[1:2] = _RUN
    try:
        try:
            command = next(iter(sys.argv[1:]), "")
            require_memory(only_lists=MODULES.get(command, "listing") == "listing" and command != "mutants")
            app.load(command)
            if wants_json(sys.argv[1:]):
                _run_for_programs()
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except AttncheckError as error:
        _end_with(error)
    except Exception as error:
        if out_of_memory := memory_error(error):
            _end_with(out_of_memory)
        raise


def _end_with(error: AttncheckError) -> NoReturn:
    print_error(error)
    sys.exit(error.exit_code)


def _run_for_programs() -> NoReturn:
    """Run the command line; what is wrong with the line itself is a document, too."""
    try:
        code = app(standalone_mode=False)
    except _CommandLineError as error:
        error.show()
        print_no_outcome(error.format_message())
        sys.exit(error.exit_code)
    if code == ExitCode.INTERRUPTED:
        print_no_outcome("interrupted before there was an outcome", "Interrupted", ExitCode.INTERRUPTED)
    sys.exit(code or 0)
