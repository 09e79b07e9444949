"""Commands about one case on one implementation: ``explain`` and ``repro``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.harness.cli.app import app
from attncheck.harness.cli.options import CaseName, DtypeName, Framework, ImplementationName, TimeLimit
from attncheck.harness.cli.work import select_one
from attncheck.harness.errors import ExitCode, OutputError, UsageError
from attncheck.harness.verdicts import Verdict


@app.command()
def explain(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = "float32",
    framework: Framework = None,
    time_limit: TimeLimit = 60.0,
) -> None:
    """Compute one case again and tell, stage by stage, where an implementation goes wrong."""
    from attncheck.harness.explain import explain_case, find_implementation
    from attncheck.harness.running.executor import Limits
    from attncheck.reports.explanation import print_explanation

    found, selection = select_one(case, dtype)
    explanation = explain_case(
        found, find_implementation(implementation, framework), dtype, Limits(case_seconds=time_limit)
    )
    print_explanation(explanation, selection.tags)
    if explanation.failure:
        raise typer.Exit(ExitCode.NOT_RUN)
    raise typer.Exit(ExitCode.DISAGREE if explanation.begins_at else ExitCode.AGREE)


@app.command()
def repro(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = "float32",
    framework: Framework = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of the script; named after the case if absent.")
    ] = None,
) -> None:
    """Write a script that shows one case on one implementation, with NumPy and that framework alone."""
    from attncheck.harness.explain import explain_case, find_implementation
    from attncheck.harness.repro import repro_script
    from attncheck.harness.running.executor import Limits
    from attncheck.reports.explanation import explanation_text

    found, selection = select_one(case, dtype)
    chosen = find_implementation(implementation, framework)
    explanation = explain_case(found, chosen, dtype, Limits())
    if explanation.failure.startswith(Verdict.UNSUPPORTED):
        raise UsageError(f"{chosen.name}, {found.id} in {dtype}: {explanation.failure}; there is nothing to reproduce")
    story = explanation_text(explanation, selection.tags)
    path = output or Path(f"repro_{found.id.rpartition('/')[2][:60]}_{chosen.name}_{dtype}.py".replace("-", "_"))
    try:
        path.write_text(repro_script(found, chosen, dtype, explanation.judgements, story), encoding="utf-8")
    except OSError as error:
        raise OutputError.of(path, error) from None
    typer.echo(f"{path}: run it with python; it ends with 1 where it finds an error, with 0 where it finds none")
