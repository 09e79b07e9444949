"""The further calls of each property, and how their results are mapped back to the first call's.

Each property has the function of its name. There are properties of sequences (the same tokens have the same result if
they are padded, packed, cached or merged), of order (of batch entries, heads and keys), of numbers (values scaled,
scores shifted, masked keys poisoned), and of memory and history (memory layouts, earlier content of memory, earlier
calls). ``spec/operations.py`` describes each property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.sessions import Session, SessionStep
from attncheck.properties.variants import (
    AnyVariant,
    ArrayChange,
    CombineResults,
    FurtherCall,
    NotApplicable,
    PropertyVariant,
    ResultPair,
    SessionVariant,
    allowed_keys,
    call_returning,
    change_along_axes,
    has_head_axis,
    input_axis,
    lengths_by_letter,
    multiply_by_power_of_two,
    require_arguments,
    require_operation,
    result_axes,
    result_stage_names,
    single_result,
    stage_axis,
    take_indices,
)
from attncheck.reading.lowering import Array, poison_unused_keys
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import input_of_optional_gradients
from attncheck.spec import OPERATIONS, PER_HEAD_INPUTS, PROPERTIES, QUERY_KEY_VALUE
from attncheck.spec.dtypes import largest_number, round_to

_ORDER_SEED = 20
"""Seed of the shuffled keys. A choice: any seed gives some order, and a fixed one gives the same test in every run."""
_POSITION_ARGUMENTS = ("is_causal", "window", "key_lengths", "rotary_cos", "query_offsets")


def result_stages_along_axis(problem: Problem, letter: str) -> tuple[str, ...]:
    """Return the results with an axis of this letter: results that are summed over it cannot be compared."""
    optional = input_of_optional_gradients(problem.operation)
    return tuple(
        stage
        for stage in result_stage_names(problem)
        if letter in result_axes(problem, stage)
        and (stage not in optional or input_axis(problem, optional[stage], letter) is not None)
    )


def batch_invariant(problem: Problem) -> Sequence[AnyVariant]:
    """Compute each batch entry alone, and all of them in another order."""
    entries = lengths_by_letter(problem).get("B", 1)
    if entries < 2:
        raise NotApplicable("the case has a batch of one")
    stages = result_stages_along_axis(problem, "B")
    if not stages:
        raise NotApplicable("no result has an axis of the batch")
    alone = tuple(
        FurtherCall(f"batch entry {entry} alone", change_along_axes(problem, {"B": take_indices([entry])}))
        for entry in range(entries)
    )
    order = np.roll(np.arange(entries), 1)
    rolled = FurtherCall("the entries in another order", change_along_axes(problem, {"B": take_indices(order)}))
    return (
        PropertyVariant("each batch entry alone", alone, concatenate_along(problem, "B"), stages=stages),
        PropertyVariant("another place in the batch", (rolled,), _restore_order(problem, {"B": order}), stages=stages),
    )


def concatenate_along(problem: Problem, letter: str) -> CombineResults:
    """Return a function that concatenates results along an axis."""

    def concatenate_results(stage: str, results: Sequence[Array]) -> Array:
        axes = result_axes(problem, stage)
        return np.concatenate(results, axis=axes.index(letter) - len(axes))

    return concatenate_results


def _single_call_variant(
    description: str, problem: Problem, combine: CombineResults = single_result, **fields: Any
) -> PropertyVariant:
    return PropertyVariant(description, (FurtherCall(description, problem),), combine, **fields)


def _restore_order(problem: Problem, orders: dict[str, NDArray[np.intp]]) -> CombineResults:
    """Return a function that restores the order of the first call."""

    def reorder_result(stage: str, results: Sequence[Array]) -> Array:
        (array,) = results
        for letter, order in orders.items():
            if (axis := stage_axis(problem, stage, letter, array.shape)) is not None:
                array = array.take(np.argsort(order), axis=axis)
        return array

    return reorder_result


def heads_permuted(problem: Problem) -> Sequence[AnyVariant]:
    """Compute the heads in another order; heads of queries stay with those of the keys that they share."""
    if not has_head_axis(problem):
        raise NotApplicable(f"{problem.operation} has no axis of heads")
    if problem.options.get("norm_over") == "full":
        raise NotApplicable("the case takes a norm over all heads")
    heads = lengths_by_letter(problem)["H"]
    groups = lengths_by_letter(problem).get("Hkv", heads)
    if heads < 2:
        raise NotApplicable("the case has one head")
    several = heads // groups
    of_keys = np.roll(np.arange(groups), 1)
    of_queries = np.array([group * several + member for group in of_keys for member in reversed(range(several))])
    orders = {"H": of_queries, "Hkv": of_keys}
    changes: dict[str, ArrayChange] = {letter: take_indices(order) for letter, order in orders.items()}
    return (
        _single_call_variant(
            "the heads in another order", change_along_axes(problem, changes), _restore_order(problem, orders)
        ),
    )


def keys_permuted(problem: Problem) -> Sequence[AnyVariant]:
    """Compute with keys in another order, together with all inputs along keys."""
    require_arguments(problem, forbidden=(*_POSITION_ARGUMENTS, "past_key", "cu_seqlens_k", "key_indices"))
    keys = lengths_by_letter(problem).get("Lk", 0)
    if keys < 2 or not any("Lk" in spec.axes for spec in problem.input_specs.values()):
        raise NotApplicable("the case has no keys to put in another order")
    orders = {
        "the keys in reverse": np.arange(keys)[::-1],
        "the keys shuffled": np.random.default_rng(_ORDER_SEED).permutation(keys),
    }
    return tuple(
        _single_call_variant(
            description,
            change_along_axes(problem, dict.fromkeys(("Lk", "T"), take_indices(order))),
            _restore_order(problem, {"Lk": order, "T": order}),
        )
        for description, order in orders.items()
    )


_ADDED_COUNT = 5
"""The number of added keys and queries: no multiple of any tile."""
_PREFIX_PART_COUNTS = (1, 2, 7)
"""Numbers of cached parts: one, two, and many, whose lengths mostly differ. A choice."""
_KEY_PART_COUNTS = (2, 3)
"""Numbers of parts that are merged: two, and three for implementations that merge one after the other. A choice."""


def padding(problem: Problem) -> Sequence[AnyVariant]:
    """Add keys that are masked, keys beyond the lengths, and queries whose output is dropped."""
    require_arguments(problem, required=("key",), forbidden=("rotary_cos", "cu_seqlens_k"))
    if problem.options.get("alignment") == "bottom_right":
        raise NotApplicable("positions count from the last key, which would be another one")
    if len(result_stage_names(problem)) > 1:
        raise NotApplicable("gradients by what is added are no result")
    variants = [*_pad_keys(problem), *_pad_queries(problem)]
    if not variants:
        raise NotApplicable(f"{problem.operation} takes neither a mask nor key lengths")
    return variants


def _pad_keys(problem: Problem) -> Iterator[PropertyVariant]:
    """Add masked copies of the first key, whose numbers look like any other key's."""
    keys = lengths_by_letter(problem)["T"]
    longer = change_along_axes(problem, {"Lk": _append_copies, "T": _append_zeros})
    allowed = np.arange(keys + _ADDED_COUNT) < keys
    if "mask" in problem.input_specs and "key_lengths" not in problem.inputs:
        mask = problem.inputs.get("mask", np.ones((1, 1, 1, keys), np.bool_))
        broadcast = np.broadcast_to(mask, (*mask.shape[:-1], keys))
        added = np.zeros((*mask.shape[:-1], _ADDED_COUNT), np.bool_)
        masked = longer.with_changes(mask=np.concatenate([broadcast, added], axis=-1) & allowed)
        yield PropertyVariant("keys added with a mask", (FurtherCall("with keys that are masked", masked),))
    if "key_lengths" in problem.input_specs:
        lengths = problem.inputs.get("key_lengths", np.full(lengths_by_letter(problem)["B"], keys, np.int64))
        cut = longer.with_changes(key_lengths=lengths)
        yield PropertyVariant("keys added with lengths", (FurtherCall("with keys beyond the lengths", cut),))


