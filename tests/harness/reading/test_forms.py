"""In which form inputs come and are handed over: layout, storage, memory, and which stages are judged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from attncheck.errors import CaseError
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Forms of inputs
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
cases:
  - name: The case at hand
"""
SPLIT = """\
    inputs:
      query: {draw: randn, shape: [2, 4, 3, 6]}
      key: {draw: randn, shape: [2, 2, 5, 6]}
      value: {draw: randn, shape: [2, 2, 5, 6]}
"""
MERGED = """\
    layout: merged
    options: {heads: 4, kv_heads: 2}
    inputs:
      query: {ascending: [0, 1], shape: [2, 3, 24]}
      key: {ascending: [0, 1], shape: [2, 5, 12]}
      value: {ascending: [0, 1], shape: [2, 5, 14]}
"""


def _loaded(load_text: Load, text: str) -> Case:
    [case] = load_text(HEAD + text)
    return case


def _fault(load_text: Load, text: str) -> tuple[int | None, str | None, str]:
    with pytest.raises(CaseError) as error:
        load_text(HEAD + text)
    [fault] = error.value.faults
    assert fault.case == "The case at hand"
    return fault.line, fault.field, fault.message


def test_heads_side_by_side_are_split_and_handed_over_as_views_of_that(load_text: Load) -> None:
    case = _loaded(load_text, MERGED)
    assert case.input_shapes == {"query": (2, 4, 3, 6), "key": (2, 2, 5, 6), "value": (2, 2, 5, 7)}
    assert case.memory_layout == dict.fromkeys(("query", "key", "value"), "transposed")
    made = {name: exact.array for name, exact in make_exact_inputs(case).items()}
    whole = np.arange(2.0 * 3 * 24).reshape(2, 3, 24)
    for head in range(4):
        np.testing.assert_array_equal(made["query"][:, head], whole[..., 6 * head : 6 * head + 6])
    keys = np.arange(2.0 * 5 * 14).reshape(2, 5, 14)
    for head in range(2):
        np.testing.assert_array_equal(made["value"][:, head], keys[..., 7 * head : 7 * head + 7])


def test_a_past_and_a_gradient_of_the_output_are_merged_too_and_masks_are_not(load_text: Load) -> None:
    past = "      past_key: {constant: 1, shape: [2, 1, 12]}\n      past_value: {constant: 1, shape: [2, 1, 14]}\n"
    mask = "      mask: {values: [true, true, false, true, true, true]}\n"
    case = _loaded(load_text, MERGED + past + mask)
    assert case.input_shapes["past_value"] == (2, 2, 1, 7)
    assert case.input_shapes["mask"] == (1, 1, 1, 6)
    assert "mask" not in case.memory_layout
    gradient = "      grad_output: {constant: 1, shape: [2, 3, 28]}\n    operation: attention_gradients\n"
    assert _loaded(load_text, MERGED + gradient).input_shapes["grad_output"] == (2, 4, 3, 7)


def test_merged_heads_of_a_document_keep_the_radius_of_what_is_printed(load_text: Load) -> None:
    case = _loaded(
        load_text,
        "    layout: merged\n    options: {heads: 2}\n    inputs:\n"
        '      query: {printed: "1.5 2.25"}\n      key: {printed: "1 2"}\n      value: {printed: "1 2"}\n',
    )
    assert make_exact_inputs(case)["query"].radius.tolist() == [[[[0.05]], [[0.005]]]]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (MERGED.replace("{heads: 4, kv_heads: 2}", "{}"), "layout", "the merged layout needs options.heads"),
        (MERGED.replace("kv_heads: 2", "kv_heads: 4"), "inputs.value", "a width of 14 cannot be split over 4 heads"),
        (MERGED.replace("[2, 3, 24]", "[1, 2, 3, 24]"), "inputs.query", "expected at most 3 axes (B, L, heads*width)"),
        (
            "    layout: merged\n    operation: softmax\n    inputs: {scores: {identity: 2}}\n",
            "layout",
            "softmax has no merged layout; attention and attention_gradients do",
        ),
        (
            MERGED.replace("key: {ascending: [0, 1], shape: [2, 5, 12]}", "key: {constant: 1, shape: [2, 5, 24]}"),
            "inputs.key",
            "to be 6 as in query, got 12; heads are split: 2x5x24 in the file is 2 heads of width 12",
        ),
        (SPLIT + "    layout: joined\n", "layout", "expected 'split' or 'merged', got 'joined'"),
        (
            MERGED + "    memory_layout: {query: strided}\n",
            "memory_layout.query",
            "`layout: merged` says already how this lies in",
        ),
    ],
)
def test_a_merged_layout_that_cannot_be_is_refused(load_text: Load, text: str, field: str, words: str) -> None:
    _, found, message = _fault(load_text, text)
    assert found == field
    assert words in message


PROJECTED = """\
    operation: multi_head_attention
    options: {heads: 2}
    inputs: {query: same, key: same, value: same, query_weight: each, key_weight: all, value_weight: all}
    arrays:
      same: {constant: 1, shape: [3, 6]}
      each: {constant: 1, shape: [2, 6, 3]}
      all: {identity: 6}
"""


