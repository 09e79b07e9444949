"""Objects that plan a batch and then run it, as flashinfer's wrappers do.

``plan`` is given the tables of a batch: where the queries of each request begin (``qo_indptr``), which pages a request
has (``paged_kv_indptr``, ``paged_kv_indices``), how many keys are in the last of them (``paged_kv_last_page_len``), and
the options of the call. ``run`` is given the queries and the pages. A wrapper without ``qo_indptr`` decodes: each
request has one query.

A mask of each request is given flat, one request after the other: as booleans (``custom_mask``), or as bits
(``packed_custom_mask``), the lowest bit first, where each request begins with a new byte. Beside a mask, causality has
no effect in flashinfer, so it is in the mask; a window has.

Engines run a plan many times, and mostly without the log-sum-exp. So each plan is run twice, first without it. The
output of the first run is judged where the number of queries is odd, that of the second where it is even. In the same
way, bits are given where an odd number of keys is used in all, and booleans where it is even, if a wrapper takes both.

Source: https://docs.flashinfer.ai/api/attention.html and https://docs.flashinfer.ai/tutorials/kv_layout.html.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from attncheck.backends.contract import UnsupportedError
from attncheck.backends.families import Family
from attncheck.backends.family_calls import (
    Array,
    Arrays,
    FamilyFunction,
    Guard,
    SequencesOverPages,
    Stages,
    UnfitFunctionError,
    contract_functions,
)

_MASKS = ("packed_custom_mask", "custom_mask")
_TABLES = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    *("indptr", "indices", "last_page_len", "seq_lens", "seq_lens_q", "block_tables"),
    *("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "head_dim", "page_size"),
    *("q_data_type", "kv_data_type"),
)
"""What describes a batch: parameters of ``plan`` that are no options."""
_EXPECTED_METHODS = f"plan({', '.join(_TABLES[:4])}, ...) and run(q, paged_kv_cache)"


def is_plan_run_wrapper(target: Any, family: Family) -> bool:
    """Return whether an object, or the objects of a class, plan a batch before they run it, as the family's do."""
    return family.plans_and_runs and all(callable(getattr(target, name, None)) for name in ("plan", "run"))


def functions_of_family(
    target: Any, family: Family, arrays: Arrays, guard: Guard = lambda *_: nullcontext()
) -> dict[str, Callable[..., Any]]:
    """Return the contract's functions that a target of a family can compute, by name.

    A class is made without arguments, once: what an earlier plan leaves in an object, later calls meet. Raises
    ``UnfitFunctionError`` if the family's call does not fit the target.
    """
    if not is_plan_run_wrapper(target, family):
        if family.plans_and_runs and inspect.isclass(target):
            raise UnfitFunctionError(family, (), _EXPECTED_METHODS, "it has no plan, or no run")
        return contract_functions(target, family, arrays, guard)
    planned = PlannedFunction.of_object(_make_object(target, family), family, arrays, guard)
    names = ("paged_attention",) if planned.decodes_one_query else ("ragged_paged_attention", "paged_attention")
    return {name: planned.as_contract(name, getattr(planned, name)) for name in names}


def _make_object(target: Any, family: Family) -> Any:
    if not inspect.isclass(target):
        return target
    parameters = inspect.signature(target).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    if required:
        raise UnfitFunctionError(family, required, "a class that is made without arguments, or an object of it")
    return target()


