"""The parts of a script: code of our modules, and what its stages are compared with.

Of our modules it has some functions, and what these use, and no more. A module becomes a function that returns what
others ask of it, so that names of different modules do not meet:

    def torch_backend():
        import torch

        def differentiate(...): ...

        return SimpleNamespace(differentiate=differentiate)

    torch_backend = torch_backend()

Its stages are compared with the exact answer and the error bounds, as the judge uses them. What is copied from here as
it stands needs NumPy alone.
"""

from __future__ import annotations

import ast
import base64
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.errors import UsageError
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, is_measured, is_prescribed
from attncheck.reading.case import Case
from attncheck.spec import computed_stages, query_axis

_OURS = "attncheck"


class NotSeparable(UsageError):
    """A module does more than define names, so that no part of it can be taken alone."""


@dataclass(frozen=True, eq=False)
class Module:
    """A module's text, the statement that binds each of its names, and which names are ours: module, and name in it.

    Where a name is a module itself, its name in it is empty.
    """

    lines: list[str]
    tree: ast.Module
    bindings: dict[str, ast.stmt]
    ours: dict[str, tuple[str, str]]


@dataclass(eq=False)
class Needs:
    """Which names of each module are kept, and which of these other modules ask for."""

    kept: dict[str, set[str]] = field(default_factory=dict)
    asked: dict[str, set[str]] = field(default_factory=dict)


@lru_cache
def read_module(name: str) -> Module:
    """Read the source of a module of ours."""
    spec = find_spec(name)
    origin = spec.origin if spec is not None else None
    assert origin is not None, f"{name} is a module of ours"
    text = Path(origin).read_text(encoding="utf-8")
    module = Module(text.splitlines(), ast.parse(text), {}, {})
    for statement in module.tree.body:
        for bound in bound_names(statement, name):
            module.bindings[bound] = statement
        if isinstance(statement, ast.ImportFrom) and str(statement.module).partition(".")[0] == _OURS:
            module.ours.update(_ours(statement))
    return module


def bound_names(statement: ast.stmt, module: str) -> list[str]:
    """Return the names that a statement binds. Raises ``NotSeparable`` for one that does anything else."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases) if all(each.name != "*" for each in aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return []
    raise NotSeparable(
        f"{module}, line {statement.lineno}: no script can hold a part of it; expected definitions, imports by name "
        "and assignments alone"
    )


def _ours(statement: ast.ImportFrom) -> Iterator[tuple[str, tuple[str, str]]]:
    origin = str(statement.module)
    spec = find_spec(origin)
    is_package = spec is not None and spec.submodule_search_locations is not None
    for alias in statement.names:
        origin_of = (f"{origin}.{alias.name}", "") if is_package else (origin, alias.name)
        yield alias.asname or alias.name, origin_of


def needs_of(root: str, names: Collection[str], whole: Collection[str] = ()) -> Needs:
    """Follow every name to what it uses, through all modules; of one that is handed over, to the names of the whole."""
    needs = Needs(asked={root: set(names)})
    todo = [(root, name) for name in names]
    while todo:
        name, bound = todo.pop()
        kept = needs.kept.setdefault(name, set())
        if bound in kept:
            continue
        kept.add(bound)
        module = read_module(name)
        if bound in module.ours:
            asked = [module.ours[bound]] if module.ours[bound][1] else []
        else:
            used, asked = _needed_by(name, bound)
            todo += [(name, each) for each in used]
            asked = [pair for other, part in asked for pair in _parts(other, part, whole)]
        for other, part in asked:
            needs.asked.setdefault(other, set()).add(part)
            todo.append((other, part))
    return needs


def _parts(name: str, part: str, whole: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield a part of a module; of one that is handed over, those of the whole that it has, or all that is public."""
    if part:
        yield name, part
        return
    bindings = read_module(name).bindings
    yield from ((name, each) for each in bindings if each in whole or (not whole and each[0] != "_"))


@cache
def _needed_by(name: str, bound: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what a name of a module uses there, and what it takes of other modules of ours."""
    module = read_module(name)
    statement = module.bindings[bound]
    used = [each for each in _used(statement) if each in module.bindings]
    return used, list(_attributes(module, statement))


def _used(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _attributes(module: Module, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield what a statement takes of other modules of ours, which it names whole: module.function."""
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=part) if name in module.ours and not module.ours[name][1]:
                yield module.ours[name][0], part
            case ast.Call(args=arguments):
                for argument in arguments:
                    if isinstance(argument, ast.Name) and module.ours.get(argument.id, ("", "-"))[1] == "":
                        yield module.ours[argument.id][0], ""


