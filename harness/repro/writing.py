"""Scripts: short ones if these show the failure, and the scripts of a run, which are stored with its results.

A report shows them on machines that cannot rerun the case. Readers of a bug report need a short script: one call of a
user's or library's function has the short form. It is run before it is returned. Cases that need more (calls before,
code of a mode, many numbers) have the long form.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from attncheck.backends import Library, Mode
from attncheck.backends.families import FAMILIES, Family
from attncheck.common.errors import OutputError, UsageError
from attncheck.diagnosis.declared import truth_for_implementation
from attncheck.execution.call import START_SECONDS, CallTimeout, Limits, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import function_and_keywords
from attncheck.execution.padding import pad_call_or_raise
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.execution.worker import redirect_output
from attncheck.judging.judge_stages import StageJudgement
from attncheck.reading.case import Case, make_case_record
from attncheck.reading.inputs import make_inputs, make_problem_of_case
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.repro.code import expected_stages, fold_line, names_tuple_code
from attncheck.repro.script import Script, UserCall, import_code, target_code
from attncheck.results.format import SCRIPTS_FOLDER, Row
from attncheck.settings.commands import case_command, command_words_by_name, shell_command
from attncheck.spec import result_stages
from attncheck.spec.verdicts import Verdict

_DOCSTRING = """\
{name} in {dtype}: {case}

    {command}

ends with 1 where something is wrong, and else with 0. It needs {packages}{own}.

It makes {calls}, on one thread, with the inputs below, and holds every stage that comes back
against the exact answer: the same mathematics on the same stored numbers, in interval arithmetic. "allowed" is the
largest error that rounding in {dtype} can make in that place, in whatever order sums are taken, blocked or fused
(rounding model {rounding_model}): a number that is further off is wrong. NaN and infinity are to be where the exact
answer has them; what it leaves open is not judged. Nor is what rounding could just do, but does not in practice
(statistics), or one step by itself.

attncheck {version} found, with {versions}, Python {python}, {system}:
"""
_SHORT_DOCSTRING = """\
{name} in {dtype}: {case}

    {command}

ends with 1 where something is wrong. The exact value comes of interval arithmetic; what is allowed is the largest error
that rounding in {dtype} can make. Found:
"""
MAX_LINES = 80
"""Most lines of a short script."""
_TIME_LIMIT = 120.0
MAX_CALLS_BEFORE = 16
MAX_BYTES_BEFORE = 2**22
"""Most calls that a script makes first, and most bytes of their inputs together."""


def repro_script(
    case: Case,
    implementation: Implementation,
    dtype: str,
    judgements: tuple[StageJudgement, ...],
    story: str,
    *,
    command: str = "python THIS_FILE",
    before: Sequence[tuple[Case, str]] = (),
    element: str = "",
) -> str:
    """Return the script: code, inputs, exact values and bounds; its exit code is 1 if it shows the failure.

    ``story`` is the explanation for its docstring, and ``command`` the command that runs it. It has exact values of the
    stages in ``judgements``, or of all stages if there are none. The calls ``before`` come first: cases, each in a
    dtype. With ``element``, a line about the worst element, the script has the short form if that shows the failure.
    Raises ``UsageError`` if no script can show the case.
    """
    rounding_model = implementation.rounding_model(dtype)
    if rounding_model is None:
        raise UsageError(f"{implementation.name} declares no {dtype}: there is nothing to reproduce")
    inputs = make_inputs(case, dtype)
    truth = truth_for_implementation(implementation, case, inputs)
    padding = pad_call_or_raise(implementation, make_problem_of_case(case, inputs).as_call())
    expected = expected_stages(case, truth, rounding_model, judgements)
    earlier = [pad_call_or_raise(implementation, problem).problem for problem in problems_before(before)]
    dtypes = frozenset({dtype, *(called_dtype for _, called_dtype in before)})
    script = Script(case, implementation, padding, dtype, expected, earlier, dtypes)
    about = {"name": implementation.name, "dtype": dtype, "case": case.name, "command": command}
    if element and not before:
        told = f"{_SHORT_DOCSTRING.format(**about)}{element}\n"
        if text := ShortScript.make_if_reproducing(script, judgements, told):
            return text
    return script.text(
        f"{_DOCSTRING.format(**about, **script.docstring_fields, rounding_model=rounding_model)}\n{story}\n"
    )


def problems_before(before: Sequence[tuple[Case, str]]) -> list[Problem]:
    """Return the calls that come first. Raises ``UsageError`` if they are too many, or too large, for a script."""
    problems = [make_problem_of_case(case, make_inputs(case, dtype)).as_call() for case, dtype in before]
    held = sum(array.nbytes for problem in problems for array in problem.inputs.values())
    if len(problems) > MAX_CALLS_BEFORE or held > MAX_BYTES_BEFORE:
        raise UsageError(
            f"it goes wrong only after {len(problems)} other calls, with {held / 2**20:.1f} MiB of inputs: too many "
            f"for a script, which has {MAX_CALLS_BEFORE} at most, with {MAX_BYTES_BEFORE // 2**20} MiB; "
            "`attncheck explain` shows it"
        )
    return problems


class _ArrayCode(NamedTuple):
    """Code for a framework's arrays: its import, conversions from NumPy, also in bfloat16, and back."""

    imports: str
    to_framework: str
    to_numpy: str
    to_bfloat16: str = ""


