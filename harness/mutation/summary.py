"""The evaluations of the mutation score, summed up in frames."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from attncheck.mutation.judgement import (
    MAX_WRONGLY,
    NOT_NAMED,
    RIGHTLY,
    RULES,
    WRONGLY,
    Tallies,
    Tally,
    UnitFindings,
    how_named,
    tallies_of,
)
from attncheck.mutation.mutant import WIDE, Control, Mutant, Subject, is_generated
from attncheck.spec import STAGES

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
    found: Sequence[UnitFindings],
    subjects: Sequence[Subject],
    seeds: Sequence[int],
    names: Mapping[str, Sequence[str]],
    spared: Collection[tuple[str, str]] = (),
    *,
    exhaustive: bool = True,
) -> MutationFrames:
    """Sum up what was found; ``names`` are the diagnoses of a subject's fault.

    ``spared`` are the subjects, each with a dtype, that not every case was put to.
    """
    tallies = tallies_of(found)
    dtypes = sorted({dtype for _, dtype in tallies})
    rows = _subjects(tallies, subjects, dtypes, seeds, names)
    is_spared = [(row.subject, row.dtype) in spared for row in rows.itertuples()]
    return MutationFrames(
        found,
        _catches(tallies),
        rows.assign(spared=is_spared),
        _rules(tallies, subjects, dtypes if exhaustive else []),
        exhaustive,
    )


_CATCHES = ("subject", "dtype", "case", "stage", "tiers", "seeds")


def _catches(tallies: Tallies) -> pd.DataFrame:
    rows = [
        (subject, dtype, case, of_case[min(of_case)][0], _joined(tier for _, tier in of_case.values()), len(of_case))
        for (subject, dtype), tally in sorted(tallies.items())
        for case, of_case in sorted(tally.catches.items())
    ]
    return pd.DataFrame(rows, columns=list(_CATCHES))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _subjects(
    tallies: Tallies,
    subjects: Sequence[Subject],
    dtypes: Sequence[str],
    seeds: Sequence[int],
    names: Mapping[str, Sequence[str]],
) -> pd.DataFrame:
    rows = []
    for subject in subjects:
        for dtype in dtypes:
            tally = tallies.get((subject.name, dtype), Tally())
            if not _counts(subject, dtype, reached=bool(tally.reached)):
                continue
            stages = {stage for stage, _ in tally.flagged}
            rows.append(
                {
                    "subject": subject.name,
                    "kind": kind_of(subject),
                    "topic": subject.topic if isinstance(subject, Mutant) else "",
                    "dtype": dtype,
                    "seeds": len(seeds),
                    "caught_in": len(seeds) if tally.is_caught_undrawn else len(tally.seeds),
                    "reached_by": len(tally.reached),
                    "caught_by": len(tally.catches),
                    "tiers": _joined(tier for _, tier in tally.flagged),
                    "stages": ", ".join(stage for stage in ("", *STAGES) if stage in stages),
                    "first_case": min(tally.catches, default=""),
                    "largest_ratio": tally.largest_ratio,
                    **{rule: bool(tally.rejected[rule]) for rule in RULES},
                    "named": ", ".join(names.get(subject.name, ())),
                    "how_named": "" if is_generated(subject) else how_named(subject, names.get(subject.name, ())),
                    "description": description_of(subject),
                }
            )
    return pd.DataFrame(rows)


def _counts(subject: Subject, dtype: str, *, reached: bool) -> bool:
    """Whether a subject counts in a dtype. Few cases are about 16 bits: there it does where some case reaches it."""
    return dtype in subject.dtypes and (reached or dtype in WIDE)


def kind_of(subject: Subject) -> str:
    """Return mutant, control or equivalent."""
    return type(subject).__name__.lower()


def description_of(subject: Subject) -> str:
    """Return the text that says what a subject stands for, or why it is right."""
    return subject.why if isinstance(subject, Control) else subject.defect


def _rules(tallies: Tallies, subjects: Sequence[Subject], dtypes: Sequence[str]) -> pd.DataFrame:
    """Count, per rule, mutants that any case shows, and evaluations (all stages of a case) of controls."""
    rows = [
        {"dtype": dtype, **_rule_counts(tallies, subjects, dtype, column)}
        for dtype in dtypes
        for column in ("caught", *RULES)
    ]
    return pd.DataFrame(rows, columns=["dtype", "rule", "mutants", "mutants_caught", "controls", "controls_rejected"])


def _rule_counts(tallies: Tallies, subjects: Sequence[Subject], dtype: str, column: str) -> dict[str, object]:
    reached = [(subject, tallies.get((subject.name, dtype))) for subject in subjects]
    mutants = [(subject, tally) for subject, tally in reached if isinstance(subject, Mutant)]
    controls = [tally for subject, tally in reached if isinstance(subject, Control) and tally is not None]
    return {
        "rule": "attncheck" if column == "caught" else column,
        "mutants": sum(_counts(subject, dtype, reached=tally is not None) for subject, tally in mutants),
        "mutants_caught": sum(bool(tally.rejected_complete[column]) for _, tally in mutants if tally is not None),
        "controls": sum(tally.evaluations for tally in controls),
        "controls_rejected": sum(tally.rejected[column] for tally in controls),
    }
