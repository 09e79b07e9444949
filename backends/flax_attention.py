"""``flax.nnx.dot_product_attention`` on a CPU, in jax.jit: as models call it, and so that it hands out its weights.

Without dropout and without a module it is ``jax.nn.dot_product_attention``. With a module, into which it sows its
weights, it is flax's own: a query divided by sqrt(D), a softmax in the dtype, a product with the values.
https://github.com/google/flax/blob/main/flax/nnx/nn/attention.py
"""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from attncheck.backends import jax_backend
from attncheck.backends.contract import Stages, Tensor


class _Sown:
    """Takes what a module is given to keep."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def sow(self, _: Any, name: str, value: Tensor) -> None:
        """Keep the weights."""
        assert name == "attention_weights", name
        self.weights = value


class FlaxAttention:
    """The call, which returns its weights as well where it ``sows`` them. Shapes and meanings: ``contract.py``."""

    def __init__(self, *, sows: bool) -> None:
        self._sows = sows
        self.prepare, self.from_numpy, self.to_numpy = (
            jax_backend.prepare,
            jax_backend.from_numpy,
            jax_backend.to_numpy,
        )

    def describe(self) -> dict[str, str]:
        """Return the versions and what may change the numbers."""
        return {**jax_backend.describe(), "version": flax.__version__, "jax": jax.__version__}

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> Stages:
        """Average the values; a past is a cache that the keys and values are appended to."""
        if past_key is not None and past_value is not None:
            key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
        found: Stages = jax.jit(self._call, static_argnames="is_causal")(
            query, key, value, mask=mask, bias=bias, is_causal=is_causal
        )
        return found

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
    ) -> Stages:
        """Differentiate through the call by reverse mode."""

        def gradients(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Any:
            def output_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
                return self._call(query, key, value, mask=mask, bias=bias, is_causal=is_causal)["output"]

            return jax.vjp(output_of, query, key, value, bias)[1](grad_output)

        names = ("grad_query", "grad_key", "grad_value", "grad_bias")
        found = zip(names, jax.jit(gradients)(query, key, value, bias), strict=True)
        return {name: gradient for name, gradient in found if gradient is not None}

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None, is_causal: bool
    ) -> Stages:
        query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))  # (B, H, L, D) -> (B, L, H, D)
        sown = _Sown() if self._sows else None
        output = nnx.dot_product_attention(query, key, value, bias, mask, module=sown, is_causal=is_causal).swapaxes(
            1, 2
        )
        return {"output": output} if sown is None else {"weights": sown.weights, "output": output}


DPA = FlaxAttention(sows=False)
SOWN = FlaxAttention(sows=True)