def _append_copies(array: Array, axis: int) -> Array:
    return np.concatenate([array, array.take([0] * _ADDED_COUNT, axis=axis)], axis=axis)


def _append_zeros(array: Array, axis: int) -> Array:
    """Extend an array by zeros: a mask allows no more keys, and a bias adds nothing."""
    shape = list(array.shape)
    shape[axis] = _ADDED_COUNT
    return np.concatenate([array, np.zeros(shape, array.dtype)], axis=axis)


def _pad_queries(problem: Problem) -> Iterator[PropertyVariant]:
    queries = lengths_by_letter(problem).get("Lq", 0)
    if queries < 1 or "query" not in problem.inputs:
        return
    call = FurtherCall("with queries added", change_along_axes(problem, {"Lq": _append_copies}))
    axes = result_axes(problem, *result_stage_names(problem))
    axis = axes.index("Lq") - len(axes)
    description = "queries added behind the last"
    yield PropertyVariant(description, (call,), lambda _, results: results[0].take(np.arange(queries), axis=axis))


def packed(problem: Problem) -> Sequence[AnyVariant]:
    """Pack the entries of a batch into one sequence, or take packed sequences apart."""
    require_operation(problem, "attention", "packed_attention")
    return _unpack_sequences(problem) if "cu_seqlens_k" in problem.inputs else _pack_batch(problem)


