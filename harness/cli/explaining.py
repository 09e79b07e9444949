"""Commands about one case on one implementation: ``explain`` and ``repro``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.output import open_page, print_and_exit, read_earlier_check, rerun_commands, select_one, show_outcome
from attncheck.cli.parameters import (
    AsJson,
    CaseName,
    DtypeName,
    ImplementationName,
    Isa,
    Results,
    RunRequest,
    output_option,
)
from attncheck.common.errors import ExitCode, OutputError, UsageError
from attncheck.settings.options import ExpectedFailureLists, FunctionOptions, LimitOptions, RunOptions

if TYPE_CHECKING:
    from attncheck.asking.answer import Answer
    from attncheck.execution.call import Limits
    from attncheck.execution.implementations import Implementation
    from attncheck.reading.case import Case
    from attncheck.reading.selection import CaseSelection
    from attncheck.results.last_failed import CheckRecord
    from attncheck.showing.json_schema import ScriptDocument


_EXPLAINED_FOLDER = Path("results/explained")
_MAX_NAME_LETTERS = 60
"""Of a case, in the name of its script."""


@app.command(
    epilog=examples_epilog(
        "attncheck explain 'attention/a-causal-row-sees-*' my_kernel.py:attention",
        "attncheck explain my_cases/first.yaml::share numpy --dtype float64",
    )
)
def explain(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = None,
    *,
    function: FunctionOptions,
    results: Results = None,
    expected_failures: ExpectedFailureLists = (),
    allowed: LimitOptions,
    isa: Isa = None,
    as_json: AsJson = False,
    opens_page: Annotated[
        bool, typer.Option("--open", help=f"Also write a report of only this case to {_EXPLAINED_FOLDER}, and open it.")
    ] = False,
) -> None:
    """Show where an implementation goes wrong in one case.

    The command runs the case again in a fresh process and judges it stage by stage. If the case failed in a check and
    passes in the fresh process, the command repeats it after the calls that preceded it in the check.
    """
    from attncheck.reading.case import make_case_record
    from attncheck.showing.explanation import explanation_document, explanation_lines

    subject, limits = _select_subject(case, implementation, dtype, function, results), allowed.limits()
    answer = _evaluate_subject(subject, limits, expected_failures)
    code = ExitCode.DISAGREE if answer.begins_at else ExitCode.AGREE
    code = ExitCode.NOT_RUN if answer.failure else code
    about = make_case_record(subject.case, {}), subject.implementation, limits, subject.dtype
    document = explanation_document(answer, code, rerun_commands(*about, ("repro", "reduce")))
    show_outcome(document, explanation_lines(answer, subject.selection.tags), as_json=as_json)
    if opens_page:
        settings = {**vars(function), **vars(allowed), "expected_failure_lists": expected_failures}
        open_page(_write_case_page((case,), (implementation,), dtypes=(subject.dtype,), **settings))
    raise typer.Exit(code)


def _write_case_page(cases: tuple[str, ...], implementations: tuple[str, ...], **options: Any) -> Path:
    """Check a case alone, and return the page of its report."""
    from attncheck.cli.running import run_request, write_page
    from attncheck.results.format import REPORT_FOLDER

    asked = RunOptions(cases=cases, implementations=implementations, output=_EXPLAINED_FOLDER, quiet=True, **options)
    request = RunRequest(asked)
    run_request(request)
    write_page(request)
    return _EXPLAINED_FOLDER / REPORT_FOLDER / "report.html"


@app.command(
    epilog=examples_epilog(
        "attncheck repro 'attention/a-causal-row-sees-*' my_kernel.py:attention",
        "attncheck repro 'attention/a-causal-row-sees-*' numpy --output repro.py",
    )
)
def repro(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = None,
    *,
    function: FunctionOptions,
    results: Results = None,
    allowed: LimitOptions,
    isa: Isa = None,
    output: Annotated[Path | None, output_option("FILE", "File for the script. Default: named after the case.")] = None,
    reduced: Annotated[
        bool,
        typer.Option(
            "--reduce/--no-reduce", help="First reduce a failing case to the smallest case that fails the same way."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write a script that reproduces one case.

    The script needs only NumPy and the implementation's framework; with --signature, it also needs attncheck. A failing
    case is first reduced to the smallest case that fails the same way. If the case failed in a check and passes in a
    fresh process, the script first makes the earlier calls that trigger the failure.
    """
    from attncheck.settings.commands import shell_command

    subject, limits = _select_subject(case, implementation, dtype, function, results), allowed.limits()
    answer = _evaluate_subject(subject, limits)
    name = subject.implementation.name
    if answer.is_unsupported:
        evaluation = f"{name}, {subject.case.id} in {subject.dtype}"
        raise UsageError(f"{evaluation}: {answer.failure}; there is nothing to reproduce")
    path = output or Path(script_name(subject.case.id, name, subject.dtype))
    command, tries = shell_command(["python", str(path)]), 0
    if reduced and answer.fails and not answer.before:
        answer, tries = _reduce_failure(answer, subject, limits)
    text = _script_text(answer, subject, command)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.from_os_error(path, error) from None
    says = f"{path}: it ends with 1 where it finds an error, with 0 where it finds none. Run it with"
    document = _script_document(answer, tries, subject, path, command, limits)
    print_and_exit(document, [says, f"  {command}"], as_json=as_json)


