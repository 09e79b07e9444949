"""Commands that ask more of a kernel: search, design, reduce, conventions, accuracy, properties and protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.completion import complete_properties
from attncheck.cli.output import (
    make_document,
    print_and_exit,
    print_case_faults,
    rerun_commands,
    select_one,
    split_names,
)
from attncheck.cli.parameters import (
    AsJson,
    CaseName,
    DtypeName,
    ImplementationName,
    ImplementationNames,
    Isa,
    JunitXml,
    dtype_option,
    output_option,
)
from attncheck.common.errors import ExitCode, UsageError
from attncheck.common.wording import suggest_names
from attncheck.settings.options import (
    DEFAULT_CACHE_SIZE,
    DtypeNames,
    ExpectedFailureLists,
    FunctionOptions,
    LimitOptions,
    Quiet,
    RunOptions,
    open_store,
)

if TYPE_CHECKING:
    from attncheck.asking.accuracy import MeasuredAccuracy
    from attncheck.execution.call import Limits
    from attncheck.execution.implementations import Implementation, ImplementationSelection
    from attncheck.execution.programs import RuleResult
    from attncheck.reports.json_documents import Document
    from attncheck.searching.search import Search
    from attncheck.showing.json_schema import AccuracyDocument


@app.command(
    epilog=examples_epilog(
        "attncheck search my_kernel.py:attention --problems 20",
        "attncheck search numpy --problems 10 --operation softmax --dtype float32",
    )
)
def search(
    implementation: ImplementationName,
    minutes: Annotated[float, typer.Option(metavar="N", min=0, help="Stop after N minutes.")] = 5.0,
    problems: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N problems, however long they take.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The seed of the random problems.")] = 1,
    operation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw problems of one operation. Default: all operations.")
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    isa: Isa = None,
    output: Annotated[
        Path | None,
        output_option(
            "FOLDER",
            "Folder for the findings. A search continues with the findings that are there. Default: "
            "results/search/NAME, by the implementation's name.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw problems at random until one breaks an implementation.

    Each problem is judged against the exact answer. A failing problem is reduced to the smallest one that fails the
    same way, and written as a case file and a script. Two searches with the same seed and number of problems, in empty
    folders, are identical. The exit code is 1 if something was found, and 3 if nothing could be judged.
    """
    begun = monotonic()
    from attncheck.asking.engine import Engine
    from attncheck.execution.implementation_selection import find_implementation
    from attncheck.execution.implementations import implementation_path
    from attncheck.searching.findings import ProblemSubject, SearchFolder
    from attncheck.searching.results import SearchResults
    from attncheck.searching.search import (
        SECONDS_TO_FINISH,
        Search,
        SearchRequest,
        SearchTimeExpired,
        stop_search_after,
    )
    from attncheck.showing.probes import search_document, search_lines
    from attncheck.spec import OPERATIONS

    if operation is not None and operation not in OPERATIONS:
        raise UsageError(f"--operation: unknown {operation!r}; {suggest_names(operation, OPERATIONS)}")
    chosen = find_implementation(implementation, **function.as_keywords)
    limits = allowed.limits(keep_going=True)
    folder = SearchFolder.open(output or Path("results/search") / chosen.name, chosen.name, implementation_path(chosen))
    seconds = 60 * minutes if problems is None else math.inf
    title = f"attncheck search {implementation} --seed {seed}"
    chosen_dtypes = _choose_dtypes(tuple(chosen.mode_declarations.classes), dtypes, chosen.name)
    request = SearchRequest(seed, operation, chosen_dtypes, problems, seconds, title)
    results = SearchResults.start(folder, chosen, chosen_dtypes, limits)
    subject = ProblemSubject(chosen, Engine(limits))
    say = lambda line: typer.echo(f"attncheck: {line}", err=True)  # noqa: E731
    drawn = Search(request, subject, folder, results, say, start_time=begun)
    try:
        with (
            suppress(SearchTimeExpired),
            stop_search_after(drawn.seconds_left + SECONDS_TO_FINISH, subject.stop_workers),
        ):
            drawn.run()
            _write_scripts(drawn, chosen, limits)
    finally:
        try:
            drawn.write()
        finally:
            subject.close()
    code = ExitCode.NOT_RUN if drawn.unsupported_count == drawn.problem_count else ExitCode.AGREE
    code = ExitCode.DISAGREE if folder.findings else code
    commands = {
        finding.file: rerun_commands({"id": str(folder.path / finding.file)}, chosen, limits, finding.dtype)
        for finding in folder.findings
    }
    print_and_exit(search_document(drawn, commands, code), search_lines(drawn, commands), as_json=as_json)


