"""Latent attention in torch with its projections absorbed, as servers decode: no key and no value is made.

The scores of the latent part and of the part that is rotated are added up, as in inference/model.py of DeepSeek-V3.
Shapes and meanings: ``contract.py``. DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attncheck.backends import torch_backend
from attncheck.backends.contract import Stages, Window
from attncheck.backends.torch_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["describe", "from_numpy", "latent_attention", "prepare", "to_numpy"]


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
    masks: dict[str, Any] = {"mask": mask, "bias": bias, "is_causal": is_causal, "window": window}
    masks |= {"key_lengths": key_lengths, "query_offsets": query_offsets}
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1] + (0 if query_rotary is None else query_rotary.shape[-1]))
    absorbed = torch.einsum("bhqd,hcd->bhqc", query, key_projection)
    raw_scores = torch.einsum("bhqc,bkc->bhqk", absorbed, latent)
    if query_rotary is not None and key_rotary is not None:
        raw_scores = raw_scores + torch.einsum("bhqr,bkr->bhqk", query_rotary, key_rotary)
    stages: Stages = {"raw_scores": raw_scores, "scores": raw_scores * scale}
    if softcap is not None:
        stages["capped"] = softcap * torch.tanh(stages["scores"] / softcap)
    *_, scores = stages.values()  # capped or not
    stages |= torch_backend.mask_scores(scores, **masks)
    *_, logits = stages.values()
    stages |= torch_backend.softmax(logits)
    mean = torch.einsum("bhqk,bkc->bhqc", stages["weights"], latent)
    return stages | {"output": torch.einsum("bhqc,hcv->bhqv", mean, value_projection)}
