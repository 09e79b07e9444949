"""A plain loop over recorded calls: call the kernel, compare with ``assert_allclose``, and count what differs.

    python benchmarks/peer/allclose_loop.py calls.pickle kernel.py

``loop.py`` records the calls, and times this as the least that a check of a kernel can take.
"""

import importlib.util
import pickle
import sys
from pathlib import Path

import numpy as np

TOLERANCES = {"float64": 1e-7, "float32": 1e-5}
"""Tolerances close to the defaults of ``torch.testing.assert_close``, one number for both."""

calls_file, kernel_file = sys.argv[1:]
spec = importlib.util.spec_from_file_location("kernel", kernel_file)
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
calls = pickle.loads(Path(calls_file).read_bytes())  # loop.py wrote it
different = 0
for inputs, keywords, expected in calls:
    output, tolerance = kernel.attention(*inputs, **keywords), TOLERANCES[expected.dtype.name]
    try:
        np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)
    except AssertionError:
        different += 1
print(f"{len(calls)} calls, {different} different")
