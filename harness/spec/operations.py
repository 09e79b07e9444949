"""The stages of attention; the operations, with their inputs, options and stages; and properties of their calls.

A property is what must hold between two calls. How the second is made from the first stands in
``attncheck.properties``; here is what case files, declarations and documents need: the names, and what each says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from attncheck.spec import inputs as specs
from attncheck.spec.inputs import Axes, InputSpec, optional_input
from attncheck.spec.options import DEFAULT_SCORE, OPTIONS, OptionSpec, statistics_dtype


@dataclass(frozen=True)
class StageSpec:
    """A named intermediate. ``computation_part`` is the part of the computation that it belongs to.

    ``axes`` are those of a computation per head; ``Operation.stage_axes`` has others. One that ``may_be_wide`` is a
    statistic of rows: in a dtype of 16 bits it may be returned in float32, as fused kernels do.
    """

    name: str
    computation_part: Literal["projections", "normalizations", "rotations", "logits", "softmax", "means", "gradients"]
    axes: Axes
    may_be_wide: bool = False


STAGE_SPECS: Mapping[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec("query", "projections", ("B", "H", "Lq", "D")),
        StageSpec("key", "projections", ("B", "Hkv", "Lk", "D")),
        StageSpec("value", "projections", ("B", "Hkv", "Lk", "Dv")),
        StageSpec("normalized_query", "normalizations", ("B", "H", "Lq", "D")),
        StageSpec("normalized_key", "normalizations", ("B", "Hkv", "Lk", "D")),
        StageSpec("rotated_query", "rotations", ("B", "H", "Lq", "D")),
        StageSpec("rotated_key", "rotations", ("B", "Hkv", "T", "D")),
        StageSpec("raw_scores", "logits", specs.SCORES_AXES),
        StageSpec("scores", "logits", specs.SCORES_AXES),
        StageSpec("capped", "logits", specs.SCORES_AXES),
        StageSpec("biased", "logits", specs.SCORES_AXES),
        StageSpec("masked", "logits", specs.SCORES_AXES),
        StageSpec("weights", "softmax", specs.SCORES_AXES),
        StageSpec("log_sum_exp", "softmax", ("B", "H", "Lq"), may_be_wide=True),
        StageSpec("context", "means", ("B", "H", "Lq", "Dv")),
        StageSpec("output", "means", ("B", "H", "Lq", "Dv")),
        *(
            StageSpec(f"grad_{name}", "gradients", spec.axes)
            for name, spec in specs.GATED_INPUTS.items()
            if spec.is_differentiable
        ),
    )
}
STAGES = tuple(STAGE_SPECS)
"""Every stage, in the order in which attention computes them, then the gradients."""


def stages_of_part(computation_part: str) -> tuple[str, ...]:
    """Return the stages of a part of the computation, in its order."""
    return tuple(name for name, spec in STAGE_SPECS.items() if spec.computation_part == computation_part)


PROJECTIONS, NORMALIZATIONS, ROTATIONS = map(stages_of_part, ("projections", "normalizations", "rotations"))
LOGITS, MEANS, GRADIENTS = map(stages_of_part, ("logits", "means", "gradients"))
STAGES_ON_SCORES = tuple(
    name
    for name, spec in STAGE_SPECS.items()
    if spec.axes == specs.SCORES_AXES and spec.computation_part != "gradients"
)
"""Stages of the scores' shape."""
GRADIENTS_SUMMING_QUERIES = tuple(name for name in GRADIENTS if "Lk" in STAGE_SPECS[name].axes)
"""Gradients that every query row of a head has a part in."""
GRADIENTS_THROUGH_SCORES = tuple(
    name for name in GRADIENTS if name.removeprefix("grad_") in {"query", "key", *specs.INPUTS_ON_ROWS}
)
"""Gradients that come through a row's scores; that of the values follows from its weights alone."""


def query_axis(stage: str) -> int | None:
    """Return the axis of a stage that counts query rows, from the end; None for those of keys and values.

    Example:
        >>> query_axis("output"), query_axis("log_sum_exp"), query_axis("grad_key")
        (-2, -1, None)
    """
    axes = STAGE_SPECS[stage].axes if stage in STAGE_SPECS else specs.SCORES_AXES
    return axes.index("Lq") - len(axes) if "Lq" in axes else None