def _pack_batch(problem: Problem) -> Sequence[AnyVariant]:
    folded = ("mask", "bias", "past_key", "rotary_cos", "query_offsets", "query_mask", "mask_fill", "empty_rows")
    require_arguments(problem, forbidden=folded)
    batch, queries, keys = (lengths_by_letter(problem)[letter] for letter in ("B", "Lq", "Lk"))
    if (problem.options.get("is_causal") or "window" in problem.options) and (
        queries != keys or "key_lengths" in problem.inputs
    ):
        raise NotApplicable("packed positions count from the last key, those of the case from the first")
    # Batch entries follow one another: (B, H, L, D) becomes (1, H, B*L, D).
    arrays = {name: problem.inputs[name] for name in QUERY_KEY_VALUE}
    inputs = {name: np.concatenate([*array[:, np.newaxis]], axis=-2) for name, array in arrays.items()}
    starts = np.arange(batch + 1, dtype=np.int64)
    limits = {"cu_seqlens_q": starts * queries, "cu_seqlens_k": starts * keys}
    kept = OPERATIONS["packed_attention"].inputs.keys() - QUERY_KEY_VALUE
    others = {name: array for name, array in problem.inputs.items() if name in kept}
    options = {name: value for name, value in problem.options.items() if name != "alignment"}
    one = Problem("packed_attention", options, {**inputs, **limits, **others}, problem.dtype)

    def split_batch(stage: str, results: Sequence[Array]) -> Array:
        (array,) = results
        return np.concatenate(np.split(array, batch, axis=-2), axis=0)

    return (_single_call_variant("packed into one sequence", one, split_batch),)


