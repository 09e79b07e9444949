"""The project's words as data: operations, the inputs and options that each takes, and the stages it may return.

Every list of operations, inputs, options or stages elsewhere derives from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]

DTYPES = ("float64", "float32")

STAGES = (
    "query",
    "key",
    "value",
    "raw_scores",
    "scores",
    "capped",
    "biased",
    "masked",
    "weights",
    "log_sum_exp",
    "context",
    "output",
)
"""Every stage, in the order in which attention computes them."""

ScoreKind = Literal["dot", "scaled_dot", "general", "additive"]


@dataclass(frozen=True)
class InputSpec:
    """What an operation expects of one input.

    ``axes`` are the letters of ``attncheck.backends``; a case may leave leading axes out, they are then of length 1.
    ``broadcast`` inputs (masks and biases on the scores) may also have length 1 where the letter says more. One that
    ``needs`` another is refused without it.
    """

    axes: tuple[str, ...]
    required: bool = True
    boolean: bool = False
    broadcast: bool = False
    may_be_infinite: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class Operation:
    """One operation: its inputs by name and the options that it takes."""

    name: str
    inputs: Mapping[str, InputSpec]
    options: frozenset[str]
    stages: tuple[str, ...]


_SCORES = ("B", "H", "Lq", "Lk")
_QUERY = InputSpec(("B", "H", "Lq", "D"))
_KEY = InputSpec(("B", "H", "Lk", "D"))
_VALUE = InputSpec(("B", "H", "Lk", "Dv"))
_MASK = InputSpec(_SCORES, required=False, boolean=True, broadcast=True)
_BIAS = InputSpec(_SCORES, required=False, broadcast=True, may_be_infinite=True)
_SCORE_INPUT = InputSpec(_SCORES, may_be_infinite=True)

# The key of the bilinear and the additive score has a width of its own, Dk.
SCORE_INPUTS: Mapping[str, Mapping[str, InputSpec]] = {
    "dot": {"query": _QUERY, "key": _KEY},
    "scaled_dot": {"query": _QUERY, "key": _KEY},
    "general": {"query": _QUERY, "key": InputSpec(("B", "H", "Lk", "Dk")), "weight": InputSpec(("D", "Dk"))},
    "additive": {
        "query": _QUERY,
        "key": InputSpec(("B", "H", "Lk", "Dk")),
        "query_weight": InputSpec(("D", "A")),
        "key_weight": InputSpec(("Dk", "A")),
        "score_vector": InputSpec(("A",)),
        "score_bias": InputSpec(("A",), required=False),
    },
}

_ATTENTION_STAGES = ("raw_scores", "scores", "biased", "masked", "weights", "log_sum_exp")

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("scoring", SCORE_INPUTS["scaled_dot"], frozenset({"score", "scale"}), ("raw_scores", "scores")),
        Operation("softmax", {"scores": _SCORE_INPUT}, frozenset(), ("weights", "log_sum_exp")),
        Operation(
            "masking",
            {"scores": _SCORE_INPUT, "mask": _MASK, "bias": _BIAS},
            frozenset({"is_causal"}),
            ("biased", "masked"),
        ),
        Operation(
            "attention",
            {"query": _QUERY, "key": _KEY, "value": _VALUE, "mask": _MASK, "bias": _BIAS},
            frozenset({"scale", "is_causal"}),
            (*_ATTENTION_STAGES, "output"),
        ),
        Operation(
            "multi_head_attention",
            {
                "query": InputSpec(("B", "Lq", "E")),
                "key": InputSpec(("B", "Lk", "Ek")),
                "value": InputSpec(("B", "Lk", "Ev")),
                "query_weight": InputSpec(("E", "H*D")),
                "key_weight": InputSpec(("Ek", "H*D")),
                "value_weight": InputSpec(("Ev", "H*Dv")),
                "output_weight": InputSpec(("H*Dv", "Eo"), required=False),
                "query_bias": InputSpec(("H*D",), required=False),
                "key_bias": InputSpec(("H*D",), required=False),
                "value_bias": InputSpec(("H*Dv",), required=False),
                "output_bias": InputSpec(("Eo",), required=False, needs="output_weight"),
                "mask": _MASK,
                "bias": _BIAS,
            },
            frozenset({"heads", "scale", "is_causal"}),
            ("query", "key", "value", *_ATTENTION_STAGES, "context", "output"),
        ),
    )
}


def inputs_of(operation: str, score: str | None) -> Mapping[str, InputSpec]:
    """Return the inputs of an operation; those of ``scoring`` depend on the kind of score."""
    if operation == "scoring":
        return SCORE_INPUTS[score or "scaled_dot"]
    return OPERATIONS[operation].inputs
