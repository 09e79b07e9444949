"""The answer, and the verdict of every case on every implementation: what all reports open with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.reports.cells import FAILS_A_RUN, Cell, cell_table
from attncheck.reports.coverage import counted, coverage, judged_rows, narrowings, unjudged
from attncheck.reports.frames import (
    Column,
    Frames,
    count_numbers,
    expected_failures,
    failing,
    is_document,
    once_for_frames,
    records,
    stage_order,
)
from attncheck.reports.headline import MAX_SPELT_OUT, extent, headline
from attncheck.reports.padded import padded_sentences
from attncheck.reports.printed_numbers import OF_DOCUMENTS, NumberCounts, misprints, number_counts
from attncheck.reports.simplest import simplest_first
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict

_MAX_IN_PART = 12
"""Implementations of which a report says one by one what they lack; ``judged`` in JSON has all."""


@dataclass(frozen=True)
class Summary:
    """What a report says first: who agrees and what is wrong, how much was judged of what was asked, and the facts."""

    word: str
    judged: str
    sentences: tuple[str, ...]

    @property
    def first_line(self) -> str:
        """Return both as one line."""
        return " ".join(f"{text}." for text in (self.word, self.judged) if text)


@once_for_frames
def make_summary(frames: Frames) -> Summary:
    """Say whether the implementations agree, how much of what was asked was judged, and on what that rests."""
    short = tuple(f"Too little was judged: {line}." for line in unjudged(frames))
    facts = (_extent, _stages_sentence, _pairs_sentence, _numbers_sentence, _known_sentence)
    sentences = tuple(text for sentence in facts if (text := sentence(frames)))
    rest = (*_in_part(frames), *padded_sentences(frames), *narrowings(frames))
    return Summary(headline(frames), extent(frames), (*short, *sentences, *rest))


def _in_part(frames: Frames) -> list[str]:
    """Say of each implementation what it lacks, where the first line has no room for that."""
    part = [each for each in coverage(frames) if not each.is_whole]
    if len(part) <= MAX_SPELT_OUT or frames.results.empty:
        return []
    many = len(frames.asked) > 1
    names = [each.column.title(with_environment=many, with_version=False) for each in part[:_MAX_IN_PART]]
    sentences = [f"{name}: {each.words}." for name, each in zip(names, part, strict=False)]
    more = len(part) - len(sentences)
    return [*sentences, *([f"And {more} more implementations were judged in part."] if more else [])]


def exit_code_of(frames: Frames) -> ExitCode:
    """Return the exit code of a comparison; the first that applies."""
    bad = pd.concat([failing(frames.results), failing(frames.numbers), failing(frames.pairs)])
    codes = {Verdict(verdict).exit_code for verdict in bad["verdict"]}
    if frames.has_faults:
        return ExitCode.BAD_INPUT
    if ExitCode.DISAGREE in codes:
        return ExitCode.DISAGREE
    return ExitCode.NOT_RUN if codes or frames.is_incomplete or unjudged(frames) else ExitCode.AGREE


def _extent(frames: Frames) -> str:
    results = frames.results
    ran = set(results.loc[results["verdict"].ne(Verdict.UNSUPPORTED), "dtype"])
    dtypes = [dtype for dtype in DTYPES if dtype in ran]
    columns = frames.columns
    keys = ["environment", "implementation", "case", "dtype"]
    evaluations = len(results[keys].drop_duplicates())
    judged = len(judged_rows(frames).drop_duplicates())
    environments = results["environment"].nunique()
    where = f" in {environments} environments" if environments > 1 else ""
    return (
        f"{_count(results['case'].nunique(), 'case')} on {_count(len(columns), 'implementation')}{where} "
        f"in {_listed(dtypes) or 'no dtype'}: {_count(evaluations, 'evaluation')}, "
        f"{'all' if judged == evaluations else f'{judged:,}' if judged else 'none'} of them judged."
    )


def _listed(names: Sequence[str]) -> str:
    """Write one, two, or one, two and three."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else "".join(names)


