"""Implementations, which are judged: a backend in a mode, of the table or a user's."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from attncheck.backends import (
    ALL_ENTRIES,
    BACKENDS,
    EAGER,
    LIBRARIES,
    NATIVE,
    PADDING_KEYWORDS,
    BackendEntry,
    DeclaredConvention,
    Mode,
)
from attncheck.backends.contract import Backend
from attncheck.backends.devices import FRAMEWORKS_WITH_DEVICES, VISIBLE_DEVICE_VARIABLES
from attncheck.common.errors import UsageError
from attncheck.common.processors import processor_flags
from attncheck.common.wording import MIN_SIMILARITY, join_words, suggest_names
from attncheck.execution.operations import Parameters
from attncheck.execution.user_code import Target, advice_on_framework
from attncheck.spec import DECLARABLE_CONVENTIONS

ALL_MODES = "all"


@dataclass(frozen=True)
class Implementation:
    """A backend in a mode; in its default mode unless another is named.

    ``only_standard_cases`` asks it for the standard cases alone, even if it does not compile each separately.
    """

    entry: BackendEntry
    mode: str = ""
    only_standard_cases: bool = False

    def __post_init__(self) -> None:
        if not self.mode:
            object.__setattr__(self, "mode", self.entry.default_mode)

    @cached_property
    def mode_declarations(self) -> Mode:
        """Return the declarations of the mode."""
        return self.entry.get_mode(self.mode)

    @property
    def runs_only_standard_cases(self) -> bool:
        """Return whether it is asked, unless all cases are asked for, for the standard ones alone."""
        return self.only_standard_cases or self.mode_declarations.runs_only_standard_cases

    @property
    def is_padded(self) -> bool:
        """Return whether calls may have to be changed before it can be asked, and it may be that none can be."""
        is_own = self.entry is not ALL_ENTRIES.get(self.entry.name)
        return is_own or self.mode_declarations.folds_sequences or bool(self.mode_declarations.requires)

    def rounding_model(self, dtype: str) -> str | None:
        """Return the rounding model of a dtype on this processor; None if the mode has no such dtype."""
        model = self.mode_declarations.classes.get(dtype)
        fallback = (
            self.entry.fallback if self.mode_declarations.falls_back and not self.mode_declarations.device else None
        )
        if model is None or fallback is None or dtype not in fallback.dtypes:
            return model
        falls_back = fallback.applies(processor_flags() or frozenset(), os.environ)
        return fallback.replaced_models.get(model, model) if falls_back else model

    def shape_requirements(self, function: str) -> tuple[Mapping[str, object], frozenset[str]]:
        """Return the requirements of a contract's function on shapes, and the keywords that padding may use."""
        return self.entry.shape_requirements(self.mode, function)

    def has_function(self, function: str) -> bool:
        """Return whether it has a function of the contract for what another one of its own can be asked instead."""
        return self.entry.has_function(self.mode, function)

    @property
    def name(self) -> str:
        """The name in every report, such as torch.eager."""
        return f"{self.entry.name}.{self.mode}"

    @property
    def short_name(self) -> str:
        """The name for people who run few: a framework's alone for its default mode."""
        return (
            self.entry.name if self.mode == self.entry.default_mode and not self.mode_declarations.device else self.name
        )

    @property
    def cluster_resources(self) -> dict[str, float]:
        """Return the resources that a cluster's worker must offer to run it, by Dask's names, with amounts."""
        device = {"GPU": 1.0} if self.mode_declarations.device else {}
        return {self.entry.framework: 1.0, **device, **self.entry.resources}

    @property
    def declared_readings(self) -> Mapping[str, str]:
        """Return the conventions that it declares, of ``DECLARABLE_CONVENTIONS``, in the order of application."""
        conventions = self.mode_declarations.conventions
        return {name: conventions[name].value for name in DECLARABLE_CONVENTIONS if name in conventions}

    @property
    def package(self) -> str:
        """The distribution whose version is the implementation's."""
        return self.mode_declarations.package or self.entry.packages[0]


