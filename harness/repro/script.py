"""One case on one implementation as a script, which needs only NumPy and that framework.

It contains the arrays, our code for the framework or the code that loads a user's function, the calls, and the right
answer of every stage. ``writing.py`` decides when a short script is enough.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from keyword import iskeyword
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from attncheck.backends import BackendEntry, Library, Mode
from attncheck.backends.families import Family
from attncheck.common.errors import UsageError
from attncheck.common.processors import emulation_variables
from attncheck.common.wording import join_words
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import function_and_keywords
from attncheck.execution.padding import PaddedCall
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.execution.worker import THREAD_VARIABLES
from attncheck.reading.case import Case
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.repro.code import (
    StageAnswer,
    array_code,
    copy_functions,
    fold_line,
    inline_module,
    names_tuple_code,
    short_module_name,
)
from attncheck.spec import CONVENTIONS, result_stages

PARTS = "attncheck.repro.code"
_OPERATIONS = "attncheck.execution.operations"
_ENVIRONMENT = "attncheck.execution.environment"
_DEVICES = "attncheck.backends.devices"
_CALLS = "attncheck.backends.family_calls"
_OUR_PREFIX = "attncheck."
_CONVERSIONS = ("prepare", "from_numpy", "to_numpy")
_SERVICES = (*_CONVERSIONS, "describe")
_OTHER_FILE_HINT = " (or a file that is named behind the command)"


@dataclass(frozen=True, eq=False)
class UserCall:
    """A call as users write it: arguments by position, and by name; arrays are NumPy's."""

    positional: Mapping[str, Any]
    named: Mapping[str, Any]

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The arguments that are arrays."""
        arguments = {**self.positional, **self.named}
        return {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}


def _escape_docstring(text: str) -> str:
    """Make a text safe between triple quotes of a raw string; a line break has to follow it."""
    lines = (
        "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
        for line in text.split("\n")
    )
    return "\n".join(lines).replace('"""', "'''")


