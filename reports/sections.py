"""Sections of a report, made once from the frames: the terminal, Markdown and the page each render the same blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attncheck.common.wording import count_noun
from attncheck.reports import defects
from attncheck.reports.cells import State, cell_table
from attncheck.reports.coverage import count_numbers_of_cases, count_unverified, coverage_by_column
from attncheck.reports.document_model import (
    LINE_BREAK,
    Block,
    Code,
    Details,
    Entries,
    Inline,
    Items,
    Key,
    Mark,
    Section,
    Table,
    Text,
    more_in_files,
)
from attncheck.reports.failure_patterns import describe_case, pattern_lines
from attncheck.reports.frames import (
    Column,
    Frames,
    are_under_erratum,
    cached_for_frames,
    count_numbers,
    documents_of,
    environment_facts,
    rows_of_column,
    select_expected_failures,
)
from attncheck.reports.one_failure import failing_comparisons_text
from attncheck.reports.properties import (
    OUTCOMES_NOTE,
    broken_properties,
    group_by_property,
    property_facts,
    property_rows,
    property_state,
    worst_row,
)
from attncheck.results.format import Row
from attncheck.spec import DTYPES, PROPERTIES
from attncheck.spec.verdicts import PropertyOutcome, Verdict

_RECORD_STATES = (State.MISPRINT, State.XPASS)
_ALWAYS_SHOWN = (State.AGREE, State.FAILING)
_COUNTED_STATES: Mapping[State, str] = {
    State.AGREE: "right",
    State.XFAIL: "known",
    State.FAILING: "wrong",
    State.XPASS: "xpass",
    State.UNSUPPORTED: "unsupported",
    State.UNVERIFIED: "unverified",
}
_STATES_IN_WORDS = (State.FAILING, State.XFAIL)
"""States whose counts are listed by verdict."""
_MAX_CASES = 3
"""Cases that a cell of a table names."""


VERDICTS_NOTE = (
    "An implementation agrees where every stage is within its derived error bound of the exact answer, statistically "
    "too on inputs for which that can be said, and where every printed number holds."
)


@cached_for_frames
def implementations_table(frames: Frames) -> Table:
    """Count the evaluations of each implementation by state, and return its accuracy in each dtype.

    An evaluation is a case in one dtype. The accuracy is the largest error of agreeing stages in units of the bound.
    """
    counts = {column: _verdict_counts(frames, column) for column in frames.columns}
    present = set(_ALWAYS_SHOWN).union(*counts.values())
    states = [state for state in _COUNTED_STATES if state in present]
    held = frames.results[frames.results["verdict"].eq(Verdict.AGREE) & frames.results["ratio"].notna()]
    errors = held.groupby(["environment", "implementation", "dtype"])["ratio"].max()
    written = {key: Mark(f"{ratio:.2g}", "level") for key, ratio in errors.items()}
    dtypes = [dtype for dtype in DTYPES if held["dtype"].eq(dtype).any()]
    numbers = {column: count_unverified(frames, column) for column in frames.columns}
    with_numbers = any(numbers.values())
    rows: list[Sequence[Inline]] = [
        (
            frames.title(column),
            *(_count_cell(state, counts[column].get(state, Counter())) for state in states),
            *([str(numbers[column] or "-")] if with_numbers else []),
            *(written.get((*column.key, dtype), "-") for dtype in dtypes),
        )
        for column in frames.columns
    ]
    headings = ["implementation", *(_COUNTED_STATES[state] for state in states)]
    headings += ["unverified numbers"] if with_numbers else []
    headings += [f"error in {dtype}" for dtype in dtypes]
    caption = (
        "Evaluations, a case in one dtype each; and the largest error of those that are right, where 1 is what "
        "rounding allows"
    )
    return Table(
        caption, headings, rows, "l" + "".join("l" if state in _STATES_IN_WORDS else "r" for state in states) + "rrrrr"
    )


def implementations_section(frames: Frames) -> Section | None:
    """Return a row for each implementation, and the missing features of each; None without implementations."""
    if not frames.columns:
        return None
    lacking = [
        Details(
            f"{frames.title(entry.column, with_version=False)}: unsupported cases by missing feature",
            [Items([f"{what}: {count:,}" for what, count in entry.lacks.missing_feature_counts])],
        )
        for entry in coverage_by_column(frames)
        if entry.lacks.cases
    ]
    return Section("By implementation", "counts", [implementations_table(frames), *lacking])


def _verdict_counts(frames: Frames, column: Column) -> dict[State, Counter[str]]:
    """Count the verdicts of a column's cells, by state; a misprint of the document, known or not, counts as right."""
    counts: dict[State, Counter[str]] = {}
    for row in cell_table(frames).values():
        for cell in row.get(column, {}).values():
            is_right = cell.state in (State.ERRATUM, State.MISPRINT)
            state = State.AGREE if is_right else cell.state
            counts.setdefault(state, Counter())[cell.verdict] += 1
    return counts


