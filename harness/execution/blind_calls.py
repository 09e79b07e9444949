"""A user's function in a process that shows nothing of this package: no module, argument, variable or open file.

A worker of this package starts that process and calls the function in it, as it would call the function itself. The
process runs ``call_server.py`` under another name. Its parent is not the worker but the system's first process, so that
no process above it has this package in its command line. What remains to be seen is what other processes of the machine
do, and that a script calls the function.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution import call_server
from attncheck.execution.programs import WIRE_DTYPES, DetachedProcess, load_program
from attncheck.execution.signatures import CONTRACT_FUNCTIONS
from attncheck.execution.user_code import INSTALLED_FOLDERS, LoadError, Target
from attncheck.execution.worker import Observation
from attncheck.spec import DEFAULT_OPERATION

_SCRIPT_NAMES = ("main", "run", "app", "train", "serve", "generate", "worker", "model")
"""Names of the script that calls the function: it has another one each time."""
_KNOWN_ERRORS = {
    error.__name__: error for error in (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError)
}
"""Errors that are raised here as they were there; others become a ``RuntimeError``."""
_MAX_MEMORY_BYTES = 1 << 28
"""Bytes of the memory around an array that are sent with it."""


class BlindProcess:
    """The process that loads a target and calls its functions, in which nothing shows that they are tested."""

    def __init__(self, target: Target) -> None:
        script = Path(mkdtemp()) / f"{secrets.choice(_SCRIPT_NAMES)}.py"  # which removes itself and its folder
        script.write_text(Path(call_server.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        words = [sys.executable, str(script)]
        self._process = DetachedProcess(words, target.variables)
        self.observations: list[Observation] = []

    def request(self, kind: str, **fields: Any) -> tuple[Mapping[str, Any], list[NDArray[Any]]]:
        """Send a request; return the header of the answer, and its arrays. If the process ends, this one ends, too."""
        message = pickle.dumps({"kind": kind, **fields}, pickle.HIGHEST_PROTOCOL)
        with suppress(BrokenPipeError):
            self._process.stdin.write(len(message).to_bytes(8, "big") + message)
            self._process.stdin.flush()
        source = self._process.stdout
        size = int.from_bytes(_read(source, 8), "big")
        header = json.loads(_read(source, size))
        arrays = []
        for _, dtype, shape in header.get("arrays", ()):
            dtype_here = WIRE_DTYPES[dtype] if dtype in WIRE_DTYPES else np.dtype(dtype)
            data = _read(source, math.prod(shape) * dtype_here.itemsize)
            arrays.append(np.frombuffer(data, dtype_here).reshape(shape))
        return header, arrays

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def _read(source: IO[bytes], size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        os._exit(1)  # the function ended its process: this one ends as if it had been here
    return data


class BlindFunction:
    """A function in another process; results are arrays of NumPy, whatever its framework is."""

    returns_new_arrays = True
    """An answer is read from a pipe: no later call can change it. The other process looks at its own results."""

    def __init__(self, process: BlindProcess, name: str, parameters: Sequence[Any] | None, observes: bool) -> None:
        self._process, self._name, self._observes = process, name, observes
        self.__name__ = name or DEFAULT_OPERATION
        if parameters is not None:
            self.__signature__ = inspect.Signature(
                [
                    inspect.Parameter(
                        parameter,
                        inspect._ParameterKind(kind),
                        default=None if has_default else inspect.Parameter.empty,
                    )
                    for parameter, kind, has_default in parameters
                ]
            )

    def names_by_position(self, count: int) -> list[str]:
        """Return the names of the first parameters, or numbers for those that the function does not name."""
        names = list(getattr(self, "__signature__", inspect.Signature()).parameters)[:count]
        return [*names, *map(str, range(len(names), count))]

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Call the function; raise what it raises, if that is an error of Python's own, or else ``RuntimeError``."""
        memories: dict[int, tuple[NDArray[Any], int, bytes]] = {}
        header, arrays = self._process.request(
            "call",
            name=self._name,
            positional={
                name: _place_array(value, memories)
                for name, value in zip(self.names_by_position(len(positional)), positional, strict=True)
            },
            keywords={name: _place_array(value, memories) for name, value in keywords.items()},
            memories=[content for *_, content in memories.values()],
            observes=self._observes,
        )
        self._process.observations += [Observation(*note) for note in header["notes"]]
        self._process.observations += [Observation("delegates", name) for name in header.get("delegates", ())]
        if "error" in header:
            name, message = header["error"], header["message"]
            raise _KNOWN_ERRORS[name](message) if name in _KNOWN_ERRORS else RuntimeError(f"{name}: {message}")
        parts = {name: array for (name, _, _), array in zip(header["arrays"], arrays, strict=True)}
        if header["kind"] == "tuple":
            return tuple(parts.values())
        return parts if header["kind"] == "dict" else next(iter(parts.values()))


