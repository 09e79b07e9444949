"""``show``: one case in the terminal, or as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app
from attncheck.cli.options import CaseName
from attncheck.cli.shared import checked_in, dtype_of, select_one, split


@app.command()
def show(
    case: CaseName,
    dtype: Annotated[
        str | None, typer.Option("--dtype", "-d", help="One dtype of the case; its first if absent.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option("--stage", "-s", help="Only these stages and inputs, apart by commas.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Draw it into this file instead: .png, .svg or .pdf.", show_default=False)
    ] = None,
) -> None:
    """Show a case: what it asks, its inputs, and the exact value of every stage, a document's numbers beside them."""
    from attncheck.reports.show import image_format, print_case, save_case, work_out

    if save is not None:
        image_format(save)  # before anything takes time
    found, selection = select_one(case, checked_in(None))
    shown = work_out(found, dtype_of(found, dtype or found.dtypes[0]), split(stage))
    if save is None:
        print_case(shown, selection.tags)
    else:
        save_case(shown, save)
        typer.echo(f"{save}: {found.name}")
