"""The first line of every report: who agrees, who is wrong and where, and which printed numbers do not hold.

An implementation is blamed for its own numbers alone. What a document prints wrongly, and what is recorded of an
implementation and no longer so, are sentences of their own: of those, nobody is told to be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from attncheck.backends import EAGER_MODE, EVERYTHING
from attncheck.errors import ExitCode
from attncheck.reports.coverage import Coverage, coverage
from attncheck.reports.frames import Column, Frames, by_convention, expected_failures, failing, groups, once_for_frames
from attncheck.reports.printed_numbers import OF_DOCUMENTS, number_counts
from attncheck.verdicts import Verdict
from attncheck.wording import counted, listed

MAX_NAMED = 4
"""Implementations that one line names."""
MAX_SPELT_OUT = 2
"""Implementations of which one line says what they lack."""
_STOPPED = [verdict for verdict in Verdict if verdict.exit_code is ExitCode.NOT_RUN]
_KEYS = ["environment", "implementation"]


@once_for_frames
def headline(frames: Frames) -> str:
    """Return who and what, without the last full stop."""
    found = coverage(frames)
    if frames.results.empty:
        return "Nothing was run"
    if not any(each.judged for each in found):
        stopped = frames.results["verdict"].isin(_STOPPED).all()
        return ". ".join(["Nothing could be run" if stopped else "Nothing was judged", *_of_documents(frames)])
    return ". ".join([_of_implementations(frames, found), *_of_documents(frames)])


def extent(frames: Frames) -> str:
    """Return what was judged of what was asked, and what the rest lacks, without the last full stop."""
    found = coverage(frames)
    if frames.results.empty:
        return ""
    if len(found) == 1:
        return f"J{found[0].words[1:]}"
    part = [each for each in found if not each.is_whole]
    standard = [each for each in found if each.is_whole and each.stood_for]
    whole = [each for each in found if each.is_whole and not each.stood_for]
    if standard and not part and len({each.asked for each in found}) == 1:
        return _of_standard_cases(frames, whole, standard)
    if len(part) <= MAX_SPELT_OUT:
        sentences = [f"{_name(frames, each.column)}: {each.words}" for each in part]
    else:
        short = [
            f"{_name(frames, each.column)} {each.judged:,} of {each.offered or each.standard:,}"
            for each in part[:MAX_NAMED]
        ]
        more = f" and {len(part) - MAX_NAMED} more" if len(part) > MAX_NAMED else ""
        sentences = [f"Not judged in all cases: {', '.join(short)}{more}"]
    sentences += [f"{_name(frames, each.column)}: {each.words}" for each in standard]
    if whole:
        asked = {each.asked for each in whole}
        cases = (
            f"{next(iter(asked)):,} of {counted(next(iter(asked)), 'case')}" if len(asked) == 1 else "all of its cases"
        )
        others = "The other" if len(whole) == 1 else "The others"
        sentences.append(f"{others}: judged {cases}" if sentences else f"Judged {cases} on each")
    return ". ".join(sentences)


def _of_standard_cases(frames: Frames, whole: Sequence[Coverage], standard: Sequence[Coverage]) -> str:
    """Say who was judged in all cases, and who in the standard ones."""
    parts = [f"{_listed(frames, whole)}: {whole[0].judged:,} of {counted(whole[0].asked, 'case')}"] if whole else []
    for count in dict.fromkeys(each.judged for each in standard):
        names = _listed(frames, [each for each in standard if each.judged == count])
        parts.append(f"{names}: the {counted(count, 'standard case')}, which cover the rest")
    return "; ".join(parts)


def _listed(frames: Frames, found: Sequence[Coverage]) -> str:
    names = [_name(frames, each.column) for each in found]
    return ", ".join(names) if len(names) <= MAX_NAMED else f"{len(names)} implementations"


def _of_implementations(frames: Frames, found: Sequence[Coverage]) -> str:
    wrong = _cases_of(_blamed(frames))
    bad = failing(frames.results)
    stopped = _cases_of(bad[bad["verdict"].isin(_STOPPED)])
    judged = [each for each in found if each.judged]
    right = [each for each in judged if _key(each) not in wrong]
    clauses = _wrong(frames, judged, wrong)
    if right:
        clauses.append(_right(frames, right, alone=not wrong))
    if clause := _disagreeing(frames, wrong):
        clauses.append(clause)
    if not_judged := [each for each in found if not each.judged]:
        names = _names(frames, not_judged)
        clauses.append(f"{names} {'was' if len(not_judged) == 1 else 'were'} judged in no case")
    if ended := [asked.stopped for asked in frames.asked.values() if asked.stopped]:
        failing_cases = counted(sum(each.failing for each in ended), "failing case")
        clauses.append(f"{'the run was' if len(frames.asked) == 1 else 'a run was'} stopped after {failing_cases}")
    if stopped:
        cases = counted(len(set().union(*stopped.values())), "case")
        clauses.append(f"in {cases}, {_names(frames, _with(found, stopped))} could not be run")
    elif frames.is_incomplete:
        clauses.append("not everything could be run")
    text = "; ".join(clauses)
    return f"All{text[3:]}" if text.startswith("all ") else text


def _wrong(frames: Frames, judged: Sequence[Coverage], wrong: dict[tuple[str, str], set[str]]) -> list[str]:
    blamed = sorted(_with(judged, wrong), key=lambda each: -len(wrong[_key(each)]))
    clauses = [
        f"{_name(frames, each.column)} is wrong in {_part(len(wrong[_key(each)]), each)}" for each in blamed[:MAX_NAMED]
    ]
    if len(blamed) > MAX_NAMED:
        clauses.append(f"{len(blamed) - MAX_NAMED} more implementations are wrong")
    return clauses


def _part(wrong: int, of: Coverage) -> str:
    if of.judged == 1:
        return "the only case that it was judged in"
    return f"{'all' if wrong == of.judged else f'{wrong:,} of the'} {of.judged:,} cases that it was judged in"


def _right(frames: Frames, right: Sequence[Coverage], *, alone: bool) -> str:
    """Say who agrees: with each other where several do, and with the exact answer in any case."""
    aside = _except_for(frames, {_key(each) for each in right})
    verb = "agrees" if len(right) == 1 else "agree"
    names = _names(frames, right)
    if len(right) > MAX_NAMED and not alone:
        names = f"the other {names}"
    compared = frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]
    if len(right) == 1 or compared.empty:
        where = "" if all(each.is_whole for each in right) or not alone else " where judged"
        sentences = f"{names} {verb} with the exact answer{where}{aside}"
        return sentences if len(right) == 1 else f"{sentences}, and no two of them could be compared"
    return f"{names} {verb}{aside}"


def _except_for(frames: Frames, right: set[tuple[str, str]]) -> str:
    """Say in how many cases who agrees fails as expected, and in how many it follows another convention."""
    expected = expected_failures(frames.results)
    own, parts = by_convention(expected), []
    for rows, what in ((expected[~own], "expected failures"), (expected[own], "another convention")):
        cases = set().union(*(found for key, found in _cases_of(rows).items() if key in right), set())
        parts += [f"{what} in {counted(len(cases), 'case')}"] if cases else []
    return f", except for {listed(parts)}" if parts else ""


def _blamed(frames: Frames) -> pd.DataFrame:
    """Return the rows for which an implementation is to blame: numbers that it computes."""
    stages, numbers = failing(frames.results), failing(frames.numbers)
    stages = stages[~stages["verdict"].isin([*_STOPPED, Verdict.XPASS])]
    return pd.concat([stages, numbers[~numbers["verdict"].isin(OF_DOCUMENTS)]])


def _disagreeing(frames: Frames, wrong: dict[tuple[str, str], set[str]]) -> str:
    """Say which two differ although neither is to blame; empty where none do."""
    pairs = failing(frames.pairs)
    others = zip(pairs["environment"], pairs["implementation"], strict=True)
    second = zip(pairs["other_environment"], pairs["other"], strict=True)
    loose = pairs[[one not in wrong and two not in wrong for one, two in zip(others, second, strict=True)]]
    if loose.empty:
        return ""
    names = loose[["environment", "implementation", "other_environment", "other"]].drop_duplicates()
    cases = counted(loose["case"].nunique(), "case")
    if len(names) > 1:
        return f"{len(names)} pairs of implementations differ in {cases}"
    environment, one, other_environment, other = names.iloc[0]
    many = len(frames.asked) > 1
    first, last = (
        (f"{name} ({where})" if many else name) for name, where in ((one, environment), (other, other_environment))
    )
    return f"{first} and {last} differ in {cases}"


def _of_documents(frames: Frames) -> list[str]:
    """Say of the printed numbers what does not hold and what was not compared, a sentence each."""
    numbers = number_counts(frames)
    sentences = []
    if numbers.misprints:
        verb = "does" if numbers.misprints == 1 else "do"
        sentences.append(f"{numbers.misprints:,} of {counted(numbers.printed, 'printed number')} {verb} not hold")
    if numbers.unverified:
        verb = "is" if numbers.unverified == 1 else "are"
        sentences.append(f"{numbers.unverified:,} of {counted(numbers.printed, 'printed number')} {verb} unverified")
    bad = failing(frames.results)
    if outdated := bad.loc[bad["verdict"].eq(Verdict.XPASS), "message"].nunique() + numbers.outdated:
        sentences.append("1 record no longer holds" if outdated == 1 else f"{outdated:,} records no longer hold")
    return sentences


def _cases_of(rows: pd.DataFrame) -> dict[tuple[str, str], set[str]]:
    return {key: set(part["case"]) for key, part in groups(rows, _KEYS).items()}


def _with(found: Sequence[Coverage], keys: object) -> list[Coverage]:
    return [each for each in found if _key(each) in keys]  # type: ignore[operator]


def _key(each: Coverage) -> tuple[str, str]:
    return each.column.environment, each.column.implementation


def _names(frames: Frames, found: Sequence[Coverage]) -> str:
    """Name a few implementations, count many."""
    if len(found) > MAX_NAMED:
        return f"{'all ' if len(found) == len(frames.columns) else ''}{len(found)} implementations"
    return listed(_name(frames, each.column) for each in found)


def _name(frames: Frames, column: Column) -> str:
    """Name an implementation; the default mode of a framework, where nothing else of it ran, by the framework alone."""
    framework, _, mode = column.implementation.partition(".")
    alike = {each.implementation for each in frames.columns if each.implementation.startswith(f"{framework}.")}
    default = EVERYTHING[framework].default_mode if framework in EVERYTHING else EAGER_MODE
    short = framework if mode == default and len(alike) == 1 else column.implementation
    same = sum(each.implementation == column.implementation for each in frames.columns)
    return f"{short} ({column.environment})" if same > 1 else short
