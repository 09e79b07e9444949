"""The command that compares two results with each other: ``diff``.

The command that runs old releases and says which one changed what: ``bisect``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.completion import complete_implementation
from attncheck.cli.output import print_document
from attncheck.cli.parameters import AsJson
from attncheck.cli.shared import split
from attncheck.errors import ExitCode, UsageError
from attncheck.options import DtypeNames, FunctionOptions, Quiet

_A_SIDE = "a results directory, or a folder of results directories, which are matched by label."


@app.command(
    epilog=examples(
        "attncheck diff results/before results/after",
        "attncheck diff results/before results/after --verbose",
        "attncheck diff results/before results/after --output results/difference",
    )
)
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Before: {_A_SIDE}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="After: the same.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Write diff.md and its frames (CSV and Parquet) to this folder."
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every change, with names and messages in full.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compare two results. The exit code is 1 if something got worse, and 0 if nothing did."""
    from attncheck.merge import merge_runs
    from attncheck.reports.build_frames import make_frames
    from attncheck.reports.difference import make_difference
    from attncheck.reports.difference_text import print_difference, write_difference
    from attncheck.results.reader import find_runs, matched_runs, read_runs

    sides = matched_runs(read_runs(find_runs([before])), read_runs(find_runs([after])))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    difference = make_difference(frames[0], frames[1], (str(before), str(after)))
    path = write_difference(difference, output) if output else None
    if as_json:
        from attncheck.reports.difference_text import difference_document

        print_document(difference_document(difference, frames[1]))
    else:
        print_difference(difference, quiet=quiet, verbose=verbose)
        if path and not quiet:
            typer.echo(f"Difference: {path}")
    raise typer.Exit(difference.exit_code)


@app.command(
    epilog=examples(
        "attncheck bisect onnxruntime.attention --versions 1.25.0,1.26.0,1.27.0",
        "attncheck bisect my_kernel.py:attention --package numpy --versions 2.3.0,2.4.0",
    )
)
def bisect(
    implementation: Annotated[
        str,
        typer.Argument(
            metavar="IMPLEMENTATION",
            help="What is judged, such as torch.sdpa, or file.py:function.",
            autocompletion=complete_implementation,
        ),
    ],
    cases: Annotated[
        list[str] | None,
        typer.Argument(metavar="CASES", help="Which cases, as with check.", show_default=False),
    ] = None,
    versions: Annotated[
        str,
        typer.Option(metavar="VERSIONS", help="The releases, oldest first, comma-separated.", show_default=False),
    ] = "",
    package: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The distribution whose releases are installed. Default: the one that reports name.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="REQUIREMENT", help="What is installed beside each release, such as 'numpy<2'."),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Results folder, with one subfolder per release.")
    ] = Path("results/bisect"),
    as_json: AsJson = False,
) -> None:
    """Run old releases, and say at which one each verdict changed.

    Every release gets an environment of its own, which is kept in your cache folder. The exit code is 1 if a release
    made something worse, and 3 if one could not be installed or run.
    """
    from attncheck.releases import Release, ReleaseError, check, install
    from attncheck.reports.difference_text import Bisection, print_bisection, read_frames

    asked = split([versions])
    if len(asked) < 2:
        raise UsageError("--versions: expected at least two releases, such as --versions 1.0,1.1,2.0")
    distribution = package or _distribution(implementation)
    arguments = [*(cases or []), "--implementation", implementation]
    for option, given in (
        ("--dtype", ",".join(dtypes)),
        ("--framework", function.framework),
        ("--signature", function.signature),
    ):
        arguments += [option, given] if given else []
    found = Bisection(distribution)
    for version in asked:
        release = Release(distribution, version, tuple(beside or ()))
        try:
            typer.echo(f"attncheck: {distribution} {version}: installing", err=True)
            install(release)
            typer.echo(f"attncheck: {distribution} {version}: checking", err=True)
            check(release, arguments, output / version)
            found.add(version, read_frames(output / version))
        except ReleaseError as error:
            found.miss(version, str(error))
    code = ExitCode.NOT_RUN if found.missed else ExitCode.DISAGREE if found.made_worse else ExitCode.AGREE
    if as_json:
        from attncheck.reports.difference_text import bisection_document

        print_document(bisection_document(found, code))
    else:
        print_bisection(found)
    raise typer.Exit(code)


def _distribution(implementation: str) -> str:
    """Return the distribution that an implementation's version is of. Raises ``UsageError`` for one's own."""
    from attncheck.execution.implementations import every_implementation

    named = [item for item in every_implementation() if implementation in (item.name, item.entry.name)]
    if not named:
        raise UsageError(f"--package: expected the distribution whose releases {implementation} is run with")
    return named[0].package
