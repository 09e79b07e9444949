"""Somebody's own implementation: a callable or a module of theirs, called as ``Backend.attention`` says, in a worker.

Its file is loaded in the worker and nowhere else: whatever it does when it is imported, it does there.

How a module of somebody's own is imported: compiled from what its file says now, and so is what lies beside it.

Python takes a compiled file for current where time, in whole seconds, and size are the source's. A kernel, or a module
that it imports, that is edited twice in a second (by a script, by a fast loop) would be judged as it was before.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
from typing import TYPE_CHECKING, Any

from attncheck.backends import BACKENDS, EVERYTHING, NATIVE, PADDED_BY, BackendEntry, DeclaredConvention, Mode
from attncheck.backends.contract import Backend
from attncheck.backends.devices import HAVE_DEVICES, VISIBLE
from attncheck.errors import UsageError
from attncheck.execution.operations import Parameters
from attncheck.wording import expected

if TYPE_CHECKING:
    from attncheck.execution.user_call import UserBackend


# Folders of packages that somebody installed: nobody edits them twice in a second, and there are many.
INSTALLED = ("site-packages", "dist-packages")


def import_user_module(name: str) -> ModuleType:
    """Import a module by its name, as ``python -m`` finds it, or a file by its path, as ``python file.py`` does.

    Raises whatever the file raises while it is loaded.
    """
    if not name.endswith(".py"):
        _import_from_source(Path.cwd())
        return import_module(name)
    path = Path(name)
    _import_from_source(path.parent)
    loader = FromSource(f"{path.stem}_under_attncheck", str(path))
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None, "a path with a loader has a specification"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    loader.exec_module(module)
    return module


class FromSource(SourceFileLoader):
    """Loads what a file says now."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of a module, compiled from its text."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_from_source(folder: Path) -> None:
    """Let imports find what lies in a folder and below, compiled from its text."""
    sys.path.insert(0, str(folder))
    top = folder.resolve()
    sys.path_hooks.insert(0, lambda path: _finder_of(path, top))
    for path in [each for each in list(sys.path_importer_cache) if _is_users(each, top)]:
        del sys.path_importer_cache[path]


def _finder_of(path: str, top: Path) -> FileFinder:
    """Return what finds modules in a folder of the user's. Raises ``ImportError`` for any other, as hooks have to."""
    if not _is_users(path, top):
        raise ImportError(f"{path} is none of the user's folders", path=path)
    return FileFinder(
        path,
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FromSource, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )


def _is_users(path: str, top: Path) -> bool:
    """Return whether a path is a folder below the top, and neither of an installed package nor of this one."""
    folder = Path(path).resolve()
    is_below = folder.is_relative_to(top) and folder.is_dir()
    is_own = any(folder.is_relative_to(each) for each in _own_folders())
    return is_below and not is_own and not {*INSTALLED} & {*folder.parts}


@cache
def _own_folders() -> frozenset[Path]:
    """Return where this package's code lies, which in a checkout is in several places."""
    root = __name__.partition(".")[0]
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == root]
    return frozenset(Path(folder).resolve() for module in own for folder in getattr(module, "__path__", ()))


@dataclass(frozen=True)
class Origin:
    """A module, and what the callable is called there."""

    module: str
    function: str

    @property
    def package(self) -> str:
        """What reports call it before the dot; what was written nowhere in particular is somebody's ``own``."""
        return name_of(self.module) if self.module else "own"


def origin_of(target: Any) -> Origin:
    """Say where a callable comes from: its module, and its name there, which a decorator or an alias may have given."""
    written = innermost(target)
    name = str(getattr(written, "__name__", type(written).__name__))
    module = getattr(written, "__module__", None)
    module = module if isinstance(module, str) else ""
    if not module.startswith("__main__"):
        there = vars(sys.modules[module]) if module in sys.modules else {}
        if there.get(name) is not target:
            name = next((each for each, value in there.items() if value is target and each.isidentifier()), name)
        return Origin(module, name)
    file = getattr(sys.modules.get(module), "__file__", None)
    return Origin(file if isinstance(file, str) and file.endswith(".py") else "", name)