_ARRAY_CODE: Mapping[str, _ArrayCode] = {
    "numpy": _ArrayCode("", "{array}", "np.asarray({array})"),
    "torch": _ArrayCode("import torch", "torch.tensor({array})", "{array}.detach().cpu().double().numpy()",
                      "torch.tensor({array}.astype(np.float32)).bfloat16()"),
    "tensorflow": _ArrayCode("import tensorflow as tf", "tf.constant({array})", "tf.cast({array}, tf.float64).numpy()"),
    "jax": _ArrayCode("import jax", "jax.numpy.asarray({array})", "np.asarray({array})"),
    "mlx": _ArrayCode("import mlx.core as mx", "mx.array({array}, {of_framework})", "np.array({array}, np.float64)",
                    "mx.array({array}.astype(np.float32)).astype(mx.bfloat16)"),
    "paddle": _ArrayCode("import paddle", "paddle.to_tensor({array})", '{array}.astype("float64").numpy()',
                       'paddle.to_tensor({array}.astype(np.float32)).astype("bfloat16")'),
    "tinygrad": _ArrayCode("from tinygrad import Tensor", "Tensor({array})", "{array}.double().numpy()"),
}  # fmt: skip
"""The frameworks that have short scripts."""
FRAMEWORK_OF_MODE: Mapping[tuple[str, str], str] = {
    ("attncheck.backends.torch_sdpa", "LIBRARY"): "torch",
    ("attncheck.backends.torch_sdpa", "KERAS"): "torch",
    ("attncheck.backends.jax_jit", "LIBRARY"): "jax",
    ("attncheck.backends.jax_jit", "LIBRARY_JIT"): "jax",
    ("attncheck.backends.jax_jit", "KERAS"): "jax",
    ("attncheck.backends.library_arrays", "MLX"): "mlx",
    ("attncheck.backends.library_arrays", "PADDLE"): "paddle",
    ("attncheck.backends.library_arrays", "TINYGRAD"): "tinygrad",
}
"""The module and attribute of a library's mode -> the framework of its arrays."""
_COMPILED_ATTRIBUTES = frozenset({"LIBRARY_JIT"})


class _NoShortFormError(Exception):
    """A case has no short script."""


def _script_reproduces(text: str, told: str, *, is_number: bool, is_wrong: bool) -> bool:
    """Run a script; return whether its outcome is that of the harness."""
    with TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "report.py"
        path.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, path], capture_output=True, text=True, check=False, timeout=_TIME_LIMIT
            )
        except subprocess.TimeoutExpired:
            return False
    if not is_wrong:
        return done.returncode == 0
    if is_number:
        return done.returncode == 1 and "is WRONG" in done.stdout
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return done.returncode != 0 and bool(last) and last.partition(":")[0].rpartition(".")[2] in told


