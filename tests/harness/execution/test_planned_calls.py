"""Objects that plan a batch and run it, as flashinfer's wrappers do, written here in NumPy by the library's words."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import attncheck
from attncheck.backends.families import FAMILIES
from attncheck.backends.family_calls import UnfitFunctionError
from attncheck.backends.numpy_backend import attention
from attncheck.backends.planned_calls import functions_of_family
from attncheck.execution.user_call import read_target_declarations

pytestmark = pytest.mark.usefixtures("forked_workers")

ON_PAGES = ["paged", "ragged", "designs/sequences/paged-*", "designs/sequences/ragged-*"]


class Prefill:
    """As BatchPrefillWithPagedKVCacheWrapper is planned and run."""

    bit_order: Literal["little", "big"] = "little"
    takes_bits = True

    def plan(  # type: ignore[no-untyped-def]
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None,
    ) -> None:  # fmt: skip
        ends = zip(paged_kv_indptr, paged_kv_indptr[1:], paged_kv_last_page_len, strict=False)
        self.pages = [paged_kv_indices[first:last] for first, last, _ in ends]
        full = np.maximum(np.diff(paged_kv_indptr) - 1, 0) * page_size
        self.lengths, self.limits, self.page_size = full + paged_kv_last_page_len, qo_indptr, page_size
        self.group = num_qo_heads // num_kv_heads
        self.masks = None if packed_custom_mask is None else self.unpack(packed_custom_mask)
        if custom_mask is not None:
            assert packed_custom_mask is None
            assert not self.takes_bits or self.lengths.sum() % 2 == 0
            parts = np.split(custom_mask, np.cumsum(np.diff(qo_indptr) * self.lengths)[:-1])
            shapes = zip(parts, np.diff(qo_indptr), self.lengths, strict=True)
            self.masks = [part.reshape(count, length) for part, count, length in shapes]
        self.options = {"scale": sm_scale, "softcap": logits_soft_cap, "is_causal": causal}
        self.left = window_left

    def unpack(self, packed: Any) -> list[Any]:
        masks, begin = [], 0
        for count, length in zip(np.diff(self.limits), self.lengths, strict=True):
            end = begin + -(-count * length // 8)
            bits = np.unpackbits(packed[begin:end], count=count * length, bitorder=self.bit_order)
            masks.append(bits.reshape(count, length).astype(bool))
            begin = end
        assert begin == len(packed)
        return masks

    def run(self, q, paged_kv_cache, *, return_lse=False):  # type: ignore[no-untyped-def]
        results = []
        for number, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            query = q[slice(*self.limits[number : number + 2])].swapaxes(0, 1)[None]
            keys, values = (
                cache[pages].reshape(-1, *cache.shape[2:])[:length].swapaxes(0, 1)[None] for cache in paged_kv_cache
            )
            offset = length - query.shape[2]
            own = {name: value for name, value in self.options.items() if value is not None}
            window = None if self.left < 0 else (self.left, None)
            mask = None if self.masks is None else self.masks[number][None, None]
            places = {"query_offsets": np.array([offset])} if own["is_causal"] or window else {}
            results.append(attention(query, keys, values, mask=mask, window=window, **places, **own))
        output, lse = (
            np.concatenate([stages[name][0].swapaxes(0, 1) for stages in results]) for name in ("output", "log_sum_exp")
        )
        return (output, lse / q.dtype.type(np.log(2))) if return_lse else output


class PrefillOfBooleans(Prefill):
    takes_bits = False

    def plan(  # type: ignore[no-untyped-def,override]
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, custom_mask=None, causal=False, window_left=-1, head_dim_vo=None,
    ) -> None:  # fmt: skip
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        words = {"custom_mask": custom_mask, "causal": causal, "window_left": window_left}
        super().plan(*tables, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **words)


class Decode(Prefill):
    """As BatchDecodeWithPagedKVCacheWrapper is planned, with options that have no default."""

    def plan(  # type: ignore[no-untyped-def,override]
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left,
        logits_soft_cap, sm_scale, seq_lens,
    ) -> None:  # fmt: skip
        assert (head_dim > 0, sm_scale is None) == (True, False)
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        tables = np.arange(len(indptr)), indptr, indices, last_page_len
        super().plan(*tables, num_qo_heads, num_kv_heads, head_dim, page_size, **options)
        np.testing.assert_array_equal(seq_lens, self.lengths)

    def run(self, q, paged_kv_cache, return_lse):  # type: ignore[no-untyped-def]
        return super().run(q, paged_kv_cache, return_lse=return_lse)


class BitsInTheOtherOrder(Prefill):
    bit_order = "big"


class MaskOfAnEarlierPlan(Prefill):
    def unpack(self, packed: Any) -> list[Any]:
        self.kept = getattr(self, "kept", None) or super().unpack(packed)
        return self.kept


class WrongWithoutLogSumExp(Prefill):
    def run(self, q, paged_kv_cache, *, return_lse=False):  # type: ignore[no-untyped-def]
        returned = super().run(q, paged_kv_cache, return_lse=return_lse)
        return returned if return_lse else 2 * returned


class ChangedByItsRun(Prefill):
    def run(self, q, paged_kv_cache, *, return_lse=False):  # type: ignore[no-untyped-def]
        returned = super().run(q, paged_kv_cache, return_lse=return_lse)
        self.options["scale"] = 2.0
        return returned


class NeedsMemory(Prefill):
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None: ...


class WithoutTables:
    def plan(self, *words: Any) -> None: ...

    def run(self, q: Any, paged_kv_cache: Any) -> Any: ...


@pytest.mark.parametrize(("wrapper", "judged"), [(Prefill, 20), (PrefillOfBooleans, 10), (Decode, 2)])
def test_a_right_wrapper_agrees(wrapper: type[Prefill], judged: int) -> None:
    checked = attncheck.check(wrapper, cases=ON_PAGES, signature="flashinfer", dtypes=["float64", "float32"])
    assert checked.frames.results.query("not verdict.isin(['agree', 'unsupported'])").empty
    assert checked.judged >= judged
    has_tree = checked.frames.results.query("verdict == 'agree'")["case"].str.contains("tree").any()
    assert has_tree == (wrapper is not Decode)


@pytest.mark.parametrize("wrapper", [BitsInTheOtherOrder, MaskOfAnEarlierPlan])
def test_a_mask_of_other_bits_or_of_an_earlier_plan_is_found_where_there_are_masks(wrapper: type[Prefill]) -> None:
    checked = attncheck.check(wrapper, cases=ON_PAGES, signature="flashinfer", dtypes=["float64"])
    failing = checked.frames.results.query("not verdict.isin(['agree', 'unsupported'])")["case"]
    assert len(failing) >= 1
    assert failing.str.contains("tree").all()


@pytest.mark.parametrize("wrapper", [WrongWithoutLogSumExp, ChangedByItsRun])
def test_a_plan_is_run_twice_first_without_the_log_sum_exp(wrapper: type[Prefill]) -> None:
    checked = attncheck.check(wrapper, cases=["ragged"], signature="flashinfer", dtypes=["float64"])
    assert len(checked.frames.results.query("verdict == 'numeric'")) >= 2


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(UnfitFunctionError) as refused:
        functions_of_family(NeedsMemory, FAMILIES["flashinfer"], np)  # type: ignore[arg-type]
    assert refused.value.strange == ["float_workspace_buffer"]
    with pytest.raises(UnfitFunctionError) as refused:
        functions_of_family(WithoutTables(), FAMILIES["flashinfer"], np)  # type: ignore[arg-type]
    assert refused.value.expected.startswith("plan(qo_indptr, paged_kv_indptr")
    assert refused.value.reason == "its plan has no tables of pages among its named parameters"


def test_a_wrapper_that_decodes_computes_no_sequences() -> None:
    operations = [set(read_target_declarations(kind, "w", "flashinfer")["parameters"]) for kind in (Prefill, Decode)]
    assert operations == [{"ragged_paged_attention", "paged_attention"}, {"paged_attention"}]
