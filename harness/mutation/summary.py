"""The evaluations of the mutation score, summed up in frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from attncheck.mutation.mutant import WIDE, Control, Mutant, Subject
from attncheck.mutation.naming import MAX_WRONGLY, NOT_NAMED, RIGHTLY, WRONGLY, how_named
from attncheck.mutation.rules import RULES
from attncheck.spec import STAGES, stage_position

EVALUATION_COLUMNS: Mapping[str, str] = {
    "subject": "name in the catalogue",
    "case": "id of the case",
    "dtype": "working dtype",
    "seed": "0 for the case's own seed, k for its k-th fresh one",
    "drawn": "whether the case draws anything; one that does not counts in every seed",
    "complete": "whether the case was put to every fault, as small ones are",
    "stage": "named intermediate; empty where the subject raised",
    "tier": "what found a fault: proven, statistical, a verdict on form; none where the stage agrees",
    "caught": "whether the stage is flagged",
    "own": "whether a flagged stage is itself at fault, rather than one before it",
    "ratio": "largest error over its bound",
    **dict.fromkeys(RULES, "whether this tolerance rejects the stage"),
}


@dataclass(frozen=True)
class MutationFrames:
    """What a run of the catalogue came to.

    ``evaluations``  one row per subject, case, dtype, seed and stage (``EVALUATION_COLUMNS``); of a faulty variant only
                     where anything that it returned differs from the reference
    ``catches``      one row per mutant, dtype and case that catches it: the stage, the tier, in how many seeds
    ``subjects``     one row per subject and dtype: kind, topic, in how many seeds it is caught, by which tiers and
                     cases; ``survives`` where it is not caught in every seed (controls: ``flagged`` where ever); as
                     what it is ``named`` from all dtypes together, and whether rightly, wrongly or not
    ``rules``        one row per dtype and rule: mutants caught, evaluations of controls rejected; of faults on
                     the cases that were put to every one of them
    """

    evaluations: pd.DataFrame
    catches: pd.DataFrame
    subjects: pd.DataFrame
    rules: pd.DataFrame

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
        """The faults that one case alone catches, in all dtypes together: ``subject`` and ``case``."""
        faults = self.subjects.loc[self.subjects["kind"].eq("mutant"), "subject"]
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
    evaluations: pd.DataFrame, subjects: Sequence[Subject], seeds: Sequence[int], names: Mapping[str, Sequence[str]]
) -> MutationFrames:
    """Sum the evaluations up; ``names`` are the diagnoses of a subject's fault."""
    evaluations = evaluations.astype({"caught": bool, **dict.fromkeys(RULES, "boolean")})
    first = _first_flagged(evaluations)
    dtypes = sorted(set(evaluations["dtype"]))
    return MutationFrames(
        evaluations,
        _catches(first),
        _subjects(evaluations, first, subjects, dtypes, seeds, names),
        _rules(evaluations, subjects, dtypes),
    )


def _first_flagged(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Keep the first flagged stage that is itself at fault (else the first flagged one) of each evaluation."""
    flagged = evaluations[evaluations["caught"]]
    order = flagged["stage"].map(lambda stage: stage_position(stage) if stage else -1)
    keys = ["subject", "case", "dtype", "seed"]
    return (
        flagged.assign(order=order, inherited=~flagged["own"].astype(bool))
        .sort_values([*keys, "inherited", "order"])
        .drop_duplicates(keys)
        .drop(columns=["inherited", "order"])
    )


def _catches(first: pd.DataFrame) -> pd.DataFrame:
    grouped = first.groupby(["subject", "dtype", "case"], as_index=False)
    return grouped.agg(stage=("stage", "first"), tiers=("tier", _joined), seeds=("seed", "nunique"))


def _joined(names: pd.Series[str]) -> str:
    return ", ".join(sorted(set(names)))


def _subjects(
    evaluations: pd.DataFrame,
    first: pd.DataFrame,
    subjects: Sequence[Subject],
    dtypes: Sequence[str],
    seeds: Sequence[int],
    names: Mapping[str, Sequence[str]],
) -> pd.DataFrame:
    rows = []
    all_own, all_caught = _by_subject(evaluations), _by_subject(first)
    for subject in subjects:
        for dtype in dtypes:
            own = all_own.get((subject.name, dtype), evaluations[:0])
            if not _counts(subject, dtype, reached=not own.empty):
                continue
            caught = all_caught.get((subject.name, dtype), first[:0])
            in_every_seed = bool((~caught["drawn"].astype(bool)).any())
            rows.append(
                {
                    "subject": subject.name,
                    "kind": kind_of(subject),
                    "topic": subject.topic if isinstance(subject, Mutant) else "",
                    "dtype": dtype,
                    "seeds": len(seeds),
                    "caught_in": len(seeds) if in_every_seed else caught["seed"].nunique(),
                    "reached_by": own["case"].nunique(),
                    "caught_by": caught["case"].nunique(),
                    "tiers": _joined(caught["tier"]),
                    "stages": ", ".join(stage for stage in ("", *STAGES) if stage in set(caught["stage"])),
                    "first_case": min(caught["case"], default=""),
                    "largest_ratio": own["ratio"].astype(float).max(),
                    **{rule: bool(own[rule].fillna(value=False).any()) for rule in RULES},
                    "named": ", ".join(names.get(subject.name, ())),
                    "how_named": how_named(subject, names.get(subject.name, ())),
                    "description": description_of(subject),
                }
            )
    return pd.DataFrame(rows)


def _by_subject(frame: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    return {(str(subject), str(dtype)): group for (subject, dtype), group in frame.groupby(["subject", "dtype"])}


def _counts(subject: Subject, dtype: str, *, reached: bool) -> bool:
    """Whether a subject counts in a dtype. Few cases are about 16 bits: there it does where some case reaches it."""
    return dtype in subject.dtypes and (reached or dtype in WIDE)


def kind_of(subject: Subject) -> str:
    """Return mutant, control or equivalent."""
    return type(subject).__name__.lower()


def description_of(subject: Subject) -> str:
    """Return the text that says what a subject stands for, or why it is right."""
    return subject.why if isinstance(subject, Control) else subject.defect


def _rules(evaluations: pd.DataFrame, subjects: Sequence[Subject], dtypes: Sequence[str]) -> pd.DataFrame:
    """Count, per rule, mutants that any case shows, and evaluations (all stages of a case) of controls."""
    rows = [
        {"dtype": dtype, **_rule_counts(evaluations[evaluations["dtype"] == dtype], subjects, dtype, column)}
        for dtype in dtypes
        for column in ("caught", *RULES)
    ]
    return pd.DataFrame(rows)


def _rule_counts(evaluations: pd.DataFrame, subjects: Sequence[Subject], dtype: str, column: str) -> dict[str, object]:
    reached = set(evaluations["subject"])
    kinds = evaluations["subject"].map({subject.name: kind_of(subject) for subject in subjects})
    put_to_all = evaluations["complete"].astype(bool)
    faulty = evaluations[(kinds == "mutant") & put_to_all & evaluations[column].fillna(value=False)]
    controls = evaluations[kinds == "control"].groupby(["subject", "case", "seed"])[column].any()
    return {
        "rule": "attncheck" if column == "caught" else column,
        "mutants": sum(
            isinstance(subject, Mutant) and _counts(subject, dtype, reached=subject.name in reached)
            for subject in subjects
        ),
        "mutants_caught": faulty["subject"].nunique(),
        "controls": len(controls),
        "controls_rejected": int(controls.sum()),
    }
