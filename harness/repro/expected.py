"""What a script holds stages against: the exact answer and the error bounds, as the judge uses them.

What a script of ``attncheck repro`` carries along: copied from here as it stands, it needs NumPy alone.
"""

from __future__ import annotations

import base64
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.sampling import axis_of_queries
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, is_measured, is_prescribed
from attncheck.reading.case import Case
from attncheck.spec import computed_stages

_SPELLED_OUT = 64
"""Numbers of an array that are still written out."""
_WIDTH = 100
"""Characters in a line."""


def written(array: NDArray[Any], margin: int = 0, lead: int = 0) -> str:
    """Write an array as an expression that stands behind a margin and ``lead`` more characters in its first line."""
    if not array.size:
        return f"np.zeros({array.shape}, {_dtype(array)})"
    return (_spelled(array, margin + lead) if array.size <= _SPELLED_OUT else "") or _packed(array, margin)


def spelled(array: NDArray[Any]) -> str:
    """Write every number of an array on one line; its bytes where digits do not give it back."""
    text = " ".join(_spelled(array, 0).split()).replace("[ ", "[")
    return text or f"np.frombuffer(bytes.fromhex({array.tobytes().hex()!r}), {_dtype(array)}).reshape({array.shape})"


def _spelled(array: NDArray[Any], start: int) -> str:
    """Write every number in as few digits as tell it from its neighbours; empty where these do not give it back."""
    plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    behind = f", {_dtype(array)})"
    text = np.array2string(
        plain,
        max_line_width=_WIDTH,
        separator=", ",
        prefix=" " * (start + len("np.array(")),
        suffix=f"{behind},",
        threshold=sys.maxsize,
        floatmode="unique",
    )
    if np.issubdtype(plain.dtype, np.floating):
        # Python reads them as float64 first, and of a NaN its payload is lost.
        read = np.array([float(number) for number in re.findall(r"[^\[\],\s]+", text)]).astype(plain.dtype)
        if read.tobytes() != plain.tobytes():
            return ""
    return f"np.array({text}{behind}"


def _packed(array: NDArray[Any], margin: int) -> str:
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    inner = " " * (margin + 4)
    width = _WIDTH - len(inner)
    lines = [f"{inner}{text[start : start + width]}\n" for start in range(0, len(text), width)]
    return f'unpack("{array.dtype.name}", {array.shape}, """\n{"".join(lines)}{inner}""")'


def _dtype(array: NDArray[Any]) -> str:
    name = array.dtype.name
    return {"bool": "bool", "bfloat16": "ml_dtypes.bfloat16"}.get(name, f"np.{name}")


def expected_stages(
    case: Case, truth: Truth, rounding_model: str, judgements: Sequence[StageJudgement]
) -> dict[str, Expected]:
    """Return what is right for the stages that were judged, or for every stage of the case where none came back."""
    if any(judgement.has_wide_statistics for judgement in judgements):
        truth = truth.with_wide_statistics()
    computed = computed_stages(case.operation, case.options, case.inputs)
    stages = [judgement.stage for judgement in judgements] or case.judged_stages or computed
    return {
        stage: expected_of(truth, stage, case.stage_shapes[stage], rounding_model)
        for stage in stages
        if stage in case.stage_shapes  # one of an implementation's own is not judged
    }


def expected_of(truth: Truth, stage: str, shape: tuple[int, ...], rounding_model: str) -> Expected:
    """Return what is right for one stage: all that proves a number wrong, and nothing else."""
    if stage not in truth.exact:
        return Expected(shape)
    exact, bound = truth.exact[stage], truth.bounds(rounding_model)[stage]
    allowed = np.where(is_measured(exact, bound, truth.dtype_of(stage)), bound.max_error + exact.radius, np.nan)
    allowed[is_prescribed(exact)] = 0.0
    # Only in float64 are numbers so close to the exact answer that its own rounding to float64 counts.
    rest = exact.low if truth.dtype == "float64" and exact.low.any() else 0.0
    axis = axis_of_queries(stage)
    rows = None if axis is None else truth.query_rows
    own = truth.dtype_of(stage)
    dtype = "" if own == truth.dtype else own
    return Expected(shape, exact.high, allowed, rest, rows, -2 if axis is None else axis, dtype)


