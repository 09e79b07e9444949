"""A program of somebody's own, in any language, as an implementation: run by the worker, asked as the protocol says.

What it declares becomes what a module in Python has: functions with these keywords, and attributes.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.protocol import (
    Description,
    ProtocolError,
    Refused,
    call_request,
    describe_request,
    read_answer,
    read_description,
)
from attncheck.execution.signatures import FUNCTIONS, INPUTS, contract
from attncheck.execution.user_code import LoadError

_SECONDS_TO_END = 1.0
Found = TypeVar("Found")


class Program:
    """A program that runs, or is started when it is asked."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self) -> Description:
        """Ask what it is. Raises ``ProtocolError``, and ``EOFError`` where it ends instead."""
        return self._ask([describe_request()], read_description)

    def call(
        self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]] | Refused:
        """Ask for a call. A program that ends takes the worker with it, as a function that crashes does."""
        try:
            return self.ask_for(function, arrays, options)
        except EOFError:
            self._end_like_it()

    def ask_for(
        self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]] | Refused:
        """Ask for a call. Raises ``ProtocolError``, and ``EOFError`` where it ends instead."""
        return self._ask(call_request(function, arrays, options), read_answer)

    def _ask(self, request: Iterable[bytes], read: Callable[[IO[bytes]], Found]) -> Found:
        pieces = list(request)
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        process = self._started()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        # It may answer before it has read everything: neither waits for the other.
        writer = threading.Thread(target=_write, args=(process.stdin, pieces), name="attncheck writes")
        writer.start()
        try:
            return read(process.stdout)
        except ProtocolError:
            self.close()  # nobody knows where its next answer would begin
            raise
        finally:
            writer.join()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return its process, which is started where it has none."""
        if self._process is None:
            self._process = subprocess.Popen(self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _end_like_it(self) -> NoReturn:
        assert self._process is not None, "it was asked"
        code = self._process.wait()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code or 1)

    def kill(self) -> None:
        """End it; whoever waits for an answer finds its end."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()

    def how_it_ended(self) -> str:
        """Say how it ended, once it has."""
        code = 0 if self._process is None else self._process.wait()
        return f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"

    def end_input(self, seconds: float) -> int | None:
        """Close its input and return the code that it ends with; None where it does not within so many seconds.

        It is started for that where it was ended because its last answer was none.
        """
        process = self._started()
        assert process.stdin is not None, "a pipe"
        with suppress(OSError):
            process.stdin.close()
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End it, and forget it."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            process.wait(_SECONDS_TO_END)


def _write(stream: IO[bytes], pieces: Iterable[bytes]) -> None:
    with suppress(OSError):  # it has ended; its answer, or the lack of one, tells
        for piece in pieces:
            stream.write(piece)
        stream.flush()


class ProgramFunction:
    """One function of a program, called as the contract says on NumPy's arrays."""

    def __init__(self, program: Program, name: str, keywords: Iterable[str], capabilities: Mapping[str, Any]) -> None:
        self._program = program
        self.__name__ = name
        self.capabilities = capabilities
        positional = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_ONLY) for each in INPUTS[name]]
        optional = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in keywords]
        self.__signature__ = inspect.Signature([*positional, *optional])

    def __call__(self, *positional: Any, **keywords: Any) -> dict[str, NDArray[Any]]:
        """Ask the program. Raises ``NotImplementedError`` for what it does not support."""
        named = dict(zip(INPUTS[self.__name__], positional, strict=True))
        arrays = {name: each for name, each in keywords.items() if isinstance(each, np.ndarray)}
        options = {name: each for name, each in keywords.items() if name not in arrays and each is not None}
        answer = self._program.call(self.__name__, {**named, **arrays}, options)
        if not isinstance(answer, Refused):
            return answer
        if answer.kind == "unsupported":
            raise NotImplementedError(answer.reason)
        raise RuntimeError(answer.reason)


class ProgramFunctions:
    """All functions of a program, and what it declares, as a module in Python has them."""

    def __init__(self, program: Program, said: Description) -> None:
        self.program = program
        self.distributions = {said.name or Path(program.words[0]).stem: said.version} if said.version else {}
        self.classes, self.conventions = dict(said.classes), dict(said.conventions)
        self.requires = dict(said.requires) or None
        self.capabilities = {
            "dtypes": list(said.dtypes),
            "grouped_heads": said.grouped_heads,
            "value_width": said.value_width,
        }
        for name, keywords in said.functions.items():
            setattr(self, name, ProgramFunction(program, name, keywords, self.capabilities))

    @property
    def __name__(self) -> str:
        """What it is called in messages."""
        return Path(self.program.words[0]).name


def load_program(words: tuple[str, ...]) -> ProgramFunctions:
    """Start a program and ask what it is. Raises ``LoadError`` where it does not answer as the protocol says."""
    program = Program(words)
    try:
        said = program.describe()
    except OSError as error:
        raise LoadError(f"cannot be started: {error}") from None
    except EOFError:
        raise LoadError(f"ended without an answer to {describe_request().decode().strip()}") from None
    except ProtocolError as error:
        raise LoadError(f"does not speak the protocol (docs/protocol.md): {error}") from None
    for name, keywords in said.functions.items():
        if name not in FUNCTIONS:
            raise LoadError(f"unknown function {name!r}; expected {', '.join(FUNCTIONS)}")
        if unknown := [each for each in keywords if each not in contract(name)]:
            raise LoadError(f"{name} has no keyword {unknown[0]!r}; expected {', '.join(contract(name))}")
    return ProgramFunctions(program, said)
