"""The options that commands share, with their help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
        help="Files or folders of cases, or globs over the bundled ones ('cases/documents/*'); all if none is given.",
        show_default=False,
    ),
]
CaseName = Annotated[
    str,
    typer.Argument(
        help="Id of a case, a glob that only one bundled case matches, a file with one case, or FILE.yaml::PART of a "
        "name."
    ),
]
ImplementationName = Annotated[
    str, typer.Argument(help="Implementation or backend, such as torch.sdpa or torch; or file.py:function.")
]
DtypeName = Annotated[
    str | None,
    typer.Option("--dtype", "-d", help="One dtype of the case; if absent float32, or its first.", show_default=False),
]
Results = Annotated[
    Path | None,
    typer.Option(
        help="Results of the check in which it failed; results/latest if absent, where that is.", show_default=False
    ),
]
BackendNames = Annotated[
    list[str] | None,
    typer.Option("--backend", "-b", help="Backends, by name, apart by commas; every installed one if absent."),
]
ImplementationNames = Annotated[
    list[str] | None,
    typer.Option(
        "--implementation",
        "--implementations",
        "-i",
        help="Implementations, apart by commas: names, globs ('torch.*') or all, or one of your own as "
        "file.py:function or package.module:function; the eager mode of every backend if absent.",
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(help="Whose arrays an implementation of your own takes and returns; NumPy's if absent."),
]
ExpectedFailures = Annotated[
    list[Path] | None,
    typer.Option(help="A list of expected failures of your own (YAML), besides the bundled ones."),
]
DtypeNames = Annotated[
    list[str] | None,
    typer.Option("--dtype", "-d", help="float64, float32, bfloat16, float16; all that a case has if absent."),
]
TagNames = Annotated[list[str] | None, typer.Option("--tag", "-t", help="Only cases with one of these tags.")]
Tiles = Annotated[
    list[str] | None,
    typer.Option(
        "--tile",
        metavar="N",
        help="The tile of your kernel, such as 48, or several (64,128): besides the cases named, or all, those with "
        "lengths of n - 1, n, n + 1 and 2n + 1. From 2 to 4096.",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for the results; an earlier run in it is replaced.")
]
Label = Annotated[str, typer.Option(help="What reports call this environment.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the interrupted run in the same folder; start it if there is none."),
]
KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going",
        help="Try all of an implementation whose process ends, or runs out of time, in the same way in every call; the "
        "rest is not tried after ten in a row otherwise. With --resume, try what an earlier run left untried.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on the Dask cluster whose scheduler is at this address, such as tcp://host:8786 (extra dask).",
    ),
]
KeepArrays = Annotated[
    Keep, typer.Option(help="Keep the arrays of what disagrees, or all, for comparison across runs.")
]
TimeLimit = Annotated[float, typer.Option(min=0.1, help="Seconds that one evaluation may take.")]
MemoryLimit = Annotated[
    float | None,
    typer.Option(min=0.1, help="GiB of memory that one worker may hold; three quarters of the machine's if absent."),
]
CompilationCache = Annotated[
    bool,
    typer.Option(help="Keep what frameworks compile, in the user's cache folder, for the next run."),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each worker.")]
MinJudged = Annotated[
    str | None,
    typer.Option(
        "--min-judged",
        metavar="N|N%",
        help="End with 3 where an implementation was judged in fewer cases, or in a smaller share of those asked for. "
        "If absent: of a run in which nothing is picked, min_judged in [tool.attncheck]; of a report, what its runs "
        "were asked.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
JunitXml = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the JUnit XML here too; the report's folder has it as junit.xml in any case."
    ),
]
CiSummary = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append a short Markdown summary to this file; if absent, to the one that GITHUB_STEP_SUMMARY names.",
    ),
]
Annotations = Annotated[
    bool,
    typer.Option(
        "--annotations",
        help="Print GitHub annotations too, at the def of an own implementation or at the lines of the cases: "
        "errors for what fails, warnings for noise, at "
        "most ten of each. With --json they go to standard error.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what is wrong.")]