@dataclass(frozen=True, eq=False)
class ShortScript(Script):
    """A case as in a bug report, with only NumPy and the library: one call, and one element of its result.

    It has the arrays that are passed (padded as the function requires, and in the layout of its family), the call as
    users of the library write it, and an element with its exact value and the largest error of rounding. The arguments
    for a family are recorded from a call of a stand-in.
    """

    element: StageJudgement | None = None
    """The judgement that it repeats: of a number, if there is one; None if nothing was returned."""

    @classmethod
    def make_if_reproducing(cls, script: Script, judgements: Sequence[StageJudgement], told: str) -> str:
        """Return a script of at most ``MAX_LINES`` lines that shows the failure; empty if there is none."""
        short = cls(**vars(script))
        if short.case.memory_layout or short.case.merged or short.mode.device:
            return ""
        if not (short.framework and short.loads_by_name):
            return ""
        failing = [judgement for judgement in judgements if judgement.verdict.exit_code]
        try:
            short = replace(short, element=short.choose_judgement(failing or judgements[-1:]))
            text = short.text(told)
        except _NoShortFormError:
            return ""
        is_wrong, fits = bool(failing) or not judgements, len(text.splitlines()) <= MAX_LINES
        return (
            text
            if fits and _script_reproduces(text, told, is_number=short.element is not None, is_wrong=is_wrong)
            else ""
        )

    @property
    def family(self) -> Family | None:
        """The family whose signature the function has, if any."""
        if isinstance(self.mode, Library):
            return self.mode.adapted_family
        signature = self.entry.signature if isinstance(self.entry, UserImplementation) else ""
        return FAMILIES[signature] if signature else None

    @property
    def framework(self) -> str:
        """The framework of the arrays; empty for one without short scripts."""
        if isinstance(self.entry, UserImplementation):
            return self.entry.framework if self.entry.framework in _ARRAY_CODE else ""
        return FRAMEWORK_OF_MODE.get((self.mode.module, self.mode.attribute or ""), "")

    @property
    def loads_by_name(self) -> bool:
        """True if the function has a name in a module that is not ours."""
        if isinstance(self.mode, Library):
            return not self.mode.function_path.startswith("attncheck.")
        assert isinstance(self.entry, UserImplementation), "another mode has no framework here"
        target = self.entry.target
        return bool(target.attribute) and not (target.pickled or target.program)

    def choose_judgement(self, candidates: Sequence[StageJudgement]) -> StageJudgement | None:
        """Return the judgement that the script repeats: of a number, if there is one; None if nothing was returned."""
        if not candidates:
            return None
        known = [judgement for judgement in candidates if judgement.stage == "output" or self.family is None]
        if not known or known[0].verdict is Verdict.DTYPE:
            raise _NoShortFormError
        return next((judgement for judgement in known if judgement.index is not None), known[0])

    def _import_lines(self) -> Iterator[str]:
        yield from filter(None, [_ARRAY_CODE[self.framework].imports])
        if self.framework == "jax" and self.dtype == "float64":
            yield 'jax.config.update("jax_enable_x64", True)'

    def _function_lines(self) -> Iterator[str]:
        if isinstance(self.mode, Library):
            module, _, path = self.mode.function_path.partition(":")
            yield from import_code(module, path)
        else:
            assert isinstance(self.entry, UserImplementation), "another mode has no framework here"
            yield from target_code(self.entry, by_name=True)

    def _call_lines(self) -> Iterator[str]:
        call, problem = self._recorded_call, self.padding.problem
        if self.mode.attribute in _COMPILED_ATTRIBUTES:
            static = [name for name, value in call.named.items() if not isinstance(value, np.ndarray)]
            yield f"kernel = jax.jit(kernel, static_argnames={names_tuple_code(static)})"
        yield from fold_line(f"returned = {self._call_code(problem)}")
        if self.element is None:
            return
        stage = self.element.stage
        names = list(result_stages(problem.operation, problem.options, problem.inputs) or ("masked",))
        yield "if isinstance(returned, dict):"
        yield f"    returned = returned[{stage!r}]"
        if self.family is not None or len(names) > 1:
            yield "elif isinstance(returned, (tuple, list)):"
            yield f"    returned = returned[{0 if self.family is not None else names.index(stage)}]"
        index = self.element.index or (0,) * len(self.case.stage_shapes[stage])
        exact, allowed, rest = self.expected[stage].expected_element(index)
        place, shape = self._place_in_result(stage, index)
        label = f"{stage}[{', '.join(map(str, index))}]"
        yield f"computed = {_ARRAY_CODE[self.framework].to_numpy.format(array='returned')}.astype(np.float64)"
        yield f"if computed.shape != {shape}:"
        yield f'    print("{stage} is WRONG: it has shape", computed.shape, "and not", {shape})'
        yield "    sys.exit(1)"
        yield f"computed = computed[{', '.join(map(str, place)) or '()'}]"
        yield "# The exact value is the first two together; what is allowed is the largest error of rounding."
        yield f"exact, rest, allowed = {exact!r}, {rest!r}, {allowed!r}"
        yield "error = abs(computed - exact - rest)"
        yield "is_right = computed == exact or error <= allowed or (np.isnan(computed) and np.isnan(exact))"
        yield f'print("{label}", "is right" if is_right else "is WRONG")'
        yield 'print("computed", computed, "exact", exact, "off by", error, "allowed", allowed)'
        yield "sys.exit(0 if is_right else 1)"

    def _function_code(self, name: str) -> str:
        return "kernel"

    def _tensor_code(self, name: str, array: Array) -> str:
        written = _ARRAY_CODE[self.framework]
        form = (written.to_bfloat16 if array.dtype.name == "bfloat16" else "") or written.to_framework
        return form.format(array=name, of_framework=f"mx.{array.dtype.name.replace('bool', 'bool_')}")

    def user_call_of(self, problem: Problem) -> UserCall:
        """Return the call as it is passed; if there are several, that of the element's batch entry."""
        return self._recorded_call

    @cached_property
    def _recorded_call(self) -> UserCall:
        if self.family is None:
            return super().user_call_of(self.padding.problem)
        index = (self.element and self.element.index) or (0,)
        number = index[0] if self.family.layout == "LHD" else 0
        with TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True) as folder:
            worker, log = WorkerProcess(), str(Path(folder) / "log.txt")
            arguments = self.entry, self.mode, self.family, self.padding.problem, number, log
            try:
                call = worker.call(record_call, *arguments, seconds=START_SECONDS)
            except (CallTimeout, RemoteError, WorkerDied):
                raise _NoShortFormError from None
            finally:
                worker.kill()
        return replace(
            call, named={**call.named, **(self.mode.fixed_arguments if isinstance(self.mode, Library) else {})}
        )

    def _place_in_result(self, stage: str, index: Sequence[int]) -> tuple[Sequence[int], tuple[int, ...]]:
        """Return the index of a stage's element in the returned array, and the shape of that array."""
        place, kept = list(index), self.padding.kept_elements.get(stage)
        shape = list(self.case.stage_shapes[stage] if kept is None else kept.shape)
        for axis, positions in ({} if kept is None else kept.positions).items():
            place[axis] = positions[index[axis]]
        if (family := self.family) is not None:
            if family.heads == "tiled":
                key_heads = self.padding.problem.inputs["key"].shape[1]
                group, within = divmod(place[1], shape[1] // key_heads)
                place[1] = within * key_heads + group
            if (family.output_layout or family.layout) != "BHLD":
                place[1:3], shape[1:3] = place[2:0:-1], shape[2:0:-1]
            if (family.output_layout or family.layout) == "LHD":
                place, shape = place[1:], shape[1:]
        return place, tuple(shape)


class _CallRecorded(Exception):
    """Ends a call that was recorded and is not made."""


def record_call(entry: Any, mode: Mode, family: Family, problem: Problem, number: int, log: str) -> UserCall:
    """Return the arguments of call ``number`` of a family's function for a problem; runs in a worker process."""
    redirect_output(log)
    from attncheck.backends.family_calls import FamilyFunction, import_owner
    from attncheck.execution.user_call import load_target

    function = getattr(*import_owner(mode.function_path)) if isinstance(mode, Library) else load_target(entry.target)
    notes: list[UserCall] = []
    name, options = function_and_keywords(problem.operation, problem.options)

    @wraps(function)
    def record_arguments(*arguments: Any, **named: Any) -> Any:
        inputs = [*["module"] * family.module, *INPUTS_BY_FUNCTION[name]]
        notes.append(UserCall(dict(zip(inputs, arguments, strict=False)), named))
        if len(notes) > number:
            raise _CallRecorded
        return np.zeros((*arguments[-3].shape[:-1], arguments[-1].shape[-1]), arguments[-1].dtype)

    family_function = FamilyFunction.from_function(
        record_arguments, family, SimpleNamespace(from_numpy=np.asarray, to_numpy=np.asarray)
    )
    try:
        family_function.as_contract(name, getattr(family_function, name))(**problem.inputs, **options)
    except _CallRecorded:
        return notes[-1]
    raise UsageError(f"{entry.name} is not called")


MAX_SCRIPTS = 50
"""A script takes a fraction of a second and about ten kilobytes; others can be written by the command."""
MAX_SCRIPT_NUMBERS = 1 << 12
"""Inputs and scores of a case that gets a script: it takes 25 letters for each, and a page shows 80 kB of scripts."""

Evaluation = tuple[str, str, str]
"""case, implementation, dtype"""


_FRESH_PROCESS_HINT = """
If it finds nothing: a check makes many calls in one process, and this script makes one. This repeats those before it:

    {explain}
"""


def write_scripts(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    failures: Iterable[Row],
    results: Path,
    limits: Limits | None = None,
) -> int:
    """Write scripts for failing evaluations of small cases, first one of every implementation; return their number.

    ``limits`` are those of the run. ``scripts/index.json`` names the file of each, under case|implementation|dtype.
    Raises ``OutputError``.
    """
    messages: dict[Evaluation, list[str]] = defaultdict(list)
    for row in failures:
        if row.comparison == "stage":
            messages[row.case, row.implementation, row.dtype].append(f"{row.verdict} {row.stage}: {row.message}")
    failing = {case for case, _, _ in messages}
    known_cases = {case.id: case for case in cases if case.id in failing}  # in a large campaign, few are in memory
    known_implementations = {item.name: item for item in implementations}
    small = set()
    for known in known_cases.values():
        inputs = {name: np.broadcast_to(np.float64(0), shape) for name, shape in known.input_shapes.items()}
        scores = count_scores(known.operation, known.options, inputs)
        if sum(array.size for array in inputs.values()) + scores <= MAX_SCRIPT_NUMBERS:
            small.add(known.id)
    evaluations = [key for key in messages if key[0] in small]
    index: dict[str, str] = {}
    folder = results / SCRIPTS_FOLDER
    again = command_words_by_name(implementations, limits or Limits(), results)
    for evaluation in _interleave_implementations(evaluations)[:MAX_SCRIPTS]:
        case, name, dtype = evaluation
        if name not in again:  # an object of this process has no file
            continue
        file = f"{len(index):03d}.py"
        explain = case_command("explain", make_case_record(known_cases[case], {}), again[name], dtype)
        story = "\n".join([*messages[evaluation], _FRESH_PROCESS_HINT.format(explain=explain)])
        runs_it = shell_command(["python", str(folder / file)])
        try:
            text = repro_script(known_cases[case], known_implementations[name], dtype, (), story, command=runs_it)
        except UsageError:  # some modules cannot be taken apart
            continue
        index["|".join(evaluation)] = _write_script(folder / file, text)
    if index:
        _write_script(folder / "index.json", json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    return len(index)


def _interleave_implementations(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Put the first evaluation of every implementation before the second of any."""
    by_name: dict[str, list[Evaluation]] = defaultdict(list)
    for evaluation in evaluations:
        by_name[evaluation[1]].append(evaluation)
    return [evaluation for evaluation in chain.from_iterable(zip_longest(*by_name.values())) if evaluation is not None]


def _write_script(path: Path, text: str) -> str:
    with OutputError.convert_os_errors(path):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    return path.name