def _count_cell(state: State, verdicts: Counter[str]) -> Inline:
    if not verdicts:
        return "-"
    if state not in _STATES_IN_WORDS:
        return Mark(f"{verdicts.total():,}", state.value)
    words = [Mark(f"{number:,} {verdict}", state.value) for verdict, number in verdicts.most_common()]
    return (words[0], *(part for word in words[1:] for part in (", ", word)))


def defects_section(
    frames: Frames,
    most: int,
    *,
    most_letters: int = 10_000,
    most_cases: int = 2_000,
    pictures: Mapping[Key, Sequence[Block]] = MappingProxyType({}),
    maps: Sequence[Block] = (),
) -> Section | None:
    """Return an entry for each defect with its simplest case; None if there is no defect.

    ``pictures`` are those of some cells, ``maps`` follow the list.
    """
    every_defect = defects.find_defects(frames)
    if not every_defect:
        return None
    entries = []
    for defect in every_defect[:most]:
        message = truncate(defect.wrong_element_sentence if defect.diagnosis else defect.first.message, most_letters)
        shown_by = pictures.get((*defect.column, defect.first.case, defect.first.dtype), ())
        entries.append(_defect_entry(frames, defect, message, shown_by, most_cases))
        most_cases -= len(defect.cases)
    more = len(every_defect) - len(entries)
    rest = [more_in_files(count_noun(more, "more defect"), "results.csv", "numbers.csv")] if more else []
    lines = (
        *defects.declaration_lines(frames),
        *(f"{truncate(line, most_letters)}." for line in pattern_lines(frames)),
    )
    common = [Text(Mark(line, "strong"), "in-common") for line in lines]
    return Section("What is wrong", "wrong", [*common, Entries(entries), *rest, *maps])


def _defect_entry(
    frames: Frames, defect: defects.Defect, message: str, pictures: Sequence[Block], most_cases: int
) -> tuple[str, list[Block]]:
    first, cases = defect.first, defect.cases
    state = first.verdict if first.verdict in _RECORD_STATES else State.FAILING.value
    who = frames.name_with_environment(first.implementation, first.environment)
    dtypes = f", in {', '.join(defect.dtypes)}" if first.dtype else ""
    stage: Inline = (" at ", Mark(first.stage)) if first.stage else ""
    what: Inline = (" ", Mark(defect.text, "strong")) if defect.diagnosis else stage
    simplest: Inline = (
        ("The simplest: " if defect.further_case_count else ""),
        Mark(first.case, "case", column=defect.column),
    )
    blocks: list[Block] = [
        Text((Mark(first.verdict, state), what), "what"),
        Text(
            f"{f'{who}: ' if who else ''}{count_noun(len(cases), 'case')}{dtypes}; "
            f"{failing_comparisons_text(defect.rows)}"
        ),
        Text(simplest, "where"),
    ]
    shape = describe_case(frames.cases[first.case]) if first.implementation else ""
    blocks += [Text(shape, "muted")] if shape else []
    blocks += [Text(message, "message")] if message else []
    blocks += pictures
    blocks += [Code(first.next[:1])] if first.next and defect.is_shown_by_calls else []
    blocks += (
        [_cases_details(f"All {len(cases):,} cases", cases, most_cases, defect.column)]
        if defect.further_case_count
        else []
    )
    return state, blocks


