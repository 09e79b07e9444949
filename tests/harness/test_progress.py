"""Progress: what a line of it says, what stands above a bar, and that nothing is shown where nothing is to be."""

from __future__ import annotations

import io
import sys
from threading import Event

import pytest
from rich.console import Console
from rich.progress import Progress

from attncheck import progress
from attncheck.progress import MAX_FAILURES_SHOWN, Pace, ProgressBar, ProgressLines, duration, show_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_far_the_run_is_and_what_failed() -> None:
    clock, written = Clock(), list[str]()
    lines = ProgressLines(written.append, Pace(clock))
    lines.update(0, 2000)
    lines.tick()
    assert written == []  # workers are started: there is no rate yet
    clock.now += 60
    lines.update(1, 2000)
    lines.tick()
    clock.now += 10
    lines.update(501, 2000)
    lines.fail("numpy.eager: a")
    lines.tick()
    lines.update(2000, 2000)
    lines.tick()
    assert written == [
        "attncheck: 1 of 2,000 evaluations, 0 failing",
        "attncheck: 501 of 2,000 evaluations, 1 failing, 50 a second, 30 s left",
    ]


def test_an_evaluation_that_hangs_makes_the_rate_smaller() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.update(1, 10)
    clock.now += 2
    pace.update(5, 10)
    assert str(pace) == "5 of 10 evaluations, 0 failing, 2 a second, 2 s left"
    clock.now += 8
    assert str(pace) == "5 of 10 evaluations, 0 failing, 0.4 a second, 12 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (187, "3:07 min"), (3599, "59:59 min"), (3720, "1:02 h")],
)
def test_a_time_is_written_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_above_a_bar_stand_the_first_failures_and_the_others_are_counted() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False, markup=False, emoji=False)
    shown = Progress("{task.fields[failures]} failing", console=console, auto_refresh=False)
    bar = ProgressBar(shown)
    for number in range(MAX_FAILURES_SHOWN + 5):
        bar.fail(f"numpy.eager: case-{number} [float64]: numeric at weights[bold]")
    bar.update(30, 60)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for number in range(MAX_FAILURES_SHOWN + 5):
        line = f"case-{number} [float64]: numeric at weights[bold]"
        assert (line in text) is (number < MAX_FAILURES_SHOWN)
    assert text.count("further failures are counted below") == 1
    [task] = shown.tasks
    assert (task.completed, task.total, task.fields["failures"]) == (30, 60, MAX_FAILURES_SHOWN + 5)


def test_where_there_is_no_terminal_lines_come_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.001)
    written = Event()
    write = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: (written.set(), write(text))[1])
    with show_progress(visible=True) as shown:
        assert isinstance(shown, ProgressLines)
        shown.update(1, 7)
        shown.fail("numpy.eager: a")
        assert written.wait(60)
    out, err = capsys.readouterr()
    assert out == ""
    assert set(err.splitlines()[1:]) <= {line for line in err.splitlines() if "1 of 7 evaluations, 1 failing" in line}
    assert err.startswith("attncheck: 1 of 7 evaluations, ")


def test_what_is_not_visible_shows_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_every", pytest.fail)
    with show_progress(visible=False) as shown:
        shown.update(1, 2)
        shown.fail("numpy.eager: a")
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    progress._to_standard_error("attncheck: a line")
