"""What the comparison with mpmath does not reach: extremes, precision, sampled rows, an implementation's own stages."""

from __future__ import annotations

import pickle
from typing import Any

import flint
import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.operations import run_operation
from attncheck.oracle import evaluate as oracle
from attncheck.oracle.enclosure import Enclosure
from attncheck.oracle.evaluate import (
    OutsideDomain,
    PrecisionExhausted,
    exact_from,
    exact_stages,
    predecessors,
)

Array = NDArray[Any]
INF = float("inf")


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def attention_inputs(queries: int = 4, keys: int = 5, batch: int = 2, heads: int = 3) -> dict[str, Array]:
    shapes = {"query": (queries, 6), "key": (keys, 6), "value": (keys, 2)}
    return {name: draw(batch, heads, *shape) for name, shape in shapes.items()}


def multi_head_inputs() -> dict[str, Array]:
    shapes = {
        "query": (2, 4, 5),
        "key": (2, 3, 6),
        "value": (2, 3, 7),
        "query_weight": (5, 6),
        "key_weight": (6, 6),
        "value_weight": (7, 4),
        "output_weight": (4, 3),
        "query_bias": (6,),
        "key_bias": (6,),
        "value_bias": (4,),
        "output_bias": (3,),
    }
    return {name: draw(*shape) for name, shape in shapes.items()}


def row_of_scores(*scores: float) -> dict[str, Array]:
    return {"scores": np.array(scores, dtype=np.float64).reshape(1, 1, 1, -1)}


def agree(one: Enclosure, other: Enclosure) -> bool:
    """Whether two enclosures can be of the same truth."""
    with np.errstate(invalid="ignore"):
        difference = np.abs((one.high - other.high) + (one.low - other.low))
    same_infinity = np.isinf(one.high) & (one.high == other.high)
    return bool((same_infinity | (difference <= (one.radius + other.radius) * (1 + 1e-12))).all())


def of_rows(enclosure: Enclosure, rows: slice) -> Enclosure:
    return Enclosure(enclosure.high[rows], enclosure.low[rows], enclosure.radius[rows])


WEIGHTS = {
    name: draw(*shape) for name, shape in {"weight": (6, 4), "query_weight": (6, 3), "key_weight": (4, 3)}.items()
}
MASK = np.array([[True, False, True, True, True]] * 3 + [[False] * 5])
BIAS = np.where(np.eye(4, 5) > 0, -INF, draw(4, 5))

OPERATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Array]]] = {
    "dot": ("scoring", {"score": "dot"}, {"query": draw(1, 2, 4, 6), "key": draw(1, 2, 5, 6)}),
    "scaled dot": ("scoring", {"scale": -0.3}, {"query": draw(1, 2, 4, 6), "key": draw(1, 2, 5, 6)}),
    "general": (
        "scoring",
        {"score": "general"},
        {"query": draw(1, 2, 4, 6), "key": draw(1, 2, 5, 4), "weight": WEIGHTS["weight"]},
    ),
    "general with a bias": (
        "scoring",
        {"score": "general"},
        {
            "query": draw(1, 2, 4, 6),
            "key": draw(1, 2, 5, 4),
            "weight": WEIGHTS["weight"],
            "score_bias": draw(2, seed=1),
        },
    ),
    "additive": (
        "scoring",
        {"score": "additive"},
        {
            "query": draw(1, 2, 4, 6),
            "key": draw(1, 2, 5, 4),
            "query_weight": WEIGHTS["query_weight"],
            "key_weight": WEIGHTS["key_weight"],
            "score_vector": draw(3),
            "score_bias": draw(3, seed=1),
        },
    ),
    "bilinear attention": (
        "general_attention",
        {"is_causal": True},
        {"query": draw(1, 2, 4, 6), "key": draw(1, 2, 5, 4), "value": draw(1, 2, 5, 3), "weight": WEIGHTS["weight"]},
    ),
    "cosine attention": (
        "cosine_attention",
        {},
        {"query": draw(1, 2, 4, 6), "key": draw(1, 2, 5, 6), "value": draw(1, 2, 5, 3), "bias": draw(1, 2, 4, 5)},
    ),
    "softmax": ("softmax", {}, {"scores": np.where(MASK, draw(2, 1, 4, 5), -INF)}),
    "masking": ("masking", {"is_causal": True}, {"scores": draw(2, 1, 4, 5), "mask": MASK, "bias": BIAS}),
    "attention": ("attention", {}, attention_inputs()),
    "masked attention": ("attention", {"is_causal": True}, attention_inputs() | {"mask": MASK, "bias": BIAS}),
    "heads": ("multi_head_attention", {"heads": 2, "is_causal": True}, multi_head_inputs()),
}
NAMES = list(OPERATIONS)


