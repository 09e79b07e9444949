"""Cases as files for other languages: ``vectors``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import AsJson, DtypeNames, Quiet, TagNames, UseCache
from attncheck.cli.output import print_document
from attncheck.cli.shared import ReportPlace, frames_of, select, show_answer, split, store_of, write_frames
from attncheck.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from attncheck.reports.machine.other_documents import ExportDocument
    from attncheck.vectors.export import Exported


class Action(StrEnum):
    """What is done with vectors."""

    EXPORT = "export"
    VERIFY = "verify"


@app.command(
    epilog=examples(
        "attncheck vectors export my_vectors attention --dtype float32",
    )
)
def vectors(
    action: Annotated[Action, typer.Argument(help="export or verify.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the vectors.")],
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASES]...", help="Which cases, as with check.", show_default=False)
    ] = None,
    dtype: DtypeNames = None,
    tag: TagNames = None,
    rounding_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Export: rounding models whose bounds are written, comma-separated. Default: native, eager and fused. "
            "Verify: what the outputs are judged by, such as float16=fused.",
            show_default=False,
        ),
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Verify: an .npz or .safetensors file of outputs.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Verify: folder of results.")] = Path(
        "results/vectors"
    ),
    cache: UseCache = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write cases as vectors, or judge outputs of them.

    Vectors are inputs, exact answers and error bounds in files that any language reads. Outputs that were computed of
    them, anywhere, are judged as those of any implementation.
    """
    from attncheck.reports.answer import exit_code_of
    from attncheck.results.format import REPORT_FOLDER
    from attncheck.vectors.recorded import RecordedOutputs
    from attncheck.vectors.verify import run_recorded

    store = store_of(cache, 2.0)
    selection = select(list(cases or []), tag, dtype, None, None, None, store)
    if action is Action.VERIFY:
        if outputs is None:
            raise UsageError("vectors verify: name the file of outputs with --outputs")
        recorded = RecordedOutputs(folder, outputs, _models_by_dtype(split(rounding_model)))
        run_recorded(recorded, selection, split(dtype), output)
        frames = frames_of([output])
        code = exit_code_of(frames)
        show_answer(
            frames,
            ReportPlace(output, write_frames(frames, output / REPORT_FOLDER)),
            code,
            as_json="vectors verify" if as_json else "",
            quiet=quiet,
        )
        raise typer.Exit(code)
    from attncheck.vectors.export import DEFAULT_MODELS, export_vectors, lines_of

    models = split(rounding_model) or list(DEFAULT_MODELS)
    exported = export_vectors(selection.cases, split(dtype), models, folder, store)
    if as_json:
        print_document(_exported_document(exported, folder))
    elif not quiet:
        for line in lines_of(exported):
            typer.echo(line)
        typer.echo(f"Vectors: {folder}")


def _exported_document(exported: Exported, folder: Path) -> ExportDocument:
    from attncheck.reports.machine.other_documents import ExportDocument
    from attncheck.reports.machine.text import header
    from attncheck.vectors.export import lines_of

    return ExportDocument(
        attncheck=header("vectors export"),
        exit_code=int(ExitCode.AGREE),
        answer="; ".join(lines_of(exported)),
        failures=[],
        next=[],
        notes=[],
        folder=str(folder),
        written=exported.written,
        left_out=dict(exported.left_out),
    )


def _models_by_dtype(given: list[str]) -> dict[str, str]:
    """Read what outputs are judged by, as float16=fused. Raises ``UsageError``."""
    from attncheck.spec import ROUNDING_MODELS

    found = {}
    for each in given:
        dtype, is_there, model = each.partition("=")
        if not is_there or dtype not in ROUNDING_MODELS.get(model, ()):
            raise UsageError(
                f"--rounding-model {each}: expected a dtype and one of its rounding models, as float16=fused"
            )
        found[dtype] = model
    return found
