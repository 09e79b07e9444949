"""Latent attention in NumPy with its projections absorbed: see ``absorbed.py``."""

from __future__ import annotations

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.absorbed import absorbed
from attncheck.backends.numpy_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["describe", "from_numpy", "latent_attention", "prepare", "to_numpy"]

latent_attention = absorbed(numpy_backend.attention, np.concatenate, lambda a, b: a @ np.swapaxes(b, -1, -2))
