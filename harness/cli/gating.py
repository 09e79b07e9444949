"""The command ``gate``: may a kernel that nobody has read be merged?"""

from __future__ import annotations

import re
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.output import print_and_exit, read_frames_of_runs, write_frames
from attncheck.cli.parameters import AsJson, ImplementationName, Isa, output_option
from attncheck.common.errors import UsageError
from attncheck.settings.options import FunctionOptions, Quiet, RunOptions

_UNITS = {"s": 1, "m": 60, "h": 3600}
_LEAST_SECONDS = 5.0
"""The shortest budget."""
_GATE_RESULTS = Path("results/gate")


def read_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s or 10m. Raises ``UsageError``.

    Example:
        >>> read_duration("90s"), read_duration("1.5m"), read_duration("20")
        (90.0, 90.0, 20.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--budget {text}: expected a duration, such as 90s or 10m")
    seconds = float(match[1]) * _UNITS[match[2] or "s"]
    if seconds < _LEAST_SECONDS:
        raise UsageError(f"--budget {text}: expected at least {_LEAST_SECONDS:g}s")
    return seconds


@app.command(
    epilog=examples_epilog(
        "attncheck gate my_kernel.py:attention", "attncheck gate my_kernel.py:attention --budget 30s --no-delegation"
    )
)
def gate(
    implementation: ImplementationName,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="The time that the gate takes at most, such as 10s, 90s or 10m.")
    ] = "90s",
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="The seed of the problems. Default: a new one, which is printed.",
            show_default=False,
        ),
    ] = None,
    no_delegation: Annotated[
        bool, typer.Option("--no-delegation", help="Refuse a kernel that computes by calling another attention.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A reference as KernelBench has it: a file with Model, get_inputs and get_init_inputs. IMPLEMENTATION "
            "is then a file with ModelNew, which is judged by the operation that Model computes.",
            show_default=False,
        ),
    ] = None,
    *,
    function: FunctionOptions,
    output: Annotated[
        Path, output_option("FOLDER", "Folder for the results. Default: results/gate. An earlier run is replaced.")
    ] = _GATE_RESULTS,
    isa: Isa = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Decide if a kernel that nobody has read may be merged.

    The standard cases run first. Then the kernel is called in processes that do not show that it is tested: with
    problems from a new seed, thousands of times, in other sizes, layouts, threads and environments. The exit code is 0
    if nothing speaks against merging, 1 if something does, and 3 if too little could be judged.
    """
    begun = time.monotonic()
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.gating.run import GateRequest, run_gate
    from attncheck.results.format import REPORT_FOLDER
    from attncheck.showing.gate_page import write_gate_report
    from attncheck.showing.probes import gate_document, gate_lines

    chosen_seed = secrets.randbits(32) if seed is None else seed
    request = GateRequest(read_duration(budget), chosen_seed, no_delegation, begun)
    options = RunOptions(implementations=(implementation,), output=output, **function.as_keywords)

    def show(line: str) -> None:
        if not (quiet or as_json):
            typer.echo(f"attncheck: {line}", err=True)

    words = ["--model", str(model), implementation] if model else []
    if model is not None:
        from attncheck.gating.models import adapt_candidate

        folder = output.parent / f"{output.name}_adapter"
        implementation, description = adapt_candidate(Path(implementation), model, request.seed, folder)
        show(description)
    chosen = select_implementations(None, [implementation], limits=options.worker_limits, **function.as_keywords)
    if chosen.missing or len(chosen.implementations) != 1:
        raise UsageError(f"{implementation}: expected one implementation that is installed")
    (kernel,) = chosen.implementations
    words = words or list(getattr(kernel.entry, "command_words", ())) or [implementation]
    words = ["attncheck", "gate", *words, "--budget", budget, *(["--no-delegation"] if no_delegation else [])]
    writers = ThreadPoolExecutor(1, thread_name_prefix="attncheck report")
    written: list[Future[Path]] = []

    def write_report() -> None:
        written.append(writers.submit(lambda: write_frames(read_frames_of_runs([output]), output / REPORT_FOLDER)))

    result = run_gate(chosen, options, request, show=show, on_checked=write_report)
    for report in written:
        report.result()
    document = gate_document(result, output)
    page = write_gate_report(result, document, [*words, "--seed", str(result.seed)], output)
    print_and_exit(document, gate_lines(result, page, words), as_json=as_json, quiet=quiet)
