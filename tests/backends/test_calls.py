"""Modes and libraries that no check of these environments judges: the calls that each takes, and what it refuses.

A few words are a call, such as ``mask past window=2:`` (``call_of`` reads them), compared with the exact
answer. The default mode of a framework or library is not here: ``attncheck check`` judges it in every case in the same
environment.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from modes import asked, needing
from numpy.typing import NDArray

Call = tuple[str, dict[str, NDArray[Any]], dict[str, Any]]
Judge = Callable[..., dict[str, str]]


@dataclass(frozen=True)
class Sizes:
    """Axes of a call, pairwise distinct where it matters; a word such as ``queries=5`` changes one of them."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 3
    keys: int = 5
    width: int = 6
    value_width: int = 4
    past: int = 4


DATA: dict[str, Any] = yaml.load(Path(__file__).with_name("calls.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
SIZES = {name: Sizes(**changed) for name, changed in DATA["sizes"].items()}
MASK_AXES = {"mask": "bqk", "bias": "hk"}
"""Axes that are not of length 1, unless others are named: ``mask=hqk``."""
STAGES = ["raw_scores", "scores", "capped", "biased", "masked", "weights", "log_sum_exp", "output"]


def call_of(words: str, sizes: Sizes) -> Call:
    """Draw the inputs of a call, the same for the same words, and return them with its operation and options."""
    given = dict(word.partition("=")[::2] for word in words.split())
    sizes = replace(sizes, **{each.name: int(given[each.name]) for each in fields(Sizes) if given.get(each.name)})
    sizes = replace(sizes, **({"queries": sizes.keys} if "square" in given else {}))
    sizes = replace(sizes, **({"kv_heads": sizes.heads} if "alone" in given else {}))
    if "packed" in given:  # of the sequences one has no keys
        ends = [0, 3, 4, 6], [0, 4, 4, 7]
        sizes = replace(sizes, batch=1, queries=ends[0][-1], keys=ends[1][-1])
    rng = np.random.default_rng(zlib.crc32(words.encode()))
    inputs = _inputs(sizes, rng, given)
    if "packed" in given:
        inputs |= {f"cu_seqlens_{name}": np.array(each) for name, each in zip("qk", ends, strict=True)}
    kind = next((each for each in ("packed", "paged") if each in given), "")
    gradients = "_gradients" if "gradients" in given else ""
    return f"{kind}_attention{gradients}".removeprefix("_"), inputs, _options(given)


def _inputs(sizes: Sizes, rng: np.random.Generator, given: dict[str, str]) -> dict[str, NDArray[Any]]:
    def normal(*shape: int) -> NDArray[Any]:
        return rng.normal(size=shape)

    keys, total = sizes.keys, sizes.keys + (sizes.past if "past" in given else 0)
    pair = {"key": sizes.width, "value": sizes.value_width}
    inputs = {"query": normal(sizes.batch, sizes.heads, sizes.queries, sizes.width)}
    if "paged" in given:
        inputs |= {f"{name}_pages": normal(7, 4, sizes.kv_heads, width) for name, width in pair.items()}
        inputs |= {"block_table": np.array([[5, 0, 3], [6, 1, int(given["paged"])]]), "key_lengths": np.array([12, 6])}
        return inputs
    inputs |= {name: normal(sizes.batch, sizes.kv_heads, keys, width) for name, width in pair.items()}
    if "past" in given:
        shapes = {f"past_{name}": (sizes.batch, sizes.kv_heads, sizes.past, width) for name, width in pair.items()}
        inputs |= {name: normal(*shape) for name, shape in shapes.items()}
    lengths = {"b": sizes.batch, "h": sizes.heads, "q": sizes.queries, "k": total}
    for name in MASK_AXES.keys() & given.keys():
        axes = given[name] or MASK_AXES[name]
        shape = tuple(length if axis in axes else 1 for axis, length in lengths.items())
        inputs[name] = normal(*shape) if name == "bias" else rng.random(shape) < 0.7
        if name == "mask":
            inputs[name][..., 0] = True
    for name, word in (("key_lengths", "lengths"), ("query_offsets", "offsets")):
        if word in given:
            inputs[name] = np.array([int(each) for each in given[word].split(",")])
    if "sinks" in given:
        inputs["sinks"] = normal(sizes.heads)
    if "rotary" in given:
        angles = normal(total, int(given["rotary"] or sizes.width // 2))
        inputs |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    if "gradients" in given:
        inputs["grad_output"] = normal(sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
    return inputs


def _options(given: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {name: float(given[name]) for name in ("scale", "softcap") if name in given}
    if "window" in given:
        options["window"] = tuple(int(end) if end else None for end in given["window"].split(":"))
    names = {"causal": "is_causal", "interleaved": "rotary_interleaved"}
    return options | {option: True for word, option in names.items() if word in given}


def returned(operation: str, inputs: dict[str, Any], stages: Sequence[str]) -> set[str]:
    """Return the stages that a call has: gradients of what can be differentiated, and those of attention."""
    if operation.endswith("_gradients"):
        return {f"grad_{name}" for name in ("query", "key", "value", "bias", "sinks") if name in inputs}
    return set(stages)


@pytest.mark.parametrize("row", [needing(row["name"], row) for row in DATA["agreeing"]])
def test_every_call_agrees_with_the_exact_answer_and_returns_its_stages(judge_mode: Judge, row: Any) -> None:
    wrong, stages = {}, row.get("stages", ["output"])
    for words in row["calls"].split(" / "):
        operation, inputs, options = call_of(words, SIZES[row["sizes"]])
        for dtype in row["dtypes"]:
            found = judge_mode(row["name"], dtype, operation, inputs, options)
            if found != dict.fromkeys(returned(operation, inputs, stages), "agree"):
                wrong[words, dtype] = found
    assert wrong == {}


MODELS = {"self": (6, 6, 6), "cross": (6, 7, 9), "keras": (6, 3, 8)}
"""Widths of the words that are projected to queries, keys and values."""


def projected_call(words: str, models: str, biases: str) -> Call:
    """Draw words that a module projects to two heads; one model is all three in self-attention."""
    sizes = Sizes(heads=2, kv_heads=2, queries=4 if models != "keras" else 3, keys=4 if models == "self" else 5)
    _, inputs, options = call_of(words.replace("mask=none", ""), sizes)
    rng = np.random.default_rng(zlib.crc32(f"{words} {models}".encode()))
    heads = {"query": (sizes.queries, 3), "key": (sizes.keys, 3), "value": (sizes.keys, 3)}
    if models == "keras":
        heads = {"query": (sizes.queries, 4), "key": (sizes.keys, 4), "value": (sizes.keys, 7)}
    for (name, (length, width)), model in zip(heads.items(), MODELS[models], strict=True):
        inputs[name] = rng.normal(size=(2, length, model)) if models != "self" else inputs["query"]
        if models == "self" and name == "query":
            inputs[name] = rng.normal(size=(2, length, model))
        inputs[f"{name}_weight"] = rng.normal(size=(model, 2 * width)) / 2
    inputs["output_weight"] = rng.normal(size=(2 * heads["value"][1], 9 if models == "keras" else 6)) / 2
    for name in ("query", "key", "value", "output"):
        if name[0] in biases:
            inputs[f"{name}_bias"] = rng.normal(size=inputs[f"{name}_weight"].shape[1])
    if words == "mask=none":  # for the second query
        inputs["mask"] = np.array([True, False, True, True]).reshape(1, 1, 4, 1)
    return "multi_head_attention", inputs, {**options, "heads": 2}


@pytest.mark.parametrize("row", [needing(row["name"], row) for row in DATA["projected"]])
def test_every_call_of_a_module_agrees_with_the_exact_answer(judge_mode: Judge, row: Any) -> None:
    wrong, stages = {}, row.get("stages", ["output"])
    for words in row["calls"].split(" / "):
        for dtype in row["dtypes"]:
            found = judge_mode(row["name"], dtype, *projected_call(words, row["models"], row["biases"]))
            if found != dict.fromkeys(stages, "agree"):
                wrong[words, dtype] = found
    assert wrong == {}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [needing("tensorflow.keras_additive", "tensorflow.keras_additive")])
def test_additive_scores_of_a_layer_agree_with_the_exact_answer(judge_mode: Judge, name: str, dtype: str) -> None:
    rng = np.random.default_rng(15)
    shapes = {"query": (2, 4, 3, 4), "key": (2, 4, 5, 3), "query_weight": (4, 6), "key_weight": (3, 6)}
    inputs = {each: rng.normal(size=shape) for each, shape in (shapes | {"score_vector": (6,)}).items()}
    for more in ({}, {"score_bias": rng.normal(size=6)}):
        assert judge_mode(name, dtype, "scoring", {**inputs, **more}, {"score": "additive"}) == {"scores": "agree"}


FLEX = "transformers.flex"


@pytest.mark.parametrize(("name", "sizes", "words", "reason"), [needing(row[0], *row) for row in DATA["refused"]])
def test_what_a_call_cannot_express_is_refused(name: str, sizes: str, words: str, reason: str) -> None:
    compiles = pytest.importorskip("torch._dynamo").config.patch(disable=True) if name == FLEX else nullcontext()
    operation, inputs, options = call_of(words, SIZES[sizes])
    with compiles, pytest.raises(NotImplementedError, match=reason):
        asked(name, operation, inputs, **options)


@pytest.mark.parametrize("row", [needing(row[0], row) for row in DATA["refused_of_modules"]])
def test_what_a_module_cannot_express_is_refused_with_the_reason(row: Any) -> None:
    name, models, biases, shapes, changed, reason = row
    operation, inputs, options = projected_call("", models, biases)
    arrays = {each: array for each, array in inputs.items() if each not in shapes}
    arrays |= {each: np.ones(shape) for each, shape in shapes.items() if shape}
    options |= {each: tuple(value) if isinstance(value, list) else value for each, value in changed.items()}
    with pytest.raises(NotImplementedError, match=reason):
        asked(name, operation, arrays, **options)
