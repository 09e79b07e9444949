"""The code of our modules that a script needs, and no more: some of their functions, and what these use.

A module becomes a function that returns what others ask of it, so that names of different modules do not meet:

    def torch_masks():
        import torch

        def may_attend(...): ...

        return SimpleNamespace(may_attend=may_attend)

    torch_masks = torch_masks()
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

from attncheck.errors import UsageError

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


def needs_of(root: str, names: Collection[str]) -> Needs:
    """Follow every name to what it uses, through all modules."""
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
        for other, part in asked:
            needs.asked.setdefault(other, set()).add(part)
            todo.append((other, part))
    return needs


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


def in_order(name: str, needs: Needs) -> Iterator[str]:
    """Yield what a module uses before the module itself."""
    module = read_module(name)
    for bound in sorted(needs.kept[name] & module.ours.keys()):
        yield from in_order(module.ours[bound][0], needs)
    yield name


def inlined(module: str, names: Collection[str]) -> str:
    """Return code that leaves a namespace with ``names`` under the module's own last name, and what it is made of."""
    needs = needs_of(module, names)
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