@dataclass(frozen=True, eq=False)
class Script:
    """The script of one case on one implementation: the calls ``before``, and then the call of ``padding``."""

    case: Case
    implementation: Implementation
    padding: PaddedCall
    dtype: str
    expected: Mapping[str, StageAnswer]
    before: Sequence[Problem] = ()
    dtypes: frozenset[str] = frozenset()

    @property
    def entry(self) -> BackendEntry:
        """The entry of the implementation."""
        return self.implementation.entry

    @property
    def mode(self) -> Mode:
        """The mode of the entry."""
        return self.implementation.mode_declarations

    @property
    def packages(self) -> list[str]:
        """The distributions that the script imports."""
        packages = ["numpy", *(name for name in self.entry.packages if name != "numpy")]
        is_of_family = isinstance(self.entry, UserImplementation) and bool(self.entry.signature)
        return [*packages, *["ml_dtypes"] * ("bfloat16" in self.dtypes), *["attncheck"] * is_of_family]

    @property
    def docstring_fields(self) -> Mapping[str, str]:
        """The words of the script's docstring."""
        loads, count, padded = "", len(self.before), self.padding.description
        if isinstance(self.entry, UserImplementation):
            module = self.entry.target.module
            loads = f", and loads {module}{_OTHER_FILE_HINT if module.endswith('.py') else ''}"
        others = f"{count} other {'calls' if count > 1 else 'call'}, and then " if count else ""
        return {
            "packages": join_words(self.packages) if self.packages[1:] else "NumPy alone",
            "own": loads,
            "calls": f"{others}one call{f', padded with {padded}' if padded else ''}",
            "version": str(package_version("attncheck")),
            "versions": ", ".join(f"{name} {package_version(name)}" for name in self.packages),
            "python": platform.python_version(),
            "system": f"{platform.system()} on {platform.machine()}",
        }

    def text(self, docstring: str) -> str:
        """Return the script, with this ``docstring``."""
        code = [*self._function_lines(), "", *self._call_lines()]
        made = "\n".join(code)
        parts = {name for name in ("judge", "load_file", "taken") if re.search(rf"\b{name}\(", made)}
        body = [*self._array_lines(), *([copy_functions(PARTS, parts), ""] if parts else []), *code]
        return (
            "\n".join([f'r"""{_escape_docstring(docstring)}"""', "", *self._preamble_lines("\n".join(body)), "", *body])
            + "\n"
        )

    def _preamble_lines(self, body: str) -> Iterator[str]:
        """Yield imports, and before them the settings of threads and of the framework."""
        yield from ["from __future__ import annotations\n"] * ("return SimpleNamespace(" in body)
        if isinstance(self.entry, UserImplementation) and _shadows_standard_module(self.entry):
            yield "import sys\n\nsys.path.append(sys.path.pop(0))  # nothing beside this script may hide a module\n"
        modules = ("base64", "os", "sys", "zlib")
        yield from (f"import {module}" for module in modules if module == "os" or f"{module}." in body)
        yield from ["from types import SimpleNamespace"] * ("SimpleNamespace(" in body)
        yield ""
        of_mode = self.entry.environment_of(self.implementation.mode)
        variables = {**dict.fromkeys(THREAD_VARIABLES, "1"), **of_mode, **emulation_variables()}
        words = ", ".join(f"{name}={json.dumps(text)}" for name, text in variables.items())
        yield from fold_line(f"os.environ.update({words})")
        yield "import numpy as np"
        yield from ["import ml_dtypes  # NumPy has no bfloat16"] * ("ml_dtypes." in body)
        constants = (word for word in ("inf", "nan") if re.search(rf"(?<![\w.]){word}\b", body))
        yield from (f"from numpy import {constant}" for constant in constants)
        yield from self._import_lines()

    def _import_lines(self) -> Iterator[str]:
        """Yield further imports."""
        yield from ()

    def _array_lines(self) -> Iterator[str]:
        """Yield the arrays of every call, in the memory layout of its case."""
        if any(map(_input_layouts, self._problems_by_prefix.values())):
            yield inline_module(_OPERATIONS, {"apply_memory_layout"})
        for prefix, problem in self._problems_by_prefix.items():
            for name, array in self.user_call_of(problem).arrays.items():
                yield from fold_line(f"{prefix}{name} = {array_code(array)}")
            if layout := _input_layouts(problem):
                names = [f"{prefix}{name}" for name in problem.inputs]
                by_name = ", ".join(f"{name!r}: {prefix}{name}" for name in problem.inputs)
                laid_out = f"{short_module_name(_OPERATIONS)}.apply_memory_layout({{{by_name}}}, {layout!r})"
                yield from fold_line(f"{', '.join(names)} = {laid_out}.values()")
        yield ""

    @property
    def _problems_by_prefix(self) -> Mapping[str, Problem]:
        """The calls in their order, by the prefix of the names of their arrays."""
        return {
            **{f"before_{number}_": problem for number, problem in enumerate(self.before, 1)},
            "": self.padding.problem,
        }

    def _function_lines(self) -> Iterator[str]:
        """Yield code that defines ``backend``, with conversions and functions; a user's functions are in ``kernel``."""
        if isinstance(self.entry, UserImplementation):
            yield from _user_code(self.entry)
        else:
            yield from _framework_code(
                self.implementation, {_function_name(problem) for problem in self._problems_by_prefix.values()}
            )

    def _call_lines(self) -> Iterator[str]:
        """Yield the calls, and the comparison of every stage with its exact value."""
        yield copy_functions(_ENVIRONMENT, {"package_version"})
        yield ""
        yield 'np.seterr(all="ignore")'
        yield f'backend.prepare("{self.dtype}", 1)'
        yield f"for package in {names_tuple_code(self.packages)}:"
        yield "    print(package, package_version(package))"
        for prefix, problem in [*self._problems_by_prefix.items()][:-1]:
            yield "try:"
            yield from (f"    {line}" for line in fold_line(self._call_code(problem, prefix)))
            yield "except Exception as error:"
            yield f'    print("before it, {_function_name(problem)} raised", type(error).__name__)'
        problem = self.padding.problem
        results = result_stages(problem.operation, problem.options, problem.inputs) or ("masked",)
        yield from fold_line(f"given = {{{', '.join(f'{name!r}: {name}' for name in problem.inputs)}}}")
        yield "bits = {name: array.tobytes() for name, array in given.items()}"
        yield from fold_line(f"returned = {self._call_code(problem)}")
        yield 'if not hasattr(returned, "keys"):'
        several = "returned if isinstance(returned, tuple) else " * (len(results) > 1)
        yield f"    returned = dict(zip({names_tuple_code(results)}, {several}(returned,)))"
        names = names_tuple_code(results)
        yield f'faults = [f"{{stage}} is not returned" for stage in {names} if stage not in returned]'
        yield 'faults += [f"{name} is changed by the call" for name in given if given[name].tobytes() != bits[name]]'
        yield from self._padding_removal_lines()
        yield "EXPECTED = {"
        for stage, expected in self.expected.items():
            yield f'    "{stage}": dict('
            yield from (f"        {line}" for lines in expected.judge_arguments() for line in fold_line(lines, 92))
            yield "    ),"
        yield "}"
        yield "is_wrong = False"
        yield "for stage in [stage for stage in EXPECTED if stage in returned]:"
        yield "    array = backend.to_numpy(returned[stage])"
        yield "    if stage in KEPT:"
        yield "        array, fault = strip_padding(array, KEPT[stage])"
        yield '        faults += [f"{stage} {fault}"] if fault else []'
        yield "    is_wrong |= not judge(stage, array, **EXPECTED[stage])"
        yield 'print(*faults, sep="\\n")'
        yield "sys.exit(1 if faults or is_wrong else 0)"

    def _padding_removal_lines(self) -> Iterator[str]:
        """Yield code that removes the padding from results."""
        if self.padding.kept_elements:
            yield f"\n# The call is padded with {self.padding.description}: it is made with what the function requires."
            yield copy_functions(_OPERATIONS, {"KeptElements", "strip_padding"}) + "\n"
        yield "KEPT = {"
        for stage, kept in self.padding.kept_elements.items():
            yield f'    "{stage}": KeptElements({kept.shape}, {dict(kept.positions)}, {kept.axes_with_zero_padding}),'
        yield "}"

    def _call_code(self, problem: Problem, prefix: str = "") -> str:
        """Return a call as code."""
        call, function = self.user_call_of(problem), self._function_code(_function_name(problem))
        conventions = {name: call.named[name] for name in sorted(CONVENTIONS & call.named.keys())}
        named = {name: value for name, value in call.named.items() if name not in conventions}
        arguments = [self._argument_code(f"{prefix}{name}", value) for name, value in call.positional.items()]
        arguments += [f"{name}={self._argument_code(f'{prefix}{name}', value)}" for name, value in named.items()]
        arguments += [f"**taken({function}, {conventions!r})"] if conventions else []
        return f"{function}({', '.join(arguments)})"

    def user_call_of(self, problem: Problem) -> UserCall:
        """Return the call of a problem as it is passed; a user's function takes some inputs by position."""
        name, options = function_and_keywords(problem.operation, problem.options)
        by_position: tuple[str, ...] = ()
        if isinstance(self.entry, UserImplementation):
            by_position, options = INPUTS_BY_FUNCTION[name], _keywords_for_call(self.entry, problem, options)
        positional = {key: problem.inputs[key] for key in by_position if key in problem.inputs}
        named = {key: array for key, array in problem.inputs.items() if key not in by_position}
        return UserCall(positional, {**named, **options})

    def _function_code(self, name: str) -> str:
        """Return the called function: the target's one with the contract's name, or the target itself."""
        if not isinstance(self.entry, UserImplementation):
            return f"backend.{name}"
        function = self.entry.function if self.entry.function in INPUTS_BY_FUNCTION else "attention"
        if self.entry.target.attribute and name == function and not self.entry.signature:
            return f'getattr(kernel, "{name}", kernel)'
        return f"kernel.{name}"

    def _argument_code(self, name: str, value: Any) -> str:
        if isinstance(value, np.ndarray):
            return self._tensor_code(name, value)
        if isinstance(value, SimpleNamespace):
            return f"SimpleNamespace({', '.join(f'{key}={item!r}' for key, item in vars(value).items())})"
        return repr(value.item() if isinstance(value, np.generic) else value)

    def _tensor_code(self, name: str, array: Array) -> str:
        """Return the code for an array of the framework."""
        return f"backend.from_numpy({name})"


