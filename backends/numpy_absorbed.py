"""Latent attention in NumPy with its projections absorbed: see ``composed.py``."""

from __future__ import annotations

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.composed import make_absorbed
from attncheck.backends.numpy_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["describe", "from_numpy", "latent_attention", "prepare", "to_numpy"]

latent_attention = make_absorbed(numpy_backend.attention, np.concatenate, lambda a, b: a @ np.swapaxes(b, -1, -2))
