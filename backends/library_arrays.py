"""Arrays of the table's libraries: conversions, gradients and programs, a few small methods each.

The family of a library (``families.py``) defines the call of its attention. A library is imported when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Tensor

Function = Callable[..., Tensor]
Others = Mapping[str, Any]
"""Keywords of a call that get no gradients."""


class EagerArrays:
    """Arrays of a framework or library whose functions are called without compilation."""

    def compile_program(self, function: Function, static: Collection[str]) -> Function:
        """Return the function unchanged."""
        return function


@dataclass(frozen=True)
class FrameworkArrays(EagerArrays):
    """A framework's arrays: conversions, gradients and description are those of its ``module`` in this package."""

    module: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@dataclass(frozen=True)
class JittedArrays(FrameworkArrays):
    """JAX arrays, for functions that ``compile_function`` puts into ``jax.jit``."""

    compile_function: Callable[[Function, Collection[str]], Function]

    def compile_program(self, function: Function, static: Collection[str]) -> Function:
        """Return the compiled function: one program for each set of shapes and of ``static`` arguments."""
        return self.compile_function(function, static)

    def gradients(self, function: Function, inputs: Sequence[Tensor], grad_output: Tensor, others: Others) -> Any:
        """Differentiate in one program."""
        import jax

        arrays = {name: value for name, value in others.items() if hasattr(value, "shape")}
        rest = {name: value for name, value in others.items() if name not in arrays}

        def differentiated(inputs: Sequence[Tensor], grad_output: Tensor, arrays: Others) -> Any:
            return self.module.gradients(function, inputs, grad_output, {**arrays, **rest})

        return jax.jit(differentiated)(list(inputs), grad_output, arrays)


class TokamaxArrays(JittedArrays):
    """JAX arrays in ``jax.jit``, for tokamax."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Configure JAX, and hide this process's command line from tokamax, which would parse all of it."""
        from absl import flags

        self.module.prepare(dtype, threads)
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(["attncheck"])  # the fix of openxla/tokamax#957


class KerasOnAnotherBackend(RuntimeError):
    """Keras has been imported to compute with another framework."""


@dataclass(frozen=True)
class KerasArrays:
    """Arrays of the framework that Keras computes with, which the environment sets once for a process."""

    arrays: Any
    framework: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arrays, name)

    def prepare(self, dtype: str, threads: int) -> None:
        """Prepare the framework. Raises ``KerasOnAnotherBackend`` if Keras computes with another one."""
        import keras

        if (chosen := keras.backend.backend()) != (wanted := self.framework):
            raise KerasOnAnotherBackend(
                f"Keras computes with {chosen}, expected {wanted}: set KERAS_BACKEND={wanted} before it is imported"
            )
        self.arrays.prepare(dtype, threads)

    def describe(self) -> dict[str, str]:
        """Return the versions and what may change the numbers."""
        import keras

        return {**self.arrays.describe(), "keras": keras.__version__, "keras_backend": keras.backend.backend()}


