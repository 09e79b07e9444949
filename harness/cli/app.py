"""The command line's frame: what every command shares, and how a failure is reported."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.models import CommandInfo

from attncheck.cli.output import print_error, print_no_outcome, wants_json
from attncheck.cli.panels import COMMANDS, Commands, PanelGroup
from attncheck.errors import AttncheckError, ExitCode


def examples(*commands: str) -> str:
    """Return commands as the end of a help text: a line each, at any width. The tests run all of them."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


MODULES = {name: module for commands in COMMANDS.values() for name, module in commands.items()}


class _CommandLine(Commands):
    """The commands; modules are imported when somebody wants to know which there are, or by the one that runs."""

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
        """Import the module of a command; those of all where it is none of them. Tests run several in one process."""
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
    "something could not be run, or too little was judged.\n\n"
    + examples(
        "attncheck check",
        "attncheck check --implementation my_kernel.py:attention",
        "attncheck check --help",
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


_ALLOCATED = 100_000
"""Objects, after which Python looks for garbage in cycles. By default it does so 700 times in a run, for little."""


_RUN = ["check", "--no-report", "--keep-arrays", "all"]
"""What `run` is short for: to judge now, and to report or compare later."""


def main() -> None:
    """Run the command line; every failure of the user's is one line, and its exit code."""
    gc.set_threshold(_ALLOCATED)
    if sys.argv[1:2] == ["run"]:
        sys.argv[1:2] = _RUN
    app.load(next(iter(sys.argv[1:]), ""))
    try:
        if wants_json(sys.argv[1:]):
            _run_for_programs()
        app(standalone_mode=True)
    except AttncheckError as error:
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


_CommandLineError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")
"""What typer raises of a command line that it cannot read, wherever it has that from."""