def _input_layouts(problem: Problem) -> dict[str, str]:
    return {name: layout for name, layout in problem.memory_layout.items() if name in problem.inputs}


def _function_name(problem: Problem) -> str:
    return function_and_keywords(problem.operation, problem.options)[0]


def _shadows_standard_module(entry: UserImplementation) -> bool:
    return Path(entry.target.module).stem in sys.stdlib_module_names


def _framework_code(implementation: Implementation, names: set[str]) -> Iterator[str]:
    mode = implementation.mode_declarations
    whole = {*_SERVICES, *names}
    module, _, function = mode.function_path.partition(":") if isinstance(mode, Library) else ("", "", "")
    # Code of ours that is called like a library is copied, not imported.
    ours = {function} if module.startswith(_OUR_PREFIX) else set()
    wanted = {*_CONVERSIONS, *names} if mode.attribute is None else {mode.attribute}
    yield inline_module(mode.module, wanted | ours if module == mode.module else wanted, whole)
    if ours and module != mode.module:
        yield "\n\n" + inline_module(module, ours)
    yield "backend = " + ".".join(filter(None, (short_module_name(mode.module), mode.attribute)))
    yield from (f"sys.modules[{module!r}] = {short_module_name(module)}" for _ in ours)
    yield from _device_code(implementation.entry.name, mode.device)
    if isinstance(mode, Library):
        yield "\n\n" + inline_module(_CALLS, {"library_functions", "Family"})
        family = {member.name: getattr(mode.adapted_family, member.name) for member in fields(Family)}
        words = ", ".join(f"{name}={value!r}" for name, value in family.items())
        yield f"family = family_calls.Family({words})"
        fixed = dict(mode.fixed_arguments)
        called = f"{mode.function_path!r}, family, backend, {fixed!r}, has_gradients={mode.has_gradients}"
        yield f"functions = family_calls.library_functions({called})"
        services = ", ".join(f"{name}=backend.{name}" for name in _CONVERSIONS)
        yield f"backend = SimpleNamespace({services}, **functions)"


