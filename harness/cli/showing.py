"""``show``: one case in the terminal, or as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import AsJson, CaseName
from attncheck.cli.output import print_document
from attncheck.cli.shared import checked_in, dtype_of, select_one, split


@app.command(
    epilog=examples(
        "attncheck show 'documents/base_r_vignette/four-words-*'",
        "attncheck show 'attention/a-causal-row-sees-*' -s weights --save case.png",
    )
)
def show(
    case: CaseName,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", "-d", metavar="DTYPE", help="One dtype of the case. Default: its first.", show_default=False
        ),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", "-s", metavar="NAMES", help="Show only these stages and inputs, comma-separated."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the case into this file instead: .png, .svg or .pdf.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a case with its inputs and its exact stages.

    Numbers that a document prints stand beside the exact ones.
    """
    from attncheck.reports.show import image_format, print_case, save_case, work_out

    if save is not None:
        image_format(save)  # before anything takes time
    found, selection = select_one(case, checked_in(None))
    shown = work_out(found, dtype_of(found, dtype or found.dtypes[0]), split(stage))
    if save is not None:
        save_case(shown, save)
    if as_json:
        from attncheck.reports.machine.of_cases import case_document

        print_document(case_document(shown, None if save is None else str(save)))
    elif save is None:
        print_case(shown, selection.tags)
    else:
        typer.echo(f"{save}: {found.name}")
