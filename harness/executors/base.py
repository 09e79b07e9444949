"""What every executor offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attncheck.plan import Plan
from attncheck.recorder import ResultRecorder


class Executor(Protocol):
    """Computes and judges a plan. ``record`` is what environment.json says of it."""

    record: Mapping[str, Any]

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """What the frameworks say of themselves, by group."""

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute and judge every unit of a plan, or until the recorder ``is_stopped``.

        ``on_progress`` hears evaluations done and planned.
        """