def _device_code(framework: str, device: str) -> Iterator[str]:
    """Yield code that puts the tensors of ``backend`` on a device, if one is named."""
    if device:
        yield "\n\n" + inline_module(_DEVICES, {"on_device"})
        yield f"backend = {short_module_name(_DEVICES)}.on_device(backend, {framework!r}, {device!r})"


def _user_code(entry: UserImplementation) -> Iterator[str]:
    """Yield code that loads the target as ``kernel``."""
    target = entry.target
    if target.pickled:
        raise UsageError(f"{entry.name} is an object; write it into a file and name it file.py:function")
    if target.program:
        raise UsageError(f"{entry.name} is a program: no script can hold it; `attncheck explain` calls it")
    framework = f"attncheck.backends.{entry.framework}_backend"
    yield inline_module(framework, _CONVERSIONS)
    yield f"backend = {short_module_name(framework)}"
    yield from _device_code(entry.framework, entry.device)
    yield from target_code(entry)
    if entry.signature:
        yield "from attncheck.backends.families import FAMILIES"
        yield "from attncheck.backends.planned_calls import functions_of_family"
        yield "from attncheck.execution.process_state import forbid_changed_inputs\n"
        called = f"functions_of_family(kernel, FAMILIES[{entry.signature!r}], backend, forbid_changed_inputs)"
        yield f"kernel = SimpleNamespace(**{called})"


def target_code(entry: UserImplementation, *, by_name: bool = False) -> Iterator[str]:
    """Yield code that loads a target as ``kernel``; ``by_name`` imports a file as a module if its name allows it."""
    target = entry.target
    file, is_file = Path(target.module), target.module.endswith(".py")
    is_module = file.stem.isidentifier() and not (iskeyword(file.stem) or _shadows_standard_module(entry))
    if is_file and not (by_name and is_module):
        yield f"KERNEL = sys.argv[1] if len(sys.argv) > 1 else {target.module!r}"
        yield f"kernel = {'.'.join(filter(None, ('load_file(KERNEL)', target.attribute)))}"
        return
    yield f"sys.path.insert(0, {str(file.parent if is_file else Path.cwd())!r})"
    yield from import_code(file.stem if is_file else target.module, target.attribute)


def import_code(module: str, path: str) -> tuple[str, ...]:
    """Return code that imports a module, or an object at a path in it, as ``kernel``."""
    first, dot, _ = path.partition(".")
    if not path:
        return (f"import {module} as kernel",)
    if not dot:
        return (f"from {module} import {first} as kernel",)
    return (f"from {module} import {first.removesuffix('()')}", f"kernel = {path}")


def _keywords_for_call(entry: UserImplementation, problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's options, and required keywords of the function."""
    name, _ = function_and_keywords(problem.operation, problem.options)
    required = entry.required_keywords.get(name, {})
    keywords = {keyword: value for keyword, value in required.items() if keyword not in {**problem.inputs, **options}}
    keywords |= options
    if keywords.get("scale", 0) is None:
        keywords["scale"] = problem.inputs["query"].shape[-1] ** -0.5
    return keywords