def innermost(target: Any) -> Any:
    """Return the function that somebody wrote, inside what was put around it."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target) if callable(target) else target


class LoadError(Exception):
    """A target cannot be loaded; says why."""


class UnfitError(LoadError):
    """A target's ``function`` can never be called as the contract's of a ``name``; ``misfits`` say why."""

    def __init__(self, message: str, name: str, function: Callable[..., Any], misfits: Sequence[str]) -> None:
        super().__init__(message)
        self.name, self.function, self.misfits = name, function, misfits


def advice_on_framework(name: str, function: str, *, is_given: bool = False) -> str:
    """Say how a function is declared to take a framework's arrays, or where it ``is_given`` them, NumPy's."""
    if is_given:
        return f"it imports {name} alone and is given {name}'s arrays; --framework numpy gives it NumPy's"
    return (
        f"it imports {name} and is given NumPy's arrays; if it takes {name}'s, declare that: "
        f'{function}.framework = "{name}" below it, or --framework {name}'
    )


@dataclass(frozen=True)
class Target:
    """Where an implementation is: ``path`` of a file or a module's name, and what in it (empty: the module itself).

    ``pickled`` is a callable that was handed over as an object instead. ``signature`` names the family of functions
    that it is called like (``families.py``), where that was given. ``program`` are the words of a command that is the
    implementation, in whatever language; ``module`` is its file then.
    """

    module: str
    attribute: str = ""
    pickled: bytes = b""
    signature: str = ""
    program: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, signature: str = "") -> Target:
        """Read file.py, file.py:function, package.module, package.module:function, or a command.

        The name that reports give a function of a file in this folder, file.function, will do, too. Raises
        ``UsageError`` for any other text, and for a file that does not exist.
        """
        text = _as_file(text)
        if words := words_of_program(text):
            if signature:
                raise UsageError(f"{text}: a program speaks the protocol; it has no --signature")
            return cls(str(file_of_program(words)), program=words)
        module, _, attribute = text.rpartition(":") if ":" in text else (text, "", "")
        if module.endswith(".py"):
            path = Path(module)
            if not path.is_file():
                raise UsageError(f"{text}: no file {module}; expected file.py:function or package.module:function")
            module = str(path.resolve())
        if not module:
            raise UsageError(f"{text}: expected file.py:function or package.module:function")
        return cls(module, attribute, signature=signature)

    @property
    def name(self) -> str:
        """What the module is called in reports."""
        return re.sub(r"\W", "_", Path(self.module).stem) if self.program else name_of(self.module)

    def load(self) -> Any:
        """Import the module and return what is meant. Raises ``LoadError``."""
        if self in _loaded:
            return _loaded[self]
        if self.program:
            from attncheck.execution.programs import load_program

            return load_program(self.program)
        if self.pickled:
            import cloudpickle

            return cloudpickle.loads(self.pickled)

        try:
            module = import_user_module(self.module)
        except BaseException as error:  # whatever a file raises while it is loaded, also SystemExit
            raise LoadError(f"{self.module} cannot be loaded: {type(error).__name__}: {error}") from error
        found: Any = module
        for part in filter(None, self.attribute.split(".")):
            if not hasattr(found, part):
                functions = [name for name, each in vars(module).items() if inspect.isroutine(each) and name[0] != "_"]
                near = f"; {expected(self.attribute, functions, one_of=False)}" if functions else ""
                raise LoadError(f"{self.module} has no {self.attribute}{near}")
            found = getattr(found, part)
        return found


def is_own(text: str) -> bool:
    """Return whether a text names an implementation of somebody's own: a file, a module, or a program."""
    given = _as_file(text)
    return ":" in given or given.endswith(".py") or bool(words_of_program(text))


