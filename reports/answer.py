"""The answer, and the verdict of every case on every implementation: what all reports open with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from attncheck.harness.errors import ExitCode
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import DTYPES
from attncheck.reports.cells import Cell, State, cell_table
from attncheck.reports.frames import (
    Column,
    Frames,
    count_places,
    failing,
    is_document,
    known_divergences,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)


@dataclass(frozen=True)
class Answer:
    """What a report says first: one word, one sentence, the facts."""

    word: str
    sentences: tuple[str, ...]


def make_answer(frames: Frames) -> Answer:
    """Say whether the implementations agree, and on what that rests."""
    bad = pd.concat([failing(frames.results), failing(frames.numbers)])
    verdicts = {Verdict(verdict) for verdict in bad["verdict"]}
    disagreeing = {verdict for verdict in verdicts if verdict.exit_code == 1}
    if frames.results.empty:
        word = "Nothing was run"
    elif frames.results["stage"].eq("").all():
        word = "Nothing could be run"
    elif disagreeing or len(failing(frames.pairs)):
        word = "It disagrees with the exact answer" if len(frames.columns) < 2 else "They disagree"
    elif verdicts or frames.is_incomplete:
        word = "It agrees as far as it ran" if len(frames.columns) < 2 else "They agree as far as they ran"
        word += ", but not everything could be run"
    elif len(frames.columns) < 2:
        word = "It agrees with the exact answer"
    elif _compared(frames).empty:
        word = "Nothing disagrees, but no two implementations could be compared"
    else:
        word = "They agree"
    sentences = (_extent, _stages_sentence, _pairs_sentence, _numbers_sentence, _known_sentence)
    return Answer(word, tuple(said for sentence in sentences if (said := sentence(frames))))


def exit_code_of(frames: Frames) -> ExitCode:
    """Return the exit code of a comparison; the first that applies."""
    bad = pd.concat([failing(frames.results), failing(frames.numbers), failing(frames.pairs)])
    codes = {Verdict(verdict).exit_code for verdict in bad["verdict"]}
    if frames.has_faults:
        return ExitCode.BAD_INPUT
    if ExitCode.DISAGREE in codes:
        return ExitCode.DISAGREE
    return ExitCode.NOT_RUN if codes or frames.is_incomplete else ExitCode.AGREE


def _extent(frames: Frames) -> str:
    results = frames.results
    ran = set(results.loc[results["verdict"].ne(Verdict.UNSUPPORTED), "dtype"])
    dtypes = [dtype for dtype in DTYPES if dtype in ran]
    columns = frames.columns
    evaluations = len(results[["environment", "implementation", "case", "dtype"]].drop_duplicates())
    environments = results["environment"].nunique()
    where = f" in {environments} environments" if environments > 1 else ""
    return (
        f"{_count(results['case'].nunique(), 'case')} ran on {_count(len(columns), 'implementation')}{where} "
        f"in {_listed(dtypes) or 'no dtype'}: {_count(evaluations, 'evaluation')}."
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
    warned = judged["tier"].eq("T3") | judged["introduced_tier"].eq("T3")
    noisy = int((judged["verdict"].eq(Verdict.AGREE) & warned).sum())
    text = (
        f"Of {_count(len(judged), 'stage')} held against the exact answer, "
        f"{'every one is within its error bound' if bad == 0 else f'{bad} fail' if bad > 1 else '1 fails'}"
        f"{_but_for(judged)}."
    )
    if noisy:
        text += f" {noisy} {'are' if noisy > 1 else 'is'} noisier than known good implementations, a warning."
    sampled = judged.loc[judged["query_rows"].notna(), "case"].nunique()
    if sampled:
        text += f" In {_count(sampled, 'large case')} some query rows stand for all."
    return text


def _but_for(rows: pd.DataFrame) -> str:
    known = len(known_divergences(rows))
    return f", but for {known:,} that {'are' if known > 1 else 'is'} known beforehand" if known else ""


def _known_sentence(frames: Frames) -> str:
    """Count the evaluations that diverge as is known; empty where none does."""
    known = known_divergences(frames.results)
    if known.empty:
        return ""
    evaluations = len(known[["environment", "implementation", "case", "dtype"]].drop_duplicates())
    implementations = len(known[["environment", "implementation"]].drop_duplicates())
    return (
        f"{_count(evaluations, 'evaluation')} of {_count(implementations, 'implementation')} "
        f"{'diverges' if evaluations == 1 else 'diverge'} as is known beforehand; that fails no run."
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
    """Say whether the documents' numbers hold; numbers under a recorded erratum are counted apart."""
    numbers = frames.numbers[
        frames.numbers["case"].isin([key for key, case in frames.cases.items() if is_document(case)])
    ]
    printed = numbers[numbers["printed"].notna() & (numbers["basis"] == "printed")]
    if printed.empty:
        return "No printed number of a document was compared."
    wrong_call = under_erratum(frames, printed)
    errata, regular = printed[wrong_call & printed["verdict"].eq(Verdict.MISPRINT)], printed[~wrong_call]
    misses = failing(regular)
    holds = "every one holds" if misses.empty else f"{len(misses)} of {len(regular)} comparisons with them fail"
    text = f"The documents print {count_places(regular)} numbers: {holds}." if len(regular) else ""
    if len(errata):
        text += f" {count_places(errata)} numbers printed for another call than the one shown are recorded as errata."
    unprinted = numbers[numbers["basis"] == "exact"]
    if len(unprinted):
        bad = len(failing(unprinted))
        said = f"{bad} of {len(unprinted)} comparisons of them fail" if bad else "every one is within its error bound"
        text += (
            f" {count_places(unprinted)} further numbers are computed by the documents and not printed; held against "
            f"the exact answer, {said}."
        )
    return text.strip()


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
    if cell.state is not State.FAILING:
        return cell.word
    return f"**{cell.word}** at {cell.stage}" if cell.stage else f"**{cell.word}**"


@once_for_frames
def what_is_wrong(frames: Frames) -> pd.DataFrame:
    """Return one row per failing case, dtype and implementation: where it begins, and how many rows fail in all.

    Pairs are the evidence behind a stage's verdict and are listed only where no stage is blamed.
    """
    columns = ["case", "dtype", "environment", "implementation", "stage", "verdict", "message"]
    results = failing(frames.results)
    numbers = failing(frames.numbers)[columns].assign(is_number=True)
    bad = pd.concat([results[[*columns, "begins_at"]].assign(is_number=False), numbers])
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


def _pair_messages(pairs: pd.DataFrame) -> list[str]:
    return [
        f"differs from {row['other']}"
        + (f": {row['message']}" if row["message"] else f" by {row['difference']:.3g} at [{row['index']}]")
        for row in records(pairs)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
