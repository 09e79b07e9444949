"""Interfaces of transformers: the formula with each of their options, which masks are asked for, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

TRANSFORMERS = LIBRARIES["transformers"]
pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(not TRANSFORMERS.is_installed, reason="transformers is not installed"),
]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(39408)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4, Hkv 2, Lq 4, Lk 5, D 6, Dv 7; SELF has as many keys as queries.
INPUTS = {"query": normal(2, 4, 4, 6), "key": normal(2, 2, 5, 6), "value": normal(2, 2, 5, 7)}
SELF = {**INPUTS, "key": normal(2, 2, 4, 6), "value": normal(2, 2, 4, 7)}
ALONE = {**SELF, "key": normal(2, 4, 4, 6), "value": normal(2, 4, 4, 7)}
PAST = {"past_key": normal(2, 2, 8, 6), "past_value": normal(2, 2, 8, 7)}
DECODING = {"query": normal(2, 4, 1, 6), "key": normal(2, 2, 1, 6), "value": normal(2, 2, 1, 7), **PAST}
MASK = RNG.random((2, 1, 4, 5)) < 0.7
OF_HEADS = RNG.random((2, 4, 4, 5)) < 0.7
BEHIND = RNG.random((1, 1, 4, 12)) < 0.7
for each in (MASK, OF_HEADS, BEHIND):
    each[..., 0] = True
LENGTHS = np.array([3, 5])
PLACES = np.arange(8, 12)[:, np.newaxis], np.arange(12)
CHUNKS = ((PLACES[1] <= PLACES[0]) & (PLACES[1] // 5 == PLACES[0] // 5))[np.newaxis, np.newaxis]
IMAGE = np.tril(np.ones((4, 4), dtype=bool))
IMAGE[1:3, 1:3] = True
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "scaled": (INPUTS, {"scale": 0.3}),
    "causal": (SELF, {"is_causal": True}),
    "causal with more keys than queries": (INPUTS, {"is_causal": True}),
    "one query, causal with more keys": ({**INPUTS, "query": INPUTS["query"][:, :, :1]}, {"is_causal": True}),
    "masked": ({**INPUTS, "mask": MASK}, {}),
    "masked in each head": ({**INPUTS, "mask": OF_HEADS}, {"is_causal": True}),
    "lengths and causal": ({**INPUTS, "key_lengths": LENGTHS}, {"is_causal": True}),
    "a causal window": (SELF, {"window": (1, 0)}),
    "a window both ways": (SELF, {"window": (1, 1)}),
    "a window behind a past": ({**SELF, **PAST}, {"window": (2, 0)}),
    "a window of a token behind a past": (DECODING, {"window": (3, 0)}),
    "causal behind a past": ({**SELF, **PAST, "mask": PLACES[1] <= PLACES[0]}, {}),
    "chunks behind a past": ({**SELF, **PAST, "mask": CHUNKS}, {}),
    "a mask of one's own behind a past": ({**SELF, **PAST, "mask": BEHIND}, {"window": (5, 0)}),
    "an image": ({**SELF, "mask": IMAGE[np.newaxis, np.newaxis]}, {}),
    "biased": ({**ALONE, "bias": normal(1, 4, 1, 4)}, {"is_causal": True}),
}
CALLS["causal behind a past"][0]["mask"] = CALLS["causal behind a past"][0]["mask"][np.newaxis, np.newaxis]
ONE_SINK = {**SELF, "sinks": normal(4)}


@pytest.mark.parametrize("mode", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_an_interface_is_the_formula(judge_mode: Judge, call: str, dtype: str, mode: str) -> None:
    assert set(judge_mode(f"transformers.{mode}", dtype, "attention", *CALLS[call]).values()) == {"agree"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("inputs", "options"), [(SELF, {"softcap": 0.7, "is_causal": True}), (ONE_SINK, {})])
def test_eager_functions_of_models_are_the_formula(
    judge_mode: Judge, inputs: dict[str, Any], options: dict[str, Any], dtype: str
) -> None:
    found = judge_mode("transformers.eager", dtype, "attention", inputs, options)
    assert found == {"weights": "agree", "output": "agree"}


@pytest.mark.parametrize("mode", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": (1, None)}])
def test_positions_that_begin_anew_keep_sequences_apart(judge_mode: Judge, mode: str, options: dict[str, Any]) -> None:
    ends = np.array([0, 1, 4, 4, 7])
    inputs = {"query": normal(1, 4, 7, 6), "key": normal(1, 2, 7, 6), "value": normal(1, 2, 7, 7)}
    inputs |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    found = judge_mode(f"transformers.{mode}", "float32", "packed_attention", inputs, options)
    assert found["output"] == "agree"


@pytest.mark.parametrize("mode", ["eager", "sdpa"])
def test_gradients_are_those_of_the_formula(judge_mode: Judge, mode: str) -> None:
    inputs = {**SELF, "grad_output": normal(2, 4, 4, 7)}
    found = judge_mode(f"transformers.{mode}", "float32", "attention_gradients", inputs, {"is_causal": True})
    assert found == dict.fromkeys(["grad_query", "grad_key", "grad_value"], "agree")


def test_flex_attention_is_the_formula_where_nothing_is_compiled(judge_mode: Judge) -> None:
    dynamo: Any = pytest.importorskip("torch._dynamo")
    with dynamo.config.patch(disable=True):
        for call in ("causal", "a window behind a past", "chunks behind a past", "biased", "lengths and causal"):
            assert judge_mode("transformers.flex", "float32", "attention", *CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize(
    ("is_causal", "window", "name", "size"),
    [
        (False, None, "bidirectional", None),
        (True, None, "causal", None),
        (False, (None, 0), "causal", None),
        (False, (2, 0), "sliding", 3),  # with its own key
        (True, (2, 5), "sliding", 3),
        (False, (2, 2), "bidirectional_sliding", 2),  # without it
    ],
)
def test_a_window_counts_as_transformers_counts_it(is_causal: bool, window: Any, name: str, size: int | None) -> None:
    from attncheck.backends.transformers_masks import pattern_of

    found = pattern_of(is_causal, window)
    assert (found.name, found.size) == (name, size)


def test_masks_that_models_have_are_found_in_numbers() -> None:
    import torch

    from attncheck.backends.transformers_masks import pattern_in

    chunks = pattern_in(torch.from_numpy(CHUNKS), 8)
    assert chunks is not None
    assert (chunks.name, chunks.size) == ("chunked", 5)
    image = pattern_in(torch.from_numpy(IMAGE[np.newaxis, np.newaxis]), 0)
    assert image is not None
    assert image.blocks is not None
    assert image.blocks.tolist() == [[-1, 0, 0, -1]]
    assert pattern_in(torch.from_numpy(BEHIND), 8) is None


@pytest.mark.parametrize(
    ("mode", "inputs", "options", "reason"),
    [
        ("sdpa", SELF, {"softcap": 0.7}, "does not support softcap"),
        ("sdpa", ONE_SINK, {}, "takes s_aux and ignores it"),
        ("eager", ONE_SINK, {"softcap": 0.7}, "has one"),
        ("eager", {**SELF, "bias": normal(1, 1, 4, 4)}, {}, "no groups of heads"),
        ("sdpa", SELF, {"window": (1, 2)}, "as far before as after"),
        ("sdpa", {**INPUTS, **PAST}, {}, "one new key for each query"),
        ("flex", {**INPUTS, "mask": OF_HEADS}, {}, "the first head alone"),
    ],
)
def test_what_no_model_can_ask_for_is_refused(
    mode: str, inputs: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    import torch

    backend: Any = TRANSFORMERS.load(mode)
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch._dynamo.config.patch(disable=True), pytest.raises(NotImplementedError, match=reason):
        backend.attention(**tensors, **options)
