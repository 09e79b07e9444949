"""The mutation score: cases are put to faults and right variants in sweeps, and what they find is summed up in frames.

A sweep is a list of cases and of subjects, and depends on no other one, in whatever processes they run. A fault is put
to small cases until as many as are ``Enough`` catch and name it. Large cases come last, for those that small ones did
not settle. Right variants are put to a share of the cases.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import pandas as pd
from rich.table import Table

from attncheck.errors import ExitCode, UsageError
from attncheck.execution.call import end_with_parent
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS, SUBJECTS
from attncheck.mutation.judgement import (
    MAX_WRONGLY,
    NOT_NAMED,
    RIGHTLY,
    RULES,
    WRONGLY,
    Evaluation,
    Evaluations,
    ExactJudge,
    JudgeStages,
    Naming,
    UnitFindings,
    evaluations_of,
    has_wrong_numbers,
    how_named,
    is_caught,
)
from attncheck.mutation.mutant import WIDE, Control, Mutant, Subject, is_generated
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL, Unit, UnitScorer, count_scores, judged_dtypes, unit_of
from attncheck.processors import available_processors
from attncheck.reading.case import Case
from attncheck.reading.selection import Selection
from attncheck.reports.frames import records
from attncheck.reports.json_documents import opening
from attncheck.reports.json_schema import MutantsDocument
from attncheck.reports.outcome import rows_of
from attncheck.reports.terminal import plain_console
from attncheck.spec import STAGES

SEED_STEP = 1_000_003
"""Fresh seeds lie so far apart (an odd number) that no case's k-th seed is another case's own."""

RIGHT_BLOCKS, BLOCKS = 2, 4
"""Sweeps that the right variants, and the faults by hand, are dealt out to."""
FAULTS_OF_A_SWEEP = 48
"""Faults that follow from the specification and are put to the same cases by one sweep."""
RIGHT_CASES = 40
"""Cases that a right variant is put to, beside the first where it is not the reference: so many of all."""


class Enough(NamedTuple):
    """Cases after which a subject is settled, in a dtype and a seed.

    So many small ones, or large ones, have to catch a fault, and so many say what it is; on so many, a right variant is
    not the reference.
    """

    small: int
    large: int
    names: int
    differing: int


BY_HAND, GENERATED = Enough(4, 2, 12, 6), Enough(1, 1, 0, 0)

SizedCase: TypeAlias = tuple[int, Case, int]
"""The elements of a case's score matrix, the case, and a seed."""


@dataclass(frozen=True)
class Sweep:
    """Cases in their order and, by name, the subjects that they are put to until those are settled.

    Where it is ``exhaustive``, small cases are put to all. A settled right variant is put to one in ``share`` of the
    cases. ``visible`` hides all other stages.
    """

    cases: tuple[SizedCase, ...]
    subjects: tuple[str, ...]
    enough: Enough
    share: int = 1
    visible: frozenset[str] | None = None
    exhaustive: bool = False


_NOT_CAUGHT = -1


@dataclass
class Swept:
    """What a sweep found by unit, what that says of faults, who is caught how often, and who was spared cases."""

    parts: list[UnitFindings] = field(default_factory=list)
    naming: Naming = field(default_factory=Naming)
    counts: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    spared: set[tuple[str, str]] = field(default_factory=set)

    def add(self, part: UnitFindings) -> None:
        """Count who is caught by a unit, and which right variants return something else than the reference."""
        for name, findings in part.found:
            self.counts[name, part.dtype, part.seed if is_caught(findings) else _NOT_CAUGHT] += 1
        self.parts.append(part)


def put_to(sweep: Sweep, subjects: Mapping[str, Subject], judge: JudgeStages) -> Swept:
    """Put the cases of a sweep to its subjects."""
    found = Swept()
    chosen = [subjects[name] for name in sweep.subjects]
    for elements, case, seed in sweep.cases:
        shown = [each for each in chosen if not isinstance(each, Mutant) or each.is_shown_by(case)]
        for dtype in judged_dtypes(case):
            unit = unit_of(case, seed, dtype, elements)
            of_dtype = [subject for subject in shown if dtype in subject.dtypes]
            asked = [subject for subject in of_dtype if _is_asked(subject, unit, sweep, found)]
            left = {subject.name for subject in of_dtype if isinstance(subject, Mutant)} - {each.name for each in asked}
            found.spared |= {(name, dtype) for name in left}
            if asked:
                _put_unit(unit, asked, sweep, judge, found)
    return found


