"""A short script for a small case: imports, inputs as literals, the call, and what is right, in a screenful.

It serves one call of a function of somebody's own, whose arrays are few numbers: what an attached script has to be for
somebody to read it. Whatever needs more (arrays in other layouts, padding, calls before, a mode's own code, many
numbers) is told by the long form (``script.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.implementations import Implementation
from attncheck.execution.operations import call_of
from attncheck.execution.padding import call_as_required
from attncheck.execution.runner import task_of
from attncheck.execution.signatures import INPUTS
from attncheck.execution.user_code import UserImplementation
from attncheck.execution.worker import Task
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import truth_of_case
from attncheck.processors import emulation_variables
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.repro.code import quoted
from attncheck.repro.expected import Expected, expected_stages, spelled
from attncheck.spec import CONVENTIONS, result_stages
from attncheck.verdicts import Verdict

MAX_LINES = 60
_MAX_NUMBERS = 64
_WIDTH = 100

_IMPORTS: Mapping[str, Sequence[str]] = {
    "numpy": (),
    "torch": ("import torch",),
    "tensorflow": ("import tensorflow as tf",),
    "jax": ("import jax", 'jax.config.update("jax_enable_x64", True)'),
}
_TO: Mapping[str, str] = {
    "numpy": "{array}",
    "torch": "torch.tensor({array}.astype({wide})){cast}",
    "tensorflow": "tf.constant({array})",
    "jax": "jax.numpy.asarray({array})",
}
_FROM: Mapping[str, str] = {
    "numpy": "np.asarray(array)",
    "torch": "(array.detach().cpu().double() if array.is_floating_point() else array).numpy()",
    "tensorflow": "np.asarray(tf.cast(array, tf.float64))",
    "jax": "np.asarray(array)",
}

_JUDGE = """\
failed = [stage for stage in EXPECTED if stage not in stages]
for stage in failed:
    print(stage, "is not returned")
for stage, (exact, rest, allowed) in EXPECTED.items():
    if stage in failed:
        continue
    array = stages[stage]
    computed = {back}.astype(np.float64)
    if computed.shape != exact.shape:
        print(stage, "has shape", computed.shape, "and not", exact.shape)
        failed.append(stage)
        continue
    with np.errstate(all="ignore"):
        is_same = (computed == exact) | (np.isnan(computed) & np.isnan(exact))
        error = np.where(is_same & ~np.isfinite(exact), 0, np.abs(computed - exact - rest))
        wrong = ~(error <= allowed) & ~np.isnan(allowed)
    print(stage, "is WRONG" if wrong.any() else "is right", "\\n  computed", computed.ravel().tolist())
    print("  exact   ", exact.ravel().tolist(), "\\n  allowed ", allowed.ravel().tolist())
    failed += [stage] * bool(wrong.any())
sys.exit(1 if failed else 0)
"""


def compact_script(
    case: Case,
    implementation: Implementation,
    dtype: str,
    judgements: tuple[StageJudgement, ...],
    story: str,
    command: str,
) -> str | None:
    """Return a script of at most ``MAX_LINES`` lines; None where the case needs the long form.

    It ends with 1 where it finds what the harness found. ``judgements`` are those of the explanation, ``story`` one
    line of what is wrong. Raises ``UsageError`` as the long form does.
    """
    entry, rounding_model = implementation.entry, implementation.rounding_model(dtype)
    if not isinstance(entry, UserImplementation) or rounding_model is None or not _is_plain(entry, case):
        return None
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    padding = call_as_required(implementation, task_of(case, inputs))
    task = padding.task
    if padding.kept or CONVENTIONS & task.options.keys() or any(map(_is_large, task.inputs.values())):
        return None
    failing = tuple(each for each in judgements if each.verdict.exit_code)[:2]
    expected = expected_stages(case, truth_of_case(case, dtype, inputs), rounding_model, failing or judgements[-1:])
    results = result_stages(task.operation, task.options, task.inputs)
    is_wanted = {each.stage for each in failing or judgements[-1:]} or set(results)
    expected = {stage: each for stage, each in expected.items() if each.exact is not None and stage in is_wanted}
    if any(each.verdict is Verdict.DTYPE for each in failing) or (failing and not expected):
        return None  # what is wrong is no number
    if any(each.rows is not None or _is_large(each.exact) for each in expected.values()):
        return None
    lines = [
        *_docstring(case, implementation, dtype, story, command),
        *_imports(entry, dtype),
        *(f"{name} = {_literal(array)}" for name, array in task.inputs.items()),
        "",
        *_call(entry, task, dtype),
        *_expected(expected),
        "",
        _JUDGE.replace("{back}", _FROM[entry.framework]),
    ]
    text = "\n".join(lines)
    return text if len(text.splitlines()) <= MAX_LINES else None


def _is_plain(entry: UserImplementation, case: Case) -> bool:
    """Whether the function can be imported by name and called with arrays as they come."""
    module, target = Path(entry.target.module), entry.target
    is_importable = module.stem.isidentifier() and module.stem not in sys.stdlib_module_names
    is_named = target.attribute.isidentifier() and not target.pickled
    return (
        is_named
        and module.suffix == ".py"
        and is_importable
        and entry.framework in _TO
        and not (entry.signature or entry.device or case.memory_layout or case.merged)
    )


def _is_large(array: NDArray[Any] | None) -> bool:
    return array is not None and array.size > _MAX_NUMBERS and not _is_constant(array)


def _is_constant(array: NDArray[Any]) -> bool:
    return bool(array.size) and array.tobytes() == np.full_like(array, array.ravel()[0]).tobytes()


def _docstring(case: Case, implementation: Implementation, dtype: str, story: str, command: str) -> Iterator[str]:
    yield f'r"""{_safe(f"{implementation.name} in {dtype}: {case.name}")}'
    yield ""
    yield _safe(f"    {command}")
    yield ""
    yield "ends with 1 where something is wrong. Exact values come of interval arithmetic; what is allowed is the"
    yield f"largest error that rounding in {dtype} can make. attncheck found:"
    yield _safe(story)
    yield '"""'