class MlxArrays(EagerArrays):
    """mlx arrays on a CPU."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Compute on the CPU; mlx has no setting for its threads."""
        import mlx.core as mx

        mx.set_default_device(mx.cpu)

    def describe(self) -> dict[str, str]:
        """Return the version and what may change the numbers."""
        import mlx.core as mx

        return {"version": version("mlx"), "device": str(mx.default_device())}

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Copy the array with its strides and the memory between its numbers; bfloat16 is passed as bits."""
        import mlx.core as mx

        bits = array.view(np.uint16) if (is_bfloat16 := array.dtype.name == "bfloat16") else array
        dtype = mx.float64 if array.dtype == np.float64 else None  # the default is float32
        copied = mx.array(_including_memory_gaps(bits), dtype=dtype)
        copied = copied.view(mx.bfloat16) if is_bfloat16 else copied
        if array.flags.c_contiguous:
            return copied
        strides = [stride // array.itemsize for stride in array.strides]
        before = -sum((length - 1) * min(stride, 0) for length, stride in zip(array.shape, strides, strict=True))
        return mx.as_strided(copied, array.shape, strides, before)

    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Return the tensor's numbers as an array."""
        import mlx.core as mx

        if tensor.dtype == mx.bfloat16:
            import ml_dtypes  # adds bfloat16 to NumPy, with the same bits as mlx

            return np.array(tensor.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(tensor)

    def gradients(self, function: Function, inputs: Sequence[Tensor], grad_output: Tensor, others: Others) -> Any:
        """Differentiate through the call."""
        import mlx.core as mx

        return mx.vjp(lambda *tensors: [function(*tensors, **others)], list(inputs), [grad_output])[1]


class PaddleArrays(EagerArrays):
    """PaddlePaddle arrays on a CPU."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Compute on the CPU; OMP_NUM_THREADS sets the number of threads."""
        import paddle

        paddle.set_device("cpu")

    def describe(self) -> dict[str, str]:
        """Return the version and what may change the numbers."""
        import paddle

        return {"version": paddle.__version__, "device": paddle.get_device()}

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Copy the array; bfloat16 is passed as bits, as paddle expects from NumPy."""
        import paddle

        if array.dtype.name == "bfloat16":
            return paddle.to_tensor(np.ascontiguousarray(array).view(np.uint16), dtype="bfloat16")
        return paddle.to_tensor(np.ascontiguousarray(array))

    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Return the tensor's numbers as an array."""
        import paddle

        array: NDArray[Any] = tensor.numpy()
        if tensor.dtype == paddle.bfloat16:
            import ml_dtypes  # adds bfloat16 to NumPy; paddle returns its bits

            return array.view(ml_dtypes.bfloat16)
        return array

    def gradients(self, function: Function, inputs: Sequence[Tensor], grad_output: Tensor, others: Others) -> Any:
        """Differentiate through the call."""
        import paddle

        leaves = [tensor.detach() for tensor in inputs]
        for tensor in leaves:
            tensor.stop_gradient = False
        return paddle.grad([function(*leaves, **others)], leaves, [grad_output])


class TinygradArrays(EagerArrays):
    """tinygrad arrays on a CPU."""

    def prepare(self, dtype: str, threads: int) -> None:
        """Configure nothing: ``DEV`` sets the device, and ``to_numpy`` computes lazy tensors."""

    def describe(self) -> dict[str, str]:
        """Return the version and what may change the numbers."""
        from tinygrad import Device

        device = Device[Device.DEFAULT]
        return {"version": version("tinygrad"), "device": Device.DEFAULT, "renderer": type(device.renderer).__name__}

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Copy the array; bfloat16 is passed as bits."""
        from tinygrad import Tensor as Lazy
        from tinygrad import dtypes

        array = np.ascontiguousarray(array)
        if array.dtype.name == "bfloat16":
            return Lazy(array.view(np.uint16)).bitcast(dtypes.bfloat16)
        return Lazy(array)

    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Compute the tensor, and return its numbers as an array."""
        from tinygrad import dtypes

        if tensor.dtype == dtypes.bfloat16:
            import ml_dtypes  # adds bfloat16 to NumPy; tinygrad returns it as float32

            return np.asarray(tensor.bitcast(dtypes.uint16).numpy()).view(ml_dtypes.bfloat16)
        return np.asarray(tensor.numpy())

    def gradients(self, function: Function, inputs: Sequence[Tensor], grad_output: Tensor, others: Others) -> Any:
        """Differentiate through the call."""
        return function(*inputs, **others).gradient(*inputs, gradient=grad_output)


def _including_memory_gaps(array: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous array unchanged, and any other as all memory from its first byte to its last."""
    if array.flags.c_contiguous:
        return array
    forwards = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)]
    reach = sum((length - 1) * stride for length, stride in zip(forwards.shape, forwards.strides, strict=True))
    return np.lib.stride_tricks.as_strided(forwards, (reach // array.itemsize + 1,), (array.itemsize,))


MLX, PADDLE, TINYGRAD = MlxArrays(), PaddleArrays(), TinygradArrays()


def flax_weights(query: Tensor, key: Tensor, value: Tensor, bias: Any = None, mask: Any = None, **options: Any) -> Any:
    """Return the output of ``flax.nnx.dot_product_attention``, and the weights that it sows into a module."""
    from flax import nnx

    sown: list[Tensor] = []

    class Sower:
        def sow(self, _: Any, name: str, weights: Tensor) -> None:
            assert name == "attention_weights", name
            sown.append(weights)

    return nnx.dot_product_attention(query, key, value, bias, mask, module=Sower(), **options), sown[0]


def _require_equal_heads(query: Tensor, key: Tensor) -> None:
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError("has as many heads of keys as of queries")


def _merge_heads(tensor: Tensor) -> Tensor:
    return tensor.reshape(*tensor.shape[:2], tensor.shape[2] * tensor.shape[3])


def equinox_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Call ``equinox.nn.MultiheadAttention`` for each batch entry, with identity projections."""
    import equinox as eqx
    import jax

    _require_equal_heads(query, key)
    layer = eqx.nn.MultiheadAttention(query.shape[2], query.shape[2], key=jax.random.key(0), inference=True)
    projections = [field.name for field in fields(layer) if field.name.endswith("_proj")]
    of_layer = lambda module: [getattr(module, name) for name in projections]  # noqa: E731
    layer = eqx.tree_at(of_layer, layer, [eqx.nn.Identity()] * len(projections))
    tokens = [_merge_heads(tensor) for tensor in (query, key, value)]
    merged = jax.vmap(layer)(*tokens, *(() if mask is None else (mask,)))
    return merged.reshape(*query.shape[:3], value.shape[-1])


def haiku_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Call ``haiku.MultiHeadAttention`` with identity projections."""
    import haiku as hk

    def skip_projections(call: Function, tensors: Any, words: Others, context: Any) -> Any:
        is_skipped = isinstance(context.module, hk.Linear) and context.method_name == "__call__"
        return tensors[0] if is_skipped else call(*tensors, **words)

    def attend_one_entry(*tokens: Tensor) -> Tensor:
        with hk.intercept_methods(skip_projections):
            widths = {"key_size": query.shape[-1], "value_size": value.shape[-1]}
            return hk.MultiHeadAttention(query.shape[2], **widths, w_init=hk.initializers.Constant(1))(*tokens, mask)

    _require_equal_heads(query, key)
    tokens = [_merge_heads(tensor) for tensor in (query, key, value)]
    return hk.transform(attend_one_entry).apply({}, None, *tokens).reshape(*query.shape[:3], value.shape[-1])


def timm_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, *, fused: bool = True
) -> Any:
    """Call ``timm.layers.Attention`` with an identity projection of the concatenated queries, keys and values."""
    import torch

    _require_equal_heads(query, key)
    heads, width = query.shape[2:]
    layer = _import_from_its_file("timm", "timm.layers", "timm.layers.attention").Attention(heads * width, heads)
    layer.fused_attn, layer.qkv, layer.proj = fused, torch.nn.Identity(), torch.nn.Identity()
    tokens = torch.cat([_merge_heads(tensor) for tensor in (query, key, value)], dim=-1)
    return layer(tokens, attn_mask, is_causal).reshape(*query.shape[:3], width)


def _import_from_its_file(*names: str) -> Any:
    """Import the module of the last name without running its parent packages, which are the names before it.

    ``import timm`` needs torchvision. PyPI has builds of it only for torch with CUDA, and they raise with another
    torch. timm's attention does not need torchvision, so this function hides it.
    """
    for name in names[:-1]:
        spec = find_spec(name)
        assert spec is not None, name
        sys.modules.setdefault(name, module_from_spec(spec))
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # as if it were not installed
    return import_module(names[-1])
