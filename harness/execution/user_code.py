"""A user's implementation: a callable, a module or a program, as a command line or a caller names it.

Its file is loaded in a worker and nowhere else (``user_call.py``): whatever it does when it is imported, it does there.
Nothing that imports NumPy may be imported here: a worker sets the number of threads before.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attncheck.backends import ALL_ENTRIES
from attncheck.common.errors import UsageError
from attncheck.common.wording import suggest_names


@dataclass(frozen=True)
class CallableOrigin:
    """A module, and what the callable is called there."""

    module: str
    function: str

    @property
    def package(self) -> str:
        """Return its name in reports before the dot; ``own`` without a module."""
        return report_name(self.module) if self.module else "own"


def find_origin(target: Any) -> CallableOrigin:
    """Return the origin of a callable: its module and its name there, which may come from a decorator or an alias."""
    written = unwrap_function(target)
    name = str(getattr(written, "__name__", type(written).__name__))
    module = getattr(written, "__module__", None)
    module = module if isinstance(module, str) else ""
    if not module.startswith("__main__"):
        there = vars(sys.modules[module]) if module in sys.modules else {}
        if there.get(name) is not target:
            name = next((alias for alias, value in there.items() if value is target and alias.isidentifier()), name)
        return CallableOrigin(module, name)
    file = getattr(sys.modules.get(module), "__file__", None)
    return CallableOrigin(file if isinstance(file, str) and file.endswith(".py") else "", name)


def unwrap_function(target: Any) -> Any:
    """Return the function that somebody wrote, inside what was put around it."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target) if callable(target) else target


