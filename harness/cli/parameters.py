"""Parameters of commands, for typer: options of runs by what says how each is given, and what only commands have."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef

import typer

from attncheck.cli import completion
from attncheck.common.errors import UsageError
from attncheck.common.processors import INSTRUCTION_SETS, emulated_isa, limit_to_isa
from attncheck.common.progress import ActivityTimes
from attncheck.settings.options import Option, RunOptions, find_options

if TYPE_CHECKING:
    from attncheck.cli.output import ReportProcess


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as typer calls it, with a parameter for each field of its dataclass parameters.

    Each is read according to its ``Flag``. Other parameters are unchanged.
    """
    taken = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: list(_option_parameters(item.annotation)) for name, item in taken.items() if is_dataclass(item.annotation)
    }
    flat = [item for name, parameter in taken.items() for item in groups.get(name, [parameter])]
    options = find_options(command)
    for name in groups:
        options |= find_options(taken[name].annotation)
    parameters = [
        (_typer_parameter(options[item.name], item) if item.name in options else item).replace(kind=item.KEYWORD_ONLY)
        for item in flat
    ]
    names = {parameter.name: item.name for parameter, item in zip(parameters, flat, strict=True)}

    @wraps(command)
    def call(**arguments: Any) -> None:
        values = {names[name]: value for name, value in arguments.items()}
        values |= {name: _convert_value(option, values[name]) for name, option in options.items()}
        made = {
            name: taken[name].annotation(**{item.name: values.pop(item.name) for item in fields})
            for name, fields in groups.items()
        }
        command(**values, **made)

    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _option_parameters(group: Any) -> Iterator[inspect.Parameter]:
    yield from inspect.signature(group, eval_str=True).parameters.values()


