"""The entries of the table of frameworks: its modules, its modes, and what they need and declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

from attncheck.backends.contract import Backend
from attncheck.backends.devices import HIDDEN_DEVICE_VARIABLES, VISIBLE_DEVICE_VARIABLES, on_device
from attncheck.backends.families import ATTENTION_FUNCTIONS, FAMILIES, Family

NATIVE: Mapping[str, str] = {"float64": "native", "float32": "native"}
EAGER: Mapping[str, str] = {**NATIVE, "bfloat16": "eager", "float16": "eager"}
"""Every intermediate is stored; in 16 bit, products and sums accumulate in float32."""
EAGER_PRE: Mapping[str, str] = {**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"}
"""The same, and the query is scaled and stored before its product with the keys."""
FUSED: Mapping[str, str] = {**NATIVE, "bfloat16": "fused", "float16": "fused"}
FUSED_BWD: Mapping[str, str] = {**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"}
"""Scores and softmax are float32 in 16 bit, too; the weights are stored, and in the latter also their gradient."""

EAGER_MODE = "eager"
"""The mode that every framework has: modular code, one operation after the other."""

ABSORBED = "latent attention with its projections absorbed: no key and no value is made"
"""What the mode is that every framework has for latent attention."""

PYTHON_VERSIONS = ("3.11", "3.12", "3.13")
"""Releases of Python on which everything is tested."""
PADDING_KEYWORDS = frozenset({"key_lengths", "mask", "scale"})
"""Keywords by which a call can be padded. A mode that ``requires`` anything takes them all."""


@dataclass(frozen=True)
class DeclaredConvention:
    """A result that a mode gives on purpose where the mathematics leaves it open.

    ``reason`` says why, ``source`` where its authors document it: owner/name#number, or a URL. What nobody documents as
    intended is an expected failure (``expected_failures/``), however regularly it happens.
    """

    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class Fallback:
    """Rounding models of a framework on processors for which its library of fast products has nothing.

    Attributes:
        switch: The variable by which users turn that library on (1) or off (0), whatever the processor.
        turned_on_by: It is on by default where the processor has one of these flags (``/proc/cpuinfo``).
        needs: It has these dtypes only where the processor has one of these flags.
        dtypes: The dtypes in which products round otherwise without it.
        becomes: The rounding models that hold then, by those that are declared.
    """

    switch_variable: str
    turned_on_by: frozenset[str]
    required_flags: frozenset[str]
    dtypes: frozenset[str]
    replaced_models: Mapping[str, str]

    def applies(self, flags: frozenset[str], environment: Mapping[str, str]) -> bool:
        """Return whether a process with these variables falls back, on a processor with these flags."""
        default = "0" if self.turned_on_by.isdisjoint(flags) else "1"
        is_on = environment.get(self.switch_variable, default).lower() in ("1", "true")
        return not is_on or self.required_flags.isdisjoint(flags)


@dataclass(frozen=True)
class Mode:
    """One way to compute attention in a framework: what is judged, under the name framework.mode.

    ``module`` has functions of ``contract.py``, in itself or, with ``attribute``, in an object of that name, which may
    be given as ``module:attribute``. ``classes`` declares the rounding model per dtype (``docs/numerics.md``, section
    3); a dtype that is not there is unsupported. ``conventions`` declares what a mode without the keyword means on
    purpose: what a row without a key gives (``empty_rows``: zero, uniform or nan). ``description`` is one line for
    people. ``package`` is the distribution whose version is the mode's, where that is not the framework's first.
    ``stores_all_scores`` tells whether the score matrix is ever in memory whole, or its kernel takes it in tiles: then
    it is asked for sequences of any length. ``requires`` declares the shapes that it takes alone; calls are padded to
    them (``docs/how-to/kernel.md``). ``own_process`` keeps it out of the process in which the framework's other modes
    run, because it configures the framework otherwise. ``runs_only_standard_cases`` asks it by default for the standard
    cases alone (``planning.plan``), because it compiles each separately. One that ``folds_sequences`` has no function
    for sequences that lie one after the other: it is asked for attention with one mask for all of them. ``device`` is
    where its tensors lie, such as ``cuda``; empty for the processor. ``environment`` is set in its worker besides the
    framework's. Where ``falls_back`` is false, the framework's ``fallback`` is not the mode's.
    """

    name: str
    module: str
    description: str
    classes: Mapping[str, str] = field(default_factory=lambda: EAGER)
    conventions: Mapping[str, DeclaredConvention] = field(default_factory=dict)
    attribute: str | None = None
    package: str | None = None
    stores_all_scores: bool = True
    requires: Mapping[str, object] = field(default_factory=dict)
    own_process: bool = False
    runs_only_standard_cases: bool = False
    folds_sequences: bool = False
    device: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    falls_back: bool = True

    def __post_init__(self) -> None:
        module, _, attribute = self.module.partition(":")
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "attribute", attribute or self.attribute)


@dataclass(frozen=True)
class Library(Mode):
    """A library's function that is called like those of a family: a mode that needs no code of its own.

    ``function_path`` names the function as ``module:function``. Every call passes ``fixed_arguments`` to it.
    ``family_changes`` are attributes of its ``family`` (``families.py``) with other values. ``attribute`` names its
    arrays in ``library_arrays.py``, which compute its gradients if it ``has_gradients``.
    """

    module: str = "attncheck.backends.library_arrays"
    description: str = ""
    function_path: str = ""
    family: str = ""
    family_changes: Mapping[str, Any] = field(default_factory=dict)
    fixed_arguments: Mapping[str, Any] = field(default_factory=dict)
    has_gradients: bool = True
    folds_sequences: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.description:
            object.__setattr__(self, "description", self.function_path.replace(":", "."))

    @property
    def adapted_family(self) -> Family:
        """The family, with what the function has otherwise."""
        return replace(FAMILIES[self.family], **self.family_changes)

    def on_arrays(self, arrays: Any, package: str) -> Backend:
        """Return the function as those of the contract, on a framework's arrays; its version is the package's."""
        from importlib.metadata import version

        from attncheck.backends.family_calls import library_functions

        def describe() -> dict[str, str]:
            return {**arrays.describe(), "version": version(package)}

        functions = library_functions(
            self.function_path, self.adapted_family, arrays, self.fixed_arguments, has_gradients=self.has_gradients
        )
        services = {service: getattr(arrays, service) for service in ("prepare", "from_numpy", "to_numpy")}
        return cast(Backend, SimpleNamespace(**services, describe=describe, **functions))


@dataclass(frozen=True)
class BackendEntry:
    """One framework's line in the table.

    ``module`` is the eager mode's, empty for a library that has no eager code; ``modes`` are all others.
    ``default_mode`` names the one that runs where nobody says which: the way in which the framework's users compute.
    ``packages`` are the distributions whose versions a report names, the first one the importable framework itself.
    ``own_process_for`` names the dtypes that need a process of their own, because the framework has to be configured
    for them as a whole. ``environment`` is set in the worker before the framework is imported. ``classes`` are the
    eager mode's. ``cache`` are the variables by which the framework keeps what it compiles in a ``{folder}``,
    ``without_cache`` those by which it keeps nothing. ``resources`` is what a worker of a cluster must offer besides
    the framework, and how much of it: ``{"GPU": 1}``. ``import_name`` is the module that is imported where the first
    package is a mere folder of modules, or is imported under another name. Of what others wrote, ``hints`` are for its
    author, and ``distributions`` are the versions of what it imports. ``requirement`` is the oldest release that is
    supported, and ``pythons`` those releases of Python for which the framework has a build that is tested.
    ``eager_compiles`` is set where the eager mode is ``runs_only_standard_cases`` as well. ``device_modes`` are those
    on an accelerator, which run only where somebody names them with their device (``torch.sdpa@cuda``,
    ``'torch.*@cuda'``). ``fallback`` says how it rounds on processors without what its fast products need.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    modes: tuple[Mode, ...] = ()
    default_mode: str = EAGER_MODE
    own_process_for: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=lambda: EAGER)
    cache: Mapping[str, str] = field(default_factory=dict)
    without_cache: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    import_name: str = ""
    requirement: str = ""
    pythons: tuple[str, ...] = PYTHON_VERSIONS
    eager_compiles: bool = False
    device_modes: tuple[Mode, ...] = ()
    fallback: Fallback | None = None

    @property
    def framework(self) -> str:
        """The framework that a worker must have."""
        return self.name

    @property
    def is_installed(self) -> bool:
        """Return whether the framework can be imported; it is not imported to find out."""
        spec = find_spec((self.import_name or self.packages[0]).partition(".")[0])
        if spec is not None and "." in self.import_name:
            spec = PathFinder.find_spec(self.import_name, spec.submodule_search_locations)
        # Any folder of that name, in the working directory or left behind by an uninstall, is a namespace: no origin.
        return spec is not None and spec.origin is not None

    @property
    def all_modes(self) -> dict[str, Mode]:
        """Every mode of the processor by name, eager first."""
        eager = Mode(
            EAGER_MODE,
            self.module,
            "modular code, one operation after the other",
            self.classes,
            runs_only_standard_cases=self.eager_compiles,
        )
        return {mode.name: mode for mode in ((eager, *self.modes) if self.module else self.modes)}

    def get_mode(self, name: str) -> Mode:
        """Return a mode, on a device or not. Raises ``KeyError``."""
        modes = self.all_modes
        return modes[name] if name in modes else {mode.name: mode for mode in self.device_modes}[name]

    def environment_of(self, mode: str) -> Mapping[str, str]:
        """Return the variables that a worker sets for a mode before the framework is imported."""
        chosen = self.get_mode(mode)
        return {
            **self.environment,
            **chosen.environment,
            **(VISIBLE_DEVICE_VARIABLES if chosen.device else HIDDEN_DEVICE_VARIABLES),
        }

    def shape_requirements(self, mode: str, function: str) -> tuple[Mapping[str, object], frozenset[str]]:
        """Return what a mode requires of shapes, and the keywords that its ``function`` can be given for padding."""
        chosen = self.get_mode(mode)
        is_offered = not isinstance(chosen, Library) or function in ATTENTION_FUNCTIONS
        return (chosen.requires if is_offered else {}), PADDING_KEYWORDS

    def has_function(self, mode: str, function: str) -> bool:
        """Return whether a mode has a function for packed sequences, or is asked for attention with a mask instead."""
        return not (self.get_mode(mode).folds_sequences and function.startswith("packed_"))

    def load(self, mode: str = EAGER_MODE) -> Backend:
        """Import a mode's module, and with it the framework; the eager one's unless another is named."""
        chosen = self.get_mode(mode)
        module = import_module(chosen.module)
        backend = cast(Backend, module if chosen.attribute is None else getattr(module, chosen.attribute))
        on_its_device = on_device(backend, self.framework, chosen.device)
        if not isinstance(chosen, Library):
            return on_its_device
        return chosen.on_arrays(on_its_device, chosen.package or self.packages[0])


def library_entry(
    name: str, packages: tuple[str, ...], requirement: str, *modes: Mode, default_mode: str = "", **more: Any
) -> BackendEntry:
    """Return the line of a library, without eager code: its first mode is the default, or another that is named."""
    return BackendEntry(name, "", packages, modes, default_mode or modes[0].name, requirement=requirement, **more)
