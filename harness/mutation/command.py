"""``attncheck mutants``: runs the catalogue, and prints its score for people or writes it for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from attncheck.errors import ExitCode
from attncheck.mutation.score import MutationFrames, in_processes, run_mutants, subjects_of
from attncheck.processors import available_processors
from attncheck.reading.selection import Selection
from attncheck.reports.frames import records
from attncheck.reports.machine.documents import header
from attncheck.reports.machine.other_documents import MutantsDocument
from attncheck.reports.machine.outcome import rows_of
from attncheck.reports.terminal import plain_console

_RULES = {
    "attncheck": "attncheck",
    "allclose": "numpy.allclose",
    "assert_close": "torch.testing.assert_close",
    "rtol_1e_3": "rtol 1e-3, atol 1e-7",
}


_SPARED = (
    "Each fault was put to cases until enough of them caught and named it, which a + behind their number marks; each "
    "right variant was put to a share of the cases. With --all-cases every small case is put to all of them, and other "
    "tolerances are tried."
)


def run(
    selection: Selection,
    topics: Collection[str],
    seeds: Sequence[int],
    processes: int | None,
    *,
    exhaustive: bool,
    as_json: bool,
) -> tuple[ExitCode, MutantsDocument | None]:
    """Put the cases to the faults of these topics, or of all; print the score, or return it ``as_json``.

    Returns the exit code too. Raises ``UsageError`` for a topic that does not exist.
    """
    subjects = subjects_of(topics)
    with in_processes(processes or available_processors()) as pool:
        frames = run_mutants(selection.cases, seeds, pool=pool, subjects=subjects, exhaustive=exhaustive)
    is_good = frames.survivors.empty and frames.flagged.empty and frames.names_well
    code = ExitCode.BAD_INPUT if selection.faults else ExitCode.AGREE if is_good else ExitCode.DISAGREE
    if as_json:
        return code, mutants_document(frames, code, list(map(str, selection.faults)))
    print_mutation(frames)
    return code, None


def print_mutation(frames: MutationFrames) -> None:
    """Print every fault with what catches it, the survivors, what is wrongly flagged, the score, and other rules."""
    console = plain_console()
    console.print(_caught(frames.subjects))
    for line in _wrong_lines(frames):
        console.print(line, style="red", soft_wrap=True)
    for row in records(frames.caught_once):
        console.print(f"caught by one case alone: {row['subject']}, by {row['case']}", soft_wrap=True)
    if frames.exhaustive:
        console.print(_rules(frames.rules))
    for row in records(frames.wrongly_named):
        line = f"wrongly named: {row['subject']} is said to be {row['named']}: {row['description']}"
        console.print(line, style="red", soft_wrap=True)
    console.print(_score(frames), style="bold", soft_wrap=True)
    console.print(f"{_naming(frames)}.", style="bold", soft_wrap=True)
    if not frames.exhaustive:
        console.print(_SPARED, soft_wrap=True)


def _wrong_lines(frames: MutationFrames) -> Iterator[str]:
    """Yield a line for each fault that survives, and for each right variant that is flagged."""
    for row in records(frames.survivors):
        reached = "no case reaches it" if not row["reached_by"] else f"largest error/bound {row['largest_ratio']:.3g}"
        yield (
            f"survives: {row['subject']} [{row['dtype']}] caught with {row['caught_in']} of {row['seeds']} seeds, "
            f"{reached}: {row['description']}"
        )
    for row in records(frames.flagged):
        yield (
            f"wrongly flagged: {row['subject']} [{row['dtype']}] at {row['stages']} of {row['first_case']}, "
            f"{row['tiers']}: {row['description']}"
        )


def _score(frames: MutationFrames) -> str:
    mutants = frames.subjects[frames.subjects["kind"] == "mutant"]
    others = frames.subjects[frames.subjects["kind"] != "mutant"]
    return (
        f"Mutation score {frames.score:.1%}: {mutants['subject'].nunique()} faults, "
        f"{frames.survivors['subject'].nunique()} survive, {len(frames.caught_once)} are caught by one case alone; "
        f"{others['subject'].nunique()} controls and equivalent variants, "
        f"{frames.flagged['subject'].nunique()} flagged."
    )


def _naming(frames: MutationFrames) -> str:
    counts = frames.naming()
    return "Faults named rightly {rightly}, wrongly {wrongly}, not named {not}".format(**counts)


def mutants_document(frames: MutationFrames, code: ExitCode, notes: Sequence[str] = ()) -> MutantsDocument:
    """Return the same for programs."""
    names = ("survivors", "caught_once", "flagged", "subjects", "catches", "rules")
    tables: dict[str, Any] = {name: rows_of(getattr(frames, name)) for name in names}
    return MutantsDocument(
        attncheck=header("mutants"),
        exit_code=int(code),
        answer=_score(frames),
        notes=[*notes, *([] if frames.exhaustive else [_SPARED])],
        score=frames.score,
        naming=frames.naming(),
        **tables,
    )


def _caught(subjects: pd.DataFrame) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = ("fault", "topic", "dtype", "cases", "tiers", "stages", "first case that catches it", "named")
    for heading in headings:
        table.add_column(heading, justify="right" if heading == "cases" else "left", no_wrap=True)
    for row in records(subjects[(subjects["kind"] == "mutant") & (subjects["caught_in"] > 0)]):
        before, behind = ("subject", "topic", "dtype"), ("tiers", "stages", "first_case")
        count = f"{row['caught_by']}{'+' if row['spared'] else ''}"  # others were not put to it
        table.add_row(*(row[cell] for cell in before), count, *(row[cell] for cell in behind), row["named"] or "-")
    return table


def _rules(rules: pd.DataFrame) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title="The same results under other rules, faults on the cases that all of them are put to",
        title_justify="left",
    )
    for heading in ("dtype", "rule", "faults", "caught", "right results", "wrongly rejected"):
        table.add_column(heading, justify="left" if heading in ("dtype", "rule") else "right", no_wrap=True)
    for row in records(rules):
        counts = (row[name] for name in ("mutants", "mutants_caught", "controls", "controls_rejected"))
        table.add_row(row["dtype"], _RULES.get(row["rule"], row["rule"]), *map(str, counts))
    return table
