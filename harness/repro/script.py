"""One case on one implementation as a script of its own, which needs NumPy and that framework alone.

Scripts for what failed in a run are kept with its results: a report shows them where nothing can be run again. A script
has the call: a framework's code, or what loads a user's function, and ``compute`` around it.

An attached script has to be short for somebody to read it: one call of a function of somebody's has the short form of
``short.py``. Whatever needs more (calls before, a mode's own code, many numbers) has the long form.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from attncheck.backends import BackendEntry, Library
from attncheck.backends.families import Family
from attncheck.commands import command, joined, words_again
from attncheck.errors import OutputError, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Task, call_of
from attncheck.execution.padding import Padding, call_as_required
from attncheck.execution.runner import task_of
from attncheck.execution.signatures import INPUTS
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.residuals import as_declared
from attncheck.judging.truth import truth_of_case
from attncheck.reading.case import Case, case_record
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.repro.code import (
    copied,
    expected_lines,
    expected_stages,
    inlined,
    quoted,
    short,
    written,
)
from attncheck.repro.short import ShortScript, environment_lines, keywords_of
from attncheck.results.format import SCRIPTS_FOLDER, Row
from attncheck.spec import CONVENTIONS, result_stages
from attncheck.wording import listed

_OPERATIONS = "attncheck.execution.operations"

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


_SHORT = """\
{name} in {dtype}: {case}

    {command}

ends with 1 where something is wrong. The exact value comes of interval arithmetic; what is allowed is the largest error
that rounding in {dtype} can make. Found:
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
    element: str = "",
) -> str:
    """Return the script: code, inputs, exact values and bounds; it ends with 1 where it finds what the harness found.

    ``story`` is the explanation, for its docstring, and ``command`` what runs it. Exact values are given for the stages
    in ``judgements``, or for all where there are none. The calls ``before`` come first: cases, each in a dtype. Where
    ``element`` says in a line what is wrong, a case has the short form if one shows it. Raises ``UsageError`` where no
    script can show the case.
    """
    rounding_model = implementation.rounding_model(dtype)
    if rounding_model is None:
        raise UsageError(f"{implementation.name} declares no {dtype}: there is nothing to reproduce")
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    truth = as_declared(truth_of_case(case, dtype, inputs), implementation.reads_calls_as)
    padding = call_as_required(implementation, task_of(case, inputs))
    task, cuts = padding.task, ", kept=KEPT, cut=cut" if padding.kept else ""
    expected = expected_stages(case, truth, rounding_model, judgements)
    if element and not before:
        told = _printable(
            _SHORT.format(name=implementation.name, dtype=dtype, case=case.name, command=command) + element
        )
        own = ShortScript(case, implementation, padding, dtype)
        if text := own.text(judgements, expected, told):
            return text
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
    """Return how many calls a script makes, and how the last is padded, in words."""
    others = f"{len(before)} other {'calls' if len(before) > 1 else 'call'}, and then " if before else ""
    return f"{others}one call{f', padded with {padding.description}' if padding.description else ''}"


def _kept(padding: Padding) -> Iterator[str]:
    """Yield what drops again what the call is padded with."""
    yield f"# The call is padded with {padding.description}: it is made with what the function requires."
    yield copied(_OPERATIONS, {"KeptElements", "cut"}) + "\n"
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
    yield "\n".join([*environment_lines(entry.environment_of(implementation.mode), 100), ""])
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
        yield inlined(_OPERATIONS, {"apply_layout"}) + "\n"
    for name, task in tasks.items():
        yield f"{name} = {{"
        yield from (f'    "{each}": {written(array, 4, len(each) + 4)},' for each, array in task.inputs.items())
        yield "}"
        if layouts[name]:
            yield f"{name} = {short(_OPERATIONS)}.apply_layout({name}, {layouts[name]!r})"


def _section(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}\n", *lines, "\n"])


MAX_SCRIPTS = 50
"""One takes a fraction of a second and some ten kilobytes; after so many, the command that writes one is enough."""

Evaluation = tuple[str, str, str]
"""case, implementation, dtype"""