def _typer_parameter(option: Option, parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter from which typer makes an argument or an option."""
    flag = option.flag
    settings: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "show_default": flag.show_default}
    if flag.minimum is not None:
        settings["min"] = flag.minimum
    if option.type is not bool:
        settings["autocompletion"] = getattr(completion, f"complete_{option.name}", None)
    made = typer.Argument(**settings) if flag.is_argument else typer.Option(*flag.names, **settings)
    default = option.default if flag.command_line_default is None else flag.command_line_default
    if option.is_list:
        default = list(default) or None
    return parameter.replace(
        name=option.bare_name.replace("-", "_"),
        annotation=Annotated[_command_line_type(option), made],
        default=parameter.default if parameter.default is inspect.Parameter.empty else default,
    )


def _command_line_type(option: Option) -> Any:
    """Return the type of a value on the command line; a text for types that are not imported yet."""
    if option.flag.command_line_type is not None:
        return option.flag.command_line_type
    if option.is_list:
        return list[Path] | None if option.type == tuple[Path, ...] else list[str] | None
    return str | None if isinstance(option.type, ForwardRef) else option.type


def _convert_value(option: Option, value: Any) -> Any:
    """Convert a value of the command line, where commas separate several names. Raises ``UsageError``."""
    if value is None or value == option.flag.command_line_default:
        return option.default
    if option.is_list and option.flag.is_split and not option.flag.is_argument:
        value = [part for item in value for part in (item.split(",") if isinstance(item, str) else [item]) if part]
    return option.parse(value, option.flag.names[0] if option.flag.names else f"--{option.name}")


def output_option(metavar: str, text: str) -> Any:
    """Return ``--output`` of a command; the text has its default."""
    return typer.Option("--output", "-o", metavar=metavar, help=text, show_default=False)


def dtype_option(text: str) -> Any:
    """Return ``--dtype`` of a command that takes one; the text has its default."""
    complete = completion.complete_dtypes
    return typer.Option("--dtype", "-d", metavar="DTYPE", help=text, show_default=False, autocompletion=complete)


class ListKind(StrEnum):
    """Kinds of things that ``attncheck list`` lists."""

    CASES = "cases"
    BACKENDS = "backends"
    IMPLEMENTATIONS = "implementations"
    TAGS = "tags"


CaseName = Annotated[
    str,
    typer.Argument(
        metavar="CASE",
        help="The id of a case, a glob that matches one bundled case, a file with one case, or FILE.yaml::PART of a "
        "case's name.",
        autocompletion=completion.complete_cases,
    ),
]
ImplementationName = Annotated[
    str,
    typer.Argument(
        metavar="IMPLEMENTATION",
        help="A backend or implementation, such as torch or torch.sdpa, or your function as file.py:function.",
        autocompletion=completion.complete_implementation,
    ),
]
ImplementationNames = Annotated[
    list[str],
    typer.Argument(
        metavar="IMPLEMENTATION...",
        help="Implementations, such as torch.sdpa, globs such as 'torch.*', or your function as file.py:function.",
        autocompletion=completion.complete_implementation,
    ),
]
DtypeName = Annotated[str | None, dtype_option("One dtype of the case. Default: float32, or the case's first.")]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The results of the check in which the case failed. Default: results/latest, if it exists.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print which results earlier runs provided.")]


def _restart_with_isa(isa: str | None) -> str | None:
    """Start this command again with the variables of an instruction set: libraries read them once, NumPy among them."""
    if isa is not None and isa != emulated_isa():
        if not any(word.startswith("--isa") for word in sys.argv):  # run by a program within its own process
            raise UsageError(f"--isa {isa}: libraries read their variables once, so it needs a process of its own")
        limit_to_isa(isa, environment := dict(os.environ))
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    return isa


Isa = Annotated[
    str | None,
    typer.Option(
        "--isa",
        metavar="|".join(INSTRUCTION_SETS),
        help="Emulate a processor that has this instruction set and no newer one. Default: all instruction sets of "
        "this processor.",
        callback=_restart_with_isa,
        is_eager=True,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Run again when a file is saved: your kernel, a file of its folder that it imports, or one of your cases. "
        "Failures run first, and only changes are shown. Ctrl-C ends.",
    ),
]
_RUN_FOLDERS = typer.Argument(metavar="RUN", help="Results directories, or folders of results directories.")
RunFolders = Annotated[list[Path], _RUN_FOLDERS]
AnyRunFolders = Annotated[list[Path] | None, _RUN_FOLDERS]
JunitXml = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the JUnit XML to this file, in addition to the report's own junit.xml."),
]
CiSummary = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append a short Markdown summary to this file. Default: the file that GITHUB_STEP_SUMMARY names.",
    ),
]
Annotations = Annotated[
    bool,
    typer.Option(
        "--annotations",
        help="Print GitHub annotations: errors for failures and warnings for noise, at most ten of each, at the def of "
        "your implementation or at the line of the case. With --json they go to standard error.",
    ),
]
Sarif = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write SARIF 2.1.0 for code scanning: a result for each fault, at the def of your implementation or at "
        "the line of the case.",
    ),
]
Badges = Annotated[
    list[Path] | None,
    typer.Option(
        "--badge",
        metavar="FILE",
        help="Write a badge: an image (FILE.svg), or a file that shields.io reads (FILE.json). Can be repeated.",
    ),
]

OpenPage = Annotated[bool, typer.Option("--open", help="Open the report in a browser.")]
_BADGE_SUFFIXES = (".svg", ".json")


SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
"""Names the file that GitHub shows on a job's page."""


@dataclass(frozen=True)
class OutputFormats:
    """The places that the outcome goes to besides the terminal and the report's folder."""

    junit_xml: JunitXml = None
    ci_summary: CiSummary = None
    annotations: Annotations = False
    sarif: Sarif = None
    badge: Badges = None
    open: OpenPage = False

    @property
    def has_any(self) -> bool:
        """Return whether the outcome goes anywhere else, by an option or by the CI system's environment."""
        asked = (self.annotations, self.junit_xml, self.sarif, self.badge, self.ci_summary, self.open)
        return any(asked) or bool(os.environ.get(SUMMARY_VARIABLE))

    def __post_init__(self) -> None:
        for path in self.badge or ():  # before anything takes time
            if path.suffix not in _BADGE_SUFFIXES:
                raise UsageError(f"--badge {path}: expected a file that ends with {' or '.join(_BADGE_SUFFIXES)}")


@dataclass(frozen=True)
class RunRequest:
    """Options of a run, and what goes with them from its beginning to what is shown of it."""

    options: RunOptions
    is_announced: bool = False
    """True if hints on what runs were printed already."""
    times: ActivityTimes = field(default_factory=ActivityTimes)
    report_process: ReportProcess | None = None
    """The process that makes the report; None if this one does."""
