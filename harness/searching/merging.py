"""Random parts of attention: outputs and log-sum-exps to base e or 2, some of them empty."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.searching.options import Asked, Inputs
from attncheck.searching.regimes import REGIMES
from attncheck.searching.shapes import Dimensions, Random, Real

MAX_PARTS = 40
_EMPTY_SHARE = 0.2
_BASE_TWO_SHARE = 0.4
_OF_ATTENTION_SHARE = 0.6
_POISONS = (0.0, 7.0, math.nan, math.inf)


def draw_parts(regime: str, random: Random, dims: Dimensions, asked: Asked) -> Inputs:
    """Draw what attention gives for parts of its keys, or outputs and log-sum-exps that follow from nothing."""
    if random.rand() < _OF_ATTENTION_SHARE:
        outputs, log_sum_exps = _of_attention(regime, random, dims)
        asked.names.append("of attention")
    else:
        outputs, log_sum_exps = _of_nothing(regime, random, dims)
    if random.rand() < 1 / 2:
        log_sum_exps = np.where(random.rand(*log_sum_exps.shape) < _EMPTY_SHARE, -np.inf, log_sum_exps)
        asked.names.append("empty parts")
    poison = _POISONS[random.randint(len(_POISONS))]
    outputs = np.where(np.isneginf(log_sum_exps)[..., np.newaxis], poison, outputs)
    if random.rand() < _BASE_TWO_SHARE:
        asked.options["lse_base"], log_sum_exps = "2", log_sum_exps / math.log(2)
        asked.names.append("base 2")
    return {"outputs": outputs, "log_sum_exps": log_sum_exps}


def _of_attention(regime: str, random: Random, dims: Dimensions) -> tuple[Real, Real]:
    """Attend to parts of the keys, between edges at random: some may be empty, or have one key."""
    query, key, value = REGIMES[regime](random, dims.ungrouped)
    parts = int(random.randint(1, min(MAX_PARTS, dims.Lk + 1) + 1))
    edges = [0, *sorted(random.randint(0, dims.Lk + 1, parts - 1)), dims.Lk]
    spans = [slice(*edge) for edge in pairwise(edges)]
    found = [numpy_backend.attention(query, key[:, :, span], value[:, :, span]) for span in spans]
    return np.stack([part["output"] for part in found]), np.stack([part["log_sum_exp"] for part in found])


def _of_nothing(regime: str, random: Random, dims: Dimensions) -> tuple[Real, Real]:
    """Draw outputs as a regime draws values, and log-sum-exps of any size around any number."""
    parts = int(random.randint(1, min(MAX_PARTS, dims.Lk + 1) + 1))
    *_, value = REGIMES[regime](random, replace(dims.ungrouped, B=parts * dims.B, Lk=dims.Lq))
    shape = (parts, dims.B, dims.H, dims.Lq)
    around = float(random.choice([0, 0, -90, -120, -800, 90, 800]))
    log_sum_exps: Real = around + 10 ** random.uniform(-2, 2.5) * random.randn(*shape)
    return value.reshape(*shape, dims.Dv), log_sum_exps
