"""The summary that every report opens with: who agrees, who is wrong and where, and what that rests on.

It says how much was evaluated, judged and compared, how much of it failed, and which printed numbers do not hold. An
implementation is blamed for its own numbers alone. What a document prints wrongly, and what is recorded of an
implementation and no longer so, are sentences of their own: of those, nobody is told to be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from attncheck.backends import ALL_ENTRIES, EAGER_MODE
from attncheck.common.errors import ExitCode
from attncheck.common.wording import READ_AS_PREFIX, count_noun, join_words, truncate_list
from attncheck.reports import coverage
from attncheck.reports.cells import FAILS_A_RUN, Cell, cell_table
from attncheck.reports.document_model import Inline, Mark
from attncheck.reports.frames import (
    Column,
    Frames,
    are_by_convention,
    cached_for_frames,
    count_numbers,
    group_by_key,
    is_document,
    select_expected_failures,
    select_failing,
    split_by,
)
from attncheck.reports.properties import properties_exit_code, properties_sentence
from attncheck.spec import DECLARABLE_CONVENTIONS, DTYPES
from attncheck.spec.classes import is_composed_class
from attncheck.spec.verdicts import Verdict

_MAX_LISTED_PARTIAL = 12
"""Implementations of which a report says one by one what they lack; ``judged`` in JSON has all."""


@dataclass(frozen=True)
class Summary:
    """The opening of a report: the agreement or the failures, the share that was judged, and further facts."""

    word: str
    judged: str
    sentences: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """The sentences that report too few judged cases."""

    @property
    def first_line(self) -> str:
        """Return ``word`` and ``judged`` as one line."""
        return " ".join(f"{text}." for text in (self.word, self.judged) if text)


@cached_for_frames
def make_summary(frames: Frames) -> Summary:
    """Summarize whether the implementations agree, how many of the requested cases were judged, and the evidence."""
    short = tuple(f"Too little was judged: {line}." for line in coverage.shortfall_lines(frames))
    asked = [row for rows in frames.properties.values() for row in rows]
    part = [entry for entry in coverage.coverage_by_column(frames) if not entry.judged_all_requested]
    lacking: list[str] = []
    if len(part) > MAX_SPELT_OUT and not frames.results.empty:  # the first line has no room for these
        lacking = [f"{frames.title(entry.column, with_version=False)}: {entry.summary_text}." for entry in part]
    sentences = (
        *short,
        *fact_sentences(frames),
        *([properties_sentence(asked)] if frames.properties else []),
        *truncate_list(_MAX_LISTED_PARTIAL, lacking, "And {} more implementations were judged in part."),
        *(line for lines_of in _OMISSION_SENTENCES for line in lines_of(frames)),
    )
    return Summary(headline(frames), judged_extent(frames), sentences, short)


_OMISSION_SENTENCES = (
    coverage.padded_sentences,
    coverage.covered_by_others_sentences,
    coverage.undeclared_dtype_sentences,
    coverage.selection_sentences,
)
"""Functions that list padded cases, cases that others stand for, undeclared dtypes, and the selection of a run."""


def comparison_exit_code(frames: Frames) -> ExitCode:
    """Return the exit code of a comparison; the first that applies."""
    bad = pd.concat([select_failing(frames.results), select_failing(frames.numbers), select_failing(frames.pairs)])
    codes = {Verdict(verdict).exit_code for verdict in bad["verdict"]}
    asked = [row for rows in frames.properties.values() for row in rows]
    codes |= {properties_exit_code(asked)} - {ExitCode.AGREE} if asked else set()
    if frames.has_faults:
        return ExitCode.BAD_INPUT
    if ExitCode.DISAGREE in codes:
        return ExitCode.DISAGREE
    return ExitCode.NOT_RUN if codes or frames.problems or coverage.shortfall_lines(frames) else ExitCode.AGREE


@cached_for_frames
def verdict_table(frames: Frames) -> dict[str, dict[Column, Inline]]:
    """Return the words for every case and column: the worst verdict, where it begins, in which dtypes."""
    return {
        case: {column: _verdict_cell(cells[column]) if column in cells else "not run" for column in frames.columns}
        for case, cells in cell_table(frames).items()
    }


def _verdict_cell(cells: Mapping[str, Cell]) -> Inline:
    """Return one word for all dtypes, or one per dtype if they differ; words that fail a run are bold."""
    words: dict[str, Inline] = {
        dtype: (Mark(cell.word, "strong"), cell.text[len(cell.word) :]) if cell.state in FAILS_A_RUN else cell.word
        for dtype, cell in cells.items()
    }
    first, *others = words.values()
    if all(word == first for word in others):
        return first
    parts = [part for dtype, word in words.items() for part in ("; ", f"{dtype}: ", word)]
    return tuple(parts[1:])


def fact_sentences(frames: Frames) -> tuple[str, ...]:
    """Return the sentences about evaluations, stages, pairs, printed numbers and expected failures."""
    sentences = (
        _evaluations_sentence,
        _stages_sentence,
        _pairs_sentence,
        _numbers_sentence,
        _expected_failures_sentence,
    )
    return tuple(text for sentence in sentences if (text := sentence(frames)))


def _evaluations_sentence(frames: Frames) -> str:
    results = frames.results
    ran = set(results.loc[results["verdict"].ne(Verdict.UNSUPPORTED), "dtype"])
    dtypes = [dtype for dtype in DTYPES if dtype in ran]
    columns = frames.columns
    keys = ["environment", "implementation", "case", "dtype"]
    evaluations = len(results[keys].drop_duplicates())
    judged = len(coverage.select_judged_rows(frames).drop_duplicates())
    environments = results["environment"].nunique()
    where = f" in {environments} environments" if environments > 1 else ""
    part = "all" if judged == evaluations else f"{judged:,}" if judged else "none"
    share = f", {part} of them judged" if evaluations else ""
    return (
        f"{count_noun(results['case'].nunique(), 'case')} on {count_noun(len(columns), 'implementation')}{where} "
        f"in {join_words(dtypes) or 'no dtype'}: {count_noun(evaluations, 'evaluation')}{share}."
    )


def _stages_sentence(frames: Frames) -> str:
    stages = frames.results[frames.results["stage"] != ""]
    judged = stages[stages["verdict"].ne(Verdict.UNVERIFIED)]
    if judged.empty:
        return "No stage was compared with the exact answer."
    bad = len(select_failing(judged))
    warned = judged["tier"].eq("warning") | judged["introduced_tier"].eq("warning")
    noisy = int((judged["verdict"].eq(Verdict.AGREE) & warned).sum())
    one = len(judged) == 1
    held = "it is within its error bound" if one else "all are within their error bounds"
    text = (
        f"{count_noun(len(judged), 'stage')} {'was' if one else 'were'} compared with the exact answer; "
        f"{f'{bad} fail' if bad > 1 else '1 fails' if bad else held}{_exceptions_text(judged)}."
    )
    if noisy:
        text += f" {noisy} {'are' if noisy > 1 else 'is'} noisier than known good implementations, a warning."
    if (open_ := int(judged["unjudged"].sum())) > 0:
        stages_of = count_noun(int(judged["unjudged"].gt(0).sum()), "stage")
        text += f" {count_noun(open_, 'element')} of {stages_of} have no exact answer and were not judged."
    sampled = judged.loc[judged["query_rows"].notna(), "case"].nunique()
    if sampled:
        text += f" In {count_noun(sampled, 'large case')}, only a sample of the query rows was checked."
    return text


def _exceptions_text(rows: pd.DataFrame) -> str:
    expected = select_expected_failures(rows)
    conventions = int(are_by_convention(expected).sum())
    parts = [count_noun(len(expected) - conventions, "expected failure")] if len(expected) > conventions else []
    parts += [f"{conventions:,} of another convention"] if conventions else []
    return f", except for {join_words(parts)}" if parts else ""


def _expected_failures_sentence(frames: Frames) -> str:
    """Count the evaluations that fail as expected, or by a convention; empty if none does."""
    expected = select_expected_failures(frames.results)
    is_convention, sentences = are_by_convention(expected), []
    for rows, verbs, how in (
        (expected[~is_convention], ("fails", "fail"), "as expected (xfail)"),
        (expected[is_convention], ("follows", "follow"), "another convention for queries without a key"),
    ):
        evaluations = len(rows[["environment", "implementation", "case", "dtype"]].drop_duplicates())
        whose = f"of {count_noun(len(rows[_KEYS].drop_duplicates()), 'implementation')}"
        sentence = (
            f"{count_noun(evaluations, 'evaluation')} {whose} {verbs[evaluations > 1]} {how}, which fails no run."
        )
        sentences += [sentence] if evaluations else []
    return " ".join(sentences)


def _compared_pairs(frames: Frames) -> pd.DataFrame:
    """Return the pairs with a verdict: without a bound, a difference proves nothing."""
    return frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]


def _pairs_sentence(frames: Frames) -> str:
    compared, bad = len(_compared_pairs(frames)), len(select_failing(frames.pairs))
    if frames.pairs.empty and len(frames.columns) == 1:
        return ""
    text = (
        f"Of {count_noun(compared, 'comparison')} of two implementations at one stage, "
        f"{'none disagrees' if bad == 0 else f'{bad} disagree' if bad > 1 else '1 disagrees'}"
        f"{_exceptions_text(frames.pairs)}."
    )
    others = len(frames.pairs) - compared
    if others:
        text += f" In {others:,} more the values differ and were not compared: no exact answer bounds them."
    return text


def _numbers_sentence(frames: Frames) -> str:
    """Count the printed numbers that hold; numbers under a recorded erratum are counted separately."""
    counts = coverage.count_printed_numbers(frames)
    sentences = [_printed_sentence(counts)] if counts.printed else []
    if counts.errata:
        sentences.append(
            "1 printed number comes from a different call than the document shows; it is listed as an erratum."
            if counts.errata == 1
            else f"{counts.errata:,} printed numbers come from a different call than the document shows; they are "
            "listed as errata."
        )
    if not sentences:
        sentences.append(_numbers_without_documents_sentence(frames))
    if counts.not_returned:
        stages = count_noun(counts.not_returned, "stage")
        those = "that stage" if counts.not_returned == 1 else "those stages"
        sentences.append(f"Expected values for {stages} were not compared: no implementation returned {those}.")
    return " ".join([*sentences, *_computed_numbers_sentences(frames)])


def _numbers_without_documents_sentence(frames: Frames) -> str:
    """Count the numbers of cases that were compared, for runs without printed numbers of documents."""
    given_numbers = frames.numbers[frames.numbers["basis"].isin(["printed", "known"])]
    if given_numbers.empty:
        return "No printed number was compared."
    bad = len(select_failing(given_numbers))
    held = "every one holds" if not bad else f"{bad} of {len(given_numbers)} comparisons fail"
    return f"The cases give {count_noun(count_numbers(given_numbers), 'number')} to compare with: {held}."


def _printed_sentence(counts: coverage.NumberCounts) -> str:
    """Count every printed number once."""
    if counts.hold == counts.printed:
        return f"The documents print {count_noun(counts.printed, 'number')}: every one holds."
    one_or_many = (
        (counts.hold, "holds", "hold"),
        (counts.misprints, "does not hold", "do not hold"),
        (counts.missed, "is missed by an implementation", "are missed by an implementation"),
        (counts.unverified, "is unverified", "are unverified"),
    )
    parts = [f"{number:,} {one if number == 1 else many}" for number, one, many in one_or_many if number]
    why = ": there is no exact answer to compare with" if counts.unverified else ""
    return f"Of {count_noun(counts.printed, 'printed number')} {join_words(parts)}{why}."


def _computed_numbers_sentences(frames: Frames) -> list[str]:
    documents = [key for key, case in frames.cases.items() if is_document(case)]
    unprinted = frames.numbers[frames.numbers["case"].isin(documents) & frames.numbers["basis"].eq("exact")]
    if unprinted.empty:
        return []
    bad, open_ = len(select_failing(unprinted)), int(unprinted["verdict"].eq(Verdict.UNVERIFIED).sum())
    text = f"{bad} of {len(unprinted)} comparisons of them fail" if bad else "all are within their error bounds"
    if open_:
        text = f"{bad} of {len(unprinted)} comparisons of them fail and {open_} are unverified"
    count = count_numbers(unprinted)
    return [f"{count:,} further numbers are computed by the documents and not printed; {text}."]


MAX_NAMED = 4
"""Implementations that one line names."""
MAX_SPELT_OUT = 2
"""Implementations of which one line says what they lack."""
_KEYS = ["environment", "implementation"]


@cached_for_frames
def headline(frames: Frames) -> str:
    """Return which implementations agree, and what is wrong, without the last full stop."""
    covered = coverage.coverage_by_column(frames)
    if frames.results.empty:
        return f"Nothing was run: {_empty_run_reason(frames)}"
    if not any(entry.judged for entry in covered):
        stopped = frames.results["verdict"].isin(coverage.STOPPING_VERDICTS).all()
        return ". ".join(["Nothing could be run" if stopped else "Nothing was judged", *_document_sentences(frames)])
    return ". ".join([_implementations_extent(frames, covered), *_document_sentences(frames)])


def _empty_run_reason(frames: Frames) -> str:
    """Return why the run has no row."""
    if frames.problems:
        return frames.problems[0]
    if not frames.columns:
        return "none of the implementations is installed"
    if not any(asked.cases for asked in frames.requests.values()):
        return "no case was left to run"
    names = " or ".join(frames.title(column) for column in frames.columns[:MAX_NAMED])
    return f"no case has a dtype that {names} declares"


def judged_extent(frames: Frames) -> str:
    """Return how many of the requested cases were judged, and what the rest lacks, without the last full stop."""
    covered = coverage.coverage_by_column(frames)
    if frames.results.empty:
        return ""
    if len(covered) == 1:
        return f"J{covered[0].summary_text[1:]}"
    part = [entry for entry in covered if not entry.judged_all_requested]
    standard = [entry for entry in covered if entry.judged_all_requested and entry.covered_by_standard_cases]
    whole = [entry for entry in covered if entry.judged_all_requested and not entry.covered_by_standard_cases]
    if standard and not part and len({entry.asked for entry in covered}) == 1:
        return _standard_cases_text(frames, whole, standard)
    if len(part) <= MAX_SPELT_OUT:
        sentences = [f"{_short_implementation_name(frames, entry.column)}: {entry.summary_text}" for entry in part]
    else:
        short = [
            f"{_short_implementation_name(frames, entry.column)} {entry.judged:,} "
            f"of {entry.offered_cases or entry.requested_cases:,}"
            for entry in part[:MAX_NAMED]
        ]
        more = f" and {len(part) - MAX_NAMED} more" if len(part) > MAX_NAMED else ""
        sentences = [f"Not judged in all cases: {', '.join(short)}{more}"]
    sentences += [f"{_short_implementation_name(frames, entry.column)}: {entry.summary_text}" for entry in standard]
    if whole:
        asked = {(entry.offered_cases, entry.dtypes_note) for entry in whole}
        number, in_dtypes = next(iter(asked))
        cases = f"{number:,} of {count_noun(number, 'case')}{in_dtypes}" if len(asked) == 1 else "all of their cases"
        others = "The other" if len(whole) == 1 else "The others"
        sentences.append(f"{others}: judged {cases}" if sentences else f"Judged {cases} on each")
    return ". ".join(sentences)


def _standard_cases_text(
    frames: Frames, whole: Sequence[coverage.Coverage], standard: Sequence[coverage.Coverage]
) -> str:
    """List the implementations that were judged in all cases, and in the standard cases."""
    alike = group_by_key(
        [*whole, *standard],
        lambda entry: (
            f"the {count_noun(entry.judged, 'standard case')}, which cover the rest"
            if entry.covered_by_standard_cases
            else f"{entry.judged:,} of {count_noun(entry.offered_cases, 'case')}{entry.dtypes_note}"
        ),
    )
    names = ([_short_implementation_name(frames, entry.column) for entry in entries] for entries in alike.values())
    few = (", ".join(group) if len(group) <= MAX_NAMED else f"{len(group)} implementations" for group in names)
    return "; ".join(f"{who}: {judged}" for who, judged in zip(few, alike, strict=True))


def _implementations_extent(frames: Frames, covered: Sequence[coverage.Coverage]) -> str:
    bad, numbers = select_failing(frames.results), select_failing(frames.numbers)
    is_stopped = bad["verdict"].isin(coverage.STOPPING_VERDICTS)
    # An implementation is to blame for the numbers that it computes.
    blamed = (
        bad[~is_stopped & bad["verdict"].ne(Verdict.XPASS)],
        numbers[~numbers["verdict"].isin(coverage.DOCUMENT_VERDICTS)],
    )
    wrong, stopped = _cases_by_column(pd.concat(blamed)), _cases_by_column(bad[is_stopped])
    judged = [entry for entry in covered if entry.judged]
    few = [
        entry
        for entry in judged
        if frames.requests[entry.column.environment].is_hardly_judged(
            entry.column.implementation, entry.judged, entry.lacks.not_offered
        )
    ]
    right = [entry for entry in judged if entry.column.key not in wrong and entry not in few]
    clauses = _wrong_sentences(frames, judged, wrong)
    clauses += [
        f"{_short_implementation_name(frames, entry.column)} was judged in too few cases to say that it agrees"
        for entry in few
        if entry.column.key not in wrong
    ]
    if right:
        clauses.append(_right_sentence(frames, right, alone=not wrong))
    clauses += _disagreement_sentence(frames, wrong)
    if not_judged := [entry for entry in covered if not entry.judged]:
        names = _implementation_names(frames, not_judged)
        clauses.append(f"{names} {'was' if len(not_judged) == 1 else 'were'} judged in no case")
    if ended := [asked.stopped for asked in frames.requests.values() if asked.stopped]:
        failing_cases = count_noun(sum(stop.failing for stop in ended), "failing case")
        clauses.append(f"{'the run was' if len(frames.requests) == 1 else 'a run was'} stopped after {failing_cases}")
    if stopped:
        cases = count_noun(len(set().union(*stopped.values())), "case")
        names = _implementation_names(frames, [item for item in covered if item.column.key in stopped])
        clauses.append(f"in {cases}, {names} could not be run")
    elif frames.problems:
        clauses.append("not everything could be run")
    text = "; ".join(clauses)
    return f"All{text[3:]}" if text.startswith("all ") else text


def _wrong_sentences(
    frames: Frames, judged: Sequence[coverage.Coverage], wrong: dict[tuple[str, str], set[str]]
) -> list[str]:
    blamed = [entry for entry in judged if entry.column.key in wrong]
    blamed.sort(key=lambda entry: -len(wrong[entry.column.key]))
    clauses = []
    for entry in blamed:
        cases = len(wrong[entry.column.key])
        many = "all" if cases == entry.judged else f"{cases:,} of"
        part = f"{many} {entry.judged:,} judged cases" if entry.judged > 1 else "the only judged case"
        name, declared = _short_implementation_name(frames, entry.column), _declarations_text(frames, [entry])
        clauses.append(f"{name} is wrong in {part}{declared}")
    return truncate_list(MAX_NAMED, clauses, "{} more implementations are wrong")


def _declarations_text(frames: Frames, entries: Sequence[coverage.Coverage]) -> str:
    """List the declared conventions and accuracy classes by which implementations are judged; empty for none."""
    parts = []
    for entry in entries:
        column, whose = (
            entry.column,
            "" if len(entries) == 1 else f"{_short_implementation_name(frames, entry.column)} ",
        )
        declared = frames.requests[column.environment].conventions.get(column.implementation, {})
        if words := [values[declared[name]] for name, values in DECLARABLE_CONVENTIONS.items() if name in declared]:
            parts.append(f", {whose}{READ_AS_PREFIX}{join_words(words)}")
        classes = frames.classes.get(column.key, {})
        if traded := {dtype: name for dtype, name in classes.items() if is_composed_class(name)}:
            ran = frames.results["dtype"][frames.results["implementation"].eq(column.implementation)].unique()
            held = [f"{name} in {dtype}" for dtype, name in traded.items() if dtype in ran]
            parts += [f", {whose}held to {join_words(held)}"] if held else []
    return "".join(parts)


def _right_sentence(frames: Frames, right: Sequence[coverage.Coverage], *, alone: bool) -> str:
    """Name the implementations that agree with the exact answer, and with each other if there are several."""
    keys, parts = {entry.column.key for entry in right}, []
    expected = select_expected_failures(frames.results)
    by_choice = are_by_convention(expected)
    for rows, what in ((expected[~by_choice], "expected failures"), (expected[by_choice], "another convention")):
        if cases := set().union(*(cases for key, cases in _cases_by_column(rows).items() if key in keys)):
            parts.append(f"{what} in {count_noun(len(cases), 'case')}")
    aside = f", except for {join_words(parts)}" if parts else ""
    verb = "agrees" if len(right) == 1 else "agree"
    names = _implementation_names(frames, right)
    if len(right) > MAX_NAMED and not alone:
        names = f"the other {names}"
    if len(right) == 1 or _compared_pairs(frames).empty:
        where = "" if all(entry.judged_all_requested for entry in right) or not alone else " where judged"
        sentences = f"{names} {verb} with the exact answer{where}{aside}"
        sentences += "" if len(right) == 1 else ", and no two of them could be compared"
        return f"{sentences}{_declarations_text(frames, right)}"
    return f"{names} {verb}{aside}{_declarations_text(frames, right)}"


def _disagreement_sentence(frames: Frames, wrong: dict[tuple[str, str], set[str]]) -> list[str]:
    """Name two implementations that differ although neither is wrong; empty if there are none."""
    pairs = select_failing(frames.pairs)
    columns = [pairs[name] for name in ("environment", "implementation", "other_environment", "other")]
    loose = pairs[[pair[:2] not in wrong and pair[2:] not in wrong for pair in zip(*columns, strict=True)]]
    if loose.empty:
        return []
    names = loose[[column.name for column in columns]].drop_duplicates()
    first_environment, first, second_environment, second = names.iloc[0]
    names_of_two = (
        frames.name_with_environment(first, first_environment),
        frames.name_with_environment(second, second_environment),
    )
    who = " and ".join(names_of_two)
    who = who if len(names) == 1 else f"{len(names)} pairs of implementations"
    return [f"{who} differ in {count_noun(loose['case'].nunique(), 'case')}"]


def _document_sentences(frames: Frames) -> list[str]:
    """Count the printed numbers that do not hold, and the unverified ones, in a sentence each."""
    numbers = coverage.count_printed_numbers(frames)
    of_all = f"of {count_noun(numbers.printed, 'printed number')}"
    kinds = (
        (numbers.misprints, "does not hold", "do not hold"),
        (numbers.unverified, "is unverified", "are unverified"),
    )
    sentences = [f"{number:,} {of_all} {one if number == 1 else many}" for number, one, many in kinds if number]
    bad = select_failing(frames.results)
    if outdated := bad.loc[bad["verdict"].eq(Verdict.XPASS), "message"].nunique() + numbers.outdated:
        sentences.append("1 record no longer holds" if outdated == 1 else f"{outdated:,} records no longer hold")
    return sentences


def _cases_by_column(rows: pd.DataFrame) -> dict[tuple[str, str], set[str]]:
    return {key: set(part["case"]) for key, part in split_by(rows, _KEYS).items()}


def _implementation_names(frames: Frames, entries: Sequence[coverage.Coverage]) -> str:
    """Name a few implementations, count many."""
    if len(entries) > MAX_NAMED:
        return f"{'all ' if len(entries) == len(frames.columns) else ''}{len(entries)} implementations"
    return join_words(_short_implementation_name(frames, entry.column) for entry in entries)


def _short_implementation_name(frames: Frames, column: Column) -> str:
    """Name an implementation: the default mode of a framework, if no other mode ran, only by the framework."""
    framework, _, mode = column.implementation.partition(".")
    alike = {peer.implementation for peer in frames.columns if peer.implementation.startswith(f"{framework}.")}
    default = ALL_ENTRIES[framework].default_mode if framework in ALL_ENTRIES else EAGER_MODE
    short = framework if mode == default and len(alike) == 1 else column.implementation
    same = sum(peer.implementation == column.implementation for peer in frames.columns)
    return f"{short} ({column.environment})" if same > 1 else short
