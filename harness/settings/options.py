"""The options of a run, each stated once: its type, its default, and how it is given.

The parameters of ``attncheck check``, the keywords of ``attncheck.check``, pytest's ``--attncheck-...`` and the keys of
``[tool.attncheck]`` derive from the fields of ``RunOptions``, and each reads what it is given by the same reader. Other
commands take the same types for the options that they share.

Every run of pytest in an environment with attncheck loads this module, so a reader imports what it needs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from attncheck.common.errors import UsageError
from attncheck.results import DEFAULT_RESULTS

if TYPE_CHECKING:
    from attncheck.common.store import Store
    from attncheck.execution.call import Limits
    from attncheck.reading.expressions import Expression
    from attncheck.results.coverage import MinimumJudged

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class Keep(StrEnum):
    """The arrays that a run keeps."""

    DISAGREEING = "disagreeing"
    ALL = "all"


@dataclass(frozen=True)
class Flag:
    """The way in which an option is given.

    Attributes:
        names: Its names on the command line; its field's name if there are none.
        help: Its help there.
        metavar: What stands there for its value.
        is_split: Whether commas separate several values on the command line.
        read: Makes the option from the given value and its place, which messages name. Raises ``UsageError``.
        given: The type of the value on the command line, if it is not the option's own.
        shown: The default there, if it is not the option's own.
        minimum: The smallest number.
        show_default: As typer has it.
        is_argument: Whether it has no name on the command line.
        pytest: Its metavar and help as an option of pytest's; empty if it is none.
        key: Its key in ``[tool.attncheck]``; empty if it has none.
    """

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    is_split: bool = True
    parse: Callable[[Any, str], Any] | None = None
    command_line_type: Any = None
    command_line_default: Any = None
    minimum: float | None = None
    show_default: bool | str = True
    is_argument: bool = False
    pytest_metavar_and_help: tuple[str, str] | tuple[()] = ()
    config_key: str = ""


def make_flag(*names: str, **attributes: Any) -> Flag:
    """Return a ``Flag`` with these names, for the annotation of an option that several commands take."""
    return Flag(names, **attributes)


def option_field(default: Any, *names: str, **attributes: Any) -> Any:
    """Return a field that is an option, with a ``Flag`` of these names."""
    return field(default=default, metadata={"flag": Flag(names, **attributes)})


@dataclass(frozen=True)
class Option:
    """An option: its name among the others, its type, its default, and how it is given."""

    name: str
    type: Any
    default: Any
    flag: Flag

    @property
    def bare_name(self) -> str:
        """Its name without prefix: ``tile`` of ``--tile`` and ``--attncheck-tile``."""
        return next((name[2:].partition("/")[0] for name in self.flag.names if name.startswith("--")), self.name)

    @property
    def is_list(self) -> bool:
        """True for an option that may be given several times."""
        return get_origin(self.type) is tuple

    def parse(self, value: Any, where: str) -> Any:
        """Make the option from the given value; its default from None. Raises ``UsageError``, which names ``where``."""
        if value is None:
            return self.default
        if self.flag.parse is not None:
            return self.flag.parse(value, where)
        return tuple(value) if self.is_list else value


def find_options(source: Callable[..., Any]) -> dict[str, Option]:
    """Return the options among the fields of a dataclass, or the parameters of a function, by name."""
    flags = {item.name: item.metadata.get("flag") for item in fields(source)} if is_dataclass(source) else {}
    options = {}
    for name, parameter in inspect.signature(source, eval_str=True).parameters.items():
        shared = next(
            (note for note in getattr(parameter.annotation, "__metadata__", ()) if isinstance(note, Flag)), None
        )
        if (flag := flags.get(name) or shared) is not None:
            kind = get_args(parameter.annotation)[0] if shared else parameter.annotation
            options[name] = Option(
                name, kind, None if parameter.default is parameter.empty else parameter.default, flag
            )
    return options


def read_options(keywords: Mapping[str, Any]) -> RunOptions:
    """Make options from keywords; a value of None means the default. Raises ``UsageError``, which names a keyword.

    Example:
        >>> options = read_options({"dtypes": ["fp16"], "tiles": 48})
        >>> options.dtypes, options.tiles
        (('float16',), (48,))
    """
    options = find_options(RunOptions)
    return RunOptions(**{name: options[name].parse(value, name) for name, value in keywords.items()})


def add_keywords_to_signature(
    keywords: type, **defaults: Any
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Give a function a signature with these keywords, for ``help``, editors and documents.

    Defaults are those in ``defaults``, else those of ``RunOptions``. An unknown keyword is a ``TypeError``.
    """
    known = {name: option.default for name, option in find_options(RunOptions).items()} | defaults

    def add_keywords(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        plain = inspect.signature(function)
        positional = [
            parameter for parameter in plain.parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=known[name], annotation=annotation)
            for name, annotation in get_type_hints(keywords).items()
        ]
        signature = plain.replace(parameters=[*positional, *named])

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            signature.bind(*args, **kwargs)
            return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return add_keywords


