"""What somebody is told whose function cannot be called as attention is: what does not fit, and an adapter to paste."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from attncheck.execution.imports import imports_of
from attncheck.execution.origin import innermost
from attncheck.execution.signatures import FunctionName, adapter, is_plain
from attncheck.execution.user_code import Target, UnfitError
from attncheck.execution.worker import clean


def unfit_text(error: UnfitError, target: Target, loaded: Any) -> str:
    """Say in several lines why a target is refused, and what to do; of functions beside attention, only why."""
    lines = [clean(str(error)), f"What does not fit: {clean('; '.join(error.misfits))}."]
    called = target.attribute or error.name
    if error.name != "attention":
        is_one_of_many = inspect.ismodule(loaded)
        advice = " Name the function that is meant: file.py:function." if is_one_of_many else ""
        return "\n".join([*lines[:-1], lines[-1] + advice])
    if not is_plain(called):
        return "\n".join(lines)
    function_name = _function_name(target, error, called)
    framework = getattr(loaded, "framework", None) or imports_of(error.function).framework
    code = adapter(error.function, function_name, framework if isinstance(framework, str) else None)
    return "\n".join([*lines, _what_to_do(target, function_name.adapter), "", *code])


def _function_name(target: Target, error: UnfitError, called: str) -> FunctionName:
    written = getattr(innermost(error.function), "__globals__", {})
    if target.pickled or target.module.endswith(".py"):
        return FunctionName(called, is_taken="attention" in written)
    root = called.partition(".")[0]
    own = f"own_{root}" if root == "attention" else root
    imported = f"from {target.module} import {root}" + (f" as {own}" if own != root else "")
    return FunctionName(own + called[len(root) :], imported)


def _what_to_do(target: Target, name: str) -> str:
    if target.pickled:
        return f"Hand over an adapter instead, {name}:"
    if not target.module.endswith(".py"):
        return f"Put this adapter into a file, adapter.py say, and name adapter.py:{name} instead:"
    path, here = Path(target.module), Path.cwd().resolve()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"Paste this adapter at the end of the file, and name {shown}:{name} instead:"
