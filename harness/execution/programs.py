"""A user's program, in any language, as an implementation: the worker runs it and calls it by the protocol.

A message is a line of JSON and, right behind it, the arrays that the line lists: their elements in C order, little
endian, without gaps. There is one request and one answer, over the program's standard streams; ``docs/protocol.md`` is
the whole of it for authors. What a program declares becomes what a module in Python has: functions with these keywords,
and attributes. The rules of the protocol can be tried on a program one by one; numbers are not judged by them.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import IO, Any, TypeVar

import ml_dtypes
import numpy as np
import psutil
from numpy.typing import NDArray

from attncheck.execution.signatures import CONTRACT_FUNCTIONS, INPUTS_BY_FUNCTION, contract_keywords
from attncheck.execution.user_code import LoadError, without_traces
from attncheck.spec import DTYPES, QUERY_KEY_VALUE

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 2**16
"""Bytes of a line. Whoever sends no line end sends no message."""
MAX_ARRAY_BYTES = 2**31
"""Bytes of one array of an answer."""
_STDERR_ADVICE = "write debugging output to standard error"
WIRE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "bool": np.dtype("?"),
}
"""The types of elements; a bool is one byte, 0 or 1."""


class ProtocolError(Exception):
    """A program's message does not follow the protocol; the text says what was expected."""


@dataclass(frozen=True)
class ProgramDescription:
    """The description that a program gives of itself.

    ``functions`` are those of the contract that it has, each with the keywords that it takes. ``name`` and ``version``
    are what reports say of it. All else is what a function in Python declares as its attributes.
    """

    functions: Mapping[str, tuple[str, ...]]
    name: str = ""
    version: str = ""
    dtypes: tuple[str, ...] = ("float64", "float32")
    classes: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    grouped_heads: bool = True
    value_width: bool = True


@dataclass(frozen=True)
class Refusal:
    """An answer without stages: what is ``unsupported``, or an ``error``."""

    kind: str
    reason: str


def encode_describe_request() -> bytes:
    r"""Return the first request: what the program is.

    Example:
        >>> encode_describe_request()
        b'{"attncheck":1,"ask":"describe"}\n'
    """
    return _encode_header({"attncheck": PROTOCOL_VERSION, "ask": "describe"})


def encode_call_request(
    function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
) -> Iterator[bytes]:
    """Give the pieces of a request to call a function of the contract.

    Raises ``NotImplementedError`` for an option that JSON cannot say.
    """
    listed = [{"name": name, "dtype": str(array.dtype), "shape": list(array.shape)} for name, array in arrays.items()]
    header = {
        "attncheck": PROTOCOL_VERSION,
        "ask": "call",
        "function": function,
        "options": dict(options),
        "arrays": listed,
    }
    try:
        yield _encode_header(header)
    except (TypeError, ValueError) as error:
        raise NotImplementedError(f"its request cannot be written as JSON: {error}") from None
    for array in arrays.values():
        yield np.ascontiguousarray(array, WIRE_DTYPES[str(array.dtype)]).tobytes()


