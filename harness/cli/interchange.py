"""Commands that exchange cases with others: ``export``, ``import`` and ``vectors``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.output import (
    make_document,
    print_and_exit,
    read_frames_of_runs,
    split_names,
    write_and_show,
)
from attncheck.cli.parameters import AsJson
from attncheck.common.errors import ExitCode, OnnxDataError, UsageError
from attncheck.settings.options import DtypeNames, Quiet, RunOptions, TagNames, UseCache, open_store


class ExchangeFormat(StrEnum):
    """Whose test data they are."""

    ONNX = "onnx"


CaseNames = Annotated[
    list[str] | None, typer.Argument(metavar="[CASES]...", help="Cases: files, folders or globs, as for check.")
]
FormatName = Annotated[ExchangeFormat, typer.Argument(metavar="FORMAT", help="onnx: ONNX's backend test data.")]


@app.command("export", epilog=examples_epilog("attncheck export onnx onnx_tests attention --dtype float32"))
def export_data(
    form: FormatName,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the tests. Nothing there is overwritten.")
    ],
    cases: CaseNames = None,
    dtypes: DtypeNames = (),
    tags: TagNames = (),
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Write the exact answer even if a case has stored outputs."),
    ] = False,
    cache: UseCache = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write cases as test data.

    An ONNX backend test is a model of one operator with inputs and outputs. The outputs are the exact answer, rounded
    once to the dtype. If a case has stored outputs, for example after an import, these are written unchanged. The
    command lists the cases that it leaves out, with the reasons.
    """
    from attncheck.onnx_data import require_onnx
    from attncheck.settings.config import select_configured_cases

    require_onnx(f"export {form.value}")
    from attncheck.onnx_data.exporting import describe_export, export_tests

    store = open_store(cache, 2.0)
    selection = select_configured_cases(RunOptions(cases=tuple(cases or ()), dtypes=dtypes, tags=tags), store)
    exported = export_tests(selection.cases, dtypes, folder, store, exact=exact)
    written = {"folder": str(folder), "written": len(exported.tests), "left_out": exported.left_out}
    _print_and_exit("export", list(describe_export(exported)), written, as_json=as_json, quiet=quiet)


@app.command("import", epilog=examples_epilog("attncheck import onnx onnx_tests --output onnx_cases"))
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

    ONNX backend tests of a single Attention or Softmax operator become cases, which expect the outputs of the tests.
    The command lists the tests that it leaves out, with the reasons.
    """
    from attncheck.onnx_data import require_onnx

    require_onnx(f"import {form.value}")
    from attncheck.onnx_data.importing import describe_import, import_tests
    from attncheck.reports.terminal import print_lines

    imported = import_tests(folder, output)
    lines = list(describe_import(imported))
    if not imported.files:
        print_lines([] if as_json or quiet else lines)
        raise OnnxDataError(f"{folder}: none of its tests is a case")
    written = {"folder": str(output), "written": sum(imported.files.values()), "left_out": imported.left_out}
    _print_and_exit("import", lines, written, as_json=as_json, quiet=quiet)


def _print_and_exit(
    command: str, lines: Sequence[str], written: Mapping[str, Any], *, as_json: bool, quiet: bool
) -> NoReturn:
    """Show what a command wrote: the first line is its answer, the others are notes."""
    document = make_document(command, ExitCode.AGREE, lines[0], notes=lines[1:], **written)
    print_and_exit(document, lines, as_json=as_json, quiet=quiet)


class VectorsAction(StrEnum):
    """Actions on vectors."""

    EXPORT = "export"
    VERIFY = "verify"


@app.command(epilog=examples_epilog("attncheck vectors export my_vectors attention --dtype float32"))
def vectors(
    action: Annotated[VectorsAction, typer.Argument(help="export or verify.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the vectors.")],
    cases: CaseNames = None,
    dtypes: DtypeNames = (),
    tags: TagNames = (),
    rounding_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Export: rounding models whose bounds are written, comma-separated. Default: native, eager and fused. "
            "Verify: the rounding model of the outputs, such as float16=fused.",
        ),
    ] = None,
    outputs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Verify: an .npz or .safetensors file of outputs.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Verify: folder of results.")] = Path(
        "results/vectors"
    ),
    cache: UseCache = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write cases as vectors, or judge outputs of them.

    Vectors are inputs, exact answers and error bounds in files that any language can read. Compute outputs from them
    anywhere, in any language; `verify` judges these outputs like those of any implementation.
    """
    from attncheck.interchange.vectors import RecordedOutputs, judge_recorded
    from attncheck.reports.summary import comparison_exit_code
    from attncheck.results.format import REPORT_FOLDER
    from attncheck.settings.config import select_configured_cases

    store = open_store(cache, 2.0)
    selection = select_configured_cases(RunOptions(cases=tuple(cases or ()), dtypes=dtypes, tags=tags), store)
    if action is VectorsAction.VERIFY:
        if outputs is None:
            raise UsageError("vectors verify: name the file of outputs with --outputs")
        recorded = RecordedOutputs(folder, outputs, _models_by_dtype(split_names(rounding_model)))
        judge_recorded(recorded, selection, dtypes, output)
        frames = read_frames_of_runs([output])
        code, command = comparison_exit_code(frames), "vectors verify" if as_json else ""
        write_and_show(frames, output, output / REPORT_FOLDER, code, as_json=command, quiet=quiet)
        raise typer.Exit(code)
    from attncheck.interchange.vectors import DEFAULT_MODELS, describe_export, export_vectors

    models = split_names(rounding_model) or list(DEFAULT_MODELS)
    exported = export_vectors(selection.cases, dtypes, models, folder, store)
    fields = {"folder": str(folder), "written": exported.written_count, "left_out": dict(exported.omitted_by_reason)}
    lines = list(describe_export(exported))
    document = make_document("vectors export", ExitCode.AGREE, "; ".join(lines), **fields)
    print_and_exit(document, [*lines, f"Vectors: {folder}"], as_json=as_json, quiet=quiet)


def _models_by_dtype(texts: list[str]) -> dict[str, str]:
    """Read what outputs are judged by, as float16=fused. Raises ``UsageError``."""
    from attncheck.spec import ROUNDING_MODELS

    models = {}
    for text in texts:
        dtype, is_there, model = text.partition("=")
        if not is_there or dtype not in ROUNDING_MODELS.get(model, ()):
            wanted = "a dtype and one of its rounding models, as float16=fused"
            raise UsageError(f"--rounding-model {text}: expected {wanted}")
        models[dtype] = model
    return models
