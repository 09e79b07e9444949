"""One case on one implementation, stage by stage: for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import islice

from rich.console import Console

from attncheck.asking.answer import Answer, Repetition
from attncheck.common.errors import ExitCode
from attncheck.common.wording import format_element, format_judged_rows, format_ratio, truncate_list
from attncheck.judging.compare import MeasuredErrors
from attncheck.judging.judge_stages import StageJudgement
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.model import TagEntry
from attncheck.reading.shapes import format_shape
from attncheck.reports.document_model import Table, Text
from attncheck.reports.json_documents import Failure, opening_fields
from attncheck.reports.one_failure import failure_of_rows
from attncheck.reports.terminal import Line, print_lines
from attncheck.showing.json_schema import CaseRecord, ExplanationDocument, StageRecord
from attncheck.spec.verdicts import Verdict

_MAX_LISTED_CALLS = 10
"""Most calls that are listed."""
_OWN_STEP_LEGEND = "own step: error of this stage only, recomputed from the implementation's previous stage."


def explanation_text(answer: Answer, tags: Mapping[str, TagEntry]) -> str:
    """Return ``explanation_lines`` as plain text."""
    text = StringIO()
    print_lines(explanation_lines(answer, tags), Console(file=text, width=120, highlight=False, markup=False))
    return text.getvalue().rstrip()


def explanation_lines(answer: Answer, tags: Mapping[str, TagEntry]) -> Iterator[Line]:
    """Yield the case, every stage with its errors, and the first wrong stage.

    If a fresh process does not show the failure, lines about when it happens come first.
    """
    if answer.repeated is not None:
        yield from (Text(line, "red") for line in (*_repetition_lines(answer.repeated), ""))
    case = answer.case
    yield Text(case.name, "bold")
    yield f"{case.file}:{case.line}, {case.operation}, {inputs_line(case)}"
    yield from tag_lines(case, tags)
    yield ""
    padded = f", padded with {answer.padded}" if answer.padded else ""
    title = f"{answer.implementation} in {answer.dtype}, rounding model {answer.rounding_model}{padded}"
    if answer.failure:
        yield Text(f"{title}: {answer.failure}", "red")
        yield from (f"Expected failure: {reason}" for reason in answer.expected_failures.values())
        return
    yield Text(title, "bold")
    yield _stage_table(answer)
    sampled = (
        f"{format_judged_rows(judgement.judged_rows, judgement.query_rows)}; they stand for all."
        for judgement in answer.judgements
        if judgement.judged_rows is not None and judgement.query_rows is not None
    )
    yield from islice(sampled, 1)
    yield from (Text(line, "dim") for line in _legend_lines(answer))
    yield ""
    yield from (Text(line, "red" if answer.begins_at else "") for line in _diagnosis_lines(answer))


def tag_lines(case: Case, tags: Mapping[str, TagEntry]) -> Iterator[str]:
    """Yield the subject and the defect of each known tag of a case."""
    return (f"probes {tag}: {tags[tag].probes} Catches: {tags[tag].defect}" for tag in case.tags if tag in tags)


def _repetition_lines(repeated: Repetition) -> Iterator[str]:
    """Yield lines about a failure that a fresh process does not show, with the calls that it needs."""
    since = f" {repeated.remark}." if repeated.remark else ""
    calls = f"the {repeated.before:,} calls" if repeated.before > 1 else "the call"
    yield "In a fresh process nothing is wrong with this case."
    yield f"The check found {repeated.found}."
    if not repeated.before:
        yield f"It was the first call there, too: it has been fixed, or depends on chance or on time.{since}"
    elif repeated.needed is None:
        yield (
            f"That does not happen again, neither in a fresh process nor after {calls} that the check's process had "
            f"been asked before: it has been fixed, or depends on chance, on time, or on what ran beside it.{since}"
        )
    else:
        yield (
            f"That happens again after {_needed_calls_text(repeated)} that the check's process had been asked before: "
            f"something is kept from one call to the next.{since}"
        )
    after = [f"  after {call.case.id} in {call.dtype}" for call in repeated.needed or ()]
    yield from truncate_list(_MAX_LISTED_CALLS, after, "  and {} more")


def _needed_calls_text(repeated: Repetition) -> str:
    """Return in words how many of the earlier calls a failure needs."""
    needed, before = len(repeated.needed or ()), repeated.before
    if before == 1:
        return "the call"
    if needed == before:
        return f"all of the {before:,} calls"
    fewer = "" if repeated.are_fewest else ", perhaps fewer,"
    return f"{needed:,}{fewer} of the {before:,} calls"


def inputs_line(case: Case) -> str:
    """Return a line with the inputs' shapes and the options of a case."""
    return shapes_and_options_line(case.input_shapes, case.options)


