"""Kernels with a fault between two calls are named for what they are; one without is bitwise in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.errors import ExitCode
from attncheck.reports.properties import exit_code_of
from attncheck.results.format import Row

pytestmark = pytest.mark.usefixtures("forked_workers")

Ask = Callable[..., list[Row]]
OF_A_PROMPT = (
    *("repeated", "batch_invariant", "padding", "cached_prefix", "decoding", "heads_permuted", "values_scaled"),
    *("scores_shifted", "layout", "poison_large", "poison_nan", "output_buffer", "inputs_unchanged"),
    *("outputs_independent", "after_other_shapes", "packed", "fresh_process", "threads"),
)
RETURNED = '    return {"output": output.astype(query.dtype)'
FAULTS: dict[str, tuple[str, tuple[str, str]]] = {
    "it is nondeterministic once in 20 calls": (
        "repeated",
        (RETURNED, f"    if len(CALLS) % 20 == 13:\n        output[0, 0, 3, 2] *= 1.001\n{RETURNED}"),
    ),
    "a row depends on the batch": (
        "batch_invariant",
        ("    (batch, heads", "    if len(query) > 2:\n        key = key.astype(np.float16)\n    (batch, heads"),
    ),
    "it keeps state between shapes": (
        "after_other_shapes",
        (
            "            total = weights.sum()\n",
            "            room = ROOM.setdefault('weights', np.zeros(256, query.dtype))\n"
            "            room[:keys] = 0\n"
            "            room[: len(weights)] = weights\n"
            "            total = room.sum()\n",
        ),
    ),
    "it writes its inputs": ("inputs_unchanged", ("    (batch, heads", "    query *= 1.5\n    (batch, heads")),
}


def test_a_kernel_that_computes_row_by_row_is_bitwise_the_same_in_all(ask: Ask) -> None:
    rows = ask(OF_A_PROMPT)
    found = {row.property_name: row.verdict for row in rows if row.verdict not in ("bitwise", "unsupported")}
    assert found.keys() <= {"scores_shifted", "packed"}, found
    assert set(found.values()) <= {"within bounds"}
    assert {row.property_name for row in rows if row.verdict == "bitwise"} >= set(OF_A_PROMPT) - found.keys() - {
        "packed"
    }
    assert exit_code_of(rows) is ExitCode.AGREE


SOUND = {
    "it is nondeterministic once in 20 calls": ["batch_invariant", "poison_nan", "inputs_unchanged"],
    "a row depends on the batch": ["repeated", "poison_nan", "inputs_unchanged", "after_other_shapes"],
    "it keeps state between shapes": ["inputs_unchanged", "poison_nan"],
    "it writes its inputs": [],
}
"""What each fault leaves sound."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_for_what_it_is_and_for_nothing_else(fault: str, ask: Ask) -> None:
    name, change = FAULTS[fault]
    rows = ask([name, *SOUND[fault]], change)
    broken = [row for row in rows if row.verdict == "broken"]
    assert {row.property_name for row in broken} == {name}, rows
    assert exit_code_of(rows) is ExitCode.DISAGREE
    if name == "inputs_unchanged":  # what it wrote into is named with its element
        (row,) = broken
        assert (row.stage, row.index) == ("query", "0,0,0,0")
        assert row.value is not None
        assert row.reference == pytest.approx(row.value * 1.5)
        assert "query[0, 0, 0, 0]" in row.message


READS_MASKED = (
    "            output[place] = (weights[:, None] * value[entry, head][own]).sum(0) / total\n",
    "            full = np.zeros(keys, query.dtype)\n            full[own] = weights / total\n"
    "            output[place] = full @ value[entry, head]\n",
)


@pytest.mark.parametrize(
    ("claim", "number", "outcome", "fails"),
    [
        ("", "np.nan", "nan", False),
        ("within bounds", "np.nan", "nan", True),
        ("bitwise", "np.nan", "nan", True),
        ("", "7", "broken", True),
    ],
)
def test_a_masked_nan_may_give_nan_alone(claim: str, number: str, outcome: str, fails: bool, ask: Ask) -> None:
    before, after = READS_MASKED
    change = before, f"{after}            output[np.isnan(output)] = {number}\n"
    below = f'attention.properties = {{"poison_nan": "{claim}"}}' if claim else ""
    rows = ask(["poison_nan", "poison_large", "repeated"], change, below=below)
    assert {row.verdict for row in rows if row.property_name == "poison_nan" and "in values" in row.variant} == {
        outcome
    }
    assert {row.verdict for row in rows if "in keys" in row.variant or row.property_name != "poison_nan"} == {"bitwise"}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)


OVERWRITTEN = """
inner, KEPT = attention, {}

def attention(query, key, value, *, is_causal=False):
    found = inner(query, key, value, is_causal=is_causal)["output"]
    out = KEPT.setdefault(found.shape, np.empty_like(found))
    out[...] = found
    return out
"""
SHARED = """
def attention(query, key, value, *, is_causal=False):
    return value[:, :, :, :]
"""


def test_an_output_that_the_next_call_overwrites_or_that_is_memory_of_an_input_is_broken(ask: Ask) -> None:
    for below, says in ((OVERWRITTEN, "after the next call"), (SHARED, "memory of the input value")):
        (row,) = ask(["outputs_independent"], below=below)
        assert (row.verdict, says in row.message) == ("broken", True)


def test_an_output_of_which_some_is_what_was_there_before_is_broken(ask: Ask) -> None:
    change = (
        "    output = np.zeros((batch, heads, queries, value.shape[-1]), query.dtype)",
        "    output = np.empty((batch, heads, queries, value.shape[-1]), query.dtype)\n    output *= 0",
    )
    accumulated = ("            output[place] = (", "            output[place] += (")
    rows = ask(["output_buffer"], change, accumulated)
    assert [row for row in rows if row.verdict == "broken"], rows


@pytest.mark.parametrize(("claim", "fails"), [("bitwise", True), ("within bounds", False)])
def test_a_claim_that_does_not_hold_fails(claim: str, fails: bool, ask: Ask) -> None:
    below = f'attention.properties = {{"batch_invariant": "{claim}"}}'
    change = (
        "            weights = np.exp(scores - scores.max())\n",
        "            weights = np.exp(scores - scores.max() - batch / 7)\n",
    )
    rows = ask(["batch_invariant", "repeated"], change, below=below)
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(row.property_name, []).append(row)
    assert {row.verdict for row in by_name["batch_invariant"]} == {"within bounds", "bitwise"}
    assert any(row.fails for row in by_name["batch_invariant"]) is fails
    assert {row.claim for row in by_name["batch_invariant"]} == {claim}
    assert {(row.verdict, row.claim, row.fails) for row in by_name["repeated"]} == {("bitwise", "", False)}
    assert exit_code_of(rows) is (ExitCode.DISAGREE if fails else ExitCode.AGREE)
