"""The options that commands share, with their help."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli import completion
from attncheck.errors import UsageError
from attncheck.processors import INSTRUCTION_SETS, emulated_isa, limit_to_isa


class Keep(StrEnum):
    """Which arrays a run keeps."""

    DISAGREEING = "disagreeing"
    ALL = "all"


class Listed(StrEnum):
    """What ``attncheck list`` can list."""

    CASES = "cases"
    BACKENDS = "backends"
    IMPLEMENTATIONS = "implementations"
    TAGS = "tags"


Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CASES",
        help="Files or folders of cases, or globs over the bundled cases such as 'documents/*'. Default: all bundled "
        "cases, and those of [tool.attncheck].",
        show_default=False,
        autocompletion=completion.complete_cases,
    ),
]
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
        help="A backend or implementation, such as torch or torch.sdpa, or your own as file.py:function.",
        autocompletion=completion.complete_implementation,
    ),
]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        "-d",
        metavar="DTYPE",
        help="One dtype of the case. Default: float32, or the case's first.",
        show_default=False,
        autocompletion=completion.complete_dtypes,
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The results of the check in which the case failed. Default: results/latest, if it exists.",
        show_default=False,
    ),
]
BackendNames = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAMES",
        help="Backends to run, comma-separated. Default: every installed one.",
        autocompletion=completion.complete_backends,
    ),
]
ImplementationNames = Annotated[
    list[str] | None,
    typer.Option(
        "--implementation",
        "--implementations",
        "-i",
        metavar="NAMES",
        help="Implementations to run, comma-separated: names, globs such as 'torch.*', all, or your own as "
        "file.py:function, package.module:function or a program (./attention). Default: every backend in its default "
        "mode, which is jit for JAX and eager for all others.",
        autocompletion=completion.complete_implementations,
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The framework whose arrays your own implementation takes and returns. Default: the one "
        "that its file imports without NumPy, or numpy.",
        show_default=False,
        autocompletion=completion.complete_frameworks,
    ),
]
Signature = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The library that your own function is called like: sdpa, flash_attn, xformers, flashinfer, mlx, onnx, "
        "keras, hf or bshd. Default: attncheck's own signature.",
        show_default=False,
        autocompletion=completion.complete_signatures,
    ),
]
ExpectedFailures = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="A list of expected failures of your own (YAML), in addition to the bundled lists."
    ),
]
DtypeNames = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        "-d",
        metavar="DTYPES",
        help="float64, float32, bfloat16 or float16, comma-separated. Default: all that a case declares.",
        autocompletion=completion.complete_dtypes,
    ),
]
TagNames = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        "-t",
        metavar="TAGS",
        help="Select the cases that have one of these tags.",
        autocompletion=completion.complete_tags,
    ),
]
Match = Annotated[
    str | None,
    typer.Option(
        "-k",
        "--match",
        metavar="EXPRESSION",
        help="Select the cases that match: words in ids, names and tags, comparisons of axes, and, or, not, "
        "parentheses, as in 'Lk>64 and not causal' or 'Lk%8!=0'.",
        show_default=False,
    ),
]
Failed = Annotated[
    bool,
    typer.Option(
        "--failed",
        help="Run only what failed last time in the output folder; nothing if nothing did.",
    ),
]
FailedFirst = Annotated[
    bool, typer.Option("--failed-first", help="Run what failed last time in the output folder first, then the rest.")
]
ExitFirst = Annotated[
    bool, typer.Option("-x", "--exitfirst", help="Stop at the first failing case, as --maxfail 1 does.")
]
MaxFail = Annotated[
    int | None,
    typer.Option(
        "--maxfail",
        min=1,
        metavar="N",
        help="Stop after N failing cases. The report says how many were not run; --resume goes on.",
        show_default=False,
    ),
]
Tiles = Annotated[
    list[str] | None,
    typer.Option(
        "--tile",
        metavar="N",
        help="The tile size of your kernel (2 to 4096), or several as 64,128. Adds cases with lengths of n - 1, n, "
        "n + 1 and 2n + 1 to the selected ones.",
    ),
]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the results. An earlier run in it is replaced."),
]
Label = Annotated[str, typer.Option(metavar="TEXT", help="The name of this environment in reports.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the interrupted run in the output folder. Starts a new run if there is none.",
    ),
]
KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going",
        help="Try every case, even after ten equal crashes or timeouts in a row. With --resume, try what an earlier "
        "run left untried.",
    ),
]
AllCases = Annotated[
    bool,
    typer.Option(
        "--all-cases",
        help="Also run every case on implementations that compile each case (jax.jit, torch.compile, tf.function). "
        "Default: only the standard cases, in which every two options meet, every size occurs, and every known fault "
        "shows. With --resume, add the rest.",
    ),
]
Standard = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Run only the standard cases on these implementations, too: a backend, a name or a glob. About one "
        "case in four.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on the Dask cluster with this scheduler, such as tcp://host:8786. Needs the extra dask.",
    ),
]
KeepArrays = Annotated[
    Keep,
    typer.Option(
        metavar="disagreeing|all",
        help="Which arrays to store. Comparisons across runs need all.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit of one evaluation, at least 0.1.")
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="GIB",
        help="Memory limit of one worker. Default: three quarters of the machine's memory.",
    ),
]
CompilationCache = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache",
        help="Keep what frameworks compile in your cache folder, for later runs.",
        show_default="on",
    ),
]
DEFAULT_CACHE_SIZE = 0.13
"""GiB."""
UseCache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Take exact answers and verdicts on the same numbers from earlier runs, which keep them in your cache "
        "folder. The results are the same without it, and take longer.",
        show_default="on",
    ),
]
CacheSize = Annotated[
    float,
    typer.Option(
        "--cache-size",
        min=0,
        metavar="GIB",
        help="What they may take in your cache folder; what was not used for the longest time goes first.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print what was taken from earlier runs.")]
VerboseRun = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print what was taken from earlier runs, and what took the time.")
]
Threads = Annotated[int, typer.Option(min=1, metavar="N", help="Threads of each worker.")]


def _begin_again(isa: str | None) -> str | None:
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
        help="Compute as a processor with this instruction set and no newer one does. Default: everything "
        "that this one has.",
        show_default=False,
        callback=_begin_again,
        is_eager=True,
    ),
]
MinJudged = Annotated[
    str | None,
    typer.Option(
        "--min-judged",
        metavar="N|N%",
        help="Exit with 3 if an implementation was judged in fewer cases, or in a smaller share of them. Default: "
        "min_judged of [tool.attncheck] for a run without a selection; for a report, what its runs were given.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
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
        show_default=False,
    ),
]
Badges = Annotated[
    list[Path] | None,
    typer.Option(
        "--badge",
        metavar="FILE",
        help="Write a badge: an image (FILE.svg), or what shields.io reads (FILE.json). Can be repeated.",
        show_default=False,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Record the results, and write no report: `attncheck report` does later.")
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Run again when a file is saved: your kernel, what it imports from its own folder, cases of your own. "
        "What failed runs first, and only what changed is shown. Ctrl-C ends.",
    ),
]
WithProperties = Annotated[
    bool,
    typer.Option(
        "--properties",
        help="Also ask what holds between two calls: repeated, in a batch, padded, packed, decoded, in other memory. "
        "`attncheck properties` asks only that.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is wrong.")]
_RUN_FOLDERS = typer.Argument(metavar="RUN", help="Results directories, or folders of results directories.")
RunFolders = Annotated[list[Path], _RUN_FOLDERS]
AnyRunFolders = Annotated[list[Path] | None, _RUN_FOLDERS]
