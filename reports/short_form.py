"""The lines of a report's short form, and of the outcome of properties."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attncheck.common.wording import count_noun, truncate_list
from attncheck.reports.coverage import selection_sentences, shortfall_lines
from attncheck.reports.defects import (
    Defect,
    causes_by_column,
    declaration_lines,
    defects_of_column,
    find_defects,
    first_commands,
)
from attncheck.reports.document_model import Text
from attncheck.reports.failure_patterns import pattern_lines
from attncheck.reports.frames import Frames
from attncheck.reports.properties import (
    broken_properties,
    explain_command,
    properties_sentence,
    property_facts,
    worst_failing_rows,
)
from attncheck.reports.sections import implementations_table, properties_matrix
from attncheck.reports.summary import make_summary
from attncheck.reports.terminal import Line
from attncheck.results.format import Row
from attncheck.spec import PROPERTIES
from attncheck.spec.verdicts import PropertyOutcome

_MAX_LISTED_DEFECTS = 3
"""Defects that are shown, each in its simplest case."""
_MAX_BROKEN_PROPERTIES = 20
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


def summary_lines(frames: Frames, *, quiet: bool, announced: Collection[str] = ()) -> Iterator[Line]:
    """Yield the answer, a count of verdicts per implementation, the defects, and commands that explain them.

    If an implementation is wrong, a short answer comes first; the report has the rest. If ``quiet``, yield only the
    defects. Notes that were ``announced`` already are not repeated.
    """
    yield from _answer_lines(frames, announced, quiet=quiet)
    yield from _property_and_defect_lines(frames)
    if not quiet:
        yield from (f"Why: {command}" for command in first_commands(frames))


def _property_and_defect_lines(frames: Frames) -> Iterator[Line]:
    """Yield properties that do not hold, and the first defects, each in its simplest case."""
    yield from _broken_property_lines(broken_properties(frames) if frames.properties else ())
    all_defects = find_defects(frames)
    of_calls = [defect for defect in all_defects if defect.is_shown_by_calls]
    of_documents = [defect for defect in all_defects if not defect.is_shown_by_calls]
    shown = of_calls[:_MAX_LISTED_DEFECTS] + of_documents[:_MAX_LISTED_DEFECTS]
    for defect in shown:
        # On one line, also because a CI system takes a line that begins with :: for a command.
        first, *rest = (_LINE_BREAK.sub(" ", line) for line in _defect_lines(frames, defect))
        yield Text(first, "red")
        yield from rest
    if unsaid := len(all_defects) - len(shown):
        yield f"and {count_noun(unsaid, 'more defect')}"


def _broken_property_lines(broken: Sequence[tuple[Row, str]]) -> Iterator[Line]:
    """Yield rows of properties that do not hold, each with the command that explains it."""
    for row, command in broken[:_MAX_BROKEN_PROPERTIES]:
        text = f"{row.implementation}  {row.property_name}  {row.case}  {row.dtype}: {row.message}"
        yield Text(_LINE_BREAK.sub(" ", text), "red")
        yield from [f"  {command}"] if command else []


def _answer_lines(frames: Frames, announced: Collection[str], *, quiet: bool) -> Iterator[Line]:
    """Yield which implementations agree or are wrong, and what the failing cases of wrong ones have in common."""
    answer, causes = make_summary(frames), causes_by_column(frames)
    if quiet:
        yield from (Text(f"too little was judged: {line}", "red") for line in shortfall_lines(frames))
    wrong = [column for column in frames.columns if defects_of_column(frames, column)]
    is_one_clause = ";" not in answer.word and ". " not in answer.word
    is_all_about_one = (
        len(wrong) == len(causes) == 1 and answer.word.startswith(wrong[0].implementation) and is_one_clause
    )
    if is_all_about_one:
        yield from _lines_of_causes(answer.word, causes[wrong[0]])
    else:
        yield from [] if quiet else [Text(_LINE_BREAK.sub(" ", f"{answer.word}."), "bold")]
        yield from [] if quiet or causes or not answer.judged else [f"{answer.judged}."]
        yield from cause_lines(frames)
    common = [*declaration_lines(frames), *(f"{line}." for line in pattern_lines(frames))]
    yield from (Text(_LINE_BREAK.sub(" ", line), "bold") for line in common)
    if not quiet:
        yield from [f"{answer.judged}."] if causes and answer.judged else []
        yield from (*answer.warnings, *selection_sentences(frames)) if wrong else answer.sentences
        yield from (f"{note}." for note in frames.notes if note not in announced)
        yield implementations_table(frames)


def cause_lines(frames: Frames) -> Iterator[Line]:
    """Yield each wrong implementation whose causes are known, and its causes."""
    for column, texts in causes_by_column(frames).items():
        yield from _lines_of_causes(frames.title(column, with_version=False), texts)


def _lines_of_causes(opening: str, texts: Sequence[str]) -> Iterator[Line]:
    """Yield the opening, and each cause on a line of its own below it."""
    yield Text(_LINE_BREAK.sub(" ", f"{opening}:"), "bold")
    yield from (Text(f"  {_LINE_BREAK.sub(' ', text)}", "bold") for text in texts)


def _defect_lines(frames: Frames, defect: Defect) -> list[str]:
    """Return the cases of a defect, and its worst element in the simplest case."""
    first, dtypes = defect.first, f" [{', '.join(defect.dtypes)}]" if defect.first.dtype else ""
    which = f"{first.case}{dtypes}"
    if defect.further_case_count:
        which = f"{len(defect.cases):,} cases{dtypes}, the first {first.case},"
    line = f"{defect.name}: {which} {frames.name_with_environment(first.implementation, first.environment)}".rstrip()
    is_told_apart = first.stage and defect.is_shown_by_calls
    return [line, f"  {defect.wrong_element_sentence}"] if is_told_apart else [f"{line}: {first.message}"]


def property_lines(
    rows: Sequence[Row], again: Mapping[str, Sequence[str]], explained: Iterable[tuple[Row, str]] = (), *, quiet: bool
) -> Iterator[Line]:
    """Yield implementation by property, then each failure with its command, and the ``explained`` rows."""
    if not quiet:
        yield from (Text(properties_sentence(rows), "bold"), properties_matrix(rows, shortly=True))
    failing = worst_failing_rows(rows)
    yield from _broken_property_lines([(row, explain_command(row, again)) for row in failing])
    yield from [f"and {len(failing) - _MAX_BROKEN_PROPERTIES} more"] if len(failing) > _MAX_BROKEN_PROPERTIES else []
    if not quiet:  # each reason once
        open_ = [row for row in rows if row.verdict in (PropertyOutcome.FAILED, PropertyOutcome.NOT_JUDGED)]
        reasons = (f"{row.implementation}  {row.property_name}: {row.verdict}: {row.message}" for row in open_)
        yield from truncate_list(_MAX_BROKEN_PROPERTIES, list(dict.fromkeys(reasons)))
    for row, call in explained:
        yield from ("", *property_row_lines(row, call))


def property_row_lines(row: Row, call: str) -> list[str]:
    """Describe a row: the calls, the element, the two numbers, the exact one, and the bounds."""
    claim = f", and claims {row.claim}" if row.claim else ""
    facts = {"what must hold": PROPERTIES[row.property_name].description, "the call": call} | property_facts(row)
    return [
        f"{row.implementation}, {row.property_name}, {row.case} in {row.dtype}: {row.verdict}{claim}",
        *(f"  {name:<21} {text}" for name, text in facts.items()),
        f"  {row.message}",
    ]