def _safe(text: str) -> str:
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return line.replace('"""', "'''").rstrip("\\")


def _imports(entry: UserImplementation, dtype: str) -> Iterator[str]:
    module = Path(entry.target.module)
    yield "import os"
    yield "import sys"
    yield ""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables |= emulation_variables()
    yield f"os.environ.update({', '.join(f'{name}={text!r}' for name, text in variables.items())})".replace("'", '"')
    yield "import numpy as np"
    if dtype == "bfloat16":
        yield "import ml_dtypes"
    yield "from numpy import inf, nan"
    yield from _IMPORTS[entry.framework]
    yield ""
    yield f"sys.path.insert(0, {str(module.parent)!r})"
    yield f"from {module.stem} import {entry.target.attribute} as kernel"
    yield ""


def _literal(array: NDArray[Any]) -> str:
    if array.size > 4 and _is_constant(array):
        name = array.dtype.name
        dtype = "ml_dtypes.bfloat16" if name == "bfloat16" else "bool" if name == "bool" else f"np.{name}"
        return f"np.full({array.shape}, {array.ravel()[0].item()!r}, {dtype})"
    return "\n        ".join(wrap(spelled(array), _WIDTH, break_long_words=False, break_on_hyphens=False))


def _call(entry: UserImplementation, task: Task, dtype: str) -> Iterator[str]:
    name, options = call_of(task.operation, task.options)
    by_position = INPUTS[name]
    given = {each: _converted(entry.framework, each, array, dtype) for each, array in task.inputs.items()}
    arguments = [given[each] for each in by_position if each in given]
    arguments += [f"{each}={text}" for each, text in given.items() if each not in by_position]
    required = entry.required.get(name, {}).items()
    arguments += [f"{each}={value!r}" for each, value in required if each not in {**task.inputs, **options}]
    arguments += [f"{option}={value!r}" for option, value in options.items()]
    own = entry.function if entry.function in INPUTS else "attention"
    function = "kernel" if own == name else f"kernel.{name}"
    names = result_stages(task.operation, task.options, task.inputs) or ("masked",)
    yield f"returned = {function}({', '.join(arguments)})"
    if len(names) > 1:
        yield f"stages = returned if isinstance(returned, dict) else dict(zip({quoted(names)}, returned))"
    else:
        yield f'stages = returned if isinstance(returned, dict) else {{"{names[0]}": returned}}'


def _converted(framework: str, name: str, array: NDArray[Any], dtype: str) -> str:
    is_narrow = array.dtype.name == "bfloat16"
    wide = "np.float32" if is_narrow else f'"{array.dtype.name}"'
    return _TO[framework].format(array=name, wide=wide, cast=".bfloat16()" if is_narrow else "")


def _expected(expected: Mapping[str, Expected]) -> Iterator[str]:
    """Yield what is right: exact values, what rounding them to float64 took off, and the largest error."""
    yield "EXPECTED = {"
    for stage, each in expected.items():
        assert each.exact is not None, "others were left out"
        assert each.allowed is not None, "what is exact has a bound"
        rest = each.rest if isinstance(each.rest, np.ndarray) else None
        yield f'    "{stage}": ('
        yield f"        {_literal(each.exact)},"
        yield f"        {'0.0' if rest is None else _literal(rest)},"
        yield f"        {_literal(each.allowed)},"
        yield "    ),"
    yield "}"
