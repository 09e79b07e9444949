"""The parts of a script: code of our modules, and the right answers of its stages.

A script contains only the functions of our modules that it needs, and the names that these use. A module becomes a
function that returns the names that others use, so that names of different modules do not collide:

    def torch_backend():
        import torch

        def differentiate(...): ...

        return SimpleNamespace(differentiate=differentiate)

    torch_backend = torch_backend()

Its stages are compared with the exact answer and the error bounds, as the judge uses them. The functions of this file
that are copied into scripts need only NumPy.
"""

from __future__ import annotations

import ast
import base64
import inspect
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import indent, wrap
from types import ModuleType
from typing import Any

import numpy as np

from attncheck.common.errors import UsageError
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth
from attncheck.reading.case import Case
from attncheck.reading.lowering import Array
from attncheck.spec import computed_stages, query_axis

_OUR_PACKAGE = "attncheck"


class NotSeparable(UsageError):
    """A module does more than define names, so that no part of it can be copied separately."""


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A module's text, the statement that binds each of its names, and names of ours: their module, and name in it.

    If a name is a module itself, its name in it is empty.
    """

    lines: list[str]
    tree: ast.Module
    bindings: dict[str, ast.stmt]
    imports_of_ours: dict[str, tuple[str, str]]


@dataclass(eq=False)
class NeededNames:
    """The names of each module that are kept, and those of them that other modules use."""

    names_by_module: dict[str, set[str]] = field(default_factory=dict)
    names_used_elsewhere: dict[str, set[str]] = field(default_factory=dict)


@lru_cache
def read_module_source(name: str) -> ModuleSource:
    """Read the source of a module of ours."""
    spec = find_spec(name)
    file = spec.origin if spec is not None else None
    assert file is not None, f"{name} is a module of ours"
    text = Path(file).read_text(encoding="utf-8")
    module = ModuleSource(text.splitlines(), ast.parse(text), {}, {})
    for statement in module.tree.body:
        for bound in bound_names(statement, name):
            module.bindings[bound] = statement
        if isinstance(statement, ast.ImportFrom) and str(statement.module).partition(".")[0] == _OUR_PACKAGE:
            origin = str(statement.module)
            package = find_spec(origin)
            is_package = package is not None and package.submodule_search_locations is not None
            for alias in statement.names:
                of_ours = (f"{origin}.{alias.name}", "") if is_package else (origin, alias.name)
                module.imports_of_ours[alias.asname or alias.name] = of_ours
    return module


def bound_names(statement: ast.stmt, module: str) -> list[str]:
    """Return the names that a statement binds. Raises ``NotSeparable`` for one that does anything else."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases) if all(alias.name != "*" for alias in aliases):
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


def find_needed_names(root: str, names: Collection[str], whole: Collection[str] = ()) -> NeededNames:
    """Follow every name to the names that it uses, in all modules; a module that is passed needs ``whole`` names."""
    needs = NeededNames(names_used_elsewhere={root: set(names)})
    todo = [(root, name) for name in names]
    while todo:
        name, bound = todo.pop()
        kept = needs.names_by_module.setdefault(name, set())
        if bound in kept:
            continue
        kept.add(bound)
        module = read_module_source(name)
        if bound in module.imports_of_ours:
            asked = [module.imports_of_ours[bound]] if module.imports_of_ours[bound][1] else []
        else:
            used, asked = _names_used_by(name, bound)
            todo += [(name, used_name) for used_name in used]
            asked = [pair for other_module, part in asked for pair in _used_parts(other_module, part, whole)]
        for other_module, part in asked:
            needs.names_used_elsewhere.setdefault(other_module, set()).add(part)
            todo.append((other_module, part))
    return needs


