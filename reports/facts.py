"""What a comparison rests on, in sentences: what was evaluated, judged and compared, and how much of it failed."""

from __future__ import annotations

import pandas as pd

from attncheck.reports.coverage import judged_rows
from attncheck.reports.frames import Frames, by_convention, count_numbers, expected_failures, failing, is_document
from attncheck.reports.printed_numbers import NumberCounts, number_counts
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict
from attncheck.wording import counted, listed


def facts(frames: Frames) -> tuple[str, ...]:
    """Return what there is to say of evaluations, stages, pairs, printed numbers and expected failures."""
    sentences = (_evaluations_sentence, _stages_sentence, _pairs_sentence, _numbers_sentence, _known_sentence)
    return tuple(text for sentence in sentences if (text := sentence(frames)))


def _evaluations_sentence(frames: Frames) -> str:
    results = frames.results
    ran = set(results.loc[results["verdict"].ne(Verdict.UNSUPPORTED), "dtype"])
    dtypes = [dtype for dtype in DTYPES if dtype in ran]
    columns = frames.columns
    keys = ["environment", "implementation", "case", "dtype"]
    evaluations = len(results[keys].drop_duplicates())
    judged = len(judged_rows(frames).drop_duplicates())
    environments = results["environment"].nunique()
    where = f" in {environments} environments" if environments > 1 else ""
    part = "all" if judged == evaluations else f"{judged:,}" if judged else "none"
    share = f", {part} of them judged" if evaluations else ""
    return (
        f"{counted(results['case'].nunique(), 'case')} on {counted(len(columns), 'implementation')}{where} "
        f"in {listed(dtypes) or 'no dtype'}: {counted(evaluations, 'evaluation')}{share}."
    )


def _stages_sentence(frames: Frames) -> str:
    stages = frames.results[frames.results["stage"] != ""]
    judged = stages[stages["verdict"].ne(Verdict.UNVERIFIED)]
    if judged.empty:
        return "No stage was compared with the exact answer."
    bad = len(failing(judged))
    warned = judged["tier"].eq("warning") | judged["introduced_tier"].eq("warning")
    noisy = int((judged["verdict"].eq(Verdict.AGREE) & warned).sum())
    one = len(judged) == 1
    held = "it is within its error bound" if one else "all are within their error bounds"
    text = (
        f"{counted(len(judged), 'stage')} {'was' if one else 'were'} compared with the exact answer; "
        f"{f'{bad} fail' if bad > 1 else '1 fails' if bad else held}{_except_for(judged)}."
    )
    if noisy:
        text += f" {noisy} {'are' if noisy > 1 else 'is'} noisier than known good implementations, a warning."
    if (open_ := int(judged["unjudged"].sum())) > 0:
        stages_of = counted(int(judged["unjudged"].gt(0).sum()), "stage")
        text += f" {counted(open_, 'element')} of {stages_of} have no exact answer and were not judged."
    sampled = judged.loc[judged["query_rows"].notna(), "case"].nunique()
    if sampled:
        text += f" In {counted(sampled, 'large case')}, only a sample of the query rows was checked."
    return text


def _except_for(rows: pd.DataFrame) -> str:
    expected = expected_failures(rows)
    own = int(by_convention(expected).sum())
    parts = [counted(len(expected) - own, "expected failure")] if len(expected) > own else []
    parts += [f"{own:,} of another convention"] if own else []
    return f", except for {listed(parts)}" if parts else ""


def _known_sentence(frames: Frames) -> str:
    """Count the evaluations that fail as expected, or by a convention; empty where none does."""
    expected = expected_failures(frames.results)
    own = by_convention(expected)
    listed_ones, others = expected[~own], expected[own]
    sentences = [_known(listed_ones, ("fails", "fail"), "as expected (xfail)")] if len(listed_ones) else []
    if len(others):
        sentences.append(_known(others, ("follows", "follow"), "another convention for queries without a key"))
    return " ".join(sentences)


def _known(rows: pd.DataFrame, verbs: tuple[str, str], how: str) -> str:
    evaluations = len(rows[["environment", "implementation", "case", "dtype"]].drop_duplicates())
    implementations = len(rows[["environment", "implementation"]].drop_duplicates())
    return (
        f"{counted(evaluations, 'evaluation')} of {counted(implementations, 'implementation')} "
        f"{verbs[evaluations > 1]} {how}, which fails no run."
    )


def _compared(frames: Frames) -> pd.DataFrame:
    """Return the pairs of which something is known: without a bound, values that differ say nothing."""
    return frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]


def _pairs_sentence(frames: Frames) -> str:
    compared, bad = len(_compared(frames)), len(failing(frames.pairs))
    if frames.pairs.empty and len(frames.columns) == 1:
        return ""
    text = (
        f"Of {counted(compared, 'comparison')} of two implementations at one stage, "
        f"{'none disagrees' if bad == 0 else f'{bad} disagree' if bad > 1 else '1 disagrees'}"
        f"{_except_for(frames.pairs)}."
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
            "1 printed number comes from a different call than the document shows; it is listed as an erratum."
            if found.errata == 1
            else f"{found.errata:,} printed numbers come from a different call than the document shows; they are "
            "listed as errata."
        )
    if not sentences:
        sentences.append(_without_documents(frames))
    if found.not_returned:
        stages, them = ("a stage", "it") if found.not_returned == 1 else (f"{found.not_returned} stages", "them")
        sentences.append(f"The printed numbers of {stages} were not compared: no implementation returned {them}.")
    return " ".join([*sentences, *_unprinted_sentence(frames)])


def _without_documents(frames: Frames) -> str:
    """Say what was compared in place of the numbers that documents print."""
    own = frames.numbers[frames.numbers["basis"].isin(["printed", "known"])]
    if own.empty:
        return "No printed number was compared."
    bad = len(failing(own))
    held = "every one holds" if not bad else f"{bad} of {len(own)} comparisons fail"
    return f"The cases give {counted(count_numbers(own), 'number')} to compare with: {held}."


def _printed_sentence(found: NumberCounts) -> str:
    """Count every printed number once."""
    if found.hold == found.printed:
        return f"The documents print {counted(found.printed, 'number')}: every one holds."
    one_or_many = (
        (found.hold, "holds", "hold"),
        (found.misprints, "does not hold", "do not hold"),
        (found.missed, "is missed by an implementation", "are missed by an implementation"),
        (found.unverified, "is unverified", "are unverified"),
    )
    parts = [f"{number:,} {one if number == 1 else many}" for number, one, many in one_or_many if number]
    why = ": there is no exact answer to compare with" if found.unverified else ""
    return f"Of {counted(found.printed, 'printed number')} {listed(parts)}{why}."


def _unprinted_sentence(frames: Frames) -> list[str]:
    documents = [key for key, case in frames.cases.items() if is_document(case)]
    unprinted = frames.numbers[frames.numbers["case"].isin(documents) & frames.numbers["basis"].eq("exact")]
    if unprinted.empty:
        return []
    bad, open_ = len(failing(unprinted)), int(unprinted["verdict"].eq(Verdict.UNVERIFIED).sum())
    text = f"{bad} of {len(unprinted)} comparisons of them fail" if bad else "all are within their error bounds"
    if open_:
        text = f"{bad} of {len(unprinted)} comparisons of them fail and {open_} are unverified"
    count = count_numbers(unprinted)
    return [f"{count:,} further numbers are computed by the documents and not printed; {text}."]
