"""Modes and libraries that no check of these environments judges: the calls that each takes, and what it refuses.

A few words are a call, such as ``mask past window=2:`` (``call_of`` reads them), compared with the exact answer.
The default mode of a framework or library is not here: ``attncheck check`` judges it in every case in the same
environment.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import EVERYTHING, LIBRARIES
from attncheck.execution.operations import run_operation

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


EQUAL = Sizes(value_width=6)
OF_ONNX = Sizes(width=4, value_width=6)  # whose scale of 1/2 is exact
OF_ONNXRUNTIME = Sizes(queries=5, width=16, value_width=16)
OF_KERAS = Sizes(keys=5, width=4, value_width=7)  # other scales than powers of two pass through float32 there
OF_TOKAMAX = Sizes(queries=5, width=4, value_width=6)
OF_FLAX = Sizes(queries=5, width=4)
OF_TRANSFORMERS = Sizes(queries=4, value_width=7, past=8)
OF_PALLAS = Sizes(heads=2, queries=128, keys=128, width=8, value_width=8)
MASK_AXES = {"mask": "bqk", "bias": "hk"}
"""Axes that are not of length 1, unless others are named: ``mask=hqk``."""
STAGES = ["raw_scores", "scores", "capped", "biased", "masked", "weights", "log_sum_exp", "output"]
TOGETHER = "past mask bias scale=-0.75 softcap=1.5 window=3:1 lengths=8,6"


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


@dataclass(frozen=True)
class Row:
    """Calls with slashes between them, in which dtypes and sizes, and the stages of attention that are returned."""

    name: str
    dtypes: Sequence[str]
    sizes: Sizes
    calls: str
    stages: Sequence[str] = ("output",)


WHOLE = ("float32",)
KINDS = ("float32", "bfloat16")
NARROW = ("bfloat16", "float16")
OF_SDPA = (
    "plain / value_width=3 / alone / scale=0.75 / causal / mask=bk / bias=hq / mask=bk bias=hq / window=1:0 / "
    "lengths=4,2 / past window=2: / mask=bk bias=hq window=:1 lengths=4,2 / lengths=0,2 bias=hq / gradients "
    "causal / gradients lengths=4,2 / gradients mask=bk bias=hq window=:1 lengths=4,2 / gradients lengths=0,2 "
    "bias=hq"
)
OF_DPA = (
    "causal / window=1:0 / window=:1 / lengths=2,4 / mask=bk bias lengths=5,3 scale=0.3 causal window=2:1 / "
    "past lengths=7,3 / lengths=2,0 / gradients mask=bk bias lengths=5,3 scale=0.3 window=2:1"
)
OF_STANDARD = (
    "plain / causal scale=0.25 / mask=bk bias=hq / bias=hq softcap=1.5 / lengths=3,5 / lengths=3,5 causal / "
    "past window=:0 / past lengths=6,8 / window=1:1 / past window=2: / lengths=3,5 window=1:0 / paged=99 / "
    "paged=99 causal"
)
ROWS = [
    Row("torch.sdpa", KINDS, EQUAL, f"{OF_SDPA} / mask=bk causal"),
    Row("torch.sdpa_math", KINDS, EQUAL, OF_SDPA),
    Row("torch.sdpa_flash", KINDS, EQUAL, "alone / causal"),
    Row("torch.causal_upper_left", KINDS, Sizes(), "causal / causal scale=0.3 / gradients causal square"),
    Row(
        "torch.causal_lower_right",
        KINDS,
        Sizes(),
        "causal square / past window=:0 square / gradients causal square / packed alone causal / packed alone "
        "gradients causal",
    ),
    Row("torch.nested", KINDS, Sizes(), "packed alone / packed alone scale=0.4 / packed alone gradients"),
    Row(
        "torch.flex",
        KINDS,
        Sizes(),
        "plain / causal / mask bias scale=0.3 / past softcap=1.5 window=2:1 / lengths=3,0 causal / "
        "offsets=2,0 causal window=1: / packed alone causal window=1: softcap=1.5",
        ("log_sum_exp", "output"),
    ),
    Row("torch.flex_compile", WHOLE, Sizes(), "causal square"),
    Row("torch.compile_output", WHOLE, Sizes(), "mask bias causal window=1: scale=0.3"),
    *(
        Row(f"tensorflow.{mode}", WHOLE, Sizes(), f"{TOGETHER} / gradients mask bias lengths=5,0", STAGES)
        for mode in ("function", "xla")
    ),
    *(
        Row(f"{mode}_output", WHOLE, Sizes(), "mask bias causal window=1: scale=0.3")
        for mode in ("tensorflow.function", "tensorflow.xla", "jax.jit")
    ),
    Row(
        "tensorflow.keras_dpa",
        WHOLE,
        OF_KERAS,
        "plain / scale=-0.25 / scale=1 / causal / mask=bhqk bias lengths=5,4 / mask=bk lengths=5,4 causal "
        "alone / lengths=5,0 / gradients alone bias mask=bk causal scale=-0.25 lengths=5,4",
    ),
    Row(
        "tensorflow.keras_attention",
        WHOLE,
        OF_KERAS,
        "alone / alone scale=-0.25 / alone scale=1 / alone causal / alone mask=bk / alone mask=bhk / alone "
        "mask=bk lengths=5,4 causal / alone lengths=5,0 / alone gradients mask=bk causal lengths=5,4",
    ),
    *(
        Row(f"tensorflow.{mode}", ("float64",), OF_KERAS, "alone scale=-0.25 mask=bk")
        for mode in ("keras_dpa", "keras_attention")
    ),
    Row("jax.dpa", ("bfloat16",), EQUAL, "past lengths=7,3", ("log_sum_exp", "output")),
    Row("jax.dpa_jit", ("bfloat16",), EQUAL, "gradients mask=bk bias lengths=5,3"),
    Row("jax.dpa_jit", WHOLE, EQUAL, OF_DPA, ("log_sum_exp", "output")),
    Row("onnxruntime.function", WHOLE, OF_ONNX, OF_STANDARD),
    Row("onnxruntime.function", ("float16",), OF_ONNX, OF_STANDARD.partition(" / lengths=3,5 causal")[0]),
    *(
        Row(f"{library}{mode}", WHOLE, OF_ONNX, call, (stage, "output"))
        for library in ("onnxruntime.", "onnx.reference_")
        for mode, call, stage in (
            ("scores", "bias=hq", "scores"),
            ("capped", "bias=hq softcap=1.5", "capped"),
            ("masked", "bias=hq softcap=1.5", "biased"),
            ("weights", "bias=hq softcap=1.5", "weights"),
        )
    ),
    Row(
        "onnxruntime.multi_head_attention",
        ("float32", "float16"),
        OF_ONNXRUNTIME,
        "alone scale=-0.3 / alone causal / alone value_width=6 / alone mask bias=hqk / alone mask=bk / alone "
        "mask=bhqk lengths=3,5 / alone lengths=3,5 / alone past window=:0",
    ),
    Row(
        "onnxruntime.group_query_attention",
        ("float32", "float16"),
        OF_ONNXRUNTIME,
        "causal / scale=0.3 / mask bias=hqk softcap=1.5 / sinks causal / window=1:0 / window=0:0 / past "
        "window=2:0 / lengths=3,5 / keys=7 / keys=7 causal / past bias=bqk / keys=7 queries=1 softcap=2 / "
        "keys=7 offsets=2,0 window=2:0 / rotary causal / past rotary interleaved window=:0",
    ),
    Row(
        "onnxruntime.group_query_attention",
        WHOLE,
        OF_ONNXRUNTIME,
        "paged=99 causal / paged=99 window=1:0 / paged=99 queries=1",
    ),
    Row(
        "tokamax.xla_chunked",
        ("bfloat16",),
        OF_TOKAMAX,
        "scale=-0.75 softcap=2 causal / window=1: / mask bias=hqk lengths=3,5",
    ),
    Row(
        "tokamax.xla_chunked",
        WHOLE,
        OF_TOKAMAX,
        "past / gradients scale=-0.75 softcap=2 causal / gradients window=1: / gradients mask bias=hqk lengths=3,5",
    ),
    Row("flax.sown", KINDS, OF_FLAX, "causal / mask bias=hqk", ("weights", "output")),
    Row("flax.sown", WHOLE, OF_FLAX, "past / gradients causal / gradients mask bias=hqk", ("weights", "output")),
    Row(
        "transformers.eager",
        KINDS,
        OF_TRANSFORMERS,
        "plain / scale=0.3 / square causal / causal / queries=1 causal / mask / mask=bhqk causal / "
        "lengths=3,5 causal / square window=1:0 / square window=1:1 / square past window=2:0 / "
        "keys=1 queries=1 past window=3:0 / keys=4 past mask=qk window=5:0 / alone square bias causal",
        ("weights", "output"),
    ),
    Row(
        "transformers.eager",
        ("float32", "float16"),
        OF_TRANSFORMERS,
        "square softcap=0.7 causal / square sinks",
        ("weights", "output"),
    ),
    Row("transformers.eager", WHOLE, OF_TRANSFORMERS, "square gradients causal"),
    Row(
        "pallas.gpu_mha",
        WHOLE,
        OF_PALLAS,
        "queries=32 keys=48 scale=-0.75 / queries=3 keys=5 / queries=48 keys=48 causal / "
        "gradients queries=32 keys=32 scale=-0.75 / gradients queries=3 keys=5 / gradients queries=48 keys=48 causal",
        ("log_sum_exp", "output"),
    ),
    Row("pallas.gpu_mha", NARROW, OF_PALLAS, "queries=48 keys=48 causal", ("log_sum_exp", "output")),
    Row(
        "pallas.gpu_decode",
        WHOLE,
        OF_PALLAS,
        "heads=4 queries=1 keys=48 / heads=4 queries=1 keys=32 past=16 lengths=7,32 window=4:",
        ("log_sum_exp", "output"),
    ),
    Row(
        "pallas.gpu_paged",
        WHOLE,
        OF_PALLAS,
        " / ".join(f"heads=4 queries=1 paged=2 {more}" for more in ("plain", "scale=-0.5", "softcap=1.5 causal")),
    ),
    Row(
        "pallas.tpu_flash",
        WHOLE,
        OF_PALLAS,
        "keys=256 scale=0.5 / lengths=100,128 causal / keys=256 bias=hk scale=1 / gradients keys=256 scale=0.5 / "
        "gradients lengths=100,128 causal / gradients keys=256 bias=hk scale=1",
    ),
    Row("pallas.tpu_flash", NARROW, OF_PALLAS, "lengths=100,128 causal"),
]


def needing(name: str, *values: Any) -> Any:
    """Return parameters of a test that needs an implementation's package."""
    return pytest.param(*values, marks=getattr(pytest.mark, name.partition(".")[0]), id=name)