INSTALLED_FOLDERS = ("site-packages", "dist-packages")
"""Folders of installed packages, which are many, and which no user edits twice in a second."""
_TEST_VARIABLES = re.compile("(ATTNCHECK|PYTEST|TOX|GITHUB|GITLAB|HYPOTHESIS)_.*|CI|CONTINUOUS_INTEGRATION|TF_BUILD|_")
_PATH_VARIABLES = frozenset({"HOME", "OLDPWD", "PATH", "PWD", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV"})
"""Variables that stay whatever they contain: a user's folder may have any name."""


def without_traces(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those that this package, a test runner or a CI system sets."""
    return {
        name: value
        for name, value in variables.items()
        if not _TEST_VARIABLES.fullmatch(name) and (name in _PATH_VARIABLES or "attncheck" not in value)
    }


class LoadError(Exception):
    """A target cannot be loaded; says why."""


class UnfitError(LoadError):
    """A target's ``function`` can never be called as the contract's of a ``name``; ``misfits`` say why."""

    def __init__(self, message: str, name: str, function: Callable[..., Any], misfits: Sequence[str]) -> None:
        super().__init__(message)
        self.name, self.function, self.misfits = name, function, misfits


def advice_on_framework(name: str, function: str, library: str = "", *, is_given: bool = False) -> str:
    """Return how a function is declared to take a framework's arrays, or if it ``is_given`` them, NumPy's.

    ``library`` is what imports the framework for it.
    """
    imports = f"{library}, which imports {name}," if library else name
    if is_given:
        return f"it imports {imports} and is given {name}'s arrays; --framework numpy gives it NumPy's"
    return (
        f"it imports {imports} and is given NumPy's arrays; if it takes {name}'s, declare that: "
        f'{function}.framework = "{name}" below it, or --framework {name}'
    )


ATTRIBUTES = (
    "framework", "signature", "capabilities", "classes", "conventions", "properties", "requires", "device", "resources",
)  # fmt: skip
"""What a function may declare of itself."""
CAPABILITIES = ("dtypes", "grouped_heads", "value_width")


def read_declarations(texts: Iterable[str]) -> dict[str, Any]:
    """Return the attributes that texts such as ``dtypes=float16`` and ``requires.lengths=equal`` give a function.

    A value is JSON, TOML or else a text; a dot leads into a table. Raises ``UsageError`` for what is no attribute.

    Example:
        >>> read_declarations(["dtypes=float16,bfloat16", "requires.width_multiple=8"])
        {'capabilities': {'dtypes': ['float16', 'bfloat16']}, 'requires': {'width_multiple': 8}}
    """
    attributes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        path = name.strip().split(".")
        first = path[0]
        if not equals or not all(path):
            raise UsageError(f"--declare {text}: expected NAME=VALUE, as in --declare dtypes=float16")
        if first not in (*ATTRIBUTES, *CAPABILITIES):
            known = suggest_names(first, [*ATTRIBUTES, *CAPABILITIES], one_of=False)
            raise UsageError(f"--declare {text}: a function declares no {first!r}; {known}")
        keys = ["capabilities", *path] if first in CAPABILITIES else path
        read = _parse_value(value.strip())
        is_list = keys == ["capabilities", "dtypes"] and isinstance(read, str)
        nested: Any = read.split(",") if is_list else read
        for key in reversed(keys):
            nested = {key: nested}
        attributes = merge_tables(attributes, nested)
    return attributes


def merge_tables(before: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with tables of the same name merged, and anything else replaced.

    Example:
        >>> merge_tables({"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": 3})
        {'a': {'b': 1, 'd': 2}, 'c': 3}
    """
    tables = {name for name in added if all(isinstance(table.get(name), Mapping) for table in (before, added))}
    return {**before, **added, **{name: merge_tables(before[name], added[name]) for name in tables}}


def declaration_code(file: str, function: str, name: str, table: Mapping[str, Any]) -> str:
    """Return how to declare an attribute of a function: the line below it, or the option if it is a library's.

    Without a function it is a whole file's.
    """
    if file and ".py" not in file:
        return f"--declare {name}='{json.dumps(table)}'"
    python = str(dict(table)).replace("'", '"')  # of names, lists and numbers
    return f"{'' if function == 'module' else f'{function}.'}{name} = {python}"


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@dataclass(frozen=True)
class Target:
    """The place of an implementation: ``path`` of a file or a module's name, and what in it (empty: the module itself).

    ``pickled`` is a callable that was handed over as an object instead. ``signature`` names the family of functions
    that it is called like (``families.py``), if that was given. ``declared`` are attributes that were given for it,
    a table in JSON. ``program`` are the words of a command that is the
    implementation, in whatever language; ``module`` is its file then.

    If it ``is_blind``, it is called in a process that shows nothing of this package (``blind_calls.py``), with some
    ``added_variables`` in its environment; if it ``observes_delegation``, calls of other attention are observed there.
    """

    module: str
    attribute: str = ""
    pickled: bytes = b""
    signature: str = ""
    declared: str = "{}"
    program: tuple[str, ...] = ()
    is_blind: bool = False
    added_variables: tuple[tuple[str, str], ...] = ()
    observes_delegation: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that a blind process has besides the user's."""
        return dict(self.added_variables)

    @classmethod
    def parse(cls, text: str, signature: str = "", declare: Sequence[str] = ()) -> Target:
        """Read file.py, file.py:function, package.module, package.module:function, or a command.

        The name that reports give a function of a file in this folder, file.function, will do, too. Raises
        ``UsageError`` for any other text, and for a file that does not exist.
        """
        text, declared = _report_name_to_file(text), json.dumps(read_declarations(declare))
        if words := parse_program_command(text):
            if signature:
                raise UsageError(f"{text}: a program speaks the protocol; it has no --signature")
            return cls(str(program_source_file(words)), declared=declared, program=words)
        module, _, attribute = text.rpartition(":") if ":" in text else (text, "", "")
        if module.endswith(".py"):
            path = Path(module)
            if not path.is_file():
                raise UsageError(f"{text}: no file {module}; expected file.py:function or package.module:function")
            module = str(path.resolve())
        if not module:
            raise UsageError(f"{text}: expected file.py:function or package.module:function")
        return cls(module, attribute, signature=signature, declared=declared)

    @property
    def name(self) -> str:
        """Return the name of the module in reports."""
        return re.sub(r"\W", "_", Path(self.module).stem) if self.program else report_name(self.module)

    @property
    def function(self) -> str:
        """Return its name in reports after the dot."""
        return self.attribute.rpartition(".")[2] or ("program" if self.program else "module")

    @property
    def longer_names(self) -> tuple[list[str], list[str]]:
        """Return names of the module and of the function, the shortest first; each next one has one more part.

        The parts of a file are the folders above it, those of a function the classes around it, or the arguments of a
        program.
        """
        if self.program:
            above, around = Path(self.module).parent.parts, self.program[1:]
        else:
            above = _package_parts_and_folder(Path(self.module))[1].parts if self.module.endswith(".py") else ()
            around = tuple(self.attribute.split(".")[:-1])
        return _longer_names(self.name, above), _longer_names(self.function, around)


_DYNAMIC_NAMES = re.compile(r"import \*|__getattr__|setattr|globals|vars|exec|__dict__")
"""A file with one of these may have functions whose names are not in it."""


def check_function_exists(target: Target) -> None:
    """Raise ``UsageError`` if a file cannot have the function that is meant, as its text says: that takes no time.

    What its text leaves open is seen when it is loaded.
    """
    first = target.attribute.partition(".")[0]
    if not first or not target.module.endswith(".py") or target.program:
        return
    try:
        text = Path(target.module).read_text(encoding="utf-8")
        names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # it says so itself when it is loaded
    if not re.search(rf"\b{re.escape(first)}\b", text) and not _DYNAMIC_NAMES.search(text):
        raise UsageError(f"{target.module}:{target.attribute}: {missing_function_message(target, sorted(names))}")


def missing_function_message(target: Target, names: Iterable[str]) -> str:
    """Return a message: a module lacks a function; it has others with similar names."""
    public = [name for name in names if name[0] != "_"]
    near = f"; {suggest_names(target.attribute, public, one_of=False)}" if public else ""
    return f"{target.module} has no {target.attribute}{near}"


def _longer_names(name: str, parts: Sequence[str]) -> list[str]:
    """Return a name, then that name behind one part more each, from the last to the first."""
    words = [word for part in parts if (word := re.sub(r"\W+", "_", part).strip("_"))]
    last = re.sub(r"\W", "_", name)
    return [name, *("_".join([*words[-count:], last]) for count in range(1, len(words) + 1))]


def is_user_target(text: str) -> bool:
    """Return whether a text names an implementation of somebody's own: a file, a module, or a program."""
    file = _report_name_to_file(text)
    return ":" in file or file.endswith(".py") or bool(parse_program_command(text))


def _report_name_to_file(text: str) -> str:
    """Return file.py:function for file.function, as reports call it, if the file is in this folder."""
    file, _, function = text.partition(".")
    is_name = re.fullmatch(r"\w+\.\w+", text) and file not in ALL_ENTRIES and function != "py"
    if not is_name or not Path(f"{file}.py").is_file():
        return text
    return f"{file}.py" if function == "module" else f"{file}.py:{function}"


def parse_program_command(text: str) -> tuple[str, ...]:
    """Return the words of a command that is given as an implementation; none if the text names no program.

    A program is named by its path (``./attention``), or by a command with its arguments (``Rscript attention.R``).
    Raises ``UsageError`` for a path if no program is.
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
    program = shutil.which(words[0]) if len(words) > 1 else None
    return (program, *words[1:]) if program else ()


def program_source_file(words: Sequence[str]) -> Path:
    """Return the file that somebody wrote: a script that an interpreter is given, or the program itself."""
    scripts = (Path(word) for word in words[1:])
    return next((path.resolve() for path in scripts if path.is_file()), Path(words[0]))


def report_name(module: str) -> str:
    """Return the name of a module, or of a file, in reports before the dot.

    A file of a package is called as the module that it is.

    Example:
        >>> report_name("package.kernels.flash")
        'package_kernels_flash'
    """
    if not module.endswith(".py"):
        return module.replace(".", "_")
    path = Path(module)
    parts, _ = _package_parts_and_folder(path)
    return "_".join(parts) or path.stem


def _package_parts_and_folder(path: Path) -> tuple[list[str], Path]:
    """Return the names of a file and of the packages that it is in, the outermost first, and the folder above them."""
    parts = [] if path.stem == "__init__" else [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file() or not folder.name:
            return parts, folder
        parts.insert(0, folder.name)
    return parts, path.parent
