"""The project's words as data: operations, the inputs and options that each takes, and the stages it may return.

Every list of operations, inputs, options or stages elsewhere derives from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attncheck.backends.contract import EmptyRows

Shape = tuple[int, ...]

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFAULT_DTYPES = ("float64", "float32")
"""What a case runs in when neither it nor its file says."""

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
    "grad_query",
    "grad_key",
    "grad_value",
    "grad_bias",
)
"""Every stage, in the order in which attention computes them, then the gradients."""

_WIDE, _SIXTEEN_BITS = ("float64", "float32"), ("bfloat16", "float16")
ROUNDING_MODELS: Mapping[str, tuple[str, ...]] = {
    "native": _WIDE,
    "native_lse": _WIDE,
    "tf32_products": ("float32",),
    "bf16x3_products": ("float32",),
    "bf16_products": ("float32",),
    "fused": _SIXTEEN_BITS,
    "fused_bwd": _SIXTEEN_BITS,
    "fused_lse": _SIXTEEN_BITS,
    "eager": _SIXTEEN_BITS,
    "eager_pre": _SIXTEEN_BITS,
    "eager_lse": _SIXTEEN_BITS,
}
"""Which roundings an implementation may declare, and in which dtypes; see ``attention.rounding``."""

DEFAULT_EMPTY_ROWS: EmptyRows = "zero"
"""What a case means that does not say."""
EMPTY_ROWS: Mapping[str, str] = {"nan": "NaN", "uniform": "the mean of all values (uniform)", "zero": "zero"}
"""What a query that may attend to no key gives by each convention, for people."""
CONVENTIONS = frozenset({"empty_rows"})
"""Options that say what a result means where the mathematics leaves it open. An implementation that has no such keyword
gets the case all the same, without it, and what it gives is judged as a convention of its own."""
ScoreKind = Literal["dot", "scaled_dot", "general", "additive", "cosine"]


def without_a_key(given: str, expected: str) -> str:
    """Say what an implementation gives for a query that may attend to no key, and what the case means instead."""
    return f"a query without a key gives {EMPTY_ROWS[given]}; the case expects {expected}"


@dataclass(frozen=True)
class InputSpec:
    """What an operation expects of one input.

    ``axes`` are the letters of ``attncheck.backends``; a case may leave leading axes out, they are then of length 1.
    ``broadcast`` inputs (masks and biases on the scores) may also have length 1 where the letter says more. One that
    ``needs`` another is refused without it. ``whole`` numbers are counts: they keep their integers in every dtype.
    """

    axes: tuple[str, ...]
    required: bool = True
    boolean: bool = False
    broadcast: bool = False
    may_be_infinite: bool = False
    needs: str | None = None
    whole: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the input is rounded to the working dtype, as masks and counts are not."""
        return not (self.boolean or self.whole)


@dataclass(frozen=True)
class Operation:
    """One operation: its inputs by name and the options that it takes."""

    name: str
    inputs: Mapping[str, InputSpec]
    options: frozenset[str]
    stages: tuple[str, ...]


_SCORES = ("B", "H", "Lq", "T")
_QUERY = InputSpec(("B", "H", "Lq", "D"))
_KEY = InputSpec(("B", "H", "Lk", "D"))
_MASK = InputSpec(_SCORES, required=False, boolean=True, broadcast=True)
_BIAS = InputSpec(_SCORES, required=False, broadcast=True, may_be_infinite=True)
_SCORE_INPUT = InputSpec(_SCORES, may_be_infinite=True)
_KEY_LENGTHS = InputSpec(("B",), required=False, whole=True)
_QUERY_MASK = InputSpec(("B", "Lq"), required=False, boolean=True, broadcast=True)
_ATTENTION_INPUTS = {
    "query": _QUERY,
    "key": InputSpec(("B", "Hkv", "Lk", "D")),
    "value": InputSpec(("B", "Hkv", "Lk", "Dv")),
    "mask": _MASK,
    "bias": _BIAS,
    "key_lengths": _KEY_LENGTHS,
    "query_mask": _QUERY_MASK,
}
_PAST_INPUTS = {
    "past_key": InputSpec(("B", "Hkv", "P", "D"), required=False, needs="past_value"),
    "past_value": InputSpec(("B", "Hkv", "P", "Dv"), required=False, needs="past_key"),
}

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
    "cosine": {"query": _QUERY, "key": _KEY},
}

