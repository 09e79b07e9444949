"""``tokamax.dot_product_attention`` by those of its implementations that run everywhere: ``xla`` and ``xla_chunked``.

Its arguments are those of ``jax.nn.dot_product_attention``, and a softcap behind the bias. The chunks are its own, 512
queries and 1024 keys. In jax.jit, as it is
used. https://github.com/openxla/tokamax/blob/main/tokamax/_src/ops/attention/api.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tokamax
from absl import flags

from attncheck.backends import jax_backend
from attncheck.backends.contract import Stages, Tensor, Window


class TokamaxAttention:
    """Attention by one of tokamax's implementations."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.from_numpy = jax_backend.from_numpy
        self.to_numpy = jax_backend.to_numpy

    def prepare(self, dtype: str, threads: int) -> None:
        """Configure JAX, and keep the words of this process from tokamax, which takes them all for its own."""
        jax_backend.prepare(dtype, threads)
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(["attncheck"])  # as openxla/tokamax#957 mends it

    def describe(self) -> dict[str, str]:
        """Return the versions and what may change the numbers."""
        return {**jax_backend.describe(), "version": tokamax.__version__, "jax": jax.__version__}

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> Stages:
        """Average the values; a past is a cache that the keys and values are appended to."""
        if past_key is not None and past_value is not None:
            if window is not None:
                raise NotImplementedError("the local window of tokamax.dot_product_attention does not count a past")
            key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
        given: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "softcap": softcap}
        given |= {"window": window, "key_lengths": key_lengths}
        options = self._options(query, key, **given)
        return {"output": jax.jit(partial(_call, options))(query, key, value, bias)}

    def attention_gradients(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
    ) -> Stages:
        """Differentiate through the call by reverse mode."""
        given: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "softcap": softcap}
        given |= {"window": window, "key_lengths": key_lengths}
        options = self._options(query, key, **given)

        @jax.jit  # type: ignore[untyped-decorator]
        def differentiate(grad_output: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
            gradients: tuple[Tensor | None, ...] = jax.vjp(partial(_call, options), *inputs)[1](grad_output)
            return gradients

        names = ("grad_query", "grad_key", "grad_value", "grad_bias")
        gradients = zip(names, differentiate(grad_output, query, key, value, bias), strict=True)
        return {name: gradient for name, gradient in gradients if gradient is not None}

    def _options(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        softcap: float | None,
        window: Window | None,
        key_lengths: Tensor | None,
    ) -> dict[str, Any]:
        options = {"mask": mask, "is_causal": is_causal, "scale": scale, "logits_soft_cap": softcap}
        if window is not None:
            # The call has no unbounded side, but no key is further away than the longer of the two sequences.
            furthest = max(query.shape[-2], key.shape[-2])
            options["local_window_size"] = tuple(furthest if side is None else side for side in window)
        if key_lengths is not None:
            options["key_value_seq_lengths"] = key_lengths.astype(jnp.int32)
        return {**options, "implementation": self.implementation}


def _call(options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))  # (B, H, L, D) -> (B, L, H, D)
    return tokamax.dot_product_attention(query, key, value, bias, **options).swapaxes(1, 2)


XLA, CHUNKED = TokamaxAttention("xla"), TokamaxAttention("xla_chunked")