def _as_file(text: str) -> str:
    """Return file.py:function for file.function, as reports call it, where the file is in this folder."""
    file, _, function = text.partition(".")
    is_name = _NAME_IN_REPORTS.fullmatch(text) and file not in EVERYTHING and function != "py"
    if not is_name or not Path(f"{file}.py").is_file():
        return text
    return f"{file}.py" if function == "module" else f"{file}.py:{function}"


def words_of_program(text: str) -> tuple[str, ...]:
    """Return the words of a command that is given as an implementation; none where the text names no program.

    A program is named by its path (``./attention``), or by a command with its arguments (``Rscript attention.R``).
    Raises ``UsageError`` for a path where no program is.
    """
    if ":" in text and text.rpartition(":")[0].endswith(".py"):
        return ()  # a file of Python, whatever is in its name
    try:
        words = shlex.split(text)
    except ValueError:
        return ()
    if not words or ".py" in (Path(words[0]).suffix, Path(words[0].partition(":")[0]).suffix):
        return ()
    path = Path(words[0])
    if os.sep in words[0]:
        if not path.is_file():
            raise UsageError(
                f"{text}: no file {words[0]}; expected a program, file.py:function or package.module:function"
            )
        if not os.access(path, os.X_OK):
            raise UsageError(f"{text}: {words[0]} cannot be executed; if it is a program, chmod +x {words[0]}")
        # A link may say what a program is, as an environment's python does: it is not resolved.
        return (str(path.absolute()), *words[1:])
    found = shutil.which(words[0]) if len(words) > 1 else None
    return (found, *words[1:]) if found else ()


def file_of_program(words: Sequence[str]) -> Path:
    """Return the file that somebody wrote: a script that an interpreter is given, or the program itself."""
    scripts = (Path(each) for each in words[1:])
    return next((each.resolve() for each in scripts if each.is_file()), Path(words[0]))


_loaded: dict[Target, Any] = {}
_NAME_IN_REPORTS = re.compile(r"\w+\.\w+")


def keep_loaded(target: Target, loaded: Any) -> None:
    """Called in a process that goes on as a worker: what it has loaded is not loaded anew."""
    _loaded[target] = loaded