def _stages_sentence(frames: Frames) -> str:
    stages = frames.results[frames.results["stage"] != ""]
    judged = stages[stages["verdict"].ne(Verdict.UNVERIFIED)]
    if judged.empty:
        return "No stage was held against the exact answer."
    bad = len(failing(judged))
    warned = judged["tier"].eq("warning") | judged["introduced_tier"].eq("warning")
    noisy = int((judged["verdict"].eq(Verdict.AGREE) & warned).sum())
    text = (
        f"Of {_count(len(judged), 'stage')} held against the exact answer, "
        f"{'every one is within its error bound' if bad == 0 else f'{bad} fail' if bad > 1 else '1 fails'}"
        f"{_but_for(judged)}."
    )
    if noisy:
        text += f" {noisy} {'are' if noisy > 1 else 'is'} noisier than known good implementations, a warning."
    if (open_ := int(judged["unjudged"].sum())) > 0:
        stages_of = _count(int(judged["unjudged"].gt(0).sum()), "stage")
        text += f" {_count(open_, 'element')} of {stages_of} have no exact answer and were not judged."
    sampled = judged.loc[judged["query_rows"].notna(), "case"].nunique()
    if sampled:
        text += f" In {_count(sampled, 'large case')} some query rows stand for all."
    return text


def _but_for(rows: pd.DataFrame) -> str:
    expected = len(expected_failures(rows))
    return f", but for {counted(expected, 'expected failure')}" if expected else ""


def _known_sentence(frames: Frames) -> str:
    """Count the evaluations that fail as expected; empty where none does."""
    expected = expected_failures(frames.results)
    if expected.empty:
        return ""
    evaluations = len(expected[["environment", "implementation", "case", "dtype"]].drop_duplicates())
    implementations = len(expected[["environment", "implementation"]].drop_duplicates())
    return (
        f"{_count(evaluations, 'evaluation')} of {_count(implementations, 'implementation')} "
        f"{'fails' if evaluations == 1 else 'fail'} as expected (xfail), which fails no run."
    )


def _compared(frames: Frames) -> pd.DataFrame:
    """Return the pairs of which something is known: without a bound, values that differ say nothing."""
    return frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]


def _pairs_sentence(frames: Frames) -> str:
    compared, bad = len(_compared(frames)), len(failing(frames.pairs))
    if frames.pairs.empty and len(frames.columns) == 1:
        return ""
    text = (
        f"Of {_count(compared, 'comparison')} of two implementations at one stage, "
        f"{'none disagrees' if bad == 0 else f'{bad} disagree' if bad > 1 else '1 disagrees'}"
        f"{_but_for(frames.pairs)}."
    )
    others = len(frames.pairs) - compared
    if others:
        text += f" In {others:,} more the values differ and were not compared: no exact answer bounds them."
    return text


def _numbers_sentence(frames: Frames) -> str:
    """Say which of the printed numbers hold; those under a recorded erratum are counted apart."""
    found = number_counts(frames)
    sentences = [_printed_sentence(found)] if found.printed else []
    if found.errata:
        sentences.append(
            f"{_count(found.errata, 'number')} printed for another call than the one shown "
            f"{'is' if found.errata == 1 else 'are'} recorded as errata."
        )
    if not sentences:
        sentences.append("No printed number of a document was compared.")
    if found.not_returned:
        stages, them = ("a stage", "it") if found.not_returned == 1 else (f"{found.not_returned} stages", "them")
        sentences.append(f"The printed numbers of {stages} were not compared: no implementation returned {them}.")
    return " ".join([*sentences, *_unprinted_sentence(frames)])


def _printed_sentence(found: NumberCounts) -> str:
    """Count every printed number once."""
    if found.hold == found.printed:
        return f"The documents print {_count(found.printed, 'number')}: every one holds."
    one_or_many = (
        (found.hold, "holds", "hold"),
        (found.misprints, "does not hold", "do not hold"),
        (found.missed, "is missed by an implementation", "are missed by an implementation"),
        (found.unverified, "is unverified", "are unverified"),
    )
    parts = [f"{number:,} {one if number == 1 else many}" for number, one, many in one_or_many if number]
    why = ": there is no exact answer to compare with" if found.unverified else ""
    return f"Of {_count(found.printed, 'printed number')} {_listed(parts)}{why}."


def _unprinted_sentence(frames: Frames) -> list[str]:
    documents = [key for key, case in frames.cases.items() if is_document(case)]
    unprinted = frames.numbers[frames.numbers["case"].isin(documents) & frames.numbers["basis"].eq("exact")]
    if unprinted.empty:
        return []
    bad, open_ = len(failing(unprinted)), int(unprinted["verdict"].eq(Verdict.UNVERIFIED).sum())
    text = f"{bad} of {len(unprinted)} comparisons of them fail" if bad else "every one is within its error bound"
    if open_:
        text = f"{bad} of {len(unprinted)} comparisons of them fail and {open_} are unverified"
    return [
        f"{count_numbers(unprinted)} further numbers are computed by the documents and not printed; held against "
        f"the exact answer, {text}."
    ]