def _cases_details(summary: str, cases: Sequence[str], most: int, column: tuple[str, str] = ("", "")) -> Details:
    """Return a folded list of cases, the first ones by name."""
    named: list[Inline] = [Mark(case, "case", column=column) for case in cases[: max(0, most)]]
    if rest := len(cases) - len(named):
        named.append(f"and {rest:,} more, in results.csv")
    return Details(summary, [Items(named)])


def expected_failures_section(frames: Frames) -> Section | None:
    """Return a row for each implementation and reason; None if no failure was expected."""
    expected_groups = defects.expected_failure_groups(frames)
    if not expected_groups:
        return None
    headings = ["implementation", "verdict", "cases", "dtypes", "begins at", "reason", "thread"]
    rows = [
        (
            frames.name_with_environment(group["implementation"], group["environment"]),
            Mark(group["verdict"], State.XFAIL.value),
            _case_list(group["cases"]),
            ", ".join(group["dtypes"]),
            Mark(group["begins_at"]),
            group["reason"],
            Mark(group["thread"], "link", defects.thread_address(group["thread"])),
        )
        for group in expected_groups
    ]
    folded = [
        _cases_details(
            f"The {len(group['cases']):,} cases of {group['implementation']}: {group['reason']}", group["cases"], 200
        )
        for group in expected_groups
        if len(group["cases"]) > _MAX_CASES
    ]
    table = Table("Expected failures by implementation and reason", headings, rows)
    following = sum(len(select_expected_failures(rows)) for rows in (frames.pairs, frames.numbers))
    what = f"In {count_noun(following, 'comparison')} with other implementations or numbers"
    last = [Text(f"{what}, these are the reason for the difference.")] if following else []
    return Section(
        "Expected failures", "expected-failures", [Text(defects.EXPECTED_FAILURES_NOTE), table, *folded, *last]
    )


def _case_list(cases: Sequence[str]) -> Inline:
    shown: list[Inline] = [part for case in cases[:_MAX_CASES] for part in (LINE_BREAK, Mark(case, "case"))]
    more: list[Inline] = [LINE_BREAK, f"and {len(cases) - _MAX_CASES} more"] if len(cases) > _MAX_CASES else []
    return (*shown[1:], *more)


def empty_rows_section(frames: Frames) -> Section | None:
    """Return what each implementation returns for a query without a key; None if all return the same."""
    outcomes = defects.count_empty_row_results(frames)
    if outcomes is None:
        return None
    words = [word for word in defects.EMPTY_ROWS_WORDS if any(word in counts for counts in outcomes.values())]
    rows = [
        (frames.title(column), *(str(counts[word] or "-") for word in words)) for column, counts in outcomes.items()
    ]
    caption, headings = "Cases by what a query without a key gives", ["implementation", *words]
    table = Table(caption, headings, rows, "l" + "r" * len(words))
    return Section("Queries without a key", "empty-rows", [Text(defects.EMPTY_ROWS_NOTE), table])


_NUMBERS_EXPLAINED = (
    "Printed numbers, each counted once: those that hold wherever they were compared, that do not hold, and that are "
    "unverified because there is no exact answer to compare with. Errata are numbers that a document prints for "
    "another call than the one it shows: recorded, run as written, and not holding there. Below an implementation "
    "stand the comparisons that hold, of all, in all dtypes together."
)


