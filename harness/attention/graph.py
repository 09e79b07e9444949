"""The graph of the steps of attention: their order of composition, as data.

    query, key, value    of multi_head_attention: ``projection``
    dequantized_key, .. value   ``caches``, where keys and values, and maybe queries, come with factors
    projected_key, .. value   ``latents``, if they are made of latent vectors, or as good as made
    normalized_query, .. key   ``normalization``, before the rotation or behind it
    joined_key, .. value    ``caches``, where projected keys and values come behind those of a cache
    rotated_query, .. key   ``rotary``, if there is a rotary embedding: everything behind them follows from these
    product              q k^T, shared by raw_scores and scores, itself no stage
    raw_scores, scores   the product, times the scale: ``scores``; or another kind of score: ``other_scores``
    capped               ``logits``, behind the scores, unless a convention puts it behind the bias, or behind the
                         mask, which then forbids nothing altogether
    biased, masked       ``logits``
    logits               ``sinks``, behind all of them: what the softmax is of, itself no stage
    exponentials         shared by weights and log_sum_exp, itself no stage: ``softmax``
    context, output      ``weighted_mean``; of multi_head_attention the heads side by side, times Wo plus bo
    logits .. output     of merge_states, whose parts are scores with values of each query's own: ``merging``
    context, output      behind a gate: ``output_gate``, with the gradient of the context in the place of grad_output
    grad_query .. bias   of attention_gradients, the transposes of the same steps: ``backward`` and ``backward_sums``

Query heads may share a key and a value head: head h of H takes head h // (H / Hkv) (Ainslie et al. 2023, section 2.2).

A step whose option is not there hands its predecessor on, so the graph is the same for every problem of an operation.
What has no node is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise

from attncheck.attention.backward_sums import GRADIENT_NODES
from attncheck.attention.caches import (
    LATENT_MEAN,
    LATENT_PRODUCT,
    dequantization_step,
    latent_projection_step,
    prepend_cache_step,
)
from attncheck.attention.logits import BIAS, MASK, SOFTCAP
from attncheck.attention.merging import MERGED_MEAN, PART_EXPONENTIALS, PART_LOG_SUM_EXP, PART_LOGITS, PART_WEIGHTS
from attncheck.attention.normalization import normalization_step
from attncheck.attention.other_scores import ADDITIVE_SCORES, COSINE_SCORES, GENERAL_SCORES
from attncheck.attention.output_gate import GATED_OUTPUT, GRAD_CONTEXT, GRAD_GATE, SIGMOID, SIGMOID_SLOPE
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.projection import OUTPUT_PROJECTION, projection_step
from attncheck.attention.rotary import rotation_step
from attncheck.attention.scores import PRODUCT, RAW_SCORES, SCORES
from attncheck.attention.sinks import GRAD_SINKS, SINKS
from attncheck.attention.softmax import EXPONENTIALS, LOG_SUM_EXP, WEIGHTS
from attncheck.attention.step import GraphNode, Step
from attncheck.attention.weighted_mean import WEIGHTED_MEAN
from attncheck.spec import OPERATIONS, PROJECTIONS, QUERY_KEY_VALUE, ROTATIONS

Graph = Mapping[str, GraphNode]

_LATE_NORM_OPTION = "norm_after_rotation"
_LOGIT_STEPS = {"capped": SOFTCAP, "biased": BIAS, "masked": MASK}

_DOT_PRODUCT_GRAPH: Graph = {
    "product": GraphNode(PRODUCT, ("query", "key")),
    "raw_scores": GraphNode(RAW_SCORES, ("product",)),
    "scores": GraphNode(SCORES, ("product",)),
}
_MERGE_GRAPH: Graph = {
    "logits": GraphNode(PART_LOGITS, ("scores",)),
    "exponentials": GraphNode(PART_EXPONENTIALS, ("logits",)),
    "weights": GraphNode(PART_WEIGHTS, ("exponentials",)),
    "log_sum_exp": GraphNode(PART_LOG_SUM_EXP, ("exponentials",)),
    "output": GraphNode(MERGED_MEAN, ("weights", "row_values")),
}
_SCORE_GRAPHS: Mapping[str, Graph] = {
    "dot": _DOT_PRODUCT_GRAPH,
    "scaled_dot": _DOT_PRODUCT_GRAPH,
    "general": {"scores": GraphNode(GENERAL_SCORES, ("query", "key"))},
    "additive": {"scores": GraphNode(ADDITIVE_SCORES, ("query", "key"))},
    "cosine": {"scores": GraphNode(COSINE_SCORES, ("query", "key"))},
}
_INPUTS_WITH_STEPS = frozenset(
    {"sinks", "query_cos", "key_factor", "query_factor", "query_norm", "cached_key", "key_projection", "gate"}
)


def graph_of(problem: Computation) -> Graph:
    """Return the nodes of a problem's operation: the step of each, and the nodes that it follows from."""
    present = _INPUTS_WITH_STEPS & problem.inputs.keys()
    late_norm = {_LATE_NORM_OPTION} if problem.options.get(_LATE_NORM_OPTION) else set()
    return _build_graph(problem.operation, problem.score, problem.softcap_follows, frozenset(present | late_norm))


def _logit_stage_order(softcap_follows: str) -> tuple[str, ...]:
    """Return the stages that the softmax may follow from, in the order in which they are computed."""
    others = [stage for stage in LOGITS if stage != "capped"]
    index = others.index(softcap_follows) + 1
    return (*others[:index], "capped", *others[index:])


