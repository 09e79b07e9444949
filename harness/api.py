"""The public API in one call: is this function attention?

    from attncheck import check

    result = check(my_attention)
    assert result.agrees, result.explain()

The function runs in a process of its own, and nothing is left on disk unless ``output`` names a folder.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from attncheck.asking.again import ask_again, find_failure_among_calls
from attncheck.asking.answer import Answer
from attncheck.asking.conventions import MeasuredConvention, measure_all_conventions
from attncheck.asking.engine import Engine
from attncheck.asking.question import Question
from attncheck.common.errors import CaseError, ExitCode, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import implementation_of_callable, select_implementations
from attncheck.execution.implementations import Implementation, ImplementationSelection
from attncheck.gating.run import GateRequest, GateResult, run_gate
from attncheck.reading.case import Case
from attncheck.reading.selection import CaseSelection, choose_dtype, select_case
from attncheck.reports.merge import merge_runs
from attncheck.results.format import Row
from attncheck.results.last_failed import CaseInDtype, call_outcomes, select_failed
from attncheck.results.reader import read_runs
from attncheck.run import Settings, run_cases
from attncheck.searching.own_calls import question_from_arrays
from attncheck.settings.config import check_user_cases, select_configured_cases
from attncheck.settings.options import (
    CheckKeywords,
    FunctionOptions,
    GateKeywords,
    RunOptions,
    add_keywords_to_signature,
    read_options,
)
from attncheck.spec import DEFAULT_OPERATION

if TYPE_CHECKING:
    from attncheck.reports.frames import Frames


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check.

    As text, it is what the command line prints: who agrees, and how much was judged of what was asked.

    Attributes:
        exit_code: What ``attncheck check`` would have exited with.
        failures: The rows that made the exit code what it is.
        frames: The data frames of the report: ``results`` with a row per case, dtype and stage, ``pairs``, ``numbers``
            and ``environments``.
        judged: In how many cases the function was judged.
        asked: How many cases ran.
    """

    exit_code: ExitCode
    failures: tuple[Row, ...]
    frames: Frames
    _selection: CaseSelection = field(repr=False)
    _implementations: tuple[Implementation, ...] = field(repr=False)
    _limits: Limits = field(repr=False)

    judged: int = 0
    asked: int = 0

    @property
    def agrees(self) -> bool:
        """True if nothing disagreed, everything ran, and as much was judged as has to be, at least one case."""
        return self.exit_code is ExitCode.AGREE

    @property
    def headline(self) -> str:
        """The first line of the report, which says who agrees or is wrong, and how much was judged."""
        return str(self).partition("\n")[0]

    def __str__(self) -> str:
        """Return the headline and the facts behind it, a line each."""
        from attncheck.reports.summary import make_summary

        summary = make_summary(self.frames)
        return "\n".join([summary.first_line, *summary.sentences])

    def explain(self, most: int = 3) -> str:
        """Return the headline, and where the simplest failing cases go wrong, as ``attncheck explain`` tells it.

        Between the two stands what the failing cases have in common, where that is known. What does not fail in a fresh
        process is repeated after the calls that came before it in the check.

        Args:
            most: How many failing cases are explained.
        """
        from attncheck.reports.failure_patterns import pattern_lines, simplicity_sort_key
        from attncheck.showing.explanation import explanation_text

        if not self.failures:
            return str(self)
        cases = {case.id: case for case in self._selection.cases}
        named = {item.name: item for item in self._implementations}
        evaluations = dict.fromkeys((row.case, row.dtype, row.implementation) for row in self.failures)
        known = [evaluation for evaluation in evaluations if evaluation[0] in cases and evaluation[2] in named]
        known.sort(key=lambda evaluation: simplicity_sort_key(self.frames.cases[evaluation[0]]))
        explanations = []
        for case, dtype, name in known[:most]:
            met = find_failure_among_calls(self._call_outcomes(name), (case, dtype), named[name], lambda _: cases)
            with Engine(self._limits, RunOptions().store) as engine:
                again = ask_again(engine, named[name], Question(cases[case], dtype), met)
            explanations.append(explanation_text(again, self._selection.tags))
        left = len(known) - len(explanations)
        said = [f"{line}." for line in pattern_lines(self.frames)]
        more = [f"... and {left} more that fail."] if left > 0 else []
        return "\n\n".join([self.headline, *said, *explanations, *more])

    def _call_outcomes(self, name: str) -> dict[CaseInDtype, str]:
        """Return what became of every call, in the plan's order."""
        rows = self.frames.results
        planned = ((case.id, dtype) for case in self._selection.cases for dtype in case.dtypes)
        return call_outcomes(planned, rows[rows["implementation"].eq(name)].to_dict("records"))