def _unpack_sequences(problem: Problem) -> Sequence[AnyVariant]:
    limits = [problem.inputs[name].astype(np.intp) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    lengths = problem.inputs.get("key_lengths", np.diff(limits[1]))
    calls = []
    for number, used in enumerate(int(length) for length in lengths):
        rows, first = slice(*limits[0][number : number + 2]), int(limits[1][number])
        inputs = {"query": problem.inputs["query"][:, :, rows]}
        inputs |= {name: problem.inputs[name][:, :, first : first + used] for name in ("key", "value")}
        inputs |= {name: array for name, array in problem.inputs.items() if name in PER_HEAD_INPUTS}
        calls.append(FurtherCall(f"sequence {number} alone", _as_aligned_attention(problem, inputs)))
    return (PropertyVariant("each sequence alone", tuple(calls), concatenate_along(problem, "Lq")),)


def _as_aligned_attention(problem: Problem, inputs: dict[str, Array]) -> Problem:
    """Return one sequence as attention, with the last query at the last key."""
    options = {name: value for name, value in problem.options.items() if name != "poison"}
    if options.get("is_causal") or "window" in options:
        options["alignment"] = "bottom_right"
    contiguous = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    return Problem("attention", options, contiguous, problem.dtype).as_call()


def cached_prefix(problem: Problem) -> Sequence[AnyVariant]:
    """Compute a prefix in parts, each after a cache of the parts before it, and then the rest."""
    tokens, variants = _count_causal_tokens(problem), []
    for parts in (parts for parts in _PREFIX_PART_COUNTS if parts < tokens):
        cuts = np.linspace(0, tokens, parts + 2).round().astype(int)
        word = "part" if parts == 1 else "parts"
        variants.append(_compute_in_chunks(problem, cuts, f"a prefix cached in {parts} {word}"))
    return variants


def decoding(problem: Problem) -> Sequence[AnyVariant]:
    """Compute one token after the other, each after a cache of the tokens before it."""
    tokens = _count_causal_tokens(problem)
    return (_compute_in_chunks(problem, np.arange(tokens + 1), "token by token"),)


def _count_causal_tokens(problem: Problem) -> int:
    """Return the number of tokens, which see themselves and earlier ones. Raises ``NotApplicable``."""
    require_operation(problem, "attention")
    require_arguments(
        problem,
        required=("is_causal",),
        forbidden=("past_key", "key_lengths", "rotary_cos", "query_offsets", "query_mask", "empty_rows"),
    )
    if lengths_by_letter(problem)["Lq"] != lengths_by_letter(problem)["Lk"]:
        raise NotApplicable("the case has not a key for each query")
    if lengths_by_letter(problem)["Lq"] < 2:
        raise NotApplicable("the case has one token")
    return lengths_by_letter(problem)["Lq"]


def _compute_in_chunks(problem: Problem, boundaries: NDArray[np.intp], description: str) -> PropertyVariant:
    """Compute the queries between cuts in separate calls, in which the keys before them are cached."""
    calls = []
    for first, last in pairwise(boundaries.tolist()):
        queries, seen = np.arange(first, last), np.arange(last)
        part = change_along_axes(
            problem, {"Lq": take_indices(queries), "Lk": take_indices(queries), "T": take_indices(seen)}
        )
        past: dict[str, Array | None] = {
            f"past_{name}": np.ascontiguousarray(problem.inputs[name][:, :, :first]) for name in ("key", "value")
        }
        chunk = part.with_changes({"alignment": None}, **(past if first else {}))
        calls.append(FurtherCall(f"queries {first} to {last - 1} behind {first} keys", chunk))
    return PropertyVariant(description, tuple(calls), concatenate_along(problem, "Lq"))


def merged_parts(problem: Problem) -> Sequence[AnyVariant]:
    """Compute the keys in parts, whose outputs are merged exactly by their log-sum-exps."""
    require_operation(problem, "attention")
    require_arguments(problem, forbidden=(*_POSITION_ARGUMENTS, "past_key", "sinks", "mask_fill", "empty_rows"))
    keys, variants = lengths_by_letter(problem)["Lk"], []
    for parts in (parts for parts in _KEY_PART_COUNTS if parts <= keys):
        calls = tuple(
            FurtherCall(
                f"keys {part[0]} to {part[-1]}",
                change_along_axes(problem, dict.fromkeys(("Lk", "T"), take_indices(part))),
            )
            for part in np.array_split(np.arange(keys), parts)
        )
        description = f"the keys in {parts} parts"
        variants.append(PropertyVariant(description, calls, stages=("output", "log_sum_exp"), merges_parts=True))
    if not variants:
        raise NotApplicable("the case has one key")
    return variants


_SCALING_EXPONENTS = (3, -3)
"""Values are multiplied by 8 and 1/8. A choice: larger powers leave the range of float16 more often."""
_VALUE_INPUTS = ("value", "past_value", "value_pages")
_SCALABLE_OPERATIONS = ("attention", "packed_attention", "paged_attention", "normalized_attention", "sparse_attention")
_SCORE_OPERATIONS = ("general_attention", "additive_attention", "cosine_attention")
_POISONABLE_OPERATIONS = (
    *("attention", "packed_attention", "normalized_attention", "sparse_attention"),
    *_SCORE_OPERATIONS,
)
_LARGE_POISON = 1e30
"""Too large to be hidden by rounding if it has any weight."""
_SCORE_SHIFTS = {"by up to 2": (0.25, 17), "by 64": (64.0, 1)}
"""The step between rows, and the number of rows after which it starts again."""


def values_scaled(problem: Problem) -> Sequence[AnyVariant]:
    """Multiply all values by a power of two, which rounds no number."""
    require_operation(problem, *_SCALABLE_OPERATIONS, *_SCORE_OPERATIONS)
    names = [name for name in _VALUE_INPUTS if name in problem.inputs]
    variants = []
    for exponent in _SCALING_EXPONENTS:
        factor = 2.0**exponent
        scaled = {name: multiply_by_power_of_two(problem.inputs[name], factor) for name in names}
        if not all(
            np.array_equal(multiply_by_power_of_two(values, 1 / factor), problem.inputs[name])
            for name, values in scaled.items()
        ):
            continue  # a value would be beyond the range of the dtype, or tiny
        variants.append(
            _single_call_variant(f"values times 2^{exponent}", problem.with_changes(**scaled), result_factor=1 / factor)
        )
    if not variants:
        raise NotApplicable(f"no power of two leaves all values in the range of {problem.dtype}")
    return variants


def scores_shifted(problem: Problem) -> Sequence[AnyVariant]:
    """Add a separate number to all scores of each row, through the bias."""
    if "bias" not in problem.input_specs or result_stage_names(problem) != ("output",):
        raise NotApplicable(f"{problem.operation} takes no bias, or gives more than an output")
    require_arguments(problem, forbidden=("sinks", "mask_fill"))
    queries, keys = lengths_by_letter(problem)["Lq"], lengths_by_letter(problem)["T"]
    bias = problem.inputs.get("bias", np.zeros((1, 1, queries, keys), problem.inputs["query"].dtype))
    variants = []
    for description, (step, period) in _SCORE_SHIFTS.items():
        rows = step * (np.arange(queries) % period - period // 2 if period > 1 else np.ones(queries))
        exact = bias.astype(np.float64) + rows[:, np.newaxis]
        shifted = round_to(exact, problem.dtype)
        if not np.array_equal(shifted.astype(np.float64), exact):
            raise NotApplicable(f"the bias with a number added is no number of {problem.dtype}")
        variants.append(_single_call_variant(f"scores shifted {description}", problem.with_changes(bias=shifted)))
    return variants


def poison_large(problem: Problem) -> Sequence[AnyVariant]:
    """Set huge numbers where no query may read."""
    return _poison_with(problem, "large")


def poison_nan(problem: Problem) -> Sequence[AnyVariant]:
    """Set NaN where no query may read."""
    return _poison_with(problem, "nan")


def _poison_with(problem: Problem, poison: str) -> Sequence[AnyVariant]:
    if "block_table" in problem.inputs:
        inputs = poison_unused_keys({"poison": poison}, problem.inputs, problem.dtype)
        call = FurtherCall("with unused slots of pages poisoned", problem.with_changes(**inputs), problem)
        return (PropertyVariant("unused slots of pages", (call,), nan_may_spread=poison == "nan"),)
    require_operation(problem, *_POISONABLE_OPERATIONS)
    value = np.nan if poison == "nan" else min(_LARGE_POISON, largest_number(problem.dtype))
    variants = list(_poison_variants(problem, value, "NaN" if poison == "nan" else "a huge number"))
    if not variants:
        raise NotApplicable("every query may attend to every key")
    return variants


def _poison_variants(problem: Problem, value: float, word: str) -> Iterator[PropertyVariant]:
    """Poison keys that no query may attend to, then each half of the keys; compare rows that see no poison."""
    allowed = allowed_keys(problem)
    dead: NDArray[np.bool_] = np.logical_not(allowed.any(axis=(1, 2)))  # (B, T)
    half, positions = allowed.shape[-1] // 2, np.arange(allowed.shape[-1])
    for where, places in (
        ("that nobody may attend to", dead),
        (f"from {half} on", np.broadcast_to(positions >= half, dead.shape)),
        (f"before {half}", np.broadcast_to(positions < half, dead.shape)),
    ):
        # The query rows (B, H, Lq) that may attend to some key, and to none of these.
        sees = np.any(allowed & places[:, np.newaxis, np.newaxis], axis=-1)
        rows: NDArray[np.bool_] = np.logical_and(~sees, allowed.any(axis=-1))
        if places.any() and rows.any():
            for name, description in (("key", "in keys"), ("value", "in values of keys")):
                yield _poison_variant(
                    problem, (name, f"past_{name}"), places, rows, value, f"{word} {description} {where}"
                )


def _poison_variant(
    problem: Problem,
    names: Sequence[str],
    poisoned: NDArray[np.bool_],
    compared_rows: NDArray[np.bool_],
    value: float,
    description: str,
) -> PropertyVariant:
    past = lengths_by_letter(problem).get("P", 0)
    inputs: dict[str, Array | None] = {}
    for name in names:
        if name in problem.inputs:
            poisoned_keys = poisoned[:, :past] if name.startswith("past") else poisoned[:, past:]
            array = problem.inputs[name].copy()
            array[np.broadcast_to(poisoned_keys[:, np.newaxis, :, np.newaxis], array.shape)] = value
            inputs[name] = array
    call = FurtherCall(f"with {description}", problem.with_changes(**inputs), problem)
    compared = {"output": compared_rows[..., np.newaxis]}
    return PropertyVariant(description, (call,), compared_elements=compared, nan_may_spread=bool(np.isnan(value)))


_TESTED_LAYOUTS = ("strided", "padded", "unaligned", "transposed", "reversed")
_MASK_INPUTS = ("mask", "bias")
_REPETITION_COUNT = 20
"""Number of equal calls. A choice: a race that shows once in ten calls is missed with probability 0.9^19 = 14 %."""
_THREAD_COUNTS = (2, 3)
"""Numbers of threads: an even split of the work, and an uneven one. A choice."""
_MANY_CALL_COUNT = 1000
"""Number of calls in ``after-a-thousand-calls``: enough to fill caches and pools of some hundred entries. A choice."""


def layout(problem: Problem) -> Sequence[AnyVariant]:
    """Change the memory layout of query, key and value, then of the mask and the bias."""
    inputs = problem.inputs
    numbers = [name for name in inputs if name not in _MASK_INPUTS and problem.input_specs[name].is_number]
    masks = [name for name in _MASK_INPUTS if name in inputs]
    variants = []
    for of, kinds in ((numbers, _TESTED_LAYOUTS), (masks, ("strided", "transposed", "reversed"))):
        for kind in kinds:
            least, most = (4, 4) if kind == "transposed" else (2, np.inf)
            if names := [name for name in of if least <= inputs[name].ndim <= most]:
                description = f"{'inputs' if of is numbers else ' and '.join(names)} {kind}"
                changed = replace(problem, memory_layout=dict.fromkeys(names, kind))
                variants.append(
                    PropertyVariant(description, (FurtherCall(f"{description} in memory", changed, problem),))
                )
    return variants


def repeated(problem: Problem) -> Sequence[AnyVariant]:
    """Repeat the same call, with other work in between."""
    steps = tuple(
        SessionStep(call_returning(problem), does_other_work_before=number > 0) for number in range(_REPETITION_COUNT)
    )
    pairs = tuple(
        ResultPair(f"call {number + 1} of {_REPETITION_COUNT}", 0, number, problem)
        for number in range(1, _REPETITION_COUNT)
    )
    return (SessionVariant(f"{_REPETITION_COUNT} calls", Session(steps), pairs),)


def fresh_process(problem: Problem) -> Sequence[AnyVariant]:
    """Make the call in a new process."""
    return (_single_call_variant("in a fresh process", problem, process_kind="fresh process"),)


def threads(problem: Problem) -> Sequence[AnyVariant]:
    """Make the call in processes with several threads."""
    return tuple(
        PropertyVariant(
            f"{number} threads",
            (FurtherCall(f"with {number} threads", problem),),
            process_kind="threads",
            threads=number,
        )
        for number in _THREAD_COUNTS
    )


def output_buffer(problem: Problem) -> Sequence[AnyVariant]:
    """Fill the memory that the call may allocate with NaN: directly, and by the same call on NaN."""
    call = call_returning(problem)
    numbers = {name: array for name, array in problem.inputs.items() if problem.input_specs[name].is_number}
    nan = {name: np.full_like(array, np.nan) for name, array in numbers.items() if array.dtype.name != "float8_e5m2"}
    poisonous = call_returning(problem.with_changes(**nan))
    freed = Session((SessionStep(call), SessionStep(call, frees_nan_memory_before=True)))
    called = Session((SessionStep(call), SessionStep(poisonous, returns_result=False), SessionStep(call)))
    return (
        SessionVariant("memory full of NaN was freed", freed, (ResultPair("after NaN in memory", 0, 1, problem),)),
        SessionVariant("a call on NaN came before", called, (ResultPair("after a call on NaN", 0, 2, problem),)),
    )


def inputs_unchanged(problem: Problem) -> Sequence[AnyVariant]:
    """Compare the inputs before and after a call."""
    return (
        SessionVariant("the inputs after the call", Session((SessionStep(call_returning(problem)),)), problem=problem),
    )


def outputs_independent(problem: Problem) -> Sequence[AnyVariant]:
    """Compare the output of a call before and after the next calls; it must not be memory of an input."""
    numbers = {name: array for name, array in problem.inputs.items() if problem.input_specs[name].is_number}
    halved = call_returning(
        problem.with_changes(**{name: multiply_by_power_of_two(array, 0.5) for name, array in numbers.items()})
    )
    steps = (
        SessionStep(call_returning(problem), rechecks_result=True),
        SessionStep(halved, returns_result=False, times=2),
    )
    return (SessionVariant("the output after the next calls", Session(steps), problem=problem),)


def after_other_shapes(problem: Problem) -> Sequence[AnyVariant]:
    """Call other shapes between two equal calls, and compare them with calls in new processes."""
    others = list(_problems_of_other_shapes(problem))
    if not others:
        raise NotApplicable("no other shape can be made of the case")
    variants = []
    for description, other_problem in others:
        call, its = call_returning(problem), call_returning(other_problem)
        session = Session((SessionStep(call), SessionStep(its), SessionStep(call), SessionStep(its)))
        pairs = (
            ResultPair(f"again after {description}", 0, 2, problem),
            ResultPair(f"{description}, after the case's own shape", None, 1, other_problem),
            ResultPair(f"{description}, after both shapes", None, 3, other_problem),
        )
        variants.append(SessionVariant(description, session, pairs))
    return variants


def _problems_of_other_shapes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the same operation with fewer queries, half of the keys, the keys twice, and one batch entry."""
    lengths = lengths_by_letter(problem)
    if {"cu_seqlens_q", "block_table"}.isdisjoint(problem.inputs):
        if lengths.get("Lq", 0) > 1:
            yield "half of the queries", change_along_axes(problem, {"Lq": take_indices(np.arange(lengths["Lq"] // 2))})
        cannot = {"key_lengths", "past_key", "rotary_cos", "query_offsets"} & problem.inputs.keys()
        if lengths.get("Lk", 0) > 1 and not cannot:
            half, twice = np.arange(lengths["Lk"] // 2), np.tile(np.arange(lengths["Lk"]), 2)
            if not problem.inputs.keys() & {"mask", "bias"}:
                yield (
                    "half of the keys",
                    change_along_axes(problem, {"Lk": take_indices(half), "T": take_indices(half)}),
                )
            yield "the keys twice", change_along_axes(problem, {"Lk": take_indices(twice), "T": take_indices(twice)})
    if lengths.get("B", 0) > 1:
        yield "one batch entry", change_along_axes(problem, {"B": take_indices([0])})


def after_a_thousand_calls(problem: Problem) -> Sequence[AnyVariant]:
    """Make a thousand calls, of another shape and of the same, between two equal calls."""
    call = call_returning(problem)
    reshaped = next((call_returning(made) for _, made in _problems_of_other_shapes(problem)), call)
    half = _MANY_CALL_COUNT // 2
    between = (
        SessionStep(reshaped, returns_result=False, times=half),
        SessionStep(call, returns_result=False, times=_MANY_CALL_COUNT - half),
    )
    steps = (SessionStep(call), *between, SessionStep(call))
    pair = ResultPair("after a thousand calls", 0, 3, problem)
    return (SessionVariant("a thousand calls in between", Session(steps), (pair,)),)


VARIANTS_BY_PROPERTY: Mapping[str, Callable[[Problem], Sequence[AnyVariant]]] = {
    name: globals()[name] for name in PROPERTIES
}
"""The function of each property; it raises ``NotApplicable`` if a problem does not have the property."""