def returned(operation: str, inputs: dict[str, Any], stages: Sequence[str]) -> set[str]:
    """Return the stages that a call has: gradients of what can be differentiated, and those of attention."""
    if operation.endswith("_gradients"):
        return {f"grad_{name}" for name in ("query", "key", "value", "bias", "sinks") if name in inputs}
    return set(stages)


@pytest.mark.parametrize("row", [needing(row.name, row) for row in ROWS])
def test_every_call_agrees_with_the_exact_answer_and_returns_its_stages(judge_mode: Judge, row: Row) -> None:
    wrong = {}
    for words in row.calls.split(" / "):
        operation, inputs, options = call_of(words, row.sizes)
        for dtype in row.dtypes:
            found = judge_mode(row.name, dtype, operation, inputs, options)
            if found != dict.fromkeys(returned(operation, inputs, row.stages), "agree"):
                wrong[words, dtype] = found
    assert wrong == {}


MODELS = {"self": (6, 6, 6), "cross": (6, 7, 9), "keras": (6, 3, 8)}
"""Widths of the words that are projected to queries, keys and values."""
OF_MHA = "plain / causal / mask=bhqk / mask=k / lengths=3,1 / mask=bhqk lengths=3,1 causal / window=1: causal"
OF_KERAS_MHA = (
    "plain / causal / mask=bk / mask=hk / lengths=5,4 / mask=bqk lengths=5,4 / mask=hk lengths=5,4 causal / "
    "window=1:1 / window=1:0 / window=1:2 causal / window=:0 / window=:"
)
PROJECTED = [
    ("torch.mha", ("float64", "float32"), "self", "qkvo", OF_MHA, ("output",)),
    ("torch.mha", ("float64",), "self", "qkvo", "mask=none", ("output",)),
    ("torch.mha_weights", ("float64", "float32"), "self", "qkvo", OF_MHA, ("weights", "output")),
    ("torch.mha_fast", ("float64", "float32"), "self", "qkvo", OF_MHA, ("output",)),
    *(
        (f"torch.{mode}", ("float64",), "cross", biases, "bias=hq mask=bk lengths=4,2", stages)
        for mode, stages in (("mha", ("output",)), ("mha_weights", ("weights", "output")))
        for biases in ("", "qkvo", "v")
    ),
    *(
        (f"tensorflow.{mode}", dtypes, "keras", biases, calls, stages)
        for mode, stages in (("keras_mha", ("output",)), ("keras_mha_weights", ("weights", "output")))
        for dtypes, biases, calls in ((WHOLE, "ko", OF_KERAS_MHA), (("float64",), "", "mask=hk lengths=5,4 causal"))
    ),
]


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


