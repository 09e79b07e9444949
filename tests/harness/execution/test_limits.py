"""How many workers there may be: as many as the processors that this process was given."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attncheck.execution.limits import Limits, available_processors

ASKED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from attncheck.execution.limits import Limits, available_processors
print(available_processors(), Limits().workers)
"""


def test_there_is_a_worker_for_every_processor_and_three_at_least() -> None:
    assert Limits().workers == max(3, available_processors())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform does not say which processors it gives")
def test_a_process_that_was_given_one_processor_counts_no_other() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3"]