def expected_lines(expected: Mapping[str, Expected]) -> Iterator[str]:
    """Write what is right as Python; ``ROWS`` are the query rows that stand for all."""
    rows = next((each.rows for each in expected.values() if each.rows is not None), None)
    if rows is not None:
        yield f"ROWS = {written(rows)}"
    yield "EXPECTED = {"
    for stage, each in expected.items():
        yield f'    "{stage}": Expected('
        yield f"        shape={each.shape},"
        for name in ("exact", "allowed", "rest"):
            array = getattr(each, name)
            if isinstance(array, np.ndarray):
                yield f"        {name}={written(array, 8, len(name) + 1)},"
        if each.rows is not None:
            yield "        rows=ROWS,"
            yield f"        axis={each.axis},"
        if each.dtype:
            yield f'        dtype="{each.dtype}",'
        yield "    ),"
    yield "}"


Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Expected:
    """What is right for one stage of the computation.

    ``exact`` is the exact answer rounded to float64 (None where there is none), ``rest`` what that rounding took off. A
    right number is off by at most ``allowed``; NaN and infinity are right where the exact answer has them. Where
    ``allowed`` is NaN, anything is. With ``rows``, these query rows, counted along ``axis``, stand for all.
    ``dtype`` is its own, where it is not that of the computation.
    """

    shape: tuple[int, ...]
    exact: Array | None = None
    allowed: Array | None = None
    rest: Array | float = 0.0
    rows: Array | None = None
    axis: int = -2
    dtype: str = ""