def documents_section(frames: Frames) -> Section | None:
    """Return a row for each document; None if no document was run."""
    rows: list[Sequence[Inline]] = []
    for cases in documents_of(frames).values():
        numbers = frames.numbers[frames.numbers["case"].isin([case["id"] for case in cases])]
        wrong_call = are_under_erratum(frames, numbers)
        totals = count_numbers_of_cases(frames, [case["id"] for case in cases])
        printed = numbers[numbers["printed"].notna() & numbers["basis"].eq("printed") & ~wrong_call]
        counts = [totals.printed, totals.hold, totals.misprints + totals.missed, totals.unverified, totals.errata]
        unprinted = count_numbers(numbers[numbers["basis"].eq("exact")])
        agreements = [rows_of_column(printed, column)["verdict"].eq(Verdict.AGREE) for column in frames.columns]
        cells = [f"{holds.sum()} of {len(holds)}" if len(holds) else "-" for holds in agreements]
        rows.append([cases[0]["title"], *(str(number or "-") for number in counts), *cells, str(unprinted or "-")])
    kinds = ["printed", "hold", "do not hold", "unverified", "errata"]
    headings = ["document", *kinds, *map(frames.title, frames.columns), "computed, not printed"]
    table = Table("Printed numbers by document", headings, rows, "l" + "r" * len(headings))
    return Section("Documents at a glance", "glance", [Text(_NUMBERS_EXPLAINED), table]) if rows else None


def environments_section(frames: Frames) -> Section:
    """Return the facts of each environment."""
    complete = zip(frames.environments["environment"], frames.environments["complete"], strict=True)
    headings = ["", *(label if is_complete else f"{label} (partial)" for label, is_complete in complete)]
    rows = [(name, *texts) for name, texts in environment_facts(frames)]
    return Section("Environments", "environments", [Table("Where each run ran", headings, rows)])


def properties_section(frames: Frames, most: int = 50) -> Section | None:
    """Return the outcome of each property on each implementation, and the broken ones; None if none was tested."""
    rows = property_rows(frames)
    if not rows:
        return None
    broken = broken_properties(frames)
    more = len(broken) - most
    rest = [more_in_files(f"{more} more", "properties.csv")] if more > 0 else []
    heading = [Text(Mark("Properties that do not hold", "strong"))] if broken else []
    folded = [
        Details(
            f"{row.implementation}: {row.property_name} in {row.case}, {row.dtype}",
            [
                Text(f"{PROPERTIES[row.property_name].description} {row.message}."),
                Items([(f"{name}: ", Mark(text)) for name, text in property_facts(row).items()]),
                *([Code([command])] if command else []),
            ],
        )
        for row, command in broken[:most]
    ]
    return Section("Properties", "properties", [Text(OUTCOMES_NOTE), properties_matrix(rows), *heading, *folded, *rest])


def properties_matrix(rows: Sequence[Row], *, shortly: bool = False) -> Table:
    """Return implementation by property; unless ``shortly``, with each property's text and the counts of outcomes."""
    lines = [
        (
            Mark(name),
            *(() if shortly else (PROPERTIES[name].description,)),
            *(_property_cell(cell, shortly) for cell in cells.values()),
        )
        for name, cells in group_by_property(rows).items()
    ]
    caption = "What holds between two calls, by property and implementation"
    columns = dict.fromkeys(row.implementation for row in rows)
    return Table(caption, ["property", *([] if shortly else ["what must hold"]), *columns], lines)


def _property_cell(rows: Sequence[Row], shortly: bool) -> Inline:
    """Write the outcome of the worst variant and, if variants differ, the counts of outcomes."""
    if (worst := worst_row(rows)) is None:
        return Mark("-", State.UNSUPPORTED)
    claim, expected = (
        f" (claims {worst.claim})" if worst.claim else "",
        ", expected" if property_state(worst) == State.XFAIL else "",
    )
    counts = Counter(row.verdict for row in rows)
    detail = ", ".join(f"{counts[word]} {word}" for word in PropertyOutcome if counts[word])
    also = () if shortly or len(counts) == 1 else (LINE_BREAK, Mark(detail, "small"))
    return (Mark(f"{worst.verdict}{claim}{expected}", property_state(worst)), *also)


def truncate(text: str, most: int) -> str:
    """Truncate a long text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