@cache
def key_axis(stage: str) -> int | None:
    """Return the axis of a stage that counts keys, from the end; None without one, or if its length may be 1.

    Example:
        >>> key_axis("weights"), key_axis("grad_value"), key_axis("output")
        (-1, -2, None)
    """
    name = stage.removeprefix("grad_")
    if stage not in STAGE_SPECS or (name != stage and specs.GATED_INPUTS[name].is_broadcastable):
        return None
    axes = STAGE_SPECS[stage].axes
    return next((axes.index(letter) - len(axes) for letter in ("T", "Lk") if letter in axes), None)


def stage_position(stage: str) -> int:
    """Return a stage's position in the order of computation; names of their own, and derived quantities, come last."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


@dataclass(frozen=True)
class ScoreSpec:
    """One kind of score: the contract's function, its inputs and options; ``fixed_scale`` is the scale of all cases."""

    function_name: str
    inputs: Mapping[str, InputSpec]
    options: frozenset[str] = frozenset()
    has_raw_scores: bool = False
    fixed_scale: float | None = None


_DOT_INPUTS = {"query": specs.QUERY, "key": specs.KEY}
_DOT_OPTIONS = frozenset({"scale", "softcap"})
SCORE_SPECS: Mapping[str, ScoreSpec] = {
    "dot": ScoreSpec("dot_scores", _DOT_INPUTS, _DOT_OPTIONS, has_raw_scores=True, fixed_scale=1.0),
    "scaled_dot": ScoreSpec("dot_scores", _DOT_INPUTS, _DOT_OPTIONS, has_raw_scores=True),
    "general": ScoreSpec(
        "general_scores",
        {
            "query": specs.QUERY,
            "key": specs.WIDE_KEY,
            "weight": InputSpec(("D", "Dk")),
            "score_bias": optional_input("H", is_broadcastable=True),
        },
    ),
    "additive": ScoreSpec(
        "additive_scores",
        {
            "query": specs.QUERY,
            "key": specs.WIDE_KEY,
            "query_weight": InputSpec(("D", "A")),
            "key_weight": InputSpec(("Dk", "A")),
            "score_vector": InputSpec(("A",)),
            "score_bias": optional_input("A"),
        },
    ),
    "cosine": ScoreSpec("cosine_scores", _DOT_INPUTS, frozenset({"scale"})),
}
SCORE_INPUTS: Mapping[str, Mapping[str, InputSpec]] = {name: spec.inputs for name, spec in SCORE_SPECS.items()}


@dataclass(frozen=True)
class Operation:
    """One operation: the contract's function, its inputs by name, the options that it takes, and its stages.

    ``declared_function_name`` is the name of the contract's function, if it is not the operation's name.
    ``required_results`` are the stages that a result must have: all that are computed, the last one, or one by name.
    ``stage_axes`` are the axes of stages whose axes differ from those of a computation per head: the first tuple whose
    axes exist. ``row_statistics`` are stages that are float32 in a dtype of 16 bits. ``lowers_to`` is the operation
    that this one becomes once its keys and values are laid out (``reading/lowering.py``). If it ``may_run_as_lowered``,
    an implementation that has only the other operation is called with that one. An operation ``supports_radii`` if
    radii can be laid out as its inputs are, so that numbers can be expected of it. ``stages_if_lowered`` are stages
    that it has only if another operation was lowered to it, each with the folded input that shows this. ``fixed_score``
    is the kind of score of an operation that has one kind and no option for it.
    """

    name: str
    inputs: Mapping[str, InputSpec]
    options: frozenset[str]
    stages: tuple[str, ...]
    declared_function_name: str | None = None
    required_results: str = "last"
    stage_axes: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)
    row_statistics: frozenset[str] = frozenset()
    lowers_to: str | None = None
    may_run_as_lowered: bool = False
    supports_radii: bool = False
    stages_if_lowered: Mapping[str, str] = field(default_factory=dict)
    fixed_score: str | None = None

    @property
    def function_name(self) -> str:
        """The contract's function, which mostly has the operation's name."""
        return self.declared_function_name or self.name

    @property
    def is_lowered(self) -> bool:
        """Return whether it becomes another operation before it is judged."""
        return self.lowers_to is not None

    @property
    def computes_gradients(self) -> bool:
        """Return whether its stages are gradients: sums over query rows, of which none stands for another."""
        return set(self.stages) <= set(GRADIENTS)

    @property
    def can_have_expected_numbers(self) -> bool:
        """Return whether numbers can be expected of it; gradients are compared with the exact answer alone."""
        return not self.computes_gradients and (self.supports_radii or not self.is_lowered)

    @property
    def merges_parts(self) -> bool:
        """Return whether it merges what was computed for parts of the keys: there is no key, and no query."""
        return specs.PART_INPUTS.keys() <= self.inputs.keys()

    @property
    def has_projections(self) -> bool:
        """Return whether it projects its inputs: they have no axis of heads, and an option says how many there are."""
        return not set(PROJECTIONS).isdisjoint(self.stages)

    @property
    def has_score_option(self) -> bool:
        """Return whether an option says what kind of score it computes: it is a scoring function, and nothing else."""
        return "score" in self.options


