"""Functions that are called like libraries call attention, and programs: an honest one is right, a mistaken one is not.

Each function here is written from its library's documentation, without a look at the adapter: its own layout, its own
corner, its own windows and masks. Programs are judged and isolated like functions; their messages are held here.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bundled import bundled
from evaluating import in_worker, own
from here import command_here
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from tables import tables_beside

import attncheck
from attncheck.backends import BACKENDS, numpy_backend
from attncheck.backends.contract import UnsupportedError
from attncheck.backends.families import FAMILIES
from attncheck.common.errors import UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import select_implementations
from attncheck.execution.programs import (
    MAX_HEADER_BYTES,
    WIRE_DTYPES,
    ProtocolError,
    encode_call_request,
    read_description,
    read_stages_or_refusal,
    try_protocol_rules,
)
from attncheck.execution.user_call import contract_functions_of, read_target_declarations, wrap_target
from attncheck.execution.user_code import LoadError, Target, is_user_target, parse_program_command, program_source_file
from attncheck.execution.worker import Computed, Failure, evaluate_on_backend
from attncheck.planning.plan import Plan
from attncheck.reading.inputs import make_problem_of_case
from attncheck.reading.problem import Problem

pytestmark = pytest.mark.usefixtures("forked_workers")

Array = NDArray[Any]


def attend(
    query: Array, key: Array, value: Array, *, allowed: Any = None, added: Array | None = None, **options: Any
) -> tuple[Array, Array, Array]:
    """Return output, weights and log-sum-exp of (B, H, L, D): only how it is called is a library's own."""
    mask = None if allowed is None else np.broadcast_to(allowed, (*query.shape[:3], key.shape[2]))
    options["softcap"] = options.get("softcap") or None
    stages = numpy_backend.attention(query, key, value, mask=mask, bias=added, **options)
    return stages["output"], stages["weights"], stages["log_sum_exp"]


def distance(queries: int, keys: int, *, call_counted_from_end: bool) -> Array:
    """Return how far each key is behind each query."""
    start = keys - queries if call_counted_from_end else 0
    return np.arange(keys)[None, :] - (np.arange(queries)[:, None] + start)


def heads_first(*arrays: Array) -> list[Array]:
    return [each.swapaxes(1, 2) for each in arrays]


def flash_attn(  # type: ignore[no-untyped-def]
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False
):
    q, k, v = heads_first(q, k, v)
    behind = distance(q.shape[2], k.shape[2], call_counted_from_end=True)
    left, right = window_size[0], 0 if causal else window_size[1]
    allowed = (behind >= -left if left >= 0 else True) & (behind <= right if right >= 0 else np.True_)
    output, _, lse = attend(q, k, v, allowed=allowed, scale=softmax_scale, softcap=softcap)
    return (*heads_first(output), lse, None) if return_attn_probs else heads_first(output)[0]


