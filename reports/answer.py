"""The answer, and the verdict of every case on every implementation: what all reports open with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.properties.rows import exit_code_of as properties_exit_code
from attncheck.properties.rows import sentence_of
from attncheck.reports.cells import FAILS_A_RUN, Cell, cell_table
from attncheck.reports.coverage import coverage, narrowings, unjudged
from attncheck.reports.facts import facts
from attncheck.reports.frames import (
    Column,
    Frames,
    element_in,
    failing,
    once_for_frames,
    records,
    stage_order,
)
from attncheck.reports.headline import MAX_SPELT_OUT, extent, headline
from attncheck.reports.padded import padded_sentences
from attncheck.reports.printed_numbers import OF_DOCUMENTS, misprints
from attncheck.reports.simplest import simplest_first
from attncheck.verdicts import Verdict

_MAX_IN_PART = 12
"""Implementations of which a report says one by one what they lack; ``judged`` in JSON has all."""


@dataclass(frozen=True)
class Summary:
    """What a report says first: who agrees and what is wrong, how much was judged of what was asked, and the facts."""

    word: str
    judged: str
    sentences: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """Those of the sentences that say that too little was judged."""

    @property
    def first_line(self) -> str:
        """Return both as one line."""
        return " ".join(f"{text}." for text in (self.word, self.judged) if text)


@once_for_frames
def make_summary(frames: Frames) -> Summary:
    """Say whether the implementations agree, how much of what was asked was judged, and on what that rests."""
    short = tuple(f"Too little was judged: {line}." for line in unjudged(frames))
    rest = (*_in_part(frames), *padded_sentences(frames), *narrowings(frames))
    return Summary(headline(frames), extent(frames), (*short, *facts(frames), *_properties(frames), *rest), short)


def _properties(frames: Frames) -> list[str]:
    """Say in a sentence what properties come to, where they were asked for."""
    return [sentence_of([row for rows in frames.properties.values() for row in rows])] if frames.properties else []


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
    asked = [row for rows in frames.properties.values() for row in rows]
    codes |= {properties_exit_code(asked)} - {ExitCode.AGREE} if asked else set()
    if frames.has_faults:
        return ExitCode.BAD_INPUT
    if ExitCode.DISAGREE in codes:
        return ExitCode.DISAGREE
    return ExitCode.NOT_RUN if codes or frames.is_incomplete or unjudged(frames) else ExitCode.AGREE


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
        bad = pd.concat([bad, loose.assign(message=_pair_messages(loose, frames))[columns].assign(is_number=False)])
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
def wrong_implementations(frames: Frames) -> pd.DataFrame:
    """Return what is wrong without what documents print or lists record, for which no implementation is to blame."""
    return what_is_wrong(frames, with_records=False)


@once_for_frames
def findings(frames: Frames) -> pd.DataFrame:
    """Return what is reported as wrong: of implementations as above, of documents and records each thing once.

    The simplest cases come first.
    What is printed or recorded wrongly has neither implementation nor dtype: every one of them shows it.
    """
    wrong = wrong_implementations(frames)
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


def _pair_messages(pairs: pd.DataFrame, frames: Frames) -> list[str]:
    return [f"differs from {row['other']}{_apart(frames, row)}" for row in records(pairs)]


def _apart(frames: Frames, row: Mapping[str, Any]) -> str:
    if row["message"]:
        return f": {row['message']}"
    return f" by {row['difference']:.3g} at {element_in(frames.cases[row['case']], row)}"
