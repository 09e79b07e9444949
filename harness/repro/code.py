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
from collections.abc import Collection
from textwrap import indent

from attncheck.repro.modules import Module, Needs, bound_names, in_order, needs_of, read_module


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