_FRESH = """
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
    """Write a script for failing evaluations, first one of every implementation, and return how many.

    ``limits`` are those of the run. ``scripts/index.json`` names the file of each, under case|implementation|dtype.
    Raises ``OutputError``.
    """
    messages: dict[Evaluation, list[str]] = defaultdict(list)
    for row in failures:
        if row.comparison == "stage":
            messages[row.case, row.implementation, row.dtype].append(f"{row.verdict} {row.stage}: {row.message}")
    failing = {case for case, _, _ in messages}
    known_cases = {case.id: case for case in cases if case.id in failing}  # of a large campaign, few are in memory
    known_implementations = {item.name: item for item in implementations}
    evaluations = [(case, name, dtype) for case, name, dtype in messages if case in known_cases]
    index: dict[str, str] = {}
    folder = results / SCRIPTS_FOLDER
    again = words_again(implementations, limits or Limits(), results)
    for evaluation in _one_of_each_first(evaluations)[:MAX_SCRIPTS]:
        case, name, dtype = evaluation
        if name not in again:  # an object of this process has no file
            continue
        file = f"{len(index):03d}.py"
        explain = command("explain", case_record(known_cases[case], {}), again[name], dtype)
        story = "\n".join([*messages[evaluation], _FRESH.format(explain=explain)])
        runs_it = joined(["python", str(folder / file)])
        try:
            text = repro_script(known_cases[case], known_implementations[name], dtype, (), story, command=runs_it)
        except UsageError:  # some modules cannot be taken apart
            continue
        index["|".join(evaluation)] = _write(folder / file, text)
    if index:
        _write(folder / "index.json", json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    return len(index)


def _one_of_each_first(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Put the first place of every implementation before the second of any."""
    by_name: dict[str, list[Evaluation]] = defaultdict(list)
    for evaluation in evaluations:
        by_name[evaluation[1]].append(evaluation)
    return [evaluation for evaluation in chain.from_iterable(zip_longest(*by_name.values())) if evaluation is not None]


def _write(path: Path, text: str) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OutputError.of(path, error) from None
    return path.name


PARTS = "attncheck.repro.code"
_DEVICES = "attncheck.backends.devices"
_CALLS = "attncheck.backends.family_calls"
_OURS = "attncheck."
_CONVERSIONS = ("prepare", "from_numpy", "to_numpy")
_SERVICES = (*_CONVERSIONS, "describe")


def call_lines(implementation: Implementation, task: Task, before: Sequence[Task] = ()) -> Iterator[str]:
    """Yield code that leaves ``backend``, which has the conversions, and ``compute``, which makes the call.

    What is called ``before`` is ``before_1``, ``before_2`` and so on.
    """
    tasks = {"compute": task, **{f"before_{number}": each for number, each in enumerate(before, 1)}}
    if isinstance(implementation.entry, UserImplementation):
        yield from _own(implementation.entry)
    else:
        yield from _framework(implementation, {_name(each) for each in tasks.values()})
    if any(CONVENTIONS & dict(call_of(each.operation, each.options)[1]).keys() for each in tasks.values()):
        yield "\n\n" + copied(PARTS, {"taken"})
    for name, each in tasks.items():
        says = "Make the call that is reported." if each is task else "Make a call that has to come before it."
        yield f"\n\ndef {name}({', '.join(each.inputs)}):"
        yield f'    """{says}"""'
        yield f"    return {_call(implementation.entry, each)}"


def _name(task: Task) -> str:
    return call_of(task.operation, task.options)[0]


def _call(entry: BackendEntry, task: Task) -> str:
    name, options = call_of(task.operation, task.options)
    conventions = {each: options.pop(each) for each in sorted(CONVENTIONS & options.keys())}
    function = _own_function(entry, name) if isinstance(entry, UserImplementation) else f"backend.{name}"
    by_position: tuple[str, ...] = ()
    if isinstance(entry, UserImplementation):  # some inputs have no name there
        by_position, options = INPUTS[name], keywords_of(entry, task, options)
    given = [each for each in by_position if each in task.inputs]
    given += [f"{each}={each}" for each in task.inputs if each not in by_position]
    given += [f"{each}={value!r}" for each, value in options.items()]
    if conventions:
        given.append(f"**taken({function}, {conventions!r})")
    call = f"{function}({', '.join(given)})"
    return f"named({call}, {quoted(_returned(task))})" if isinstance(entry, UserImplementation) else call


