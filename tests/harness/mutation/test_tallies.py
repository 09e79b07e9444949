"""What is counted in one pass is what the evaluations say, counted row by row."""

from __future__ import annotations

import math

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.findings import Findings, StageResult, UnitFindings
from attncheck.mutation.rules import RULES
from attncheck.mutation.summary import MutationFrames, kind_of, summarise
from attncheck.spec import stage_position

NAMES = ("scale_missing", "mask_ignored", "keys_reversed", "reference")
SUBJECTS_OF_TEST = [SUBJECTS[name] for name in NAMES]

_FLAGS = st.booleans()
_NUMBERS = st.sampled_from([None, math.nan, math.inf, 0.0, 0.5, 2.0])


def _results(stage: str) -> st.SearchStrategy[StageResult]:
    tiers = st.sampled_from([None, "proven", "statistical", "nonfinite"])
    rules = (st.sampled_from([None, True, False]) for _ in RULES)
    made = st.tuples(st.just(stage), tiers, _FLAGS, _NUMBERS, *rules)
    return made.map(lambda drawn: StageResult(drawn[0], drawn[1], drawn[1] is not None, *drawn[2:]))


_EVALUATIONS = st.one_of(
    st.lists(st.sampled_from(["scores", "weights", "output"]), unique=True, max_size=3).flatmap(
        lambda stages: st.tuples(*map(_results, stages))
    ),
    st.just((StageResult("", "error", True, True, None, None, None, None),)),
)


@st.composite
def _units(draw: st.DrawFn) -> list[UnitFindings]:
    keys = st.tuples(st.sampled_from("abc"), st.sampled_from(["float64", "float32"]), st.integers(0, 2))
    units = []
    for case, dtype, seed in draw(st.lists(keys, unique=True, max_size=6)):
        found = draw(st.lists(st.tuples(st.sampled_from(NAMES), _EVALUATIONS), unique_by=lambda each: each[0]))
        shared: list[tuple[str, Findings]] = [(name, found[0][1] if draw(_FLAGS) else each) for name, each in found]
        units.append(UnitFindings(case, dtype, seed, case != "a", case != "b", True, tuple(shared)))
    return units


def _flagged_first(frames: MutationFrames) -> pd.DataFrame:
    """Keep the first flagged stage that is itself at fault, else the first flagged one, of each evaluation."""
    keys = ["subject", "dtype", "case", "seed"]
    flagged = frames.evaluations[frames.evaluations["caught"]]
    order = [stage_position(stage) if stage else -1 for stage in flagged["stage"]]
    flagged = flagged.assign(order=order, inherited=[not own for own in flagged["own"]])
    return flagged.sort_values([*keys, "inherited", "order"]).drop_duplicates(keys)


@given(units=_units())
def test_counts_are_those_of_the_evaluations(units: list[UnitFindings]) -> None:
    frames = summarise(units, SUBJECTS_OF_TEST, (0, 1, 2), {})
    rows, first = frames.evaluations, _flagged_first(frames)
    counted = {
        (subject, dtype, case): (of_case["stage"].iloc[0], ", ".join(sorted(set(of_case["tier"]))), len(of_case))
        for (subject, dtype, case), of_case in first.groupby(["subject", "dtype", "case"])
    }
    found = {row[:3]: row[3:] for row in frames.catches.itertuples(index=False, name=None)}
    assert found == counted
    assert list(found) == sorted(found)
    for row in frames.subjects.to_dict("records"):
        own = rows[(rows["subject"] == row["subject"]) & (rows["dtype"] == row["dtype"])]
        caught = first[(first["subject"] == row["subject"]) & (first["dtype"] == row["dtype"])]
        assert (row["reached_by"], row["caught_by"]) == (own["case"].nunique(), caught["case"].nunique())
        assert row["caught_in"] == (3 if "a" in set(caught["case"]) else caught["seed"].nunique())
        assert row["tiers"] == ", ".join(sorted(set(caught["tier"])))
        assert set(row["stages"].split(", ")) == (set(caught["stage"]) or {""})
        assert row["first_case"] == min(caught["case"], default="")
        largest = own["ratio"].astype(float).max()
        assert row["largest_ratio"] == largest or (math.isnan(largest) and math.isnan(row["largest_ratio"]))
        assert [row[rule] for rule in RULES] == [bool(own[rule].fillna(value=False).any()) for rule in RULES]


@given(units=_units())
def test_rules_count_faults_on_complete_cases_and_evaluations_of_controls(units: list[UnitFindings]) -> None:
    frames = summarise(units, SUBJECTS_OF_TEST, (0, 1, 2), {})
    kinds = {subject.name: kind_of(subject) for subject in SUBJECTS_OF_TEST}
    for row in frames.rules.to_dict("records"):
        rows = frames.evaluations[frames.evaluations["dtype"] == row["dtype"]]
        column = "caught" if row["rule"] == "attncheck" else row["rule"]
        of_kind = rows["subject"].map(kinds)
        rejected = rows[rows[column].fillna(value=False).astype(bool)]
        faults = rejected[(of_kind[rejected.index] == "mutant") & rejected["complete"]]
        controls = rows[of_kind == "control"].groupby(["subject", "case", "seed"])[column].any()
        assert row["mutants_caught"] == faults["subject"].nunique()
        assert (row["controls"], row["controls_rejected"]) == (len(controls), controls.sum())