@once_for_frames
def verdict_table(frames: Frames) -> dict[str, dict[Column, str]]:
    """Return the words for every case and column: the worst verdict, where it begins, in which dtypes."""
    return {
        case: {column: _cell(cells[column]) if column in cells else "not run" for column in frames.columns}
        for case, cells in cell_table(frames).items()
    }


def _cell(cells: Mapping[str, Cell]) -> str:
    """Say one word for all dtypes, or one per dtype where they differ."""
    words = {dtype: _word(cell) for dtype, cell in cells.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{dtype}: {word}" for dtype, word in words.items())


def _word(cell: Cell) -> str:
    if cell.state not in FAILS_A_RUN:
        return cell.word
    return f"**{cell.word}** at {cell.stage}" if cell.stage else f"**{cell.word}**"


def what_is_wrong(frames: Frames, *, with_records: bool = True) -> pd.DataFrame:
    """Return one row per failing case, dtype and implementation: where it begins, and how many rows fail in all.

    Pairs are the evidence behind a stage's verdict and are listed only where no stage is blamed. ``with_records``, what
    is printed or recorded wrongly is listed too, with every implementation that shows it.
    """
    columns = ["case", "dtype", "environment", "implementation", "stage", "verdict", "message"]
    results, numbers = failing(frames.results), failing(frames.numbers)
    if not with_records:
        results = results[results["verdict"].ne(Verdict.XPASS)]
        numbers = numbers[~numbers["verdict"].isin(OF_DOCUMENTS)]
    results = results[[*columns, "begins_at"]].assign(is_number=False)
    bad = pd.concat([results, numbers[columns].assign(is_number=True)])
    pairs = failing(frames.pairs)
    explained = set(zip(bad["case"], bad["dtype"], bad["stage"], strict=True))
    loose = pairs[[key not in explained for key in zip(pairs["case"], pairs["dtype"], pairs["stage"], strict=True)]]
    if len(loose):
        bad = pd.concat([bad, loose.assign(message=_pair_messages(loose))[columns].assign(is_number=False)])
    if bad.empty:
        return bad[columns].assign(rows=0)
    keys = ["case", "dtype", "environment", "implementation"]
    # A stage that only inherits an error comes after the one where it begins, wherever it stands in the computation.
    # So does a number, of a stage that fails itself: what is said of the stage says why the number misses.
    inherited = (bad["begins_at"].notna() & bad["begins_at"].ne(bad["stage"])) | bad["is_number"]
    # An implementation that does not return the stage where it goes wrong is told it all the same.
    begins_at = bad["begins_at"].where(bad["begins_at"].notna(), bad["stage"])
    bad = bad.assign(inherited=inherited, order=bad["stage"].map(stage_order), stage=begins_at)
    bad = bad.sort_values([*keys, "inherited", "order"], kind="stable")
    first = bad.groupby(keys, sort=False).first().reset_index()
    first["rows"] = bad.groupby(keys, sort=False).size().to_numpy()
    return first[[*columns, "rows"]]


@once_for_frames
def findings(frames: Frames) -> pd.DataFrame:
    """Return what is reported as wrong: of implementations as above, of documents and records each thing once.

    The simplest cases come first.
    What is printed or recorded wrongly has neither implementation nor dtype: every one of them shows it.
    """
    wrong = what_is_wrong(frames, with_records=False)
    found = [
        dict.fromkeys(wrong.columns, "")
        | {"case": each.case, "stage": each.stage, "verdict": each.verdict, "message": each.message, "rows": each.rows}
        for each in misprints(frames)
    ]
    xpassed = failing(frames.results)
    xpassed = xpassed[xpassed["verdict"].eq(Verdict.XPASS)].drop_duplicates("message")
    found += [
        {name: row.get(name, "") for name in wrong.columns} | {"implementation": row["implementation"], "rows": 1}
        for row in records(xpassed)
    ]
    wrong = simplest_first(frames, wrong)
    return pd.concat([wrong, pd.DataFrame(found, columns=wrong.columns)], ignore_index=True) if found else wrong


def _pair_messages(pairs: pd.DataFrame) -> list[str]:
    return [
        f"differs from {row['other']}"
        + (f": {row['message']}" if row["message"] else f" by {row['difference']:.3g} at [{row['index']}]")
        for row in records(pairs)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
