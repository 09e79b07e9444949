"""Whether inputs support statistics, told from how they were drawn, or said by the case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attncheck.reading.case import Case

Load = Callable[[str | bytes], list[Case]]

HEAD = """\
title: Inputs that may support statistics
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 1}}
arrays:
  drawn: {draw: randn, shape: [4, 5]}
  whole: {draw: randint, low: 0, high: 9, shape: [4, 5]}
cases:
  - name: The case at hand
"""
OTHERS = "key: {draw: rand, shape: [4, 5]}, value: {draw: runif, low: 1, high: 2, shape: [4, 3]}"


def _supports_statistics(load_text: Load, query: str, more: str = "", fields: str = "") -> bool:
    [case] = load_text(HEAD + f"    inputs: {{query: {query}, {OTHERS}{more}}}\n{fields}")
    return case.supports_statistics


@pytest.mark.parametrize(
    "query",
    [
        "{draw: randn, shape: [4, 5]}",
        "{draw: randn, times: -0.3, shape: [4, 5]}",
        "drawn",
        "{ref: drawn, rows: [3, 0], times: 2}",
        "{draw: randn, shape: [5, 4], transpose: true}",
        "{draw: runif, low: 3, high: 4, shape: [4, 5], plus: 0}",
    ],
)
def test_what_is_drawn_from_a_continuous_distribution_supports_statistics(load_text: Load, query: str) -> None:
    assert _supports_statistics(load_text, query)


@pytest.mark.parametrize(
    "query",
    [
        "whole",
        "{draw: randint, low: -9, high: 9, shape: [4, 5]}",
        "{draw: runif, low: 0, high: 9, floor: true, shape: [4, 5]}",
        "{draw: randn, times: 0, shape: [4, 5]}",
        "{draw: randn, plus: 100, shape: [4, 5]}",
        "{ref: drawn, rows: [0, 1, 0, 1]}",
        "{ref: drawn, times: 0}",
        "{ref: drawn, plus: 1}",
        "{values: [[0.12, 0.77, -1.3, 0.4, 0.91]]}",
        '{printed: "0.12 0.77 -1.3 0.4 0.91"}',
        "{constant: 0.3, shape: [4, 5]}",
        "{identity: 5}",
        "{ascending: [0, 0.1], shape: [4, 5]}",
        "{geometric: [1, 0.3], shape: [4, 5]}",
        "{concat: [drawn, drawn], axis: 0}",
        "{sum: [drawn, drawn]}",
        "{product: [drawn, drawn]}",
    ],
)
def test_what_is_whole_repeated_built_or_typed_is_not_generic(load_text: Load, query: str) -> None:
    assert not _supports_statistics(load_text, query)


@pytest.mark.parametrize(
    ("mask_or_bias", "supports_statistics"),
    [
        ("mask: {values: [true, false, true, true]}", True),
        ("mask: {draw: randint, low: 0, high: 2, shape: [4, 4]}", True),
        ("bias: {draw: randn, shape: [4, 4]}", True),
        ("bias: {values: [0, -.inf, 0, 0]}", True),
        ("bias: {concat: [{constant: -.inf, shape: [1]}, {constant: 0, shape: [3]}], axis: 0}", True),
        ("bias: {values: [0, -1, 0, 0]}", False),
        ("bias: {values: [0, -.inf, 0, 0], plus: 1}", False),
        ("bias: {identity: 4}", False),
        ("bias: {lowest: [4]}", False),
        ("bias: {concat: [{draw: randn, shape: [1]}, {constant: 0, shape: [3]}], axis: 0}", False),
        ("bias: {concat: [{identity: 4}], axis: 0}", False),
    ],
)
def test_masks_do_not_count_nor_do_biases_that_only_forbid(
    load_text: Load, mask_or_bias: str, supports_statistics: bool
) -> None:
    assert _supports_statistics(load_text, "drawn", f", {mask_or_bias}") is supports_statistics


def test_every_real_input_must_be_drawn(load_text: Load) -> None:
    [case] = load_text(HEAD + "    inputs: {query: drawn, key: drawn, value: {constant: 1, shape: [4, 2]}}\n")
    assert not case.supports_statistics


def test_a_zero_in_the_place_of_a_projection_bias_is_no_mask(load_text: Load) -> None:
    weights = ", ".join(f"{name}_weight: {{draw: randn, shape: [5, 6]}}" for name in ("query", "key", "value"))
    inputs = f"    inputs: {{query: drawn, key: drawn, value: drawn, {weights}%s}}\n    options: {{heads: 2}}\n"
    text = HEAD.replace("attention", "multi_head_attention") + inputs
    assert load_text(text % "")[0].supports_statistics
    assert not load_text(text % ", key_bias: {constant: 0, shape: [6]}")[0].supports_statistics


def test_a_scale_of_zero_makes_every_row_alike(load_text: Load) -> None:
    assert not _supports_statistics(load_text, "drawn", fields="    options: {scale: 0}\n")
    assert _supports_statistics(load_text, "drawn", fields="    options: {scale: 0.5}\n")


@pytest.mark.parametrize("query", ["drawn", "whole"])
@pytest.mark.parametrize("said", [True, False])
def test_a_case_that_says_so_itself_is_believed(load_text: Load, query: str, said: bool) -> None:
    assert _supports_statistics(load_text, query, fields=f"    supports_statistics: {str(said).lower()}\n") is said
