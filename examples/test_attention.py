"""The kernel in a test suite: a test for every case and dtype, whose failure says where the kernel goes wrong."""

from attncheck.pytest_plugin import conformance
from numpy_kernel import attention

test_attention = conformance(attention, cases=["attention", "my_cases"])
