"""The mutation score in several processes."""

from __future__ import annotations

import pandas as pd

from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, SUBJECTS
from attncheck.mutation.score import run_mutants
from attncheck.mutation.workers import in_processes
from attncheck.reading.selection import select_cases

NAMES = ("scale_missing", "softcap_ignored", "keys_reversed", "tail_dropped_after_blocks_of_32", "reference")


def test_several_processes_find_what_one_finds() -> None:
    cases = [*select_cases(["softcap.yaml"]).cases, *select_cases(["probes/long_rows.yaml"]).cases]
    subjects = [*(SUBJECTS[name] for name in NAMES), *CONTROLS[:2], *EQUIVALENT[:1]]
    alone = run_mutants(cases, (0, 1), subjects=subjects)
    with in_processes(3) as scorers:
        together = run_mutants(cases, (0, 1), scorers=scorers, subjects=subjects)
    pd.testing.assert_frame_equal(alone.evaluations, together.evaluations)
    pd.testing.assert_frame_equal(alone.subjects, together.subjects)
    assert alone.subjects["named"].any()