_SOFTMAX = stages_of_part("softmax")
_ATTENDANCE = frozenset({"is_causal", "window", "alignment"})
"""Options that say which keys a query may attend to."""
HEADS = ("heads", "kv_heads")
"""Options that give the number of heads, if no axis does."""
_ATTENTION_OPTIONS = frozenset(
    {"scale", "softcap", "rotary_interleaved", "mask_fill", "empty_rows", *HEADS, *_ATTENDANCE}
)
_NORMS = frozenset({"norm", "norm_over", "epsilon", "norm_after_rotation"})
_BEFORE_MASKING = tuple(name for name in LOGITS if name not in ("biased", "masked"))
_SEQUENCE_OPTIONS = frozenset({"scale", "softcap", "is_causal", "window", "poison"})
_CODE_OPTIONS = frozenset({"stored_as", "packing", "swizzle"})
_LOGITS_WITHOUT_BIAS = tuple(name for name in LOGITS if name != "biased")
_LOGITS_WITHOUT_CAP = tuple(name for name in LOGITS if name != "capped")

_GRAD_OUTPUT = InputSpec(("B", "H", "Lq", "Dv"))
_VALUE = InputSpec(("B", "H", "Lk", "Dv"), synonyms=specs.ATTENTION_INPUTS["value"].synonyms)


def _gradient_stages(inputs: Mapping[str, InputSpec]) -> tuple[str, ...]:
    """Return the names of the gradients of some inputs."""
    return tuple(stage for stage in GRADIENTS if stage.removeprefix("grad_") in inputs)


def _attention_operation(score: str) -> Operation:
    """Return attention with scores other than the dot product."""
    kind, name = SCORE_SPECS[score], f"{score}_attention"
    operands = {"query": kind.inputs["query"], "key": kind.inputs["key"], "value": _VALUE}
    return Operation(
        name,
        {**operands, **kind.inputs, **specs.INPUTS_ON_SCORES},
        kind.options | _ATTENDANCE | {"mask_fill", "empty_rows"},
        (*(stage for stage in LOGITS if stage not in ("raw_scores", "capped")), *_SOFTMAX, "output"),
        fixed_score=score,
    )