def flash_attn_3(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    softcap=0.0,
    return_attn_probs=False,
):
    numbers = []
    for codes, descale in ((q, q_descale), (k, k_descale), (v, v_descale)):
        if descale is not None:
            assert (descale.shape, descale.dtype) == ((k.shape[0], k.shape[2]), np.float32)
            descale = np.repeat(descale, codes.shape[2] // k.shape[2], 1)[:, None, :, None]
        numbers.append(codes if descale is None else codes.astype(np.float32) * descale)
    return flash_attn(*numbers, 0.0, softmax_scale, causal, window_size, softcap, return_attn_probs)


def xformers(query, key, value, attn_bias=None, p=0.0, scale=None):  # type: ignore[no-untyped-def]
    query, key, value = heads_first(query, key, value)
    if attn_bias is not None and attn_bias.shape != (*query.shape[:3], key.shape[2]):
        raise ValueError("attn_bias has to be expanded")
    return heads_first(attend(query, key, value, added=attn_bias, scale=scale)[0])[0]


def flashinfer(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    custom_mask=None,
    causal=False,
    kv_layout="NHD",
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    return_lse=False,
):
    assert kv_layout == "NHD"
    if scale_k is not None:
        scales = (np.ones(q.shape[1], np.float32) if scale_q is None else scale_q, scale_k, scale_v)
        assert [scale.shape for scale in scales] == [(each.shape[1],) for each in (q, k, v)]
        q, k, v = (each.astype(np.float32) * scale[:, None] for each, scale in zip((q, k, v), scales, strict=True))
    query, key, value = (each.swapaxes(0, 1)[None] for each in (q, k, v))
    behind = distance(query.shape[2], key.shape[2], call_counted_from_end=True)
    allowed = behind <= 0 if causal and custom_mask is None else custom_mask
    if window_left >= 0:
        allowed = (behind >= -window_left) & (True if allowed is None else allowed)
    output, _, lse = attend(query, key, value, allowed=allowed, scale=sm_scale, softcap=logits_soft_cap)
    output, in_base_two = output[0].swapaxes(0, 1), (lse.astype(np.float64)[0].T / np.log(2)).astype(q.dtype)
    return (output, in_base_two) if return_lse else output


def onnx(q, k, v, attn_mask=None, *, is_causal=0, scale=None, softcap=0.0, nonpad_kv_seqlen=None):  # type: ignore[no-untyped-def]
    allowed = np.ones((1, 1, q.shape[2], k.shape[2]), bool)
    if is_causal:
        allowed = allowed & (distance(q.shape[2], k.shape[2], call_counted_from_end=False) <= 0)
    if nonpad_kv_seqlen is not None:
        allowed = allowed & (np.arange(k.shape[2]) < nonpad_kv_seqlen[:, None, None, None])
    added = None
    if attn_mask is not None:
        allowed, added = (allowed & attn_mask, None) if attn_mask.dtype == bool else (allowed, attn_mask)
    return attend(q, k, v, allowed=allowed, added=added, scale=scale, softcap=softcap)[0]


def hf(  # type: ignore[no-untyped-def]
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs
):
    groups = module.num_key_value_groups
    key, value = np.repeat(key, groups, 1), np.repeat(value, groups, 1)
    found = attend(query, key, value, added=attention_mask, scale=scaling, softcap=softcap, sinks=s_aux)
    return heads_first(found[0])[0], found[1]


def bshd(  # type: ignore[no-untyped-def]
    query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None, window=None, sinks=None
):
    query, key, value = heads_first(query, key, value)
    behind = distance(query.shape[2], key.shape[2], call_counted_from_end=False)
    allowed = behind <= 0 if is_causal else np.True_
    for edge, inside in zip(window or (None, None), (lambda n: behind >= -n, lambda n: behind <= n), strict=True):
        allowed = allowed if edge is None else allowed & inside(edge)
    allowed = allowed if mask is None else allowed & mask
    found = attend(query, key, value, allowed=allowed, added=bias, scale=scale, softcap=softcap, sinks=sinks)
    return heads_first(found[0])[0]


def key_mask(query, key, value, *, mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    allowed = distance(query.shape[2], key.shape[2], call_counted_from_end=False) <= 0 if is_causal else np.True_
    if mask is not None:
        assert mask.shape == (query.shape[0], key.shape[2])
        allowed = allowed & mask[:, np.newaxis, np.newaxis]
    return attend(query, key, value, allowed=allowed, scale=scale)[0]


HONEST: Mapping[str, tuple[Callable[..., Any], int]] = {
    "flash_attn": (flash_attn, 34),
    "xformers": (xformers, 85),
    "flashinfer": (flashinfer, 60),
    "onnx": (onnx, 90),
    "hf": (hf, 90),
    "bshd": (bshd, 90),
    "key_mask": (key_mask, 30),
}
"""A function of each family, and how many of the answers it computes at least.

Those of Keras, MLX and sdpa are libraries and modes of the table: their published verdicts hold their families.
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Problem, Computed]]:
    """Return what NumPy answers in every second bundled case of attention without a convention and NaN."""
    cases = [case for case in bundled().cases if case.operation == "attention" and not case.allow_nonfinite]
    plan, found = Plan.of([case for case in cases if "empty_rows" not in case.options][::2], ["float64"]), {}
    for unit in plan.units:
        problem = make_problem_of_case(plan.case(unit), plan.inputs(unit)).as_call()
        outcome = evaluate_on_backend(numpy_backend, problem)
        assert isinstance(outcome, Computed)
        found[plan.case(unit).id] = problem, outcome
    return found


def outcomes_of(
    function: Callable[..., Any], family: str, answers: Mapping[str, tuple[Problem, Computed]]
) -> dict[str, bool]:
    """Return whether a function, called as a worker calls it, does as NumPy does in each case that it computes."""
    backend, found = wrap_target(function, family, BACKENDS["numpy"], signature=family), {}
    for name, (problem, expected) in answers.items():
        outcome = evaluate_on_backend(backend, problem)  # type: ignore[arg-type] # it has those functions that the target has
        if isinstance(outcome, Computed):
            found[name] = all(_is_close(array, expected, stage) for stage, array in outcome.stages.items())
        else:
            assert outcome.verdict == "unsupported", outcome
    return found


def _is_close(array: Array, expected: Computed, stage: str) -> bool:
    """Compare all rows but those without a key: what they give is not written."""
    if stage not in expected.stages:
        return True
    exact = expected.stages[stage]
    if array.shape != exact.shape:
        return False
    rows = np.isfinite(expected.stages.get("log_sum_exp", np.zeros(exact.shape[:3])))
    compared = np.isfinite(exact) & rows.reshape(*rows.shape, *[1] * (exact.ndim - 3))
    rtol = 1e-9 if exact.dtype == np.float64 else 1e-6
    return bool(np.allclose(array[compared], exact[compared], rtol=rtol, atol=1e-12))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_function_is_right(name: str, answers: Mapping[str, tuple[Problem, Computed]]) -> None:
    assert FAMILIES.keys() - HONEST.keys() == {"keras", "mlx", "sdpa"}
    function, least = HONEST[name]
    found = outcomes_of(function, name, answers)
    assert [case for case, is_right in found.items() if not is_right] == []
    assert len(found) >= least


@pytest.mark.parametrize(
    ("function", "scales", "lacks"),
    [
        (flash_attn_3, {"key_scale": (1, 1, 1), "value_scale": (2, 3, 1)}, ""),
        (flash_attn_3, {"query_scale": (1, 1, 1), "key_scale": (2, 1, 1), "value_scale": (1, 3, 1)}, ""),
        (
            flash_attn_3,
            {"query_scale": (1, 6, 1), "key_scale": (1, 1, 1), "value_scale": (1, 1, 1)},
            "scales of tokens",
        ),
        (flash_attn_3, {"key_scale": (2, 3, 9), "value_scale": (1, 1, 1)}, "scales of tokens"),
        (flash_attn_3, {"key_scale": (1, 1, 1), "value_scale": (1, 1, 1), "key_zero": (1, 1, 1)}, "key_zero"),
        (flashinfer, {"query_scale": (2, 6, 1), "key_scale": (2, 3, 1), "value_scale": (1, 3, 1)}, ""),
        (flashinfer, {"key_scale": (1, 1, 1), "value_scale": (2, 1, 1)}, ""),
        (flashinfer, {"query_scale": (1, 6, 9), "key_scale": (1, 1, 1), "value_scale": (1, 1, 1)}, "scales of tokens"),
    ],
)
def test_codes_are_handed_over_with_a_scale_of_each_head(
    function: Callable[..., Any], scales: Mapping[str, Any], lacks: str
) -> None:
    random = np.random.default_rng(5)
    shapes = {"query": (2, 6, 9, 8), "key": (2, 3, 9, 8), "value": (2, 3, 9, 4)}
    inputs: dict[str, Array] = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("key", "value", *["query"] * ("query_scale" in scales)):
        inputs[name] = inputs[name].astype(ml_dtypes.float8_e4m3fn)
    inputs |= {name: random.uniform(0.5, 2, size=shape).astype(np.float32) for name, shape in scales.items()}
    problem = Problem("quantized_attention", {"is_causal": True, "softcap": 2.0}, inputs)
    family = "flashinfer" if function is flashinfer else "flash_attn"
    outcome = evaluate_on_backend(wrap_target(function, "", BACKENDS["numpy"], signature=family), problem)
    if lacks:
        assert isinstance(outcome, Failure)
        assert (outcome.verdict, outcome.lacks) == ("unsupported", (lacks,))
        return
    expected = evaluate_on_backend(numpy_backend, problem)
    assert isinstance(outcome, Computed)
    assert isinstance(expected, Computed)
    assert all(_is_close(array, expected, stage) for stage, array in outcome.stages.items())


def failures_of(result: attncheck.CheckResult) -> list[Any]:
    """Return all but those about NaN and infinity: what gives them, and where they go, no library writes."""
    return [row for row in result.failures if row.verdict != "nonfinite" and "convention" not in row.message]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_second_array_of_a_number_for_each_row_is_the_log_sum_exp_and_no_weights(shift: int) -> None:
    def flex(module: Any, query: Array, key: Array, value: Array, attention_mask: Array | None, scaling: float) -> Any:
        groups = module.num_key_value_groups
        key, value = np.repeat(key, groups, 1), np.repeat(value, groups, 1)
        found = attend(query, key, value, added=attention_mask, scale=scaling)
        return heads_first(found[0])[0], found[2] + shift

    found = attncheck.check(flex, cases=["layouts/*"], signature="hf", dtypes=["float64"])
    assert found.judged > 0
    assert bool(failures_of(found)) == bool(shift)


def flash_attn_varlen(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), return_attn_probs=False,
):  # fmt: skip
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == np.int32
    assert max_seqlen_q == np.diff(cu_seqlens_q).max(initial=0)
    assert max_seqlen_k == np.diff(cu_seqlens_k).max(initial=0)
    output, lse = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype), np.full((q.shape[1], len(q)), -np.inf, q.dtype)
    for first, last, begin, end in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        own = flash_attn(q[None, first:last], k[None, begin:end], v[None, begin:end], 0.0, softmax_scale, causal,
                         window_size, 0.0, True)  # fmt: skip
        output[first:last], lse[:, first:last] = own[0][0], own[1][0]
    return output, lse, None


def flash_attn_paged(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    q_descale=None, k_descale=None, v_descale=None,
):  # fmt: skip
    rows = []
    for entry, length in enumerate(cache_seqlens):
        own = slice(entry, entry + 1)
        k, v = (each[block_table[entry]].reshape(-1, *each.shape[2:])[None, :length] for each in (k_cache, v_cache))
        descales = [None if each is None else each[own] for each in (q_descale, k_descale, v_descale)]
        rows.append(flash_attn_3(q[own], k, v, softmax_scale, causal, *descales, window_size))
    return np.concatenate(rows)


def flash_attn_varlen_over_pages(  # type: ignore[no-untyped-def]
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, block_table=None,
):  # fmt: skip
    """As vLLM's fork of flash-attn has it, which refuses both kinds of lengths together for pages."""
    rows = [np.zeros((0, q.shape[1], v.shape[-1]), q.dtype)]
    assert max_seqlen_q == np.diff(cu_seqlens_q).max(initial=0)
    if block_table is None:
        places = [np.arange(*ends) for ends in itertools.pairwise(cu_seqlens_k)]
        seqused_k = [len(place) for place in places] if seqused_k is None else seqused_k
    else:
        assert (cu_seqlens_k is None, max_seqlen_k) == (True, seqused_k.max(initial=0))
        places = [np.arange(k.shape[0] * k.shape[1]).reshape(k.shape[:2])[pages].ravel() for pages in block_table]
        k, v = (cache.reshape(-1, *cache.shape[2:]) for cache in (k, v))
    for first, last, place, length in zip(cu_seqlens_q, cu_seqlens_q[1:], places, seqused_k, strict=False):
        key, value = (tokens[place[:length]][None] for tokens in (k, v))
        rows.append(flash_attn(q[None, first:last], key, value, 0.0, softmax_scale, causal, window_size, softcap)[0])
    return np.concatenate(rows)


def unified_attention(  # type: ignore[no-untyped-def]
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale,
):  # fmt: skip
    """As vLLM's kernel has it (vllm#16828): it writes its result into an argument, and has no default."""
    assert softmax_scale is not None
    assert softcap is not None
    out[...] = flash_attn_varlen_over_pages(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, None, seqused_k, softmax_scale, causal, window_size,
        softcap, block_table,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (flash_attn_varlen, {"packed_attention"}),
        (flash_attn_paged, {"paged_attention"}),
        (flash_attn_varlen_over_pages, {"packed_attention", "ragged_paged_attention"}),
        (unified_attention, {"ragged_paged_attention"}),
    ],
    ids=["varlen", "paged", "varlen over pages", "unified"],
)
def test_sequences_and_pages_of_flash_attn(function: Callable[..., Any], operations: set[str]) -> None:
    cases = ["packed", "paged", "ragged", "designs/sequences", "block_formats/pages-of-codes-*"]
    found = attncheck.check(function, cases=cases, signature="flash_attn", dtypes=["float64", "float32"])
    assert not failures_of(found)
    assert found.judged >= 5
    judged = found.frames.results.query("verdict == 'agree'")["case"]
    assert judged.str.startswith("block_formats/").any() == (function is flash_attn_paged)
    assert set(read_target_declarations(function, "f", "flash_attn")["parameters"]) == operations


def test_a_function_that_requires_a_table_of_pages_is_asked_for_no_packed_keys() -> None:
    def over_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table):  # type: ignore[no-untyped-def]
        return q

    assert set(read_target_declarations(over_pages, "f", "flash_attn")["parameters"]) == {"ragged_paged_attention"}