@dataclass(frozen=True)
class ImplementationSelection:
    """The implementations that can run, and the backends that cannot, each with the reason.

    ``missing`` were asked for by name and are not installed, ``not_requested`` were not asked for and are not
    installed. Of the implementations, those ``requested_by_name`` were asked for one by one, neither by a glob nor
    because they are there.
    """

    implementations: tuple[Implementation, ...]
    not_requested: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    requested_by_name: tuple[str, ...] = ()

    @property
    def hints(self) -> tuple[str, ...]:
        """Return hints for the authors of implementations on how they are called, a line each."""
        return tuple(f"{item.name}: {hint}" for item in self.implementations for hint in item.entry.hints)

    def with_added_dtypes(self, dtypes: Sequence[str]) -> ImplementationSelection:
        """Add requested dtypes to users' functions that do not declare them."""
        return replace(self, implementations=tuple(with_added_dtypes(item, dtypes) for item in self.implementations))

    def restrict_to_standard_cases(self, patterns: Sequence[str]) -> ImplementationSelection:
        """Restrict some of them, by backend or glob, to the standard cases.

        Raises ``UsageError`` for a pattern that means none of them.
        """
        meant: set[str] = set()
        for pattern in patterns:
            these = [
                item
                for item in self.implementations
                if pattern == item.entry.name or _matches_implementation(pattern, item)
            ]
            if not these:
                names = ", ".join(item.name for item in self.implementations) or "nothing"
                raise UsageError(f"--standard {pattern}: no implementation of this run is called so; it has {names}")
            meant |= {item.name for item in these}
        items = tuple(replace(item, only_standard_cases=item.name in meant) for item in self.implementations)
        return replace(self, implementations=items)


def with_added_dtypes(item: Implementation, dtypes: Sequence[str]) -> Implementation:
    """Add dtypes that a user's function does not declare, with the rounding model of eager code."""
    entry = item.entry
    added = [dtype for dtype in dtypes if dtype not in entry.classes]
    if not isinstance(entry, UserImplementation) or not added:
        return item
    hint = f"it declares no {join_words(added)}: as that was asked for, it is held to the class {EAGER[added[0]]} there"
    classes = {**entry.classes, **{dtype: EAGER[dtype] for dtype in added}}
    return replace(item, entry=replace(entry, classes=classes, hints=(*entry.hints, hint)))


def processor_implementations(table: Mapping[str, BackendEntry] = ALL_ENTRIES) -> tuple[Implementation, ...]:
    """Return every mode of every backend, installed or not, that computes on the processor."""
    return tuple(Implementation(entry, mode) for entry in table.values() for mode in entry.all_modes)


def device_implementations(table: Mapping[str, BackendEntry] = ALL_ENTRIES) -> tuple[Implementation, ...]:
    """Return every mode of every backend that computes on an accelerator."""
    return tuple(Implementation(entry, mode.name) for entry in table.values() for mode in entry.device_modes)


def bundled_implementations(
    names: Sequence[str] | None, table: Mapping[str, BackendEntry] = ALL_ENTRIES, patterns: Sequence[str] | None = None
) -> ImplementationSelection:
    """Choose implementations: by backend, and by globs over their names such as ``torch.*``.

    Without patterns the default mode, of the backends that are named or of every installed framework; ``all`` takes
    every mode, a backend's name its default one; those on a device (``torch.sdpa@cuda``) run only by patterns with an
    ``@``. A library that is no framework runs only where it is named, or where patterns are. Raises ``UsageError`` for
    a name or pattern that matches nothing.
    """
    unknown = [name for name in names or () if name not in table]
    if unknown:
        raise UsageError(f"unknown backend {unknown[0]!r}; {suggest_names(unknown[0], table, one_of=False)}")
    excluded = {} if names or patterns else LIBRARIES
    entries = {name: entry for name, entry in table.items() if name not in excluded and (not names or name in names)}
    globs = [_expand_backend_name(pattern, table) for pattern in patterns or entries]
    on_devices = device_implementations(entries) if any("@" in glob for glob in globs) else ()
    wanted = _select_matching((*processor_implementations(entries), *on_devices), globs)
    chosen = {item.entry.name: item.entry for item in wanted}
    absent = tuple(name for name, entry in chosen.items() if not entry.is_installed)
    # A backend is asked for by name, or by a pattern that begins with its name.
    asked = {name for name in chosen if names or any(pattern.split(".")[0] == name for pattern in patterns or ())}
    present = tuple(item for item in wanted if item.entry.name not in absent)
    exact = set(globs) if patterns or names else set()
    exact |= {Implementation(table[name]).name for name in names or () if not patterns}
    return ImplementationSelection(
        implementations=present,
        requested_by_name=tuple(item.name for item in present if item.name in exact),
        not_requested=tuple(name for name in absent if name not in asked),
        missing=tuple(name for name in absent if name in asked),
    )