def run_numpy(name: str) -> dict[str, Array]:
    operation, options, inputs = OPERATIONS[name]
    backend: Backend = numpy_backend
    return run_operation(backend, operation, inputs, options)


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_are_those_of_the_backend(name: str) -> None:
    got, exact = run_numpy(name), exact_stages(*OPERATIONS[name])
    assert list(exact) == list(got)
    for stage, enclosure in exact.items():
        assert enclosure.shape == got[stage].shape
        assert (enclosure.error_of(got[stage]) < 1e-13).all()


def test_ranks_below_four_are_kept() -> None:
    inputs = {name: array[0, 0] for name, array in attention_inputs().items()}
    exact, whole = exact_stages("attention", {}, inputs), exact_stages("attention", {}, attention_inputs())
    assert exact["output"].shape == (4, 2)
    assert exact["log_sum_exp"].shape == (4,)
    assert np.array_equal(exact["output"].high, whole["output"].high[0, 0])


# Extremes


@pytest.mark.parametrize(("size", "expected"), [(1e-300, [0.5, 0.5]), (1e300, [0.0, 1.0]), (-1e300, [1.0, 0.0])])
def test_scores_beyond_float64_still_have_exact_weights(size: float, expected: list[float]) -> None:
    inputs = {
        "query": np.full((1, 1, 1, 3), size),
        "key": np.array([[[[1.0] * 3, [2.0] * 3]]]) * abs(size),
        "value": np.array([[[[1e300], [-1e-300]]]]),
    }
    exact = exact_stages("attention", {}, inputs)
    assert exact["weights"].error_of(np.array(expected).reshape(1, 1, 1, 2)).max() <= 5e-324
    output = exact["output"].error_of(np.array([[[[expected[0] * 1e300 + expected[1] * -1e-300]]]]))
    assert (output <= exact["output"].radius).all()
    assert (exact["output"].radius <= max(2.0**-100 * abs(exact["output"].high.item()), 1e-323)).all()
    if abs(size) > 1:
        assert np.isinf(exact["scores"].high).all()
        assert np.isinf(exact["scores"].radius).all()
        assert exact["log_sum_exp"].radius[0, 0, 0] == INF


def test_two_large_scores_that_float64_tells_apart_are_told_apart() -> None:
    close = exact_stages("softmax", {}, row_of_scores(1e300, np.nextafter(1e300, 0), -1e300))
    assert close["weights"].high.tolist() == [[[[1, 0, 0]]]]
    assert close["log_sum_exp"].high[0, 0, 0] == 1e300


def test_a_weight_below_the_least_float_is_known_to_the_least_float() -> None:
    exact = exact_stages("softmax", {}, row_of_scores(0, -781))["weights"]
    assert exact.high[0, 0, 0, 1] == exact.low[0, 0, 0, 1] == 0
    with mp.workprec(200):
        assert 0 < mp.exp(-781) <= mpf(float(exact.radius[0, 0, 0, 1]))
    assert exact.radius[0, 0, 0, 1] == 5e-324


def test_a_row_without_keys_weighs_nothing() -> None:
    exact = exact_stages("softmax", {}, row_of_scores(-INF, -INF, -INF))
    for part in (exact["weights"].high, exact["weights"].low, exact["weights"].radius):
        assert not part.any()
    assert exact["log_sum_exp"].high.tolist() == [[[-INF]]]
    assert exact["log_sum_exp"].radius.tolist() == [[[0]]]


def test_an_empty_row_has_an_output_of_exactly_zero() -> None:
    inputs = {name: draw(1, 1, 96, 80, seed=3) for name in ("query", "key", "value")}  # FLINT's blocked product
    mask = np.ones((96, 96), dtype=bool)
    mask[5] = False
    output = exact_stages("attention", {}, inputs | {"mask": mask}, ["output"])["output"]
    for part in (output.high, output.low, output.radius):
        assert not part[0, 0, 5].any()
    assert output.high[0, 0, 4].all()


