"""The processors that a process may use: those that it was given, and what Linux says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attncheck.execution.limits import Limits
from attncheck.processors import _flags_of, available_processors

ASKED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from attncheck.execution.limits import Limits
from attncheck.processors import available_processors
print(available_processors(), Limits().workers)
"""


def test_there_is_a_worker_for_every_processor_and_three_at_least() -> None:
    assert Limits().workers == max(3, available_processors())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform does not say which processors it gives")
def test_a_process_that_was_given_one_processor_counts_no_other() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\nflags\t\t: fpu\n", {"fpu", "avx2", "amx_bf16"}),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("processor\t: 0\n", None),
    ],
)
def test_the_flags_are_those_of_the_first_processor(tmp_path: Path, text: str, flags: set[str] | None) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert _flags_of(tmp_path / "cpuinfo") == flags


def test_a_system_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert _flags_of(tmp_path / "cpuinfo") is None
