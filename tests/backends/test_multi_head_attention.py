"""Projections and heads: by integers that can be followed with a pencil, and against the paper's formula in loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

RNG = np.random.default_rng(3762)


def eighths(*shape: int) -> NDArray[Any]:
    """Draw numbers of at most 1 that are the same in float32 and float64."""
    return RNG.integers(-8, 9, size=shape) / 8


# B 2, H 3, Lq 4, Lk 5, D 6, Dv 7, model widths 8 (query), 9 (key), 10 (value), 11 (output): H D is none of them.
INPUTS = {"query": eighths(2, 4, 8), "key": eighths(2, 5, 9), "value": eighths(2, 5, 10)}
WEIGHTS = {
    "query_weight": eighths(8, 18),
    "key_weight": eighths(9, 18),
    "value_weight": eighths(10, 21),
}
OUTPUT_WEIGHT, OUTPUT_BIAS = eighths(21, 11), eighths(11)
BIASES = {"query_bias": eighths(18), "key_bias": eighths(18), "value_bias": eighths(21)}


def literal_projection(inputs: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None) -> NDArray[Any]:
    projected = np.zeros((*inputs.shape[:2], weight.shape[1]))
    for b, i, f in np.ndindex(*projected.shape):
        terms = (inputs[b, i, e] * weight[e, f] for e in range(weight.shape[0]))
        projected[b, i, f] = math.fsum(terms) + (0.0 if bias is None else bias[f])
    return projected


def literal_heads(query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], heads: int) -> NDArray[Any]:
    """Concat(head_1 ... head_h) of Vaswani et al. 2017, section 3.2.2: head h owns columns h D to (h + 1) D."""
    width, value_width = query.shape[2] // heads, value.shape[2] // heads
    merged = np.zeros((*query.shape[:2], value.shape[2]))
    for b, h, i in np.ndindex(query.shape[0], heads, query.shape[1]):
        exponentials = []
        for j in range(key.shape[1]):
            dot = math.fsum(query[b, i, c] * key[b, j, c] for c in range(h * width, (h + 1) * width))
            exponentials.append(math.exp(dot / math.sqrt(width)))
        for c in range(h * value_width, (h + 1) * value_width):
            products = (weight * value[b, j, c] for j, weight in enumerate(exponentials))
            merged[b, i, c] = math.fsum(products) / math.fsum(exponentials)
    return merged


@pytest.mark.parametrize("with_biases", [False, True], ids=["without biases", "with biases"])
def test_multi_head_attention_follows_the_formula_element_by_element(run: Run, unit: float, with_biases: bool) -> None:
    biases = {**BIASES, "output_bias": OUTPUT_BIAS} if with_biases else {}
    found = run("multi_head_attention", **INPUTS, **WEIGHTS, output_weight=OUTPUT_WEIGHT, **biases, heads=3)
    projected = [
        literal_projection(INPUTS[name], WEIGHTS[f"{name}_weight"], biases.get(f"{name}_bias")) for name in INPUTS
    ]
    merged = literal_heads(*projected, heads=3)
    expected = literal_projection(merged, OUTPUT_WEIGHT, biases.get("output_bias"))
    # Sixty-fourths are exact in the projections. Queries and keys then stay below 10, so that a score is off by at most
    # (6 + 3) 6 10^2 / sqrt(6) u = 2,205 u, a weight by twice that, and 21 values below 11 (typically 2) are added up.
    # The typical error is a thousandth of this worst case; 1e4 u is 6e-4 in float32, a hundredth of a permuted head's.
    np.testing.assert_allclose(found["output"], expected, rtol=0, atol=1e4 * unit)


def test_grouped_heads_share_the_columns_of_their_key_and_value_projections(run: Run, unit: float) -> None:
    # Six heads of width 3 in two groups: heads 0, 1, 2 use columns 0 to 2 of the keys, heads 3, 4, 5 columns 3 to 5.
    weights = {"query_weight": eighths(8, 18), "key_weight": eighths(9, 6), "value_weight": eighths(10, 8)}
    stages = run("multi_head_attention", **INPUTS, **weights, heads=6, kv_heads=2)
    assert [stages[name].shape for name in INPUTS] == [(2, 6, 4, 3), (2, 2, 5, 3), (2, 2, 5, 4)]
    query, key, value = (literal_projection(INPUTS[name], weights[f"{name}_weight"], None) for name in INPUTS)
    shared = [head // 3 for head in range(6)]
    keys = np.concatenate([key[..., 3 * group : 3 * group + 3] for group in shared], axis=-1)
    values = np.concatenate([value[..., 4 * group : 4 * group + 4] for group in shared], axis=-1)
    # As above, with a width of 3.
    np.testing.assert_allclose(stages["output"], literal_heads(query, keys, values, heads=6), rtol=0, atol=1e4 * unit)


def test_queries_keys_and_values_are_projected_split_by_consecutive_columns_and_biased_exactly(run: Run) -> None:
    stages = run("multi_head_attention", **INPUTS, **WEIGHTS, **BIASES, heads=3)
    for name, width in (("query", 6), ("key", 6), ("value", 7)):
        projected = literal_projection(INPUTS[name], WEIGHTS[f"{name}_weight"], BIASES[f"{name}_bias"])
        for head in range(3):
            expected = projected[:, :, head * width : (head + 1) * width]
            np.testing.assert_array_equal(stages[name][:, head], expected, err_msg=f"{name}, head {head}")


def test_without_an_output_weight_the_output_is_the_heads_side_by_side(run: Run) -> None:
    stages = run("multi_head_attention", **INPUTS, **WEIGHTS, heads=3)
    assert stages["output"].shape == (2, 4, 21)
    for head in range(3):
        np.testing.assert_array_equal(stages["output"][:, :, head * 7 : (head + 1) * 7], stages["context"][:, head])


def test_one_head_with_identity_projections_is_attention_itself(run: Run) -> None:
    query, key, value, identity = eighths(2, 4, 6), eighths(2, 5, 6), eighths(2, 5, 6), np.eye(6)
    weights = {f"{name}_weight": identity for name in ("query", "key", "value", "output")}
    found = run("multi_head_attention", query, key, value, heads=1, **weights, is_causal=True)
    expected = run("attention", query[:, None], key[:, None], value[:, None], is_causal=True)
    # A product with the identity is exact, and the same framework then computes the same thing.
    for stage in ("raw_scores", "scores", "masked", "weights", "log_sum_exp"):
        np.testing.assert_array_equal(found[stage], expected[stage], err_msg=stage)
    np.testing.assert_array_equal(found["output"], expected["output"][:, 0])


def test_mask_bias_and_scale_reach_the_scores_of_every_head(run: Run) -> None:
    mask = np.array([True, False, True, True, True]).reshape(1, 1, 1, 5)
    bias = np.arange(-1, 2).reshape(1, 3, 1, 1)
    stages = run("multi_head_attention", **INPUTS, **WEIGHTS, heads=3, mask=mask, bias=bias, scale=0.25)
    np.testing.assert_array_equal(stages["scores"], stages["raw_scores"] * 0.25)
    np.testing.assert_array_equal(stages["biased"], stages["scores"] + bias.astype(stages["scores"].dtype))
    np.testing.assert_array_equal(stages["masked"], np.where(mask, stages["biased"], -np.inf))
    assert (stages["weights"][..., 1] == 0).all()


def test_window_and_key_lengths_reach_the_scores_of_every_head(run: Run) -> None:
    options = {"window": (0, 2), "key_lengths": np.array([5, 3]), "is_causal": False}
    stages = run("multi_head_attention", **INPUTS, **WEIGHTS, heads=3, **options)
    for b, h, i, j in np.ndindex(2, 3, 4, 5):
        allowed = i <= j <= i + 2 and j < (5, 3)[b]
        assert (stages["weights"][b, h, i, j] > 0) == allowed, (b, h, i, j)
    # The fourth query of the second batch item sees key 3 and later, of which none counts.
    np.testing.assert_array_equal(stages["output"][1, 3], np.zeros(21))


def test_behind_a_cache_the_last_queries_get_what_they_get_among_all(run: Run) -> None:
    words = eighths(2, 5, 8)
    square = {name: eighths(8, 18) for name in WEIGHTS} | {"output_weight": eighths(18, 11), "key_bias": eighths(18)}
    tables = {"rotary_cos": eighths(5, 2), "rotary_sin": eighths(5, 2)}
    causal = np.tri(5, dtype=bool)[None, None]
    whole = run("multi_head_attention", words, words, words, **square, **tables, heads=3, mask=causal)
    cached = {"past_key": whole["rotated_key"][:, :, :3], "past_value": whole["value"][:, :, :3]}
    new = words[:, 3:]
    found = run("multi_head_attention", new, new, new, **square, **tables, **cached, heads=3, mask=causal[..., 3:, :])
    assert found["key"].shape == (2, 3, 2, 6)
    for stage in ("query", "key", "rotated_query", "raw_scores", "weights", "output"):
        axis = 1 if stage == "output" else 2
        behind = whole[stage].take((3, 4), axis)
        # Eighths and their products are exact but in the softmax, whose sums may be blocked otherwise.
        np.testing.assert_allclose(found[stage], behind, rtol=1e-5, err_msg=stage)
    np.testing.assert_array_equal(found["rotated_key"], whole["rotated_key"])


def test_no_keys_leave_the_output_bias_alone(run: Run) -> None:
    inputs = {"query": INPUTS["query"], "key": INPUTS["key"][:, :0], "value": INPUTS["value"][:, :0]}
    options = {**WEIGHTS, **BIASES, "output_weight": OUTPUT_WEIGHT, "output_bias": OUTPUT_BIAS}
    found = run("multi_head_attention", **inputs, **options, heads=3)["output"]
    np.testing.assert_array_equal(found, np.broadcast_to(OUTPUT_BIAS, (2, 4, 11)))


def test_an_output_bias_without_an_output_weight_is_refused_rather_than_dropped(run: Run) -> None:
    with pytest.raises(ValueError, match="output_bias needs output_weight"):
        run("multi_head_attention", **INPUTS, **WEIGHTS, output_bias=OUTPUT_BIAS, heads=3)
