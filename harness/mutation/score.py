"""The mutation score: cases run on faults and right variants in sweeps, and frames sum up the results.

A sweep is a list of units and of subjects, and does not depend on other sweeps or on the process. Small cases run on a
fault until it meets the ``StopRule``: enough cases catch and name it. Large cases run last, on faults that small ones
did not settle. A share of the cases runs on right variants.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, zip_longest
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import pandas as pd
from rich.table import Table

from attncheck.common.errors import ExitCode, UsageError
from attncheck.common.processors import available_processors
from attncheck.diagnosis.case_evidence import Evidence
from attncheck.execution.call import exit_when_parent_exits
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENTS, MUTANTS, SUBJECTS_BY_NAME
from attncheck.mutation.judgement import (
    MAX_WRONGLY_NAMED_SHARE,
    NOT_NAMED,
    NUMERIC_TIERS,
    REFERENCE_ROUNDING_MODELS,
    RIGHTLY,
    TOLERANCE_RULES,
    WRONGLY,
    VariantRow,
    diagnoses_by_subject,
    judge_diagnosis,
)
from attncheck.mutation.mutant import WIDE_DTYPES, Control, Mutant, Subject
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL_FAULTS, SeededUnit, UnitScorer
from attncheck.reading.case import Case
from attncheck.reading.selection import CaseSelection
from attncheck.reports.frames import to_records
from attncheck.reports.json_documents import opening_fields
from attncheck.reports.outcome import to_json_rows
from attncheck.reports.terminal import plain_console
from attncheck.showing.json_schema import MutantsDocument
from attncheck.spec import STAGES

SEED_STEP = 1_000_003
"""The distance of fresh seeds, odd and so large that no case's k-th seed is the first seed of another case."""

HAND_WRITTEN_SWEEPS = 2
"""Sweeps among which right variants and faults by hand are divided: each computes exact answers and readings again."""
GENERATED_FAULTS_PER_SWEEP = 48
"""Faults derived from the specification that share the cases of one sweep."""
CASES_PER_RIGHT_VARIANT = 40
"""Cases that run on a right variant, in addition to the first ones that distinguish it from the reference."""
RIGHT_VARIANTS_SHARING_CASES = 8
"""Right variants, neighbours in the catalogue, that share their cases: the exact answers cost most."""


class StopRule(NamedTuple):
    """The numbers of cases after which a subject is settled, in a dtype and a seed.

    ``small_catches`` small or ``large_catches`` large cases have to catch a fault, and ``diagnosis_cases`` have to give
    evidence of its diagnosis; ``differing_cases`` have to distinguish a right variant from the reference.
    """

    small_catches: int
    large_catches: int
    diagnosis_cases: int
    differing_cases: int


HAND_WRITTEN_STOP_RULE, GENERATED_STOP_RULE = StopRule(4, 2, 12, 6), StopRule(1, 1, 0, 0)


@dataclass(frozen=True)
class Sweep:
    """Units in their order and, by name, the subjects on which they run until these are settled.

    If it is ``exhaustive``, small cases run on all subjects. One in ``case_interval`` cases runs on a settled right
    variant.
    """

    units: tuple[SeededUnit, ...]
    subjects: tuple[str, ...]
    stop_rule: StopRule
    case_interval: int = 1
    exhaustive: bool = False


@dataclass
class SweepResult:
    """The evaluations of a sweep, evidence on faults, catches by seed, and the faults that skipped units."""

    evaluations: list[VariantRow] = field(default_factory=list)
    evidence: dict[str, dict[tuple[str, str, int], Evidence]] = field(default_factory=lambda: defaultdict(dict))
    evaluation_counts: Counter[tuple[str, str, int | None]] = field(default_factory=Counter)
    skipped_faults: set[tuple[str, str]] = field(default_factory=set)