def _put_unit(unit: Unit, asked: Sequence[Subject], sweep: Sweep, judge: JudgeStages, found: Swept) -> None:
    """Put a unit to subjects, and ask what those are that fail it by their numbers."""
    scorer = UnitScorer(unit, judge, sweep.visible)
    findings = {subject.name: each for subject in asked if (each := scorer.findings(subject)) is not None}
    part = UnitFindings(
        unit.case.id, unit.dtype, unit.seed, unit.case.random is not None, unit.is_for_all, tuple(findings.items())
    )
    found.add(part)
    for subject in asked if unit.is_for_all and unit.serves_naming else ():
        is_open = len(found.naming.evidence.get(subject.name, ())) < sweep.enough.names
        if is_open and has_wrong_numbers(findings.get(subject.name, ())):
            evidence = scorer.evidence(subject)
            if evidence is not None:
                found.naming.add(subject.name, (unit.case.id, unit.dtype, unit.seed), evidence)


def _is_asked(subject: Subject, unit: Unit, sweep: Sweep, found: Swept) -> bool:
    """Whether a unit is put to a subject: to faults until enough cases catch and name them.

    Right variants are put to a share of the cases, and to the first ones where they are not the reference.
    """
    enough = sweep.enough
    if not isinstance(subject, Mutant):
        is_new = found.counts[subject.name, unit.dtype, _NOT_CAUGHT] < enough.differing
        return is_new or sweep.exhaustive or _is_in_turn(subject, unit, sweep.share)
    caught = found.counts[subject.name, unit.dtype, unit.seed]
    if caught < (enough.small if unit.is_for_all else enough.large):
        return True
    is_named = len(found.naming.evidence.get(subject.name, ())) >= enough.names
    return unit.is_for_all and (sweep.exhaustive or (unit.serves_naming and not is_named))


def _is_in_turn(subject: Subject, unit: Unit, share: int) -> bool:
    """Whether a unit is in a subject's share, which is another one for each subject, and the same in every run."""
    return crc32(f"{subject.name} {unit.case.id} {unit.dtype} {unit.seed}".encode()) % share == 0


_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def in_processes(count: int) -> Iterator[Executor]:
    """Offer so many processes that put cases to subjects of the catalogue."""
    os.environ.setdefault(_THREADS, "1")  # each process has a core, and its products are small
    with ProcessPoolExecutor(count, get_context("spawn"), end_with_parent) as pool:
        yield pool


def _put_to_catalogue(sweep: Sweep) -> Swept:
    return put_to(sweep, SUBJECTS, ExactJudge())


