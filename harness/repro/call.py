"""The call that a script reports: a framework's code, or what loads somebody's own, and ``compute`` around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attncheck.backends import BackendEntry
from attncheck.errors import UsageError
from attncheck.execution.implementations import Implementation
from attncheck.execution.operations import call_of
from attncheck.execution.signatures import INPUTS
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Task
from attncheck.repro.code import copied, inlined, quoted, short
from attncheck.spec import CONVENTIONS, result_stages

PARTS = "attncheck.repro.parts"
_DEVICES = "attncheck.backends.devices"
_CONVERSIONS = ("prepare", "from_numpy", "to_numpy")


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
    function = f"backend.{name}"
    if isinstance(entry, UserImplementation):
        function = _own_function(entry, name)
        given = [*INPUTS[name], *(f"{each}={each}" for each in task.inputs if each not in INPUTS[name])]
        required = entry.required.get(name, {}).items()
        given += [f"{each}={value!r}" for each, value in required if each not in {**task.inputs, **options}]
        names = result_stages(task.operation, task.options, task.inputs) or ("masked",)
        call = f"named({function}({{}}), {quoted(names)})"
    else:
        given = [f"{each}={each}" for each in task.inputs]
        call = f"{function}({{}})"
    given += [f"{option}={value!r}" for option, value in options.items()]
    if conventions:
        given.append(f"**taken({function}, {conventions!r})")
    return call.format(", ".join(given))


def _framework(implementation: Implementation, names: set[str]) -> Iterator[str]:
    mode = implementation.declared
    yield inlined(mode.module, {*_CONVERSIONS, *names} if mode.attribute is None else {mode.attribute})
    yield "backend = " + ".".join(filter(None, (short(mode.module), mode.attribute)))
    yield from _moved(implementation.entry.name, mode.device)


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
        raise UsageError(f"{entry.name} is a program: save the request that it is sent, `attncheck protocol --save`")
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
        yield "from attncheck.execution.families import FAMILIES"
        yield "from attncheck.execution.family_calls import contract_functions\n"
        yield f"kernel = SimpleNamespace(**contract_functions(kernel, FAMILIES[{entry.signature!r}], backend))"


def _own_function(entry: UserImplementation, name: str) -> str:
    """Return what is called: the target's function of the contract's name, or the target, where it is that itself."""
    own_name = entry.function if entry.function in INPUTS else "attention"
    if entry.target.attribute and own_name == name and not entry.signature:
        return f'getattr(kernel, "{name}", kernel)'
    return f"kernel.{name}"
