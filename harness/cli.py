"""The command line: what to run is read from the arguments, everything else is done elsewhere.

Whatever takes time to import is imported by the command that needs it; ``attncheck --help`` imports no framework, and
neither NumPy nor pandas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.harness.cli_options import (
    AsJson,
    BackendNames,
    Divergences,
    DtypeNames,
    Framework,
    ImplementationNames,
    Keep,
    KeepArrays,
    Label,
    Listed,
    Output,
    Patterns,
    Quiet,
    TagNames,
    Threads,
    TimeLimit,
)
from attncheck.harness.errors import AttncheckError, ExitCode, OutputError, UsageError

if TYPE_CHECKING:
    from attncheck.harness.reading.selection import Selection
    from attncheck.harness.run import RunSummary
    from attncheck.harness.running.implementations import Chosen
    from attncheck.reports.frames import Frames

app = typer.Typer(
    name="attncheck",
    help="The conformance harness for attention: the same cases through every framework, number by number.",
    epilog="Exit codes: 0 agree, 1 disagree, 2 bad usage or bad case, 3 something could not be run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


DEFAULT_OUTPUT = Path("results/latest")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed_version

        typer.echo(f"attncheck {installed_version('attncheck')}")
        raise typer.Exit


@app.command()
def check(
    cases: Patterns = None,
    backend: BackendNames = None,
    implementation: ImplementationNames = None,
    framework: Framework = None,
    divergences: Divergences = None,
    dtype: DtypeNames = None,
    tag: TagNames = None,
    output: Output = DEFAULT_OUTPUT,
    label: Label = "local",
    keep_arrays: KeepArrays = Keep.DISAGREEING,
    time_limit: TimeLimit = 60.0,
    threads: Threads = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run cases, judge them, write a report, and say whether the frameworks agree."""
    summary = _run(
        cases,
        _choose(backend, implementation, framework),
        divergences,
        dtype,
        tag,
        output,
        label,
        keep_arrays,
        time_limit,
        threads,
        as_json,
        quiet,
    )
    from attncheck.harness.results.writer import REPORT_FOLDER

    frames = _frames([output])
    _show(frames, _write(frames, output / REPORT_FOLDER), summary.exit_code, as_json=as_json, quiet=quiet)
    raise typer.Exit(summary.exit_code)


@app.command()
def run(
    cases: Patterns = None,
    backend: BackendNames = None,
    implementation: ImplementationNames = None,
    framework: Framework = None,
    divergences: Divergences = None,
    dtype: DtypeNames = None,
    tag: TagNames = None,
    output: Output = DEFAULT_OUTPUT,
    label: Label = "local",
    keep_arrays: KeepArrays = Keep.ALL,
    time_limit: TimeLimit = 60.0,
    threads: Threads = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run and judge cases and write the results, for `attncheck report` to compare with other runs."""
    summary = _run(
        cases,
        _choose(backend, implementation, framework),
        divergences,
        dtype,
        tag,
        output,
        label,
        keep_arrays,
        time_limit,
        threads,
        as_json,
        quiet,
    )
    if as_json:
        typer.echo((output / "summary.json").read_text(encoding="utf-8"), nl=False)
    elif not quiet:
        typer.echo(f"{summary.cases} cases, {summary.evaluations} evaluations; results in {output}")
    raise typer.Exit(summary.exit_code)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Results directories, or folders of results directories.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the report; RUN/report for a single run if absent."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare one or several runs without running anything again, and write the report."""
    from attncheck.harness.results.reader import find_runs
    from attncheck.harness.results.writer import REPORT_FOLDER

    runs = find_runs(runs)
    if output is None:
        if len(runs) > 1:
            raise UsageError("several runs are compared into a folder of their own: name it with --output")
        output = runs[0] / REPORT_FOLDER
    frames = _frames(runs)
    from attncheck.reports.answer import exit_code_of

    code = exit_code_of(frames)
    _show(frames, _write(frames, output), code, as_json=as_json, quiet=quiet)
    raise typer.Exit(code)


@app.command()
def explain(
    case: Annotated[str, typer.Argument(help="Id of a case, a glob that only one matches, or a file with one case.")],
    implementation: Annotated[
        str, typer.Argument(help="Implementation or backend, such as torch.sdpa or torch; or file.py:function.")
    ],
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="One dtype of the case.")] = "float32",
    framework: Framework = None,
    time_limit: TimeLimit = 60.0,
) -> None:
    """Compute one case again and tell, stage by stage, where an implementation goes wrong."""
    from attncheck.harness.explain import explain_case, find_case, find_implementation
    from attncheck.harness.running.executor import Limits
    from attncheck.reports.explanation import print_explanation

    selection = _select([case], None, [dtype])
    if selection.faults:
        _print_faults(selection)
        raise typer.Exit(ExitCode.BAD_INPUT)
    found = find_case(selection.cases, case)
    explanation = explain_case(
        found, find_implementation(implementation, framework), dtype, Limits(case_seconds=time_limit)
    )
    print_explanation(explanation, selection.tags)
    if explanation.failure:
        raise typer.Exit(ExitCode.NOT_RUN)
    raise typer.Exit(ExitCode.DISAGREE if explanation.begins_at else ExitCode.AGREE)