def run_sweep(sweep: Sweep, subjects: Mapping[str, Subject] = SUBJECTS_BY_NAME) -> SweepResult:
    """Run the units of a sweep on its subjects."""
    swept = SweepResult()
    chosen = [subjects[name] for name in sweep.subjects]
    for unit in sweep.units:
        of_dtype = [
            subject for subject in chosen if unit.dtype in subject.dtypes and subject.can_be_shown_by(unit.case)
        ]
        asked = [subject for subject in of_dtype if _should_run_unit(subject, unit, sweep, swept)]
        mutants = {subject.name for subject in of_dtype if isinstance(subject, Mutant)}
        swept.skipped_faults |= {(name, unit.dtype) for name in mutants.difference(subject.name for subject in asked)}
        if asked:
            _run_unit(UnitScorer(unit), asked, sweep, swept)
    return swept


def _run_unit(scorer: UnitScorer, subjects: Sequence[Subject], sweep: Sweep, result: SweepResult) -> None:
    """Run a unit on subjects, and collect evidence on the subjects that fail by their numbers."""
    unit, failing = scorer.unit, []
    for subject in subjects:
        findings = scorer.judge_subject(subject)
        if findings is None:
            continue
        of_unit = unit.case.id, unit.dtype, unit.seed, unit.case.random is not None, unit.runs_on_all_faults
        evaluation = VariantRow.from_results(subject.name, of_unit, findings)
        result.evaluations.append(evaluation)
        result.evaluation_counts[subject.name, unit.dtype, None if evaluation.stage is None else unit.seed] += 1
        if any(finding.tier in NUMERIC_TIERS for finding in findings):
            failing.append(subject)
    for subject in failing if unit.runs_on_all_faults and unit.gives_diagnosis_evidence else ():
        if len(result.evidence.get(subject.name, ())) < sweep.stop_rule.diagnosis_cases:
            evidence = scorer.diagnosis_evidence(subject)
            if evidence is not None:
                result.evidence[subject.name][unit.case.id, unit.dtype, unit.seed] = evidence


def _should_run_unit(subject: Subject, unit: SeededUnit, sweep: Sweep, result: SweepResult) -> bool:
    """Return whether a unit runs on a subject: on faults until enough cases catch and name them.

    Right variants run on a share of the cases, and on the first ones that distinguish them from the reference.
    """
    stop_rule = sweep.stop_rule
    if not isinstance(subject, Mutant):
        is_new = result.evaluation_counts[subject.name, unit.dtype, None] < stop_rule.differing_cases
        if is_new or sweep.exhaustive:
            return True
        # The share of a subject is that of its neighbours, and the same in every run.
        first = sweep.subjects[
            sweep.subjects.index(subject.name) // RIGHT_VARIANTS_SHARING_CASES * RIGHT_VARIANTS_SHARING_CASES
        ]
        return crc32(f"{first} {unit.case.id} {unit.dtype} {unit.seed}".encode()) % sweep.case_interval == 0
    caught = result.evaluation_counts[subject.name, unit.dtype, unit.seed]
    if caught < (stop_rule.small_catches if unit.runs_on_all_faults else stop_rule.large_catches):
        return True
    is_named = len(result.evidence.get(subject.name, ())) >= stop_rule.diagnosis_cases
    return unit.runs_on_all_faults and (sweep.exhaustive or (unit.gives_diagnosis_evidence and not is_named))


_THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"


@contextmanager
def process_pool(count: int) -> Iterator[Executor]:
    """Yield a pool of processes that run cases on subjects of the catalogue."""
    os.environ.setdefault(_THREADS_VARIABLE, "1")  # each process has a core, and its products are small
    with ProcessPoolExecutor(count, get_context("spawn"), exit_when_parent_exits) as pool:
        yield pool