def _script_document(
    answer: Answer, tries: int, subject: _CaseSubject, path: Path, command: str, limits: Limits
) -> ScriptDocument:
    from attncheck.reading.case import make_case_record
    from attncheck.reports.json_documents import opening_fields
    from attncheck.showing.explanation import answer_failure, answer_line, to_case_record
    from attncheck.showing.json_schema import ScriptDocument

    about = make_case_record(subject.case, {}), subject.implementation, limits, subject.dtype
    failure = answer_failure(answer, [command, *rerun_commands(*about, ("explain",))])
    return ScriptDocument(
        **opening_fields("repro", ExitCode.AGREE, answer_line(answer)),
        failures=[] if failure is None else [failure],
        next=[command],
        implementation=subject.implementation.name,
        case=to_case_record(answer.case),
        dtype=subject.dtype,
        script=str(path),
        command=command,
        tries=tries,
    )


def _reduce_failure(answer: Answer, subject: _CaseSubject, limits: Limits) -> tuple[Answer, int]:
    """Return the answer to the smallest case that fails the same way, and the number of tries to find it.

    If the case cannot be reduced, return its answer.
    """
    from dataclasses import replace

    from attncheck.asking.question import Question
    from attncheck.searching.search import reduce_case

    patient = replace(limits, keep_going=True)
    reduced = reduce_case(subject.case, subject.implementation, subject.dtype, patient, answer)
    if reduced.problem is None or not reduced.tries:
        return answer, 0
    typer.echo(f"attncheck: reduced in {reduced.tries} tries; --no-reduce keeps the case as it is", err=True)
    original = subject.case
    named = replace(reduced.answer.case, name=f"{original.name} (reduced)", file=original.file, line=original.line)
    return reduced.answer.for_question(Question(named, subject.dtype)), reduced.tries


def _script_text(answer: Answer, subject: _CaseSubject, command: str) -> str:
    """Return a short script of a small case, or else the long one."""
    from attncheck.repro import repro_script
    from attncheck.searching.search import describe_worst_element
    from attncheck.showing.explanation import explanation_text

    return repro_script(
        answer.case,
        subject.implementation,
        subject.dtype,
        answer.judgements,
        explanation_text(answer, subject.selection.tags),
        command=command,
        before=[(call.case, call.dtype) for call in answer.before],
        element=describe_worst_element(answer) if answer.fails else "",
    )


def script_name(identity: str, implementation: str, dtype: str) -> str:
    """Return the name of a script; a long name of a case is truncated, with a checksum that makes it unique.

    Example:
        >>> script_name("attention/a-causal-row", "numpy.eager", "float32")
        'repro_a_causal_row_numpy.eager_float32.py'
    """
    name = identity.rpartition("/")[2]
    if len(name) > _MAX_NAME_LETTERS:
        mark = f"{zlib.crc32(identity.encode()):08x}"
        name = f"{name[: _MAX_NAME_LETTERS - len(mark) - 1]}-{mark}"
    return f"repro_{name}_{implementation}_{dtype}.py".replace("-", "_")


@dataclass(frozen=True)
class _CaseSubject:
    """A case, an implementation and a dtype, and the results of the check in which the case may have failed."""

    case: Case
    selection: CaseSelection
    implementation: Implementation
    dtype: str
    check_record: CheckRecord | None


def _select_subject(
    case: str, implementation: str, dtype: str | None, function: FunctionOptions, results: Path | None
) -> _CaseSubject:
    from attncheck.execution.implementation_selection import find_implementation
    from attncheck.execution.implementations import with_added_dtypes
    from attncheck.reading.selection import choose_dtype

    checked = read_earlier_check(results)
    try:
        chosen_case, selection = select_one(case, checked)
    except UsageError:
        from attncheck.backends import ALL_ENTRIES

        if case.partition(".")[0] not in ALL_ENTRIES and not case.partition(":")[0].endswith(".py"):
            raise
        raise UsageError(f"{case!r} is an implementation: the case comes first, {implementation} {case}") from None
    chosen_dtype = choose_dtype(chosen_case, dtype)
    again, called = checked.command_words if checked else {}, implementation
    if called not in again:  # it may be named as in the check; a report may have a longer name to distinguish two
        called = next((name for name, words in again.items() if words[0] == implementation), "")
    named = again.get(called)
    if named and implementation != named[0]:  # it has its name in the report
        options, implementation = list(pairwise(named)), named[0]
        framework, signature = (dict(options).get(option) for option in ("--framework", "--signature"))
        declare = (*(value for option, value in options if option == "--declare"), *function.declare)
        function = FunctionOptions(function.framework or framework, function.signature or signature, declare)
    chosen = find_implementation(implementation, called, **function.as_keywords)
    chosen = chosen if dtype is None else with_added_dtypes(chosen, [dtype])
    return _CaseSubject(chosen_case, selection, chosen, chosen_dtype, checked)


def _evaluate_subject(subject: _CaseSubject, limits: Limits, lists: Sequence[Path] = ()) -> Answer:
    from attncheck.asking.again import ask_again, find_reported_failure
    from attncheck.asking.engine import Engine
    from attncheck.asking.question import Question
    from attncheck.settings.config import load_expected_failures_of

    expected = load_expected_failures_of([subject.implementation.entry.name], lists)
    question = Question(subject.case, subject.dtype)
    earlier = (
        find_reported_failure(subject.check_record, subject.implementation, question) if subject.check_record else None
    )
    with Engine(limits, RunOptions().store, expected) as engine:
        said = lambda line: typer.echo(f"attncheck: {line}", err=True)  # noqa: E731
        return ask_again(engine, subject.implementation, question, earlier, print_line=said)
