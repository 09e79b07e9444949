"""What normalised queries and keys may be taken for: no norm, another one, of other elements, elsewhere, other weights.

Each is the exact answer of another problem, in the form to which the case is lowered (``reading/lowered.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attncheck.judging.alternatives import Alternative, mistake, with_inputs, with_options
from attncheck.reading.canonical import AttentionProblem

_STAGE = "normalized_query"
_EPSILONS = (
    ("norm-epsilon-outside", "outside", "epsilon is added to the root, not under it"),
    ("norm-epsilon-inside", "inside", "epsilon is added under the root"),
    ("norm-epsilon-least", "maximum", "epsilon is taken for the least root"),
    ("norm-epsilon-least-square", "square", "epsilon is taken for the least square: sqrt(max(x.x, epsilon))"),
)
"""Where epsilon may stand instead; what the case means changes nothing and is told apart from it by nobody."""


def normalizations_of(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield what the norms of a problem may be taken for, the likeliest first; nothing where there are none."""
    if "query_norm" not in posed.inputs:
        return
    yield from _left_out(posed)
    yield from _conventions(posed)
    yield from _epsilons(posed)
    yield from _weights(posed)


def _left_out(posed: AttentionProblem) -> Iterator[Alternative]:
    for name, other in (("key", "query"), ("query", "key")):
        description = f"the {other} alone is normalised"
        left = with_options(posed, unnormalized=name)
        yield mistake(f"norm-of-{other}-alone", description, left, f"normalized_{name}")
    neither = with_options(posed, unnormalized="both")
    yield mistake("norm-ignored", "query and key are not normalised", neither, _STAGE)


def _conventions(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield other elements that statistics are of, another kind of norm, and the other order."""
    options = posed.options
    taken, meant = ("each head", "all heads") if options.get("norm_over") == "full" else ("all heads", "each head")
    other = with_options(posed, norm_over="head" if taken == "each head" else "full")
    yield Alternative("norm-width", f"a norm is taken of {taken}; the case means {meant}", _STAGE, other)
    names = {"rms": "the root of the mean of squares", "l2": "the length"}
    kind = options.get("norm") or "rms"
    instead = "l2" if kind == "rms" else "rms"
    description = f"vectors are divided by {names[instead]}; the case means {names[kind]}"
    yield Alternative("norm-kind", description, _STAGE, with_options(posed, norm=instead))
    if "rotary_cos" in posed.inputs or "query_cos" in posed.inputs:
        is_late = bool(options.get("norm_after_rotation"))
        where, right = ("before", "after") if is_late else ("after", "before")
        description = f"the norm is taken {where} the rotation; the case means {right} it"
        yield Alternative("norm-order", description, _STAGE, with_options(posed, norm_after_rotation=not is_late))


def _epsilons(posed: AttentionProblem) -> Iterator[Alternative]:
    ignored = with_options(posed, epsilon=0.0)
    yield mistake("norm-epsilon-ignored", "epsilon is ignored", ignored, _STAGE)
    means = "inside" if (posed.options.get("norm") or "rms") == "rms" else "maximum"
    for name, where, description in _EPSILONS:
        if where != means:
            yield Alternative(name, description, _STAGE, with_options(posed, epsilon_at=where))


def _weights(posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield weights that are left out, that are taken for what is added to 1, or that are each other's."""
    weights = {name: posed.inputs[name] for name in ("query_norm", "key_norm")}
    ones = {name: np.ones_like(weight) for name, weight in weights.items()}
    yield mistake("norm-weight-ignored", "the weights of the norms are ignored", with_inputs(posed, **ones), _STAGE)
    given = {name: weight.astype(np.float64) for name, weight in weights.items() if (weight != 1).any()}
    if not given:
        return
    more = {name: 1 + weight for name, weight in given.items()}
    description = "weights of the norms are taken for 1 + w; the case means w"
    yield Alternative("norm-weight-plus-one", description, _STAGE, with_inputs(posed, **more))
    less = {name: weight - 1 for name, weight in given.items()}
    yield mistake("norm-weight-minus-one", "weights of the norms lack 1", with_inputs(posed, **less), _STAGE)
    query, key = weights["query_norm"], weights["key_norm"]
    if all((each == each[:1]).all() for each in (query, key)):
        swapped = {
            "query_norm": np.broadcast_to(key[:1], query.shape),
            "key_norm": np.broadcast_to(query[:1], key.shape),
        }
    elif query.shape == key.shape:
        swapped = {"query_norm": key, "key_norm": query}
    else:
        return
    description = "the norms of query and key have each other's weights"
    yield mistake("norm-weights-swapped", description, with_inputs(posed, **swapped), _STAGE)
