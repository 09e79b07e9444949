"""Which case catches which fault of the catalogue, in which dtype, and at which stage: ``catches.txt``.

    python tests/net/catches.py        writes it anew, in minutes, of which the mutation score takes nearly all

Each fault is recorded in every dtype in which any case reaches it, with one case that catches it: by far, if one does,
rather than by a little or because the call raises; at the stage that the fault names; one of the standard set; and of
those, few cases for many faults. The test asks each fault for its recorded case alone, a tenth of what ``attncheck
mutants`` costs.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from attncheck.mutation.catalogue import MUTANTS
from attncheck.mutation.findings import OF_NUMBERS, Findings, StageResult
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.score import run_mutants
from attncheck.mutation.unit import count_scores
from attncheck.mutation.workers import in_processes
from attncheck.processors import available_processors
from attncheck.reading.case import Case
from attncheck.reading.selection import bundled_root, select_cases

PATH = Path(__file__).resolve().parent / "catches.txt"
HOW_TO_ACCEPT = (
    "`attncheck mutants` says whether other cases catch them; if they do: python tests/net/catches.py, and say in the "
    "commit why the recorded ones do not"
)
_BY_FAR = 1.5
"""An error so many times its bound is one on every processor."""
_LARGE = 20_000
"""Scores of a case that costs twice as much as a small one."""


class Catch(NamedTuple):
    """A case in a dtype that catches a fault, and the stage that is wrong."""

    fault: str
    case: str
    dtype: str
    stage: str


@dataclass(frozen=True)
class _Candidate:
    catch: Catch
    preference: tuple[bool, bool, bool]


def wrong_stage(findings: Findings) -> StageResult | None:
    """Return the first stage that is itself wrong, or else the first that is flagged; None where nothing is."""
    flagged = [each for each in findings if each.caught]
    return next((each for each in flagged if each.own), flagged[0] if flagged else None)


def read_catches() -> list[Catch]:
    """Read the table."""
    found, case = [], ""
    for line in PATH.read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            case = line
            continue
        dtype, stage, *faults = line.split()
        found += [Catch(fault, case, dtype, "" if stage == "-" else stage) for fault in faults]
    return found


def text_of(catches: Sequence[Catch]) -> str:
    """Write the table: cases, and below each a line for a dtype and stage with the faults."""
    lines: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for catch in catches:
        lines[catch.case][catch.dtype, catch.stage or "-"].append(catch.fault)
    text = []
    for case in sorted(lines):
        text.append(case)
        text += [f"  {dtype} {stage} {' '.join(sorted(each))}" for (dtype, stage), each in sorted(lines[case].items())]
    return "\n".join([*text, ""])


def find_catches() -> list[Catch]:
    """Put all faults to the standard set, and what it leaves to the other cases; choose a case for each."""
    cases = select_cases([]).cases
    standard = _standard(cases)
    first, rest = ([case for case in cases if (case.id in standard) == chosen] for chosen in (True, False))
    candidates = list(_candidates(first, MUTANTS, in_standard=True))
    caught = {(each.catch.fault, each.catch.dtype) for each in candidates}
    left = [(fault, tuple(dtype for dtype in fault.dtypes if (fault.name, dtype) not in caught)) for fault in MUTANTS]
    missed = [replace(fault, dtypes=dtypes) for fault, dtypes in left if dtypes]
    dtypes = {dtype for fault in missed for dtype in fault.dtypes}
    others = [replace(case, dtypes=tuple(dtype for dtype in case.dtypes if dtype in dtypes)) for case in rest]
    candidates += _candidates([case for case in others if case.dtypes], missed, in_standard=False)
    return _chosen(candidates, {case.id: 1 + count_scores(case) / _LARGE for case in cases})


def _standard(cases: Sequence[Case]) -> frozenset[str]:
    """Return the ids of the standard set, or of all cases where none is recorded."""
    texts = [path.read_text(encoding="utf-8") for path in bundled_root().glob("standard.*")]
    words = {word for text in texts for word in re.findall(r"[\w/-]+", text)}
    return frozenset(case.id for case in cases if case.id in words) or frozenset(case.id for case in cases)


def _candidates(cases: Sequence[Case], faults: Sequence[Subject], *, in_standard: bool) -> Iterator[_Candidate]:
    named = {fault.name: fault for fault in faults if isinstance(fault, Mutant)}
    with in_processes(available_processors()) as scorers:
        frames = run_mutants(cases, subjects=faults, scorers=scorers, exhaustive=in_standard)
    for part in frames.found:
        for fault, findings in part.found:
            wrong = wrong_stage(findings)
            if fault in named and part.dtype in named[fault].dtypes and wrong is not None:
                declared = named[fault].first_wrong_stage
                is_first = wrong.stage == declared or (wrong.stage, declared) == ("output", "context")
                by_far = wrong.tier not in OF_NUMBERS or wrong.ratio is None or wrong.ratio >= _BY_FAR
                preference = wrong.stage != "" and by_far, is_first, in_standard
                yield _Candidate(Catch(fault, part.case, part.dtype, wrong.stage), preference)


def _chosen(candidates: Sequence[_Candidate], costs: Mapping[str, float]) -> list[Catch]:
    """Choose a case for each fault and dtype: of those that are preferred few, as a cover is chosen greedily."""
    preferred: dict[tuple[str, str], tuple[bool, bool, bool]] = {}
    for each in candidates:
        key = each.catch.fault, each.catch.dtype
        preferred[key] = max(preferred.get(key, each.preference), each.preference)
    by_unit: dict[tuple[str, str], dict[tuple[str, str], Catch]] = defaultdict(dict)
    for each in candidates:
        key = each.catch.fault, each.catch.dtype
        if each.preference == preferred[key]:
            by_unit[each.catch.case, each.catch.dtype][key] = each.catch
    chosen: dict[tuple[str, str], Catch] = {}
    while len(chosen) < len(preferred):
        worth = {unit: len(catches.keys() - chosen.keys()) / costs[unit[0]] for unit, catches in by_unit.items()}
        best = max(sorted(worth), key=worth.__getitem__)
        chosen = {**by_unit[best], **chosen}
    return list(chosen.values())


if __name__ == "__main__":
    PATH.write_text(text_of(find_catches()), encoding="utf-8")
    sys.exit(0)
