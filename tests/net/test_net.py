"""What users see stands still, but for what a commit changes on purpose."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from here import own_code_here
from snapshots import FOLDER, MAKERS, snapshots

_MOST = 40


@pytest.fixture(autouse=True)
def _in_this_process() -> Iterator[None]:
    with own_code_here():
        yield


@pytest.mark.parametrize("maker", MAKERS)
def test_what_users_see_is_as_recorded(maker: str) -> None:
    changes: list[str] = []
    for name, found in snapshots(maker).items():
        path = FOLDER / name
        recorded = path.read_text(encoding="utf-8") if path.is_file() else ""
        changes += difflib.unified_diff(
            recorded.splitlines(), found.splitlines(), f"{name} as recorded", f"{name} now", n=1, lineterm=""
        )
    how = f"{len(changes)} lines in all. If that is meant: python tests/net/snapshots.py, and say so in the commit."
    assert not changes, "\n".join(["what users see has changed:", *changes[:_MOST], how])


def test_every_snapshot_is_made() -> None:
    recorded = {
        path.name for path in FOLDER.iterdir() if path.suffix not in (".py", ".yaml", "") and path.stem != "catches"
    }
    assert recorded == {name for maker in MAKERS for name in snapshots(maker)}
