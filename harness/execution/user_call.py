"""Load and call a user's implementation in its worker, and detect forbidden side effects.

Its modules are always compiled from their source files. Python uses a compiled file if its time, in whole seconds, and
its size match the source. So a kernel, or a module that it imports, that is edited twice within a second (by a script
or a fast loop) would be judged as it was before.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import BACKENDS, EAGER, NATIVE, BackendEntry
from attncheck.backends.contract import Backend, UnsupportedError
from attncheck.backends.devices import on_device
from attncheck.backends.families import FAMILIES
from attncheck.backends.family_calls import Arrays, UnfitFunctionError, unused_parameters
from attncheck.backends.planned_calls import functions_of_family, is_plan_run_wrapper
from attncheck.common.wording import join_words, suggest_names
from attncheck.execution.blind_calls import load_blind
from attncheck.execution.environment import find_imports
from attncheck.execution.operations import function_parameters, require_parameters
from attncheck.execution.process_state import fill_free_memory, forbid_changed_inputs, forbid_leaked_threads
from attncheck.execution.programs import ProgramFunction, ProgramModule, load_program
from attncheck.execution.requirements import Requirements
from attncheck.execution.signatures import (
    INPUTS_BY_FUNCTION,
    required_keywords,
    signature_faults,
    signature_text,
    unused_parameter_hints,
)
from attncheck.execution.user_code import (
    ATTRIBUTES,
    CAPABILITIES,
    INSTALLED_FOLDERS,
    LoadError,
    Target,
    UnfitError,
    advice_on_framework,
    merge_tables,
    missing_function_message,
    unwrap_function,
)
from attncheck.execution.worker import AdvisedError, Observation
from attncheck.spec import (
    CLAIMS,
    DECLARABLE_CONVENTIONS,
    DTYPES,
    EMPTY_ROWS,
    OPERATIONS,
    PROPERTIES,
    ROUNDING_MODELS,
    result_stages,
)
from attncheck.spec.classes import ROUNDING_PRESETS, is_composed_class, validate_class_name
from attncheck.spec.options import SIXTEEN_BIT_DTYPES

_OPERATION_OF_FUNCTION = {spec.function_name: name for name, spec in OPERATIONS.items() if not spec.has_score_option}
"""The operations that are no scoring functions."""
_SHAPE_WORDS = re.compile(
    r"multiple of|divisible|power of (?:2|two)|head.?(?:dim|size)|shape\[.*% ?[0-9]", re.IGNORECASE
)
_DEVICE_NAME = re.compile(r"[a-z]+(:[0-9]+)?")
# A choice: only the beginning of a message is searched; a larger number takes longer on messages of megabytes.
_MAX_MESSAGE_LENGTH = 2000
_ADVICE_ON_UNSUPPORTED = "if it does not support this case, let it raise NotImplementedError itself"
_ADVICE_ON_REQUIRES = (
    "if it takes only some widths or lengths, declare them, and calls are padded, for example: "
    '{}.requires = {{"width_multiple": 8, "max_width": 256}} (docs/how-to/kernel.md)'
)


class UserBackend:
    """The functions of the contract that a target has, on the arrays of its framework."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], base: Backend, framework: str) -> None:
        self._framework = framework
        self.observations: list[Observation] = []
        self.prepare, self.describe = base.prepare, base.describe
        self.from_numpy, self._base_to_numpy = base.from_numpy, base.to_numpy
        for name, function in functions.items():
            call = functools.partial(self._call, name, function, required_keywords(name, function))
            call.user_function = function  # type: ignore[attr-defined] # whose parameters say what it can be asked
            setattr(self, name, call)

    def to_numpy(self, tensor: Any) -> NDArray[Any]:
        """Turn a returned value into an array. Raises ``TypeError`` if it is none."""
        if isinstance(tensor, list | tuple | str | bytes | int | float | complex | None):
            got = type(tensor).__name__
            raise TypeError(f"returned a {got}; expected an array, or a dict of stages that are arrays")
        try:
            array = self._base_to_numpy(tensor)
        except Exception as error:
            device = getattr(tensor, "device", None)
            where = f" on device {device}" if device is not None else ""
            raise TypeError(f"returned a {type(tensor).__name__}{where}, which gives no array: {error}") from error
        if not isinstance(array, np.ndarray | np.generic):
            kind = f"{type(tensor).__module__.partition('.')[0]}'s {type(tensor).__name__}"
            raise TypeError(f"returned {kind}; expected a NumPy array, or name its framework with --framework")
        return np.asarray(array)

    def _call(
        self, name: str, function: Callable[..., Any], unasked: Mapping[str, Any], /, **keywords: Any
    ) -> dict[str, Any]:
        positional = [keywords.pop(key) for key in INPUTS_BY_FUNCTION[name]]
        require_parameters(function_parameters(function), keywords)
        unasked = _default_required_keywords(unasked, keywords, positional)
        if INPUTS_BY_FUNCTION[name][:3] == INPUTS_BY_FUNCTION["attention"]:
            _check_capabilities(function, positional)
        arrays = {key: value for key, value in keywords.items() if hasattr(value, "shape")}
        options = {key: value for key, value in keywords.items() if key not in arrays}
        named = {**dict(zip(INPUTS_BY_FUNCTION[name], positional, strict=True)), **arrays}
        with (
            forbid_changed_inputs(named, self._base_to_numpy),
            forbid_leaked_threads(),
            fill_free_memory(_result_sizes_in_bytes(positional)),
        ):
            returned = self._call_with_advice(function, positional, {**unasked, **keywords})
        if isinstance(returned, Mapping):
            return dict(returned)
        results = result_stages(_OPERATION_OF_FUNCTION.get(name, "scoring"), options, {*arrays}) or ("masked",)
        several = len(results) > 1 and isinstance(returned, tuple)
        return dict(zip(results, returned if several else (returned,), strict=False))

    def _call_with_advice(
        self, function: Callable[..., Any], positional: list[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """Call the function; if its error suggests a missing declaration, raise ``AdvisedError`` with that advice."""
        try:
            return function(*positional, **keywords)
        except NotImplementedError as error:
            if _is_raised_by(error, function):
                raise
            raise AdvisedError(error, _ADVICE_ON_UNSUPPORTED) from error
        except Exception as error:
            if _is_about_shapes(error) and not hasattr(function, "requires"):
                raise AdvisedError(error, _ADVICE_ON_REQUIRES.format(_name_or_default(function))) from error
            if not isinstance(error, TypeError | AttributeError | ValueError):
                raise
            # Errors that another framework's code raises if it gets NumPy arrays.
            words = ("numpy", "ndarray", "axes don't match array")
            if self._framework != "numpy" or not any(word in _error_message(error) for word in words):
                raise
            imports = find_imports(function)
            if (wanted := imports.framework) is None:
                raise
            library = next(iter(imports.framework_by_library), "")
            raise AdvisedError(error, advice_on_framework(wanted, _name_or_default(function), library)) from error


_loaded_targets: dict[Target, Any] = {}


def load_target(target: Target) -> Any:
    """Import the module of a target and return the target. Raises ``LoadError``."""
    if target in _loaded_targets:
        return _loaded_targets[target]
    declared = json.loads(target.declared)
    if target.program:
        return _set_declarations(load_program(target.program), declared)
    if target.pickled:
        import cloudpickle

        return _set_declarations(cloudpickle.loads(target.pickled), declared)

    try:
        module = import_user_module(target.module)
    except BaseException as error:  # a file may raise anything while it is loaded, also SystemExit
        lines = traceback.format_exception_only(error)[1:3] if isinstance(error, SyntaxError) and error.text else []
        marked = "\n" + "".join(lines).rstrip() if lines else ""
        raise LoadError(f"{target.module} cannot be loaded: {type(error).__name__}: {error}{marked}") from error
    implementation: Any = module
    for part in filter(None, target.attribute.split(".")):
        if not hasattr(implementation, part):
            functions = [name for name, value in vars(module).items() if inspect.isroutine(value)]
            raise LoadError(missing_function_message(target, functions))
        implementation = getattr(implementation, part)
    if target.module.endswith(".py"):
        _share_declarations(module, implementation)
    return _set_declarations(implementation, declared)


def _share_declarations(module: ModuleType, implementation: Any) -> None:
    """Copy declarations of a file to its functions, and declarations of functions to the file, if not there already.

    A variable of the file that is no valid declaration is ignored.
    """
    is_file = implementation is module
    functions = filter(callable, map(vars(module).get, INPUTS_BY_FUNCTION)) if is_file else [implementation]
    functions = [*functions]
    for name in ATTRIBUTES[:-2]:  # a file's device is any variable
        declared = vars(module).get(name)
        for function in functions:
            if _is_valid_declaration(name, declared) and not hasattr(function, name):
                with suppress(AttributeError, TypeError):  # of a builtin
                    setattr(function, name, declared)
            elif is_file and declared is None and hasattr(function, name) and name != "signature":
                declared = getattr(function, name)
                setattr(module, name, declared)


def _set_declarations(target: Any, declared: Mapping[str, Any]) -> Any:
    """Set attributes that the user ``declared`` for a target; if it is a module, also on its functions.

    A table is merged with the target's table. If attributes cannot be set, as on a builtin, a wrapper is returned.
    """
    if not declared:
        return target
    is_module = inspect.ismodule(target)
    for function in (
        [value for value in map(vars(target).get, INPUTS_BY_FUNCTION) if callable(value)] if is_module else ()
    ):
        _set_declarations(function, declared)
    for name, value in declared.items():
        before = getattr(target, name, None)
        both = merge_tables(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
        try:
            setattr(target, name, both)
        except (AttributeError, TypeError):
            return _set_declarations(functools.update_wrapper(functools.partial(target), target), declared)
    return target


def _is_valid_declaration(name: str, value: Any) -> bool:
    """Return whether the value of a file's variable can be a declaration of that name."""
    if name in ("framework", "signature"):
        return isinstance(value, str) and value in (BACKENDS if name == "framework" else FAMILIES)
    return isinstance(value, Mapping) and bool(value) and {*value} <= {*_NAMES_IN_TABLE[name]}


def remember_loaded_target(target: Target, loaded: Any) -> None:
    """Called in a process that becomes a worker, which then does not load the target again."""
    _loaded_targets[target] = loaded


def import_user_module(name: str) -> ModuleType:
    """Import a module by its name, as ``python -m`` finds it, or a file by its path, as ``python file.py`` does.

    Raises whatever the file raises while it is loaded.
    """
    if not name.endswith(".py"):
        _make_importable_from_source(Path.cwd())
        return import_module(name)
    path = Path(name)
    _make_importable_from_source(path.parent)
    loader = LoaderFromSource(f"{path.stem}_under_attncheck", str(path))
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None, "a path with a loader has a specification"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    loader.exec_module(module)
    return module


class LoaderFromSource(SourceFileLoader):
    """Loads a file's present text."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of a module, compiled from its text."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _make_importable_from_source(folder: Path) -> None:
    """Make the modules in and below a folder importable, compiled from their text."""
    sys.path.insert(0, str(folder))
    top = folder.resolve()

    def find_modules(path: str) -> FileFinder:
        if not _is_user_folder(path, top):
            raise ImportError(f"{path} is none of the user's folders", path=path)  # as hooks have to
        compiled = (ExtensionFileLoader, EXTENSION_SUFFIXES), (SourcelessFileLoader, BYTECODE_SUFFIXES)
        return FileFinder(path, compiled[0], (LoaderFromSource, SOURCE_SUFFIXES), compiled[1])

    sys.path_hooks.insert(0, find_modules)
    for path in [cached for cached in list(sys.path_importer_cache) if _is_user_folder(cached, top)]:
        del sys.path_importer_cache[path]


def _is_user_folder(path: str, top: Path) -> bool:
    """Return whether a path is a folder below the top, and neither of an installed package nor of this one."""
    folder = Path(path).resolve()
    is_below = folder.is_relative_to(top) and folder.is_dir()
    is_own = any(folder.is_relative_to(root) for root in _attncheck_folders())
    return is_below and not is_own and not {*INSTALLED_FOLDERS} & {*folder.parts}


@functools.cache
def _attncheck_folders() -> frozenset[Path]:
    """Return the folders of this package's code; in a checkout, there are several."""
    root = __name__.partition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == root]
    return frozenset(Path(folder).resolve() for module in modules for folder in getattr(module, "__path__", ()))


def wrap_target(target: Any, name: str, framework: BackendEntry, device: str = "", signature: str = "") -> UserBackend:
    """Wrap a target, whose tensors are on ``device`` if it is named.

    Raises ``LoadError`` if it can never be called by the contract.
    """
    base = on_device(framework.load(), framework.name, device)
    return UserBackend(contract_functions_of(target, name, signature, base), base, framework.name)


def wrap_blind_target(
    target: Target, name: str, framework: str, device: str, capabilities: Mapping[str, Any]
) -> UserBackend:
    """Wrap a target that is called in a blind process, where arrays become the framework's. Raises ``LoadError``."""
    loaded, arrays, process = load_blind(target, framework, device)
    base: Any = arrays or BACKENDS["numpy"].load()
    functions = contract_functions_of(loaded, name, target.signature, base)
    for function in functions.values():
        with suppress(AttributeError, TypeError):
            declared = getattr(function, "capabilities", None) or {}
            function.capabilities = {**capabilities, **declared}  # type: ignore[attr-defined]
    backend = UserBackend(functions, base, framework)
    backend.observations = [] if process is None else process.observations
    return backend


@functools.lru_cache(maxsize=16)
def _name_or_default(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "attention")


def _is_raised_by(error: NotImplementedError, function: Callable[..., Any]) -> bool:
    """Return whether the function itself raised the error; one from code that it calls is a fault."""
    code = getattr(unwrap_function(function), "__code__", None)
    if isinstance(error, UnsupportedError) or isinstance(function, ProgramFunction) or code is None:
        return True
    *_, last = traceback.extract_tb(error.__traceback__)
    return last.filename == code.co_filename and (not last.line or "raise" in last.line)


def _is_about_shapes(error: Exception) -> bool:
    """Return whether an error reads as if a function took only some shapes; an assertion's source is read, too."""
    words = _error_message(error)
    if isinstance(error, AssertionError):
        words += " ".join(frame.line or "" for frame in traceback.extract_tb(error.__traceback__)[-1:])
    return _SHAPE_WORDS.search(words) is not None


def _error_message(error: Exception) -> str:
    """Return the beginning of an error's message, which may be megabytes long, or raise an exception itself."""
    try:
        return str(error)[:_MAX_MESSAGE_LENGTH]
    except Exception:
        return ""


def contract_functions_of(
    target: Any, name: str, signature: str = "", arrays: Arrays | None = None
) -> dict[str, Callable[..., Any]]:
    """Return the target's functions by the contract's names; they can be called if ``arrays`` are given.

    A function with a name of the contract is that function, any other is ``attention``; its attributes may be further
    ones. Of a module, or another object, all functions with a name of the contract count.

    A function of a library's signature is adapted. Raises ``LoadError`` if the target has none.
    """
    if family_name := signature_family(target, signature):
        from attncheck.backends import numpy_backend  # for functions that are only inspected

        family = FAMILIES[family_name]
        try:
            functions = functions_of_family(target, family, arrays or numpy_backend, forbid_changed_inputs)
        except UnfitFunctionError as error:
            strange = error.strange
            why = f"it requires {join_words(strange)}" if strange else error.reason
            raise LoadError(f"cannot be called as {family.name} is: {why}; expected {error.expected}") from error
    else:
        functions = {
            called: getattr(target, called) for called in INPUTS_BY_FUNCTION if callable(getattr(target, called, None))
        }
        if not inspect.ismodule(target) and (callable(target) or inspect.isroutine(target)):
            functions.setdefault(name if name in INPUTS_BY_FUNCTION else "attention", target)
    if not functions:
        raise LoadError(f"nothing to call: expected a function, or a module with {signature_text('attention')}")
    for called, function in functions.items():
        if unfit := signature_faults(called, function):
            got = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
            is_attention, inputs = called == "attention", ", ".join(INPUTS_BY_FUNCTION[called])
            wanted = signature_text(called) if is_attention else f"{called}({inputs}, *, ...)"
            message = f"unsupported signature {got}; expected {wanted} (all keywords optional)"
            raise UnfitError(message, called, function, unfit)
    return functions


def signature_family(target: Any, named: str = "") -> str:
    """Return the family of a target's signature, as ``named`` by the user or declared; empty for none.

    Raises ``LoadError`` for an unknown family, and for a module: the user has to name its function.
    """
    declared = getattr(target, "signature", None)
    name = named or (declared if isinstance(declared, str) else "")
    if name and name not in FAMILIES:
        raise LoadError(f"unknown signature {name!r}; {suggest_names(name, FAMILIES, one_of=False)}")
    if name and not (callable(target) or is_plan_run_wrapper(target, FAMILIES[name])):
        raise LoadError(f"signature {name}: expected a function, as file.py:function")
    return name


def read_target_declarations(target: Any, name: str, signature: str = "") -> dict[str, Any]:
    """Return the declarations of a target: framework, rounding models per dtype, conventions, resources, source.

    Further entries are read from its code: the distributions that it imports, and its unused and required parameters.
    Raises ``LoadError`` for a declaration that the harness does not know.
    """
    functions, family = contract_functions_of(target, name, signature), signature_family(target, signature)
    imports = find_imports(target)
    framework = getattr(target, "framework", None)
    capabilities = _check_capability_declarations(getattr(target, "capabilities", None))
    classes = _check_rounding_models(getattr(target, "classes", None))
    # 16-bit dtypes have to be declared: most kernels that are written in NumPy have none.
    dtypes = capabilities.get("dtypes") or [*NATIVE, *classes]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise LoadError(f"capabilities: unknown dtype {dtype!r}; {suggest_names(dtype, DTYPES, one_of=False)}")
    return {
        "framework": framework,
        "array_framework": imports.array_framework,
        "classes": {dtype: classes.get(dtype, EAGER[dtype]) for dtype in dict.fromkeys(dtypes)},
        "conventions": _check_conventions(getattr(target, "conventions", None)),
        "properties": _check_property_claims(getattr(target, "properties", None)),
        "capabilities": {name: capabilities[name] for name in ("grouped_heads", "value_width") if name in capabilities},
        "device": _check_device(getattr(target, "device", None)),
        "resources": _check_resources(getattr(target, "resources", None)),
        "imported_framework": imports.framework,
        "importing_library": next(iter(imports.framework_by_library), ""),
        "distributions": target.distributions if isinstance(target, ProgramModule) else imports.versions,
        "library_distribution": imports.library_distribution,
        "signature": family,
        "hints": _parameter_hints(target, functions, family),
        "required_keywords": {called: required_keywords(called, function) for called, function in functions.items()},
        "requirements": {called: _check_requirements(target, function) for called, function in functions.items()},
        "parameters": {called: function_parameters(function) for called, function in functions.items()},
        "source": _source_location(functions.get("attention") or next(iter(functions.values()))),
    }


_NAMES_IN_TABLE: Mapping[str, Sequence[str]] = {
    "capabilities": CAPABILITIES,
    "classes": DTYPES,
    "conventions": ("empty_rows", *DECLARABLE_CONVENTIONS),
    "properties": tuple(PROPERTIES),
    "requires": tuple(field.name for field in fields(Requirements)),
}
"""The valid names in each table that a function declares."""


def _check_table(kind: str, declared: Any, example: str, called: str = "") -> dict[str, Any]:
    """Check that a declaration is a table with known names; ``called`` describes a name in the message."""
    if not isinstance(declared or {}, Mapping):
        raise LoadError(f"{kind}: expected {example}; got {declared!r}")
    for name in declared or {}:
        if name not in _NAMES_IN_TABLE[kind]:
            raise LoadError(
                f"{kind}: unknown {called}{name!r}; {suggest_names(str(name), _NAMES_IN_TABLE[kind], one_of=False)}"
            )
    return dict(declared or {})


def _check_capability_declarations(declared: Any) -> dict[str, Any]:
    """Check the declared capabilities: known names, with true or false, or dtypes."""
    capabilities = _check_table("capabilities", declared, 'a table such as {"dtypes": ["float32"]}')
    for name, value in capabilities.items():
        if name == "dtypes" and not isinstance(value, list | tuple | set | frozenset):
            raise LoadError(f'capabilities: dtypes: expected a list of dtypes, such as ["float32"], got {value!r}')
        if name != "dtypes" and not isinstance(value, bool):
            raise LoadError(f"capabilities: {name}: expected True or False, got {value!r}")
    return capabilities


def _check_conventions(declared: Any) -> dict[str, str]:
    """Check the declared conventions: known names, each with one of its values."""
    known: dict[str, Any] = {"empty_rows": EMPTY_ROWS, **DECLARABLE_CONVENTIONS}
    conventions = _check_table("conventions", declared, 'values by name, such as {"empty_rows": "nan"}', "convention ")
    for name, value in conventions.items():
        if value not in known[name]:
            raise LoadError(f"conventions: {name}: expected one of {', '.join(known[name])}, got {value!r}")
    return conventions


def _parameter_hints(target: Any, functions: Mapping[str, Callable[..., Any]], family: str) -> list[str]:
    if not family:
        return [hint for called, function in functions.items() for hint in unused_parameter_hints(called, function)]
    unused = [] if is_plan_run_wrapper(target, FAMILIES[family]) else unused_parameters(target, FAMILIES[family])
    return [f"attncheck never passes its {join_words(unused)}"] if unused else []


def _source_location(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the file and line of a function's ``def``, below the working directory if possible; {} if unknown."""
    if isinstance(function, ProgramFunction):
        return {}
    function = inspect.unwrap(function)
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    try:
        file, (lines, first) = inspect.getsourcefile(function), inspect.getsourcelines(function)
    except (OSError, TypeError, SyntaxError):
        return {}  # of a builtin, or written by a compiler
    if file is None:
        return {}
    path = Path(file).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    # Decorators are above the line that users look for.
    below = next((number for number, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)
    return {"file": shown.as_posix(), "line": first + below}


def _check_rounding_models(declared: Any) -> dict[str, str]:
    """Return the declared rounding models by dtype. Raises ``LoadError`` for one that the dtype does not have."""
    models = _check_table("classes", declared, 'rounding models by dtype, as {"float16": "fused"}', "dtype ")
    for dtype, model in models.items():
        known = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
        if isinstance(model, str) and not is_composed_class(model) and model not in known:
            names = known if dtype not in SIXTEEN_BIT_DTYPES else [*known, *ROUNDING_PRESETS]
            raise LoadError(f"classes: {dtype} has no class {model!r}; expected {', '.join(names)}")
        try:
            models[dtype] = validate_class_name(model, dtype)
        except ValueError as error:
            raise LoadError(f"classes: {dtype}: {error}") from None
    return models


def _check_requirements(target: Any, function: Callable[..., Any]) -> dict[str, object]:
    """Return the requirements on shapes that a function, or else its target, declares."""
    declared = getattr(function, "requires", getattr(target, "requires", None))
    if declared is None:
        return {}
    try:
        Requirements.from_declaration(declared)
    except ValueError as error:
        raise LoadError(str(error)) from None
    return dict(declared)


def _check_device(declared: Any) -> str:
    """Return the device of its input tensors; empty for the CPU. Raises ``LoadError`` for an invalid name."""
    text = "" if declared is None else str(declared)  # torch.device is written as the name that it was made of
    if text and not _DEVICE_NAME.fullmatch(text):
        raise LoadError(f"device: expected a name such as cuda or cuda:1; got {declared!r}")
    return "" if text == "cpu" else text


def _check_resources(declared: Any) -> dict[str, float]:
    """Check the resources that a cluster's worker has to offer: names and amounts."""
    if not isinstance(declared or {}, Mapping) or not all(
        isinstance(name, str) and name and isinstance(amount, int | float) and 0 < amount < float("inf")
        for name, amount in (declared or {}).items()
    ):
        raise LoadError(f'resources: expected names and positive amounts, such as {{"GPU": 1}}; got {declared!r}')
    return dict(declared or {})


def _check_property_claims(declared: Any) -> dict[str, str]:
    """Check the claimed properties: known names, and how strictly each is fulfilled."""
    claims = _check_table("properties", declared, 'claims, such as {"batch_invariant": "bitwise"}', "property ")
    for name, claim in claims.items():
        if claim not in CLAIMS:
            raise LoadError(f"properties: {name}: expected {' or '.join(CLAIMS)}; got {claim!r}")
    return claims


def _default_required_keywords(
    required: Mapping[str, Any], keywords: Mapping[str, Any], positional: list[Any]
) -> dict[str, Any]:
    """Return values for required keywords that the case does not set: the contract's defaults, and the usual scale.

    Raises ``UnsupportedError`` for a default of None: a function that requires a mask computes something else with it.
    """
    unasked = {name: value for name, value in required.items() if name not in keywords}
    if "scale" in unasked and len(positional[0].shape) == 4:
        unasked["scale"] = positional[0].shape[-1] ** -0.5
    if lacking := tuple(f"no {name} in the case" for name, value in unasked.items() if value is None):
        names = join_words([name for name, value in unasked.items() if value is None])
        raise UnsupportedError(
            f"requires {names}, and the case has none; a default, such as None, says it may", lacking
        )
    return unasked


def _result_sizes_in_bytes(tensors: Sequence[Any]) -> list[int]:
    """Return the bytes that results may have: as many as an input, or as queries with the width of the values."""
    sizes = [int(getattr(tensor, "nbytes", 0)) for tensor in tensors]
    width, *_ = tensors[0].shape[-1:] or (1,)
    return [*sizes, sizes[0] // max(width, 1) * (tensors[-1].shape[-1:] or (1,))[0]]


def _check_capabilities(function: Callable[..., Any], tensors: list[Any]) -> None:
    """Raise ``UnsupportedError`` for a capability, not a parameter, that the function declares not to have."""
    capabilities = getattr(function, "capabilities", None) or {}
    if len(tensors[0].shape) != 4:
        return
    query, key, value = (tuple(tensor.shape) for tensor in tensors[:3])
    for name, asked in (("grouped_heads", query[1] != key[1]), ("value_width", value[3] != query[3])):
        if asked and capabilities.get(name) is False:
            lacking = name.replace("_", " ")
            raise UnsupportedError(f"says that it has no {lacking}", (lacking,))
