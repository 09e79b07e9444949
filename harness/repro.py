"""One case on one implementation as a script of its own, which needs NumPy and that framework alone."""

from __future__ import annotations

import base64
import pprint
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.judge_stages import StageJudgement
from attncheck.harness.judging.truth import truth_of_case
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.harness.running.environment import package_version
from attncheck.harness.running.implementations import Implementation
from attncheck.harness.running.operations import call_of
from attncheck.harness.running.own import OwnEntry
from attncheck.harness.running.tasks import task_of
from attncheck.harness.running.worker import Task

_PACKAGE = "attncheck.backends"
_INLINE = "attention_code"
_SPELLED_OUT = 400
"""Numbers of an array that are still written out; larger ones are packed."""

_CONTRACT = '''"""Names for types."""

from typing import Any

Tensor = Any
Stages = dict
Window = tuple
Backend = Any
'''

_LOADER = '''
def _load(sources):
    """Make modules of the code above."""
    package = types.ModuleType("{package}")
    package.__path__ = []
    sys.modules["{package}"] = package
    for name, source in sources.items():
        module = types.ModuleType(name)
        sys.modules[name] = module
        setattr(package, name.rpartition(".")[2], module)
        exec(compile(source, name, "exec"), module.__dict__)
'''

_TELL = """
def main():
    tensors = {name: backend.from_numpy(array) for name, array in INPUTS.items()}
    stages = getattr(backend, FUNCTION)(**tensors, **OPTIONS)
    wrong = 0
    for stage, (exact, bound) in EXACT.items():
        if stage not in stages:
            continue
        computed = np.asarray(backend.to_numpy(stages[stage])).astype(np.float64)
        if computed.shape != exact.shape:
            print(f"{stage}: shape {computed.shape}, expected {exact.shape}")
            wrong += 1
            continue
        with np.errstate(all="ignore"):
            error = np.where(computed == exact, 0.0, np.abs(computed - exact))
            error = np.where(np.isnan(computed) & np.isnan(exact), 0.0, np.where(np.isnan(error), np.inf, error))
            ratio = np.where(error == 0, 0.0, error / np.where(bound > 0, bound, 5e-324))
        if not ratio.size:
            continue
        place = np.unravel_index(np.argmax(ratio), ratio.shape)
        verdict = "WRONG" if ratio[place] > 1 else "right"
        wrong += verdict == "WRONG"
        index = ", ".join(map(str, place))
        print(f"{stage}: {verdict}; at [{index}] computed {float(computed[place])!r}, exact {float(exact[place])!r},")
        print(f"    off by {error[place]:.3g}, at most {bound[place]:.3g} is rounding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
"""


def repro_script(
    case: Case, implementation: Implementation, dtype: str, judgements: tuple[StageJudgement, ...], story: str
) -> str:
    """Return the script: code, inputs, exact values and bounds; it ends with 1 where it finds what the harness found.

    ``story`` is the explanation, as its docstring. Exact values are given for the stages in ``judgements``.
    """
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    task = task_of(case, inputs)
    function, options = call_of(task.operation, dict(task.options))
    parts = [
        f'r"""{_safe(story)}\n\n{_versions(implementation)}\n"""\n',
        "import base64\nimport sys\nimport types\n\nimport numpy as np\n",
        *_code(implementation),
        f"backend.prepare({dtype!r}, 1)\n",
        f"FUNCTION = {function!r}\nOPTIONS = {pprint.pformat(options)}\n",
        _packed_reader(task),
        "INPUTS = {\n" + "".join(_input_lines(task)) + "}\n",
        "EXACT = {\n" + "".join(_exact_lines(case, implementation, dtype, judgements)) + "}\n",
        _TELL,
    ]
    return "\n".join(parts)


def _code(implementation: Implementation) -> Iterator[str]:
    """Yield the code of the implementation, which leaves it in ``backend``."""
    entry = implementation.entry
    mode = implementation.declared
    modules = [f"{_PACKAGE}.{entry.framework}_backend"] if isinstance(entry, OwnEntry) else [mode.module]
    sources = _closure(modules[0])
    yield "SOURCES = {\n" + "".join(f"    {name!r}: r'''{source}''',\n" for name, source in sources.items()) + "}\n"
    yield _LOADER.format(package=_INLINE)
    yield "_load(SOURCES)"
    inlined = modules[0].replace(_PACKAGE, _INLINE)
    yield f"backend = sys.modules[{inlined!r}]"
    if isinstance(entry, OwnEntry):
        yield from _own_code(entry)
    elif mode.attribute is not None:
        yield f"backend = backend.{mode.attribute}"