def _expand_backend_name(pattern: str, table: Mapping[str, BackendEntry]) -> str:
    """Return the default mode for a backend's name, with or without a device; any other pattern unchanged."""
    name, at, device = pattern.partition("@")
    return f"{Implementation(table[name]).name}{at}{device}" if name in table else pattern


def _matches_implementation(pattern: str, item: Implementation) -> bool:
    """Return whether a glob matches an implementation; one on a device only if the glob has an ``@``."""
    return ("@" in pattern or not item.mode_declarations.device) and (
        pattern == ALL_MODES or fnmatchcase(item.name, pattern)
    )


def _select_matching(items: Sequence[Implementation], patterns: Sequence[str]) -> tuple[Implementation, ...]:
    for pattern in patterns:
        if pattern != ALL_MODES and not any(_matches_implementation(pattern, item) for item in items):
            names = dict.fromkeys(name for item in items for name in (item.entry.name, item.name))
            one = suggest_names(pattern, names, "`attncheck list implementations`")
            others = f"or use a glob such as 'torch.*', {ALL_MODES}, or file.py:function"
            here = {path.stem: path.name for path in Path().glob("*.py")}
            begin = [stem for stem in sorted(here) if stem.startswith(pattern.partition(":")[0])]
            close = begin[:1] or get_close_matches(pattern, here, 1, MIN_SIMILARITY)
            near = f"did you mean {here[close[0]]}? " if close else ""
            raise UsageError(f"no implementation is called {pattern!r}; {near}{one}; {others}")
    return tuple(item for item in items if any(_matches_implementation(pattern, item) for pattern in patterns))


@dataclass(frozen=True)
class UserImplementation(BackendEntry):
    """A user's implementation as a line of the table of backends.

    ``says`` is for people; ``conventions`` are those that it declares, by name; ``framework`` names the backend whose
    arrays it takes; ``mode`` is what it is called behind the dot, where that is not the function's name.
    ``required_keywords`` are, by function, the contract's keywords that it has no default for. ``source`` is the
    ``file`` and ``line`` of its ``def``, where it has one. ``requirements`` are, by function, what it requires of
    shapes, and ``parameters`` what it can be called with; it has no other functions. ``command_words`` name it
    on a command line, with ``--framework`` if the user gave that; empty for an object. ``device`` is where the
    tensors lie that it is given.
    ``signature`` names the family that it is called like, if any. ``properties`` are what it claims of properties,
    ``capabilities`` what it says that it can do. ``library_distribution`` is the distribution that it belongs to, which
    a file of a user's has not.
    """

    target: Target = field(default_factory=lambda: Target("", ""))
    framework: str = "numpy"
    function: str = "attention"
    conventions: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    mode: str = ""
    required_keywords: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    requirements: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    parameters: Mapping[str, Parameters] = field(default_factory=dict)
    command_words: tuple[str, ...] = ()
    device: str = ""
    signature: str = ""
    library_distribution: str = ""

    @property
    def is_installed(self) -> bool:
        """Return whether the framework that it asks for is there."""
        return BACKENDS[self.framework].is_installed

    @property
    def all_modes(self) -> dict[str, Mode]:
        """Its only mode."""
        target, name = self.target, self.mode or self.function
        where = shlex.join(target.program) or f"{target.module}:{target.attribute}".strip(":") or "a callable"
        conventions = {convention: DeclaredConvention(value, "", "") for convention, value in self.conventions.items()}
        # How it computes is not known: it is asked for everything, and stopped where it takes too much memory.
        root = re.sub("[._-]+", "_", self.name).lower()
        same_name = (name for name in self.distributions if re.sub("[._-]+", "_", name).lower() == root)
        # Its version is the version of its distribution. A user's file has none, and does not get the framework's.
        package = (
            next(iter(self.distributions), None)
            if target.program
            else self.library_distribution or next(same_name, self.name)
        )
        mode = Mode(
            name,
            self.module,
            where,
            self.classes,
            conventions,
            package=package,
            stores_all_scores=False,
            device=self.device,
        )
        return {name: mode}

    def environment_of(self, mode: str) -> Mapping[str, str]:
        """Return its framework's variables; no device is hidden, for it may use one that it does not declare."""
        return {**self.environment, **(VISIBLE_DEVICE_VARIABLES if self.device else {})}

    def shape_requirements(self, mode: str, function: str) -> tuple[Mapping[str, object], frozenset[str]]:
        """Return the requirements of a target's function on shapes, and the keywords that padding may use."""
        taken = self.parameters.get(function, Parameters(frozenset()))
        return self.requirements.get(function, {}), taken.accepted_names(PADDING_KEYWORDS)

    def has_function(self, mode: str, function: str) -> bool:
        """Return whether the target has a function of the contract."""
        return function in self.parameters

    def load(self, mode: str = "") -> Backend:
        """Load the target and wrap it."""
        from attncheck.execution.user_call import load_target, wrap_blind_target, wrap_target

        framework, target = BACKENDS[self.framework], self.target
        if target.is_blind:
            backend = wrap_blind_target(target, self.function, self.framework, self.device, self.capabilities)
        else:
            backend = wrap_target(load_target(target), self.function, framework, self.device, target.signature)
        return backend  # type: ignore[return-value] # it has those of the contract's functions that the target has


