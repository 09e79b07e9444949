"""The largest error, and its statistical scale, that a rounding model allows at every stage of an operation.

``accumulated_bounds`` follows the errors of all stages from the inputs of a case; ``introduced_bound`` those of a
single one, from the stages before it that the implementation itself returned. The formulas stand in ``bounds_scores``,
``bounds_softmax``, ``bounds_output`` and ``bounds_linear``; ``docs/numerics.md`` derives them.
"""

from __future__ import annotations

from attncheck.attention.bounds_accumulated import accumulated_bounds
from attncheck.attention.bounds_introduced import introduced_bound
from attncheck.attention.errors import Bound

__all__ = ["Bound", "accumulated_bounds", "introduced_bound"]