def _choose_dtypes(declared: tuple[str, ...], wanted: tuple[str, ...], name: str) -> tuple[str, ...]:
    from attncheck.spec import DTYPES

    if lacking := [dtype for dtype in wanted if dtype not in declared]:
        choices = f"choose from {', '.join(declared)}" if declared else "it declares no dtype"
        raise UsageError(f"--dtype: {name} does not support {lacking[0]}; {choices}, or declare it with --declare")
    return wanted or tuple(dtype for dtype in DTYPES if dtype in declared)


def _write_scripts(drawn: Search, implementation: Implementation, limits: Limits) -> None:
    """Write a script for every finding that has none."""
    from dataclasses import replace

    from attncheck.asking.engine import Engine
    from attncheck.asking.question import Question
    from attncheck.common.errors import AttncheckError
    from attncheck.reading.selection import select_case
    from attncheck.repro import repro_script
    from attncheck.settings.commands import shell_command

    for position, finding in enumerate(drawn.folder.findings):
        path = drawn.folder.path / finding.file
        script = path.with_suffix(".py")
        if finding.script or finding.needs_calls:
            continue
        try:
            case, _ = select_case(str(path))
            with Engine(limits) as engine:
                answer = engine.run_in_new_process(implementation, Question(case, finding.dtype))
            command = shell_command(["python", str(script)])
            failing = (case, implementation, finding.dtype, answer.judgements, finding.element)
            text = repro_script(*failing, command=command, element=finding.element)
            script.write_text(text, encoding="utf-8")
        except (AttncheckError, OSError):  # some modules cannot be copied into a script: the case file is enough
            continue
        drawn.folder.findings[position] = replace(finding, script=script.name)
        drawn.folder.write()


