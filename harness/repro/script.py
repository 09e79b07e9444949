"""One case on one implementation as a script of its own, which needs NumPy and that framework alone."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attncheck.errors import UsageError
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import Implementation
from attncheck.execution.padding import Padding, call_as_required
from attncheck.execution.runner import task_of
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import THREAD_VARIABLES, Task
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import truth_of_case
from attncheck.processors import emulation_variables
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.repro.call import PARTS, call_lines
from attncheck.repro.code import copied, inlined, quoted, short
from attncheck.repro.expected import expected_lines, expected_stages, written
from attncheck.spec import result_stages
from attncheck.wording import listed

_MEMORY = "attncheck.execution.layout"
_CUTTING = "attncheck.execution.cutting"

_ENVIRONMENT = "attncheck.execution.environment"

_READING = """\
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


_OTHER_FILE = " (or a file that is named behind the command)"

MAX_BEFORE = 16
MAX_BYTES_BEFORE = 2**22
"""Calls that a script makes first, and what their inputs may hold together."""


def repro_script(
    case: Case,
    implementation: Implementation,
    dtype: str,
    judgements: tuple[StageJudgement, ...],
    story: str,
    *,
    command: str = "python THIS_FILE",
    before: Sequence[tuple[Case, str]] = (),
) -> str:
    """Return the script: code, inputs, exact values and bounds; it ends with 1 where it finds what the harness found.

    ``story`` is the explanation, for its docstring, and ``command`` what runs it. Exact values are given for the stages
    in ``judgements``, or for all where there are none. The calls ``before`` come first: cases, each in a dtype. Raises
    ``UsageError`` where no script can show the case.
    """
    rounding_model = implementation.rounding_model(dtype)
    if rounding_model is None:
        raise UsageError(f"{implementation.name} declares no {dtype}: there is nothing to reproduce")
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    padding = call_as_required(implementation, task_of(case, inputs))
    task, cuts = padding.task, ", kept=KEPT, cut=cut" if padding.kept else ""
    expected = expected_stages(case, truth_of_case(case, dtype, inputs), rounding_model, judgements)
    results = result_stages(task.operation, task.options, task.inputs)
    earlier = [call_as_required(implementation, each).task for each in tasks_before(before)]
    dtypes = {dtype, *(each for _, each in before)}
    parts = [
        _docstring(case, implementation, dtype, rounding_model, story, command=command, calls=_calls(padding, before)),
        *_beginning(implementation, dtypes),
        _section("What is reported", *call_lines(implementation, task, earlier)),
        _section("How it is judged", copied(PARTS, {"Expected", "run", "unpack", *(["make"] if earlier else [])})),
        *([_section("What is kept of each stage", *_kept(padding))] if padding.kept else []),
        _section("The inputs", *_inputs({"INPUTS": task, **_named(earlier)})),
        _section("What is right", *expected_lines(expected)),
        copied(_ENVIRONMENT, {"package_version"}),
        "\n",
        'if __name__ == "__main__":',
        f'    backend.prepare("{dtype}", 1)',
        f"    for package in {quoted(list(_packages(implementation, dtypes)))}:",
        "        print(package, package_version(package))",
        *_made_before(earlier),
        f'    sys.exit(run(backend, compute, INPUTS, EXPECTED, {quoted(results)}, "{dtype}"{cuts}))\n',
    ]
    return "\n".join(parts)


def tasks_before(before: Sequence[tuple[Case, str]]) -> list[Task]:
    """Return the calls that come first. Raises ``UsageError`` where they are too many, or too large, for a script."""
    tasks = [task_of(case, convert_inputs(case, make_exact_inputs(case), dtype)) for case, dtype in before]
    held = sum(array.nbytes for task in tasks for array in task.inputs.values())
    if len(tasks) > MAX_BEFORE or held > MAX_BYTES_BEFORE:
        raise UsageError(
            f"it goes wrong only after {len(tasks)} other calls, with {held / 2**20:.1f} MiB of inputs: too many for a "
            f"script, which has {MAX_BEFORE} at most, with {MAX_BYTES_BEFORE // 2**20} MiB; `attncheck explain` "
            "shows it"
        )
    return tasks


def _calls(padding: Padding, before: Sequence[Any]) -> str:
    """Say how many calls a script makes, and how the last is padded."""
    others = f"{len(before)} other {'calls' if len(before) > 1 else 'call'}, and then " if before else ""
    return f"{others}one call{f', padded with {padding.description}' if padding.description else ''}"