def _place_array(value: Any, memories: dict[int, tuple[NDArray[Any], int, bytes]]) -> Any:
    """Return where an array lies in one of the memories, which is added if it is new; other values as they are."""
    if not isinstance(value, np.ndarray):
        return value
    root = value
    while isinstance(root.base, np.ndarray):
        root = root.base
    is_whole = root.flags.c_contiguous or root.flags.f_contiguous
    if not value.size or not is_whole or root.nbytes > _MAX_MEMORY_BYTES or root.dtype != value.dtype:
        root = value = np.ascontiguousarray(value)
    if id(root) not in memories:
        # The array is kept, as another one could get its id, and its bytes in the order in which they lie.
        memories[id(root)] = root, len(memories), root.tobytes(order="A")
    offset = call_server.address_of(value) - call_server.address_of(root)
    strides = value.strides if value.size else np.empty(value.shape, value.dtype).strides
    return ("array", memories[id(root)][1], str(value.dtype), value.shape, strides, offset if value.size else 0)


class BlindArrays:
    """NumPy in place of the framework: the other process converts arrays, and prepares the framework."""

    def __init__(self, process: BlindProcess) -> None:
        self._process = process

    def prepare(self, dtype: str, threads: int) -> None:
        """Prepare the framework in the other process."""
        header, _ = self._process.request("prepare", dtype=dtype, threads=threads)
        if "failed" in header:
            raise RuntimeError(header["failed"])

    def describe(self) -> dict[str, str]:
        """Return nothing: the framework's version is that of every other process."""
        return {}

    def from_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return array

    to_numpy = from_numpy


def load_blind(target: Target, framework: str, device: str) -> tuple[Any, BlindArrays | None, BlindProcess | None]:
    """Load a target in a blind process; return an object with its functions, how arrays convert, and the process.

    A program is such a process itself. Raises ``LoadError``.
    """
    if target.program:
        return load_program(target.program, target.variables), None, None
    # Python imports from the folders of a script beside the user's file, but not from this package's.
    folder = Path(target.module).parent if target.module.endswith(".py") else Path.cwd()
    root = Path(call_server.__file__).resolve().parents[2]
    is_installed = bool({*INSTALLED_FOLDERS} & {*root.parts})
    others = [path for path in sys.path if path and (is_installed or Path(path).resolve() != root)]
    process = BlindProcess(target)
    header, _ = process.request(
        "load",
        module=target.module,
        attribute=target.attribute,
        pickled=target.pickled,
        framework=framework,
        device=device,
        folders=[str(folder), *others],
        names=CONTRACT_FUNCTIONS,
    )
    if "failed" in header:
        process.kill()
        raise LoadError(header["failed"])
    functions = {
        name: BlindFunction(process, name, parameters, target.observes_delegation)
        for name, parameters in header["loaded"].items()
    }
    declared = json.loads(target.declared)
    for name, function in functions.items():
        for attribute, value in declared.items():
            setattr(function, attribute, value)
        if name == "":
            for other in functions:
                if other:
                    setattr(function, other, functions[other])
    return functions.get("") or SimpleNamespace(**functions), BlindArrays(process), process