@add_keywords_to_signature(CheckKeywords, name=None, output=None)
def check(function: Callable[..., Any] | str | os.PathLike[str], **keywords: Unpack[CheckKeywords]) -> CheckResult:
    """Run cases on one implementation and judge every stage that it returns against the exact answer.

    The function runs in a process of its own. It is called as ``attention(query, key, value, *, mask=None, bias=None,
    ...)``, with the keywords of ``Backend.attention`` in ``attncheck.backends.contract``, which says what each means.

    Every keyword is optional: a case that needs one that the function does not have is unsupported.

    Args:
        function: A callable (a lambda, too), the path of a module, or a text: ``file.py:function``,
            ``package.module:function``, or the name of a bundled or published implementation.
        cases: Paths of files or folders, or globs over the bundled cases. Default: all bundled cases, and those of the
            project's ``pyproject.toml``.
        tags: Select the cases that have one of these tags.
        dtypes: Select these dtypes: float64, float32, bfloat16, float16.
        tiles: Sizes of the kernel's tiles; cases with lengths around their edges are added, as with ``--tile``.
        framework: The framework whose arrays the function takes and returns: numpy (the default), torch, tensorflow or
            jax.
        signature: The library whose signature the function follows: sdpa, flash_attn, xformers, flashinfer, mlx, onnx,
            keras, hf, bshd or key_mask. Default: attncheck's own signature.
        declare: What the function declares, where it does not itself: a table, or texts such as ``dtypes=float16``.
        name: What reports call a callable, behind the name of its module. Default: its own name.
        output: Keep the results in this folder, for ``attncheck report``.
        time_limit: Seconds that one evaluation may take.
        keep_going: Try every case, even after ten equal crashes or timeouts in a row.
        min_judged: In how many cases the function has to be judged to agree, or in what share of them (``"80%"``).
            Default: ``min_judged`` of ``[tool.attncheck]``, if the cases are not narrowed.
        match: Select the cases that match an expression, as with ``-k``: ``"Lk>64 and not causal"``.
        failed: Run only what failed last time in ``output``; everything if nothing did.
        max_failures: Stop after so many failing cases.

    Returns:
        The outcome, with ``agrees``, ``headline``, ``explain()`` and ``frames``.

    Raises:
        UsageError: If the function, the cases, or a tag or dtype cannot be found, the function cannot be called, or an
            argument is wrong.
        CaseError: If a case file or a list of expected failures cannot be used; nothing has run then.
    """
    name, output, failed = keywords.pop("name", None), keywords.get("output"), keywords.get("failed", False)
    most = keywords.get("max_failures")
    if failed and output is None:
        raise UsageError("failed: expected an output folder, which holds what failed last time")
    if most is not None and most < 1:
        raise UsageError(f"max_failures: expected a number of cases, at least 1; got {most!r}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "results" if output is None else Path(output)
        options = read_options({**keywords, "output": place})
        return _run_check(function, name, options, keeps_results=output is not None)


def _run_check(
    function: Callable[..., Any] | str | os.PathLike[str], name: str | None, options: RunOptions, *, keeps_results: bool
) -> CheckResult:
    limits, store = options.worker_limits, options.store
    check_user_cases(options, store)
    chosen = _select_implementation(function, options, name, limits).with_added_dtypes(options.dtypes)
    selection = select_configured_cases(options, store)
    if selection.faults:
        raise CaseError(list(selection.faults))
    only = None
    if options.failed:
        names = [item.name for item in chosen.implementations]
        narrowed = select_failed(selection.cases, options.dtypes, names, options.output)
        if narrowed.cases:
            selection, only = replace(selection, cases=narrowed.cases), narrowed.failed_units
    settings = Settings.of(options, chosen, selection.tags, only, store)
    settings = replace(settings, command=sys.orig_argv, complete=False, keeps_results=keeps_results)
    summary = run_cases(selection.cases, chosen, settings)
    from attncheck.reports.frames import make_frames
    from attncheck.searching.hints import confirm_hints

    if summary.failures:
        confirm_hints(options.output, selection.cases, chosen.implementations, limits, selection.tags)

    frames = make_frames(merge_runs(read_runs([options.output])))
    outcome = (summary.exit_code, summary.failures, frames, selection, chosen.implementations, limits)
    return CheckResult(*outcome, judged=min(summary.judged.values(), default=0), asked=summary.cases)


@add_keywords_to_signature(GateKeywords, budget=90.0, seed=None, forbids_delegation=False, output=None)
def gate(function: Callable[..., Any] | str | os.PathLike[str], **keywords: Unpack[GateKeywords]) -> GateResult:
    """Decide if a kernel that nobody has read may be merged, as ``attncheck gate`` does.

    Args:
        function: A callable, the path of a module, or a text, as for ``check``; it is code of your own.
        budget: The seconds that the gate may take.
        seed: The seed of the problems. Default: a new one, which the result has.
        forbids_delegation: Whether a kernel that computes by calling another attention is refused.
        output: Keep the results of the standard cases in this folder.
        framework: The framework whose arrays the function takes and returns, as for ``check``.
        signature: The library whose signature it follows, as for ``check``.
        declare: What the function declares, as for ``check``.

    Returns:
        The outcome, with ``may_be_merged``, ``answer``, ``findings`` and ``steps``.

    Raises:
        UsageError: If the function cannot be found or called, or an argument is wrong.
        CaseError: If a case file of the project cannot be used.
    """
    budget, seed = keywords.pop("budget", 90.0), keywords.pop("seed", None)
    forbids_delegation, output = keywords.pop("forbids_delegation", False), keywords.pop("output", None)
    request = GateRequest(budget, secrets.randbits(32) if seed is None else seed, forbids_delegation)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "results" if output is None else Path(output)
        options = read_options({**keywords, "output": place})
        chosen = _select_implementation(function, options, None, options.worker_limits)
        if chosen.missing:
            raise UsageError(f"{chosen.missing[0]} is not installed")
        return run_gate(chosen, options, request)


def ask(
    function: Callable[..., Any] | str | os.PathLike[str],
    case: Case | Question | str | os.PathLike[str] | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    operation: str | None = None,
    dtype: str | None = None,
    framework: str | None = None,
    signature: str | None = None,
    name: str | None = None,
    limits: Limits | None = None,
) -> Answer:
    """Ask a function one question: a case, or a call with arrays of your own.

    The function runs in a process of its own, and is judged as ``check`` judges it::

        answer = ask(my_attention, inputs={"query": q, "key": k, "value": v}, options={"is_causal": True})
        assert answer.agrees, explain(answer)

    Args:
        function: A callable, or the name of an implementation, or ``file.py:function``, as for ``check``.
        case: A case, its id, the path of a file with one case, or the ``question`` of an earlier answer.
        inputs: In place of a case, arrays of any framework by the names of docs/cases.md: query (B, H, Lq, D),
            key (B, H, Lk, D), value (B, H, Lk, Dv), mask, bias and so on.
        options: The options of that call, by the names of docs/cases.md.
        operation: The operation of that call. Default: attention.
        dtype: The dtype of the call. Default: for arrays their own; for a case float32, else its first.
        framework: The framework whose arrays the function takes and returns, as for ``check``.
        signature: The library whose signature it follows, as for ``check``.
        name: What messages call a callable.
        limits: Limits of the worker process.

    Returns:
        The answer, with ``agrees``, ``judgements`` and ``rows``.

    Raises:
        UsageError: If there is no such function or case, if an array is missing or of another kind, or if neither a
            case nor arrays are given, or both.
        CaseError: If the arrays and options are no call of the operation; the message names the field.
    """
    if (case is None) == (inputs is None):
        raise UsageError("ask: expected either a case or inputs")
    if case is not None and (options is not None or operation is not None):
        raise UsageError("ask: options and operation belong to inputs; a case has its own")
    limits = limits or Limits()
    chosen = _select_implementation(function, FunctionOptions(framework, signature), name, limits)
    if chosen.missing:
        raise UsageError(f"{chosen.missing[0]} is not installed")
    with tempfile.TemporaryDirectory() as folder, Engine(limits, RunOptions().store) as engine:
        if case is None:
            call = operation or DEFAULT_OPERATION, inputs or {}, {} if options is None else options
            question = question_from_arrays(*call, dtype, Path(folder))
        elif isinstance(case, Question):
            question = case if dtype in (None, case.dtype) else Question(case.case, choose_dtype(case.case, dtype))
        else:
            asked = case if isinstance(case, Case) else select_case(os.fspath(case))[0]
            question = Question(asked, choose_dtype(asked, dtype))
        return engine.ask(chosen.implementations[0], question)


def explain(answer: Answer) -> str:
    """Return an answer as ``attncheck explain`` prints it: every stage with its errors, and where it goes wrong."""
    from attncheck.showing.explanation import explanation_text

    return explanation_text(answer, {})


def measure_conventions(
    function: Callable[..., Any] | str | os.PathLike[str],
    *,
    framework: str | None = None,
    signature: str | None = None,
    name: str | None = None,
    dtype: str | None = None,
    limits: Limits | None = None,
) -> list[MeasuredConvention]:
    """Find out what a function means where attention leaves it open, by calling it: as ``attncheck conventions`` does.

    Args:
        function: A callable, or the name of an implementation, or ``file.py:function``.
        framework: The framework whose arrays it takes and returns; NumPy's, unless the function declares another.
        signature: The library whose signature it follows, as in ``check``.
        name: What messages call it, as ``package.function``.
        dtype: The dtype of the calls; the most exact one that is declared, unless another is asked for.
        limits: Limits of the worker process.

    Returns:
        What it means by each question, in the order of ``attncheck.asking.conventions.QUESTIONS``.

    Raises:
        UsageError: There is no such implementation, or it declares no such dtype.
    """
    limits = limits or Limits()
    chosen = _select_implementation(function, FunctionOptions(framework, signature), name, limits)
    if chosen.missing:
        raise UsageError(f"{chosen.missing[0]} is not installed")
    return measure_all_conventions(chosen.implementations[0], dtype, limits)


def _select_implementation(
    function: Callable[..., Any] | str | os.PathLike[str], called: FunctionOptions, name: str | None, limits: Limits
) -> ImplementationSelection:
    if isinstance(function, str | os.PathLike):
        target = [os.fspath(function)]
        return select_implementations(None, target, limits=limits, **called.as_keywords)
    implementation = implementation_of_callable(function, name=name, **called.as_keywords)
    return ImplementationSelection((implementation,), requested_by_name=(implementation.name,))
