"""The implementations that a command means: of the table, of an entry point, or a file or module of the user's own."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attncheck.backends import published_entry_points
from attncheck.common.errors import UsageError
from attncheck.common.wording import join_words, suggest_names
from attncheck.execution.call import CallTimeout, Limits, RemoteError, WorkerDied
from attncheck.execution.describing import DescribedWorkers, DescriptionRequest
from attncheck.execution.implementations import (
    Implementation,
    ImplementationSelection,
    UserImplementation,
    bundled_implementations,
    make_user_entry,
    with_report_name,
)
from attncheck.execution.user_code import Target, check_function_exists, find_origin, is_user_target, read_declarations
from attncheck.execution.worker import to_one_line


def find_implementation(pattern: str, report_name: str = "", **function: Any) -> Implementation:
    """Return one implementation.

    Args:
        pattern: Its name, its backend's, or ``file.py:function``.
        called: What a report calls one of a user's; empty for its own name.
        **function: The options of a user's function, as ``select_implementations`` takes them.

    Raises:
        UsageError: If there is none, or it is not installed.
    """
    selection = select_implementations(None, [pattern], **function)
    if selection.missing:
        raise UsageError(f"{selection.missing[0]} is not installed")
    implementation = selection.implementations[0]
    return with_report_name(implementation, report_name) if report_name else implementation


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
            raise UsageError(f"unknown signature {signature!r}; {suggest_names(signature, FAMILIES, one_of=False)}")
    requested, others = separate_user_functions(patterns, signature, declare)
    for option, value, says in (
        ("--framework", framework, "whose arrays an implementation of your own takes"),
        ("--signature", signature, "what an implementation of your own is called like"),
        ("--declare", declare or None, "what an implementation of your own declares"),
    ):
        if value is not None and not requested:
            raise UsageError(f"{option} says {says}; name one: file.py:function")
    only_own = requested and not others
    chosen = ImplementationSelection(()) if only_own else bundled_implementations(backends, patterns=others)
    requested = with_distinct_names(requested, {item.name for item in chosen.implementations})
    limits = limits or Limits()
    with DescribedWorkers() if described is None else nullcontext(described) as workers:
        requests = [make_description_request(item.target, framework, limits) for item in requested]
        workers.start_loading(*requests, seconds=limits.start_seconds)
        selected = [
            _with_command_words(
                load_user_implementation(item.target, framework, limits, item.name, workers),
                item.pattern,
                framework,
                signature,
                declare,
            )
            for item in requested
        ]
    absent = tuple(item.entry.packages[0] for item in selected if not item.entry.is_installed)
    present = tuple(item for item in selected if item.entry.is_installed)
    return replace(
        chosen,
        implementations=(*chosen.implementations, *present),
        missing=tuple(dict.fromkeys([*chosen.missing, *absent])),
        requested_by_name=(*chosen.requested_by_name, *(item.name for item in present)),
    )


@dataclass(frozen=True)
class RequestedFunction:
    """A user's implementation before it is loaded: the ``pattern`` that names it, and its name in reports.

    Without a ``name``, the name of its target is used. The name that a package publishes is kept.
    """

    pattern: str
    target: Target
    name: str = ""
    is_published: bool = False

    @property
    def report_name(self) -> str:
        """The name in reports."""
        package, dot, mode = self.name.partition(".")
        return f"{package or self.target.name}.{mode if dot else self.target.function}"


def separate_user_functions(
    patterns: Sequence[str], signature: str | None = None, declare: Sequence[str] = ()
) -> tuple[list[RequestedFunction], list[str]]:
    """Return the functions of users and packages among names, the same one once, and the names of others.

    Raises ``UsageError`` for a file that is not there.
    """
    points = published_entry_points()
    functions: dict[tuple[Target, str], RequestedFunction] = {}
    others = []
    for pattern in patterns:
        point = points.get(pattern)
        if point is None and not is_user_target(pattern):
            others.append(pattern)
            continue
        place, name = (pattern, "") if point is None else (f"{point.module}:{point.attr}", point.name)
        target = Target.parse(place, signature or "", declare)
        check_function_exists(target)
        functions.setdefault((target, name), RequestedFunction(pattern, target, name, point is not None))
    return [*functions.values()], others


def with_distinct_names(requested: Sequence[RequestedFunction], taken: Collection[str] = ()) -> list[RequestedFunction]:
    """Give functions that would have one name, or one that is ``taken``, as much more of their paths as differs.

    ``old/kernel.py:attention`` and ``new/kernel.py:attention`` become old_kernel.attention and new_kernel.attention.
    Raises ``UsageError`` if whole paths do not tell them apart.
    """
    named = list(requested)
    every = [place for place, item in enumerate(named) if not item.is_published]
    fixed = {*taken, *(item.report_name for item in named if item.is_published)}
    counts = Counter(named[place].report_name for place in every)
    for name in [name for name, count in counts.items() if count > 1 or name in fixed]:
        same = [place for place in every if named[place].report_name == name]
        if len(same) < 1 + (name not in fixed):  # longer by now
            continue
        for group in (same, every):  # a longer name may be another function's, whose own has to be longer then
            rest = fixed | {named[place].report_name for place in every if place not in group}
            longer = _yield_longer_names([named[place].target for place in group])
            distinct_names = next((names for names in longer if len({*names} - rest) == len(names)), None)
            if distinct_names is not None:
                break
        else:
            patterns = join_words(named[place].pattern for place in same)
            raise UsageError(
                f"{patterns}: reports would call {'all of them' if len(same) > 1 else 'it and another one'} {name}, "
                "and their paths do not tell them apart; check one at a time, or rename a file"
            )
        for place, distinct in zip(group, distinct_names, strict=True):
            named[place] = replace(named[place], name=distinct)
    return named


def _yield_longer_names(targets: Sequence[Target]) -> Iterator[list[str]]:
    """Yield names of all targets with more and more parts of their paths, and of their functions."""
    parts = [target.longer_names for target in targets]
    most = [max(len(names[kind]) for names in parts) for kind in range(2)]
    for folders, classes in sorted(product(*map(range, most)), key=lambda depths: (sum(depths), depths[1])):
        yield [
            f"{packages[min(folders, len(packages) - 1)]}.{modes[min(classes, len(modes) - 1)]}"
            for packages, modes in parts
        ]


def make_description_request(target: Target, framework: str | None, limits: Limits) -> DescriptionRequest:
    """Return the question what a target declares, to be answered in the surroundings of a run."""
    return DescriptionRequest(target, framework, limits.threads, limits.compilation_cache)


def _with_command_words(
    implementation: Implementation,
    name: str,
    framework: str | None,
    signature: str | None,
    declare: Sequence[str],
) -> Implementation:
    assert isinstance(implementation.entry, UserImplementation), "an own implementation has an own entry"
    options = (("--framework", framework), ("--signature", signature), *(("--declare", text) for text in declare))
    words = tuple(word for option, value in options if value is not None for word in (option, value))
    return replace(implementation, entry=replace(implementation.entry, command_words=(name, *words)))


def implementation_of_callable(
    function: Callable[..., Any],
    framework: str | None = None,
    name: str | None = None,
    signature: str | None = None,
    declare: Sequence[str] = (),
) -> Implementation:
    """Take a callable that is handed over as an object, a lambda too: workers get a copy of it."""
    import cloudpickle

    origin = find_origin(function)
    module = sys.modules.get(getattr(function, "__module__", ""))
    # A module that a worker could not import, such as a test module of pytest, is sent by value.
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    root = "" if module is None else module.__name__.partition(".")[0]
    by_value = module is not None and all(finder.find_spec(root, None) is None for finder in finders)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        declared = json.dumps(read_declarations(declare))
        target = Target("", origin.function, cloudpickle.dumps(function), signature or "", declared)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    called = next(candidate for candidate in (name or origin.function, "callable") if candidate.isidentifier())
    # A function that a package publishes is judged under the published name only.
    points = sorted(published_entry_points().items()) if name is None else []
    place = (origin.module, origin.function)
    own_name = next((name for name, point in points if (point.module, point.attr) == place), None)
    implementation = load_user_implementation(target, framework, name=own_name or f"{origin.package}.{called}")
    return _with_command_words(implementation, own_name, framework, signature, declare) if own_name else implementation


def load_user_implementation(
    target: Target,
    framework: str | None,
    limits: Limits | None = None,
    name: str | None = None,
    described: DescribedWorkers | None = None,
) -> Implementation:
    """Read a target's declarations in a process. Raises ``UsageError`` if it cannot be loaded.

    In reports it has a ``name`` like package.implementation, or like package alone with the function's name behind it.
    """
    limits = limits or Limits()
    question = make_description_request(target, framework, limits)
    declared: Mapping[str, Any] | str
    try:
        with DescribedWorkers() if described is None else nullcontext(described) as workers:
            declared = workers.wait_for_declarations(question, limits.start_seconds)
    except CallTimeout:
        declared = f"not loaded after {limits.start_seconds:g} s"
    except WorkerDied as ended:
        declared = f"its process {ended}"
    except RemoteError as raised:
        declared = to_one_line(str(raised))
    if isinstance(declared, str):
        called = shlex.join(target.program) or ":".join(filter(None, (target.module, target.attribute)))
        raise UsageError(f"{called or 'the callable'}: {declared}")
    package, _, mode = (name or "").partition(".")
    entry = make_user_entry(target, {"name": package, "mode": mode, **declared}, framework)
    (only,) = entry.all_modes
    return Implementation(entry, only)
