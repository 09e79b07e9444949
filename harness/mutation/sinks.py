"""Faults of attention sinks: whether they are read, by which head, at which scale, how often, and their gradient."""

from __future__ import annotations

import math

import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import _softmax_with_sinks
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import gradients_read_as
from attncheck.mutation.forward_forms import in_attention, sinks_read_as
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Call, Steps


@mutant(
    "sinks",
    "_softmax_with_sinks",
    at="weights",
    defect="a kernel that has the code and never gets the argument: vllm-metal#212",
    diagnosis="sinks-ignored",
)
def sinks_ignored(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
    return _softmax_with_sinks(scores, None, empty_rows)


@mutant(
    "sinks", sinks_read_as, at="weights", defect="each of two splits of the keys counts the sink: rocm-libraries#12229"
)
def sinks_counted_twice(sinks: Array) -> Array:
    return np.asarray(sinks + math.log(2))


@mutant("sinks", in_attention, at="weights", defect="the sink is scaled as the scores are: rocm-libraries#12229's kind")
def sinks_scaled_with_scores(call: Call) -> Steps:
    return sinks_read_as(lambda sinks: np.asarray(sinks * call.factor))


@mutant(
    "sinks",
    in_attention,
    at="weights",
    defect="query heads of a group as rows of one tile read the sink of the tile: sgl-kernel-xpu#254",
)
def sinks_read_by_key_heads(call: Call) -> Steps:
    group = call.query.shape[1] // call.key.shape[1]
    return sinks_read_as(lambda sinks: sinks[np.arange(len(sinks)) // group])


@mutant("sinks", gradients_read_as, at="grad_sinks", defect="no gradient for the sink: flash-attention#1973")
def sinks_without_a_gradient(gradients: Stages) -> Stages:
    if "grad_sinks" in gradients:
        gradients["grad_sinks"] = np.zeros_like(gradients["grad_sinks"])
    return gradients
