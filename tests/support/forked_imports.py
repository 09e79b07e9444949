"""Imported last by the process that workers are forked from."""

import gc
import sys

from attncheck.execution.environment import find_imports

find_imports(sys.modules[__name__])  # reads once which distributions are installed
gc.freeze()  # a collection in a fork would copy the pages of everything that is imported
