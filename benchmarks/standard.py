"""The standard set: which of its cases catch which fault of the catalogue?

    python benchmarks/standard.py

puts every fault to the documents and to the cases that are standard now, and faults that none of them catches to all
other cases. Of all units, each a case in a dtype, it chooses few that have whatever occurs in any of them and catch
every fault in every dtype in which any case does. Those that are needed for a fault it writes to
``cases/standard.json``, each with the faults that it stands for. Takes six minutes of processor time. Run it when the
catalogue has a new fault, or when a test says that a fault is no longer caught.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from attncheck import cases as corpus
from attncheck.mutation.catalogue import MUTANTS
from attncheck.mutation.findings import is_caught
from attncheck.mutation.scoring import Question
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL, count_scores, judged_dtypes
from attncheck.mutation.workers import ScorersInProcesses, in_processes
from attncheck.plan import Plan
from attncheck.processors import available_processors
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases
from attncheck.standard import CATCHES, covering, features_of, standard_units

Unit: TypeAlias = tuple[int, str]
"""A case by its number, and a dtype."""
Catch: TypeAlias = tuple[str, str]
"""A fault, and the dtype in which it is caught."""


def main() -> None:
    """Measure, choose, write."""
    cases = dict(enumerate(select_cases().cases))
    units = [(unit.case, unit.dtype) for unit in Plan.of(list(cases.values()), [])]
    with in_processes(available_processors()) as scorers:
        now = [units[position] for position in standard_units(list(cases.values()), units)]
        catches = dict(_catches(cases, now, scorers, ()))
        missing = sorted(set(units) - set(now), key=lambda unit: count_scores(cases[unit[0]]))
        catches |= _catches(cases, missing, scorers, set().union(*catches.values()))
    record = _record(cases, units, catches)
    lines = ",\n".join(f" {json.dumps(case)}: {json.dumps(record[case], sort_keys=True)}" for case in sorted(record))
    (Path(str(corpus.__file__)).parent / CATCHES).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    caught = {fault for found in catches.values() for fault, _ in found}
    print(f"{len(caught)} of {len(MUTANTS)} faults are caught; {sum(map(len, record.values()))} units stand for them")
    for name in (each.name for each in MUTANTS if each.name not in caught):
        print(f"  no case catches {name}")


def _catches(
    cases: Mapping[int, Case], units: Sequence[Unit], scorers: ScorersInProcesses, caught: Collection[Catch]
) -> Iterator[tuple[Unit, set[Catch]]]:
    """Yield each unit with what it catches of the faults that are not caught yet.

    A large case is put to faults alone that are caught in no dtype.
    """
    faults = {fault for fault, _ in caught}
    pending = []
    for number, dtype in units:
        is_large = count_scores(cases[number]) > MAX_SCORES_FOR_ALL
        asked = tuple(
            fault.name
            for fault in MUTANTS
            if dtype in fault.dtypes and (fault.name, dtype) not in caught and not (is_large and fault.name in faults)
        )
        if asked and dtype in judged_dtypes(cases[number]):
            pending.append(((number, dtype), scorers.judge(Question(cases[number], 0, dtype, asked))))
    for unit, answer in pending:
        yield unit, {(name, unit[1]) for name, findings in answer.result().found if is_caught(findings)}


def _record(
    cases: Mapping[int, Case], units: Sequence[Unit], catches: Mapping[Unit, set[Catch]]
) -> dict[str, dict[str, list[str]]]:
    """Choose the units; return those that are needed for faults, each fault once in each dtype."""
    caught = [frozenset(catches.get(unit, ())) for unit in units]
    documents = [position for position, (number, _) in enumerate(units) if cases[number].is_document]
    wanted = [features | catch for features, catch in zip(features_of(cases, units), caught, strict=True)]
    chosen = covering(wanted, documents)
    record: dict[str, dict[str, list[str]]] = defaultdict(dict)
    left = set().union(*caught)
    among = [caught[position] for position in chosen]
    for position in sorted((chosen[each] for each in covering(among)), key=lambda each: -len(caught[each])):
        if found := caught[position] & left:
            number, dtype = units[position]
            record[cases[number].id][dtype] = sorted(fault for fault, _ in found)
            left -= found
    return record


if __name__ == "__main__":
    main()
