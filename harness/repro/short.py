"""A short script: a case as a bug report has it, with NumPy and the library alone.

It has the arrays, the call as the library's users write it, and one element of what comes back with its exact value and
the largest error of rounding. Arrays are those that the function is given: padded to what it requires, and in the
layout of its family. What a family makes of a call is known from making it, with a function that only takes note.
A script is run before it is handed out.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from keyword import iskeyword
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends import BackendEntry, Library, Mode
from attncheck.backends.families import FAMILIES, Family
from attncheck.errors import UsageError
from attncheck.execution.call import START_SECONDS, CallTimeout, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.implementations import Implementation, UserImplementation
from attncheck.execution.operations import Parameters, Task, call_of
from attncheck.execution.padding import Padding
from attncheck.execution.signatures import INPUTS
from attncheck.execution.worker import THREAD_VARIABLES, redirect_output
from attncheck.judging.judge_stages import StageJudgement
from attncheck.processors import emulation_variables
from attncheck.reading.case import Case
from attncheck.repro.code import Expected, dtype_code, quoted, spelled
from attncheck.spec import CONVENTIONS, result_stages
from attncheck.verdicts import Verdict

Array = NDArray[Any]

MAX_LINES = 80
_MAX_NUMBERS = 64
_WIDTH = 116
_SECONDS = 120.0

_IMPORTS: Mapping[str, str] = {
    "numpy": "",
    "torch": "import torch",
    "tensorflow": "import tensorflow as tf",
    "jax": "import jax",
    "mlx": "import mlx.core as mx",
    "paddle": "import paddle",
    "tinygrad": "from tinygrad import Tensor",
}
_TO: Mapping[str, str] = {
    "numpy": "{array}",
    "torch": "torch.tensor({array})",
    "tensorflow": "tf.constant({array})",
    "jax": "jax.numpy.asarray({array})",
    "mlx": "mx.array({array}, {of_framework})",
    "paddle": "paddle.to_tensor({array})",
    "tinygrad": "Tensor({array})",
}
_TO_BFLOAT16: Mapping[str, str] = {
    "torch": "torch.tensor({array}.astype(np.float32)).bfloat16()",
    "mlx": "mx.array({array}.astype(np.float32)).astype(mx.bfloat16)",
    "paddle": 'paddle.to_tensor({array}.astype(np.float32)).astype("bfloat16")',
}
_FROM: Mapping[str, str] = {
    "numpy": "np.asarray({array})",
    "torch": "{array}.detach().cpu().double().numpy()",
    "tensorflow": "tf.cast({array}, tf.float64).numpy()",
    "jax": "np.asarray({array})",
    "mlx": "np.array({array}, np.float64)",
    "paddle": '{array}.astype("float64").numpy()',
    "tinygrad": "{array}.double().numpy()",
}
ARRAYS: Mapping[tuple[str, str], str] = {
    ("attncheck.backends.torch_sdpa", "LIBRARY"): "torch",
    ("attncheck.backends.torch_sdpa", "KERAS"): "torch",
    ("attncheck.backends.jax_jit", "LIBRARY"): "jax",
    ("attncheck.backends.jax_jit", "LIBRARY_JIT"): "jax",
    ("attncheck.backends.jax_jit", "KERAS"): "jax",
    ("attncheck.backends.library_arrays", "MLX"): "mlx",
    ("attncheck.backends.library_arrays", "PADDLE"): "paddle",
    ("attncheck.backends.library_arrays", "TINYGRAD"): "tinygrad",
}
"""The framework of the arrays that a library's row names."""
_COMPILED = frozenset({"LIBRARY_JIT"})


@dataclass(frozen=True, eq=False)
class UserCall:
    """A call as its users write it: what is given by position, and by name; arrays are NumPy's."""

    positional: Mapping[str, Any]
    named: Mapping[str, Any]


class _NoShortFormError(Exception):
    """A case takes more than a short script has."""