DEFAULT_OPERATION = "attention"
"""The operation of a call that names none."""

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "scoring",
            SCORE_INPUTS[DEFAULT_SCORE],
            frozenset({"score", "scale", "softcap"}),
            _BEFORE_MASKING,
            SCORE_SPECS[DEFAULT_SCORE].function_name,
        ),
        Operation(
            "softmax", {"scores": specs.SCORE_INPUT}, frozenset({"empty_rows"}), _SOFTMAX, required_results="weights"
        ),
        Operation(
            "masking",
            {"scores": specs.SCORE_INPUT, **specs.INPUTS_ON_SCORES, **specs.OFFSET_INPUTS},
            _ATTENDANCE | {"mask_fill"},
            ("biased", "masked"),
            "mask_scores",
        ),
        Operation(
            "attention",
            {**specs.ATTENTION_INPUTS, **specs.PAST_INPUTS, **specs.OFFSET_INPUTS},
            _ATTENTION_OPTIONS,
            (*ROTATIONS, *LOGITS, *_SOFTMAX, "output"),
            stages_if_lowered={"normalized_query": "query_norm", "normalized_key": "key_norm", "context": "gate"},
        ),
        *map(_attention_operation, ("general", "additive", "cosine")),
        Operation(
            "attention_gradients",
            {**specs.ATTENTION_INPUTS, "grad_output": _GRAD_OUTPUT},
            _ATTENTION_OPTIONS,
            _gradient_stages(specs.ATTENTION_INPUTS),
            required_results="all",
            stages_if_lowered={"grad_gate": "gate"},
        ),
        Operation(
            "gated_attention",
            {**specs.GATED_INPUTS, **specs.PAST_INPUTS, **specs.OFFSET_INPUTS},
            _ATTENTION_OPTIONS,
            (*ROTATIONS, *LOGITS, *_SOFTMAX, *MEANS),
            lowers_to="attention",
        ),
        Operation(
            "gated_attention_gradients",
            {**specs.GATED_INPUTS, "grad_output": _GRAD_OUTPUT},
            _ATTENTION_OPTIONS,
            GRADIENTS,
            required_results="all",
            lowers_to="attention_gradients",
        ),
        Operation(
            "packed_attention",
            {**specs.PACKED_INPUTS, **specs.USED_KEYS},
            _SEQUENCE_OPTIONS,
            (*_LOGITS_WITHOUT_BIAS, *_SOFTMAX, "output"),
            lowers_to="attention",
            may_run_as_lowered=True,
        ),
        Operation(
            "packed_attention_gradients",
            {**specs.PACKED_INPUTS, "grad_output": _GRAD_OUTPUT, **specs.USED_KEYS},
            _SEQUENCE_OPTIONS,
            _gradient_stages({**specs.PACKED_INPUTS, **specs.USED_KEYS}),
            required_results="all",
            lowers_to="attention_gradients",
            may_run_as_lowered=True,
        ),
        Operation(
            "paged_attention",
            specs.PAGED_INPUTS,
            _SEQUENCE_OPTIONS | _CODE_OPTIONS,
            (*_LOGITS_WITHOUT_BIAS, *_SOFTMAX, "output"),
            lowers_to="attention",
        ),
        Operation(
            "ragged_paged_attention",
            specs.RAGGED_PAGED_INPUTS,
            _SEQUENCE_OPTIONS | _CODE_OPTIONS,
            (*_LOGITS_WITHOUT_BIAS, *_SOFTMAX, "output"),
            lowers_to="attention",
        ),
        Operation(
            "quantized_attention",
            specs.QUANTIZED_INPUTS,
            _CODE_OPTIONS | {"scale", "softcap", "is_causal", "window"},
            (*_LOGITS_WITHOUT_BIAS, *_SOFTMAX, "output"),
            lowers_to="attention",
        ),
        Operation(
            "normalized_attention",
            specs.NORMALIZED_INPUTS,
            _NORMS | {"scale", "softcap", "rotary_interleaved", "is_causal", "window"},
            (*NORMALIZATIONS, *ROTATIONS, *LOGITS, *_SOFTMAX, "output"),
            lowers_to="attention",
        ),
        Operation(
            "latent_attention",
            specs.LATENT_INPUTS,
            frozenset({"scale", "softcap", "is_causal", "window"}),
            (*LOGITS, *_SOFTMAX, "output"),
            lowers_to="attention",
            supports_radii=True,
        ),
        Operation(
            "sparse_attention",
            specs.SPARSE_INPUTS,
            frozenset({"scale", "softcap", "is_causal", "window", "block_size"}),
            (*_LOGITS_WITHOUT_BIAS, *_SOFTMAX, "output"),
            lowers_to="attention",
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
                "output_weight": optional_input("H*Dv", "Eo", neutral_value=None),
                "query_bias": optional_input("H*D"),
                "key_bias": optional_input("Hkv*D"),
                "value_bias": optional_input("Hkv*Dv"),
                "output_bias": optional_input("Eo", required_input="output_weight"),
                **specs.INPUTS_ON_ROWS,
                **specs.ROTARY_INPUTS,
                **specs.PAST_INPUTS,
            },
            (_ATTENTION_OPTIONS | {"projections"}) - {"softcap"},
            (*PROJECTIONS, *ROTATIONS, *_LOGITS_WITHOUT_CAP, *_SOFTMAX, *MEANS),
            stage_axes={"output": (("B", "Lq", "Eo"), ("B", "Lq", "H*Dv"))},
        ),
        Operation(
            "merge_states",
            specs.PART_INPUTS,
            frozenset({"lse_base"}),
            (*_SOFTMAX, "output"),
            stage_axes={"weights": (("B", "H", "Lq", "N"),)},
            row_statistics=frozenset(_SOFTMAX),
        ),
    )
}
OPERATIONS_BY_SCORE = tuple(name for name, operation in OPERATIONS.items() if operation.fixed_score)
"""Attention with scores other than the dot product."""
OPERATIONS_PER_HEAD = tuple(
    name for name, operation in OPERATIONS.items() if "heads" in operation.options and not operation.has_projections
)
"""Operations on queries, keys and values that have an axis of heads, or come with their heads side by side."""