def _kept(padding: Padding) -> Iterator[str]:
    """Yield what drops again what the call is padded with."""
    yield f"# The call is padded with {padding.description}: it is made with what the function requires."
    yield copied(_CUTTING, {"KeptElements", "cut"}) + "\n"
    yield "KEPT = {"
    for stage, kept in padding.kept.items():
        yield f'    "{stage}": KeptElements({kept.shape}, {dict(kept.positions)}, {kept.zeros}),'
    yield "}"


def _named(before: Sequence[Task]) -> dict[str, Task]:
    return {f"BEFORE_{number}": task for number, task in enumerate(before, 1)}


def _made_before(before: Sequence[Task]) -> list[str]:
    calls = [f"({name.lower()}, {name})" for name in _named(before)]
    return [f"    make(backend, [{', '.join(calls)}])"] if calls else []


def _docstring(
    case: Case,
    implementation: Implementation,
    dtype: str,
    rounding_model: str,
    story: str,
    *,
    command: str,
    calls: str,
) -> str:
    packages = list(_packages(implementation, {dtype}))
    own = implementation.entry.target if isinstance(implementation.entry, UserImplementation) else None
    is_file = own is not None and own.module.endswith(".py")
    reading = _READING.format(
        name=implementation.name,
        dtype=dtype,
        case=case.name,
        packages=listed(packages) if packages[1:] else "NumPy alone",
        command=command,
        calls=calls,
        own="" if own is None else f", and loads {own.module}{_OTHER_FILE if is_file else ''}",
        rounding_model=rounding_model,
        version=package_version("attncheck"),
        versions=", ".join(f"{name} {package_version(name)}" for name in packages),
        python=platform.python_version(),
        system=f"{platform.system()} on {platform.machine()}",
    )
    text = _printable(f"{reading}\n{story}\n")
    return f'r"""{text}"""\n'


def _printable(text: str) -> str:
    """Make a text safe between triple quotes of a raw string; a line break comes behind it."""
    lines = (
        "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
        for line in text.split("\n")
    )
    return "\n".join(lines).replace('"""', "'''")


def _packages(implementation: Implementation, dtypes: Collection[str]) -> Iterator[str]:
    """Yield the distributions that the script imports."""
    yield "numpy"
    yield from (name for name in implementation.entry.packages if name != "numpy")
    if "bfloat16" in dtypes:
        yield "ml_dtypes"
    if isinstance(implementation.entry, UserImplementation) and implementation.entry.signature:
        yield "attncheck"


def _beginning(implementation: Implementation, dtypes: Collection[str]) -> Iterator[str]:
    """Yield the imports, and what has to be set before them: threads, and how the framework is configured."""
    entry = implementation.entry
    yield "from __future__ import annotations\n"
    if _hides_a_module(entry):
        yield "import sys\n\nsys.path.append(sys.path.pop(0))  # so that nothing beside this script hides a module\n"
    yield "import os\nimport sys\nfrom types import SimpleNamespace\n"
    environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **entry.environment_of(implementation.mode)}
    environment |= emulation_variables()
    yield from ("os.environ.update(", *(f'    {name}="{value}",' for name, value in environment.items()), ")\n")
    yield "import numpy as np"
    if "bfloat16" in dtypes:
        yield "import ml_dtypes  # NumPy has no bfloat16"
    yield "from numpy import inf, nan  # as arrays below write them\n\n"


def _hides_a_module(entry: Any) -> bool:
    return isinstance(entry, UserImplementation) and Path(entry.target.module).stem in sys.stdlib_module_names


def _inputs(tasks: Mapping[str, Task]) -> Iterator[str]:
    """Yield the inputs of calls, each under a name, and what lays them out in memory as the cases ask."""
    layouts = {
        name: {each: layout for each, layout in task.memory_layout.items() if each in task.inputs}
        for name, task in tasks.items()
    }
    if any(layouts.values()):
        yield inlined(_MEMORY, {"apply_layout"}) + "\n"
    for name, task in tasks.items():
        yield f"{name} = {{"
        yield from (f'    "{each}": {written(array, 4, len(each) + 4)},' for each, array in task.inputs.items())
        yield "}"
        if layouts[name]:
            yield f"{name} = {short(_MEMORY)}.apply_layout({name}, {layouts[name]!r})"


def _section(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}\n", *lines, "\n"])
