"""Rules of the protocol of programs, each tried on a program. Numbers are not judged here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.programs import WIRE, Description, Program, ProtocolError, Refused
from attncheck.spec import QUERY_KEY_VALUE

Answer = Mapping[str, NDArray[Any]] | Refused
Found = TypeVar("Found")
_OPTIONS: Mapping[str, Any] = {"is_causal": True, "scale": 0.5, "softcap": 2.0, "window": [1, 0]}
_LARGE = 2048
"""Keys and values of 64 numbers: more than any pipe holds."""


@dataclass(frozen=True)
class Rule:
    """A rule that was tried, and what is ``wrong``; nothing where it holds, or was not tried for the ``reason``."""

    says: str
    wrong: str = ""
    reason: str = ""


class _Ended(Exception):
    """The program ended, or took too long, in place of an answer."""


def try_rules(words: tuple[str, ...], seconds: float = 10.0) -> Iterator[Rule]:
    """Try a program, rule by rule; each answer may take so many ``seconds``."""
    asked = _AskedProgram(Program(words), seconds)
    try:
        yield from _rules(asked)
    finally:
        asked.program.close()


def _rules(asked: _AskedProgram) -> Iterator[Rule]:
    says = "it starts, and answers what it is"
    try:
        said = asked.describe()
    except (_Ended, ProtocolError, OSError) as error:
        yield Rule(says, str(error))
        return
    yield Rule(says)
    yield _tried(
        "it says the same when it is asked again", lambda: asked.describe() == said or "it said something else"
    )
    if "attention" not in said.functions:
        yield Rule("calls of attention are answered", reason="it has no function attention; others are not tried here")
    else:
        for says, arrays, options in _calls(said):
            yield _tried(says, lambda arrays=arrays, options=options: _answered(asked, arrays, options))  # type: ignore[misc]
    yield _tried("an unknown function is refused, and the program goes on", lambda: _refuses(asked, said))
    yield _tried("it ends when its input ends", asked.end)


def _tried(says: str, rule: Callable[[], bool | str]) -> Rule:
    try:
        found = rule()
    except (_Ended, ProtocolError, OSError) as error:
        return Rule(says, str(error))
    return Rule(says, "" if found is True else str(found))


def _calls(said: Description) -> Iterator[tuple[str, dict[str, NDArray[Any]], dict[str, Any]]]:
    """Give calls of attention: every dtype, every keyword that is known here, axes of length 0 and 1, a large one."""
    first = said.dtypes[0]
    for dtype in said.dtypes:
        yield f"{dtype}: arrays of {WIRE[dtype].itemsize} bytes a number", _arrays(dtype), {}
    taken = said.functions["attention"]
    for name in (each for each in taken if each in _OPTIONS):
        yield f"the option {name}", _arrays(first), {name: _OPTIONS[name]}
    shape = (1, 2, 3, 5)
    inputs = {"mask": np.ones(shape, bool), "bias": np.zeros(shape, WIRE[first]), "key_lengths": np.array([4])}
    for name in (each for each in taken if each in inputs):
        yield f"the array {name}", {**_arrays(first), name: inputs[name]}, {}
    yield "axes of length 1", _arrays(first, heads=1, queries=1, keys=1, width=1), {}
    yield "no query", _arrays(first, queries=0), {}
    large = _arrays(first, heads=1, queries=2, keys=_LARGE, width=64)
    yield f"a request of {sum(array.nbytes for array in large.values()):,} bytes", large, {}


def _arrays(dtype: str, *, heads: int = 2, queries: int = 3, keys: int = 5, width: int = 4) -> dict[str, NDArray[Any]]:
    draw = np.random.RandomState(1).standard_normal
    lengths = ((name, queries if name == "query" else keys) for name in QUERY_KEY_VALUE)
    return {name: draw((1, heads, length, width)).astype(WIRE[dtype]) for name, length in lengths}


def _answered(asked: _AskedProgram, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> bool | str:
    """Check that a call of attention is answered with an output of the right shape and dtype."""
    answer = asked.call("attention", arrays, options)
    if isinstance(answer, Refused):
        return True if answer.kind == "unsupported" else f"it answered an error: {answer.reason}"
    if "output" not in answer:
        return f'expected a stage "output"; got {", ".join(answer)}'
    query, value = arrays["query"], arrays["value"]
    output, shape = answer["output"], (*query.shape[:3], value.shape[3])
    if output.shape != shape:
        return f"output: expected shape {list(shape)}; got {list(output.shape)}"
    return True if output.dtype == query.dtype else f"output: expected {query.dtype}, as the query; got {output.dtype}"


def _refuses(asked: _AskedProgram, said: Description) -> bool | str:
    answer = asked.call("no_function_of_this_name", _arrays(said.dtypes[0]), {})
    if not isinstance(answer, Refused):
        return 'expected "unsupported" or "error"; it answered with stages'
    return asked.describe() == said or "it said something else afterwards"


@dataclass(frozen=True)
class _AskedProgram:
    """A program that is stopped where an answer takes too long."""

    program: Program
    seconds: float

    def describe(self) -> Description:
        return self._within(self.program.describe)

    def call(self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> Answer:
        return self._within(lambda: self.program.ask_for(function, arrays, options))

    def _within(self, ask: Callable[[], Found]) -> Found:
        """Ask. Raises ``_Ended`` where the program ends, or is stopped because it takes too long."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.program.kill()

        timer = threading.Timer(self.seconds, stop)
        timer.start()
        try:
            return ask()
        except (EOFError, ProtocolError) as error:
            if late.is_set():
                raise _Ended(f"no answer after {self.seconds:g} s") from None
            if isinstance(error, ProtocolError):
                raise
            raise _Ended(f"it ended in place of an answer, {self.program.how_it_ended()}") from None
        finally:
            timer.cancel()

    def end(self) -> bool | str:
        code = self.program.end_input(self.seconds)
        if code is None:
            return f"it still runs {self.seconds:g} s later"
        return code == 0 or f"it ended with exit code {code}; expected 0"