@pytest.mark.parametrize(("queries", "keys"), [(4, 0), (0, 5), (0, 0)])
def test_no_keys_or_no_queries(queries: int, keys: int) -> None:
    exact = exact_stages("attention", {"is_causal": True}, attention_inputs(queries, keys))
    assert exact["weights"].shape == (2, 3, queries, keys)
    assert exact["output"].shape == (2, 3, queries, 2)
    assert not exact["output"].high.any()
    assert not exact["output"].radius.any()
    assert (exact["log_sum_exp"].high == -INF).all()


def test_one_key_has_all_the_weight() -> None:
    inputs = attention_inputs(keys=1)
    exact = exact_stages("attention", {}, inputs)
    assert (exact["weights"].error_of(np.ones((2, 3, 4, 1))) <= exact["weights"].radius).all()
    assert agree(exact["output"], Enclosure(np.repeat(inputs["value"], 4, axis=2), *[np.zeros((2, 3, 4, 2))] * 2))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_inputs_are_taken_as_stored(dtype: type) -> None:
    inputs: dict[str, Array] = {name: array.astype(dtype) for name, array in attention_inputs().items()}
    widened: dict[str, Array] = {name: array.astype(np.float64) for name, array in inputs.items()}
    options = {"is_causal": True, "softcap": 3.0}
    exact = exact_stages("attention", options, inputs)
    for stage, enclosure in exact_stages("attention", options, widened).items():
        assert np.array_equal(enclosure.low, exact[stage].low)


def test_the_scale_is_the_real_number() -> None:
    inputs = {"query": np.array([[3.0, 0, 0]]), "key": np.array([[1.0, 0, 0]])}
    exact = exact_stages("scoring", {}, inputs)["scores"]
    with mp.workprec(200):
        assert abs(mp.sqrt(3) - mpf(exact.high.item()) - mpf(exact.low.item())) <= mpf(exact.radius.item())
    assert exact.radius.item() < 1e-31
    given = exact_stages("scoring", {"scale": 0.1}, inputs)["scores"]
    assert (given.high.item(), given.low.item()) == (0.30000000000000004, 3 * 0.1 - 0.30000000000000004 - 2.0**-55)


# Precision


def cancelling() -> dict[str, Array]:
    """Scores whose terms are 2^200 times as large as the scores themselves."""
    return {
        "query": np.array([[2.0**200, 1, 2.0**200]]),
        "key": np.array([[1, 0.7, -1], [1, 0.5, -1]]) / 3,
        "value": np.array([[1.0], [-1.0]]),
    }


def precisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    tried: list[int] = []
    attempt = oracle._attempt

    def counted(*arguments: Any) -> Any:
        tried.append(flint.ctx.prec)
        return attempt(*arguments)

    monkeypatch.setattr(oracle, "_attempt", counted)
    return tried


def test_precision_is_raised_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = precisions(monkeypatch)
    exact = exact_stages("attention", {"scale": 1.0}, cancelling(), ["weights"])["weights"]
    assert tried == [128, 256]
    with mp.workprec(400):
        key = [mpf(float(part)) for part in cancelling()["key"][:, 1]]
        truth = 1 / (1 + mp.exp(key[1] - key[0]))
        assert abs(truth - mpf(exact.high[0, 0]) - mpf(exact.low[0, 0])) <= mpf(exact.radius[0, 0])
    assert exact.radius.max() < 2.0**-80