_SHORT_DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
}
"""Names that frameworks and papers have for the dtypes, too."""


def _read_dtypes(names: Iterable[str], where: str) -> tuple[str, ...]:
    from attncheck.common.wording import suggest_names
    from attncheck.spec import DTYPES

    dtypes = tuple(_SHORT_DTYPES.get(name, name) for name in names)
    for name in dtypes:
        if name not in DTYPES:
            raise UsageError(f"unknown dtype {name!r}; {suggest_names(name, DTYPES, one_of=False)}")
    return dtypes


def _read_declarations(declarations: Iterable[str] | Mapping[str, Any], where: str) -> tuple[str, ...]:
    from attncheck.execution.user_code import read_declarations

    pairs = declarations.items() if isinstance(declarations, Mapping) else ()
    texts = tuple(f"{name}={json.dumps(value)}" for name, value in pairs) or tuple(declarations)
    read_declarations(texts)  # before anything takes time
    return texts


def _read_tiles(sizes: Any, where: str) -> tuple[int, ...]:
    from attncheck.reading.selection import read_tiles

    return read_tiles(sizes if isinstance(sizes, list | tuple) else [sizes], where)


def _read_match(text: str, where: str) -> Expression:
    from attncheck.reading.expressions import parse_expression

    return parse_expression(text, where)


def _read_minimum(limit: str | int, where: str) -> MinimumJudged:
    from attncheck.results.coverage import MinimumJudged

    return MinimumJudged.parse(limit, where)


Patterns = Annotated[
    tuple[str, ...],
    make_flag(
        is_argument=True,
        metavar="CASES",
        help="Files or folders of cases, or globs over the bundled cases such as 'documents/*'. Default: all bundled "
        "cases, and those of [tool.attncheck].",
        pytest_metavar_and_help=("CASES", "files, folders or globs"),
        config_key="cases",
    ),
]
ExpectedFailureLists = Annotated[
    tuple[Path, ...],
    make_flag(
        "--expected-failures",
        metavar="FILE",
        help="A list of expected failures of your own (YAML), in addition to the bundled lists.",
        config_key="expected_failures",
    ),
]
DtypeNames = Annotated[
    tuple[str, ...],
    make_flag(
        "--dtype",
        "-d",
        metavar="DTYPES",
        help="float64, float32, bfloat16 or float16, comma-separated. Default: all that a case declares.",
        parse=_read_dtypes,
        pytest_metavar_and_help=("DTYPE", "only this dtype"),
    ),
]
TagNames = Annotated[
    tuple[str, ...],
    make_flag(
        "--tag",
        "-t",
        metavar="TAGS",
        help="Select the cases that have one of these tags.",
        pytest_metavar_and_help=("TAG", "only cases with this tag"),
    ),
]
Match = Annotated[
    "Expression | None",
    make_flag(
        "-k",
        "--match",
        metavar="EXPRESSION",
        help="Select the cases that match: words in ids, names and tags, comparisons of axes, and, or, not, "
        "parentheses, as in 'Lk>64 and not causal' or 'Lk%8!=0'.",
        parse=_read_match,
    ),
]
Tiles = Annotated[
    tuple[int, ...],
    make_flag(
        "--tile",
        metavar="N",
        help="The tile size of your kernel (2 to 4096), or several, such as 64,128. Adds cases with lengths of n - 1, "
        "n, n + 1, 2n and 2n + 1 to the selected ones.",
        parse=_read_tiles,
        pytest_metavar_and_help=("N", "the tile size of the kernel; adds cases at its edges"),
        config_key="tile",
    ),
]
UseCache = Annotated[
    bool,
    make_flag(
        "--cache/--no-cache",
        help="Reuse exact answers and verdicts that earlier runs stored in your cache folder. Without it, the "
        "results are the same, but take longer.",
        show_default="on",
    ),
]
CacheSize = Annotated[
    float,
    make_flag(
        "--cache-size",
        minimum=0,
        metavar="GIB",
        help="Maximum size of the cached answers and verdicts; the least recently used entries are evicted first.",
    ),
]
DEFAULT_CACHE_SIZE = 0.13
"""GiB."""
MinJudged = Annotated[
    "MinimumJudged | None",
    make_flag(
        "--min-judged",
        metavar="N|N%",
        help="Exit with 3 if an implementation was judged in fewer cases, or in a smaller share of them. Default: "
        "min_judged of [tool.attncheck] for a run without a selection; for a report, the limit of its runs.",
        parse=_read_minimum,
        pytest_metavar_and_help=(
            "N|N%",
            "fail if an implementation was judged in fewer cases, or in a smaller share of the cases that ran",
        ),
        config_key="min_judged",
    ),
]
Quiet = Annotated[bool, make_flag("--quiet", "-q", help="Print only failures.")]


