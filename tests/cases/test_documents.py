"""The transcribed documents: every printed number as in the source, every step covered, and all of them hold.

``published/`` holds what the documents print, copied from them character by character: a line with what was printed,
then the numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from attncheck.reading import array_kinds
from attncheck.reading.case import Expected
from attncheck.reading.inputs import make_exact_inputs
from attncheck.reading.selection import select_cases

PUBLISHED = Path(__file__).with_name("published")
CASES = {case.id: case for case in select_cases(["documents"]).cases}
NUMBER = re.compile(r"-?inf|(?<![A-Za-z])-?\d+\.?\d*(?:e[+-]?\d+)?")

VIGNETTE = "documents/base_r_vignette/four-words-attend-to-each-other"
NOTEBOOK = "documents/masked_self_attention_notebook/four-words-attend-to-themselves-and-to-earlier-words"
NOTEBOOK_UNMASKED = "documents/masked_self_attention_notebook/the-call-as-the-notebook-writes-it-with-mask-none"
CHAPTER_FIRST = "documents/numpy_scipy_chapter/the-first-word-attends-to-all-four"
CHAPTER_ALL = "documents/numpy_scipy_chapter/all-four-words-attend-to-each-other"
SINGLE_SCORE = "documents/attention_scoring_post/a-single-annotation-is-scored"
ALL_SCORES = "documents/attention_scoring_post/all-four-annotations-are-scored-and-make-one-context-vector"
ONE_HEAD = "documents/multi_head_post/token-1-attends-to-five-tokens-with-one-head"
ONNX_SMALL = "documents/onnx_softmax/minus-one-zero-and-one"
ONNX_LARGE = "documents/onnx_softmax/small-numbers-and-numbers-of-ten-thousand-weigh-the-same"
FOUR_HEADS = "documents/multi_head_post/five-tokens-attend-to-each-other-with-four-heads-and-an-output-projection"

CHAPTER_3 = "documents/llms_from_scratch_chapter"
LINEAR_LAYERS = f"{CHAPTER_3}/six-words-attend-to-each-other-through-linear-layers"
LINEAR_CAUSAL = f"{CHAPTER_3}/six-words-attend-to-themselves-and-to-earlier-ones-through-linear-layers"
LINEAR_HEADS = f"{CHAPTER_3}/two-heads-with-a-linear-layer-each-are-put-side-by-side"
LINEAR_SHARED = f"{CHAPTER_3}/two-heads-share-linear-layers-and-an-output-projection"


def published(document: str) -> list[tuple[str, list[str]]]:
    """What a document prints, in its order: the name under which it does, and the numbers as texts."""
    blocks = (PUBLISHED / f"{document}.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return [_block(block.splitlines()) for block in blocks]


def _block(lines: list[str]) -> tuple[str, list[str]]:
    if lines[0].startswith("print("):  # R, which labels columns and rows: "#> [,1]" and "#> [1,] 6 4 10 5"
        rows = [line.removeprefix("#> ").partition("] ")[2] for line in lines[2:]]
        return lines[0].removeprefix("print(").removesuffix(")"), " ".join(rows).split()
    if len(lines) == 1:  # a literal: annotation = [3,12,45] #e.g. Encoder hidden state
        name, _, literal = lines[0].partition(" = ")
        return name, NUMBER.findall(literal.partition("#")[0])
    return lines[0], NUMBER.findall(" ".join(lines[1:]))


def texts(expected: Expected) -> list[str]:
    """The numbers of an expectation as they stand in the file, in the order of the document."""
    assert expected.numbers is not None
    numbers = expected.numbers.transposed() if expected.transpose else expected.numbers
    return [str(text) for text in numbers.text.ravel()]


def printed_by(case_id: str, called: str) -> list[str]:
    (found,) = [own for own in CASES[case_id].expected if own.called == called and own.basis == "printed"]
    return texts(found)


# Every printed number, token by token.

PRINTED = [
    ("base_r_vignette", 1, "scores", VIGNETTE, "scores", 16),
    ("base_r_vignette", 2, "maxs", VIGNETTE, "maxs", 4),
    ("base_r_vignette", 3, "weights", VIGNETTE, "weights", 16),
    ("base_r_vignette", 4, "attention", VIGNETTE, "attention", 12),
    ("numpy_scipy_chapter", 0, "attention_1", CHAPTER_FIRST, "attention_1", 3),
    ("numpy_scipy_chapter", 1, "attention", CHAPTER_ALL, "attention", 12),
    ("onnx_softmax", 1, "y", ONNX_SMALL, "y", 3),
    ("onnx_softmax", 3, "y", ONNX_LARGE, "y", 8),
    ("masked_self_attention_notebook", 3, "q @ k.T", NOTEBOOK, "q @ k.T", 16),
    ("masked_self_attention_notebook", 4, "scaled", NOTEBOOK, "scaled", 16),
    ("masked_self_attention_notebook", 7, "scaled + mask", NOTEBOOK, "scaled + mask", 16),
    ("masked_self_attention_notebook", 8, "values", NOTEBOOK, "values", 32),
    ("masked_self_attention_notebook", 8, "values", NOTEBOOK_UNMASKED, "values", 32),
    ("masked_self_attention_notebook", 9, "attention", NOTEBOOK, "attention", 16),
    ("masked_self_attention_notebook", 9, "attention", NOTEBOOK_UNMASKED, "attention", 16),
    ("llms_from_scratch_chapter", 1, "sa_v2(inputs)", LINEAR_LAYERS, "sa_v2(inputs)", 12),
    ("llms_from_scratch_chapter", 2, "attn_weights", LINEAR_LAYERS, "attn_weights", 36),
    ("llms_from_scratch_chapter", 3, "masked_simple_norm", LINEAR_CAUSAL, "masked_simple_norm", 36),
    ("llms_from_scratch_chapter", 4, "context_vecs", LINEAR_HEADS, "context_vecs", 48),
    ("llms_from_scratch_chapter", 5, "context_vecs", LINEAR_SHARED, "context_vecs", 24),
    (
        "attention_scoring_post",
        2,
        "single_dot_attention_score(dec_hidden_state, annotation)",
        SINGLE_SCORE,
        "single_dot_attention_score(dec_hidden_state, annotation)",
        1,
    ),
]


INPUTS = [
    ("masked_self_attention_notebook", NOTEBOOK, "q", 0, 32),
    ("masked_self_attention_notebook", NOTEBOOK, "k", 1, 32),
    ("masked_self_attention_notebook", NOTEBOOK, "v", 2, 32),
    ("masked_self_attention_notebook", NOTEBOOK, "mask", 6, 16),
    ("llms_from_scratch_chapter", LINEAR_LAYERS, "inputs", 0, 18),
]


LITERALS = [
    ("onnx_softmax", 0, ONNX_SMALL, "x"),
    ("onnx_softmax", 2, ONNX_LARGE, "x"),
    ("base_r_vignette", 0, VIGNETTE, "words"),
    ("attention_scoring_post", 0, SINGLE_SCORE, "dec_hidden_state"),
    ("attention_scoring_post", 1, SINGLE_SCORE, "annotation"),
    ("attention_scoring_post", 3, ALL_SCORES, "annotations"),
]


def test_every_printed_number_and_input_is_transcribed_digit_by_digit() -> None:
    for document, place, name, case_id, called, count in PRINTED:
        source_name, source = published(document)[place]
        assert (source_name, len(source)) == (name, count)
        assert printed_by(case_id, called) == source, (document, place)
    for document, case_id, name, place, count in INPUTS:
        source_name, source = published(document)[place]
        array = CASES[case_id].arrays[name]
        assert isinstance(array, array_kinds.PrintedInput)
        assert (source_name, len(source)) == (name, count)
        assert NUMBER.findall(str(array.printed)) == source, (document, place)
    for document, place, case_id, name in LITERALS:
        source_name, source = published(document)[place]
        array = CASES[case_id].arrays[name]
        assert isinstance(array, array_kinds.Values)
        assert source_name == name
        # The post transposes what it writes, so that as written its rows are the file's.
        assert np.array(array.values, dtype=np.float64).ravel().tolist() == [float(text) for text in source]
    # The notebook's first mask is the transcribed one before zeros became minus infinity.
    first, second = (published("masked_self_attention_notebook")[place] for place in (5, 6))
    assert first[0] == second[0] == "mask"
    assert [{"1.": "0.", "0.": "-inf"}[text] for text in first[1]] == second[1]
    assert "0.8429010" in printed_by(VIGNETTE, "weights")  # zeros that R prints at the end are kept


def test_no_block_that_a_document_prints_is_left_out_and_none_is_called_printed_that_is_not() -> None:
    covered = {(document, place) for document, place, *_ in (*PRINTED, *LITERALS)}
    covered |= {(document, place) for document, _, _, place, _ in INPUTS}
    covered |= {("masked_self_attention_notebook", 5)}  # the mask before it became one of minus infinity
    files = sorted(PUBLISHED.glob("*.txt"))
    assert covered == {(path.stem, place) for path in files for place in range(len(published(path.stem)))}
    assert {(case_id, called) for *_, case_id, called, _ in PRINTED} == {
        (case.id, own.called) for case in CASES.values() for own in case.expected if own.basis == "printed"
    }


# Every step.

STEPS = {
    ONNX_SMALL: ["y"],
    ONNX_LARGE: ["y"],
    VIGNETTE: ["Q", "K", "V", "scores", "maxs", "weights", "attention"],
    CHAPTER_FIRST: ["query_1", "scores_1", "weights_1", "attention_1"],
    CHAPTER_ALL: ["Q", "K", "V", "scores", "weights", "attention"],
    NOTEBOOK: ["q @ k.T", "scaled", "scaled + mask", "attention", "values"],
    NOTEBOOK_UNMASKED: ["attention", "values"],
    SINGLE_SCORE: ["single_dot_attention_score(dec_hidden_state, annotation)"],
    ALL_SCORES: ["attention_weights_raw", "attention_weights", "applied_attention", "attention_vector"],
    ONE_HEAD: ["query_1", "keys", "values", "a1", "z1"],
    LINEAR_LAYERS: ["queries", "keys", "values", "attn_scores", "attn_weights", "sa_v2(inputs)"],
    LINEAR_CAUSAL: ["masked_simple_norm"],
    LINEAR_HEADS: ["context_vecs"],
    LINEAR_SHARED: ["context_vec", "context_vecs"],
    FOUR_HEADS: ["queries", "keys", "values", "scores", "attention_weights", "head_outputs", "multihead_output"],
}


def test_every_step_that_a_document_computes_is_covered_under_its_own_name() -> None:
    assert all(case.is_document for case in CASES.values())
    assert {case.id: list(dict.fromkeys(own.called for own in case.expected)) for case in CASES.values()} == STEPS
    assert {case.id for case in CASES.values() if any(own.erratum for own in case.expected)} == {NOTEBOOK_UNMASKED}


# Weights drawn as the documents draw them: small integers, worked out from what the documents print.


def test_the_scores_that_the_vignette_prints_are_those_of_its_drawn_weights() -> None:
    exact = {name: own.array for name, own in make_exact_inputs(CASES[VIGNETTE]).items()}
    query, key = exact["query"] @ exact["query_weight"], exact["key"] @ exact["key_weight"]
    scores = (query @ np.swapaxes(key, -1, -2)).ravel()
    assert scores.tolist() == [float(text) for text in published("base_r_vignette")[1][1]]


def test_the_torch_documents_draw_the_embedding_first_and_again_for_each_part() -> None:
    one, four = make_exact_inputs(CASES[ONE_HEAD]), make_exact_inputs(CASES[FOUR_HEADS])
    np.testing.assert_array_equal(one["key"].array, four["key"].array)
    np.testing.assert_array_equal(one["query"].array[0, 0], four["query"].array[0, 0])


# All of it holds.