_STAGE_REQUESTERS: Mapping[str, InputSpec | OptionSpec] = {
    **specs.PACKED_INPUTS,
    **specs.SPARSE_INPUTS,
    **specs.INPUTS_ON_ROWS,
    **specs.ROTARY_INPUTS,
    **specs.FOLDED_INPUTS,
    **OPTIONS,
}
REQUESTERS_OF_STAGE: Mapping[str, frozenset[str]] = {
    **{
        stage: frozenset(name for name, spec in _STAGE_REQUESTERS.items() if spec.requested_stage == stage)
        for stage in dict.fromkeys(spec.requested_stage for spec in _STAGE_REQUESTERS.values())
        if stage is not None
    },
    **{f"grad_{name}": frozenset({name}) for name, spec in specs.INPUTS_ON_ROWS.items() if spec.is_differentiable},
}
"""Stages that are computed only if one of these inputs and options is given."""
REPLACES: Mapping[str, frozenset[str]] = {
    option: frozenset(
        name
        for operation in OPERATIONS.values()
        for name, spec in operation.inputs.items()
        if spec.replaced_option == option
    )
    for option in OPTIONS
}
"""By option, the inputs that replace it."""
IGNORABLE_INPUTS_AND_OPTIONS: Mapping[str, InputSpec | OptionSpec] = {
    name: spec for name, spec in _STAGE_REQUESTERS.items() if spec.plain_name
}
"""Inputs and options that an implementation may take and leave without effect."""


def is_option_set(option: str, options: Mapping[str, Any], inputs: Collection[str]) -> bool:
    """Return whether a case sets an option, or an input that replaces it.

    Example:
        >>> is_option_set("scale", {"scale": 0.0}, []), is_option_set("scale", {}, ["head_scale"])
        (True, True)
        >>> is_option_set("scale", {}, [])
        False
    """
    return options.get(option) is not None or not REPLACES[option].isdisjoint(inputs)


def score_spec(options: Mapping[str, Any]) -> ScoreSpec:
    """Return the kind of score of a case of ``scoring``."""
    return SCORE_SPECS[options.get("score") or DEFAULT_SCORE]


def score_kind(operation: str, options: Mapping[str, Any]) -> str:
    """Return the kind of score of an operation: its own, or that of its options."""
    return OPERATIONS[operation].fixed_score or str(options.get("score") or DEFAULT_SCORE)


def input_specs(operation: str, score: str | None) -> Mapping[str, InputSpec]:
    """Return the inputs of an operation; those of ``scoring`` depend on the kind of score."""
    spec = OPERATIONS[operation]
    return SCORE_INPUTS[score or DEFAULT_SCORE] if spec.has_score_option else spec.inputs


def stage_dtype(operation: str, stage: str, dtype: str) -> str:
    """Return the dtype of a returned stage, from the dtype of the inputs."""
    return statistics_dtype(dtype) if stage in OPERATIONS[operation].row_statistics else dtype


def wide_dtype(stage: str, dtype: str) -> str | None:
    """Return the wider dtype in which a stage may also be returned, for inputs of a dtype; None if there is none.

    Example:
        >>> wide_dtype("log_sum_exp", "bfloat16"), wide_dtype("log_sum_exp", "float32"), wide_dtype("output", "float16")
        ('float32', None, None)
    """
    is_wide = stage in STAGE_SPECS and STAGE_SPECS[stage].may_be_wide and statistics_dtype(dtype) != dtype
    return statistics_dtype(dtype) if is_wide else None


def computed_stages(operation: str, options: Mapping[str, Any], inputs: Collection[str]) -> tuple[str, ...]:
    """Return the stages that an operation computes with these options and inputs.

    Example:
        >>> computed_stages("attention", {}, ["query", "key", "value"])
        ('raw_scores', 'scores', 'weights', 'log_sum_exp', 'output')
        >>> computed_stages("attention", {"is_causal": True, "softcap": 30.0}, ["query", "key", "value"])
        ('raw_scores', 'scores', 'capped', 'masked', 'weights', 'log_sum_exp', 'output')
    """
    present = {*inputs, *(name for name, value in options.items() if value and value != (None, None))}
    absent = set() if score_spec(options).has_raw_scores else {LOGITS[0]}
    spec = OPERATIONS[operation]
    lowered = {stage for stage, name in spec.stages_if_lowered.items() if name in present}
    return tuple(
        stage
        for stage in STAGES
        if stage in lowered
        or (
            stage in spec.stages
            and stage not in absent
            and (stage not in REQUESTERS_OF_STAGE or REQUESTERS_OF_STAGE[stage] & present)
        )
    )


