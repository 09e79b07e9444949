"""The specification of attention: dtypes, options, inputs, stages and operations, each stated once.

Shapes, lists of stages, the axis that holds queries, the text of the expected signature, the JSON Schema, the tables of
the documentation, the fuzzers' grammar and the readings in which something is ignored all follow from the tables here.
The signatures of functions, and the letters of axes, stand in ``attncheck.backends.contract``; a test holds the two
against each other.
"""

from __future__ import annotations

from attncheck.backends.contract import AXES
from attncheck.spec.dtypes import (
    DEFAULT_DTYPES,
    DEFAULT_EMPTY_ROWS,
    DTYPES,
    EMPTY_ROWS,
    ROUNDING_MODELS,
    statistics_dtype,
    without_a_key,
)
from attncheck.spec.inputs import AT_LEAST, FOLDED_INPUTS, Axes, InputSpec, Shape
from attncheck.spec.operations import (
    ASKED_BY,
    BY_SCORE,
    HEADS,
    IGNORABLE,
    OPERATIONS,
    PER_HEAD,
    SCORE_INPUTS,
    SCORE_SPECS,
    Operation,
    ScoreSpec,
    computed_stages,
    inputs_of,
    result_stages,
    score_kind,
    score_of,
    stage_dtype,
    wide_dtype,
)
from attncheck.spec.options import CONVENTIONS, DEFAULT_SCORE, OPTIONS, Options, OptionSpec, ScoreKind
from attncheck.spec.stages import (
    GRADIENTS,
    LOGITS,
    MEANS,
    NORMALIZATIONS,
    ON_SCORES,
    PROJECTIONS,
    ROTATIONS,
    STAGE_SPECS,
    STAGES,
    SUMS_OF_QUERIES,
    THROUGH_SCORES,
    StageSpec,
    key_axis,
    query_axis,
    stage_position,
    stages_of,
)

__all__ = [
    "ASKED_BY",
    "AT_LEAST",
    "AXES",
    "BY_SCORE",
    "CONVENTIONS",
    "DEFAULT_DTYPES",
    "DEFAULT_EMPTY_ROWS",
    "DEFAULT_SCORE",
    "DTYPES",
    "EMPTY_ROWS",
    "FOLDED_INPUTS",
    "GRADIENTS",
    "HEADS",
    "IGNORABLE",
    "LOGITS",
    "MEANS",
    "NORMALIZATIONS",
    "ON_SCORES",
    "OPERATIONS",
    "OPTIONS",
    "PER_HEAD",
    "PROJECTIONS",
    "ROTATIONS",
    "ROUNDING_MODELS",
    "SCORE_INPUTS",
    "SCORE_SPECS",
    "STAGES",
    "STAGE_SPECS",
    "SUMS_OF_QUERIES",
    "THROUGH_SCORES",
    "Axes",
    "InputSpec",
    "Operation",
    "OptionSpec",
    "Options",
    "ScoreKind",
    "ScoreSpec",
    "Shape",
    "StageSpec",
    "computed_stages",
    "inputs_of",
    "key_axis",
    "query_axis",
    "result_stages",
    "score_kind",
    "score_of",
    "stage_dtype",
    "stage_position",
    "stages_of",
    "statistics_dtype",
    "wide_dtype",
    "without_a_key",
]