@dataclass(frozen=True)
class FunctionOptions:
    """The calling convention of a user's implementation: its arrays, whom it is called like, what it declares."""

    framework: str | None = option_field(
        None,
        metavar="NAME",
        help="The framework whose arrays your implementation takes and returns. Default: the framework "
        "that its file imports if the file does not import NumPy, otherwise numpy.",
        pytest_metavar_and_help=("NAME", "framework whose arrays it takes"),
    )
    signature: str | None = option_field(
        None,
        metavar="NAME",
        help="The library whose signature your function follows: sdpa, flash_attn, xformers, flashinfer, mlx, "
        "onnx, keras, hf, bshd or key_mask. Default: attncheck's own signature.",
        pytest_metavar_and_help=("NAME", "the library whose signature the function follows"),
    )
    declare: tuple[str, ...] = option_field(
        (),
        metavar="NAME=VALUE",
        help="Declarations for your function, in addition to its file's: dtypes=float16, "
        'requires.lengths=equal, classes=\'{"float16": "fused"}\'. Can be repeated.',
        is_split=False,
        parse=_read_declarations,
        pytest_metavar_and_help=("NAME=VALUE", "a declaration for the function"),
    )

    @property
    def as_keywords(self) -> dict[str, Any]:
        """These options alone, as keywords."""
        return {name: getattr(self, name) for name in ("framework", "signature", "declare")}


@dataclass(frozen=True)
class LimitOptions:
    """Limits of an evaluation: seconds, GiB of memory, threads."""

    time_limit: float = option_field(
        60.0, minimum=0.1, metavar="SECONDS", help="Time limit of one evaluation, at least 0.1."
    )
    memory_limit: float | None = option_field(
        None,
        minimum=0.1,
        metavar="GIB",
        help="Memory limit of one worker. Default: three quarters of the machine's memory.",
    )
    threads: int = option_field(1, minimum=1, metavar="N", help="Threads of each worker.")

    def limits(self, **others: Any) -> Limits:
        """Return the limits of workers, with ``others`` of ``Limits``."""
        from attncheck.execution.call import Limits

        if self.memory_limit is not None:
            others["hard_memory_limit"] = int(self.memory_limit * 2**30)
        return Limits(case_seconds=self.time_limit, threads=self.threads, **others)


@dataclass(frozen=True)
class RecordedOptions:
    """The options that a run needs as they were given, and ``Settings`` has as well."""

    output: Path = option_field(
        DEFAULT_RESULTS,
        "--output",
        "-o",
        metavar="FOLDER",
        help="Folder for the results. An earlier run in it is replaced.",
    )
    label: str = option_field("local", metavar="TEXT", help="The name of this environment in reports.")
    dtypes: DtypeNames = ()
    keep_all_arrays: bool = option_field(
        False,
        "--keep-arrays",
        metavar="disagreeing|all",
        help="Which arrays to store. Comparisons across runs need all.",
        parse=lambda arrays, where: arrays is Keep.ALL,
        command_line_type=Keep,
        command_line_default=Keep.DISAGREEING,
    )
    resume: bool = option_field(
        False, "--resume", help="Continue the interrupted run in the output folder. Starts a new run if there is none."
    )
    cluster: str | None = option_field(
        None,
        metavar="ADDRESS",
        help="Compute on the Dask cluster with this scheduler, such as tcp://host:8786. Needs the extra dask.",
    )
    tiles: Tiles = ()
    max_failures: int | None = option_field(
        None,
        "--maxfail",
        minimum=1,
        metavar="N",
        help="Stop after N failing cases. The report counts the cases that were not run; --resume runs them.",
    )
    all_cases: bool = option_field(
        False,
        "--all-cases",
        help="Also run every case on implementations that compile each case (jax.jit, torch.compile, "
        "tf.function). Default: only the standard cases, which cover every pair of options, every size and every known "
        "fault. With --resume, add the rest.",
    )


