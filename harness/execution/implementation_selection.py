"""The implementations that a command means: of the table, of an entry point, or a file or module of the user's own."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from attncheck.backends import published
from attncheck.errors import UsageError
from attncheck.execution.call import CallTimeout, Limits, RemoteError, WorkerDied
from attncheck.execution.describing import DescribedWorkers, DescriptionRequest
from attncheck.execution.implementations import (
    Implementation,
    ImplementationSelection,
    UserImplementation,
    bundled_implementations,
    entry_of,
)
from attncheck.execution.user_code import Origin, Target, is_own, origin_of, read_declarations
from attncheck.execution.worker import clean
from attncheck.wording import expected


def select_implementations(
    backends: Sequence[str] | None,
    patterns: Sequence[str],
    framework: str | None = None,
    limits: Limits | None = None,
    *,
    described: DescribedWorkers | None = None,
    signature: str | None = None,
    declare: Sequence[str] = (),
) -> ImplementationSelection:
    """Choose implementations: names and globs of the table, published ones by name, ``file.py:function``.

    ``signature`` names the family of functions that own ones are called like, and they ``declare`` attributes.

    An own implementation is loaded once, in a process of its own, to see what it declares; among those that are
    ``described`` already, if there are such, where it stays for a run. Raises ``UsageError``.
    """
    if signature is not None:
        from attncheck.backends.families import FAMILIES

        if signature not in FAMILIES:
            raise UsageError(f"unknown signature {signature!r}; {expected(signature, FAMILIES, one_of=False)}")
    points = published()
    found, others = [], []
    for pattern in patterns:
        if (point := points.get(pattern)) is not None:
            target, name = Target.of(f"{point.module}:{point.attr}", signature or "", declare), point.name
        elif is_own(pattern):
            target, name = Target.of(pattern, signature or "", declare), None
        else:
            others.append(pattern)
            continue
        implementation = user_implementation(target, framework, limits, name, described)
        found.append(_as_given(implementation, pattern, framework, signature, declare))
    for option, given, says in (
        ("--framework", framework, "whose arrays an implementation of your own takes"),
        ("--signature", signature, "what an implementation of your own is called like"),
        ("--declare", declare or None, "what an implementation of your own declares"),
    ):
        if given is not None and not found:
            raise UsageError(f"{option} says {says}; name one: file.py:function")
    chosen = bundled_implementations(backends, patterns=others) if others or not found else ImplementationSelection(())
    absent = tuple(item.entry.packages[0] for item in found if not item.entry.is_installed)
    present = tuple(item for item in found if item.entry.is_installed)
    return replace(
        chosen,
        implementations=(*chosen.implementations, *present),
        missing=tuple(dict.fromkeys([*chosen.missing, *absent])),
        by_name=(*chosen.by_name, *(item.name for item in present)),
    )


def _as_given(
    implementation: Implementation,
    name: str,
    framework: str | None,
    signature: str | None,
    declare: Sequence[str],
) -> Implementation:
    assert isinstance(implementation.entry, UserImplementation), "an own implementation has an own entry"
    options = (("--framework", framework), ("--signature", signature), *(("--declare", text) for text in declare))
    words = tuple(word for option, value in options if value is not None for word in (option, value))
    return replace(implementation, entry=replace(implementation.entry, given=(name, *words)))


def select_callable(
    function: Callable[..., Any],
    framework: str | None = None,
    name: str | None = None,
    signature: str | None = None,
    declare: Sequence[str] = (),
) -> Implementation:
    """Take a callable that is handed over as an object, a lambda too: workers get a copy of it."""
    import cloudpickle

    origin = origin_of(function)
    module = sys.modules.get(getattr(function, "__module__", ""))
    # What a worker could not import, such as a test module of pytest's, travels by value.
    by_value = module is not None and not _is_importable(module.__name__)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        declared = json.dumps(read_declarations(declare))
        target = Target("", origin.function, cloudpickle.dumps(function), signature or "", declared)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    called = next(each for each in (name or origin.function, "callable") if each.isidentifier())
    own_name = _published_as(origin) if name is None else None
    found = user_implementation(target, framework, name=own_name or f"{origin.package}.{called}")
    return _as_given(found, own_name, framework, signature, declare) if own_name else found


def user_implementation(
    target: Target,
    framework: str | None,
    limits: Limits | None = None,
    name: str | None = None,
    described: DescribedWorkers | None = None,
) -> Implementation:
    """Look in a process of its own what a target declares. Raises ``UsageError`` where it cannot be loaded.

    In reports it has a ``name`` like package.implementation, or like package alone with the function's name behind it.
    """
    limits = limits or Limits()
    question = DescriptionRequest(target, framework, limits.threads, limits.compilation_cache)
    declared: Mapping[str, Any] | str
    try:
        with DescribedWorkers() if described is None else nullcontext(described) as workers:
            declared = workers.declared(question, limits.start_seconds)
    except CallTimeout:
        declared = f"not loaded after {limits.start_seconds:g} s"
    except WorkerDied as ended:
        declared = f"its process {ended}"
    except RemoteError as raised:
        declared = clean(str(raised))
    if isinstance(declared, str):
        called = shlex.join(target.program) or ":".join(filter(None, (target.module, target.attribute)))
        raise UsageError(f"{called or 'the callable'}: {declared}")
    package, _, mode = (name or "").partition(".")
    entry = entry_of(target, {"name": package, "mode": mode, **declared}, framework)
    (only,) = entry.all_modes
    return Implementation(entry, only)


def _is_importable(name: str) -> bool:
    """Return whether a fresh process with this path would find a module; its being loaded here says nothing of that."""
    root = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(root, None) is not None for finder in finders)


def _published_as(origin: Origin) -> str | None:
    """Return the name under which a package publishes a function, if one does: it is judged under one name."""
    target = (origin.module, origin.function)
    return next((name for name, point in sorted(published().items()) if (point.module, point.attr) == target), None)