@app.command()
def repro(
    case: Annotated[str, typer.Argument(help="Id of a case, a glob that only one matches, or a file with one case.")],
    implementation: Annotated[
        str, typer.Argument(help="Implementation or backend, such as torch.sdpa or torch; or file.py:function.")
    ],
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="One dtype of the case.")] = "float32",
    framework: Framework = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of the script; named after the case if absent.")
    ] = None,
) -> None:
    """Write a script that shows one case on one implementation, with NumPy and that framework alone."""
    from attncheck.harness.explain import explain_case, find_case, find_implementation
    from attncheck.harness.repro import repro_script
    from attncheck.harness.running.executor import Limits
    from attncheck.reports.explanation import explanation_text

    selection = _select([case], None, [dtype])
    if selection.faults:
        _print_faults(selection)
        raise typer.Exit(ExitCode.BAD_INPUT)
    found, chosen = find_case(selection.cases, case), find_implementation(implementation, framework)
    explanation = explain_case(found, chosen, dtype, Limits())
    story = explanation_text(explanation, selection.tags)
    path = output or Path(f"repro_{found.id.rpartition('/')[2][:60]}_{chosen.name}_{dtype}.py".replace("-", "_"))
    try:
        path.write_text(repro_script(found, chosen, dtype, explanation.judgements, story), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"{path}: run it with python; it ends with 1 where it finds an error, with 0 where it finds none")