def unpack(dtype: str, shape: tuple[int, ...], text: str) -> Array:
    """Read an array that is written as zlib's bytes in base64."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape).copy()


def load_file(path: str) -> ModuleType:
    """Load a Python file, whatever it is called, under a name that nothing else has."""
    # What lies beside the file is found first, unless the file itself would then hide a module of Python's.
    sys.path.insert(len(sys.path) if Path(path).stem in sys.stdlib_module_names else 0, str(Path(path).parent))
    spec = spec_from_file_location("implementation_under_report", path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} is no Python file"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def named(returned: Any, names: Sequence[str]) -> dict[str, Any]:
    """Give the stages that a function returned their names: it may return an array, or a tuple of gradients."""
    if isinstance(returned, Mapping):
        return dict(returned)
    return dict(zip(names, returned if isinstance(returned, tuple) and len(names) > 1 else (returned,), strict=False))


def taken(function: Callable[..., Any], conventions: Mapping[str, str]) -> dict[str, str]:
    """Return the conventions that a function has a keyword for: it was not asked for any other."""
    kinds = {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return {name: value for name, value in conventions.items() if takes_all or name in kinds}


def wrong_elements(computed: Array, expected: Expected) -> tuple[NDArray[np.bool_], Array, Array]:
    """Return which of the judged numbers are wrong, how far each is off, and that over what is allowed."""
    exact, allowed = expected.exact, expected.allowed
    assert exact is not None, "a stage is judged where it has an exact answer"
    assert allowed is not None, "and with it a bound"
    is_finite, is_odd = np.isfinite(exact), np.isfinite(exact) & ~np.isfinite(computed)
    with np.errstate(all="ignore"):
        error = np.abs(computed - exact - expected.rest)
        error[~(is_finite & np.isfinite(computed))] = np.inf
        error[~is_finite & ((computed == exact) | (np.isnan(computed) & np.isnan(exact)))] = 0
        ratio = np.where(error == 0, 0, np.where(np.isinf(allowed), 0, error / allowed))
    ratio[is_odd] = np.inf
    open_ = np.isnan(allowed)
    ratio[open_] = -1
    return ~open_ & (is_odd | (error > allowed)), error, ratio


def judge(computed: Any, expected: Expected, dtype: str) -> tuple[bool, str]:
    """Say whether one stage is right, and what is to be known of it: its worst number."""
    if not isinstance(computed, np.ndarray | np.generic):
        return False, f"is a {type(computed).__name__}; expected an array"
    if computed.shape != expected.shape:
        return False, f"has shape {computed.shape}; expected {expected.shape}"
    dtype = expected.dtype or dtype
    if str(computed.dtype) != dtype:
        return False, f"has dtype {computed.dtype}; expected {dtype}"
    rows, exact = expected.rows, expected.exact
    array: Array = np.asarray(computed)
    kept: Array = (array if rows is None else array.take(rows, expected.axis)).astype(np.float64)
    if exact is None or expected.allowed is None:
        return True, "is not judged: it has no exact answer"
    wrong, error, ratio = wrong_elements(kept, expected)
    if not ratio.size or ratio.max() < 0:
        return True, "is not judged: it has no exact answer" if ratio.size else "has nothing to judge"
    worst = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    whole = list(worst)
    if rows is not None:
        whole[expected.axis] = int(rows[worst[expected.axis]])
    digits = 9 if array.dtype.itemsize <= 4 else 17
    verdict = f"is WRONG at {int(wrong.sum())} of {wrong.size} elements" if wrong.any() else "is right"
    judged = "" if rows is None else f"; {len(rows)} query rows of {array.shape[expected.axis]} are judged"
    if open_ := int((ratio < 0).sum()):
        judged += f"; {open_} of {ratio.size} numbers have no exact answer"
    return not wrong.any(), (
        f"{verdict}{judged}\n"
        f"    most at {whole}: computed {kept[worst]:.{digits}g}, exact {exact[worst]:.17g}, "
        f"off by {error[worst]:.3g}, allowed {expected.allowed[worst]:.3g}"
    )


def make(backend: Any, calls: Sequence[tuple[Callable[..., Any], Mapping[str, Array]]]) -> None:
    """Make the calls that come before the one that is reported; what becomes of them is not looked at."""
    with np.errstate(all="ignore"):
        for call, inputs in calls:
            try:
                call(**{name: backend.from_numpy(array) for name, array in inputs.items()})
            except Exception as error:
                print(f"before it, {call.__name__} raised {type(error).__name__}")


def run(
    backend: Any,
    compute: Callable[..., Mapping[str, Any]],
    inputs: Mapping[str, Array],
    expected: Mapping[str, Expected],
    results: Sequence[str],
    dtype: str,
    *,
    kept: Mapping[str, Any] | None = None,
    cut: Callable[[Array, Any], tuple[Array, str]] = lambda array, _: (array, ""),
) -> int:
    """Compute once and print what is right and what is wrong. Return the exit status: 1 where something is wrong.

    Of the stages of a padded call, what is ``kept`` is ``cut`` out first, which says where what is dropped is wrong.
    """
    with np.errstate(all="ignore"):
        tensors = {name: backend.from_numpy(array) for name, array in inputs.items()}
        given = {name: backend.to_numpy(tensor).tobytes() for name, tensor in tensors.items()}
        stages = compute(**tensors) or {}
        arrays = {stage: backend.to_numpy(stages[stage]) for stage in expected if stage in stages}
    failed = [f"{stage} is not returned" for stage in results if stage not in stages]
    failed += [
        f"{name} is changed by the call" for name in given if backend.to_numpy(tensors[name]).tobytes() != given[name]
    ]
    for stage, elements in (kept or {}).items():
        if stage in arrays:
            arrays[stage], fault = cut(arrays[stage], elements)
            failed += [f"{stage} {fault}"] if fault else []
    for fault in failed:
        print(fault)
    for stage, array in arrays.items():
        is_right, says = judge(array, expected[stage], dtype)
        print(stage, says)
        failed += [] if is_right else [stage]
    return 1 if failed else 0
