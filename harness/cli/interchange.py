"""Cases as the test data of others, and back: ``export`` and ``import``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import AsJson, DtypeNames, Quiet, TagNames, UseCache
from attncheck.cli.output import print_document
from attncheck.cli.shared import select, split, store_of
from attncheck.errors import ExitCode, OnnxDataError

if TYPE_CHECKING:
    from attncheck.reports.machine.other_documents import TestDataDocument


class Format(StrEnum):
    """Whose test data they are."""

    ONNX = "onnx"


FormatName = Annotated[Format, typer.Argument(metavar="FORMAT", help="onnx: ONNX's backend test data.")]


@app.command("export", epilog=examples("attncheck export onnx onnx_tests attention --dtype float32"))
def export_data(
    form: FormatName,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the tests. Nothing there is overwritten.")
    ],
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASES]...", help="Which cases, as with check.", show_default=False)
    ] = None,
    dtype: DtypeNames = None,
    tag: TagNames = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Write the exact answer also in the place of outputs that a case has in a file."),
    ] = False,
    cache: UseCache = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write cases as test data.

    ONNX's backend tests are a model of one operator with inputs and outputs. The outputs are the exact answer, rounded
    once to the dtype; those that a case has in a file, as after an import, are written as they are. Says what is left
    out, and why.
    """
    from attncheck.onnx_data import require_onnx

    require_onnx(f"export {form.value}")
    from attncheck.onnx_data.exporting import export_tests, lines_of

    store = store_of(cache, 2.0)
    selection = select(list(cases or []), tag, dtype, None, None, None, store)
    exported = export_tests(selection.cases, split(dtype), folder, store, exact=exact)
    said = _Said("export", folder, len(exported.tests), exported.left_out, tuple(lines_of(exported)))
    _say(said, as_json=as_json, quiet=quiet)


@app.command("import", epilog=examples("attncheck import onnx onnx_tests --output onnx_cases"))
def import_data(
    form: FormatName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of tests, or one test.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the cases. Nothing there is overwritten."),
    ] = Path("onnx_cases"),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Read test data as cases.

    Of ONNX's backend tests those of one operator Attention or Softmax become cases, and their outputs what the cases
    expect. Says what is left out, and why.
    """
    from attncheck.onnx_data import require_onnx

    require_onnx(f"import {form.value}")
    from attncheck.onnx_data.importing import import_tests, lines_of

    imported = import_tests(folder, output)
    if not imported.files:
        if not as_json:
            _say(_Said("import", output, 0, imported.left_out, tuple(lines_of(imported))), as_json=False, quiet=quiet)
        raise OnnxDataError(f"{folder}: none of its tests is a case")
    said = _Said("import", output, sum(imported.files.values()), imported.left_out, tuple(lines_of(imported)))
    _say(said, as_json=as_json, quiet=quiet)


@dataclass(frozen=True)
class _Said:
    """What a command wrote, for people and for machines."""

    command: str
    folder: Path
    written: int
    left_out: Mapping[str, Sequence[str]]
    lines: Sequence[str]


def _say(said: _Said, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_document(_document(said))
    elif not quiet:
        for line in said.lines:
            typer.echo(line)


def _document(said: _Said) -> TestDataDocument:
    from attncheck.reports.machine.other_documents import TestDataDocument
    from attncheck.reports.machine.text import header

    return TestDataDocument(
        attncheck=header(said.command),
        exit_code=int(ExitCode.AGREE),
        answer=said.lines[0],
        failures=[],
        next=[],
        notes=list(said.lines[1:]),
        folder=str(said.folder),
        written=said.written,
        left_out=said.left_out,
    )