def _own_code(entry: OwnEntry) -> Iterator[str]:
    """Yield the import of somebody's own function, called as the harness calls it."""
    module, attribute = entry.target.module, entry.target.attribute
    if module.endswith(".py"):
        yield f"sys.path.insert(0, {str(Path(module).parent)!r})"
        module = Path(module).stem
    yield f"import {module} as own\n"
    function = f"own.{attribute}" if attribute else "own.attention"
    yield (
        "class _Own:\n"
        "    prepare, from_numpy, to_numpy = backend.prepare, backend.from_numpy, backend.to_numpy\n\n"
        "    @staticmethod\n"
        "    def attention(query, key, value, **options):\n"
        f"        returned = {function}(query, key, value, **options)\n"
        '        return returned if isinstance(returned, dict) else {"output": returned}\n\n\n'
        "backend = _Own\n"
    )


def _closure(module: str) -> dict[str, str]:
    """Return the sources of a module of the backends and of those that it imports, in the order of their imports."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        source = _CONTRACT if name.endswith(".contract") else _source(name)
        for other in _imports(source):
            visit(other)
        found[name] = source

    visit(module)
    return {
        name.replace(_PACKAGE, _INLINE): source.replace(_PACKAGE, _INLINE).replace("'''", '"""')
        for name, source in found.items()
    }


def _imports(source: str) -> list[str]:
    package = re.escape(_PACKAGE)
    direct = re.findall(rf"^from {package}\.(\w+) import", source, re.MULTILINE)
    whole = re.findall(rf"^from {package} import (\w+)", source, re.MULTILINE)
    return [f"{_PACKAGE}.{name}" for name in (*direct, *whole)]


def _source(module: str) -> str:
    spec = find_spec(module)
    origin = spec.origin if spec is not None else None
    assert origin is not None, f"{module} is a module of ours"
    return Path(origin).read_text(encoding="utf-8")


def _versions(implementation: Implementation) -> str:
    packages = dict.fromkeys(["numpy", *implementation.entry.packages])
    return "Seen with " + ", ".join(f"{name} {package_version(name) or '?'}" for name in packages) + "."


def _packed_reader(task: Task) -> str:
    needs_bfloat16 = any(array.dtype.name == "bfloat16" for array in task.inputs.values())
    imported = "import ml_dtypes  # NumPy has no bfloat16\n\n\n" if needs_bfloat16 else "\n"
    return (
        f"{imported}def unpack(text, dtype, shape):\n"
        "    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape).copy()\n"
    )


def _input_lines(task: Task) -> Iterator[str]:
    for name, array in task.inputs.items():
        yield f"    {name!r}: {_array(array)}{_memory(task.memory.get(name))},\n"


def _memory(layout: str | None) -> str:
    """Return what lays an array out in memory as the case asks."""
    match layout:
        case "transposed":
            return ".swapaxes(-2, -3).copy().swapaxes(-2, -3)"
        case "strided":
            return ".repeat(2, axis=-1)[..., ::2]"
    return ""


def _exact_lines(
    case: Case, implementation: Implementation, dtype: str, judgements: tuple[StageJudgement, ...]
) -> Iterator[str]:
    truth = truth_of_case(case, dtype, convert_inputs(case, make_exact_inputs(case), dtype))
    numerical_class = implementation.numerical_class(dtype)
    if truth.query_rows is not None or numerical_class is None:
        return
    bounds: Mapping[str, Any] = truth.bounds(numerical_class) if truth.exact else {}
    for stage in (judgement.stage for judgement in judgements):
        if stage in truth.exact:
            yield f"    {stage!r}: ({_array(truth.exact[stage].high)}, {_array(bounds[stage].worst)}),\n"


def _array(array: NDArray[Any]) -> str:
    """Write an array such that it is read back bit for bit."""
    dtype = "ml_dtypes.bfloat16" if array.dtype.name == "bfloat16" else f"np.{array.dtype.name}"
    plain = np.isfinite(array.astype(np.float64)).all() and array.dtype.name != "bfloat16"
    if array.size <= _SPELLED_OUT and plain:
        return f"np.array({array.tolist()!r}, dtype={dtype.replace('np.bool', 'bool')}).reshape({array.shape})"
    packed = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return f"unpack({packed!r}, {dtype.replace('np.bool', 'bool')}, {array.shape})"


def _safe(text: str) -> str:
    return text.replace('"""', "'''").replace("\\", "/")