@pytest.mark.parametrize("row", [needing(row[0], row) for row in PROJECTED])
def test_every_call_of_a_module_agrees_with_the_exact_answer(judge_mode: Judge, row: Any) -> None:
    name, dtypes, models, biases, calls, stages = row
    wrong = {}
    for words in calls.split(" / "):
        for dtype in dtypes:
            found = judge_mode(name, dtype, *projected_call(words, models, biases))
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


EMPTY = {
    "jax.dpa": "uniform",
    "torch.sdpa": "zero",
    "tensorflow.keras_dpa": "uniform",
    "tensorflow.keras_attention": "uniform",
}


@pytest.mark.parametrize("name", EMPTY)
def test_rows_without_a_key_are_known(name: str, given_without_a_key: Callable[[str, str], dict[str, str]]) -> None:
    """The calls above that have such a row are judged by it."""
    assert given_without_a_key(name, "float32") == {"empty_rows": EMPTY[name]}


FLEX = "transformers.flex"
REFUSED = [
    ("jax.dpa", EQUAL, "past window=2:1", "does not count a past"),
    ("jax.dpa", EQUAL, "softcap=30", "takes no softcap"),
    ("torch.causal_upper_left", Sizes(), "", "is causal"),
    ("torch.causal_lower_right", Sizes(), "square", "is causal"),
    ("torch.causal_lower_right", Sizes(), "square window=2:0", "no other window"),
    ("torch.causal_lower_right", Sizes(), "causal", "last query with the last key"),
    ("torch.nested", Sizes(), "packed", "as many key and value heads"),
    ("torch.sdpa_math", EQUAL, "mask causal", "attn_mask or is_causal, not both"),
    ("torch.sdpa_flash", EQUAL, "value_width=3", "flash kernel"),
    ("torch.sdpa_flash", EQUAL, "gradients bias", "flash kernel"),
    ("tensorflow.keras_attention", OF_KERAS, "alone mask=qk", "a mask of keys"),
    ("tensorflow.keras_attention", OF_KERAS, "", "no grouped heads"),
    ("onnxruntime.attention", OF_ONNX, "window=1:1", "since opset 25"),
    ("onnxruntime.attention", OF_ONNX, "scale=-1", "root of the scale"),
    ("onnx.reference", OF_ONNX, "scale=0", "root of the scale"),
    ("onnxruntime.capped", OF_ONNX, "", "without a softcap"),
    ("onnxruntime.masked", OF_ONNX, "", "without a mask"),
    ("onnxruntime.multi_head_attention", OF_ONNXRUNTIME, "alone window=1:0", "no window"),
    ("onnxruntime.multi_head_attention", OF_ONNXRUNTIME, "", "as many heads of keys"),
    ("onnxruntime.multi_head_attention", OF_ONNXRUNTIME, "alone past value_width=6", "as wide as queries"),
    ("onnxruntime.multi_head_attention", OF_ONNXRUNTIME, "alone scale=0", "scale of 0"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "softcap=0", "softcap of 0"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "window=1:1", "comes before a query"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "keys=7 queries=9", "a key at the place"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "rotary=4", "multiples of 8"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "keys=7 rotary", "rotates new keys"),
    ("onnxruntime.group_query_attention", OF_ONNXRUNTIME, "paged=99 queries=3", "causal attention, or one query"),
    ("openvino.sdpa", Sizes(), "", "as many key and value heads"),
    ("openvino.sdpa", Sizes(), "alone keys=0", "is not written"),
    ("tokamax.xla", Sizes(), "past window=1:0", "does not count a past"),
    ("pallas.gpu_mha", OF_PALLAS, "heads=4 queries=4 keys=4", "as many heads of keys"),
    ("pallas.gpu_mha", OF_PALLAS, "queries=129 keys=129", "up to 128"),
    ("pallas.gpu_mha", OF_PALLAS, "queries=4 keys=0", "up to 128"),
    ("pallas.gpu_mha", OF_PALLAS, "packed", "queries and keys alike"),
    ("pallas.gpu_decode", OF_PALLAS, "queries=2 keys=16", "one query"),
    ("pallas.gpu_decode", OF_PALLAS, "queries=1 keys=0", "one key"),
    ("pallas.tpu_flash", OF_PALLAS, "heads=4", "as many heads of keys"),
    ("pallas.tpu_flash", OF_PALLAS, "queries=0", "one block"),
    ("pallas.tpu_flash", OF_PALLAS, "batch=1 heads=1 kv_heads=1 width=136 value_width=136", "multiples of it"),
    ("pallas.tpu_splash", OF_PALLAS, "keys=0", "one block"),
    ("pallas.tpu_splash", OF_PALLAS, "mask=bhqk", "one mask for all"),
    ("transformers.sdpa", OF_TRANSFORMERS, "square softcap=0.7", "does not support softcap"),
    ("transformers.sdpa", OF_TRANSFORMERS, "square sinks", "takes s_aux and ignores it"),
    ("transformers.eager", OF_TRANSFORMERS, "square sinks softcap=0.7", "has one"),
    ("transformers.eager", OF_TRANSFORMERS, "square bias=qk", "no groups of heads"),
    ("transformers.sdpa", OF_TRANSFORMERS, "square window=1:2", "as far before as after"),
    ("transformers.sdpa", OF_TRANSFORMERS, "past", "one new key for each query"),
    (FLEX, OF_TRANSFORMERS, "mask=bhqk", "the first head alone"),
]


