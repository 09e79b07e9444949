"""Commands that read results: ``report``, ``publish``, ``survey``, and ``diff`` and ``bisect``, which compare some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.completion import complete_implementation
from attncheck.cli.output import (
    make_document,
    print_and_exit,
    read_frames_of_runs,
    split_names,
    write_and_show,
    write_ci_outputs,
)
from attncheck.cli.parameters import AnyRunFolders, AsJson, OutputFormats, RunFolders, output_option
from attncheck.common.errors import ExitCode, ResultsError, UsageError
from attncheck.settings.options import DtypeNames, FunctionOptions, MinJudged, Quiet

if TYPE_CHECKING:
    from attncheck.reports.json_documents import Document
    from attncheck.results.format import Row


@app.command(
    epilog=examples_epilog(
        "attncheck report results/latest",
        "attncheck report results/before results/after --output results/compared",
    )
)
def report(
    runs: RunFolders,
    output: Annotated[
        Path | None, output_option("FOLDER", "Folder for the report. Default, for a single run: RUN/report.")
    ] = None,
    min_judged: MinJudged = None,
    *,
    outlets: OutputFormats,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the report of one or several runs. Nothing is computed again."""
    from attncheck.results.format import REPORT_FOLDER
    from attncheck.results.reader import find_runs

    runs = find_runs(runs)
    if output is None:
        if len(runs) > 1:
            raise UsageError("several runs are compared into a folder of their own: name it with --output")
        output = runs[0] / REPORT_FOLDER
    frames = read_frames_of_runs(runs, min_judged)
    from attncheck.reports.summary import comparison_exit_code

    code = comparison_exit_code(frames)
    place = write_and_show(frames, runs[0], output, code, as_json="report" if as_json else "", quiet=quiet)
    write_ci_outputs(frames, place, outlets, as_json=as_json)
    raise typer.Exit(code)


PUBLISHED_FOLDER = Path("reports/published")


