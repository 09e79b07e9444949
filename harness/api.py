"""The public API in one call: is this function attention?

    from attncheck import check

    result = check(my_attention)
    assert result.agrees, result.explain()

The function runs in a process of its own, and nothing is left on disk unless ``output`` names a folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.config import expected_failures_of, minimum_of, selected, tiles_of
from attncheck.errors import ExitCode
from attncheck.execution.implementation_selection import select_callable, select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.execution.limits import Limits
from attncheck.merge import merge_runs
from attncheck.reading.case import Case
from attncheck.reading.selection import Selection
from attncheck.reading.tiles import read_tiles
from attncheck.repeating import Met, calls_before, explain_as_met, group_of
from attncheck.results.checked import CaseInDtype, what_became
from attncheck.results.format import Row
from attncheck.results.reader import read_runs
from attncheck.run import Settings, run_cases

if TYPE_CHECKING:
    from attncheck.reports.frames import Frames


@dataclass(frozen=True)
class CheckResult:
    """What a check came to.

    ``frames`` are those of the report: ``results`` a row per case, dtype and stage, ``pairs``, ``numbers``,
    ``environments``. ``failures`` are the rows that made ``exit_code`` what it is; ``judged`` of ``asked`` cases were
    judged. As text, it says what the command line does: who agrees, and what was judged of what was asked.
    """

    exit_code: ExitCode
    failures: tuple[Row, ...]
    frames: Frames
    _selection: Selection = field(repr=False)
    _implementations: tuple[Implementation, ...] = field(repr=False)
    _limits: Limits = field(repr=False)

    judged: int = 0
    asked: int = 0

    @property
    def agrees(self) -> bool:
        """Whether nothing disagreed, everything ran, and as much was judged as has to be: a case at least."""
        return self.exit_code is ExitCode.AGREE

    @property
    def headline(self) -> str:
        """Who agrees or is wrong, what was judged of what was asked, and what the rest lacks, in a line."""
        from attncheck.reports.answer import make_summary

        return make_summary(self.frames).first_line

    def __str__(self) -> str:
        """Return the headline and the facts behind it, a line each."""
        from attncheck.reports.answer import make_summary

        return "\n".join([self.headline, *make_summary(self.frames).sentences])

    def explain(self, most: int = 3) -> str:
        """Tell the headline, then where the first failing cases go wrong, as ``attncheck explain`` does.

        What does not fail in a fresh process is repeated after the calls that the check made before it.
        """
        from attncheck.reports.explanation import repeated_explanation_text

        if not self.failures:
            return str(self)
        cases = {case.id: case for case in self._selection.cases}
        named = {item.name: item for item in self._implementations}
        evaluations = dict.fromkeys((row.case, row.dtype, row.implementation) for row in self.failures)
        known = [evaluation for evaluation in evaluations if evaluation[0] in cases and evaluation[2] in named]
        explanations = [
            repeated_explanation_text(
                explain_as_met(
                    cases[case], named[name], dtype, self._limits, self._met(cases, case, named[name], dtype)
                ),
                self._selection.tags,
            )
            for case, dtype, name in known[:most]
        ]
        left = len(known) - len(explanations)
        return "\n\n".join([self.headline, *explanations, *([f"... and {left} more that fail."] if left > 0 else [])])

    def _met(self, cases: Mapping[str, Case], case: str, implementation: Implementation, dtype: str) -> Met | None:
        """Return how this check met a case that failed in it."""
        asked = self._asked(implementation.name)
        if not (found := asked.get((case, dtype), "")):
            return None
        group = group_of(implementation, [each for _, each in asked], dtype)
        evaluations = calls_before(asked, (case, dtype), group.dtypes)
        return Met(found, lambda: [(cases[identity], each) for identity, each in evaluations])

    def _asked(self, name: str) -> dict[CaseInDtype, str]:
        """Return what became of every call, in the plan's order."""
        found: dict[CaseInDtype, list[dict[str, Any]]] = {}
        rows = self.frames.results
        for row in rows[rows["implementation"].eq(name)].to_dict("records"):
            found.setdefault((row["case"], row["dtype"]), []).append({str(key): each for key, each in row.items()})
        in_order = ((case.id, dtype) for case in self._selection.cases for dtype in case.dtypes)
        return {evaluation: what_became(found[evaluation]) for evaluation in in_order if evaluation in found}


def check(
    function: Callable[..., Any] | str,
    *,
    cases: Sequence[str] = (),
    tags: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    tiles: Sequence[int] = (),
    framework: str | None = None,
    name: str | None = None,
    output: str | Path | None = None,
    time_limit: float = 60.0,
    keep_going: bool = False,
    min_judged: int | str | None = None,
) -> CheckResult:
    """Run cases on one implementation and judge every stage that it returns against the exact answer.

    ``function`` is a callable (a lambda too) with the signature

        attention(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None, window=None,
                  key_lengths=None, past_key=None, past_value=None, empty_rows="zero")

    of which the keywords that it does not have are what it cannot do, or a text: ``file.py:function``,
    ``package.module:function``, or the name of a bundled or published implementation. It runs in a process of its own,
    on NumPy's arrays or those of ``framework`` (torch, tensorflow, jax). ``cases`` are paths of files or folders, or
    globs over the bundled cases; if empty, all of these and the project's own (``pyproject.toml``). ``tiles`` are sizes
    of the kernel's tiles, whose cases come besides, as with ``--tile``. In reports a
    callable is called as on the command line, after its module and itself, or by ``name`` behind its module. ``output``
    keeps the results in a folder, for ``attncheck report``. With ``keep_going``, one whose process ends in the same way
    in every call is tried in all cases. ``min_judged`` is in how many cases it has to be judged, or in what share of
    them (``"80%"``), to agree; what ``[tool.attncheck]`` says if nothing is picked. Raises ``UsageError`` for what
    cannot be called or found.
    """
    limits = Limits(case_seconds=time_limit, keep_going=keep_going)
    picked = {"cases": list(cases), "tags": list(tags), "dtypes": list(dtypes)}
    minimum = minimum_of(min_judged, complete=not any(picked.values()))
    chosen = _chosen(function, framework, name, limits)
    sizes = tiles_of(read_tiles(tiles, "tiles"), complete=not cases)
    selection = selected(list(cases), list(tags), list(dtypes), tiles=sizes)
    with tempfile.TemporaryDirectory() as folder:
        evaluation = Path(output) if output is not None else Path(folder) / "results"
        known = expected_failures_of([item.entry.name for item in chosen.implementations])
        settings = Settings(
            evaluation,
            dtypes=tuple(dtypes),
            limits=limits,
            command=sys.orig_argv,
            expected_failures=known,
            tags=selection.tags,
            picked=picked,
            tiles=sizes,
            minimum=minimum,
            keeps_results=output is not None,
        )
        summary = run_cases(selection.cases, chosen, settings, selection.faults)
        from attncheck.reports.making import make_frames

        frames = make_frames(merge_runs(read_runs([evaluation])))
    judged = min(summary.judged.values(), default=0)
    return CheckResult(
        summary.exit_code,
        summary.failures,
        frames,
        selection,
        chosen.implementations,
        limits,
        judged=judged,
        asked=summary.cases,
    )


def _chosen(
    function: Callable[..., Any] | str, framework: str | None, name: str | None, limits: Limits
) -> ImplementationSelection:
    if isinstance(function, str):
        return select_implementations(None, [function], framework, limits)
    implementation = select_callable(function, framework, name)
    return ImplementationSelection((implementation,), by_name=(implementation.name,))