def run_mutants(
    cases: Iterable[Case],
    seeds: Sequence[int] = (0,),
    *,
    judge_stages: JudgeStages | None = None,
    pool: Executor | None = None,
    subjects: Sequence[Subject] = (*MUTANTS, *CONTROLS),
    visible: Collection[str] | None = None,
    exhaustive: bool = False,
) -> MutationFrames:
    """Run every subject on every case, dtype and seed, except for faults that enough cases caught before.

    Seed 0 is the case's own; seed k redraws what is drawn. Cases that draw nothing count in every seed. Where this is
    ``exhaustive``, small cases are put to everything, and large ones to every right variant. ``visible`` hides all
    other stages, to see what a fault leaves for somebody who has the output alone. A ``pool`` of processes may put
    cases to subjects of the catalogue; what comes of it is the same.
    """
    known, judge = {subject.name: subject for subject in subjects}, judge_stages or ExactJudge()

    def submit(sweep: Sweep) -> Future[Swept]:
        if pool is not None:
            return pool.submit(_put_to_catalogue, sweep)
        here: Future[Swept] = Future()
        here.set_result(put_to(sweep, known, judge))
        return here

    sized = _by_size(cases, seeds)
    share = 1 if exhaustive else max(1, len(sized) // RIGHT_CASES)
    shown = None if visible is None else frozenset(visible)
    common = Sweep(tuple(sized), (), BY_HAND, share, shown, exhaustive)
    asked = [submit(each) for each in (*_blocks(common, subjects), *_of_operations(common, subjects))]
    return summarise([each.result() for each in asked], subjects, seeds, exhaustive=exhaustive)


def _blocks(common: Sweep, subjects: Sequence[Subject]) -> Iterator[Sweep]:
    """Yield right variants and blocks of faults by hand, of which neighbours return the same numbers more often."""
    right = [each.name for each in subjects if not isinstance(each, Mutant)]
    faults = [each.name for each in subjects if isinstance(each, Mutant) and not is_generated(each)]
    for names, blocks in ((right, RIGHT_BLOCKS), (faults, BLOCKS)):
        size = max(1, -(-len(names) // blocks))
        yield from (replace(common, subjects=tuple(names[at : at + size])) for at in range(0, len(names), size))


def _of_operations(common: Sweep, subjects: Sequence[Subject]) -> Iterator[Sweep]:
    """Yield the faults of each operation with its cases, the smallest first."""
    of_operation: dict[str, list[str]] = defaultdict(list)
    for fault in subjects:
        if is_generated(fault) and fault.of is not None:
            of_operation[fault.of[0]].append(fault.name)
    for operation, names in of_operation.items():
        own = [each for each in common.cases if each[1].operation == operation]
        by_size = tuple(sorted(own, key=lambda each: each[0]))
        for start in range(0, len(names), FAULTS_OF_A_SWEEP):
            chosen = tuple(names[start : start + FAULTS_OF_A_SWEEP])
            yield replace(common, cases=by_size, subjects=chosen, enough=GENERATED)


def subjects_of(topics: Collection[str]) -> tuple[Subject, ...]:
    """Return the faults of these topics, or of all, with every control and every equivalent variant.

    Raises ``UsageError`` for a topic that does not exist.
    """
    known = {mutant.topic for mutant in MUTANTS}
    unknown = [topic for topic in topics if topic not in known]
    if unknown:
        raise UsageError(f"no fault has the topic {unknown[0]!r}; expected {', '.join(sorted(known))}")
    faults = [mutant for mutant in MUTANTS if not topics or mutant.topic in topics]
    return (*faults, *CONTROLS, *EQUIVALENT)


def redrawn(case: Case, seed: int) -> Case:
    """Return the case with its k-th fresh seed; k = 0 is its own."""
    if case.random is None or seed == 0:
        return case
    fresh = (case.random.seed + seed * SEED_STEP) % 2**32
    return replace(case, random=case.random.model_copy(update={"seed": fresh}))


def _by_size(cases: Iterable[Case], seeds: Sequence[int]) -> list[SizedCase]:
    """Return the small cases, each with its seeds, and then the large ones by size."""
    sized = [
        (elements, redrawn(case, seed), seed)
        for case, elements in ((case, count_scores(case)) for case in cases)
        for seed in (seeds if case.random is not None else seeds[:1])
    ]
    return sorted(sized, key=lambda each: max(each[0], MAX_SCORES_FOR_ALL))


EVALUATION_COLUMNS: Mapping[str, str] = {
    "subject": "name in the catalogue",
    "case": "id of the case",
    "dtype": "working dtype",
    "seed": "0 for the case's own seed, k for its k-th fresh one",
    "drawn": "whether the case draws anything; one that does not counts in every seed",
    "complete": "whether the case is small: an exhaustive run puts it to every fault",
    "stage": "named intermediate; empty where the subject raised",
    "tier": "what found a fault: proven, statistical, a verdict on form; none where the stage agrees",
    "caught": "whether the stage is flagged",
    "own": "whether a flagged stage is itself at fault, rather than one before it",
    "ratio": "largest error over its bound",
    **dict.fromkeys(RULES, "whether this tolerance rejects the stage"),
}


@dataclass(frozen=True, eq=False)
class MutationFrames:
    """What a run of the catalogue came to.

    ``evaluations``  one row per subject, case, dtype, seed and stage (``EVALUATION_COLUMNS``); of a faulty variant only
                     where anything that it returned differs from the reference
    ``catches``      one row per mutant, dtype and case that catches it: the stage, the tier, in how many seeds
    ``subjects``     one row per subject and dtype: kind, topic, in how many seeds it is caught, by which tiers and
                     cases; ``survives`` where it is not caught in every seed (controls: ``flagged`` where ever);
                     ``spared`` where other cases were not put to it, so that more might catch it; as what it is
                     ``named`` from all dtypes together, and whether rightly, wrongly or not (one
                     that follows from the specification is not asked)
    ``rules``        one row per dtype and rule: mutants caught, evaluations of controls rejected; of faults on
                     the small cases. Empty except for an exhaustive run: the harness's own verdict spares faults, and
                     other rules would be held to what it left
    """

    found: Sequence[UnitFindings]
    catches: pd.DataFrame
    subjects: pd.DataFrame
    rules: pd.DataFrame
    exhaustive: bool = True

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """All that was found, written out; there are hundreds of thousands of rows."""
        rows = [row for part in self.found for row in part.rows()]
        frame = pd.DataFrame(rows, columns=list(EVALUATION_COLUMNS))
        return frame.astype({"caught": bool, **dict.fromkeys(RULES, "boolean")})

    @property
    def survivors(self) -> pd.DataFrame:
        """The mutants that some seed does not catch."""
        return self.subjects[
            (self.subjects["kind"] == "mutant") & (self.subjects["caught_in"] < self.subjects["seeds"])
        ]

    @property
    def flagged(self) -> pd.DataFrame:
        """The controls and equivalent variants that any seed flags."""
        return self.subjects[(self.subjects["kind"] != "mutant") & (self.subjects["caught_in"] > 0)]

    @property
    def caught_once(self) -> pd.DataFrame:
        """The faults by hand that one case alone catches, in all dtypes together: ``subject`` and ``case``."""
        faults = self.subjects.loc[self.subjects["how_named"].ne("") & self.subjects["kind"].eq("mutant"), "subject"]
        catches = self.catches[self.catches["subject"].isin(faults)][["subject", "case"]].drop_duplicates()
        return catches[~catches["subject"].duplicated(keep=False)].sort_values("subject", ignore_index=True)

    @property
    def wrongly_named(self) -> pd.DataFrame:
        """The faults that were diagnosed as something else than they are, a row each."""
        found = self._named_subjects()
        return found[found["how_named"].eq(WRONGLY)]

    @property
    def names_well(self) -> bool:
        """Whether no more faults are named wrongly than may be."""
        counts = self.naming()
        return counts[WRONGLY] <= MAX_WRONGLY * sum(counts.values())

    def naming(self) -> dict[str, int]:
        """Count faults by how they are named."""
        found = self._named_subjects()["how_named"]
        return {how: int(found.eq(how).sum()) for how in (RIGHTLY, WRONGLY, NOT_NAMED)}

    def _named_subjects(self) -> pd.DataFrame:
        return self.subjects[self.subjects["kind"].eq("mutant")].drop_duplicates("subject")

    @property
    def score(self) -> float:
        """The share of mutants that are caught in every dtype and every seed; NaN of none."""
        mutants = self.subjects[self.subjects["kind"] == "mutant"]
        return 1 - self.survivors["subject"].nunique() / mutants["subject"].nunique() if len(mutants) else float("nan")


def summarise(
    swept: Sequence[Swept], subjects: Sequence[Subject], seeds: Sequence[int], *, exhaustive: bool = True
) -> MutationFrames:
    """Sum up what was found, and what sweeps say of the faults' names and of who was spared cases."""
    parts = [part for each in swept for part in each.parts]
    names = {name: said for each in swept for name, said in each.naming.names().items()}
    spared = {pair for each in swept for pair in each.spared}
    evaluations = evaluations_of(parts)
    dtypes = sorted({dtype for _, dtype in evaluations})
    rows = [
        {**row, "spared": (subject.name, dtype) in spared}
        for subject in subjects
        for dtype in dtypes
        if (row := _row(subject, dtype, evaluations.get((subject.name, dtype), ()), len(seeds), names))
    ]
    rules = _rules(evaluations, subjects, dtypes if exhaustive else [])
    return MutationFrames(parts, _catches(evaluations), pd.DataFrame(rows), rules, exhaustive)


_CATCHES = ("subject", "dtype", "case", "stage", "tiers", "seeds")


def _catches(evaluations: Evaluations) -> pd.DataFrame:
    rows = []
    for (subject, dtype), found in sorted(evaluations.items(), key=lambda each: each[0]):
        caught = sorted((each for each in found if each.stage is not None), key=lambda each: each[:2])
        for case, of_case in groupby(caught, key=lambda each: each.case):
            first, *others = of_case
            tiers = _joined(each.tier for each in (first, *others))
            rows.append((subject, dtype, case, first.stage, tiers, 1 + len(others)))
    return pd.DataFrame(rows, columns=list(_CATCHES))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _row(
    subject: Subject, dtype: str, found: Sequence[Evaluation], seeds: int, names: Mapping[str, Sequence[str]]
) -> dict[str, object]:
    """Return the row of a subject in a dtype; nothing where it does not count in that."""
    if not _counts(subject, dtype, reached=bool(found)):
        return {}
    caught = [each for each in found if each.stage is not None]
    cases, stages = {each.case for each in caught}, {each.stage for each in caught}
    is_caught_undrawn = any(not each.drawn for each in caught)
    said = names.get(subject.name, ())
    return {
        "subject": subject.name,
        "kind": kind_of(subject),
        "topic": subject.topic if isinstance(subject, Mutant) else "",
        "dtype": dtype,
        "seeds": seeds,
        "caught_in": seeds if is_caught_undrawn else len({each.seed for each in caught}),
        "reached_by": len({each.case for each in found}),
        "caught_by": len(cases),
        "tiers": _joined(each.tier for each in caught),
        "stages": ", ".join(stage for stage in ("", *STAGES) if stage in stages),
        "first_case": min(cases, default=""),
        "largest_ratio": max((each.ratio for each in found if not math.isnan(each.ratio)), default=math.nan),
        **{rule: any(each.rejects[rule] for each in found) for rule in RULES},
        "named": ", ".join(said),
        "how_named": "" if is_generated(subject) else how_named(subject, said),
        "description": description_of(subject),
    }


def _counts(subject: Subject, dtype: str, *, reached: bool) -> bool:
    """Whether a subject counts in a dtype. Few cases are about 16 bits: there it does where some case reaches it."""
    return dtype in subject.dtypes and (reached or dtype in WIDE)


def kind_of(subject: Subject) -> str:
    """Return mutant, control or equivalent."""
    return type(subject).__name__.lower()


def description_of(subject: Subject) -> str:
    """Return the text that says what a subject stands for, or why it is right."""
    return subject.why if isinstance(subject, Control) else subject.defect


def _rules(evaluations: Evaluations, subjects: Sequence[Subject], dtypes: Sequence[str]) -> pd.DataFrame:
    """Count, per rule, mutants that any case shows, and evaluations (all stages of a case) of controls."""
    rows = []
    for dtype in dtypes:
        found = [(subject, evaluations.get((subject.name, dtype), ())) for subject in subjects]
        faults = [(subject, each) for subject, each in found if isinstance(subject, Mutant)]
        controls = [one for subject, each in found if isinstance(subject, Control) for one in each]
        mutants = sum(_counts(subject, dtype, reached=bool(each)) for subject, each in faults)
        for rule in ("caught", *RULES):
            caught = sum(any(one.complete and one.rejects[rule] for one in each) for _, each in faults)
            rejected = sum(one.rejects[rule] for one in controls)
            name = "attncheck" if rule == "caught" else rule
            rows.append((dtype, name, mutants, caught, len(controls), rejected))
    return pd.DataFrame(rows, columns=["dtype", "rule", "mutants", "mutants_caught", "controls", "controls_rejected"])


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
        console.print(_rules_table(frames.rules))
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
        **opening("mutants", code, _score(frames)),
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


def _rules_table(rules: pd.DataFrame) -> Table:
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
