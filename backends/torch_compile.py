"""torch.compile of the eager functions: TorchInductor's C++ loops in place of one kernel after the other.

Shapes are symbolic, so that a new length is no new compilation; axes of length 0 and 1, dtypes, strides and what is
given or not are. A graph that breaks, or too many compilations, raises: eager code would otherwise run unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attncheck.backends import torch_backend
from attncheck.backends.contract import EmptyRows, Stages, Window
from attncheck.backends.torch_gradients import differentiate

_MAX_COMPILATIONS = 1 << 16

from_numpy = torch_backend.from_numpy
to_numpy = torch_backend.to_numpy


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of this process, of its compiler too, and let it compile as often as it has to."""
    torch_backend.prepare(dtype, threads)
    torch._inductor.config.compile_threads = threads
    torch._dynamo.config.recompile_limit = _MAX_COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = _MAX_COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {**torch_backend.describe(), "compiler": "inductor"}


def _compiled(function: Callable[..., Stages]) -> Callable[..., Stages]:
    compiled: Callable[..., Stages] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled


dot_scores = _compiled(torch_backend.dot_scores)
cosine_scores = _compiled(torch_backend.cosine_scores)
general_scores = _compiled(torch_backend.general_scores)
additive_scores = _compiled(torch_backend.additive_scores)
mask_scores = _compiled(torch_backend.mask_scores)
softmax = _compiled(torch_backend.softmax)
attention = _compiled(torch_backend.attention)
general_attention = _compiled(torch_backend.general_attention)
additive_attention = _compiled(torch_backend.additive_attention)
cosine_attention = _compiled(torch_backend.cosine_attention)
multi_head_attention = _compiled(torch_backend.multi_head_attention)
normalized_attention = _compiled(torch_backend.normalized_attention)
latent_attention = _compiled(torch_backend.latent_attention)
merge_states = _compiled(torch_backend.merge_states)


def _output_alone(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Stages:
    return {"output": torch_backend.attention(query, key, value, **options)["output"]}


# A compiled function is differentiated by all that it returns, by an unused result with a gradient of zero: through the
# logarithm of an empty row's sum that is 0 * NaN. Whoever trains returns the output.
_differentiable = _compiled(_output_alone)


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    mask_fill: float | None = None,
    empty_rows: EmptyRows = "zero",
) -> Stages:
    """Differentiate the compiled function, whose backward pass is compiled too."""
    inputs = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    options = {
        "mask": mask,
        "is_causal": is_causal,
        "scale": scale,
        "softcap": softcap,
        "window": window,
        "key_lengths": key_lengths,
        "mask_fill": mask_fill,
        "empty_rows": empty_rows,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_interleaved": rotary_interleaved,
    }
    return differentiate(_differentiable, inputs, grad_output, options)