@pytest.mark.parametrize(
    ("stage", "options"), [("scores", {"scale": 1.0}), ("capped", {"scale": 1.0, "softcap": 2.0**150}), ("masked", {})]
)
def test_a_radius_small_beside_the_sum_of_absolute_terms_is_small(
    stage: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = precisions(monkeypatch)
    exact = exact_stages("attention", options, cancelling(), [stage])[stage]
    assert tried == [128]
    assert (exact.radius > 0).all()
    assert (exact.radius <= 2.0**-80 * 2.0**201).all()


def test_a_cap_far_below_the_terms_needs_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = precisions(monkeypatch)
    exact = exact_stages("attention", {"scale": 1.0, "softcap": 2.0}, cancelling(), ["capped"])["capped"]
    assert tried == [128, 256]
    assert (exact.radius <= 2.0**-80 * np.abs(exact.high)).all()


def test_when_no_precision_suffices_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_PRECISION", 128)
    before = flint.ctx.prec
    with pytest.raises(PrecisionExhausted, match="attention: weights not settled with 128 bits"):
        exact_stages("attention", {}, cancelling(), ["weights"])
    assert flint.ctx.prec == before


def test_flint_is_left_as_it_was() -> None:
    before = flint.ctx.prec
    exact_stages("attention", {}, attention_inputs())
    with pytest.raises(ValueError, match="softmax has no raw_scores"):
        exact_stages("softmax", {}, row_of_scores(1, 2), ["raw_scores"])
    assert flint.ctx.prec == before


# What has no value


@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
@pytest.mark.parametrize("name", ["query", "value", "bias"])
def test_inputs_outside_the_domain_are_named(name: str, poison: float) -> None:
    inputs = attention_inputs() | {"bias": np.zeros((4, 5))}
    inputs[name] = inputs[name].copy()
    inputs[name][..., -1, -1] = poison
    if (name, poison) == ("bias", -INF):
        assert exact_stages("attention", {}, inputs)["biased"].high[0, 0, -1, -1] == -INF
        return
    with pytest.raises(OutsideDomain, match=f"^{name} ") as caught:
        exact_stages("attention", {}, inputs)
    assert caught.value.input_name == name
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_divisions_by_zero_are_outside_the_domain() -> None:
    with pytest.raises(OutsideDomain, match="softcap is 0"):
        exact_stages("attention", {"softcap": 0.0}, attention_inputs())
    with pytest.raises(OutsideDomain, match="key has a vector of length 0"):
        exact_stages("scoring", {"score": "cosine"}, {"query": np.ones((2, 3)), "key": np.eye(4, 3)})


def test_what_the_oracle_does_not_know_is_refused() -> None:
    inputs = attention_inputs()
    assert exact_stages("attention", {"scale": None, "window": None}, inputs)
    with pytest.raises(ValueError, match="no attention with key_lengths, window"):
        exact_stages("attention", {"window": (1, 0)}, inputs | {"key_lengths": np.ones(2)})
    with pytest.raises(ValueError, match="no convolution with anything"):
        exact_from("convolution", {}, inputs, {}, "output")


# Sampled rows


@pytest.mark.parametrize("name", NAMES)
def test_sampled_rows_are_the_rows_of_the_whole(name: str) -> None:
    operation, options, inputs = OPERATIONS[name]
    rows = [3, 0]
    whole, sampled = exact_stages(operation, options, inputs), exact_stages(operation, options, inputs, query_rows=rows)
    assert list(sampled) == list(whole)
    for stage, enclosure in sampled.items():
        expected = whole[stage].high
        if stage not in ("key", "value"):
            expected = expected[..., rows] if stage == "log_sum_exp" else expected[..., rows, :]
        assert np.array_equal(enclosure.high, expected)


def test_more_rows_than_are_taken_at_a_time() -> None:
    inputs = attention_inputs(queries=150, keys=7, batch=1, heads=2) | {"mask": draw(1, 1, 150, 7) > 0}
    whole = exact_stages("attention", {"is_causal": True}, inputs)
    for row in (0, 63, 64, 128, 149):
        one = exact_stages("attention", {"is_causal": True}, inputs, query_rows=[row])
        for stage, enclosure in one.items():
            rows = whole[stage].high[..., row] if stage == "log_sum_exp" else whole[stage].high[..., row, :]
            assert np.array_equal(np.squeeze(enclosure.high, -1 if stage == "log_sum_exp" else -2), rows)
    assert exact_stages("attention", {}, inputs, ["output"], query_rows=[])["output"].shape == (1, 2, 0, 2)


@pytest.mark.parametrize("size", [(1, 64, 64), (40, 64, 64), (63, 63, 63), (50, 80, 90), (64, 64, 64)])
def test_products_are_the_same_with_zeros_around_them(size: tuple[int, int, int]) -> None:
    rows, inner, columns = size
    query, key = draw(rows, inner), draw(columns, inner)
    exact = exact_stages("scoring", {"score": "dot"}, {"query": query, "key": key}, ["scores"])["scores"]
    for row in range(0, rows, 13):
        alone = exact_stages("scoring", {"score": "dot"}, {"query": query[row : row + 1], "key": key}, ["scores"])
        assert agree(alone["scores"], of_rows(exact, slice(row, row + 1)))
        assert exact.radius[row].max() < 1e-30


# From an implementation's own stages


@pytest.mark.parametrize("name", NAMES)
def test_a_rounded_stage_is_what_the_next_follows_from(name: str) -> None:
    operation, options, inputs = OPERATIONS[name]
    returned = run_numpy(name)
    for stage, got in returned.items():
        exact = exact_from(operation, options, inputs, returned, stage)
        assert exact is not None
        assert exact.shape == got.shape
        assert (exact.error_of(got) <= 2e-14).all()
        # Names that are no stages, be they those of the oracle's own nodes, are nobody's predecessors.
        without = exact_from(operation, options, inputs, {"exponentials": np.ones(1), "product": np.ones(1)}, stage)
        assert without is not None
        assert np.array_equal(without.high, exact_stages(operation, options, inputs, [stage])[stage].high)


def test_each_stage_follows_from_the_nearest_that_was_returned() -> None:
    operation, options, inputs = OPERATIONS["masked attention"]
    options = options | {"softcap": 2.0}
    scores, other = draw(2, 3, 4, 5, seed=8), draw(2, 3, 4, 5, seed=9)
    allowed = MASK & np.tri(4, 5, dtype=bool)

    def follows(stage: str, **returned: Array) -> Enclosure:
        exact = exact_from(operation, options, inputs, returned, stage)
        assert exact is not None
        return exact

    def of_masked(logits: Array, stage: str) -> Enclosure:
        return exact_stages("softmax", {}, {"scores": np.where(allowed, logits, -INF)})[stage]

    assert follows("capped", scores=scores, raw_scores=other).error_of(2 * np.tanh(scores / 2)).max() < 1e-15
    assert np.array_equal(follows("biased", scores=scores, capped=other).high, (other + BIAS))
    assert np.array_equal(follows("masked", biased=other, scores=scores).high, np.where(allowed, other, -INF))
    for stage in ("weights", "log_sum_exp"):
        assert agree(follows(stage, biased=other, scores=scores), of_masked(other, stage))
        masked = np.where(allowed, scores, -INF)
        assert agree(follows(stage, masked=masked, biased=other), of_masked(scores, stage))
        # The sum of the exponentials does not follow from the weights, nor they from it.
        assert agree(follows(stage, biased=other, weights=scores, log_sum_exp=scores[..., 0]), of_masked(other, stage))
    weights = np.abs(other)
    assert follows("output", weights=weights, masked=scores).error_of(weights @ inputs["value"]).max() < 1e-14
    of_heads = draw(2, 3, 4, 2)  # a stage of multi_head_attention alone
    assert agree(follows("output", context=of_heads, weights=weights), follows("output", weights=weights))


def test_scores_do_not_follow_from_raw_scores() -> None:
    operation, options, inputs = OPERATIONS["scaled dot"]
    exact = exact_from(operation, options, inputs, {"raw_scores": np.zeros((1, 2, 4, 5))}, "scores")
    assert exact is not None
    assert np.array_equal(exact.high, exact_stages(operation, options, inputs)["scores"].high)


def test_heads_follow_from_the_projections_that_were_returned() -> None:
    operation, options, inputs = OPERATIONS["heads"]
    returned = {"query": draw(2, 2, 4, 3), "key": draw(2, 2, 3, 3), "value": draw(2, 2, 3, 2)}
    raw_scores = exact_from(operation, options, inputs, returned, "raw_scores")
    assert raw_scores is not None
    assert raw_scores.error_of(returned["query"] @ returned["key"].swapaxes(-1, -2)).max() < 1e-14
    query = exact_from(operation, options, inputs, returned, "query")
    assert query is not None
    assert np.array_equal(query.high, exact_stages(operation, options, inputs)["query"].high)
    weights = np.full((2, 2, 4, 3), 0.25)
    context = exact_from(operation, options, inputs, returned | {"weights": weights}, "context")
    assert context is not None
    assert context.error_of(weights @ returned["value"]).max() < 1e-15
    merged = context.high.swapaxes(1, 2).reshape(2, 4, 4)
    output = exact_from(operation, options, inputs, returned | {"context": context.high}, "output")
    assert output is not None
    assert output.error_of(merged @ inputs["output_weight"] + inputs["output_bias"]).max() < 1e-14


def test_sampled_rows_of_what_follows() -> None:
    operation, options, inputs = OPERATIONS["heads"]
    returned = run_numpy("heads")
    for stage in returned:
        whole, some = (exact_from(operation, options, inputs, returned, stage, rows) for rows in (None, [2, 1]))
        assert whole is not None
        assert some is not None
        expected = whole.high[..., [2, 1]] if stage == "log_sum_exp" else whole.high[..., [2, 1], :]
        assert np.array_equal(some.high, whole.high if stage in ("key", "value") else expected)


@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
def test_what_is_not_finite_where_it_is_attended_has_no_exact_value(poison: float) -> None:
    operation, options, inputs = OPERATIONS["masked attention"]
    attended, forbidden = draw(2, 3, 4, 5), draw(2, 3, 4, 5)
    attended[0, 0, 2, 0] = forbidden[0, 0, 2, 4] = poison
    for stage in ("masked", "weights", "log_sum_exp"):
        assert exact_from(operation, options, inputs, {"scores": attended}, stage) is None
        assert exact_from(operation, options, inputs, {"scores": forbidden}, stage) is not None
    assert exact_from(operation, options, inputs, {"weights": attended}, "output") is None
    assert exact_from(operation, options, inputs, {"weights": attended}, "weights") is not None
    assert (exact_from(operation, options, inputs, {"masked": attended}, "weights") is None) == (poison != -INF)


def test_where_a_bias_is_minus_infinity_a_score_may_be_too() -> None:
    operation, options, inputs = OPERATIONS["masked attention"]
    biased = draw(2, 3, 4, 5)
    biased[..., 2, 2] = -INF  # as in BIAS
    weights = exact_from(operation, options, inputs, {"biased": biased}, "weights")
    assert weights is not None
    assert not weights.high[..., 2, 2].any()


# Gradients


def gradient_inputs(queries: int = 5, keys: int = 7) -> dict[str, Array]:
    shapes = {"query": (4, queries, 3), "key": (2, keys, 3), "value": (2, keys, 4), "grad_output": (4, queries, 4)}
    return {name: draw(2, *shape) for name, shape in shapes.items()}


def grouped_attention(query: Array, key: Array, value: Array, bias: Array, allowed: Array, cap: float) -> Array:
    key, value = np.repeat(key, 2, axis=1), np.repeat(value, 2, axis=1)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    powers = np.where(allowed, np.exp(cap * np.tanh(scores / cap) + bias), 0)
    total = powers.sum(axis=-1, keepdims=True)
    return np.asarray(powers / np.where(total == 0, 1, total) @ value)


def test_gradients_agree_with_complex_steps() -> None:
    inputs = gradient_inputs() | {"bias": draw(1, 4, 1, 7)}
    allowed = np.tri(5, 7, dtype=bool) & (draw(2, 1, 5, 7) > -0.5)
    allowed[0, :, 2] = False
    options = {"softcap": 2.0, "is_causal": True}
    exact = exact_stages("attention_gradients", options, inputs | {"mask": allowed})
    step = 1e-40
    for name in ("query", "key", "value", "bias"):
        for at in np.ndindex(inputs[name].shape):
            moved = {each: inputs[each].astype(complex) for each in ("query", "key", "value", "bias")}
            moved[name][at] += 1j * step
            slope = (grouped_attention(**moved, allowed=allowed, cap=2.0) * inputs["grad_output"]).sum().imag / step
            assert abs(slope - exact[f"grad_{name}"].high[at]) < 1e-14, (name, at)
    assert (exact["grad_query"].high[0, :, 2] == 0).all()
    assert (exact["grad_query"].radius[0, :, 2] == 0).all()


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (1, 1, 1, 1), (2, 4, 5, 7), (2, 1, 1, 7)])
def test_a_gradient_of_a_bias_has_its_shape_and_adds_up_what_shares_it(shape: tuple[int, ...]) -> None:
    inputs = gradient_inputs()
    small = inputs | {"bias": draw(*shape)}
    large = inputs | {"bias": np.broadcast_to(small["bias"], (2, 4, 5, 7))}
    own, each = (exact_stages("attention_gradients", {}, given)["grad_bias"] for given in (small, large))
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis, length in enumerate(padded) if length == 1)
    assert own.shape == shape
    np.testing.assert_allclose(own.high, each.high.sum(axis=axes, keepdims=True).reshape(shape), atol=1e-14)


