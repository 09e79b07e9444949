"""The specification of attention: dtypes, options, inputs, stages and operations, each stated once.

Shapes, lists of stages, the axis that holds queries, the text of the expected signature, the JSON Schema, the tables of
the documentation, the fuzzers' grammar and the readings in which something is ignored all follow from the tables here.
The signatures of functions, and the letters of axes, stand in ``attncheck.backends.contract``; a test holds the two
against each other. Everything public of the files of this folder but ``rounding`` and ``classes`` is found here.
"""

from __future__ import annotations

from attncheck.backends.contract import AXES as AXES
from attncheck.spec.inputs import *
from attncheck.spec.operations import *
from attncheck.spec.options import *
