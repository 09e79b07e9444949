"""The gate in a test suite: one test, which says if the kernel may be merged."""

from attncheck.pytest_plugin import gate

test_attention = gate("numpy_kernel.py:attention", budget=15)
