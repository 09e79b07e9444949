"""The frameworks that attncheck knows: one module each, listed in one table.

The axis letters of docstrings stand in ``contract.py``.

To add a framework, write its module (copy ``numpy_backend.py``, keep the names and their order) and add its line here.
A native kernel or a compiled mode of a framework is a module of its own with those of the functions that it has, and a
``Mode`` in the framework's line.
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


PADDED_BY = frozenset({"key_lengths", "mask", "scale"})
"""Keywords by which a call can be padded. A mode that ``requires`` anything takes them all."""


@dataclass(frozen=True)
class DeclaredConvention:
    """What a mode gives on purpose where the mathematics leaves it open.

    ``reason`` says why, ``source`` where its authors document it: owner/name#number, or a URL. What nobody documents as
    intended is an expected failure (``expected_failures/``), however regularly it happens.
    """

    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class Mode:
    """One way to compute attention in a framework: what is judged, under the name framework.mode.

    ``module`` has functions of ``contract.py``, in itself or, with ``attribute``, in an object of that name.
    ``classes`` declares the rounding model per dtype (``docs/numerics.md``, section 3); a dtype that is not there is
    unsupported. ``conventions`` declares what a mode without the keyword means on purpose: what a row without a key
    gives (``empty_rows``: zero, uniform or nan). ``description`` is one line for people. ``package`` is the
    distribution whose version is the mode's, where that is not the framework's first. ``holds_scores`` tells whether
    the score matrix is ever in memory whole, or its kernel takes it in tiles: then it is asked for sequences of any
    length. ``requires`` declares the shapes that it takes alone; calls are padded to them (``docs/kernels.md``).
    """

    name: str
    module: str
    description: str
    classes: Mapping[str, str] = field(default_factory=lambda: EAGER)
    conventions: Mapping[str, DeclaredConvention] = field(default_factory=dict)
    attribute: str | None = None
    package: str | None = None
    holds_scores: bool = True
    requires: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendEntry:
    """One framework's line in the table.

    ``module`` is the eager mode's, which runs by default; ``modes`` are all others. ``packages`` are the distributions
    whose versions a report names, the first one the importable framework itself. ``own_process_for`` names the dtypes
    that need a process of their own, because the framework has to be configured for them as a whole. ``environment`` is
    set in the worker before the framework is imported. ``classes`` are the eager mode's. ``cache`` are the variables by
    which the framework keeps what it compiles in a ``{folder}``, ``without_cache`` those by which it keeps nothing.
    ``resources`` is what a worker of a cluster must offer besides the framework, and how much of it: ``{"GPU": 1}``.
    Of what others wrote, ``hints`` are for its author, and ``distributions`` are the versions of what it imports.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    modes: tuple[Mode, ...] = ()
    own_process_for: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=lambda: EAGER)
    cache: Mapping[str, str] = field(default_factory=dict)
    without_cache: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        """The framework that a worker must have."""
        return self.name

    @property
    def is_installed(self) -> bool:
        """Whether the framework can be imported; it is not imported to find out."""
        spec = find_spec(self.packages[0])
        # Any folder of that name, in the working directory or left behind by an uninstall, is a namespace: no origin.
        return spec is not None and spec.origin is not None

    @property
    def all_modes(self) -> Mapping[str, Mode]:
        """Every mode by name, eager first."""
        eager = Mode("eager", self.module, "modular code, one operation after the other", self.classes)
        return {mode.name: mode for mode in (eager, *self.modes)}

    def requires_of(self, mode: str, function: str) -> tuple[Mapping[str, object], frozenset[str]]:
        """Return what a mode requires of shapes, and the keywords that its ``function`` can be given for padding."""
        return self.all_modes[mode].requires, PADDED_BY

    def load(self, mode: str = "eager") -> Backend:
        """Import a mode's module, and with it the framework."""
        found = self.all_modes[mode]
        module = import_module(found.module)
        return cast(Backend, module if found.attribute is None else getattr(module, found.attribute))


NATIVE: Mapping[str, str] = {"float64": "native", "float32": "native"}
EAGER: Mapping[str, str] = {**NATIVE, "bfloat16": "eager", "float16": "eager"}
"""Every intermediate is stored; in 16 bit, products and sums accumulate in float32."""