_AFTER_THE_SCORES = ("biased", "masked", "weights", "log_sum_exp")
_ATTENTION_STAGES = ("raw_scores", "scores", "capped", *_AFTER_THE_SCORES)
_ATTENDANCE = frozenset({"is_causal", "window", "alignment"})
"""Options that say which keys a query may attend to."""
_ATTENTION_OPTIONS = frozenset({"scale", "softcap", "heads", "kv_heads", "empty_rows", *_ATTENDANCE})

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "scoring",
            SCORE_INPUTS["scaled_dot"],
            frozenset({"score", "scale", "softcap"}),
            ("raw_scores", "scores", "capped"),
        ),
        Operation("softmax", {"scores": _SCORE_INPUT}, frozenset({"empty_rows"}), ("weights", "log_sum_exp")),
        Operation(
            "masking",
            {
                "scores": _SCORE_INPUT,
                "mask": _MASK,
                "bias": _BIAS,
                "key_lengths": _KEY_LENGTHS,
                "query_mask": _QUERY_MASK,
            },
            _ATTENDANCE,
            ("biased", "masked"),
        ),
        Operation("attention", _ATTENTION_INPUTS | _PAST_INPUTS, _ATTENTION_OPTIONS, (*_ATTENTION_STAGES, "output")),
        Operation(
            "attention_gradients",
            _ATTENTION_INPUTS | {"grad_output": InputSpec(("B", "H", "Lq", "Dv"))},
            _ATTENTION_OPTIONS,
            ("grad_query", "grad_key", "grad_value", "grad_bias"),
        ),
        Operation(
            "multi_head_attention",
            {
                "query": InputSpec(("B", "Lq", "E")),
                "key": InputSpec(("B", "Lk", "Ek")),
                "value": InputSpec(("B", "Lk", "Ev")),
                "query_weight": InputSpec(("E", "H*D")),
                "key_weight": InputSpec(("Ek", "Hkv*D")),
                "value_weight": InputSpec(("Ev", "Hkv*Dv")),
                "output_weight": InputSpec(("H*Dv", "Eo"), required=False),
                "query_bias": InputSpec(("H*D",), required=False),
                "key_bias": InputSpec(("Hkv*D",), required=False),
                "value_bias": InputSpec(("Hkv*Dv",), required=False),
                "output_bias": InputSpec(("Eo",), required=False, needs="output_weight"),
                "mask": _MASK,
                "bias": _BIAS,
                "key_lengths": _KEY_LENGTHS,
                "query_mask": _QUERY_MASK,
            },
            frozenset({"heads", "kv_heads", "scale", "empty_rows", *_ATTENDANCE}),
            ("query", "key", "value", "raw_scores", "scores", *_AFTER_THE_SCORES, "context", "output"),
        ),
    )
}


def inputs_of(operation: str, score: str | None) -> Mapping[str, InputSpec]:
    """Return the inputs of an operation; those of ``scoring`` depend on the kind of score."""
    if operation == "scoring":
        return SCORE_INPUTS[score or "scaled_dot"]
    return OPERATIONS[operation].inputs


NEEDED = {
    "capped": {"softcap"},
    "biased": {"bias"},
    "masked": {"mask", "is_causal", "window", "key_lengths", "query_mask"},
    "grad_bias": {"bias"},
}
"""Stages that are computed only where one of these inputs and options is given."""


def computed_stages(operation: str, options: Mapping[str, Any], inputs: Collection[str]) -> tuple[str, ...]:
    """Return the stages that an operation computes with these options and inputs."""
    given = {*inputs, *(name for name, value in options.items() if value and value != (None, None))}
    has_raw_scores = options.get("score", "scaled_dot") in ("dot", "scaled_dot")
    return tuple(
        stage
        for stage in OPERATIONS[operation].stages
        if (stage != "raw_scores" or has_raw_scores) and (stage not in NEEDED or NEEDED[stage] & given)
    )


def result_stages(operation: str, options: Mapping[str, Any], inputs: Collection[str]) -> tuple[str, ...]:
    """Return the stages without which there is no result: of gradients all, of a softmax the weights, else the last."""
    computed = computed_stages(operation, options, inputs)
    if operation == "softmax":
        return ("weights",)
    return computed if operation == "attention_gradients" else computed[-1:]


def stage_position(stage: str) -> int:
    """Return a stage's place in the order of computation; names of their own, and derived quantities, come last."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