@cache
def _build_graph(operation: str, score: str, softcap_follows: str, present: frozenset[str]) -> Graph:
    if operation == "merge_states":
        return _MERGE_GRAPH
    graph = {} if operation in ("softmax", "masking") else dict(_SCORE_GRAPHS[score])
    order = _logit_stage_order(softcap_follows)
    graph |= {stage: GraphNode(_LOGIT_STEPS[stage], (before,)) for before, stage in pairwise(order)}
    if "sinks" in present:
        graph["logits"] = GraphNode(SINKS, order[-1:])
    graph |= {
        "exponentials": GraphNode(EXPONENTIALS, ("logits",) if "sinks" in present else order[-1:]),
        "weights": GraphNode(WEIGHTS, ("exponentials",)),
        "log_sum_exp": GraphNode(LOG_SUM_EXP, ("exponentials",)),
    }
    if operation == "attention" or OPERATIONS[operation].fixed_score:
        graph["output"] = GraphNode(WEIGHTED_MEAN, ("weights", "value"))
    if operation == "multi_head_attention":
        graph |= {name: GraphNode(projection_step(name), ()) for name in PROJECTIONS}
        graph["context"] = GraphNode(WEIGHTED_MEAN, ("weights", "value"))
        graph["output"] = GraphNode(OUTPUT_PROJECTION, ("context",))
    if operation == "attention_gradients":
        graph |= {**GRADIENT_NODES, "grad_sinks": GraphNode(GRAD_SINKS, ("grad_logits",))}
    if "gate" in present:
        graph = dict(_insert_gate(graph))
    if "key_projection" in present:
        return {
            **_insert_after_inputs(graph, "projected", latent_projection_step),
            "product": GraphNode(LATENT_PRODUCT, ("query", "projected_key")),
            "output": GraphNode(LATENT_MEAN, ("weights", "projected_value")),
        }
    if "key_factor" in present:
        names = QUERY_KEY_VALUE if "query_factor" in present else QUERY_KEY_VALUE[1:]
        return _insert_after_inputs(graph, "dequantized", dequantization_step, names)
    insert_norm = partial(_insert_after_inputs, word="normalized", step_of=normalization_step, names=("query", "key"))
    wrappers = [_insert_rotation] * ("query_cos" in present) + [insert_norm] * ("query_norm" in present)
    for wrapped in reversed(wrappers) if _LATE_NORM_OPTION in present else wrappers:  # the last one comes first
        graph = dict(wrapped(graph))
    return _insert_after_inputs(graph, "joined", prepend_cache_step) if "cached_key" in present else graph


def _insert_after_inputs(
    graph: Graph, word: str, step_of: Callable[[str], Step], names: Sequence[str] = ("key", "value")
) -> Graph:
    """Insert a step after each of some inputs: everything that follows from the input follows from the step."""
    made = {name: f"{word}_{name}" for name in names}
    moved = {
        name: GraphNode(node.step, tuple(made.get(operand, operand) for operand in node.operands))
        for name, node in graph.items()
    }
    return moved | {made_name: GraphNode(step_of(name), (name,)) for name, made_name in made.items()}


def _insert_gate(graph: Graph) -> Graph:
    """Insert a gate between the mean of the values and the output, or into the gradients."""
    gated = {
        **graph,
        "sigmoid": GraphNode(SIGMOID, ("gate",)),
        "context": GraphNode(WEIGHTED_MEAN, ("weights", "value")),
    }
    if "output" in graph:
        return {**gated, "output": GraphNode(GATED_OUTPUT, ("context", "sigmoid"))}
    moved = {
        name: GraphNode(
            node.step, tuple("grad_context" if operand == "grad_output" else operand for operand in node.operands)
        )
        for name, node in gated.items()
    }
    return {
        **moved,
        "sigmoid_slope": GraphNode(SIGMOID_SLOPE, ("gate",)),
        "grad_context": GraphNode(GRAD_CONTEXT, ("grad_output", "sigmoid")),
        "grad_gate": GraphNode(GRAD_GATE, ("grad_output", "context", "sigmoid_slope")),
    }


def _insert_rotation(graph: Graph) -> Graph:
    """Insert the rotation after query and key, and its transpose before their gradients."""
    rotated = {name.removeprefix("rotated_"): name for name in ROTATIONS}
    gradients = {f"grad_{name}": f"grad_{turned}" for name, turned in rotated.items() if f"grad_{name}" in graph}
    moved = {
        gradients.get(name, name): GraphNode(
            node.step, tuple(rotated.get(operand, operand) for operand in node.operands)
        )
        for name, node in graph.items()
    }
    for name, turned in rotated.items():
        moved[turned] = GraphNode(rotation_step(name), (name,))
        if f"grad_{name}" in gradients:
            moved[f"grad_{name}"] = GraphNode(rotation_step(name, -1), (f"grad_{turned}",))
    return moved


def iterate_ancestors(graph: Graph, stage: str, known: Collection[str]) -> Iterator[str]:
    """Yield the nodes before a stage, back to the nearest known ones and those included."""
    for name in graph[stage].operands if stage in graph else ():
        yield name
        if name not in known:
            yield from iterate_ancestors(graph, name, known)


def nearest_known_ancestors(graph: Graph, stage: str, known: Iterable[str]) -> set[str]:
    """Return the known nodes from which a stage follows, without another of them in between."""
    names = set(known)
    return {name for name in iterate_ancestors(graph, stage, names) if name in names}
