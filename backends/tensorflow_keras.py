"""What all of Keras's attention has in common here: Keras on TensorFlow, its description, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from attncheck.backends import tensorflow_backend
from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.tensorflow_backend import from_numpy, to_numpy

__all__ = ["KerasOnAnotherBackend", "describe", "from_numpy", "gradients_of", "prepare", "to_numpy"]


class KerasOnAnotherBackend(RuntimeError):
    """Keras has been imported to compute with another framework than TensorFlow."""


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of this process, once it is sure that Keras computes with TensorFlow."""
    chosen = keras.backend.backend()
    if chosen != "tensorflow":
        raise KerasOnAnotherBackend(
            f"Keras computes with {chosen}, expected tensorflow: set KERAS_BACKEND=tensorflow before it is imported"
        )
    tensorflow_backend.prepare(dtype, threads)


def describe() -> dict[str, str]:
    """Return the versions and what may change the numbers."""
    return {**tensorflow_backend.describe(), "keras": keras.__version__, "keras_backend": keras.backend.backend()}


def gradients_of(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    grad_output: Tensor,
) -> Stages:
    """Differentiate sum(grad_output * attend(query, key, value, bias)) by GradientTape."""
    sources = {"grad_query": query, "grad_key": key, "grad_value": value}
    if bias is not None:
        sources["grad_bias"] = bias
    with tf.GradientTape() as tape:
        tape.watch(sources)
        output = attend(query, key, value, bias)
    gradients: Stages = tape.gradient(output, sources, output_gradients=grad_output)
    return gradients