def _used_parts(name: str, part: str, whole: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield a part of a module; of a module that is passed, its ``whole`` names, or all public ones."""
    if part:
        yield name, part
        return
    bindings = read_module_source(name).bindings
    yield from ((name, binding) for binding in bindings if binding in whole or (not whole and binding[0] != "_"))


@cache
def _names_used_by(name: str, bound: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the names that a name of a module uses in it, and those of other modules of ours."""
    module = read_module_source(name)
    statement = module.bindings[bound]
    nodes = () if isinstance(statement, ast.Import | ast.ImportFrom) else ast.walk(statement)
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return [used_name for used_name in used if used_name in module.bindings], list(
        _module_attributes(module, statement)
    )


def _module_attributes(module: ModuleSource, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names of other modules of ours that a statement uses as module.function."""
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=part) if (
                name in module.imports_of_ours and not module.imports_of_ours[name][1]
            ):
                yield module.imports_of_ours[name][0], part
            case ast.Call(args=arguments):
                for argument in arguments:
                    if isinstance(argument, ast.Name) and module.imports_of_ours.get(argument.id, ("", "-"))[1] == "":
                        yield module.imports_of_ours[argument.id][0], ""


def modules_in_order(name: str, needs: NeededNames) -> Iterator[str]:
    """Yield the modules that a module uses before the module itself."""
    module = read_module_source(name)
    for bound in sorted(needs.names_by_module[name] & module.imports_of_ours.keys()):
        yield from modules_in_order(module.imports_of_ours[bound][0], needs)
    yield name


def inline_module(module: str, names: Collection[str], whole: Collection[str] = ()) -> str:
    """Return code that defines a namespace with ``names`` under the module's last name, with all that it uses.

    If a module is passed as an argument, its ``whole`` names are kept.
    """
    needs = find_needed_names(module, names, whole)
    return "\n\n".join(
        _module_as_function(module_name, needs) for module_name in dict.fromkeys(modules_in_order(module, needs))
    )


def copy_functions(module: str, names: Collection[str]) -> str:
    """Return the code of functions of a module that use no other module of ours, unchanged."""
    needs = find_needed_names(module, names)
    return _kept_statements(module, needs, between=2)


def short_module_name(module: str) -> str:
    """Return the name of a module in a script."""
    return module.rpartition(".")[2]


def names_tuple_code(names: Collection[str]) -> str:
    """Return a tuple of names as code.

    Example:
        >>> names_tuple_code(["output"])
        '("output",)'
    """
    return "({},)".format(", ".join(f'"{name}"' for name in names)) if names else "()"


def _module_as_function(name: str, needs: NeededNames) -> str:
    summary = (ast.get_docstring(read_module_source(name).tree) or "").partition("\n")[0]
    attributes = ", ".join(f"{asked_name}={asked_name}" for asked_name in sorted(needs.names_used_elsewhere[name]))
    body = f"{_kept_statements(name, needs)}\n\nreturn SimpleNamespace({attributes})"
    indented = indent(body, "    ")
    module = short_module_name(name)
    return f'def {module}():\n    """{summary}"""\n{indented}\n\n\n{module} = {module}()\n'


def _kept_statements(name: str, needs: NeededNames, between: int = 1) -> str:
    """Return the statements that bind the kept names, in their order, with the comments above them."""
    module, kept = read_module_source(name), needs.names_by_module[name]
    imports: list[str] = []
    ours: list[str] = []
    parts: list[str] = []
    last = 0
    for statement in module.tree.body:
        bound = kept.intersection(bound_names(statement, name))
        if not bound or getattr(statement, "module", None) == "__future__":
            continue
        if bound <= module.imports_of_ours.keys():
            # Instead of an import from a module of ours: a name in its namespace.
            targets = {
                key: ".".join(
                    filter(None, (short_module_name(module.imports_of_ours[key][0]), module.imports_of_ours[key][1]))
                )
                for key in bound
            }
            ours += sorted(f"{key} = {target}" for key, target in targets.items() if key != target)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            imports.append(_import_code(statement, bound))
        else:
            first, end = _line_span(module, statement)
            parts += ["\n" * (0 if first == last + 1 else between)] if parts else []
            parts.append("\n".join(module.lines[first - 1 : end]) + "\n")
            last = end
    gap = "\n" * (between + 1)
    return gap.join(filter(None, ["\n".join(imports), "\n".join(ours), "".join(parts).rstrip()]))


def _line_span(module: ModuleSource, statement: ast.stmt) -> tuple[int, int]:
    first = min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", []))])
    while first > 1 and module.lines[first - 2].startswith("#"):
        first -= 1
    return first, statement.end_lineno or statement.lineno


def _import_code(statement: ast.Import | ast.ImportFrom, bound: Collection[str]) -> str:
    wanted = [alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) in bound]
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import(wanted))
    return ast.unparse(ast.ImportFrom(statement.module, wanted, 0))


_MAX_SPELLED_OUT = 64
"""Arrays of at most so many numbers are written out."""
LINE_WIDTH = 116
"""Characters in a line."""


def fold_line(line: str, width: int = LINE_WIDTH) -> list[str]:
    """Break a line of code between its words; a text of several lines keeps them.

    Example:
        >>> fold_line("f(first, second, third)", 12)
        ['f(first,', '    second,', '    third)']
    """
    if "\n" in line:
        return line.splitlines()
    return wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def array_code(array: Array) -> str:
    """Return the shortest expression for exactly this array.

    Example:
        >>> array_code(np.array([0.1, 2.0], np.float32))
        'np.array([0.1, 2.], np.float32)'
        >>> array_code(np.zeros((2, 3)))
        'np.full((2, 3), 0.0, np.float64)'
    """
    if not array.size:
        return f"np.zeros({array.shape}, {dtype_code(array)})"
    fill, bits = array.ravel()[-1:].reshape(()), f"u{array.itemsize}"
    differs = array.view(bits) != fill.view(bits)
    if array.size > 4 and not math.isnan(float(fill)):  # digits do not tell one NaN from another
        if not differs.any():
            return f"np.full({array.shape}, {fill.item()!r}, {dtype_code(array)})"
        lengths = [int(last) + 1 for last in np.argwhere(differs).max(axis=0, initial=0)]
        block = array[tuple(map(slice, lengths))]
        if 2 * block.size <= array.size and block.size <= _MAX_SPELLED_OUT:
            after = tuple((0, whole - kept) for whole, kept in zip(array.shape, lengths, strict=True))
            return f"np.pad({_digits_or_bytes_code(block)}, {after}, constant_values={fill.item()!r})"
    if array.size <= _MAX_SPELLED_OUT:
        return _digits_or_bytes_code(array)
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    packed = "\n".join(text[start : start + LINE_WIDTH] for start in range(0, len(text), LINE_WIDTH))
    return _bytes_code(f'zlib.decompress(base64.b64decode("""\n{packed}"""))', array)


def _digits_or_bytes_code(array: Array) -> str:
    """Return an array with as few digits as identify every number, or as bytes if digits do not reproduce it."""
    plain = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    text = np.array2string(plain, separator=", ", threshold=sys.maxsize, floatmode="unique")
    if np.issubdtype(plain.dtype, np.floating):
        # Python reads them as float64 first, and loses the payload of NaN.
        read = np.array([float(number) for number in re.findall(r"[^\[\],\s]+", text)]).astype(plain.dtype)
        if read.tobytes() != plain.tobytes():
            return _bytes_code(f"bytes.fromhex({array.tobytes().hex()!r})", array)
    text = re.sub(r" +(?=[],])", "", " ".join(text.split()).replace("[ ", "["))
    return f"np.array({text}, {dtype_code(array)})"


def _bytes_code(expression: str, array: Array) -> str:
    return f"np.frombuffer({expression}, {dtype_code(array)}).reshape({array.shape}).copy()"


def dtype_code(array: Array) -> str:
    """Return an array's dtype as code."""
    name = array.dtype.name
    return "bool" if name == "bool" else f"{'np' if hasattr(np, name) else 'ml_dtypes'}.{name}"


@dataclass(frozen=True, eq=False)
class StageAnswer:
    """The right answer for one stage: the shape and dtype of the array, and the numbers that ``judge`` compares.

    With ``rows``, these query rows, counted along ``axis``, stand for all. Without an exact value anything is right.
    """

    shape: tuple[int, ...]
    dtype: str
    exact: Any = np.nan
    allowed: Any = np.nan
    rest: Any = 0.0
    rows: Array | None = None
    axis: int = -2

    def expected_element(self, index: Sequence[int]) -> tuple[float, float, float]:
        """Return for an element the exact value as float64, the largest error, and the rest of the exact value."""
        place = list(index)
        if self.rows is not None:
            place[self.axis] = int(np.searchsorted(self.rows, place[self.axis]))
        numbers = (self.exact, self.allowed, self.rest)
        exact, allowed, rest = (float(of[tuple(place)] if isinstance(of, np.ndarray) else of) for of in numbers)
        return exact, allowed, rest

    def judge_arguments(self) -> Iterator[str]:
        """Write the arguments of ``judge``."""
        place: Any = ...
        if self.rows is not None:
            yield f"# {len(self.rows)} query rows of {self.shape[self.axis]} are judged."
            place = f"(..., {array_code(self.rows)}{', slice(None)' * (-1 - self.axis)})"
        if open_ := int(np.isnan(self.allowed).sum()):
            yield f"# {open_} of {np.size(self.allowed)} numbers have no exact answer."
        yield f"shape={self.shape}, dtype={self.dtype!r}, place={'...' if place is ... else place},"
        for name in ("exact", "allowed", "rest"):
            value = getattr(self, name)
            yield f"{name}={array_code(value) if isinstance(value, np.ndarray) else repr(float(value))},"


def expected_stages(
    case: Case, truth: Truth, rounding_model: str, judgements: Sequence[StageJudgement]
) -> dict[str, StageAnswer]:
    """Return the right answers of the judged stages, or of every stage of the case if none was returned."""
    if any(judgement.has_wide_statistics for judgement in judgements):
        truth = truth.with_wide_statistics
    computed = computed_stages(case.operation, case.options, case.inputs)
    stages = [judgement.stage for judgement in judgements] or case.judged_stages or computed
    return {
        stage: expected_stage(truth, stage, case.stage_shapes[stage], rounding_model)
        for stage in stages
        if stage in case.stage_shapes  # an unknown stage is not judged
    }


def expected_stage(truth: Truth, stage: str, shape: tuple[int, ...], rounding_model: str) -> StageAnswer:
    """Return the right answer of one stage, with bounds that prove a number wrong."""
    dtype = truth.bounds.stage_dtype(stage)
    if stage not in truth.exact:
        return StageAnswer(shape, dtype)
    reference = truth.stage_reference(stage, rounding_model)
    exact, max_error = reference.exact, reference.bound.max_error
    allowed = np.where(reference.measured_elements, max_error + exact.radius, np.nan)
    allowed[reference.nonfinite_exact_elements] = 0.0
    # Only in float64 are numbers so close to the exact answer that its own rounding to float64 counts.
    rest = exact.low if truth.bounds.dtype == "float64" and exact.low.any() else 0.0
    axis = query_axis(stage)
    rows = None if axis is None else truth.judged_problem.judged_rows
    return StageAnswer(shape, dtype, exact.high, allowed, rest, rows, -2 if axis is None else axis)


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


def taken(function: Callable[..., Any], conventions: Mapping[str, str]) -> dict[str, str]:
    """Return the conventions that a function has a keyword for: it was not asked for any other."""
    kinds = {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return {name: value for name, value in conventions.items() if takes_all or name in kinds}


def judge(stage: str, array: Any, *, shape: Any, dtype: str, place: Any, exact: Any, allowed: Any, rest: Any) -> bool:
    """Print whether a stage is right in some place, and its worst number there. Where NaN is allowed, anything is."""
    array = np.asarray(array)
    if (str(array.dtype), array.shape) != (dtype, shape):
        print(stage, f"is WRONG: it is {array.dtype} of shape {array.shape}; expected {dtype} of shape {shape}")
        return False
    computed = array[place].astype(np.float64)
    right, error = are_right(computed, exact, allowed, rest), np.abs(computed - exact - rest)
    print(stage, "is right" if right.all() else f"is WRONG at {(~right).sum()} of {right.size} elements")
    if right.size:
        ratio = np.nan_to_num(error / np.maximum(allowed, 1e-300), nan=np.inf)
        ratio = np.where(right & ~(error <= allowed), -1, ratio)
        worst = np.unravel_index(np.argmax(ratio), ratio.shape)
        exact, allowed = (np.broadcast_to(each, right.shape)[worst] for each in (exact, allowed))
        at = f"at {[*map(int, worst)]}: " if worst else ""
        print(f"    {at}computed {computed[worst]}, exact {exact}, off by {error[worst]}, allowed {allowed}")
    return bool(right.all())


def are_right(computed: Any, exact: Any, allowed: Any, rest: Any) -> Any:
    """Return which numbers are right, whose exact answer is the sum of two."""
    near = np.isfinite(computed) & (np.abs(computed - exact - rest) <= allowed)
    return near | (computed == exact) | (np.isnan(computed) & np.isnan(exact)) | np.isnan(allowed)
