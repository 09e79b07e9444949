"""Attention as a whole: against the paper's formula written out in loops, and by what must not change the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

RNG = np.random.default_rng(1706)
# Pairwise distinct: B 2, H 3, Lq 4, Lk 5, D 6, Dv 7. Sixteenths are the same numbers in float32 and float64.
QUERY, KEY, VALUE = (RNG.integers(-16, 17, size=shape) / 16 for shape in [(2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 7)])
MASK = np.array([True, True, False, True, True, True, False, True, True, True]).reshape(2, 1, 1, 5)
BIAS = RNG.integers(-16, 17, size=(1, 3, 4, 5)) / 16

# Entries are at most 1 and 6 wide, so a score is off by at most (6 + 3) 6 u; twice that (numerator and sum) is the
# relative error of a weight; exp and the sums add 20 u, and the output is at most 1: below 150 u, 9e-6 in float32.
# A wrong axis, scale or mask is off by 1e-2.
TOLERANCE = 150


def literal_attention(
    query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], logit: Callable[..., float]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """softmax(logits) V, Vaswani et al. 2017, equation 1, by elements; ``logit(dot, b, h, i, j)`` may be -inf."""
    (batch, heads, queries, width), keys, value_width = query.shape, key.shape[2], value.shape[3]
    weights, sums = np.zeros((batch, heads, queries, keys)), np.zeros((batch, heads, queries))
    output = np.zeros((batch, heads, queries, value_width))
    for b, h, i in np.ndindex(batch, heads, queries):
        exponentials = []
        for j in range(keys):
            dot = math.fsum(query[b, h, i, c] * key[b, h, j, c] for c in range(width))
            exponentials.append(math.exp(logit(dot, b, h, i, j)))
        total = math.fsum(exponentials)
        sums[b, h, i] = math.log(total) if total else -math.inf
        for j in range(keys):
            weights[b, h, i, j] = exponentials[j] / total if total else 0.0
        for c in range(value_width):
            output[b, h, i, c] = math.fsum(weights[b, h, i, j] * value[b, h, j, c] for j in range(keys))
    return weights, sums, output


def agree(found: dict[str, NDArray[Any]], expected: tuple[NDArray[Any], ...], unit: float) -> None:
    for stage, numbers in zip(("weights", "log_sum_exp", "output"), expected, strict=True):
        np.testing.assert_allclose(found[stage], numbers, rtol=0, atol=TOLERANCE * unit, err_msg=stage)


def test_attention_follows_the_formula_element_by_element(run: Run, unit: float) -> None:
    expected = literal_attention(QUERY, KEY, VALUE, lambda dot, *_: dot / math.sqrt(6))
    agree(run("attention", QUERY, KEY, VALUE), expected, unit)


def test_attention_with_bias_mask_causality_and_a_scale_of_its_own_follows_the_formula(run: Run, unit: float) -> None:
    def logit(dot: float, b: int, h: int, i: int, j: int) -> float:
        return -0.5 * dot + BIAS[0, h, i, j] if j <= i and MASK[b, 0, 0, j] else -math.inf

    found = run("attention", QUERY, KEY, VALUE, mask=MASK, bias=BIAS, is_causal=True, scale=-0.5)
    agree(found, literal_attention(QUERY, KEY, VALUE, logit), unit)


def test_a_scale_of_zero_averages_the_values(run: Run, unit: float) -> None:
    found = run("attention", QUERY, KEY, VALUE, scale=0.0)
    agree(found, literal_attention(QUERY, KEY, VALUE, lambda *_: 0.0), unit)


def test_a_single_key_gets_all_the_weight_and_its_value_comes_out_unchanged(run: Run) -> None:
    stages = run("attention", QUERY, KEY[:, :, :1], VALUE[:, :, :1])
    np.testing.assert_array_equal(stages["weights"], np.ones((2, 3, 4, 1)))
    np.testing.assert_array_equal(stages["output"], np.broadcast_to(VALUE[:, :, :1], (2, 3, 4, 7)))


def test_one_query_gets_what_it_gets_among_others(run: Run, unit: float) -> None:
    alone, together = run("attention", QUERY[:, :, 2:3], KEY, VALUE), run("attention", QUERY, KEY, VALUE)
    np.testing.assert_allclose(alone["output"], together["output"][:, :, 2:3], rtol=0, atol=2 * TOLERANCE * unit)


@pytest.mark.parametrize(("batch", "head"), [(0, 0), (0, 2), (1, 1)])
def test_a_head_computed_alone_gets_what_it_gets_together_with_the_others(
    run: Run, unit: float, batch: int, head: int
) -> None:
    one = np.s_[batch : batch + 1, head : head + 1]
    alone = run(
        "attention", QUERY[one], KEY[one], VALUE[one], mask=MASK[batch : batch + 1], bias=BIAS[:, head : head + 1]
    )
    together = run("attention", QUERY, KEY, VALUE, mask=MASK, bias=BIAS)
    for stage in ("scores", "masked", "weights", "log_sum_exp", "output"):
        np.testing.assert_allclose(alone[stage], together[stage][one], rtol=0, atol=2 * TOLERANCE * unit, err_msg=stage)


def test_a_softcap_comes_before_bias_and_mask(run: Run, unit: float) -> None:
    def logit(dot: float, b: int, h: int, i: int, j: int) -> float:
        return 0.75 * math.tanh(2 * dot / 0.75) + BIAS[0, h, i, j] if MASK[b, 0, 0, j] else -math.inf

    found = run("attention", QUERY, KEY, VALUE, mask=MASK, bias=BIAS, scale=2.0, softcap=0.75)
    assert list(found) == ["raw_scores", "scores", "capped", "biased", "masked", "weights", "log_sum_exp", "output"]
    agree(found, literal_attention(QUERY, KEY, VALUE, logit), unit)


def test_window_and_key_lengths_follow_the_formula(run: Run, unit: float) -> None:
    def logit(dot: float, b: int, h: int, i: int, j: int) -> float:
        return dot / math.sqrt(6) if i - 2 <= j <= i + 1 and j < (5, 3)[b] else -math.inf

    found = run("attention", QUERY, KEY, VALUE, window=(2, 1), key_lengths=np.array([5, 3]))
    agree(found, literal_attention(QUERY, KEY, VALUE, logit), unit)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_heads_in_a_group_are_neighbours_and_share_a_key_and_a_value_head(run: Run, unit: float, kv_heads: int) -> None:
    # Ainslie et al. 2023, "GQA", section 2.2: H query heads in Hkv groups; 6 heads by 2 are 0, 0, 0, 1, 1, 1.
    query, key, value = np.concatenate([QUERY, QUERY[..., ::-1]], axis=1), KEY[:, :kv_heads], VALUE[:, :kv_heads]
    shared = [head // (6 // kv_heads) for head in range(6)]
    found = run("attention", query, key, value, is_causal=True)

    def logit(dot: float, b: int, h: int, i: int, j: int) -> float:
        return dot / math.sqrt(6) if j <= i else -math.inf

    agree(found, literal_attention(query, key[:, shared], value[:, shared], logit), unit)


def test_a_past_comes_before_the_keys_and_the_queries_stand_behind_it(run: Run, unit: float) -> None:
    past = {"past_key": KEY[:, :, :2], "past_value": VALUE[:, :, :2]}
    bias, mask = BIAS[..., ::-1], MASK[..., ::-1]

    def logit(dot: float, b: int, h: int, i: int, j: int) -> float:
        allowed = mask[b, 0, 0, j] and (2 + i) - 3 <= j <= (2 + i) + 1 and j < (5, 4)[b]
        return dot / math.sqrt(6) + bias[0, h, i, j] if allowed else -math.inf

    options = {"mask": mask, "bias": bias, "window": (3, 1), "key_lengths": np.array([5, 4])}
    found = run("attention", QUERY, KEY[:, :, 2:], VALUE[:, :, 2:], **past, **options)
    agree(found, literal_attention(QUERY, KEY, VALUE, logit), unit)


def test_one_query_behind_a_past_sees_all_of_it_in_shared_heads(run: Run, unit: float) -> None:
    # A step of decoding, multi-query: one key and one value head for three query heads.
    query, key, value = QUERY[:, :, :1], KEY[:, :1], VALUE[:, :1]
    past = {"past_key": key[:, :, :4], "past_value": value[:, :, :4]}
    found = run("attention", query, key[:, :, 4:], value[:, :, 4:], **past)
    expected = literal_attention(query, key[:, [0] * 3], value[:, [0] * 3], lambda dot, *_: dot / math.sqrt(6))
    agree(found, expected, unit)


def test_an_empty_past_is_none(run: Run) -> None:
    past = {"past_key": KEY[:, :, :0], "past_value": VALUE[:, :, :0]}
    with_past, without = run("attention", QUERY, KEY, VALUE, **past), run("attention", QUERY, KEY, VALUE)
    np.testing.assert_array_equal(with_past["output"], without["output"])


def test_no_batch_items_give_no_output(run: Run) -> None:
    stages = run("attention", QUERY[:0], KEY[:0], VALUE[:0], is_causal=True)
    assert stages["output"].shape == (0, 3, 4, 7)
    assert stages["log_sum_exp"].shape == (0, 3, 4)


def test_no_keys_give_an_output_of_zeros(run: Run) -> None:
    stages = run("attention", QUERY, KEY[:, :, :0], VALUE[:, :, :0], mask=np.ones((2, 1, 1, 0), dtype=bool))
    np.testing.assert_array_equal(stages["output"], np.zeros((2, 3, 4, 7)))
    np.testing.assert_array_equal(stages["log_sum_exp"], np.full((2, 3, 4), -np.inf))


@pytest.mark.parametrize(
    ("options", "empty"),
    [
        ({"key_lengths": np.array([5, 0])}, np.s_[1]),
        ({"window": (0, 0)}, np.s_[:, :, 2:]),
        ({"mask": np.zeros((1, 1, 1, 1), dtype=bool)}, np.s_[:]),
    ],
    ids=["no keys count", "the window is behind the last key", "the mask forbids all"],
)
def test_rows_without_a_key_have_weights_and_output_of_zero_whatever_forbids_them(
    run: Run, options: dict[str, Any], empty: Any
) -> None:
    stages = run("attention", QUERY, KEY[:, :, :2], VALUE[:, :, :2], **options)
    wanted = np.zeros((2, 3, 4), dtype=bool)
    wanted[empty] = True
    np.testing.assert_array_equal(stages["log_sum_exp"] == -np.inf, wanted)
    np.testing.assert_array_equal((stages["weights"] == 0).all(axis=-1), wanted)
    np.testing.assert_array_equal((stages["output"] == 0).all(axis=-1), wanted)


@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_query_that_may_attend_nothing_gets_an_output_of_zeros_and_the_others_are_not_disturbed(
    run: Run, how: str
) -> None:
    allowed = np.array([True, False, True, True]).reshape(1, 1, 4, 1)
    option = {"mask": allowed} if how == "mask" else {"bias": np.where(allowed, 0.0, -np.inf)}
    stages, plain = run("attention", QUERY, KEY, VALUE, **option), run("attention", QUERY, KEY, VALUE)
    np.testing.assert_array_equal(stages["output"][:, :, 1], np.zeros((2, 3, 7)))
    np.testing.assert_array_equal(stages["output"][:, :, [0, 2, 3]], plain["output"][:, :, [0, 2, 3]])


def test_a_nan_in_a_query_makes_its_output_nan_and_no_other(run: Run) -> None:
    query = QUERY.copy()
    query[1, 2, 3, 0] = np.nan
    output = run("attention", query, KEY, VALUE)["output"]
    wanted = np.zeros(output.shape, dtype=bool)
    wanted[1, 2, 3] = True
    np.testing.assert_array_equal(np.isnan(output), wanted)


def test_a_nan_in_an_attended_key_reaches_every_query_of_its_head_and_a_masked_one_reaches_none(run: Run) -> None:
    key = KEY.copy()
    key[0, :, 2] = np.nan  # masked in the first batch item
    key[1, 1, 0] = np.nan  # attended in the second
    output = run("attention", QUERY, key, VALUE, mask=MASK)["output"]
    wanted = np.zeros(output.shape, dtype=bool)
    wanted[1, 1] = True
    np.testing.assert_array_equal(np.isnan(output), wanted)


@settings(max_examples=15, deadline=None)
@given(garbage=arrays(np.float32, (13,), elements=st.floats(-1e6, 1e6, width=32)))
def test_what_stands_in_a_masked_key_and_value_changes_no_bit_of_the_output(run: Run, garbage: NDArray[Any]) -> None:
    key, value = KEY.copy(), VALUE.copy()
    key[0, :, 2], value[0, :, 2] = garbage[:6], garbage[6:]
    before, after = (run("attention", QUERY, k, v, mask=MASK)["output"] for k, v in ((KEY, VALUE), (key, value)))
    np.testing.assert_array_equal(after, before)


@settings(max_examples=15, deadline=None)
@given(position=st.integers(1, 4), garbage=arrays(np.float32, (13,), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_causal_query_does_not_see_the_future(run: Run, position: int, garbage: NDArray[Any]) -> None:
    key, value = KEY.copy(), VALUE.copy()
    key[:, :, position], value[:, :, position] = garbage[:6], garbage[6:]
    before, after = (run("attention", QUERY, k, v, is_causal=True) for k, v in ((KEY, VALUE), (key, value)))
    for stage in ("weights", "log_sum_exp", "output"):
        np.testing.assert_array_equal(after[stage][:, :, :position], before[stage][:, :, :position], err_msg=stage)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(5)))
def test_permuting_keys_and_values_together_permutes_the_weights_and_leaves_the_output(
    run: Run, unit: float, order: list[int]
) -> None:
    before, after = run("attention", QUERY, KEY, VALUE), run("attention", QUERY, KEY[:, :, order], VALUE[:, :, order])
    limit = {"rtol": 0, "atol": 2 * TOLERANCE * unit}
    np.testing.assert_allclose(after["weights"], before["weights"][..., order], **limit)
    np.testing.assert_allclose(after["output"], before["output"], **limit)


def test_each_batch_entry_counts_from_its_own_offset_and_rotates_by_its_own_rows(run: Run) -> None:
    rng = np.random.default_rng(404)
    whole = {name: rng.integers(-8, 9, (2, 2, 7, 4)) / 8 for name in ("query", "key", "value")}
    tables = {name: rng.integers(-8, 9, (7, 2)) / 8 for name in ("rotary_cos", "rotary_sin")}
    options = {"is_causal": True, "window": (3, 1)}
    expected = run("attention", **whole, **tables, **options)
    offsets = np.array([4, 1])
    own = np.stack([whole["query"][b, :, offset : offset + 3] for b, offset in enumerate(offsets)])
    found = run("attention", own, whole["key"], whole["value"], **tables, **options, query_offsets=offsets)
    for stage in ("rotated_query", "raw_scores", "masked", "weights", "output"):
        for b, offset in enumerate(offsets):
            rows = expected[stage][b, :, offset : offset + 3]
            np.testing.assert_allclose(found[stage][b], rows, rtol=1e-5, atol=1e-6, err_msg=stage)
    np.testing.assert_array_equal(np.isneginf(found["masked"][1]), np.isneginf(expected["masked"][1, :, 1:4]))
