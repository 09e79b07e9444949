"""What a few names of our modules need: the statements that bind them, and those that these use, module by module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

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
            todo += [(name, used) for used in _used(module.bindings[bound]) if used in module.bindings]
            asked = list(_attributes(module, module.bindings[bound]))
        for other, part in asked:
            needs.asked.setdefault(other, set()).add(part)
            todo.append((other, part))
    return needs


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