def asked(name: str, call: Call, dtype: str = "float32") -> dict[str, NDArray[Any]]:
    """Call a mode's function and return its stages."""
    framework, _, mode = name.partition(".")
    operation, inputs, options = call
    with mock.patch.dict(os.environ, EVERYTHING[framework].environment_of(mode)):
        backend: Any = EVERYTHING[framework].load(mode)
        if framework in LIBRARIES:  # frameworks keep what others of this process prepared
            backend.prepare(dtype, 1)
        stored = {each: array.astype(dtype) if array.dtype.kind == "f" else array for each, array in inputs.items()}
        stages = run_operation(backend, operation, stored, options)
        return {stage: backend.to_numpy(tensor) for stage, tensor in stages.items()}


@pytest.mark.parametrize(("name", "sizes", "words", "reason"), [needing(row[0], *row) for row in REFUSED])
def test_what_a_call_cannot_express_is_refused(name: str, sizes: Sizes, words: str, reason: str) -> None:
    compiles = pytest.importorskip("torch._dynamo").config.patch(disable=True) if name == FLEX else nullcontext()
    with compiles, pytest.raises(NotImplementedError, match=reason):
        asked(name, call_of(words, sizes))


@pytest.mark.parametrize(
    ("name", "models", "biases", "changed", "reason"),
    [
        needing(row[0], *row)
        for row in (
            ("torch.mha", "self", "qkvo", {"output_weight": None}, "always has an output projection"),
            ("torch.mha_weights", "self", "qkvo", {"value_weight": np.ones((6, 8))}, "H Dv"),
            ("torch.mha", "self", "qkvo", {"output_weight": np.ones((6, 5))}, "output's width"),
            ("torch.mha_fast", "self", "qkvo", {"key": np.ones((2, 4, 6))}, "one tensor"),
            ("torch.mha_fast", "self", "", {}, "biases"),
            ("torch.mha_fast", "self", "qkvo", {"heads": 3}, "even number of heads"),
            ("torch.mha_fast", "self", "qkvo", {"bias": np.ones((1, 1, 4, 4))}, "boolean masks alone"),
            ("tensorflow.keras_mha", "keras", "", {"output_weight": None}, "needs output_weight"),
            ("tensorflow.keras_mha", "keras", "", {"kv_heads": 1}, "as many key and value heads"),
            ("tensorflow.keras_mha", "keras", "", {"window": (1, 2)}, "causal or alike on both sides"),
        )
    ],
)
def test_what_a_module_cannot_express_is_refused_with_the_reason(
    name: str, models: str, biases: str, changed: dict[str, Any], reason: str
) -> None:
    operation, inputs, options = projected_call("", models, biases)
    arrays = {each: array for each, array in (inputs | changed).items() if isinstance(array, np.ndarray)}
    options |= {each: value for each, value in changed.items() if not isinstance(value, np.ndarray) and value}
    with pytest.raises(NotImplementedError, match=reason):
        asked(name, (operation, arrays, options))