def test_a_row_without_a_key_has_no_part_in_gradients() -> None:
    inputs = gradient_inputs()
    mask = np.ones((2, 1, 5, 7), bool)
    mask[:, :, 3] = False
    rest = {
        name: np.delete(array, 3, -2) if name in ("query", "grad_output") else array for name, array in inputs.items()
    }
    exact = exact_stages("attention_gradients", {}, inputs | {"mask": mask})
    others = exact_stages("attention_gradients", {}, rest)
    for stage in ("grad_key", "grad_value"):
        assert agree(exact[stage], others[stage])
    assert (exact["grad_query"].high[:, :, 3] == 0).all()


def test_without_keys_gradients_are_zero() -> None:
    exact = exact_stages("attention_gradients", {}, gradient_inputs(keys=0) | {"bias": draw(1, 4, 5, 1)})
    assert exact["grad_key"].shape == (2, 2, 0, 3)
    assert (exact["grad_query"].high == 0).all()
    assert (exact["grad_bias"].high == 0).all()


def test_no_query_row_can_be_left_out_of_gradients() -> None:
    with pytest.raises(ValueError, match="adds query rows up"):
        exact_stages("attention_gradients", {}, gradient_inputs(), query_rows=[0, 1])


def test_no_gradient_follows_from_another() -> None:
    inputs = gradient_inputs()
    returned = {stage: each.high for stage, each in exact_stages("attention_gradients", {}, inputs).items()}
    assert exact_from("attention_gradients", {}, inputs, returned, "grad_value") is None


