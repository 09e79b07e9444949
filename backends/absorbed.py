"""Latent attention with its projections absorbed, as servers decode: no key and no value is made.

Behind the query's own projection this is attention to one head of keys, the latent vectors, which are its values, too.
Shapes and meanings: ``contract.py``. DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attncheck.backends.contract import Stages, Tensor, Window


def absorbed(
    attention: Callable[..., Stages],
    concatenate: Callable[..., Tensor],
    times_transposed: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., Stages]:
    """Return a framework's latent attention, made of its attention, of what joins arrays, and of a @ b^T."""

    def latent_attention(
        query: Tensor,
        latent: Tensor,
        key_projection: Tensor,
        value_projection: Tensor,
        *,
        query_rotary: Tensor | None = None,
        key_rotary: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        query_offsets: Tensor | None = None,
    ) -> Stages:
        """Attend to latent vectors, and project their mean."""
        options: dict[str, Any] = {"mask": mask, "bias": bias, "is_causal": is_causal, "softcap": softcap}
        options |= {"window": window, "key_lengths": key_lengths, "query_offsets": query_offsets}
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1]))
        query, key = times_transposed(query, key_projection), latent  # (B, H, Lq, C), (B, Lk, C)
        if query_rotary is not None and key_rotary is not None:
            query, key = (concatenate(each, axis=-1) for each in ((query, query_rotary), (key, key_rotary)))
        stages = attention(query, key[:, None], latent[:, None], scale=scale, **options)
        return stages | {"output": stages["output"] @ value_projection}

    return latent_attention