def shapes_and_options_line(shapes: Mapping[str, tuple[int, ...]], options: Mapping[str, object]) -> str:
    """Return a line with the inputs' shapes and the options.

    Example:
        >>> shapes_and_options_line({"query": (1, 2, 3, 4), "mask": (1, 1, 3, 5)}, {"is_causal": True})
        'query 1x2x3x4, mask 1x1x3x5; is_causal = True'
    """
    inputs = ", ".join(f"{name} {format_shape(shape)}" for name, shape in shapes.items())
    return "; ".join(filter(None, (inputs, ", ".join(f"{name} = {value}" for name, value in options.items()))))


def _has_different_own_steps(answer: Answer) -> bool:
    """Return whether a stage's own step has another error than the stage; not if only the output is returned."""
    return any(_error_cells(stage.accumulated) != _error_cells(stage.introduced) for stage in answer.judgements)


def _stage_table(answer: Answer) -> Table:
    shows_own_steps = _has_different_own_steps(answer)
    own_step = ("own step: error/bound", "z") if shows_own_steps else ()
    headings = ("stage", "verdict", "error/bound", "z", *own_step, "condition")
    rows = []
    for judgement in answer.judgements:
        here = " <- begins here" if judgement.stage == answer.begins_at else ""
        condition = answer.conditioning.get(judgement.stage)
        ill = f" ({condition.ill:,} ill)" if condition and condition.ill else ""  # so many elements
        rows.append(
            (
                judgement.stage,
                f"{judgement.verdict}{' (noisy)' if judgement.is_noisy else ''}{here}",
                *_error_cells(judgement.accumulated),
                *(_error_cells(judgement.introduced) if shows_own_steps else ()),
                f"{condition.median:.3g}{ill}" if condition else "-",
            )
        )
    return Table("Stages", headings, rows, "llrrr" + "r" * len(own_step))


def _legend_lines(answer: Answer) -> Iterator[str]:
    """Yield what the columns are, and the stages with ill-conditioned numbers, for which agreement says little."""
    yield " ".join(
        (
            "error/bound: 1 is the largest error that is possible. z: error relative to typical rounding noise.",
            *([_OWN_STEP_LEGEND] if _has_different_own_steps(answer) else []),
            *(["condition: median error bound, in ulps of the result."] if answer.conditioning else []),
        )
    )
    if not answer.conditioning:
        return
    conditions = answer.conditioning.items()
    ill = [f"{name} {stage.ill:,} of {stage.elements:,}" for name, stage in conditions if stage.ill]
    if ill:
        yield (
            f"ill-conditioned, the bound is larger than the number, so that agreement says nothing of accuracy: "
            f"{', '.join(ill)}."
        )


def _error_cells(measured: MeasuredErrors | None) -> tuple[str, str]:
    return ("-", "-") if measured is None else (format_ratio(measured.ratio), f"{measured.largest_z:.3g}")