def make_indptr_tables(table: Array, used: Array, page_size: int) -> tuple[Array, Array, Array]:
    """Return where the pages of each request begin, all used pages, and how many keys are in the last page of each.

    Example:
        >>> tables = make_indptr_tables(np.array([[3, 0], [1, -1], [2, 4]]), np.array([5, 0, 4]), page_size=4)
        >>> [array.tolist() for array in tables]
        [[0, 2, 2, 3], [3, 0, 2], [1, 0, 4]]
    """
    counts = -(-used // page_size)
    indices = [row[:count] for row, count in zip(table, counts.tolist(), strict=True)]
    last = np.where(counts > 0, used - (counts - 1) * page_size, 0)
    begins = np.append(0, np.cumsum(counts))
    return (
        begins.astype(np.int32),
        np.concatenate([np.zeros(0, np.int64), *indices]).astype(np.int32),
        last.astype(np.int32),
    )


@dataclass(frozen=True)
class PlannedFunction(FamilyFunction):
    """A plan and a run as one function of the query, the pages of keys and values, and named arguments."""

    @classmethod
    def of_object(cls, planner: Any, family: Family, arrays: Arrays, guard: Guard) -> PlannedFunction:
        """Inspect both methods. Raises ``UnfitFunctionError`` if they require what no call passes."""
        of_plan = dict(inspect.signature(planner.plan).parameters)
        of_run = dict([*inspect.signature(planner.run).parameters.items()][2:])  # after the query and the pages
        names = {**of_plan, **of_run}.keys()
        if names.isdisjoint(_TABLES):
            raise UnfitFunctionError(
                family, (), _EXPECTED_METHODS, "its plan has no tables of pages among its named parameters"
            )
        known = {*_TABLES, *_MASKS, *cls._option_names(family)}
        required = [
            name
            for name, parameter in {**of_plan, **of_run}.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        if strange := [name for name in required if name not in known]:
            raise UnfitFunctionError(family, strange, _EXPECTED_METHODS)

        def plan_and_run(query: Any, key_pages: Any, value_pages: Any, **words: Any) -> Any:
            planner.plan(**{name: value for name, value in words.items() if name in of_plan})
            of_call = {name: value for name, value in words.items() if name not in of_plan}
            of_plain_call = of_call | dict.fromkeys(of_call.keys() & {*family.log_sum_exp}, False)
            plain = planner.run(query, (key_pages, value_pages), **of_plain_call)
            returned = planner.run(query, (key_pages, value_pages), **of_call)
            further = returned[1:] if isinstance(returned, tuple | list) else ()
            return (plain, *further) if len(query) % 2 else returned

        plan_and_run.__name__ = getattr(planner, "__name__", type(planner).__name__)
        one_query = "qo_indptr" not in names
        words = frozenset(names), frozenset(required)
        return cls(plan_and_run, family, arrays, *words, guard, decodes_one_query=one_query)

    @staticmethod
    def _option_names(family: Family) -> Iterator[str]:
        yield from (*family.scale, *family.softcap, *family.log_sum_exp, *family.neutral)
        yield from (family.causal, family.window_left)

    def _accepted_keywords(self, name: str) -> Iterator[str]:
        yield from super()._accepted_keywords(name)
        if name == "ragged_paged_attention" and self.first_parameter_among(_MASKS):
            yield "tree_mask"

    def paged_attention(
        self, query: Any, key_pages: Any, value_pages: Any, table: Any, lengths: Any, **asked: Any
    ) -> Stages:
        """Plan and run the contract's paged caches, whose batch entries all have as many queries."""
        rows = self.arrays.to_numpy(query)
        entries, heads, count, width = rows.shape
        if self.decodes_one_query and count != 1:
            raise UnsupportedError("decodes: each request has one query", ("several queries",))
        together = self.arrays.from_numpy(
            np.ascontiguousarray(rows.swapaxes(0, 1).reshape(1, heads, entries * count, width))
        )
        limits = self.arrays.from_numpy(np.arange(entries + 1) * count)
        stages = self.ragged_paged_attention(together, key_pages, value_pages, limits, table, lengths, **asked)

        def of_entries(tensor: Any) -> Any:
            array = self.arrays.to_numpy(tensor)[0]  # (H, B Lq, ...)
            apart = array.reshape(heads, entries, count, *array.shape[2:]).swapaxes(0, 1)
            return self.arrays.from_numpy(np.ascontiguousarray(apart))

        return {name: of_entries(tensor) for name, tensor in stages.items()}

    def batch_arguments(self, batch: SequencesOverPages, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``plan`` for sequences, pages, shapes, and the keys that each query attends to."""
        query, keys, values, used = batch.query, batch.key_pages, batch.value_pages, batch.key_lengths
        if "head_dim_vo" not in self.parameter_names and values.shape[-1] != keys.shape[-1]:
            raise UnsupportedError("has one width for keys and values", ("head_dim_vo",))
        begins, indices, last = make_indptr_tables(batch.block_table, used, keys.shape[1])
        allowed = (
            self._mask_of_requests(batch, options) if "tree_mask" in options else self._edges_from_the_end(options)
        )
        dtype = self.arrays.from_numpy(query[:, :, :0]).dtype
        return {
            **allowed,
            "qo_indptr": batch.cu_seqlens_q.astype(np.int32),
            **dict.fromkeys(("paged_kv_indptr", "indptr"), begins),
            **dict.fromkeys(("paged_kv_indices", "indices"), indices),
            **dict.fromkeys(("paged_kv_last_page_len", "last_page_len"), last),
            "seq_lens_q": np.diff(batch.cu_seqlens_q).astype(np.int32),
            "seq_lens": used.astype(np.int32),
            "block_tables": batch.block_table.astype(np.int32),
            "num_qo_heads": query.shape[1],
            "num_kv_heads": keys.shape[2],
            **dict.fromkeys(("head_dim_qk", "head_dim"), keys.shape[-1]),
            "head_dim_vo": values.shape[-1],
            "page_size": keys.shape[1],
            **dict.fromkeys(("q_data_type", "kv_data_type"), dtype),
        }

    def _mask_of_requests(self, batch: SequencesOverPages, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the masks of all requests, one after the other, as booleans or as bits, and the window beside them."""
        tree, used = options["tree_mask"], batch.key_lengths
        reach, parts, words = self.reach_from_the_end(options), [], dict[str, Any]()
        if reach.left is not None and self.has_parameter(self.family.window_left):
            words, reach = {self.family.window_left: reach.left}, replace(reach, left=None)
        for (first, last), length in zip(pairwise(batch.cu_seqlens_q.tolist()), used.tolist(), strict=True):
            seen, band = tree[first:last, :length].astype(np.bool_), reach.as_mask(last - first, length)
            parts.append((seen if band is None else seen & band[0, 0]).ravel())
        name = self.first_parameter_among(_MASKS[:: 1 if used.sum() % 2 else -1])
        if name == "packed_custom_mask":
            parts = [np.packbits(part, bitorder="little") for part in parts]
        return {**words, name: np.concatenate(parts)}
