"""The frameworks that attncheck knows: one module each, listed in one table.

Axis letters, used in every docstring of the project:

    B batch    H heads    Lq query length    Lk key length    D query and key width per head    Dv value width per head
    E model width    A width of the additive score's hidden layer

To add a framework, write its module (copy ``numpy_backend.py``, keep the names and their order) and add its line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from attncheck.backends.contract import Backend

if TYPE_CHECKING:
    # Lets the type checker hold every module against the contract; nothing is imported when the program runs.
    from attncheck.backends import jax_backend, numpy_backend, tensorflow_backend, torch_backend

    _CONFORMING: tuple[Backend, ...] = (numpy_backend, torch_backend, tensorflow_backend, jax_backend)


@dataclass(frozen=True)
class BackendEntry:
    """One framework's line in the table.

    ``packages`` are the distributions whose versions a report names, the first one the importable framework itself.
    ``own_process_for`` names the dtypes that need a process of their own, because the framework has to be configured
    for them as a whole. ``environment`` is set in the worker before the framework is imported.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    own_process_for: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """Whether the framework can be imported; it is not imported to find out."""
        spec = find_spec(self.packages[0])
        # Any folder of that name, in the working directory or left behind by an uninstall, is a namespace: no origin.
        return spec is not None and spec.origin is not None

    def load(self) -> Backend:
        """Import the framework's module, and with it the framework."""
        return cast(Backend, import_module(self.module))


BACKENDS: Mapping[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry("numpy", "attncheck.backends.numpy_backend", ("numpy",)),
        BackendEntry("torch", "attncheck.backends.torch_backend", ("torch",)),
        BackendEntry(
            "tensorflow",
            "attncheck.backends.tensorflow_backend",
            ("tensorflow", "keras"),
            # TensorFlow otherwise prints a page of start-up notices into everybody's terminal.
            environment={"TF_CPP_MIN_LOG_LEVEL": "3"},
        ),
        BackendEntry(
            "jax",
            "attncheck.backends.jax_backend",
            ("jax", "jaxlib"),
            # 64-bit types are a switch of the whole process, and it changes how 32-bit programs promote types.
            own_process_for=frozenset({"float64"}),
        ),
    )
}
