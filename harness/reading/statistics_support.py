"""Whether a case's inputs support statistics: continuous and unstructured, so that rounding errors behave like noise.

Statistical tests rest on that. Repeated or printed rows, small integers, a common offset or scores that are all alike
make rounding errors that agree with each other, and right implementations would be flagged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attncheck.reading import array_kinds as kinds
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.number_checks import Named, spelled_out
from attncheck.spec import InputSpec

_CONTINUOUS = ("rand", "randn", "runif")


def support_statistics(
    specs: Mapping[str, InputSpec], inputs: Mapping[str, kinds.Array], named: Named, options: Mapping[str, object]
) -> bool:
    """Tell from how they were drawn whether a case's inputs support statistics, for a case that does not say so."""
    if options.get("scale") == 0:
        return False  # every weight of a row is the same
    return all(
        _is_continuous(source, named) or (specs[name].broadcast and _is_block(source, named))
        for name, source in inputs.items()
        if specs[name].is_number
    )


def _is_continuous(source: kinds.Array, named: Named) -> bool:
    """Whether an array is drawn from a continuous distribution, and at most multiplied, moved or thinned out."""
    repeated = source.rows is not None and len(set(source.rows)) < len(source.rows)
    if repeated or source.times == 0 or source.plus:
        return False
    if isinstance(source, kinds.Reference):
        return _is_continuous(named[source.ref], named)
    return isinstance(source, kinds.Drawn) and source.draw in _CONTINUOUS and not source.floor


def _is_block(source: kinds.Array, named: Named) -> bool:
    """Whether a bias is a mask: 0 where a key may be attended, minus infinity where it may not."""
    if isinstance(source, kinds.Drawn | kinds.Identity | kinds.Lowest | Alibi | kinds.RelativeBuckets):
        return False
    if source.times is not None or source.plus is not None:
        return False
    if isinstance(source, kinds.AsBias):
        return True
    inside = [part for _, part in kinds.parts_of(source)]
    parts = inside or ([named[source.ref]] if isinstance(source, kinds.Reference) else [])
    return all(value in (0, -math.inf) for value in spelled_out(source, named)) and all(
        _is_block(part, named) for part in parts
    )