# The pull request changes "the stance of SDPA on what to do for fully masked out rows": NaN until then, zeros since.
_ZERO_ROWS = {
    "empty_rows": DeclaredConvention(
        "zero",
        "scaled_dot_product_attention gives zeros for a query whose keys are all masked, so that NaN spreads to no "
        "gradient: its softmax is a safe one.",
        "pytorch/pytorch#133882",
    )
}
# A width of its own for the values is "not supported by dot_product_attention".
_ONE_WIDTH: Mapping[str, object] = {"value_width": "equal"}
_TORCH_MODES = (
    Mode("compile", "attncheck.backends.torch_compile", "torch.compile of the eager code"),
    # Eager in 16 bits, too: what is not rewritten stores its scores.
    Mode(
        "compile_output",
        "attncheck.backends.torch_compile_output",
        "torch.compile of attention that returns its output alone, which it may rewrite",
    ),
    Mode(
        "sdpa",
        "attncheck.backends.torch_sdpa",
        "functional.scaled_dot_product_attention with the kernel that torch picks",
        classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute="DEFAULT",
        holds_scores=False,
    ),
    Mode(
        "sdpa_math",
        "attncheck.backends.torch_sdpa",
        "functional.scaled_dot_product_attention with its math kernel, which keeps float32 between 16-bit ends",
        classes={**NATIVE, "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS,
        attribute="MATH",
    ),
    Mode(
        "mha",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention without weights, which calls scaled_dot_product_attention",
        classes={**NATIVE, "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS,
        attribute="WITHOUT_WEIGHTS",
    ),
    # The query is scaled and stored before its product with the keys, in the two below.
    Mode(
        "mha_weights",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention with weights, one operation after the other",
        classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
        attribute="WITH_WEIGHTS",
    ),
    Mode(
        "mha_fast",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention on its fast path, for self-attention in C++",
        classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
        attribute="FAST",
    ),
)

BACKENDS: Mapping[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        # NumPy's own float16 products accumulate in float16, and it has no bfloat16.
        BackendEntry("numpy", "attncheck.backends.numpy_backend", ("numpy",), classes=NATIVE),
        BackendEntry(
            "torch",
            "attncheck.backends.torch_backend",
            ("torch",),
            modes=_TORCH_MODES,
            cache={"TORCHINDUCTOR_CACHE_DIR": "{folder}"},
            without_cache={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        ),
        BackendEntry(
            "tensorflow",
            "attncheck.backends.tensorflow_backend",
            ("tensorflow", "keras"),
            modes=(
                Mode(
                    "function",
                    "attncheck.backends.tensorflow_function",
                    "the eager code in tf.function",
                    attribute="GRAPH",
                ),
                Mode(
                    "function_output",
                    "attncheck.backends.tensorflow_function_output",
                    "the eager code in tf.function, of which the output alone is returned",
                    attribute="GRAPH",
                ),
                Mode(
                    "xla",
                    "attncheck.backends.tensorflow_function",
                    "the eager code in tf.function(jit_compile=True)",
                    attribute="XLA",
                ),
                Mode(
                    "xla_output",
                    "attncheck.backends.tensorflow_function_output",
                    "the eager code in tf.function(jit_compile=True), of which the output alone is returned",
                    attribute="XLA",
                ),
                # The Keras calls store their scores in 16 bits.
                Mode(
                    "keras_mha",
                    "attncheck.backends.tensorflow_keras_mha",
                    "keras.layers.MultiHeadAttention",
                    package="keras",
                ),
                Mode(
                    "keras_mha_weights",
                    "attncheck.backends.tensorflow_keras_mha",
                    "keras.layers.MultiHeadAttention with return_attention_scores, one operation after the other",
                    attribute="WITH_WEIGHTS",
                    package="keras",
                ),
                Mode(
                    "keras_attention",
                    "attncheck.backends.tensorflow_keras_attention",
                    "keras.layers.Attention, heads folded into the batch",
                    package="keras",
                ),
                Mode(
                    "keras_additive",
                    "attncheck.backends.tensorflow_keras_additive",
                    "the scores of keras.layers.AdditiveAttention behind dense layers",
                    package="keras",
                ),
                Mode(
                    "keras_dpa",
                    "attncheck.backends.tensorflow_keras_dpa",
                    "keras.ops.dot_product_attention",
                    package="keras",
                ),
            ),
            # TensorFlow otherwise prints a page of start-up notices into everybody's terminal. Keras computes with
            # TensorFlow unless a file in the user's home says otherwise.
            # It has no cache here: of XLA's, a damaged entry makes the operation fail that it belongs to.
            environment={"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
        ),
        BackendEntry(
            "jax",
            "attncheck.backends.jax_backend",
            ("jax", "jaxlib"),
            modes=(
                Mode("jit", "attncheck.backends.jax_jit", "the eager code in jax.jit"),
                Mode(
                    "jit_output",
                    "attncheck.backends.jax_jit_output",
                    "the eager code in jax.jit, of which the output alone is returned",
                ),
                # Scores, softmax and sums in float32; weights, and in the backward pass their gradient, in 16 bits.
                Mode(
                    "dpa",
                    "attncheck.backends.jax_dpa",
                    "jax.nn.dot_product_attention, implementation xla",
                    classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
                    requires=_ONE_WIDTH,
                ),
                # Compiled for a CPU it refuses float16: "The precision 'F16_F16_F32' is not supported by dot_general".
                Mode(
                    "dpa_jit",
                    "attncheck.backends.jax_dpa_jit",
                    "jax.nn.dot_product_attention in jax.jit",
                    classes={**NATIVE, "bfloat16": "fused_bwd"},
                    requires=_ONE_WIDTH,
                ),
            ),
            # 64-bit types are a switch of the whole process, and it changes how 32-bit programs promote types.
            own_process_for=frozenset({"float64"}),
            # It would keep only what took a second to compile; here thousands of operations take a hundredth each.
            cache={
                "JAX_COMPILATION_CACHE_DIR": "{folder}",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            without_cache={"JAX_ENABLE_COMPILATION_CACHE": "false"},
        ),
    )
}