def _returned(task: Task) -> Sequence[str]:
    return result_stages(task.operation, task.options, task.inputs) or ("masked",)


def _framework(implementation: Implementation, names: set[str]) -> Iterator[str]:
    mode = implementation.declared
    whole = {*_SERVICES, *names}
    module, _, function = mode.call.partition(":") if isinstance(mode, Library) else ("", "", "")
    own = {function} if module.startswith(_OURS) else set()  # called as a library's, and not to be imported
    wanted = {*_CONVERSIONS, *names} if mode.attribute is None else {mode.attribute}
    yield inlined(mode.module, wanted | own if module == mode.module else wanted, whole)
    if own and module != mode.module:
        yield "\n\n" + inlined(module, own)
    yield "backend = " + ".".join(filter(None, (short(mode.module), mode.attribute)))
    yield from (f"sys.modules[{module!r}] = {short(module)}" for _ in own)
    yield from _moved(implementation.entry.name, mode.device)
    if isinstance(mode, Library):
        yield "\n\n" + inlined(_CALLS, {"library_functions", "Family"})
        family = {each.name: getattr(mode.called_as, each.name) for each in fields(Family)}
        words = ", ".join(f"{name}={value!r}" for name, value in family.items())
        yield f"family = family_calls.Family({words})"
        called = f"{mode.call!r}, family, backend, {dict(mode.given)!r}, has_gradients={mode.has_gradients}"
        yield f"functions = family_calls.library_functions({called})"
        services = ", ".join(f"{name}=backend.{name}" for name in _CONVERSIONS)
        yield f"backend = SimpleNamespace({services}, **functions)"


def _moved(framework: str, device: str) -> Iterator[str]:
    """Yield what puts the tensors of ``backend`` on a device, if one is named."""
    if device:
        yield "\n\n" + inlined(_DEVICES, {"on_device"})
        yield f"backend = {short(_DEVICES)}.on_device(backend, {framework!r}, {device!r})"


def _own(entry: UserImplementation) -> Iterator[str]:
    """Yield what loads the target and leaves it in ``kernel``."""
    target = entry.target
    if target.pickled:
        raise UsageError(f"{entry.name} is an object; write it into a file and name it file.py:function")
    if target.program:
        raise UsageError(f"{entry.name} is a program: no script can hold it; `attncheck explain` calls it")
    framework = f"attncheck.backends.{entry.framework}_backend"
    yield inlined(framework, _CONVERSIONS)
    yield f"backend = {short(framework)}"
    yield from _moved(entry.framework, entry.device)
    yield "\n\n"
    is_file = target.module.endswith(".py")
    needed = [] if is_file else ["from importlib import import_module"]
    needed += ["from operator import attrgetter"] if target.attribute else []
    yield from needed
    yield copied(PARTS, {"named", *(["load_file"] if is_file else [])}) + "\n\n"
    if is_file:
        yield f"KERNEL = sys.argv[1] if len(sys.argv) > 1 else {target.module!r}"
        loaded = "load_file(KERNEL)"
    else:
        root = target.module.partition(".")[0]
        if any(Path(found).exists() for found in (root, f"{root}.py")):
            yield f"sys.path.insert(0, {str(Path.cwd())!r})"
        loaded = f"import_module({target.module!r})"
    yield f"kernel = attrgetter({target.attribute!r})({loaded})" if target.attribute else f"kernel = {loaded}"
    if entry.signature:
        yield "from attncheck.backends.families import FAMILIES"
        yield "from attncheck.backends.family_calls import contract_functions"
        yield "from attncheck.execution.process_state import unchanged\n"
        called = f"contract_functions(kernel, FAMILIES[{entry.signature!r}], backend, unchanged)"
        yield f"kernel = SimpleNamespace(**{called})"


def _own_function(entry: UserImplementation, name: str) -> str:
    """Return what is called: the target's function of the contract's name, or the target, where it is that itself."""
    if entry.target.attribute and _is_of(entry, name) and not entry.signature:
        return f'getattr(kernel, "{name}", kernel)'
    return f"kernel.{name}"


def _is_of(entry: UserImplementation, name: str) -> bool:
    """Return whether the target is the contract's function of a name itself."""
    own = entry.function if entry.function in INPUTS else "attention"
    return name == own
