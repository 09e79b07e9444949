"""One case on one implementation as a script of its own, which needs NumPy and that framework alone."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attncheck.harness.errors import UsageError
from attncheck.harness.judging.judge_stages import StageJudgement
from attncheck.harness.judging.truth import truth_of_case
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.harness.repro.arrays import written
from attncheck.harness.repro.call import PARTS, call_lines
from attncheck.harness.repro.code import copied, inlined, quoted, short
from attncheck.harness.repro.expected import expected_lines, expected_stages
from attncheck.harness.running.environment import package_version
from attncheck.harness.running.implementations import Implementation
from attncheck.harness.running.own import OwnEntry
from attncheck.harness.running.tasks import task_of
from attncheck.harness.running.worker import THREAD_VARIABLES, Task
from attncheck.harness.vocabulary import result_stages

_MEMORY = "attncheck.harness.running.memory"

_ENVIRONMENT = "attncheck.harness.running.environment"

_READING = """\
{name} in {dtype}: {case}

    python {file}

ends with 1 where something is wrong, and else with 0. It needs {packages}{own}.

It makes one call, on one thread, with the inputs below, and holds every stage that comes back against the exact answer:
the same mathematics on the same stored numbers, in interval arithmetic. "allowed" is the largest error that rounding in
{dtype} can make in that place, in whatever order sums are taken, blocked or fused (numerical class {numerical_class}):
a number that is further off is wrong. NaN and infinity are to be where the exact answer has them; what it leaves open
is not judged. Nor is what rounding could just do, but does not in practice (statistics, T2), or one step by itself.

attncheck {version} found, with {versions}, Python {python}, {system}:
"""


def repro_script(
    case: Case, implementation: Implementation, dtype: str, judgements: tuple[StageJudgement, ...], story: str
) -> str:
    """Return the script: code, inputs, exact values and bounds; it ends with 1 where it finds what the harness found.

    ``story`` is the explanation, for its docstring. Exact values are given for the stages in ``judgements``, or for all
    where there are none. Raises ``UsageError`` where no script can show the case.
    """
    numerical_class = implementation.numerical_class(dtype)
    if numerical_class is None:
        raise UsageError(f"{implementation.name} declares no {dtype}: there is nothing to reproduce")
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    task = task_of(case, inputs)
    expected = expected_stages(case, truth_of_case(case, dtype, inputs), numerical_class, judgements)
    results = result_stages(task.operation, task.options, task.inputs)
    parts = [
        _docstring(case, implementation, dtype, numerical_class, story),
        *_beginning(implementation, dtype),
        _section("What is reported", *call_lines(implementation, task)),
        _section("How it is judged", copied(PARTS, {"Expected", "run", "unpack"})),
        _section("The inputs", *_inputs(task)),
        _section("What is right", *expected_lines(expected)),
        copied(_ENVIRONMENT, {"package_version"}),
        "\n",
        'if __name__ == "__main__":',
        f'    backend.prepare("{dtype}", 1)',
        f"    for package in {quoted(list(_packages(implementation, dtype)))}:",
        "        print(package, package_version(package))",
        f'    sys.exit(run(backend, compute, INPUTS, EXPECTED, {quoted(results)}, "{dtype}"))\n',
    ]
    return "\n".join(parts)


def _docstring(case: Case, implementation: Implementation, dtype: str, numerical_class: str, story: str) -> str:
    packages = list(_packages(implementation, dtype))
    own = implementation.entry.target if isinstance(implementation.entry, OwnEntry) else None
    reading = _READING.format(
        name=implementation.name,
        dtype=dtype,
        case=case.name,
        packages=f"{', '.join(packages[:-1])} and {packages[-1]}" if packages[1:] else "NumPy alone",
        file="THIS_FILE" if own is None or not own.module.endswith(".py") else "THIS_FILE [path/of/another/file.py]",
        own="" if own is None else f", and loads {own.module}",
        numerical_class=numerical_class,
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


def _packages(implementation: Implementation, dtype: str) -> Iterator[str]:
    """Yield the distributions that the script imports."""
    yield "numpy"
    yield from (name for name in implementation.entry.packages if name != "numpy")
    if dtype == "bfloat16":
        yield "ml_dtypes"


def _beginning(implementation: Implementation, dtype: str) -> Iterator[str]:
    """Yield the imports, and what has to be set before them: threads, and what the framework is told."""
    entry = implementation.entry
    yield "from __future__ import annotations\n"
    if _hides_a_module(entry):
        yield "import sys\n\nsys.path.append(sys.path.pop(0))  # so that nothing beside this script hides a module\n"
    yield "import os\nimport sys\nfrom types import SimpleNamespace\n"
    environment = {**dict.fromkeys(THREAD_VARIABLES, "1"), **entry.environment}
    yield from ("os.environ.update(", *(f'    {name}="{value}",' for name, value in environment.items()), ")\n")
    yield "import numpy as np"
    if dtype == "bfloat16":
        yield "import ml_dtypes  # NumPy has no bfloat16"
    yield "from numpy import inf, nan  # as arrays below write them\n\n"


def _hides_a_module(entry: Any) -> bool:
    return isinstance(entry, OwnEntry) and Path(entry.target.module).stem in sys.stdlib_module_names


def _inputs(task: Task) -> Iterator[str]:
    """Yield the inputs, and what lays them out in memory as the case asks."""
    memory = {name: layout for name, layout in task.memory.items() if name in task.inputs}
    if memory:
        yield inlined(_MEMORY, {"laid_out"}) + "\n"
    yield "INPUTS = {"
    yield from (f'    "{name}": {written(array, 4, len(name) + 4)},' for name, array in task.inputs.items())
    yield "}"
    if memory:
        yield f"INPUTS = {short(_MEMORY)}.laid_out(INPUTS, {memory!r})"


def _section(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}\n", *lines, "\n"])