def contract_attention(function: Callable[..., Any], family: str) -> Callable[..., Any]:
    """Return the contract's attention by a function that is called as its family is."""
    return contract_functions_of(function, "attention", family, BACKENDS["numpy"].load())["attention"]


def test_arrays_lie_as_the_library_has_them_and_nothing_is_given_but_what_is_asked_or_required() -> None:
    rng, given = np.random.default_rng(1), list[Any]()
    problem = [rng.normal(size=(2, heads, length, 4)) for heads, length in ((4, 5), (2, 7), (2, 7))]

    def flash(q, k, v, causal=False):  # type: ignore[no-untyped-def]
        given.extend((q, k, v))
        return q

    def requiring(query, key, value, scale, is_causal, attn_mask, dropout_p):  # type: ignore[no-untyped-def]
        given.extend((scale, is_causal, attn_mask, dropout_p))
        return query

    def changing(q, k, v, causal=False):  # type: ignore[no-untyped-def]
        q *= 2
        return q

    contract_attention(flash, "flash_attn")(*problem)
    assert [array.shape for array in given] == [(2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 4)]
    assert all(array.flags.c_contiguous for array in given)
    given.clear()
    contract_attention(requiring, "sdpa")(*problem)
    assert given == [0.5, False, None, 0.0]
    with pytest.raises(Exception, match="changed its input query"):
        contract_attention(changing, "flash_attn")(*problem)
    with pytest.raises(UnsupportedError, match="takes no mask"):
        contract_attention(flash_attn, "flash_attn")(*problem, mask=np.arange(7).reshape(1, 1, 1, 7) % 3 != 1)


