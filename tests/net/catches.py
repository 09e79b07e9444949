"""Which case catches which fault that was written by hand, in which dtype, and at which stage: ``catches.txt``.

    python tests/net/catches.py        writes it again, in minutes, of which the mutation score takes nearly all

Each fault is recorded in 16 bits and in more, where any case reaches it, with one case that catches it: by far, if one
does, rather than by a little or because the call raises; at the stage that the fault names; and of those, few cases for
many faults. These cases are standard ones: ``cases/standard.json`` has their ids and dtypes, and is written beside. The
test puts each fault to its recorded case only, a tenth of what ``attncheck mutants`` costs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from attncheck.common.processors import available_processors
from attncheck.mutation.catalogue import HAND_WRITTEN_FAULTS
from attncheck.mutation.judgement import NUMERIC_TIERS
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.score import process_pool, run_mutants
from attncheck.planning.plan import RECORDED_UNITS_FILE, Plan, standard_unit_positions, unit_features
from attncheck.reading.case import Case
from attncheck.reading.covering import choose_to_cover_features
from attncheck.reading.selection import find_bundled_cases_folder, select_cases
from attncheck.spec.options import SIXTEEN_BIT_DTYPES

PATH = Path(__file__).resolve().parent / "catches.txt"
HOW_TO_ACCEPT = (
    "`attncheck mutants` says whether other cases catch them; if they do: python tests/net/catches.py, and say in the "
    "commit why the recorded ones do not"
)
_BY_FAR = 1.5
"""An error so many times its bound is one on every processor."""


class Catch(NamedTuple):
    """A case in a dtype that catches a fault, and the stage that is wrong."""

    fault: str
    case: str
    dtype: str
    stage: str


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


Candidates: TypeAlias = Mapping[tuple[str, bool], Sequence[Catch]]
"""By fault, and whether in 16 bits, its catches: by far, if there are any; first at the stage that the fault names."""


def find_candidates(cases: Sequence[Case]) -> Candidates:
    """Put all faults to the standard cases, and those that no standard case catches to the others."""
    units = [(unit.case_index, unit.dtype) for unit in Plan.of(cases, [])]
    standard = {cases[units[position][0]].id for position in standard_unit_positions(cases, units)}
    first, rest = ([case for case in cases if (case.id in standard) == chosen] for chosen in (True, False))
    found = list(_caught(first, HAND_WRITTEN_FAULTS, exhaustive=True))
    caught = {(catch.fault, catch.dtype in SIXTEEN_BIT_DTYPES) for catch, _ in found}
    left = [
        (fault, tuple(dtype for dtype in fault.dtypes if (fault.name, dtype in SIXTEEN_BIT_DTYPES) not in caught))
        for fault in HAND_WRITTEN_FAULTS
    ]
    missed = [replace(fault, dtypes=dtypes) for fault, dtypes in left if dtypes]
    dtypes = {dtype for fault in missed for dtype in fault.dtypes}
    others = [replace(case, dtypes=tuple(dtype for dtype in case.dtypes if dtype in dtypes)) for case in rest]
    found += _caught([case for case in others if case.dtypes], missed, exhaustive=False)
    by_pair: dict[tuple[str, bool], list[tuple[Catch, tuple[bool, bool]]]] = defaultdict(list)
    for catch, preference in found:
        by_pair[catch.fault, catch.dtype in SIXTEEN_BIT_DTYPES].append((catch, preference))
    by_far = {pair for pair, of in by_pair.items() if any(is_far for _, (is_far, _) in of)}
    kept = {pair: [each for each in of if each[1][0] or pair not in by_far] for pair, of in by_pair.items()}
    return {
        pair: [catch for catch, _ in sorted(of, key=lambda each: (not each[1][1], each[0]))]
        for pair, of in kept.items()
    }


def _caught(
    cases: Sequence[Case], faults: Sequence[Subject], *, exhaustive: bool
) -> Iterator[tuple[Catch, tuple[bool, bool]]]:
    """Yield catches, each with whether it is by far, and at the stage that the fault names."""
    named = {fault.name: fault for fault in faults if isinstance(fault, Mutant)}
    with process_pool(available_processors()) as pool:
        frames = run_mutants(cases, subjects=faults, pool=pool, exhaustive=exhaustive)
    for found in frames.evaluations:
        fault = named.get(found.subject)
        if fault is not None and found.dtype in fault.dtypes and found.stage is not None:
            is_first = found.stage == fault.first_wrong_stage or (
                (found.stage, fault.first_wrong_stage) == ("output", "context")
            )
            by_far = found.tier not in NUMERIC_TIERS or not found.ratio < _BY_FAR  # NaN where there is none
            yield Catch(fault.name, found.case, found.dtype, found.stage), (found.stage != "" and by_far, is_first)


def choose(cases: Sequence[Case], candidates: Candidates) -> tuple[list[Catch], dict[str, list[str]]]:
    """Choose few units that have whatever occurs in any of them and catch every fault, in 16 bits and in more.

    Returns a catch for each of both, and the units that they need besides documents and ``standard_unit_positions``.
    """
    units = [(unit.case_index, unit.dtype) for unit in Plan.of(cases, [])]
    of_unit: dict[tuple[str, str], dict[tuple[str, bool], Catch]] = defaultdict(dict)
    for pair, catches in candidates.items():
        for catch in catches:
            of_unit[catch.case, catch.dtype][pair] = catch
    caught = [of_unit.get((cases[number].id, dtype), {}) for number, dtype in units]
    features = unit_features(dict(enumerate(cases)), units)
    documents = [position for position, (number, _) in enumerate(units) if cases[number].is_document]
    chosen = choose_to_cover_features(
        [own | each.keys() for own, each in zip(features, caught, strict=True)], documents
    )
    fewest = [chosen[index] for index in choose_to_cover_features([frozenset(caught[position]) for position in chosen])]
    needed = {(cases[units[position][0]].id, units[position][1]) for position in fewest}
    found = [next(each for each in catches if each[1:3] in needed) for catches in candidates.values()]
    dtypes: dict[str, set[str]] = defaultdict(set)
    for catch in found:
        dtypes[catch.case].add(catch.dtype)
    return found, {case: sorted(of) for case, of in sorted(dtypes.items())}


def main() -> None:
    """Measure, choose, and write both files."""
    cases = select_cases([]).cases
    catches, needed = choose(cases, find_candidates(cases))
    PATH.write_text(text_of(catches), encoding="utf-8")
    lines = ",\n".join(f" {json.dumps(case)}: {json.dumps(dtypes)}" for case, dtypes in needed.items())
    (find_bundled_cases_folder() / RECORDED_UNITS_FILE).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