def in_order(name: str, needs: Needs) -> Iterator[str]:
    """Yield what a module uses before the module itself."""
    module = read_module(name)
    for bound in sorted(needs.kept[name] & module.ours.keys()):
        yield from in_order(module.ours[bound][0], needs)
    yield name


def inlined(module: str, names: Collection[str], whole: Collection[str] = ()) -> str:
    """Return code that leaves a namespace with ``names`` under the module's own last name, and what it is made of.

    Of a module that is handed over ``whole``, these names are kept.
    """
    needs = needs_of(module, names, whole)
    return "\n\n".join(_wrapped(each, needs) for each in dict.fromkeys(in_order(module, needs)))


def copied(module: str, names: Collection[str]) -> str:
    """Return the code of functions of a module that uses no other module of ours, as it stands there."""
    needs = needs_of(module, names)
    return _body(module, needs, between=2)


def short(module: str) -> str:
    """Return what a module is called in a script."""
    return module.rpartition(".")[2]


def quoted(names: Collection[str]) -> str:
    """Write names as a tuple."""
    return "({},)".format(", ".join(f'"{name}"' for name in names)) if names else "()"


def _wrapped(name: str, needs: Needs) -> str:
    summary = (ast.get_docstring(read_module(name).tree) or "").partition("\n")[0]
    given = ", ".join(f"{each}={each}" for each in sorted(needs.asked[name]))
    body = f"{_body(name, needs)}\n\nreturn SimpleNamespace({given})"
    indented = indent(body, "    ")
    return f'def {short(name)}():\n    """{summary}"""\n{indented}\n\n\n{short(name)} = {short(name)}()\n'


def _body(name: str, needs: Needs, between: int = 1) -> str:
    """Return the statements that bind what is kept, in their order, with the comments above them."""
    module, kept = read_module(name), needs.kept[name]
    imports: list[str] = []
    ours: list[str] = []
    parts: list[str] = []
    last = 0
    for statement in module.tree.body:
        bound = kept.intersection(bound_names(statement, name))
        if not bound or getattr(statement, "module", None) == "__future__":
            continue
        if bound <= module.ours.keys():
            ours += _aliases(module, bound)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(_import(statement, bound))
        else:
            first, end = _span(module, statement)
            parts += ["\n" * (0 if first == last + 1 else between)] if parts else []
            parts.append("\n".join(module.lines[first - 1 : end]) + "\n")
            last = end
    gap = "\n" * (between + 1)
    return gap.join(filter(None, ["\n".join(imports), "\n".join(ours), "".join(parts).rstrip()]))


def _span(module: Module, statement: ast.stmt) -> tuple[int, int]:
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
    while first > 1 and module.lines[first - 2].startswith("#"):
        first -= 1
    return first, statement.end_lineno or statement.lineno


def _aliases(module: Module, bound: Collection[str]) -> list[str]:
    """Return what stands for imports from modules of ours: each is a name in a namespace."""
    targets = {name: ".".join(filter(None, (short(module.ours[name][0]), module.ours[name][1]))) for name in bound}
    return sorted(f"{name} = {target}" for name, target in targets.items() if name != target)


def _import(statement: ast.Import | ast.ImportFrom, bound: Collection[str]) -> str:
    wanted = [each for each in statement.names if (each.asname or each.name.partition(".")[0]) in bound]
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import(wanted))
    return ast.unparse(ast.ImportFrom(statement.module, wanted, 0))


_SPELLED_OUT = 64
"""Numbers of an array that are still written out."""
_WIDTH = 100
"""Characters in a line."""


def written(array: NDArray[Any], margin: int = 0, lead: int = 0) -> str:
    """Write an array as an expression that stands behind a margin and ``lead`` more characters in its first line."""
    if not array.size:
        return f"np.zeros({array.shape}, {dtype_code(array)})"
    return (_spelled(array, margin + lead) if array.size <= _SPELLED_OUT else "") or _packed(array, margin)


def spelled(array: NDArray[Any]) -> str:
    """Write every number of an array on one line; its bytes where digits do not give it back."""
    text = " ".join(_spelled(array, 0).split()).replace("[ ", "[")
    return (
        text or f"np.frombuffer(bytes.fromhex({array.tobytes().hex()!r}), {dtype_code(array)}).reshape({array.shape})"
    )


def _spelled(array: NDArray[Any], start: int) -> str:
    """Write every number in as few digits as tell it from its neighbours; empty where these do not give it back."""
    plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    behind = f", {dtype_code(array)})"
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


def dtype_code(array: NDArray[Any]) -> str:
    """Return an array's dtype as code."""
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
    axis = query_axis(stage)
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
    """The right answer for one stage of the computation.

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
    """Return whether one stage is right, and a text on its worst number."""
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
