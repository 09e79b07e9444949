"""A run narrowed to what failed last time, or begun with it (``--failed``, ``--failed-first``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from attncheck.errors import ResultsError
from attncheck.reading.case import Case
from attncheck.reading.compressed_cases import PackedCases
from attncheck.results.failed import CaseInDtype, Failed, read_failed
from attncheck.results.records import read_json
from attncheck.wording import listed


@dataclass(frozen=True)
class Narrowed:
    """The cases to run, in order; ``only`` names those that failed, each with a dtype, where they alone run.

    ``note`` says for people what was done.
    """

    cases: Sequence[Case]
    only: frozenset[CaseInDtype] | None
    note: str


def failed_alone(
    cases: Sequence[Case],
    dtypes: Collection[str],
    implementations: Collection[str],
    directory: Path,
    *,
    resume: bool = False,
) -> Narrowed:
    """Keep what failed last time on one of these implementations; everything where that is not known.

    Args:
        cases: The selected cases.
        dtypes: The selected dtypes; all if empty.
        implementations: The names of the implementations that are to run.
        directory: The folder of the earlier results.
        resume: Whether the run in the folder goes on: then what it was narrowed to is kept.
    """
    failed, reason = _read(directory)
    if failed is None:
        return Narrowed(cases, None, f"{reason}: every selected case runs")
    wanted = failed.selected if resume else failed.units(implementations)
    if wanted is None:
        return Narrowed(cases, None, f"the run in {directory} was of everything that was selected, and goes on")
    only = _among(wanted, cases, dtypes)
    kept = {case for case, _ in only}
    if not kept and (unknown := sorted(set(implementations) - _judged_in(directory))):
        return Narrowed(cases, None, f"{directory} has no whole run of {listed(unknown)}: every selected case runs")
    if not kept:
        note = f"nothing {'selected ' if wanted else ''}failed last time in {directory}: nothing runs"
        return Narrowed(PackedCases(()), only, note)
    count = f"{len(kept):,} of {len(cases):,} cases"
    note = f"{count} failed last time in {directory} and {'runs' if len(kept) == 1 else 'run'} alone"
    return Narrowed(PackedCases(case for case in cases if case.id in kept), only, note)


def failed_first(
    cases: Sequence[Case], dtypes: Collection[str], implementations: Collection[str], directory: Path
) -> Narrowed:
    """Put the cases first that failed last time on one of these implementations; all run."""
    failed, reason = _read(directory)
    if failed is None:
        return Narrowed(cases, None, f"{reason}: the cases run in their order")
    ahead = {case for case, _ in _among(failed.units(implementations), cases, dtypes)}
    if not ahead:
        return Narrowed(cases, None, f"nothing selected failed last time in {directory}: the cases run in their order")
    order = sorted(range(len(cases)), key=lambda number: cases[number].id not in ahead)  # stable
    count = f"{len(ahead):,} of {len(cases):,} cases"
    note = f"{count} failed last time in {directory} and {'runs' if len(ahead) == 1 else 'run'} first"
    return Narrowed(PackedCases(cases[number] for number in order), None, note)


def _read(directory: Path) -> tuple[Failed | None, str]:
    """Read what failed; where that cannot be done, say why."""
    try:
        failed = read_failed(directory)
    except ResultsError as error:
        return None, f"what failed last time is not known: {error}"
    return failed, "" if failed else f"there are no earlier results in {directory}"


def _judged_in(directory: Path) -> frozenset[str]:
    """Return the implementations of a folder's run; none where it did not come to its end."""
    summary = read_json(directory / "summary.json")
    return frozenset(summary["implementations"] if summary else ())


def _among(units: Collection[CaseInDtype], cases: Sequence[Case], dtypes: Collection[str]) -> frozenset[CaseInDtype]:
    """Keep what these cases declare in these dtypes."""
    named = {case for case, _ in units}
    declared = ((case.id, dtype) for case in cases if case.id in named for dtype in case.dtypes)
    return frozenset(unit for unit in declared if unit in units and (not dtypes or unit[1] in dtypes))