@app.command(
    epilog=examples_epilog(
        "attncheck publish results/latest --published published",
        "attncheck publish --check results/latest --published published",
    )
)
def publish(
    runs: RunFolders,
    published: Annotated[
        Path,
        typer.Option("--published", "--output", "-o", metavar="FOLDER", help="Folder of the published comparison."),
    ] = PUBLISHED_FOLDER,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing, and exit with 1 if the verdicts differ from the published ones."),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Save a comparison as a baseline, or check a run against it."""
    from attncheck.results.reader import find_runs

    frames = read_frames_of_runs(find_runs(runs))
    from attncheck.common.wording import count_noun
    from attncheck.reports.comparison import VERDICTS, count_changes_text, find_drift, verdicts_of_frames
    from attncheck.reports.coverage import covered_by_others_sentences
    from attncheck.reports.summary import headline

    if not check:
        from attncheck.reports.comparison import publish_comparison as write

        path = write(frames, published)
        document = _baseline_document("publish", path, len(verdicts_of_frames(frames)), None)
        print_and_exit(document, [f"Published: {path}"], as_json=as_json, quiet=quiet)
    changes, compared, unpublished = find_drift(frames, published)
    new = f"{count_noun(unpublished, 'case')} of the run {'is' if unpublished == 1 else 'are'} not published."
    changed = count_changes_text(row["change"] for row in changes)
    _BaselineCheck(
        "publish",
        published / VERDICTS,
        "verdicts",
        changes,
        compared,
        [*covered_by_others_sentences(frames), *([new] if unpublished else [])],
        frames.problems,
        agreement=f"All {compared:,} verdicts are those published in {published / VERDICTS}.",
        heading=f"{changed}, compared with {published / VERDICTS}:",
        advice=f"The run: {headline(frames)}.\nIf the changes are intended, run the same command without --check, and "
        "commit the folder together with the change that caused them.",
    ).print_and_exit(as_json=as_json, quiet=quiet)


@app.command(
    epilog=examples_epilog(
        "attncheck survey results/latest --output survey",
        "attncheck survey --check results/latest --output survey",
    )
)
def survey(
    runs: AnyRunFolders = None,
    conventions: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The output of `attncheck conventions --json`."),
    ] = None,
    properties: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="A folder that `attncheck properties --output` wrote.")
    ] = None,
    findings: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder of findings, each a script.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the survey.")] = Path(
        "reports/published/survey"
    ),
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing, and exit with 1 if the runs differ from the survey."),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Add implementations to a saved comparison table.

    The table lists the features, the accuracy and the conventions of each implementation. Rows of other implementations
    and other versions stay in the folder.
    """
    from attncheck.common.wording import count_noun
    from attncheck.reports.coverage import covered_by_others_sentences
    from attncheck.reports.frames import make_frames
    from attncheck.reports.merge import merge_runs
    from attncheck.reports.survey import (
        Survey,
        count_properties,
        make_survey,
        read_findings,
        read_surveyed_conventions,
        survey_differences,
    )
    from attncheck.reports.survey_pages import read_survey, write_survey
    from attncheck.results.parts import read_property_rows
    from attncheck.results.reader import find_runs, read_runs

    if check and not runs:
        raise UsageError("--check: expected a run to compare with the survey")
    if not (runs or conventions or properties or findings):
        raise UsageError("nothing to add to the survey; expected a run, --conventions, --properties or --findings")
    survey, notes = Survey(), list[str]()
    for run in read_runs(find_runs(runs)) if runs else ():
        frames = make_frames(merge_runs([run], across=False))
        survey.update(make_survey(frames))
        notes += covered_by_others_sentences(frames)
    survey.update(Survey(meanings=[row for path in conventions or [] for row in read_surveyed_conventions(path)]))
    asked = [row for folder in properties or [] for row in _require_properties(folder, read_property_rows(folder))]
    survey.update(Survey(properties=count_properties(asked)))
    survey.findings = read_findings(findings) if findings is not None else []
    kept, number = read_survey(output, must_exist=check), len(survey.newest_versions())
    if not check:
        kept.update(survey)
        path = write_survey(kept, output)
        document = _baseline_document("survey", path, number, None)
        print_and_exit(document, [f"Survey: {path}"], as_json=as_json, quiet=quiet)
    _BaselineCheck(
        "survey",
        output,
        "counts",
        survey_differences(kept, survey),
        number,
        notes,
        agreement=f"{count_noun(number, 'implementation')} {'has' if number == 1 else 'have'} the counts of {output}.",
    ).print_and_exit(as_json=as_json, quiet=quiet)


def _require_properties(folder: Path, rows: list[Row]) -> list[Row]:
    if not rows:
        raise ResultsError(
            f"{folder} contains no properties; `attncheck properties IMPLEMENTATION --output {folder}` writes them"
        )
    return rows


class _BaselineCheck(NamedTuple):
    """A run compared with what is kept: rows of a table of changes, and what is said where there are none."""

    command: str
    path: Path
    table: str
    rows: Sequence[Mapping[str, Any]]
    compared: int
    notes: Sequence[str]
    problems: Sequence[str] = ()
    agreement: str = ""
    heading: str = ""
    advice: str = ""

    def print_and_exit(self, *, as_json: bool, quiet: bool) -> NoReturn:
        """Print what differs, or that nothing does, and end with 1 or 0."""
        from attncheck.reports.comparison import abbreviated_change_lines, change_lines

        for problem in self.problems:
            typer.echo(f"attncheck: {problem}", err=True)
        lines = [line for row in self.rows for line in change_lines(self.table, [row])]
        document = _baseline_document(self.command, self.path, self.compared, lines, [*self.problems, *self.notes])
        told = [self.agreement, *self.notes]
        if self.rows:
            told = [
                self.heading,
                *(f"  {line}" for line in abbreviated_change_lines(self.table, self.rows)),
                self.advice,
            ]
        print_and_exit(document, filter(None, told), as_json=as_json, quiet=quiet and not self.rows)


def _baseline_document(
    command: str, path: Path, compared: int, differences: Sequence[str] | None, notes: Sequence[str] = ()
) -> Document:
    """Return what was written, or, where there are ``differences`` or an empty list of them, what was checked."""
    from attncheck.common.wording import count_noun

    code = ExitCode.DISAGREE if differences else ExitCode.AGREE
    checked = f"{count_noun(len(differences or ()), 'difference')} from {path}"
    return make_document(
        command,
        code,
        f"{path} was written" if differences is None else checked,
        notes=notes,
        path=str(path),
        checked=differences is not None,
        compared=compared,
        differences=differences or (),
    )


_SIDE_HELP = "a results directory, or a folder of results directories, which are matched by label."


@app.command(
    epilog=examples_epilog(
        "attncheck diff results/before results/after",
        "attncheck diff results/before results/after --verbose",
        "attncheck diff results/before results/after --output results/difference",
    )
)
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Before: {_SIDE_HELP}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="After: the same.")],
    output: Annotated[
        Path | None, output_option("FOLDER", "Write diff.md and its frames (CSV and Parquet) to this folder.")
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every change.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compare two results. The exit code is 1 if something got worse, and 0 if nothing did."""
    from attncheck.reports.difference import compare_frames, difference_document, difference_lines, write_difference
    from attncheck.reports.frames import make_frames
    from attncheck.reports.merge import merge_runs
    from attncheck.results.reader import find_runs, read_runs, with_matching_labels

    sides = with_matching_labels(read_runs(find_runs([before])), read_runs(find_runs([after])))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    difference = compare_frames(frames[0], frames[1], (str(before), str(after)))
    path = write_difference(difference, output) if output else None

    written = [f"Difference: {path}"] if path and not quiet else []
    lines = [*difference_lines(difference, quiet=quiet, verbose=verbose), *written]
    print_and_exit(difference_document(difference, frames[1]), lines, as_json=as_json)