def test_an_error_about_a_matrix_for_each_head_names_the_shape_in_the_file(load_text: Load) -> None:
    assert _loaded(load_text, PROJECTED).input_shapes["query_weight"] == (6, 6)
    _, field, message = _fault(load_text, PROJECTED.replace("[2, 6, 3]", "[2, 5, 3]"))
    assert field == "inputs.query_weight"
    assert message.endswith("got 5; heads are merged: 2x5x3 in the file is a matrix for each of 2 heads")


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ('"1 1 1 1 1 1\\n1 1 1 1 1 1\\n1 1 1 1 1 1"', "got 3x6, 2 heads side by side; write a list of texts, one for"),
        ('"1 1 1\\n1 1 1"', "got 2x3"),
    ],
)
def test_an_error_about_the_numbers_of_several_heads_says_that_they_are_split(
    load_text: Load, printed: str, words: str
) -> None:
    message = _fault(load_text, f"{PROJECTED}    expect: [{{stage: context, printed: {printed}}}]\n")[2]
    assert message.startswith("expected numbers of shape 1x2x3x3, which is (B, H, Lq, Dv): heads are split; ")
    assert words in message
    one_head = PROJECTED.replace("heads: 2", "heads: 1").replace("[2, 6, 3]", "[6, 6]")
    message = _fault(
        load_text, f"{one_head}    expect: [{{stage: context, printed: {printed.replace('1 1', '1')}}}]\n"
    )[2]
    assert "heads" not in message


REPEATED = "{sum: [{draw: randn, shape: [2, 1, 3, 6]}, {constant: 0, shape: [2, 4, 3, 6]}]}"


@pytest.mark.parametrize("memory", ["{query: strided, key: transposed}", "{bias: strided}", "{query: broadcast}"])
def test_an_input_of_numbers_may_lie_in_memory_as_it_likes(load_text: Load, memory: str) -> None:
    bias = "      bias: {values: [0, 1, 2, 3, 4]}\n"
    text = SPLIT.replace("{draw: randn, shape: [2, 4, 3, 6]}", REPEATED) + bias + f"    memory_layout: {memory}\n"
    assert _loaded(load_text, text).memory_layout
    assert _loaded(load_text, SPLIT).memory_layout == {}


@pytest.mark.parametrize(
    ("memory", "more", "field", "words"),
    [
        (
            "{query: sideways}",
            "",
            "memory_layout.query",
            "expected 'strided', 'transposed' or 'broadcast', got 'sideways'",
        ),
        ("[query]", "", "memory_layout", "expected a mapping, got ['query']"),
        ("{quer: strided}", "", "memory_layout.quer", "an input of this case that holds numbers: query, key, value"),
        ("{bias: strided}", "", "memory_layout.bias", "an input of this case that holds numbers: query, key, value"),
        (
            "{mask: strided}",
            "      mask: {values: true}\n",
            "memory_layout.mask",
            "that holds numbers: query, key, value",
        ),
        (
            "{key_lengths: strided}",
            "      key_lengths: {values: [1, 2]}\n",
            "memory_layout.key_lengths",
            "that holds numbers",
        ),
        (
            "{query: broadcast}",
            "",
            "memory_layout.query",
            "broadcast needs an axis, other than the last, along which all slices are alike; query of shape 2x4x3x6",
        ),
    ],
)
def test_memory_that_cannot_be_is_refused_at_its_line(
    load_text: Load, memory: str, more: str, field: str, words: str
) -> None:
    line, found, message = _fault(load_text, SPLIT + more + f"    memory_layout: {memory}\n")
    assert (line, found) == (11 + bool(more), field)
    assert words in message


def test_only_an_input_with_heads_can_be_transposed_in_memory(load_text: Load) -> None:
    vectors = "".join(f"      {name}: {{constant: 1, shape: [2, 6]}}\n" for name in ("query", "key", "value"))
    weights = "".join(f"      {name}_weight: {{constant: 1, shape: [6, 6]}}\n" for name in ("query", "key", "value"))
    head = "    operation: multi_head_attention\n    options: {heads: 2}\n    inputs:\n"
    _, field, message = _fault(load_text, f"{head}{vectors}{weights}    memory_layout: {{query: transposed}}\n")
    assert field == "memory_layout.query"
    assert message == "only an input with an axis of heads can be transposed in memory, got 1x2x6"


