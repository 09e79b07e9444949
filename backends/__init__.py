"""The frameworks that attncheck knows: one module each, listed in one table.

The axis letters of docstrings stand in ``contract.py``.

To add a framework, write its module (copy ``numpy_backend.py``, keep the names and their order) and add its line here;
``tests/backends/test_table.py`` then says what the files of tox, pip, make and CI lack of it.
A native kernel or a compiled mode of a framework is a module of its own with those of the functions that it has, and a
``Mode`` in the framework's line. What is no framework but has attention of its own stands in ``libraries.py``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from attncheck.backends.entry import ABSORBED, FUSED_BWD
from attncheck.backends.entry import EAGER as EAGER
from attncheck.backends.entry import EAGER_MODE as EAGER_MODE
from attncheck.backends.entry import NATIVE as NATIVE
from attncheck.backends.entry import PADDING_KEYWORDS as PADDING_KEYWORDS
from attncheck.backends.entry import PYTHON_VERSIONS as PYTHON_VERSIONS
from attncheck.backends.entry import BackendEntry as BackendEntry
from attncheck.backends.entry import DeclaredConvention as DeclaredConvention
from attncheck.backends.entry import Fallback as Fallback
from attncheck.backends.entry import Library as Library
from attncheck.backends.entry import Mode as Mode
from attncheck.backends.libraries import LIBRARIES as LIBRARIES
from attncheck.backends.torch_modes import TORCH_DEVICE_MODES, TORCH_MODES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from numpy.typing import NDArray

    # Lets the type checker hold every module against the contract; nothing is imported when the program runs.
    from attncheck.backends import jax_backend, numpy_backend, tensorflow_backend, torch_backend
    from attncheck.backends.contract import Backend

    _CONFORMING: tuple[Backend, ...] = (numpy_backend, torch_backend, tensorflow_backend, jax_backend)

# A width of its own for the values is "not supported by dot_product_attention".
_EQUAL_VALUE_WIDTH: Mapping[str, object] = {"value_width": "equal"}
_NUMPY_MODES = (Mode("absorbed", "attncheck.backends.numpy_backend:ABSORBED", ABSORBED, classes=NATIVE),)

# By the implementation that runs everywhere. A key that may not be attended gets a large negative score there, so that
# a row without any other attends to all of them alike: https://docs.jax.dev/en/latest/_autosummary/jax.nn.html
_JAX_DOT_PRODUCT_ATTENTION: Mapping[str, Any] = {
    "module": "attncheck.backends.jax_jit",
    "function_path": "jax.nn:dot_product_attention",
    "family": "keras",
    "fixed_arguments": {"implementation": "xla"},
}

# On a GPU, unless a precision is asked for, float32 products are those of tensor cores:
# https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
_TENSOR_CORE_CLASSES = {**EAGER, "float32": "tf32_products"}
_JAX_ON_CUDA = (
    Mode(
        "eager@cuda",
        "attncheck.backends.jax_backend",
        "op by op; on a GPU",
        _TENSOR_CORE_CLASSES,
        runs_only_standard_cases=True,
        device="cuda",
    ),
    Mode(
        "jit@cuda",
        "attncheck.backends.jax_jit:JIT",
        "the eager code in jax.jit; on a GPU",
        _TENSOR_CORE_CLASSES,
        runs_only_standard_cases=True,
        device="cuda",
    ),
    Library(
        "dpa_jit@cuda",
        description="jax.nn.dot_product_attention in jax.jit; on a GPU",
        **_JAX_DOT_PRODUCT_ATTENTION,
        attribute="LIBRARY_JIT",
        classes={"float64": "native", "float32": "tf32_products", "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        requires=_EQUAL_VALUE_WIDTH,
        runs_only_standard_cases=True,
        device="cuda",
    ),
)

# Without oneDNN, a product of bfloat16 matrices is one of float32 whose result is cut off: FloatToBFloat16 in
# tensorflow/core/framework/bfloat16.cc, as BatchMatMul of tensorflow/core/kernels/matmul_op_impl.h calls it. oneDNN is
# on by default where tensorflow/core/util/util.cc (IsMKLEnabled) sees one of the first flags, and has bfloat16 where
# IsBF16SupportedByOneDNNOnThisCPU sees one of the second.
_TENSORFLOW_WITHOUT_ONEDNN = Fallback(
    switch_variable="TF_ENABLE_ONEDNN_OPTS",
    turned_on_by=frozenset({"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}),
    required_flags=frozenset({"avx512f", "avx_ne_convert"}),
    dtypes=frozenset({"bfloat16"}),
    replaced_models={"eager": "eager_cut"},
)

BACKENDS: Mapping[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        # NumPy's own float16 products accumulate in float16, and it has no bfloat16.
        BackendEntry(
            "numpy",
            "attncheck.backends.numpy_backend",
            ("numpy",),
            modes=_NUMPY_MODES,
            classes=NATIVE,
            requirement="numpy>=2.0",
        ),
        BackendEntry(
            "torch",
            "attncheck.backends.torch_backend",
            ("torch",),
            modes=TORCH_MODES,
            device_modes=TORCH_DEVICE_MODES,
            cache={"TORCHINDUCTOR_CACHE_DIR": "{folder}"},
            without_cache={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
            requirement="torch>=2.5",
            pythons=("3.11",),  # the one on which tox tests torch
        ),
        BackendEntry(
            "tensorflow",
            "attncheck.backends.tensorflow_backend",
            ("tensorflow", "keras"),
            modes=(
                *(
                    Mode(
                        name,
                        f"attncheck.backends.tensorflow_function:{attribute}",
                        f"the eager code in {compiler}{', of which only the output is returned' * is_output}",
                        runs_only_standard_cases=True,
                        folds_sequences=is_output,
                        falls_back=not name.startswith("xla"),
                    )
                    for name, attribute, compiler, is_output in (
                        ("function", "GRAPH", "tf.function", False),
                        ("function_output", "GRAPH_OUTPUT", "tf.function", True),
                        ("xla", "XLA", "tf.function(jit_compile=True)", False),
                        ("xla_output", "XLA_OUTPUT", "tf.function(jit_compile=True)", True),
                    )
                ),
                # The Keras calls store their scores in 16 bits.
                Mode(
                    "keras_mha",
                    "attncheck.backends.tensorflow_keras:MHA",
                    "keras.layers.MultiHeadAttention",
                    package="keras",
                ),
                Mode(
                    "keras_mha_weights",
                    "attncheck.backends.tensorflow_keras:MHA_WITH_WEIGHTS",
                    "keras.layers.MultiHeadAttention with return_attention_scores, one operation after the other",
                    package="keras",
                ),
                Mode(
                    "keras_attention",
                    "attncheck.backends.tensorflow_keras:ATTENTION",
                    "keras.layers.Attention, heads folded into the batch",
                    package="keras",
                    folds_sequences=True,
                ),
                Mode(
                    "keras_additive",
                    "attncheck.backends.tensorflow_keras:ADDITIVE",
                    "the scores of keras.layers.AdditiveAttention after dense layers",
                    package="keras",
                ),
                Library(
                    "keras_dpa",
                    function_path="keras.ops:dot_product_attention",
                    family="keras",
                    family_changes={"softcap": ()},  # for JAX on TPUs alone
                    module="attncheck.backends.tensorflow_keras:LIBRARY",
                    package="keras",
                ),
                Mode("absorbed", "attncheck.backends.tensorflow_function:ABSORBED", ABSORBED),
            ),
            # TensorFlow otherwise prints a page of start-up notices into everybody's terminal. Keras computes with
            # TensorFlow unless a file in the user's home says otherwise.
            # It has no cache here: of XLA's, a damaged entry makes the operation fail that it belongs to.
            environment={"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
            requirement="tensorflow>=2.18.1",
            fallback=_TENSORFLOW_WITHOUT_ONEDNN,
        ),
        BackendEntry(
            "jax",
            "attncheck.backends.jax_backend",
            ("jax", "jaxlib"),
            default_mode="jit",  # what is not inside jax.jit is compiled too, each operation by itself
            modes=(
                Mode(
                    "jit",
                    "attncheck.backends.jax_jit:JIT",
                    "the eager code in jax.jit: JAX's default mode",
                    runs_only_standard_cases=True,
                ),
                Mode(
                    "jit_output",
                    "attncheck.backends.jax_jit:OUTPUT",
                    "the eager code in jax.jit, of which only the output is returned",
                    runs_only_standard_cases=True,
                    folds_sequences=True,
                ),
                # Scores, softmax and sums in float32; weights, and in the backward pass their gradient, in 16 bits.
                Library(
                    "dpa",
                    description="jax.nn.dot_product_attention, implementation xla",
                    **_JAX_DOT_PRODUCT_ATTENTION,
                    attribute="LIBRARY",
                    classes=FUSED_BWD,
                    requires=_EQUAL_VALUE_WIDTH,
                    runs_only_standard_cases=True,
                ),
                # Compiled for a CPU it refuses float16: "The precision 'F16_F16_F32' is not supported by dot_general".
                Library(
                    "dpa_jit",
                    description="jax.nn.dot_product_attention in jax.jit",
                    **_JAX_DOT_PRODUCT_ATTENTION,
                    attribute="LIBRARY_JIT",
                    classes={**NATIVE, "bfloat16": "fused_bwd"},
                    requires=_EQUAL_VALUE_WIDTH,
                    runs_only_standard_cases=True,
                ),
                Mode(
                    "absorbed",
                    "attncheck.backends.jax_jit:ABSORBED",
                    f"{ABSORBED}; in jax.jit",
                    runs_only_standard_cases=True,
                ),
            ),
            device_modes=_JAX_ON_CUDA,
            eager_compiles=True,
            # 64-bit types are a switch of the whole process, and it changes how 32-bit programs promote types.
            own_process_for=frozenset({"float64"}),
            # It would keep only what took a second to compile; here thousands of operations take a hundredth each.
            cache={
                "JAX_COMPILATION_CACHE_DIR": "{folder}",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                "ATTNCHECK_JAX_PROGRAMS": "{folder}/programs",
            },
            without_cache={"JAX_ENABLE_COMPILATION_CACHE": "false"},
            requirement="jax>=0.5",
        ),
    )
}

ALL_ENTRIES: Mapping[str, BackendEntry] = ChainMap(dict(LIBRARIES), cast(dict[str, BackendEntry], BACKENDS))
"""Frameworks, and behind them the libraries that run only where they are named; a view, so that both may change."""

ENTRY_POINTS = "attncheck.implementations"
"""The group of entry points: ``[project.entry-points."attncheck.implementations"]``."""


_FRAMEWORK_OF_MODULE: Mapping[str, str] = {"jaxlib": "jax", **{name: name for name in BACKENDS}}


def as_numpy(value: Any) -> NDArray[Any]:
    """Return the numbers of a framework's array. Raises ``ValueError`` for anything else."""
    import numpy as np  # which the table alone does not need

    framework = _FRAMEWORK_OF_MODULE.get(type(value).__module__.partition(".")[0], "numpy")
    array = np.asarray(BACKENDS[framework].load().to_numpy(value))
    if array.dtype.hasobject:
        raise ValueError(f"a {type(value).__name__} is no array of numpy, torch, tensorflow or jax")
    return array


def published_entry_points() -> dict[str, EntryPoint]:
    """Return the implementations that installed packages publish in the entry point group, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