def _finds(text: str, told: str, *, is_number: bool, is_wrong: bool) -> bool:
    """Run a script; return whether it ends as the harness did."""
    with TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "report.py"
        path.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return False
    if not is_wrong:
        return done.returncode == 0
    if is_number:
        return done.returncode == 1 and "is WRONG" in done.stdout
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return done.returncode != 0 and bool(last) and last.partition(":")[0].rpartition(".")[2] in told


@dataclass(frozen=True)
class ShortScript:
    """One case on one implementation, of which ``padding`` is the call that is made."""

    case: Case
    implementation: Implementation
    padding: Padding
    dtype: str

    def text(self, judgements: Sequence[StageJudgement], expected: Mapping[str, Expected], told: str) -> str:
        """Return a script of at most ``MAX_LINES`` lines that finds what is ``told``; empty where it takes more."""
        is_plain = not (self.case.memory_layout or self.case.merged or self.mode.device)
        if not (is_plain and self.framework and self.function):
            return ""
        failing = [each for each in judgements if each.verdict.exit_code]
        try:
            judged = self.judged(failing or judgements[-1:])
            text = "\n".join([f'r"""{told}', '"""', *self.lines(judged, expected)]) + "\n"
        except _NoShortFormError:
            return ""
        is_wrong, fits = bool(failing) or not judgements, len(text.splitlines()) <= MAX_LINES
        return text if fits and _finds(text, told, is_number=judged is not None, is_wrong=is_wrong) else ""

    @property
    def entry(self) -> BackendEntry:
        """Its line in the table."""
        return self.implementation.entry

    @property
    def mode(self) -> Mode:
        """Its mode there."""
        return self.implementation.declared

    @property
    def family(self) -> Family | None:
        """The family that the function is called like, if any."""
        if isinstance(self.mode, Library):
            return self.mode.called_as
        signature = self.entry.signature if isinstance(self.entry, UserImplementation) else ""
        return FAMILIES[signature] if signature else None

    @property
    def framework(self) -> str:
        """The framework of the arrays; empty for one that no short script is written for."""
        if isinstance(self.entry, UserImplementation):
            return self.entry.framework if self.entry.framework in _TO else ""
        return ARRAYS.get((self.mode.module, self.mode.attribute or ""), "")

    @property
    def function(self) -> Sequence[str]:
        """The lines that import the function, as ``kernel``; none where it has no name in a module."""
        if isinstance(self.mode, Library):
            module, _, path = self.mode.call.partition(":")
            return () if module.startswith("attncheck.") else _imported(module, path, "")
        assert isinstance(self.entry, UserImplementation), "another mode has no framework here"
        target = self.entry.target
        if target.pickled or target.program or not target.attribute:
            return ()
        if not target.module.endswith(".py"):
            return (f"sys.path.insert(0, {str(Path.cwd())!r})", *_imported(target.module, target.attribute, ""))
        file = Path(target.module)
        found = f"sys.path.insert(0, {str(file.parent)!r})"
        if file.stem.isidentifier() and not iskeyword(file.stem) and file.stem not in sys.stdlib_module_names:
            return (found, *_imported(file.stem, target.attribute, ""))
        return (found, *_imported("", target.attribute, f"runpy.run_path({target.module!r})"))

    def judged(self, candidates: Sequence[StageJudgement]) -> StageJudgement | None:
        """Return the judgement that the script repeats: of a number, if there is one; None where nothing came back."""
        if not candidates:
            return None
        known = [each for each in candidates if each.stage == "output" or self.family is None]
        if not known or known[0].verdict is Verdict.DTYPE:
            raise _NoShortFormError
        return next((each for each in known if each.index is not None), known[0])

    def lines(self, judged: StageJudgement | None, expected: Mapping[str, Expected]) -> Iterator[str]:
        """Yield the script behind its docstring."""
        by_entry = self.family is not None and self.family.layout == "LHD"
        call = self.call(judged.index[0] if by_entry and judged is not None and judged.index else 0)
        arrays = {**call.positional, **call.named}
        arrays = {name: each for name, each in arrays.items() if isinstance(each, np.ndarray)}
        written = {name: _written(each) for name, each in arrays.items()}
        code = [*self.function, *self._call(call), *self._verdict(judged, expected)]
        text = "\n".join([*written.values(), *code])
        modules = ("base64", "os", "runpy", "sys", "zlib")
        yield from (f"import {each}" for each in modules if each == "os" or f"{each}." in text)
        yield from ["from types import SimpleNamespace"] * ("SimpleNamespace(" in text)
        yield ""
        yield from environment_lines(self.mode.environment, _WIDTH)
        yield "import numpy as np"
        yield from ["import ml_dtypes  # NumPy has no bfloat16"] * (self.dtype == "bfloat16")
        yield from (f"from numpy import {each}" for each in ("inf", "nan") if re.search(rf"(?<![\w.]){each}\b", text))
        yield from filter(None, [_IMPORTS[self.framework]])
        if self.framework == "jax" and self.dtype == "float64":
            yield 'jax.config.update("jax_enable_x64", True)'
        yield ""
        if self.padding.description:
            yield f"# The arrays are padded to what the function requires: {self.padding.description}."
        for name, expression in written.items():
            yield from _folded(f"{name} = {expression}")
        yield ""
        yield from code

    def call(self, number: int) -> UserCall:
        """Return the call as the function is given it; of several, that of a ``number``."""
        task = self.padding.task
        name, options = call_of(task.operation, task.options)
        if self.family is None:
            assert isinstance(self.entry, UserImplementation), "a library has a family"
            taken = self.entry.parameters.get(name)
            options = {each: v for each, v in options.items() if each not in CONVENTIONS or _takes(taken, each)}
            named = {each: array for each, array in task.inputs.items() if each not in INPUTS[name]}
            positional = {each: task.inputs[each] for each in INPUTS[name] if each in task.inputs}
            return UserCall(positional, {**named, **keywords_of(self.entry, task, options)})
        with TemporaryDirectory(prefix="attncheck", ignore_cleanup_errors=True) as folder:
            worker, log = WorkerProcess(), str(Path(folder) / "log.txt")
            try:
                return worker.call(
                    take_note, self.entry, self.mode, self.family, task, number, log, seconds=START_SECONDS
                )
            except (CallTimeout, RemoteError, WorkerDied):
                raise _NoShortFormError from None
            finally:
                worker.end()

    def _call(self, call: UserCall) -> Iterator[str]:
        """Yield the call, and the array that is looked at, as ``returned``."""
        if isinstance(self.mode, Library):
            call = UserCall(call.positional, {**call.named, **self.mode.given})
        given = [self._argument(name, each) for name, each in call.positional.items()]
        given += [f"{name}={self._argument(name, each)}" for name, each in call.named.items()]
        if self.mode.attribute in _COMPILED:
            static = [name for name, each in call.named.items() if not isinstance(each, np.ndarray)]
            yield f"kernel = jax.jit(kernel, static_argnames={quoted(static)})"
        yield from _folded(f"returned = kernel({', '.join(given)})")

    def _argument(self, name: str, value: Any) -> str:
        if isinstance(value, SimpleNamespace):
            return f"SimpleNamespace({', '.join(f'{each}={own!r}' for each, own in vars(value).items())})"
        if not isinstance(value, np.ndarray):
            return repr(value.item() if isinstance(value, np.generic) else value)
        form = _TO[self.framework]
        form = _TO_BFLOAT16.get(self.framework, form) if value.dtype.name == "bfloat16" else form
        return form.format(array=name, of_framework=f"mx.{value.dtype.name.replace('bool', 'bool_')}")

    def _verdict(self, judged: StageJudgement | None, expected: Mapping[str, Expected]) -> Iterator[str]:
        """Yield the comparison of one element with its exact value."""
        if judged is None:
            return
        stage, task = judged.stage, self.padding.task
        names = list(result_stages(task.operation, task.options, task.inputs) or ("masked",))
        yield "if isinstance(returned, dict):"
        yield f"    returned = returned[{stage!r}]"
        if self.family is not None or len(names) > 1:
            position = names.index(stage) if self.family is None else 0
            yield "elif isinstance(returned, (tuple, list)):"
            yield f"    returned = returned[{position}]"
        index = judged.index or (0,) * len(self.case.stage_shapes[stage])
        place, shape = self._place(stage, index)
        exact, rest, allowed = _number(expected[stage], index)
        label = f"{stage}[{', '.join(map(str, index))}]"
        yield f"computed = {_FROM[self.framework].format(array='returned')}.astype(np.float64)"
        yield f"if computed.shape != {shape}:"
        yield f'    print("{stage} is WRONG: it has shape", computed.shape, "and not", {shape})'
        yield "    sys.exit(1)"
        yield f"computed = computed[{', '.join(map(str, place)) or '()'}]"
        yield "# The exact value is the first two together; what is allowed is the largest error of rounding."
        yield f"exact, rest, allowed = {exact!r}, {rest!r}, {allowed!r}"
        yield "error = abs(computed - exact - rest)"
        yield "is_right = computed == exact or error <= allowed or (np.isnan(computed) and np.isnan(exact))"
        yield f'print("{label}", "is right" if is_right else "is WRONG")'
        yield 'print("computed", computed, "exact", exact, "off by", error, "allowed", allowed)'
        yield "sys.exit(0 if is_right else 1)"

    def _place(self, stage: str, index: Sequence[int]) -> tuple[Sequence[int], tuple[int, ...]]:
        """Return where an element of a stage is in what comes back, and the shape of that."""
        place, kept = list(index), self.padding.kept.get(stage)
        shape = list(self.case.stage_shapes[stage] if kept is None else kept.shape)
        for axis, positions in ({} if kept is None else kept.positions).items():
            place[axis] = positions[index[axis]]
        if (family := self.family) is not None:
            if family.heads == "tiled":
                key_heads = self.padding.task.inputs["key"].shape[1]
                group, within = divmod(place[1], shape[1] // key_heads)
                place[1] = within * key_heads + group
            if (family.output_layout or family.layout) != "BHLD":
                place[1:3], shape[1:3] = place[2:0:-1], shape[2:0:-1]
            if (family.output_layout or family.layout) == "LHD":
                place, shape = place[1:], shape[1:]
        return place, tuple(shape)


class _TakenNote(Exception):
    """Ends a call that is not made, of which note has been taken."""


def take_note(entry: Any, mode: Mode, family: Family, task: Task, number: int, log: str) -> UserCall:
    """Run in a process: return what a family's function would be given for a task, in which of the calls for it."""
    redirect_output(log)
    from attncheck.backends.family_calls import FamilyFunction, owner_of
    from attncheck.execution.user_call import load

    function = getattr(*owner_of(mode.call)) if isinstance(mode, Library) else load(entry.target)
    notes: list[UserCall] = []
    name, options = call_of(task.operation, task.options)

    @wraps(function)
    def stand_in(*given: Any, **named: Any) -> Any:
        inputs = [*["module"] * family.module, *INPUTS[name]]
        notes.append(UserCall(dict(zip(inputs, given, strict=False)), named))
        if len(notes) > number:
            raise _TakenNote
        return np.zeros((*given[-3].shape[:-1], given[-1].shape[-1]), given[-1].dtype)

    own = FamilyFunction.of(stand_in, family, SimpleNamespace(from_numpy=np.asarray, to_numpy=np.asarray))
    try:
        own.as_contract(name, getattr(own, name))(**task.inputs, **options)
    except _TakenNote:
        return notes[-1]
    raise UsageError(f"{entry.name} is not called")


def keywords_of(entry: UserImplementation, task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's options, and what the function has no default for."""
    name, _ = call_of(task.operation, task.options)
    required = entry.required.get(name, {})
    keywords = {each: value for each, value in required.items() if each not in {**task.inputs, **options}}
    keywords |= options
    if keywords.get("scale", 0) is None:
        keywords["scale"] = task.inputs["query"].shape[-1] ** -0.5
    return keywords


def _takes(parameters: Parameters | None, name: str) -> bool:
    return parameters is not None and bool(parameters.accepted([name]))


def _imported(module: str, path: str, loaded: str) -> tuple[str, ...]:
    """Return the lines that leave what a path in a module leads to in ``kernel``."""
    first, dot, rest = path.partition(".")
    if loaded:
        return (f"kernel = {loaded}[{first!r}]{dot}{rest}",)
    if not dot:
        return (f"from {module} import {first} as kernel",)
    return (f"from {module} import {first.removesuffix('()')}", f"kernel = {path}")


def _number(expected: Expected, index: Sequence[int]) -> tuple[float, float, float]:
    """Return the exact value at an element as float64, what that leaves out, and the largest error."""
    place = list(index)
    if expected.exact is None or expected.allowed is None:
        raise _NoShortFormError
    if expected.rows is not None:
        place[expected.axis] = int(np.searchsorted(expected.rows, place[expected.axis]))
    rest = expected.rest[tuple(place)] if isinstance(expected.rest, np.ndarray) else 0.0
    return float(expected.exact[tuple(place)]), float(rest), float(expected.allowed[tuple(place)])


def _written(array: Array) -> str:
    """Write an array as an expression that gives exactly it, as short as it can be."""
    if array.size > 4 and _is_constant(array):
        return f"np.full({array.shape}, {array.ravel()[0].item()!r}, {dtype_code(array)})"
    if not array.size:
        return f"np.zeros({array.shape}, {dtype_code(array)})"
    fill, bits = array.ravel()[-1:], f"u{array.itemsize}"
    lengths = [int(each) + 1 for each in np.argwhere(array.view(bits) != fill.view(bits)).max(axis=0, initial=0)]
    block = array[tuple(slice(each) for each in lengths)]
    if 2 * block.size <= array.size and block.size <= _MAX_NUMBERS:
        behind = tuple((0, whole - kept) for whole, kept in zip(array.shape, lengths, strict=True))
        return f"np.pad({_spelled(block)}, {behind}, constant_values={fill[0].item()!r})"
    if array.size <= _MAX_NUMBERS:
        return _spelled(array)
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    packed = "\n".join(text[start : start + _WIDTH] for start in range(0, len(text), _WIDTH))
    unpacked = f'zlib.decompress(base64.b64decode("""\n{packed}"""))'
    return f"np.frombuffer({unpacked}, {dtype_code(array)}).reshape({array.shape})"


def _spelled(array: Array) -> str:
    return re.sub(r" +(?=[],])", "", spelled(array))


def _is_constant(array: Array) -> bool:
    return bool(array.size) and array.tobytes() == np.full_like(array, array.ravel()[0]).tobytes()


def environment_lines(of_mode: Mapping[str, str], width: int) -> list[str]:
    """Return the lines that set one thread, and what a mode asks for, before anything is imported."""
    variables = {**dict.fromkeys(THREAD_VARIABLES, "1"), **of_mode, **emulation_variables()}
    words = ", ".join(f"{name}={json.dumps(text)}" for name, text in variables.items())
    return _folded(f"os.environ.update({words})", width)


def _folded(line: str, width: int = _WIDTH) -> list[str]:
    """Break a line of code between its words; one that has several keeps them."""
    if "\n" in line:
        return line.splitlines()
    return wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