@app.command(
    epilog=examples_epilog(
        "attncheck design my_kernel.py:attention",
        "attncheck design my_kernel.py:attention --widths 64,96 --tile 48",
    )
)
def design(
    implementation: ImplementationName,
    strength: Annotated[
        int, typer.Option(metavar="N", min=2, max=3, help="Cover every combination of N options and sizes: 2 or 3.")
    ] = 3,
    widths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Widths of your model's heads. Default: those that the function requires, or 64 and 128.",
        ),
    ] = None,
    tile: Annotated[int, typer.Option(metavar="N", min=16, max=1024, help="The tile size; lengths exceed it.")] = 64,
    *,
    function: FunctionOptions,
    output: Annotated[
        Path | None, output_option("FILE", "File for the cases. Default: design_ and the implementation's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write cases for every combination of three options or sizes.

    The options are those that your function supports: masks, biases, windows, caches, sinks, shared heads, widths, and
    lengths beyond a tile. They are derived from its signature and its declarations. The file is a design, which you
    can change.
    """
    from attncheck.execution.implementation_selection import find_implementation
    from attncheck.planning.designing import DesignRequest, write_design
    from attncheck.settings.commands import shell_command

    chosen = find_implementation(implementation, **function.as_keywords)
    request = DesignRequest(chosen, strength, _parse_widths(split_names(widths)), tile)
    path, cases, factors = write_design(request, output)
    answer = f"{path}: {cases} cases, in which every {strength} of {factors} factors meet"
    check = shell_command(["attncheck", "check", str(path), "-i", *request.user_implementation.command_words])
    fields = {"next": [check], "file": str(path), "cases": cases, "factors": factors, "strength": strength}
    document = make_document("design", ExitCode.AGREE, answer, **fields)
    print_and_exit(document, [answer, f"Check them: {check}"], as_json=as_json)


def _parse_widths(words: Sequence[str]) -> tuple[int, ...]:
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= 1024:
            raise UsageError(f"--widths {word}: expected whole numbers from 1 to 1024, with commas between them")
    return tuple(map(int, words))


@app.command(
    epilog=examples_epilog(
        "attncheck reduce 'attention/a-causal-row-sees-*' numpy",
        "attncheck reduce my_cases/first.yaml::share my_kernel.py:attention",
    )
)
def reduce(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = None,
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    isa: Isa = None,
    output: Annotated[
        Path | None, output_option("FILE", "File for the reduced case. Default: reduced_ and the case's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest case that fails the same way.

    Options, elements and digits are removed as long as the verdict and its first stage stay the same. The exit code is
    1 if the case fails, and 0 if it passes.
    """
    from attncheck.execution.implementation_selection import find_implementation
    from attncheck.reading.selection import choose_dtype
    from attncheck.searching.findings import write_case
    from attncheck.searching.search import reduce_case
    from attncheck.showing.probes import reduction_document, reduction_lines

    chosen_case, _ = select_one(case)
    chosen_dtype = choose_dtype(chosen_case, dtype)
    chosen = find_implementation(implementation, **function.as_keywords)
    limits = allowed.limits(keep_going=True)
    reduced = reduce_case(chosen_case, chosen, chosen_dtype, limits)
    if reduced.answer.is_unsupported:
        raise UsageError(f"{chosen.name}, {chosen_case.id} in {chosen_dtype}: {reduced.answer.failure}")
    if reduced.problem is None:
        nothing = f"{chosen_case.id}: {chosen.name} does not fail it in {chosen_dtype}; there is nothing to reduce"
        print_and_exit(reduction_document(chosen_case, reduced, None, []), [nothing], as_json=as_json)
    path = output or Path(f"reduced_{chosen_case.id.rpartition('/')[2][:60]}.yaml")
    write_case(
        reduced.problem, path, f"{chosen_case.name[:180]} (reduced)", f"attncheck reduce {chosen_case.id}"[:4000]
    )
    commands = rerun_commands({"id": str(path)}, chosen, limits, chosen_dtype)
    document = reduction_document(chosen_case, reduced, path, commands)
    print_and_exit(document, reduction_lines(reduced, path, commands), as_json=as_json)


@dataclass(frozen=True)
class PropertyFiles:
    """Files that rows of properties are written to."""

    output: Annotated[Path | None, output_option("FOLDER", "Write the rows, and properties.csv, to this folder.")] = (
        None
    )
    junit_xml: JunitXml = None


@app.command(
    epilog=examples_epilog(
        "attncheck properties my_kernel.py:attention",
        "attncheck properties my_kernel.py:attention --property batch_invariant",
        "attncheck properties numpy --property repeated,decoding --explain",
    )
)
def properties(
    implementations: ImplementationNames,
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--cases",
            metavar="CASES",
            help="Cases with properties: files, folders or globs. Default: the bundled ones and your project's.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--property", "-p", metavar="NAMES", help="Test only these properties.", autocompletion=complete_properties
        ),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    expected_failures: ExpectedFailureLists = (),
    explain: Annotated[
        bool, typer.Option("--explain", help="For each call that is not bitwise identical, show its result.")
    ] = False,
    files: PropertyFiles,
    allowed: LimitOptions,
    isa: Isa = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test properties across calls, such as determinism.

    Each property compares two calls that should return the same: repeated, in a batch of one or of many, padded or
    packed, prefilled or decoded, with other threads, layouts or memory. The results are bitwise identical, equal within
    the error bounds of both calls, or different: then the property is broken. The exit code is 1 if a property is
    broken or weaker than the implementation declares, and 3 if a call failed.
    """
    from attncheck.properties.run import (
        PropertyRequest,
        describe_call,
        property_questions,
        run_properties,
        select_property_cases,
    )
    from attncheck.reports.outcome import properties_document
    from attncheck.reports.properties import properties_exit_code
    from attncheck.reports.short_form import property_lines
    from attncheck.settings.commands import command_words_by_name
    from attncheck.settings.config import check_user_cases

    limits = allowed.limits()
    asking = PropertyRequest(_property_names(name), dtypes, limits, open_store(cache=True, size=DEFAULT_CACHE_SIZE))
    check_user_cases(RunOptions(cases=tuple(cases or ()), expected_failure_lists=expected_failures), asking.store)
    chosen = _select_implementations(implementations, function, limits)
    selection = select_property_cases(cases or (), expected_failures, asking.store)
    print_case_faults(selection)
    questions = property_questions(selection.cases, asking)
    if not questions:
        raise UsageError("no case asks for these properties in these dtypes")
    complete = not (cases or asking.property_names or asking.dtypes)
    rows = run_properties(chosen.implementations, questions, asking, expected_failures, complete=complete)
    if files.output is not None:
        from attncheck.reports.write import write_property_table
        from attncheck.results.writer import write_property_rows

        write_property_rows(files.output, rows)
        write_property_table(rows, files.output)
    again = command_words_by_name(chosen.implementations, limits, None)
    if files.junit_xml is not None:
        from attncheck.reports.write import write_property_junit

        write_property_junit(rows, again, files.junit_xml)
    code = properties_exit_code(rows)
    code = ExitCode.NOT_RUN if chosen.missing and code is ExitCode.AGREE else code
    code = ExitCode.BAD_INPUT if selection.faults else code
    notes = [*map(str, selection.faults), *(f"{missing} is not installed" for missing in chosen.missing)]
    calls = {(question.name, question.case.id, question.dtype): describe_call(question) for question in questions}
    shown = [row for row in rows if explain and row.verdict not in ("bitwise", "unsupported")]
    explained = ((row, calls[row.property_name, row.case, row.dtype]) for row in shown)
    document = properties_document(rows, again, code, notes)
    print_and_exit(document, property_lines(rows, again, explained, quiet=quiet), as_json=as_json)


def _select_implementations(names: list[str], function: FunctionOptions, limits: Limits) -> ImplementationSelection:
    """Choose implementations, and print which of them are not installed."""
    from attncheck.execution.implementation_selection import select_implementations

    chosen = select_implementations(None, names, limits=limits, **function.as_keywords)
    for missing in chosen.missing:
        typer.echo(f"attncheck: {missing} is not installed", err=True)
    return chosen


def _property_names(texts: list[str] | None) -> list[str]:
    from attncheck.spec import PROPERTIES

    names = split_names(texts)
    for name in names:
        if name not in PROPERTIES:
            raise UsageError(f"unknown property {name!r}; {suggest_names(name, PROPERTIES, one_of=False)}")
    return names


@app.command(
    epilog=examples_epilog(
        "attncheck conventions my_kernel.py:attention", "attncheck conventions numpy torch.sdpa --dtype float32"
    )
)
def conventions(
    implementations: ImplementationNames,
    dtype: Annotated[str | None, dtype_option("Dtype of the calls. Default: the most exact one declared.")] = None,
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    isa: Isa = None,
    output: Annotated[
        Path | None,
        output_option("FOLDER", "Folder for results, which report and diff read. Default: none are written."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure which conventions an implementation follows.

    For example: the corner where the causal mask starts, the output of a query without a key, the position of the
    softcap. Each question is a call whose exact answer depends on the convention. The exit code is 1 if an
    implementation declares another convention than the measured one, and 3 if nothing could be measured.
    """
    from attncheck.asking.conventions import measure_all_conventions, most_exact_dtype
    from attncheck.results.writer import ResultsWriter
    from attncheck.showing.probes import convention_lines, conventions_document

    limits = allowed.limits()
    chosen = _select_implementations(implementations, function, limits)
    dtypes = {item.name: most_exact_dtype(item, dtype) for item in chosen.implementations}
    writer = ResultsWriter(output) if output is not None and chosen.implementations else None
    measured = {item.name: measure_all_conventions(item, dtypes[item.name], limits) for item in chosen.implementations}
    if writer is not None:
        from attncheck.searching.convention_results import write_measured_conventions

        write_measured_conventions(writer, chosen, measured, dtypes, limits)
    answers = [answer for measured_answers in measured.values() for answer in measured_answers]
    code = ExitCode.DISAGREE if any(answer.contradicts for answer in answers) else ExitCode.AGREE
    if not any(answer.kind in ("measured", "open") for answer in answers):
        code = ExitCode.NOT_RUN
    print_and_exit(conventions_document(measured, code, chosen.missing), convention_lines(measured), as_json=as_json)


@app.command(
    epilog=examples_epilog("attncheck accuracy my_kernel.py:attention", "attncheck accuracy numpy --dtype float32")
)
def accuracy(
    implementation: ImplementationName,
    cases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASES]...", help="Cases, as for check. Default: all small cases."),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    isa: Isa = None,
    as_json: AsJson = False,
) -> None:
    """Measure which rounding models hold for an implementation.

    Each case is computed once, and its errors are compared with the bounds of every class of its dtype, including the
    classes of published kernels. For each class, the command reports if it holds, and the largest error relative to its
    bound. docs/numerics.md, section 3, defines the classes. The exit code is 1 if the declared class of the
    implementation does not hold, and 3 if nothing could be measured.
    """
    from attncheck.asking.accuracy import format_accuracy, measure_accuracy, small_cases
    from attncheck.execution.implementation_selection import find_implementation
    from attncheck.execution.implementations import with_added_dtypes
    from attncheck.settings.config import select_configured_cases

    limits, store = allowed.limits(), open_store(cache=True, size=DEFAULT_CACHE_SIZE)
    selection = select_configured_cases(RunOptions(cases=tuple(cases or ()), dtypes=dtypes), store)
    print_case_faults(selection)
    chosen = with_added_dtypes(find_implementation(implementation, **function.as_keywords), dtypes)
    measurements = [
        measure_accuracy(chosen, selection.cases if cases else small_cases(selection.cases), dtype, limits, store)
        for dtype in _choose_dtypes(tuple(chosen.mode_declarations.classes), dtypes, chosen.name)
    ]
    code = ExitCode.DISAGREE if not all(measurement.holds_declared for measurement in measurements) else ExitCode.AGREE
    code = code if any(measurement.is_measured for measurement in measurements) else ExitCode.NOT_RUN
    lines = (line for measurement in measurements for line in format_accuracy(measurement))
    print_and_exit(_accuracy_document(chosen.name, measurements, code), lines, as_json=as_json)


def _accuracy_document(name: str, measurements: Sequence[MeasuredAccuracy], code: ExitCode) -> AccuracyDocument:
    from attncheck.reports.json_documents import opening_fields
    from attncheck.showing.json_schema import AccuracyDocument

    by_dtype = ("computed", "declared", "wrong_anyhow", "classes")
    return AccuracyDocument.derive(
        {field: {measurement.dtype: getattr(measurement, field) for measurement in measurements} for field in by_dtype},
        **opening_fields("accuracy", code, "; ".join(measurement.answer for measurement in measurements)),
        implementation=name,
    )


@app.command(epilog=examples_epilog("attncheck protocol ./my_program"))
def protocol(
    program: Annotated[str, typer.Argument(metavar="COMMAND", help="The program, with its arguments.")],
    seconds: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Time limit of one answer.", min=0.1)
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Check that a program in any language speaks the protocol.

    The command tests every rule, and describes each malformed answer. It does not judge numbers: attncheck check -i
    COMMAND does. The exit code is 1 if a rule is broken.
    """
    from attncheck.execution.programs import try_protocol_rules
    from attncheck.execution.user_code import parse_program_command

    words = parse_program_command(program)
    if not words:
        raise UsageError(f"{program}: no program; expected a path to one, such as ./attention, or a command")
    rules = []
    for rule in try_protocol_rules(words, seconds):
        rules.append(rule)
        if not as_json:
            typer.echo(f"{'broken' if rule.problem else '-' if rule.skip_reason else 'ok':6} {rule.rule}")
            if rule.problem or rule.skip_reason:
                typer.echo(f"       {rule.problem or rule.skip_reason}")
    is_broken = any(rule.problem for rule in rules)
    speaks = [] if is_broken else [f"It speaks the protocol. Judge its numbers: attncheck check -i {program!r}"]
    code = ExitCode.DISAGREE if is_broken else ExitCode.AGREE
    print_and_exit(_protocol_document(program, rules, code), speaks, as_json=as_json)


def _rule_outcome(rule: RuleResult) -> Literal["broken", "not tried", "ok"]:
    return "broken" if rule.problem else "not tried" if rule.skip_reason else "ok"


def _protocol_document(program: str, rules: Sequence[RuleResult], code: ExitCode) -> Document:
    from attncheck.settings.commands import shell_command
    from attncheck.showing.json_schema import RuleRecord

    broken = sum(bool(rule.problem) for rule in rules)
    answer = f"{broken:,} of {len(rules):,} rules are broken" if broken else "it speaks the protocol"
    again = [] if broken else [shell_command(["attncheck", "check", "-i", program])]
    records = [
        RuleRecord(rule=rule.rule, outcome=_rule_outcome(rule), message=rule.problem or rule.skip_reason)
        for rule in rules
    ]
    return make_document("protocol", code, answer, next=again, program=program, rules=records)