def result_stages(operation: str, options: Mapping[str, Any], inputs: Collection[str]) -> tuple[str, ...]:
    """Return the stages that a result must have: all gradients, the weights of a softmax, else the last stage.

    Example:
        >>> inputs = ["query", "key", "value"]
        >>> result_stages("attention", {}, inputs), result_stages("attention_gradients", {}, [*inputs, "grad_output"])
        (('output',), ('grad_query', 'grad_key', 'grad_value'))
    """
    computed, results = computed_stages(operation, options, inputs), OPERATIONS[operation].required_results
    return computed if results == "all" else computed[-1:] if results == "last" else (results,)


ProcessNeeds = Literal["calls", "one process", "fresh process", "threads"]
"""The needs of a property: separate calls, calls one after the other in one process, or separate processes."""
Claim = Literal["bitwise", "within bounds"]
CLAIMS: tuple[Claim, ...] = ("bitwise", "within bounds")
"""The claims that an implementation can make of a property, from strict to lenient."""


@dataclass(frozen=True)
class PropertySpec:
    """One property: a description, the calls that it needs, in words, and the processes in which they run."""

    name: str
    description: str
    calls_needed: str
    required_processes: ProcessNeeds = "calls"


PROPERTIES: Mapping[str, PropertySpec] = {
    spec.name: spec
    for spec in (
        PropertySpec(
            "repeated", "The same call gives the same, with other work in between.", "20 calls", "one process"
        ),
        PropertySpec("fresh_process", "A process that did nothing else gives the same.", "1 call", "fresh process"),
        PropertySpec("threads", "One thread, two and three give the same.", "1 call for each number", "threads"),
        PropertySpec(
            "batch_invariant",
            "A batch entry gives the same alone as in a batch, wherever in the batch it stands.",
            "1 call for each entry, and 1 with the entries in another order",
        ),
        PropertySpec(
            "padding",
            "Keys that are masked, or beyond the lengths, and queries that nobody reads change nothing.",
            "1 call for each way of padding",
        ),
        PropertySpec("packed", "Sequences packed into one give what each gives alone.", "1 call for each sequence"),
        PropertySpec(
            "cached_prefix",
            "Queries after a cached prefix, computed in 1, 2 or 7 parts, give what they give without a cache.",
            "2, 3 and 8 calls",
        ),
        PropertySpec("decoding", "Tokens decoded one by one give what prefilling them gives.", "1 call for each token"),
        PropertySpec(
            "keys_permuted", "Keys in another order, with their values, mask and bias, give the same.", "2 calls"
        ),
        PropertySpec("heads_permuted", "Heads in another order give the same, in that order.", "1 call"),
        PropertySpec("values_scaled", "Values times a power of two give the output times that.", "2 calls"),
        PropertySpec("scores_shifted", "A number added to all scores of a row changes nothing.", "2 calls"),
        PropertySpec(
            "layout",
            "Inputs that lie otherwise in memory (strided, transposed, unaligned, reversed) give the same.",
            "1 call for each layout",
        ),
        PropertySpec("poison_large", "Huge numbers in what a query may not read change nothing.", "1 to 3 calls"),
        PropertySpec("poison_nan", "NaN in what a query may not read changes nothing.", "1 to 3 calls"),
        PropertySpec(
            "merged_parts", "Parts of the keys, merged by their log-sum-exps, give what all keys give.", "2 and 3 calls"
        ),
        PropertySpec(
            "output_buffer", "Memory that is full of NaN before the call changes nothing.", "3 calls", "one process"
        ),
        PropertySpec("inputs_unchanged", "A call leaves its inputs as they are.", "1 call", "one process"),
        PropertySpec(
            "outputs_independent",
            "What a call returned is no part of its inputs, and stays as it is through the next calls.",
            "3 calls",
            "one process",
        ),
        PropertySpec(
            "after_other_shapes", "A call gives the same after calls of other shapes.", "2 calls of each", "one process"
        ),
        PropertySpec(
            "after_a_thousand_calls", "A call gives the same after a thousand others.", "1,002 calls", "one process"
        ),
    )
}
"""Every property, in the order of reports."""
