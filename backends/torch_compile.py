"""torch.compile of the eager functions: TorchInductor's C++ loops in place of one kernel after the other.

Shapes are symbolic, so that a new length is no new compilation; axes of length 0 and 1, dtypes, strides and what is
given or not are. A graph that breaks, or too many compilations, raises: eager code would otherwise run unnoticed.

``fused`` is attention that returns only its output, written as models write it. TorchInductor replaces what reads as
attention (``torch/_inductor/fx_passes/fuse_attention.py``) by a call of scaled_dot_product_attention, where nothing but
the output is returned. So the softmax is torch's own there, which makes a query without a key NaN, and what may not be
attended is minus infinity in a mask that is added. Keys that lie in memory as (B, L, H, D), which is what a projection
leaves, are permuted to (B, H, D, L) at once, as many models do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from attncheck.backends import torch_backend
from attncheck.backends.composed import compiled, make_gradients, output_alone
from attncheck.backends.contract import Stages
from attncheck.backends.library_arrays import TorchArrays
from attncheck.backends.torch_common import differentiate

_MAX_COMPILATIONS = 1 << 16


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
    made: Callable[..., Stages] = torch.compile(function, fullgraph=True, dynamic=True)
    return made


def _gradients(forward: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return the gradients of an operation that is compiled, whose backward pass is compiled too.

    A compiled function is differentiated by all that it returns, by an unused result with a gradient of zero: through
    the logarithm of an empty row's sum that is 0 * NaN. Whoever trains returns the output.
    """
    return make_gradients(_compiled(output_alone(forward)), differentiate)


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) * scale, dim=-1) @ value


def _permuted(query: Tensor, stored_key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax(query @ stored_key.permute(0, 2, 3, 1) * scale, dim=-1) @ value


def _masked(query: Tensor, key: Tensor, value: Tensor, inverse_scale: float, attn_mask: Tensor) -> Tensor:
    return torch.softmax(query @ key.transpose(-2, -1) / inverse_scale + attn_mask, dim=-1) @ value


def _specialised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Shapes that are symbolic hide what reads as attention.
    made: Callable[..., Tensor] = torch.compile(function, fullgraph=True, dynamic=False)
    return made


_compiled_plain, _compiled_permuted, _compiled_masked = (_specialised(form) for form in (_plain, _permuted, _masked))


def fused(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend in one compiled program; groups are spread before it."""
    group = query.size(1) // key.size(1)
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if attn_mask is not None:
        if scale == 0:
            raise NotImplementedError("code that divides by the inverse of the scale has no scale of zero")
        return _compiled_masked(query, key, value, 1 / scale, attn_mask)
    if not key.is_contiguous() and key.transpose(1, 2).is_contiguous():
        return _compiled_permuted(query, key.transpose(1, 2), value, scale)
    return _compiled_plain(query, key, value, scale)


_NOT_ONE_GRAPH = ("packed_attention", "packed_attention_gradients", "paged_attention", "quantized_attention")
_DIFFERENTIATED = {
    "attention_gradients": _gradients(torch_backend.attention),
    "gated_attention_gradients": _gradients(torch_backend.gated_attention),
}
COMPILED = compiled(
    torch_backend,
    _compiled,
    *_DIFFERENTIATED,
    *_NOT_ONE_GRAPH,
    prepare=prepare,
    describe=describe,
    **_DIFFERENTIATED,
)
OUTPUT = TorchArrays(
    SimpleNamespace(
        prepare=prepare, describe=describe, from_numpy=torch_backend.from_numpy, to_numpy=torch_backend.to_numpy
    )
)
"""What ``fused`` is called on."""