def _encode_header(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_header(stream: IO[bytes]) -> dict[str, Any]:
    """Read the line of an answer. Raises ``EOFError`` if there is none, ``ProtocolError`` if it is no object."""
    line = stream.readline(MAX_HEADER_BYTES + 1)
    if not line:
        raise EOFError
    if not line.endswith(b"\n"):
        what = (
            f"no line end in its first {MAX_HEADER_BYTES} bytes"
            if len(line) > MAX_HEADER_BYTES
            else "an end before the line's"
        )
        raise ProtocolError(f"expected a line of JSON; got {what}: {_shorten(line)}")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"expected a line of JSON; got {_shorten(line)}: {error}; {_STDERR_ADVICE}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"expected a JSON object; got {_shorten(line)}")
    return header


def _shorten(line: bytes) -> str:
    return repr(line[:80]) + ("..." if len(line) > 80 else "")


def read_description(stream: IO[bytes]) -> ProgramDescription:
    """Read the answer to the first request. Raises ``EOFError`` or ``ProtocolError``."""
    header = read_header(stream)
    if header.pop("attncheck", None) != PROTOCOL_VERSION:
        raise ProtocolError(f'describe: expected "attncheck": {PROTOCOL_VERSION}, the version of the protocol')
    functions = _check_functions(header.pop("functions", None))
    said: dict[str, Any] = {name: header.pop(name) for name in _TYPE_OF_FIELD if name in header}
    for name, value in said.items():
        if not isinstance(value, _TYPE_OF_FIELD[name]):
            raise ProtocolError(f"describe: {name}: expected {_WORDS_OF_TYPE[_TYPE_OF_FIELD[name]]}; got {value!r}")
    said |= {"dtypes": tuple(said["dtypes"])} if "dtypes" in said else {}
    if unknown := [dtype for dtype in said.get("dtypes", ()) if dtype not in DTYPES]:
        raise ProtocolError(f"describe: unknown dtype {unknown[0]!r}; expected {', '.join(DTYPES)}")
    if header:
        raise ProtocolError(f"describe: unknown field {next(iter(header))!r}")
    return ProgramDescription(functions, **said)


_TYPE_OF_FIELD: Mapping[str, type] = {
    **{"dtypes": list, "name": str, "version": str, "classes": dict, "conventions": dict, "requires": dict},
    **{"grouped_heads": bool, "value_width": bool},
}
_WORDS_OF_TYPE = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def _check_functions(listed: Any) -> dict[str, tuple[str, ...]]:
    are_lists = isinstance(listed, dict) and all(isinstance(keywords, list) for keywords in listed.values())
    if not listed or not are_lists or any(not isinstance(word, str) for words in listed.values() for word in words):
        raise ProtocolError('describe: expected "functions", such as {"attention": ["mask", "is_causal", "scale"]}')
    return {name: tuple(keywords) for name, keywords in listed.items()}


def read_stages_or_refusal(stream: IO[bytes]) -> dict[str, NDArray[Any]] | Refusal:
    """Read the answer to a call: its stages, or why there are none. Raises ``EOFError`` or ``ProtocolError``."""
    header = read_header(stream)
    for kind in ("unsupported", "error"):
        if isinstance(reason := header.get(kind), str):
            return Refusal(kind, reason)
    listed = header.get("stages")
    if not isinstance(listed, list) or not listed:
        expected = '"stages", a list with an entry for each array, "unsupported" or "error"'
        raise ProtocolError(f"expected {expected}; got {', '.join(map(repr, header)) or 'an empty object'}")
    stages = [_check_stage_header(entry) for entry in listed]
    names = [name for name, _, _ in stages]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ProtocolError(f"stage {repeated[0]} is there twice")
    return {name: _read_array(stream, name, dtype, shape) for name, dtype, shape in stages}


def _check_stage_header(listed: Any) -> tuple[str, np.dtype[Any], Sequence[int]]:
    """Check an entry of an answer's list."""
    if not isinstance(listed, dict) or not isinstance(listed.get("name"), str):
        raise ProtocolError(f'a stage has "name", "dtype" and "shape"; got {listed!r}')
    name, dtype, shape = listed["name"], str(listed.get("dtype")), listed.get("shape")
    if dtype not in WIRE_DTYPES:
        raise ProtocolError(f"stage {name}: unknown dtype {dtype!r}; expected {', '.join(WIRE_DTYPES)}")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ProtocolError(f"stage {name}: shape: expected a list of lengths; got {shape!r}")
    if math.prod(shape) * WIRE_DTYPES[dtype].itemsize > MAX_ARRAY_BYTES:
        raise ProtocolError(f"stage {name}: shape {shape} is larger than {MAX_ARRAY_BYTES:,} bytes")
    return name, WIRE_DTYPES[dtype], shape


def _read_array(stream: IO[bytes], name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    data = stream.read(size)
    if len(data) < size:
        got = f"{len(data):,}, and the end"
        raise ProtocolError(f"stage {name}: expected {size:,} bytes for shape {list(shape)}; got {got}")
    if dtype.kind != "b":
        return np.frombuffer(data, dtype).reshape(shape)
    array = np.frombuffer(data, np.uint8).reshape(shape)
    if (array > 1).any():
        raise ProtocolError(f"stage {name}: a bool is a byte of 0 or 1; got {array.max()}")
    return array.astype(bool)


_DETACH = 'exec 3<&0; place=$1; shift; "$@" <&3 3<&- & echo $! > "$place"'
"""Shell script that starts a program with this shell's input and output, and ends: the program loses its parent."""


class DetachedProcess:
    """A process whose parent is the system's first process, so that no process above it tells who started it.

    Its environment has the ``variables`` and the user's, without those of tests.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        with TemporaryDirectory() as folder:
            pid_file = Path(folder) / "number"
            environment = {**without_traces(os.environ), **variables}
            is_posix = os.name == "posix"
            starting = ["/bin/sh", "-c", _DETACH, "sh", str(pid_file), *words] if is_posix else words
            process = subprocess.Popen(starting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            if is_posix:
                process.wait()
            self.pid = int(pid_file.read_text()) if is_posix else process.pid
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        self.stdin, self.stdout = process.stdin, process.stdout

    def poll(self) -> int | None:
        """Return None while it runs, and -1 after that: nobody can know its exit code."""
        with suppress(psutil.Error):
            return None if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE else -1
        return -1

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, for at most so many seconds: nobody may collect the ended process."""
        end = monotonic() + (_MAX_SECONDS_TO_END if timeout is None else timeout)
        while self.poll() is None and monotonic() < end:
            sleep(0.01)
        return 1

    def kill(self) -> None:
        """End it."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


# A choice: the process was killed before; a longer wait only delays the run if the kernel cannot end it.
_MAX_SECONDS_TO_END = 1.0
Read = TypeVar("Read")


class ProgramProcess:
    """A program that runs, or is started when it is asked."""

    def __init__(self, words: tuple[str, ...], detached_with: Mapping[str, str] | None = None) -> None:
        """``detached_with`` are variables of a program that shows nothing of this package, and has no parent in it."""
        self.words = words
        self._detached_with = detached_with
        self._process: subprocess.Popen[bytes] | DetachedProcess | None = None

    def describe(self) -> ProgramDescription:
        """Return its description. Raises ``ProtocolError``, and ``EOFError`` if it ends instead."""
        return self._exchange([encode_describe_request()], read_description)

    def call(
        self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]] | Refusal:
        """Call a function. If the program ends, the worker ends, too, as if a function had crashed."""
        try:
            return self.call_or_raise(function, arrays, options)
        except EOFError:
            assert self._process is not None, "it was asked"
            code = self._process.wait()
            if code < 0:
                signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code or 1)

    def call_or_raise(
        self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]] | Refusal:
        """Call a function. Raises ``ProtocolError``, and ``EOFError`` if it ends instead."""
        return self._exchange(encode_call_request(function, arrays, options), read_stages_or_refusal)

    def _exchange(self, request: Iterable[bytes], read: Callable[[IO[bytes]], Read]) -> Read:
        pieces = list(request)
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        process = self._running_process()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        # It may answer before it has read everything: neither waits for the other.
        writer = threading.Thread(target=_write_pieces, args=(process.stdin, pieces), name="attncheck writes")
        writer.start()
        try:
            return read(process.stdout)
        except ProtocolError:
            self.close()  # the start of its next answer is unknown
            raise
        finally:
            writer.join()

    def _running_process(self) -> subprocess.Popen[bytes] | DetachedProcess:
        """Return its process; start one if it has none."""
        if self._process is None:
            if self._detached_with is not None:
                self._process = DetachedProcess(self.words, self._detached_with)
            else:
                variables = without_traces(os.environ)
                self._process = subprocess.Popen(
                    self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
                )
        return self._process

    def kill(self) -> None:
        """End it; whoever waits for an answer finds its end."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()

    def describe_end(self) -> str:
        """Return how it ended, once it has."""
        code = 0 if self._process is None else self._process.wait()
        return f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"

    def close_input(self, seconds: float) -> int | None:
        """Close its input and return the code that it ends with; None if it does not within so many seconds.

        If it was ended because its last answer was invalid, it is started again for this.
        """
        process = self._running_process()
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
            process.wait(_MAX_SECONDS_TO_END)


def _write_pieces(stream: IO[bytes], pieces: Iterable[bytes]) -> None:
    with suppress(OSError):  # it has ended; its answer, or the lack of one, shows that
        for piece in pieces:
            stream.write(piece)
        stream.flush()


class ProgramFunction:
    """One function of a program, called as the contract says on NumPy's arrays."""

    returns_new_arrays = True
    """An answer is read from a pipe: no later call can change it."""

    def __init__(
        self, program: ProgramProcess, name: str, keywords: Iterable[str], capabilities: Mapping[str, Any]
    ) -> None:
        self._program = program
        self.__name__ = name
        self.capabilities = capabilities
        positional = [inspect.Parameter(key, inspect.Parameter.POSITIONAL_ONLY) for key in INPUTS_BY_FUNCTION[name]]
        optional = [inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None) for keyword in keywords]
        self.__signature__ = inspect.Signature([*positional, *optional])

    def __call__(self, *positional: Any, **keywords: Any) -> dict[str, NDArray[Any]]:
        """Call the program. Raises ``NotImplementedError`` for what it does not support."""
        named = dict(zip(INPUTS_BY_FUNCTION[self.__name__], positional, strict=True))
        arrays = {name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}
        options = {name: value for name, value in keywords.items() if name not in arrays and value is not None}
        answer = self._program.call(self.__name__, {**named, **arrays}, options)
        if isinstance(answer, Refusal):
            raise (NotImplementedError if answer.kind == "unsupported" else RuntimeError)(answer.reason)
        return answer


class ProgramModule:
    """All functions of a program, and what it declares, as a module in Python has them."""

    def __init__(self, program: ProgramProcess, description: ProgramDescription) -> None:
        self.program = program
        self.distributions = (
            {description.name or Path(program.words[0]).stem: description.version} if description.version else {}
        )
        self.classes, self.conventions = dict(description.classes), dict(description.conventions)
        self.requires = dict(description.requires) or None
        is_able = {"grouped_heads": description.grouped_heads, "value_width": description.value_width}
        self.capabilities = {"dtypes": list(description.dtypes), **is_able}
        for name, keywords in description.functions.items():
            setattr(self, name, ProgramFunction(program, name, keywords, self.capabilities))

    @property
    def __name__(self) -> str:
        """Return its name in messages."""
        return Path(self.program.words[0]).name


def load_program(words: tuple[str, ...], detached_with: Mapping[str, str] | None = None) -> ProgramModule:
    """Start a program and ask what it is. Raises ``LoadError`` if it does not answer as the protocol says."""
    program = ProgramProcess(words, detached_with)
    try:
        said = program.describe()
    except OSError as error:
        raise LoadError(f"cannot be started: {error}") from None
    except EOFError:
        raise LoadError(f"ended without an answer to {encode_describe_request().decode().strip()}") from None
    except ProtocolError as error:
        raise LoadError(f"does not speak the protocol (docs/protocol.md): {error}") from None
    for name, keywords in said.functions.items():
        if name not in CONTRACT_FUNCTIONS:
            raise LoadError(f"unknown function {name!r}; expected {', '.join(CONTRACT_FUNCTIONS)}")
        if unknown := [keyword for keyword in keywords if keyword not in contract_keywords(name)]:
            raise LoadError(f"{name} has no keyword {unknown[0]!r}; expected {', '.join(contract_keywords(name))}")
    return ProgramModule(program, said)


StagesOrRefusal = Mapping[str, NDArray[Any]] | Refusal
_TRIED_OPTIONS: Mapping[str, Any] = {"is_causal": True, "scale": 0.5, "softcap": 2.0, "window": [1, 0]}
_MANY_KEYS = 2048
"""Keys and values of 64 numbers: more than any pipe holds."""


@dataclass(frozen=True)
class RuleResult:
    """A rule, and the ``problem``: empty if the program follows it, or if it was not tried for the ``skip_reason``."""

    rule: str
    problem: str = ""
    skip_reason: str = ""


class _ProgramEnded(Exception):
    """The program ended, or took too long, in place of an answer."""


def try_protocol_rules(words: tuple[str, ...], seconds: float = 10.0) -> Iterator[RuleResult]:
    """Try the rules of the protocol on a program; each answer may take so many ``seconds``."""
    asked = _TimedProgram(ProgramProcess(words), seconds)
    try:
        yield from _try_rules(asked)
    finally:
        asked.program.close()


def _try_rules(program: _TimedProgram) -> Iterator[RuleResult]:
    says = "it starts, and answers what it is"
    try:
        said = program.describe()
    except (_ProgramEnded, ProtocolError, OSError) as error:
        yield RuleResult(says, str(error))
        return
    yield RuleResult(says)
    yield _try_rule(
        "it says the same when it is asked again", lambda: program.describe() == said or "it said something else"
    )
    if "attention" not in said.functions:
        yield RuleResult(
            "calls of attention are answered", skip_reason="it has no function attention; others are not tried here"
        )
    else:
        for says, arrays, options in _attention_calls(said):
            yield _try_rule(says, partial(_check_attention_answer, program, arrays, options))
    refused = "an unknown function is refused, and the program goes on"
    yield _try_rule(refused, partial(_check_unknown_function, program, said))
    yield _try_rule("it ends when its input ends", program.check_exit)


def _try_rule(rule_text: str, rule: Callable[[], bool | str]) -> RuleResult:
    try:
        result = rule()
    except (_ProgramEnded, ProtocolError, OSError) as error:
        return RuleResult(rule_text, str(error))
    return RuleResult(rule_text, "" if result is True else str(result))


def _attention_calls(description: ProgramDescription) -> Iterator[tuple[str, dict[str, NDArray[Any]], dict[str, Any]]]:
    """Give calls of attention: every dtype, every keyword that is known here, axes of length 0 and 1, a large one."""
    first = description.dtypes[0]
    for dtype in description.dtypes:
        yield f"{dtype}: arrays of {WIRE_DTYPES[dtype].itemsize} bytes a number", _random_query_key_value(dtype), {}
    taken = description.functions["attention"]
    for name in (keyword for keyword in taken if keyword in _TRIED_OPTIONS):
        yield f"the option {name}", _random_query_key_value(first), {name: _TRIED_OPTIONS[name]}
    shape = (1, 2, 3, 5)
    inputs = {"mask": np.ones(shape, bool), "bias": np.zeros(shape, WIRE_DTYPES[first]), "key_lengths": np.array([4])}
    for name in (keyword for keyword in taken if keyword in inputs):
        yield f"the array {name}", {**_random_query_key_value(first), name: inputs[name]}, {}
    yield "axes of length 1", _random_query_key_value(first, heads=1, queries=1, keys=1, width=1), {}
    yield "no query", _random_query_key_value(first, queries=0), {}
    large = _random_query_key_value(first, heads=1, queries=2, keys=_MANY_KEYS, width=64)
    yield f"a request of {sum(array.nbytes for array in large.values()):,} bytes", large, {}


def _random_query_key_value(
    dtype: str, *, heads: int = 2, queries: int = 3, keys: int = 5, width: int = 4
) -> dict[str, NDArray[Any]]:
    draw = np.random.RandomState(1).standard_normal
    lengths = ((name, queries if name == "query" else keys) for name in QUERY_KEY_VALUE)
    return {name: draw((1, heads, length, width)).astype(WIRE_DTYPES[dtype]) for name, length in lengths}


def _check_attention_answer(
    program: _TimedProgram, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]
) -> bool | str:
    """Check that a call of attention is answered with an output of the right shape and dtype."""
    answer = program.call("attention", arrays, options)
    if isinstance(answer, Refusal):
        return True if answer.kind == "unsupported" else f"it answered an error: {answer.reason}"
    if "output" not in answer:
        return f'expected a stage "output"; got {", ".join(answer)}'
    query, value = arrays["query"], arrays["value"]
    output, shape = answer["output"], (*query.shape[:3], value.shape[3])
    if output.shape != shape:
        return f"output: expected shape {list(shape)}; got {list(output.shape)}"
    return True if output.dtype == query.dtype else f"output: expected {query.dtype}, as the query; got {output.dtype}"


