"""NumPy kernels that misbehave only for inputs that no kernel can compute: for a test with bad inputs.

Each is right for other inputs, and is harmless: waits and output end after ten minutes, or with the parent process.
"""

import os
import sys
import time

import numpy as np
from numpy_right import online_softmax

_MOST_SECONDS = 600


def _while_watched():
    """Yield until the parent process has ended, or for ten minutes."""
    parent, end = os.getppid(), time.monotonic() + _MOST_SECONDS
    while os.getppid() == parent and time.monotonic() < end:
        yield


def waits_for_missing_values(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Waits for the rest of the values if there are fewer values than keys."""
    if value.shape[2] < key.shape[2]:
        for _ in _while_watched():
            time.sleep(0.5)
    return online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def exits_for_odd_groups(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Ends the process, as an assertion of the device does, if heads cannot share keys evenly."""
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        os._exit(0)
    return online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def prints_nan_rows(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Prints a warning about the first row with NaN until that is no longer true."""
    if np.isnan(query).any():
        for _ in _while_watched():
            print("NaN in a query", file=sys.stderr, flush=True)
            time.sleep(0.001)
    return online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


def forks_for_unknown_masks(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Leaves a mask that it does not know to a child process, and does not wait for it."""
    if mask is not None and mask.ndim != 4 and hasattr(os, "fork") and os.fork() == 0:
        for _ in _while_watched():
            time.sleep(0.5)
        os._exit(0)
    return online_softmax(query, key, value, mask=mask, is_causal=is_causal, scale=scale)