@pytest.mark.parametrize(
    ("storage", "dtypes"),
    [("bfloat16", ["float64", "float32"]), ("float16", ["float32"]), ("float32", ["float64"])],
)
def test_inputs_are_rounded_to_their_storage_and_then_widened(load_text: Load, storage: str, dtypes: list[str]) -> None:
    fields = f"    storage: {storage}\n    dtypes: [{', '.join(dtypes)}]\n"
    text = SPLIT.replace("{draw: randn, shape: [2, 4, 3, 6]}", "{values: [[1.1, 2, 3, 4, 5, 6]]}")
    case = _loaded(load_text, text.replace("[2, 2, 5, 6]", "[5, 6]") + fields)
    # 1.1 = 1.000110011001100110011001100... in binary, cut to 8, 11 and 24 bits
    kept = {"bfloat16": 1 + 13 / 2**7, "float16": 1 + 102 / 2**10, "float32": 1 + 838861 / 2**23}[storage]
    for dtype in dtypes:
        inputs = convert_inputs(case, make_exact_inputs(case), dtype)
        assert str(inputs.arrays["query"].dtype) == dtype
        assert inputs.arrays["query"][0, 0, 0, 0] == kept
        assert inputs.radius["query"][0, 0, 0, 0] == abs(kept - 1.1)


def test_numbers_of_few_bits_are_not_generic_unless_the_case_says_so(load_text: Load) -> None:
    stored = SPLIT + "    storage: float16\n"
    assert _loaded(load_text, SPLIT).supports_statistics
    assert not _loaded(load_text, stored).supports_statistics
    assert _loaded(load_text, stored + "    supports_statistics: true\n").supports_statistics


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ("storage: float32", "storage", "expected `dtypes` that are all wider than float32, got float32"),
        ("storage: bfloat16\n    dtypes: [float32, float16]", "storage", "all wider than bfloat16, got float16"),
        ("storage: int8", "storage", "expected 'float64', 'float32', 'bfloat16' or 'float16', got 'int8'"),
    ],
)
def test_storage_must_be_narrower_than_every_dtype(load_text: Load, fields: str, field: str, words: str) -> None:
    line, found, message = _fault(load_text, f"{SPLIT}    {fields}\n")
    assert (line, found) == (11, field)
    assert words in message


def test_storage_has_a_range_like_any_dtype(load_text: Load) -> None:
    text = SPLIT.replace("{draw: randn, shape: [2, 4, 3, 6]}", "{constant: 70000, shape: [2, 4, 3, 6]}")
    assert _loaded(load_text, text + "    storage: bfloat16\n").storage == "bfloat16"
    _, field, message = _fault(load_text, text + "    storage: float16\n")
    assert field == "inputs.query.constant"
    assert message.startswith("70000 is beyond the range of float16")


LONG = """\
    inputs:
      query: {draw: randn, shape: [9000, 1]}
      key: {draw: randn, shape: [9000, 1]}
      value: {draw: randn, shape: [9000, 1]}
"""


def test_a_stage_that_is_not_judged_may_be_too_large_to_be_held(load_text: Load) -> None:
    _, field, message = _fault(load_text, LONG)
    assert (field, message) == (
        "inputs",
        "raw_scores would be 1x1x9000x9000; expected at most 67108864 elements, "
        "or `stages: [output]` to judge that alone",
    )
    assert _loaded(load_text, LONG + "    stages: [output]\n").judged_stages == ("output",)
    _, _, message = _fault(load_text, LONG + "    stages: [weights, output]\n")
    assert message == "weights would be 1x1x9000x9000; expected at most 67108864 elements"


def test_only_the_stages_that_are_named_are_judged(load_text: Load) -> None:
    assert _loaded(load_text, SPLIT).judged_stages is None
    assert _loaded(load_text, SPLIT + "    stages: [output, weights]\n").judged_stages == ("output", "weights")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ("stages: [outptu]", "stages[0]", "got 'outptu'"),
        ("stages: []", "stages", "expected at least 1 item, got []"),
        (
            "stages: [output, context]",
            "stages[1]",
            "attention has rotated_query, rotated_key, raw_scores, scores, capped, biased, masked, weights,",
        ),
        ("stages: [grad_query]", "stages[0]", "log_sum_exp, output here, no grad_query"),
    ],
)
def test_a_stage_that_cannot_be_judged_is_refused(load_text: Load, fields: str, field: str, words: str) -> None:
    line, found, message = _fault(load_text, f"{SPLIT}    {fields}\n")
    assert (line, found) == (11, field)
    assert words in message


def test_scores_have_no_weights_though_they_have_their_shape(load_text: Load) -> None:
    scoring = "    operation: scoring\n    inputs: {query: {identity: 2}, key: {identity: 2}}\n    stages: [weights]\n"
    assert _fault(load_text, scoring)[2] == "scoring has raw_scores, scores, capped here, no weights"


def test_without_a_bias_there_is_no_gradient_of_it(load_text: Load) -> None:
    gradients = SPLIT + "      grad_output: {draw: randn, shape: [2, 4, 3, 6]}\n%s    operation: attention_gradients\n"
    bias = "      bias: {draw: randn, shape: [3, 1]}\n"
    case = _loaded(load_text, gradients % bias + "    stages: [grad_bias]\n")
    assert case.stage_shapes["grad_bias"] == case.input_shapes["bias"] == (1, 1, 3, 1)
    _, field, message = _fault(load_text, gradients % "" + "    stages: [grad_bias]\n")
    assert (field, message) == (
        "stages[0]",
        "attention_gradients has grad_query, grad_key, grad_value here, no grad_bias",
    )