def test_what_cannot_be_called_so_and_an_unknown_family_are_refused() -> None:
    def f(q, k, v, causal=False, alibi_slopes=None):  # type: ignore[no-untyped-def]
        return q

    refused: tuple[tuple[Callable[..., Any], str, str], ...] = (
        (lambda q, k, v, alibi: q, "flash_attn", r"it requires alibi; expected f\(q, k, v"),
        (lambda q, k: q, "sdpa", "does not take these inputs by position"),
        (lambda query, key, value: query, "hf", r"does not take these inputs by position; expected f\(module"),
    )
    for function, family, message in refused:
        with pytest.raises(LoadError, match=message):
            contract_attention(function, family)
    f.signature = "flash_attn"  # type: ignore[attr-defined]
    declared = read_target_declarations(f, "f")
    assert (declared["signature"], declared["hints"]) == ("flash_attn", ["attncheck never passes its alibi_slopes"])
    f.signature = "flash"  # type: ignore[attr-defined]
    unknown = "unknown signature 'flash'; did you mean flashinfer or flash_attn"
    with pytest.raises(LoadError, match=unknown):
        read_target_declarations(f, "f")
    with pytest.raises(attncheck.UsageError, match=unknown):
        select_implementations(None, ["numpy"], signature="flash")
    with pytest.raises(LoadError, match="expected a function"):
        read_target_declarations(SimpleNamespace(attention=f), "f", "sdpa")