def run_mutants(
    cases: Iterable[Case],
    seeds: Sequence[int] = (0,),
    *,
    pool: Executor | None = None,
    subjects: Sequence[Subject] = (*MUTANTS, *CONTROLS),
    exhaustive: bool = False,
) -> MutationFrames:
    """Run every subject on every case, dtype and seed, except for faults that enough cases caught before.

    Seed 0 is the case's seed; seed k redraws the inputs that are drawn. Cases that draw nothing count in every seed. If
    ``exhaustive``, small cases run on all subjects, and large ones on every right variant. A ``pool`` of processes may
    run cases on subjects of the catalogue, with the same result.
    """
    units = [
        SeededUnit(redraw_case(case, seed), dtype, seed)
        for case in cases
        for seed in (seeds if case.random is not None else seeds[:1])
        for dtype in case.dtypes
        if dtype in REFERENCE_ROUNDING_MODELS
    ]
    units.sort(
        key=lambda unit: max(unit.score_count, MAX_SCORES_FOR_ALL_FAULTS)
    )  # small cases first, then large ones by size
    share = 1 if exhaustive else max(1, len({(unit.case.id, unit.seed) for unit in units}) // CASES_PER_RIGHT_VARIANT)
    common = Sweep(tuple(units), (), HAND_WRITTEN_STOP_RULE, share, exhaustive)
    sweeps = list(_plan_sweeps(common, subjects))
    known = {subject.name: subject for subject in subjects}
    swept = map(partial(run_sweep, subjects=known), sweeps) if pool is None else pool.map(run_sweep, sweeps)
    return summarise_sweeps(list(swept), subjects, seeds, exhaustive=exhaustive)


def _plan_sweeps(template: Sweep, subjects: Sequence[Subject]) -> Iterator[Sweep]:
    """Yield right variants with faults by hand, in blocks: neighbours return the same numbers more often.

    Then come the faults of each operation with its units, the smallest first.
    """
    right, by_hand, of_operation = list[str](), list[str](), defaultdict[str, list[str]](list)
    for subject in subjects:
        if not isinstance(subject, Mutant):
            right.append(subject.name)
        elif subject.operation_and_argument is None or subject.occurred_in_practice:
            by_hand.append(subject.name)
        else:
            of_operation[subject.operation_and_argument[0]].append(subject.name)
    blocks = zip_longest(
        *(_split_into_blocks(names, -(-len(names) // HAND_WRITTEN_SWEEPS) or 1) for names in (right, by_hand)),
        fillvalue=(),
    )
    yield from (replace(template, subjects=(*others, *faults)) for others, faults in blocks)
    for operation, names in of_operation.items():
        units = sorted(
            (unit for unit in template.units if unit.case.operation == operation), key=lambda unit: unit.score_count
        )
        generated = replace(template, units=tuple(units), stop_rule=GENERATED_STOP_RULE)
        yield from (
            replace(generated, subjects=block) for block in _split_into_blocks(names, GENERATED_FAULTS_PER_SWEEP)
        )


def _split_into_blocks(names: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(names[start : start + size]) for start in range(0, len(names), size))


def subjects_with_topics(topics: Collection[str]) -> tuple[Subject, ...]:
    """Return the faults of these topics, or of all, with every control and every equivalent variant.

    Raises ``UsageError`` for a topic that does not exist.
    """
    known = {mutant.topic for mutant in MUTANTS}
    unknown = [topic for topic in topics if topic not in known]
    if unknown:
        raise UsageError(f"no fault has the topic {unknown[0]!r}; expected {', '.join(sorted(known))}")
    faults = [mutant for mutant in MUTANTS if not topics or mutant.topic in topics]
    return (*faults, *CONTROLS, *EQUIVALENTS)


def redraw_case(case: Case, seed: int) -> Case:
    """Return the case with its k-th fresh seed, or the case itself for k = 0."""
    if case.random is None or seed == 0:
        return case
    fresh = (case.random.seed + seed * SEED_STEP) % 2**32
    return replace(case, random=case.random.model_copy(update={"seed": fresh}))


@dataclass(frozen=True, eq=False)
class MutationFrames:
    """The results of a run of the catalogue.

    ``evaluations``  one row per subject, case, dtype and seed (``VariantRow``); of a faulty variant only where anything
                     that it returned differs from the reference
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

    evaluations: Sequence[VariantRow]
    catches: pd.DataFrame
    subjects: pd.DataFrame
    rules: pd.DataFrame
    exhaustive: bool = True

    @property
    def faults(self) -> pd.DataFrame:
        """The rows of mutants."""
        return self.subjects[self.subjects["kind"] == "mutant"]

    @property
    def right_variants(self) -> pd.DataFrame:
        """The rows of controls and equivalent variants."""
        return self.subjects[self.subjects["kind"] != "mutant"]

    @property
    def survivors(self) -> pd.DataFrame:
        """The mutants that some seed does not catch."""
        return self.faults[self.faults["caught_in"] < self.faults["seeds"]]

    @property
    def flagged(self) -> pd.DataFrame:
        """The controls and equivalent variants that any seed flags."""
        return self.right_variants[self.right_variants["caught_in"] > 0]

    @property
    def caught_once(self) -> pd.DataFrame:
        """The faults by hand that one case alone catches, in all dtypes together: ``subject`` and ``case``."""
        by_hand = self.faults.loc[self.faults["how_named"].ne(""), "subject"]
        catches = self.catches[self.catches["subject"].isin(by_hand)][["subject", "case"]].drop_duplicates()
        return catches[~catches["subject"].duplicated(keep=False)].sort_values("subject", ignore_index=True)

    @property
    def wrongly_named(self) -> pd.DataFrame:
        """The faults with a wrong diagnosis, a row each."""
        return self.faults[self.faults["how_named"].eq(WRONGLY)].drop_duplicates("subject")

    @property
    def meets_naming_limit(self) -> bool:
        """True if the share of wrongly named faults is at most ``MAX_WRONGLY_NAMED_SHARE``."""
        counts = self.count_naming_results()
        return counts[WRONGLY] <= MAX_WRONGLY_NAMED_SHARE * sum(counts.values())

    def count_naming_results(self) -> dict[str, int]:
        """Count faults by how they are named."""
        names = self.faults.drop_duplicates("subject")["how_named"]
        return {how: int(names.eq(how).sum()) for how in (RIGHTLY, WRONGLY, NOT_NAMED)}

    @property
    def score(self) -> float:
        """The share of mutants that are caught in every dtype and every seed; NaN of none."""
        faults = self.faults["subject"].nunique()
        return 1 - self.survivors["subject"].nunique() / faults if faults else math.nan


VariantRows: TypeAlias = Mapping[tuple[str, str], Sequence[VariantRow]]
"""By the name of a subject, and the dtype."""


def summarise_sweeps(
    results: Sequence[SweepResult], subjects: Sequence[Subject], seeds: Sequence[int], *, exhaustive: bool = True
) -> MutationFrames:
    """Sum up the evaluations, the faults' names and the faults that skipped cases."""
    names = {name: said for result in results for name, said in diagnoses_by_subject(result.evidence).items()}
    spared = {pair for result in results for pair in result.skipped_faults}
    evaluations: dict[tuple[str, str], list[VariantRow]] = defaultdict(list)
    for evaluation in (evaluation for result in results for evaluation in result.evaluations):
        evaluations[evaluation.subject, evaluation.dtype].append(evaluation)
    dtypes = sorted({dtype for _, dtype in evaluations})
    rows = [
        {**row, "spared": (subject.name, dtype) in spared}
        for subject in subjects
        for dtype in dtypes
        if (row := _subject_row(subject, dtype, evaluations.get((subject.name, dtype), ()), len(seeds), names))
    ]
    every = [evaluation for group in evaluations.values() for evaluation in group]
    rules = _rule_frame(evaluations, subjects, dtypes if exhaustive else [])
    return MutationFrames(every, _catch_frame(evaluations), pd.DataFrame(rows), rules, exhaustive)


def _catch_frame(evaluations: VariantRows) -> pd.DataFrame:
    rows = []
    for (subject, dtype), group in sorted(evaluations.items()):
        flagged = (evaluation for evaluation in group if evaluation.stage is not None)
        caught = sorted(flagged, key=lambda evaluation: (evaluation.case, evaluation.seed))
        for case, of_case in groupby(caught, key=lambda evaluation: evaluation.case):
            first, *others = of_case
            tiers = _join_sorted(evaluation.tier for evaluation in (first, *others))
            rows.append((subject, dtype, case, first.stage, tiers, 1 + len(others)))
    return pd.DataFrame(rows, columns=["subject", "dtype", "case", "stage", "tiers", "seeds"])


def _join_sorted(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _subject_row(
    subject: Subject,
    dtype: str,
    evaluations: Sequence[VariantRow],
    seeds: int,
    names: Mapping[str, Sequence[str]],
) -> dict[str, object]:
    """Return the row of a subject in a dtype; an empty row if the subject does not count in it."""
    if not _is_counted(subject, dtype, reached=bool(evaluations)):
        return {}
    caught = [evaluation for evaluation in evaluations if evaluation.stage is not None]
    cases, stages = {evaluation.case for evaluation in caught}, {evaluation.stage for evaluation in caught}
    ratios = (evaluation.largest for evaluation in evaluations if not math.isnan(evaluation.largest))
    is_caught_undrawn = any(not evaluation.drawn for evaluation in caught)
    said = names.get(subject.name, ())
    return {
        "subject": subject.name,
        "kind": subject.kind,
        "topic": subject.topic if isinstance(subject, Mutant) else "",
        "dtype": dtype,
        "seeds": seeds,
        "caught_in": seeds if is_caught_undrawn else len({evaluation.seed for evaluation in caught}),
        "reached_by": len({evaluation.case for evaluation in evaluations}),
        "caught_by": len(cases),
        "tiers": _join_sorted(evaluation.tier for evaluation in caught),
        "stages": ", ".join(stage for stage in ("", *STAGES) if stage in stages),
        "first_case": min(cases, default=""),
        "largest_ratio": max(ratios, default=math.nan),
        **{rule: any(rule in evaluation.rejects for evaluation in evaluations) for rule in TOLERANCE_RULES},
        "named": ", ".join(said),
        "how_named": "" if isinstance(subject, Mutant) and subject.is_generated else judge_diagnosis(subject, said),
        "description": subject.description,
    }


def _is_counted(subject: Subject, dtype: str, *, reached: bool) -> bool:
    """Return whether a subject counts in a dtype. Few cases are about 16 bits: there, some case has to reach it."""
    return dtype in subject.dtypes and (reached or dtype in WIDE_DTYPES)


def _rule_frame(evaluations: VariantRows, subjects: Sequence[Subject], dtypes: Sequence[str]) -> pd.DataFrame:
    """Count, per rule, mutants that any case catches, and rejected evaluations (all stages of a case) of controls."""
    rows = []
    for dtype in dtypes:
        groups = [(subject, evaluations.get((subject.name, dtype), ())) for subject in subjects]
        faults = [(subject, group) for subject, group in groups if isinstance(subject, Mutant)]
        controls = [evaluation for subject, group in groups if isinstance(subject, Control) for evaluation in group]
        mutants = sum(_is_counted(subject, dtype, reached=bool(group)) for subject, group in faults)
        for rule in ("caught", *TOLERANCE_RULES):
            caught = sum(
                any(evaluation.complete and rule in evaluation.rejects for evaluation in group) for _, group in faults
            )
            rejected = sum(rule in evaluation.rejects for evaluation in controls)
            name = "attncheck" if rule == "caught" else rule
            rows.append((dtype, name, mutants, caught, len(controls), rejected))
    return pd.DataFrame(rows, columns=["dtype", "rule", "mutants", "mutants_caught", "controls", "controls_rejected"])


_RULE_TITLES = {
    "attncheck": "attncheck",
    "allclose": "numpy.allclose",
    "assert_close": "torch.testing.assert_close",
    "rtol_1e_3": "rtol 1e-3, atol 1e-7",
}


_SKIPPED_CASES_NOTE = (
    "Each fault was put to cases until enough of them caught and named it, which a + behind their number marks; each "
    "right variant was put to a share of the cases. With --all-cases every small case is put to all of them, and other "
    "tolerances are tried."
)


def run_mutants_command(
    selection: CaseSelection,
    topics: Collection[str],
    seeds: Sequence[int],
    processes: int | None,
    *,
    exhaustive: bool,
    as_json: bool,
) -> tuple[ExitCode, MutantsDocument | None]:
    """Run the cases on the faults of these topics, or of all; print the score, or return it ``as_json``.

    Also returns the exit code. Raises ``UsageError`` for a topic that does not exist.
    """
    subjects = subjects_with_topics(topics)
    with process_pool(processes or available_processors()) as pool:
        frames = run_mutants(selection.cases, seeds, pool=pool, subjects=subjects, exhaustive=exhaustive)
    is_good = frames.survivors.empty and frames.flagged.empty and frames.meets_naming_limit
    code = ExitCode.BAD_INPUT if selection.faults else ExitCode.AGREE if is_good else ExitCode.DISAGREE
    if as_json:
        return code, mutants_document(frames, code, list(map(str, selection.faults)))
    print_mutation_score(frames)
    return code, None


def print_mutation_score(frames: MutationFrames) -> None:
    """Print every fault with the cases that catch it, the survivors, false alarms, the score, and other rules."""
    console = plain_console()
    console.print(_faults_table(frames.faults))
    for line in _lines_of_wrong_results(frames):
        console.print(line, style="red", soft_wrap=True)
    for row in to_records(frames.caught_once):
        console.print(f"caught by one case alone: {row['subject']}, by {row['case']}", soft_wrap=True)
    if frames.exhaustive:
        console.print(_rules_table(frames.rules))
    for row in to_records(frames.wrongly_named):
        line = f"wrongly named: {row['subject']} is said to be {row['named']}: {row['description']}"
        console.print(line, style="red", soft_wrap=True)
    console.print(_score_line(frames), style="bold", soft_wrap=True)
    named = "Faults named rightly {rightly}, wrongly {wrongly}, not named {not}.".format(
        **frames.count_naming_results()
    )
    console.print(named, style="bold", soft_wrap=True)
    if not frames.exhaustive:
        console.print(_SKIPPED_CASES_NOTE, soft_wrap=True)


def _lines_of_wrong_results(frames: MutationFrames) -> Iterator[str]:
    """Yield a line for each fault that survives, and for each right variant that is flagged."""
    for row in to_records(frames.survivors):
        reached = "no case reaches it" if not row["reached_by"] else f"largest error/bound {row['largest_ratio']:.3g}"
        yield (
            f"survives: {row['subject']} [{row['dtype']}] caught with {row['caught_in']} of {row['seeds']} seeds, "
            f"{reached}: {row['description']}"
        )
    for row in to_records(frames.flagged):
        yield (
            f"wrongly flagged: {row['subject']} [{row['dtype']}] at {row['stages']} of {row['first_case']}, "
            f"{row['tiers']}: {row['description']}"
        )


def _score_line(frames: MutationFrames) -> str:
    return (
        f"Mutation score {frames.score:.1%}: {frames.faults['subject'].nunique()} faults, "
        f"{frames.survivors['subject'].nunique()} survive, {len(frames.caught_once)} are caught by one case alone; "
        f"{frames.right_variants['subject'].nunique()} controls and equivalent variants, "
        f"{frames.flagged['subject'].nunique()} flagged."
    )


def mutants_document(frames: MutationFrames, code: ExitCode, notes: Sequence[str] = ()) -> MutantsDocument:
    """Return the results as the JSON document of the command ``mutants``."""
    names = ("survivors", "caught_once", "flagged", "subjects", "catches", "rules")
    tables: dict[str, Any] = {name: to_json_rows(getattr(frames, name)) for name in names}
    return MutantsDocument(
        **opening_fields("mutants", code, _score_line(frames)),
        notes=[*notes, *([] if frames.exhaustive else [_SKIPPED_CASES_NOTE])],
        score=frames.score,
        naming=frames.count_naming_results(),
        **tables,
    )


def _faults_table(faults: pd.DataFrame) -> Table:
    headings = ("fault", "topic", "dtype", "cases", "tiers", "stages", "first case that catches it", "named")
    rows = []
    for row in to_records(faults[faults["caught_in"] > 0]):
        count = f"{row['caught_by']}{'+' if row['spared'] else ''}"  # others were not put to it
        before, behind = ("subject", "topic", "dtype"), ("tiers", "stages", "first_case")
        rows.append((*(row[cell] for cell in before), count, *(row[cell] for cell in behind), row["named"] or "-"))
    return _make_table(headings, rows, numbers=headings[3:4])


def _rules_table(rules: pd.DataFrame) -> Table:
    counts = ("mutants", "mutants_caught", "controls", "controls_rejected")
    headings = ("dtype", "rule", "faults", "caught", "right results", "wrongly rejected")
    rows = [
        (row["dtype"], _RULE_TITLES.get(row["rule"], row["rule"]), *(str(row[name]) for name in counts))
        for row in to_records(rules)
    ]
    title = "The same results under other rules, faults on the cases that all of them are put to"
    return _make_table(headings, rows, numbers=headings[2:], title=title)


def _make_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str], title: str | None = None
) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