def _diagnosis_lines(answer: Answer) -> list[str]:
    if answer.outside:
        return [f"There is no exact answer to hold it against: {answer.outside}."]
    if not answer.begins_at:
        open_ = [f"{judgement.stage}: {judgement.message}." for judgement in answer.judgements if judgement.unjudged]
        if not open_:
            return ["Every stage is within its error bound of the exact answer."]
        if all(judgement.verdict is Verdict.UNVERIFIED for judgement in answer.judgements):
            return ["Nothing could be compared with an exact answer.", *open_]
        return ["What was judged is within its error bound of the exact answer; the rest was not judged:", *open_]
    failing = [item for item in answer.judgements if item.verdict.exit_code]
    first = answer.first_failing
    assert first is not None, "it begins somewhere"
    expected = [f"Expected failure: {reason}" for reason in dict.fromkeys(answer.expected_failures.values())]
    # An expected failure by a convention for empty rows is another meaning, and no fault.
    is_meant = all(item.empty_rows is not None and item.stage in answer.expected_failures for item in failing)
    verb = "means something else" if is_meant else "goes wrong"
    return [f"It {verb} at {answer.begins_at}: {first.message}.", *expected, *_worst_element_lines(first, answer)]


def _worst_element_lines(judgement: StageJudgement, answer: Answer) -> list[str]:
    """Describe the worst element; 17 digits identify a float64 exactly."""
    if judgement.index is None or judgement.value is None or judgement.exact is None:
        return []
    lines = [
        f"  element   {format_element(judgement.index, layout=answer.case.layout_of(judgement.stage))}",
        f"  computed  {judgement.value:.17g}",
        f"  exact     {judgement.exact:.17g}",
    ]
    if judgement.error is not None and judgement.bound is not None:
        label = ", ill-conditioned" if judgement.bound > abs(judgement.exact) else ""
        conditions = answer.conditioning.get(judgement.stage)
        condition = (
            f", condition {conditions.condition_number(judgement.bound, judgement.exact):.3g}{label}"
            if conditions
            else ""
        )
        lines.append(f"  error     {judgement.error:.4g}, bound {judgement.bound:.4g}{condition}")
    return lines


def to_case_record(case: Case) -> CaseRecord:
    """Return a case's names, shapes and options."""
    return CaseRecord.derive(make_case_record(case, {}))


def explanation_document(answer: Answer, code: ExitCode, commands: Sequence[str]) -> ExplanationDocument:
    """Return a case on one implementation, stage by stage; ``commands`` show more about its failure."""
    failure = answer_failure(answer, commands)
    return ExplanationDocument.derive(
        answer,
        **opening_fields("explain", code, answer_line(answer)),
        failures=[] if failure is None else [failure],
        next=[] if failure is None else commands,
        case=to_case_record(answer.case),
        verdict=answer_verdict(answer),
        stages=[_stage_record(judgement, answer) for judgement in answer.judgements],
    )


def answer_failure(answer: Answer, commands: Sequence[str]) -> Failure | None:
    """Return the failure of an answer; None if nothing is wrong, or if that was expected."""
    return failure_of_rows(answer.rows, make_case_record(answer.case, {}), commands, answer.diagnosis)


def answer_verdict(answer: Answer) -> str:
    """Return the verdict of the first wrong stage, or of the call; agree or unverified if none is wrong."""
    if answer.failed is not None:
        return str(answer.failed.verdict)
    judgement = answer.first_failing
    if judgement is not None:
        return judgement.verdict.value
    verdicts = {judgement.verdict for judgement in answer.judgements}
    return (Verdict.UNVERIFIED if verdicts == {Verdict.UNVERIFIED} else Verdict.AGREE).value


def answer_line(answer: Answer) -> str:
    """Return the result of a case on an implementation in a line."""
    who = f"{answer.implementation} in {answer.dtype}"
    if answer.failure:
        return f"{who}: {answer.failure}"
    if answer.outside:
        return f"{who}: there is no exact answer: {answer.outside}"
    if answer.begins_at:
        return f"{who} is wrong at {answer.begins_at}: {answer_verdict(answer)}"
    return f"{who}: {'nothing was judged' if answer_verdict(answer) == Verdict.UNVERIFIED else 'agrees'}"


def _stage_record(judgement: StageJudgement, answer: Answer) -> StageRecord:
    return StageRecord.derive(
        judgement,
        computed_hex=None if judgement.value is None else judgement.value.hex(),
        exact_hex=None if judgement.exact is None else judgement.exact.hex(),
        condition=answer.conditioning.get(judgement.stage),
        expected_failure=answer.expected_failures.get(judgement.stage, ""),
    )