@app.command(
    epilog=examples_epilog(
        "attncheck bisect onnxruntime.attention --versions 1.25.0,1.26.0,1.27.0",
        "attncheck bisect my_kernel.py:attention --package numpy --versions 2.3.0,2.4.0",
    )
)
def bisect(
    implementation: Annotated[
        str,
        typer.Argument(
            metavar="IMPLEMENTATION",
            help="The implementation to run, such as torch.sdpa or file.py:function.",
            autocompletion=complete_implementation,
        ),
    ],
    cases: Annotated[list[str] | None, typer.Argument(metavar="CASES", help="Cases, as for check.")] = None,
    versions: Annotated[
        str, typer.Option(metavar="VERSIONS", help="The releases, oldest first, comma-separated.", show_default=False)
    ] = "",
    package: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The package whose releases are installed. Default: the package that reports name."
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="REQUIREMENT", help="Package to install with each release, such as 'numpy<2'."),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Results folder, with one subfolder per release.")
    ] = Path("results/bisect"),
    as_json: AsJson = False,
) -> None:
    """Run old releases to find the one that changed each verdict.

    Every release is installed in a separate environment in your cache folder. The exit code is 1 if a release made
    something worse, and 3 if a release could not be installed or run.
    """
    from attncheck.cli.releases import Release, ReleaseError, ensure_release_installed, run_check_of_release
    from attncheck.reports.difference import Bisection, bisection_document, bisection_lines, read_frames

    asked = split_names([versions])
    if len(asked) < 2:
        raise UsageError("--versions: expected at least two releases, such as --versions 1.0,1.1,2.0")
    distribution = package or _distribution_name(implementation)
    arguments = [*(cases or []), "--implementation", implementation]
    for option, value in (
        ("--dtype", ",".join(dtypes)),
        ("--framework", function.framework),
        ("--signature", function.signature),
        *(("--declare", text) for text in function.declare),
    ):
        arguments += [option, value] if value else []
    bisection = Bisection(distribution)
    for version in asked:
        release = Release(distribution, version, tuple(beside or ()))
        try:
            typer.echo(f"attncheck: {distribution} {version}: installing", err=True)
            ensure_release_installed(release)
            typer.echo(f"attncheck: {distribution} {version}: checking", err=True)
            run_check_of_release(release, arguments, output / version)
            bisection.add(version, read_frames(output / version))
        except ReleaseError as error:
            bisection.missed[version] = str(error)
    code = ExitCode.NOT_RUN if bisection.missed else ExitCode.DISAGREE if bisection.has_worsened else ExitCode.AGREE
    print_and_exit(bisection_document(bisection, code), bisection_lines(bisection), as_json=as_json)


def _distribution_name(implementation: str) -> str:
    """Return the distribution that an implementation's version is of. Raises ``UsageError`` for one's own."""
    from attncheck.execution.implementations import processor_implementations

    named = [item for item in processor_implementations() if implementation in (item.name, item.entry.name)]
    if not named:
        raise UsageError(f"--package: expected the distribution whose releases {implementation} is run with")
    return named[0].package