TABLES = tables_beside(__file__)


ROOT = Path(__file__).parents[3]

PROGRAMS = ROOT / "examples" / "programs"

PROGRAM = (
    (Path(__file__).parent / "program.py")
    .read_text(encoding="utf-8")
    .replace("import json", "import json, os, signal, time", 1)
)

CASES = [f"attention/{name}*" for name in ("every-dimension-is", "a-causal-row-sees-its", "a-bias-per-head-a-mask")]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the program with a line of its own before it answers, or in place of another; return the command."""

    def written(line: str = "pass", hook: str = "pass  # HOOK") -> str:
        path = tmp_path / "kernel.txt"
        path.write_text(PROGRAM.replace(hook, line), encoding="utf-8")
        return f"{sys.executable} {path}"

    return written


def check(command: str, output: Path, *words: str) -> tuple[int, str]:
    """Check cases of attention on a program; return the exit code and what is printed."""
    given = ["check", *(words or CASES), "-i", command, "--no-report", "-o", output, "--no-cache"]
    return command_here(given)[:2]


def test_a_program_is_named_by_its_path_or_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "attention"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    unfit = r"\./attention cannot be executed; if it is a program, chmod \+x \./attention"
    with pytest.raises(UsageError, match=unfit):
        parse_program_command("./attention")
    program.chmod(0o755)
    assert parse_program_command("./attention --fast") == (str(program), "--fast")
    assert program_source_file(parse_program_command("./attention")) == program
    python, script = Path(sys.executable).name, tmp_path / "kernel.R"
    script.write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    words = parse_program_command(f"{python} kernel.R")
    assert words == (shutil.which(python), "kernel.R")
    assert program_source_file(words) == script
    assert Target.parse(f"{python} kernel.R").name == "kernel"
    with pytest.raises(UsageError, match=r"\./nothing: no file \./nothing; expected a program"):
        is_user_target("./nothing")
    for name in ("torch.sdpa", "torch.*", "all", "kernel.py:attention", "./kernel.py:attention", "a:f", "two words"):
        assert parse_program_command(name) == ()


def test_a_program_is_judged_as_a_function_is(write: Write, tmp_path: Path) -> None:
    code, out = check(write(), tmp_path / "run")
    assert code == 0
    assert "mine" not in out.partition("kernel.program 7.1")[0], "its version is its own"
    assert "kernel.program 7.1" in out
    assert "unsupported: bias 1, mask 1" in out
    code, out = check(write("output = output * query.dtype.type(1.001)"), tmp_path / "run", CASES[0])
    assert (code, "numeric" in out) == (1, True)


def call(heads: int) -> Problem:
    arrays = np.random.default_rng(1).normal(size=(3, 1, heads, 4, 5)).astype(np.float32)
    return Problem("attention", {}, dict(zip(("query", "key", "value"), arrays, strict=True)))


def test_what_a_program_does_is_the_outcome_of_that_call_alone(write: Write, tmp_path: Path) -> None:
    does = {"time.sleep(60)": "timeout: not done after 8 s; the worker was stopped", **TABLES["calls"]}
    lines = "\n    ".join(f"if query.shape[1] == {heads}: {line}" for heads, line in enumerate(does, 11))
    problems = [call(heads) for number in range(len(does)) for heads in (2, 11 + number)] + [call(2)]
    outcomes = in_worker(own(write(lines)), problems, tmp_path, Limits(case_seconds=8.0))
    for outcome in outcomes[::2]:
        assert isinstance(outcome, Computed), outcome
        np.testing.assert_array_equal(outcome.stages["output"], outcomes[0].stages["output"])  # type: ignore[union-attr]
    for outcome, says in zip(outcomes[1::2], does.values(), strict=True):
        assert isinstance(outcome, Failure)
        assert says in f"{outcome.verdict}: {outcome.message}"


def test_a_program_uses_the_scale_of_a_request_whose_heads_have_no_elements(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    example = page.partition("```python\n# program.py\n")[2].partition("```")[0]
    query, value = np.zeros((1, 2, 3, 0)), np.ones((1, 2, 3, 4))
    problem = Problem("attention", {"scale": 0.5}, {"query": query, "key": query, "value": value})
    for name, text in {"example.txt": example, "program.txt": PROGRAM}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        [outcome] = in_worker(own(f"{sys.executable} {tmp_path / name}"), [problem], tmp_path)
        assert isinstance(outcome, Computed), outcome
        np.testing.assert_allclose(outcome.stages["output"], 1.0)


@pytest.mark.parametrize(("line", "rule", "says"), TABLES["broken_rules"])
def test_a_broken_rule_says_what_is_malformed(write: Write, line: str, rule: str, says: str) -> None:
    seconds = 4.0 if "sleep" in line else 60.0
    wrong = (each for each in try_protocol_rules(parse_program_command(write(line)), seconds=seconds) if each.problem)
    assert any(each.rule.startswith(rule) and says in each.problem for each in wrong)


@pytest.mark.parametrize("language", ["C", "C, blocked", "R"])
def test_the_examples_are_right(language: str, tmp_path: Path) -> None:
    tool, flags = {"C": ("cc", []), "C, blocked": ("cc", ["-DBLOCK=16"]), "R": ("Rscript", [])}[language]
    if (found := shutil.which(tool)) is None:
        pytest.skip(f"there is no {tool}")
    command = f"Rscript {PROGRAMS / 'attention.R'}"
    if tool == "cc":
        command = str(tmp_path / "attention")
        subprocess.run([found, "-O2", *flags, "-o", command, PROGRAMS / "attention.c", "-lm"], check=True)
    assert [rule for rule in try_protocol_rules(parse_program_command(command)) if rule.problem] == []
    least = "5" if tool == "Rscript" else "10"
    assert check(command, tmp_path / "run", "attention", "--min-judged", least)[0] == 0


# Messages

DESCRIBED = {"attncheck": 1, "functions": {"attention": ["mask", "scale"]}}


def line(header: Any) -> bytes:
    return json.dumps(header).encode() + b"\n"


@given(st.data(), st.sampled_from(sorted(WIRE_DTYPES)), array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
def test_what_is_sent_as_an_array_is_read_as_a_stage(data: Any, dtype: str, shape: tuple[int, ...]) -> None:
    kind = WIRE_DTYPES[dtype]
    raw = data.draw(arrays(np.uint8, (*shape, kind.itemsize)))
    array = (raw % 2)[..., 0].astype(bool) if dtype == "bool" else raw.view(kind)[..., 0]
    payload = b"".join(encode_call_request("attention", {"output": array}, {})).partition(b"\n")[2]
    stage = {"name": "output", "dtype": dtype, "shape": list(shape)}
    found = read_stages_or_refusal(BytesIO(line({"stages": [stage]}) + payload))
    assert isinstance(found, dict)
    assert (found["output"].dtype, found["output"].shape) == (array.dtype, array.shape)
    assert found["output"].tobytes() == array.tobytes()


def test_an_answer_or_description_that_is_none_says_what_was_expected() -> None:
    endless = ["x" * (MAX_HEADER_BYTES + 9), f"no line end in its first {MAX_HEADER_BYTES} bytes"]
    for answer, says in [*TABLES["answers"], endless]:
        with pytest.raises(ProtocolError, match=says):
            read_stages_or_refusal(BytesIO(answer.encode("latin-1")))
    for changed, says in TABLES["descriptions"]:
        with pytest.raises(ProtocolError, match=says):
            read_description(BytesIO(line({**DESCRIBED, **changed})))
