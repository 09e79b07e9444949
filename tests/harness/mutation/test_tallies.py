"""What is counted in one pass is what the evaluations say, counted row by row."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import Any

from hypothesis import given, settings
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


def _key(row: dict[Hashable, Any]) -> tuple[str, str, str, int]:
    return row["subject"], row["dtype"], row["case"], row["seed"]


def _case_of(row: dict[Hashable, Any]) -> tuple[str, str, str]:
    return _key(row)[:3]


def _is_of(row: dict[Hashable, Any], other: dict[Hashable, Any]) -> bool:
    return (row["subject"], row["dtype"]) == (other["subject"], other["dtype"])


def _flagged_first(rows: Iterable[dict[Hashable, Any]]) -> list[dict[Hashable, Any]]:
    """Keep the first flagged stage that is itself at fault, else the first flagged one, of each evaluation."""

    def place(row: dict[Hashable, Any]) -> tuple[bool, int]:
        return not row["own"], stage_position(row["stage"]) if row["stage"] else -1

    flagged = sorted((row for row in rows if row["caught"]), key=_key)
    return [min(stages, key=place) for _, stages in groupby(flagged, key=_key)]


@settings(max_examples=60)
@given(units=_units())
def test_counts_are_those_of_the_evaluations(units: list[UnitFindings]) -> None:
    frames = summarise(units, SUBJECTS_OF_TEST, (0, 1, 2), {})
    rows = frames.evaluations.astype(object).to_dict("records")
    _assert_catches_are_counted(frames, rows)
    _assert_rules_count_faults_on_complete_cases_and_evaluations_of_controls(frames, rows)


def _assert_catches_are_counted(frames: MutationFrames, rows: list[dict[Hashable, Any]]) -> None:
    first = _flagged_first(rows)
    by_case = {key: list(of_case) for key, of_case in groupby(first, key=_case_of)}
    counted = {
        key: (of_case[0]["stage"], ", ".join(sorted({row["tier"] for row in of_case})), len(of_case))
        for key, of_case in by_case.items()
    }
    found = {row[:3]: row[3:] for row in frames.catches.itertuples(index=False, name=None)}
    assert found == counted
    assert list(found) == sorted(found)
    for row in frames.subjects.to_dict("records"):
        own, caught = ([each for each in every if _is_of(each, row)] for every in (rows, first))
        cases, caught_cases = ({each["case"] for each in every} for every in (own, caught))
        assert (row["reached_by"], row["caught_by"]) == (len(cases), len(caught_cases))
        assert row["caught_in"] == (3 if "a" in caught_cases else len({each["seed"] for each in caught}))
        assert row["tiers"] == ", ".join(sorted({each["tier"] for each in caught}))
        assert set(row["stages"].split(", ")) == ({each["stage"] for each in caught} or {""})
        assert row["first_case"] == min(caught_cases, default="")
        ratios = [each["ratio"] for each in own if each["ratio"] is not None and not math.isnan(each["ratio"])]
        largest = max(ratios, default=math.nan)
        assert row["largest_ratio"] == largest or (math.isnan(largest) and math.isnan(row["largest_ratio"]))
        assert [row[rule] for rule in RULES] == [any(each[rule] is True for each in own) for rule in RULES]


def _assert_rules_count_faults_on_complete_cases_and_evaluations_of_controls(
    frames: MutationFrames, rows: list[dict[Hashable, Any]]
) -> None:
    kinds = {subject.name: kind_of(subject) for subject in SUBJECTS_OF_TEST}
    for row in frames.rules.to_dict("records"):
        of_dtype = [each for each in rows if each["dtype"] == row["dtype"]]
        column = "caught" if row["rule"] == "attncheck" else row["rule"]
        faults = [each for each in of_dtype if kinds[each["subject"]] == "mutant" and each["complete"]]
        controls = [each for each in of_dtype if kinds[each["subject"]] == "control"]
        assert row["mutants_caught"] == len({each["subject"] for each in faults if each[column] is True})
        assert row["controls"] == len({_key(each) for each in controls})
        assert row["controls_rejected"] == len({_key(each) for each in controls if each[column] is True})
