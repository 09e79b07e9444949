"""The mutation score in a terminal and as JSON: what it says of what was not asked."""

from __future__ import annotations

import pytest

from attncheck.errors import ExitCode
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.score import run_mutants
from attncheck.reading.selection import select_cases
from attncheck.reports.mutation import mutants_document, print_mutation

OTHER_RULES = "under other rules"
SPARED = "each right variant was put to a share of the cases"


@pytest.mark.parametrize("exhaustive", [False, True])
def test_it_says_what_was_spared_and_tries_other_rules_only_where_nothing_was(
    *, exhaustive: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    subjects = [SUBJECTS["maximum_not_subtracted"], SUBJECTS["reference"]]
    frames = run_mutants(select_cases(["softmax.yaml"]).cases, subjects=subjects, exhaustive=exhaustive)
    print_mutation(frames)
    printed = capsys.readouterr().out
    assert (SPARED in printed, OTHER_RULES in printed) == (not exhaustive, exhaustive)
    document = mutants_document(frames, ExitCode.AGREE)
    assert (any(SPARED in each for each in document.notes), bool(document.rules)) == (not exhaustive, exhaustive)