def make_user_entry(target: Target, declared: Mapping[str, Any], framework: str | None) -> UserImplementation:
    """Make the entry of a target from what it declares of itself (``user_call.read_target_declarations``).

    Raises ``UsageError`` for an unknown framework, and for a device that its arrays do not lie on.
    """
    said = framework or declared.get("framework")
    name = said or declared.get("array_framework") or "numpy"
    if name not in BACKENDS:
        raise UsageError(f"unknown framework {name!r}; {suggest_names(name, BACKENDS, one_of=False)}")
    if (device := declared.get("device") or "") and name not in FRAMEWORKS_WITH_DEVICES:
        known = ", ".join(FRAMEWORKS_WITH_DEVICES)
        raise UsageError(f"device {device}: {name} arrays cannot be on a device; declare the framework, one of {known}")
    backend = BACKENDS[name]
    advice = []
    if not said and (imported := declared.get("imported_framework")):
        function, library = target.attribute or "attention", declared.get("importing_library", "")
        advice = [advice_on_framework(imported, function, library, is_given=name == imported)]

    mappings = ("conventions", "properties", "capabilities", "resources", "distributions")
    of_functions = ("required_keywords", "source", "requirements", "parameters")
    tables: dict[str, Any] = {field: dict(declared.get(field) or {}) for field in (*mappings, *of_functions)}
    return UserImplementation(
        name=declared.get("name") or target.name,
        module=target.module,
        packages=backend.packages,
        own_process_for=backend.own_process_for,
        environment=backend.environment,
        fallback=backend.fallback,
        classes=dict(declared.get("classes") or NATIVE),
        target=target,
        framework=name,
        function=target.function,
        mode=declared.get("mode") or "",
        device=device,
        signature=declared.get("signature") or "",
        library_distribution=declared.get("library_distribution") or "",
        hints=(*declared.get("hints", ()), *advice),
        **tables,
    )


def as_blind(item: Implementation, variables: Mapping[str, str] | None = None, **fields: Any) -> Implementation:
    """Return a user's implementation whose calls are made in processes that show nothing of this package.

    ``fields`` are others of its target, and ``variables`` those of the environment that are added.
    """
    assert isinstance(item.entry, UserImplementation), "only code of users is called so"
    added = tuple((variables or {}).items())
    target = replace(item.entry.target, is_blind=True, added_variables=added, **fields)
    return replace(item, entry=replace(item.entry, target=target))


def with_report_name(item: Implementation, name: str) -> Implementation:
    """Return a user's implementation under another name in reports, as package.function; any other as it is."""
    if not isinstance(item.entry, UserImplementation) or item.name == name:
        return item
    package, _, mode = name.rpartition(".")
    return replace(item, entry=replace(item.entry, name=package, mode=mode), mode=mode)


def implementation_path(item: Implementation) -> str:
    """Return the place of a user's implementation, relative to this folder; empty for any other."""
    target = item.entry.target if isinstance(item.entry, UserImplementation) else Target("")
    module = Path(os.path.relpath(target.module)).as_posix() if target.module.endswith(".py") else target.module
    return shlex.join(target.program) or f"{module}:{target.attribute}".strip(":")


def source_location(entry: BackendEntry) -> Mapping[str, Any]:
    """Return the file and line at which a user's implementation is defined; nothing of a bundled one."""
    return entry.source if isinstance(entry, UserImplementation) else {}