@pytest.mark.parametrize(
    ("operation", "returned", "stage", "wanted"),
    [
        ("attention", {"output"}, "output", set()),
        ("attention", {"log_sum_exp", "output"}, "output", set()),
        ("attention", {"raw_scores", "weights"}, "scores", set()),  # a scale may be applied before the product
        ("attention", {"weights"}, "output", {"weights"}),
        ("attention", {"raw_scores", "masked", "weights"}, "output", {"weights"}),
        ("attention", {"scores"}, "log_sum_exp", {"scores"}),
        ("multi_head_attention", {"query", "key"}, "value", set()),
        ("multi_head_attention", {"query"}, "scores", {"query"}),
    ],
)
def test_a_step_begins_at_the_nearest_of_the_stages_that_were_returned(
    operation: str, returned: set[str], stage: str, wanted: set[str]
) -> None:
    inputs = multi_head_inputs() if operation == "multi_head_attention" else gradient_inputs()
    if operation == "attention":
        del inputs["grad_output"]
    assert predecessors(operation, {"heads": 2}, inputs, returned, stage) == wanted


# Grouped heads


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_grouped_heads_are_heads_whose_keys_and_values_are_repeated(shared: int) -> None:
    inputs = {"query": draw(2, 4, 5, 3), "key": draw(2, shared, 7, 3), "value": draw(2, shared, 7, 2)}
    repeated = inputs | {name: np.repeat(inputs[name], 4 // shared, axis=1) for name in ("key", "value")}
    own, plain = (exact_stages("attention", {}, given) for given in (inputs, repeated))
    assert all(agree(own[stage], plain[stage]) for stage in plain)
    stages = {stage: each.high for stage, each in own.items()}
    for stage in stages:
        before = {name: array for name, array in stages.items() if name != stage}
        step, other = (exact_from("attention", {}, given, before, stage) for given in (inputs, repeated))
        assert step is not None
        assert other is not None
        assert agree(step, other)


def test_projections_have_as_many_heads_as_share_them() -> None:
    inputs = multi_head_inputs()
    few = inputs | {name: inputs[name][..., :3] for name in ("key_weight", "key_bias")}
    few |= {name: inputs[name][..., :2] for name in ("value_weight", "value_bias")}
    twice = few | {
        name: np.concatenate([few[name], few[name]], axis=-1)
        for name in ("key_weight", "key_bias", "value_weight", "value_bias")
    }
    own = exact_stages("multi_head_attention", {"heads": 2, "kv_heads": 1}, few)
    plain = exact_stages("multi_head_attention", {"heads": 2}, twice)
    assert own["key"].shape == (2, 1, 3, 3)
    assert all(agree(own[stage], plain[stage]) for stage in plain if stage not in ("key", "value"))