@app.command()
def mutants(
    cases: Patterns = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: each case's own, then fresh ones.")] = 1,
    topic: Annotated[list[str] | None, typer.Option(help="Only faults of these topics.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the catalogue of faulty and honest variants: which cases catch which fault, and what survives."""
    from attncheck.harness.mutants.score import run_mutants, subjects_of
    from attncheck.reports.mutation import as_record, print_mutation

    selection = _select(cases, None, None)
    _print_faults(selection)
    frames = run_mutants(selection.cases, tuple(range(seeds)), subjects=subjects_of(_split(topic)))
    if as_json:
        typer.echo(json.dumps(as_record(frames), indent=2, ensure_ascii=False))
    else:
        print_mutation(frames)
    if selection.faults:
        raise typer.Exit(ExitCode.BAD_INPUT)
    raise typer.Exit(ExitCode.DISAGREE if len(frames.survivors) or len(frames.flagged) else ExitCode.AGREE)


@app.command("list")
def list_(
    what: Annotated[Listed, typer.Argument(help="What to list.")],
    cases: Patterns = None,
    tag: TagNames = None,
    as_json: AsJson = False,
) -> None:
    """List cases, backends, implementations or tags."""
    from attncheck.harness import listings

    of_code = {Listed.BACKENDS: listings.list_backends, Listed.IMPLEMENTATIONS: listings.list_implementations}
    if what in of_code:
        records = of_code[what]()
    else:
        selection = _select(cases, tag, None)
        records = listings.list_cases(selection) if what is Listed.CASES else listings.list_tags(selection)
        _print_faults(selection)
    if as_json:
        typer.echo(json.dumps(records, indent=2, ensure_ascii=False))
    else:
        for record in records:
            typer.echo("  ".join(str(value) for value in record.values()))
    if what not in of_code and selection.faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


@app.command()
def schema(
    tags: Annotated[bool, typer.Option("--tags", help="Of tags.yaml instead of a case file.")] = False,
) -> None:
    """Print the JSON Schema of case files, for editors and checkers."""
    from attncheck.harness.reading.schema import case_schema, tag_schema

    typer.echo(tag_schema() if tags else case_schema(), nl=False)


def main() -> None:
    """Run the command line; every failure of the user's is one line, and its exit code."""
    try:
        app(standalone_mode=True)
    except AttncheckError as error:
        typer.echo(f"attncheck: {error}", err=True)
        sys.exit(error.exit_code)


def _run(
    patterns: list[str] | None,
    chosen: Chosen,
    divergences: list[Path] | None,
    dtype: list[str] | None,
    tag: list[str] | None,
    output: Path,
    label: str,
    keep_arrays: Keep,
    time_limit: float,
    threads: int,
    as_json: bool,
    quiet: bool,
) -> RunSummary:
    """Select, run and judge; print what is wrong with case files; end the program where nothing can be run."""
    from attncheck.harness.config import known_divergences
    from attncheck.harness.progress import progress_bar
    from attncheck.harness.run import Settings, run_cases
    from attncheck.harness.running.executor import Limits

    selection = _select(patterns, tag, dtype)
    _print_faults(selection)
    for name in chosen.missing:
        typer.echo(f"attncheck: {name} could not run: asked for by name, not installed", err=True)
    settings = Settings(
        output=output,
        label=label,
        dtypes=tuple(_split(dtype)),
        keep_all_arrays=keep_arrays is Keep.ALL,
        limits=Limits(case_seconds=time_limit, threads=threads),
        command=["attncheck", *sys.argv[1:]],
        divergences=known_divergences([item.entry.name for item in chosen.implementations], divergences or ()),
        complete=not (patterns or tag or dtype),
    )
    try:
        with progress_bar(visible=not (quiet or as_json)) as on_progress:
            return run_cases(selection.cases, chosen, settings, selection.faults, on_progress)
    except KeyboardInterrupt:
        typer.echo(
            f"attncheck: interrupted; what was judged is in {output}, `attncheck report {output}` shows it", err=True
        )
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _choose(backend: list[str] | None, implementation: list[str] | None, framework: str | None) -> Chosen:
    from attncheck.harness.running.choice import choose

    return choose(_split(backend) or None, _split(implementation), framework)


def _select(patterns: list[str] | None, tag: list[str] | None, dtype: list[str] | None) -> Selection:
    from attncheck.harness.config import read_config
    from attncheck.harness.reading.selection import select_cases
    from attncheck.harness.vocabulary import DTYPES

    for name in _split(dtype):
        if name not in DTYPES:
            raise UsageError(f"unknown dtype {name!r}; expected {', '.join(DTYPES)}")
    return select_cases(patterns or read_config().own_and_bundled, _split(tag), _split(dtype))


def _print_faults(selection: Selection) -> None:
    for fault in selection.faults:
        typer.echo(f"attncheck: {fault}", err=True)


def _split(names: list[str] | None) -> list[str]:
    """Split a,b and repeated options alike."""
    return [part for name in names or () for part in name.split(",") if part]


def _frames(runs: list[Path]) -> Frames:
    from attncheck.harness.merge import merge_runs
    from attncheck.harness.results.reader import read_runs
    from attncheck.reports.frames import make_frames

    return make_frames(merge_runs(read_runs(runs)))


def _write(frames: Frames, directory: Path) -> Path:
    from attncheck.reports.write import write_report

    return write_report(frames, directory)


def _show(frames: Frames, path: Path, code: ExitCode, *, as_json: bool, quiet: bool) -> None:
    from attncheck.reports.terminal import as_record, print_summary

    if as_json:
        typer.echo(json.dumps(as_record(frames, path, code), indent=2, ensure_ascii=False))
    else:
        print_summary(frames, path, quiet=quiet)
