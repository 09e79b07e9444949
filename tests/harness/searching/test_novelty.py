"""What is new counts, what was asked counts less, and what is refused is told from what is not."""

from __future__ import annotations

import numpy as np

from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.novelty import Seen, asked_of, features_of, identity_of


def problem(options: dict[str, object] | None = None, keys: int = 3, dtype: str = "float32") -> ConcreteCase:
    inputs = {
        "query": np.ones((1, 4, 2, 3)),
        "key": np.ones((1, 2, keys, 3)),
        "value": np.ones((1, 2, keys, 5)),
        "bias": np.ones((1, 1, 2, keys)),
    }
    return ConcreteCase("attention", options or {}, inputs, dtype)


def test_features_are_options_inputs_sizes_and_forms() -> None:
    found = features_of(problem({"window": (0, None), "scale": -1.0}, keys=17))
    assert {"window zero none", "scale negative", "bias along Lq T", "heads shared", "Lk = 17"} <= found
    assert "another width of values" in found
    assert asked_of(problem({"is_causal": True})) == {"is_causal", "bias", "heads shared"}


def test_lists_of_expected_failures_can_name_what_is_drawn() -> None:
    plain = problem()
    assert identity_of(plain, "problem-3") == "search/attention/bias-heads-shared/problem-3"
    causal = problem({"is_causal": True, "scale": -0.5})
    causal.inputs["query"][0, 0, 0, 0] = np.nan
    named = "search/attention/bias-heads-shared-is-causal-scale-negative-nonfinite/problem-4"
    assert identity_of(causal, "problem-4") == named
    assert "-scale-zero/" in identity_of(problem({"scale": 0.0}), "problem-5")


def test_what_was_asked_is_less_new_and_pairs_count() -> None:
    seen = Seen()
    plain, windowed = problem(), problem({"window": (1, 1)})
    assert seen.novelty(windowed) > seen.novelty(plain)
    before = seen.novelty(plain)
    seen.add(plain)
    assert seen.novelty(plain) < before / 2
    seen.add(problem({"window": (1, 1)}, keys=64))
    assert seen.novelty(problem({"softcap": 1.0}, keys=64)) > seen.novelty(problem({"window": (1, 1)}, keys=64))


def test_what_is_refused_whenever_it_is_asked_is_known() -> None:
    seen = Seen()
    for _ in range(2):
        seen.note(problem({"softcap": 1.0}), is_refused=True, lacks=("softcap",))
    assert seen.is_likely_refused(problem({"softcap": 3.0, "scale": 1.0}))
    assert not seen.is_likely_refused(problem({"scale": 1.0}))
    seen.note(problem({"softcap": 2.0}), is_refused=False)
    assert not seen.is_likely_refused(problem({"softcap": 3.0}))


def test_a_function_that_is_not_there_refuses_an_operation() -> None:
    seen = Seen()
    for _ in range(2):
        seen.note(problem(), is_refused=True, lacks=("attention()",))
    assert seen.is_likely_refused(problem({"scale": 1.0}))


def test_what_is_kept_comes_back() -> None:
    seen = Seen()
    seen.add(problem())
    seen.note(problem(), is_refused=False)
    assert Seen.of(seen.record()) == seen