def name_of(module: str) -> str:
    """Return what the implementations of a module, or of a file, are called in reports before the dot.

    A file of a package is called as the module that it is.
    """
    if not module.endswith(".py"):
        return module.replace(".", "_")
    path = Path(module)
    parts = [] if path.stem == "__init__" else [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file() or not folder.name:
            break
        parts.insert(0, folder.name)
    return "_".join(parts) or path.stem


@dataclass(frozen=True)
class UserImplementation(BackendEntry):
    """An own implementation as a line of the table of backends.

    ``says`` is for people; ``conventions`` are those that it declares, by name; ``framework`` names the backend whose
    arrays it takes; ``mode`` is what it is called behind the dot, where that is not the function's name. ``required``
    are, by function, the contract's keywords that it has no default for. ``source`` is the ``file`` and ``line`` of
    its ``def``, where it has one. ``requirements`` are, by function, what it requires of shapes, and ``parameters``
    what it can be called with; it has no other functions. ``given`` is what names it on a command line, with
    ``--framework`` where that was given; empty for an object. ``device`` is where the tensors lie that it is given.
    ``signature`` names the family that it is called like, if any. ``properties`` are what it claims of properties.
    """

    target: Target = field(default_factory=lambda: Target("", ""))
    framework: str = "numpy"
    function: str = "attention"
    conventions: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    mode: str = ""
    required: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    requirements: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    parameters: Mapping[str, Parameters] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    device: str = ""
    signature: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the framework that it asks for is there."""
        return BACKENDS[self.framework].is_installed

    @property
    def all_modes(self) -> dict[str, Mode]:
        """Its only mode."""
        where = f"{self.target.module}:{self.target.attribute}".strip(":") or "a callable"
        where = shlex.join(self.target.program) or where
        name = self.mode or self.function
        conventions = {each: DeclaredConvention(value, "", "") for each, value in self.conventions.items()}
        # How it computes is not known: it is asked for everything, and stopped where it takes too much memory.
        root = re.sub("[._-]+", "_", self.name).lower()
        own = (each for each in self.distributions if re.sub("[._-]+", "_", each).lower() == root)
        # The version is that of what it comes from; a file of somebody's has none, and the framework's is not its.
        package = next(iter(self.distributions), None) if self.target.program else next(own, self.name)
        mode = Mode(
            name, self.module, where, self.classes, conventions, package=package, holds_scores=False, device=self.device
        )
        return {name: mode}

    def environment_of(self, mode: str) -> Mapping[str, str]:
        """Return its framework's variables; no device is hidden, for it may use one that it does not declare."""
        return {**self.environment, **(VISIBLE if self.device else {})}

    def requires_of(self, mode: str, function: str) -> tuple[Mapping[str, object], frozenset[str]]:
        """Return what a function of the target requires of shapes, and the keywords it can be padded by."""
        taken = self.parameters.get(function, Parameters(frozenset()))
        return self.requirements.get(function, {}), taken.accepted(PADDED_BY)

    def has(self, mode: str, function: str) -> bool:
        """Return whether the target has a function of the contract."""
        return function in self.parameters

    def load(self, mode: str = "") -> Backend:
        """Load the target and wrap it."""
        from attncheck.execution.user_call import own_backend

        framework = BACKENDS[self.framework]
        backend: UserBackend = own_backend(
            self.target.load(), self.function, framework, self.device, self.target.signature
        )
        return backend  # type: ignore[return-value] # it has those of the contract's functions that the target has


def entry_of(target: Target, declared: Mapping[str, Any], framework: str | None) -> UserImplementation:
    """Make the entry of a target from what it declares of itself (``user_call.declarations``).

    Raises ``UsageError`` for an unknown framework, and for a device that its arrays do not lie on.
    """
    said = framework or declared.get("framework")
    name = said or declared.get("framework_alone") or "numpy"
    if name not in BACKENDS:
        raise UsageError(f"unknown framework {name!r}; {expected(name, BACKENDS, one_of=False)}")
    if (device := declared.get("device") or "") and name not in HAVE_DEVICES:
        known = ", ".join(HAVE_DEVICES)
        raise UsageError(f"device {device}: arrays of {name} lie on none; declare the framework, one of {known}")
    backend = BACKENDS[name]
    imported = declared.get("imported_framework")
    advice = (
        []
        if said or not imported
        else [advice_on_framework(imported, target.attribute or "attention", is_given=name == imported)]
    )
    return UserImplementation(
        name=declared.get("name") or target.name,
        module=target.module,
        packages=backend.packages,
        own_process_for=backend.own_process_for,
        environment=backend.environment,
        fallback=backend.fallback,
        classes=dict(declared.get("classes") or NATIVE),
        target=target,
        framework=name,
        function=target.attribute.rpartition(".")[2] or ("program" if target.program else "module"),
        conventions=dict(declared.get("conventions") or {}),
        properties=dict(declared.get("properties") or {}),
        resources=dict(declared.get("resources") or {}),
        mode=declared.get("mode") or "",
        device=device,
        signature=declared.get("signature") or "",
        distributions=dict(declared.get("distributions") or {}),
        hints=(*declared.get("hints", ()), *advice),
        required=dict(declared.get("required") or {}),
        source=dict(declared.get("source") or {}),
        requirements=dict(declared.get("requirements") or {}),
        parameters=dict(declared.get("parameters") or {}),
    )


def source_of(entry: BackendEntry) -> Mapping[str, Any]:
    """Return the file and line at which an own implementation is defined; nothing of a bundled one."""
    return entry.source if isinstance(entry, UserImplementation) else {}
