"""A misprint is told once, with what would explain it and how a case says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attncheck.reports.frames import Frames
from attncheck.reports.printed_numbers import misprints
from attncheck.results.format import Row

IN_FLOAT32 = "rounding in float32 would explain it: say `computed_in: float32`"


def message_of(hints: list[str | None], make_row: Callable[..., Row], write_run: Any, frames_of: Any) -> str:
    printed = {"comparison": "printed", "verdict": "misprint", "reference_text": "0.25", "exact": 0.5}
    rows = [make_row(**printed, index=f"0,{place}", hint=hint) for place, hint in enumerate(hints)]
    frames: Frames = frames_of(write_run([make_row(), *rows]))
    (found,) = misprints(frames)
    return found.message


def test_what_would_explain_all_misprints_of_a_matrix_is_said_once(
    make_row: Callable[..., Row], write_run: Any, frames_of: Any
) -> None:
    message = message_of([IN_FLOAT32] * 5, make_row, write_run, frames_of)
    assert message.startswith("weights[0, 0] is printed as 0.25; it should be 0.5. weights[0, 1]")
    assert message.endswith(
        ". And 2 more numbers of it. Rounding in float32 would explain it: say `computed_in: float32`"
    )
    assert message.count("would explain") == 1


def test_what_would_explain_some_misprints_says_how_many(
    make_row: Callable[..., Row], write_run: Any, frames_of: Any
) -> None:
    message = message_of([IN_FLOAT32, None, IN_FLOAT32], make_row, write_run, frames_of)
    assert message.endswith(f". For 2 of these 3 numbers: {IN_FLOAT32}")
    assert "explain" not in message_of([None, None], make_row, write_run, frames_of)