@dataclass(frozen=True)
class RunOptions(RecordedOptions, LimitOptions, FunctionOptions):
    """All options of a run, as users give them: what is run, how, and what becomes of the results."""

    cases: Patterns = ()
    backends: tuple[str, ...] = option_field(
        (), "--backend", "-b", metavar="NAMES", help="Backends to run, comma-separated. Default: every installed one."
    )
    implementations: tuple[str, ...] = option_field(
        (),
        "--implementation",
        "--implementations",
        "-i",
        metavar="NAMES",
        help="Implementations to run, comma-separated: names, globs such as 'torch.*', all, or your own as "
        "file.py:function, package.module:function or a program (./attention). Default: every backend in its "
        "default mode, which is jit for JAX and eager for all others.",
    )
    expected_failure_lists: ExpectedFailureLists = ()
    tags: TagNames = ()
    match: Match = None
    failed: bool = option_field(
        False, "--failed", help="Run only the failures of the last run in the output folder; none if it had none."
    )
    failed_first: bool = option_field(
        False, "--failed-first", help="Run the failures of the last run in the output folder first, then the rest."
    )
    exitfirst: bool = option_field(
        False, "-x", "--exitfirst", help="Stop at the first failing case, as --maxfail 1 does."
    )
    compilation_cache: bool = option_field(
        True,
        "--compilation-cache/--no-compilation-cache",
        help="Store the programs that frameworks compile in your cache folder, for later runs.",
        show_default="on",
    )
    cache: UseCache = True
    cache_size: CacheSize = DEFAULT_CACHE_SIZE
    keep_going: bool = option_field(
        False,
        "--keep-going",
        help="Try every case, even after ten equal crashes or timeouts in a row. With --resume, try the cases that "
        "an earlier run did not try.",
    )
    standard: tuple[str, ...] = option_field(
        (),
        metavar="NAMES",
        help="Run only the standard cases on these implementations, too: a backend, a name or a glob. About one "
        "case in four.",
    )
    properties: bool = option_field(
        False,
        "--properties",
        help="Also test properties of two calls: repeated, in a batch, padded, packed, decoded, in another memory "
        "layout. `attncheck properties` tests only these.",
    )
    min_judged: MinJudged = None
    report: bool = option_field(
        True,
        "--no-report",
        help="Store the results, but write no report; `attncheck report` writes it later.",
        parse=lambda value, where: not value,
        command_line_default=False,
    )
    quiet: Quiet = False
    verbose: bool = option_field(
        False, "--verbose", "-v", help="Also print which results earlier runs provided, and how long each part took."
    )

    def __post_init__(self) -> None:
        if self.all_cases and self.standard:
            raise UsageError("--all-cases runs every case and --standard only some: give only one of them")
        if self.failed and self.failed_first:
            raise UsageError(
                "--failed runs only the last failures, --failed-first runs them first: give only one of them"
            )

    @property
    def worker_limits(self) -> Limits:
        """Limits of the worker processes."""
        return self.limits(compilation_cache=self.compilation_cache, keep_going=self.keep_going)

    @property
    def store(self) -> Store:
        """The store of earlier results; one that keeps nothing with ``--no-cache``."""
        return open_store(self.cache, self.cache_size)

    @property
    def case_selection(self) -> dict[str, Sequence[str]]:
        """The options that narrow the cases, by their names in ``results.coverage.PICKED``."""
        return {
            "cases": self.cases,
            "tags": self.tags,
            "dtypes": self.dtypes,
            "match": [self.match.text] if self.match else [],
        }


def open_store(cache: bool, size: float) -> Store:
    """Return the store in the user's cache folder, of so many GiB, or one that keeps nothing."""
    from attncheck.common.store import NO_STORE, user_store

    return user_store(int(size * 2**30)) if cache else NO_STORE


class ConformanceKeywords(TypedDict, total=False):
    """The keywords of ``pytest_plugin.conformance``, by the names of ``RunOptions``."""

    cases: Sequence[str]
    tags: Sequence[str]
    dtypes: Sequence[str]
    tiles: Sequence[int]
    framework: str | None
    signature: str | None
    declare: Sequence[str] | Mapping[str, Any]


class CheckKeywords(ConformanceKeywords, total=False):
    """The keywords of ``attncheck.check``: of ``RunOptions``, and the name of a callable."""

    name: str | None
    output: str | Path | None
    time_limit: float
    keep_going: bool
    min_judged: str | int | None
    match: str | None
    failed: bool
    max_failures: int | None


class GateKeywords(TypedDict, total=False):
    """The keywords of ``attncheck.gate``: of ``RunOptions``, and those of the gate."""

    budget: float
    seed: int | None
    forbids_delegation: bool
    output: str | Path | None
    framework: str | None
    signature: str | None
    declare: Sequence[str] | Mapping[str, Any]