def _check_unknown_function(program: _TimedProgram, description: ProgramDescription) -> bool | str:
    answer = program.call("no_function_of_this_name", _random_query_key_value(description.dtypes[0]), {})
    if not isinstance(answer, Refusal):
        return 'expected "unsupported" or "error"; it answered with stages'
    return program.describe() == description or "it said something else afterwards"


@dataclass(frozen=True)
class _TimedProgram:
    """A program that is stopped if an answer takes too long."""

    program: ProgramProcess
    seconds: float

    def describe(self) -> ProgramDescription:
        return self._with_timeout(self.program.describe)

    def call(self, function: str, arrays: Mapping[str, NDArray[Any]], options: Mapping[str, Any]) -> StagesOrRefusal:
        return self._with_timeout(lambda: self.program.call_or_raise(function, arrays, options))

    def _with_timeout(self, request: Callable[[], Read]) -> Read:
        """Call ``request``. Raises ``_ProgramEnded`` if the program ends, or is stopped because it takes too long."""
        late = threading.Event()

        def stop_program() -> None:
            late.set()
            self.program.kill()

        timer = threading.Timer(self.seconds, stop_program)
        timer.start()
        try:
            return request()
        except (EOFError, ProtocolError) as error:
            if late.is_set():
                raise _ProgramEnded(f"no answer after {self.seconds:g} s") from None
            if isinstance(error, ProtocolError):
                raise
            raise _ProgramEnded(f"it ended in place of an answer, {self.program.describe_end()}") from None
        finally:
            timer.cancel()

    def check_exit(self) -> bool | str:
        code = self.program.close_input(self.seconds)
        if code is None:
            return f"it still runs {self.seconds:g} s later"
        return code == 0 or f"it ended with exit code {code}; expected 0"
