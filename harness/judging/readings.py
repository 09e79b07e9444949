"""All other readings of one case in one dtype: each worked out once, when the first implementation that fails needs it.

A reading is an alternative to what the case says: a convention, a mistake, another step. A truth keeps what they come
to, so that the next implementation that fails the same case is compared with all of them at little cost.

What is lowered may be taken for: other limits of sequences, pages, lengths, scales, projections of latent vectors.

Each is the exact answer of another problem, which is laid out as the case is (``reading/lowering.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from attncheck.judging.alternatives import Alternative, mistake
from attncheck.judging.conventions import conventions_of
from attncheck.judging.mistakes import mistakes_of
from attncheck.judging.replaced_steps import replaced_steps_of
from attncheck.judging.residuals import Approximation, approximate, residual
from attncheck.judging.truth import Stages, Truth, find_truth
from attncheck.reading.lowering import Problem
from attncheck.spec import LOGITS, MEANS


def readings_before_lowering(called: Problem) -> Iterator[Alternative]:
    """Yield what a call of an operation that is lowered may be taken for, the likeliest first; lowered themselves."""
    if called.operation == "quantized_attention":
        for name, description, stage, other in _scales(called):
            yield mistake(name, description, other.lowered(), stage)
    elif called.operation == "latent_attention":
        for name, description, stage, other in _projections(called):
            yield mistake(name, description, other.lowered(), stage)
    elif called.operation != "normalized_attention":  # whose readings are those of what it is lowered to
        yield from _of_sequences(called)


def _of_sequences(called: Problem) -> Iterator[Alternative]:
    """Yield other corners, lengths, limits and pages."""

    def convention(name: str, description: str, other: Problem) -> Alternative:
        return Alternative(name, description, "masked", other.lowered())

    def wrong(name: str, description: str, other: Problem) -> Alternative:
        return mistake(name, description, other.lowered())

    if called.options.get("is_causal") or called.options.get("window"):
        subject = "causality" if called.options.get("is_causal") else "the window"
        description = f"{subject} is aligned top-left in each sequence; the case means its last query and key"
        yield convention("aligned-top-left", description, called.with_options(alignment="top_left"))
    lengths = called.inputs.get("key_lengths")
    if lengths is not None:
        for moved, name, how in ((1, "long", "the last key's index"), (-1, "short", "one less")):
            other = np.clip(lengths + moved, 0, _most_keys(called))
            description = f"a key length is taken for {how}; the case means the number of keys"
            yield convention(f"key-lengths-one-too-{name}", description, called.with_inputs(key_lengths=other))
        if lengths.size > 1:
            shared = np.minimum(lengths[:1], _most_keys(called))
            description = "the key length of the first sequence is taken for all"
            yield wrong("key-lengths-of-first-batch-entry", description, called.with_inputs(key_lengths=shared))
    others = _pages(called) if "block_table" in called.inputs else _limits(called)
    yield from (wrong(*each) for each in others)


def _most_keys(called: Problem) -> Any:
    """Return how many keys each sequence has, used or not."""
    if "block_table" in called.inputs:
        table = called.inputs["block_table"]
        return np.full(len(table), table.shape[1] * called.inputs["key_pages"].shape[1])
    return np.diff(called.inputs["cu_seqlens_k"])


def _limits(called: Problem) -> Iterator[tuple[str, str, Problem]]:
    queries, keys = called.inputs["cu_seqlens_q"], called.inputs["cu_seqlens_k"]
    plain = called.without_input("key_lengths")
    if "key_lengths" in called.inputs:
        yield "key-lengths-ignored", "the key lengths are ignored", plain
    if len(keys) > 2:
        whole = plain.with_inputs(cu_seqlens_q=queries[[0, -1]], cu_seqlens_k=keys[[0, -1]])
        yield "sequences-ignored", "the limits of sequences are ignored: every query sees the keys of all", whole
        for steps, name, words in ((1, "late", "late: the next sequence's first key is seen"), (-1, "early", "early")):
            moved = np.clip(keys + steps, 0, keys[-1])
            moved[[0, -1]] = keys[[0, -1]]
            if (np.diff(moved) >= 0).all():
                yield (
                    f"limits-one-too-{name}",
                    f"sequences of keys end one too {words}",
                    plain.with_inputs(cu_seqlens_k=moved),
                )
    if queries[-1] == keys[-1] and not np.array_equal(queries, keys):
        yield "limits-of-queries", "the limits of queries are taken for keys", plain.with_inputs(cu_seqlens_k=queries)


def _pages(called: Problem) -> Iterator[tuple[str, str, Problem]]:
    table, pages = called.inputs["block_table"], len(called.inputs["key_pages"])
    first = np.broadcast_to(table[:1], table.shape)
    yield (
        "block-table-of-first-batch-entry",
        "the block table of the first batch entry is taken for all",
        called.with_inputs(block_table=first),
    )
    in_order = np.arange(table.size, dtype=table.dtype).reshape(table.shape) % pages
    yield (
        "block-table-ignored",
        "the block table is ignored: pages are read in their order",
        called.with_inputs(block_table=in_order),
    )
    reverse = _used_reversed(called)
    yield "pages-in-reverse", "the pages of each sequence are read in reverse", called.with_inputs(block_table=reverse)


def _used_reversed(called: Problem) -> Any:
    table, page = called.inputs["block_table"].copy(), called.inputs["key_pages"].shape[1]
    for row, used in zip(table, called.inputs["key_lengths"], strict=True):
        count = -(-int(used) // page)
        row[:count] = row[:count][::-1]
    return table


def _scales(called: Problem) -> Iterator[tuple[str, str, str, Problem]]:
    """Yield scales of stored keys and values that are left out, taken twice, or another's."""
    scales = {name: called.inputs[f"{name}_scale"] for name in ("key", "value")}
    for name, stage in (("key", LOGITS[0]), ("value", MEANS[0])):
        scale = scales[name]
        ignored, squared = called.with_inputs(**{f"{name}_scale": np.ones_like(scale)}), scale * scale
        yield f"{name}-scale-ignored", f"the scale of the {name}s is left out", stage, ignored
        twice = called.with_inputs(**{f"{name}_scale": squared})
        yield f"{name}-scale-twice", f"the scale of the {name}s is multiplied twice", stage, twice
        with np.errstate(divide="ignore", over="ignore"):
            inverse = (1 / scale.astype(np.float64)).astype(scale.dtype)
        if np.isfinite(inverse.astype(np.float64)).all():
            divided = called.with_inputs(**{f"{name}_scale": inverse})
            yield f"{name}-scale-divided", f"the {name}s are divided by their scale", stage, divided
        if scale.shape[1] > 1:
            first = np.broadcast_to(scale[:, :1], scale.shape)
            of_first = called.with_inputs(**{f"{name}_scale": first})
            yield f"{name}-scale-of-first-head", f"the {name} scale of the first head is taken for all", stage, of_first
    swapped = called.with_inputs(key_scale=scales["value"], value_scale=scales["key"])
    yield "scales-swapped", "the scales of keys and values are swapped", LOGITS[0], swapped


def _projections(called: Problem) -> Iterator[tuple[str, str, str, Problem]]:
    """Yield parts that are left out, and projections of latent vectors that are another's, transposed or none."""
    inputs = called.inputs
    if "key_rotary" in inputs:
        nothing = called.with_inputs(key_rotary=np.zeros_like(inputs["key_rotary"]))
        yield "rotated-part-ignored", "the part that is rotated is left out of the scores", LOGITS[0], nothing
        zeros = np.zeros_like(inputs["key_projection"])
        alone = called.with_inputs(key_projection=zeros)
        yield "rotated-part-alone", "the part that is not rotated is left out of the scores", LOGITS[0], alone
    for name, stage in (("key", LOGITS[0]), ("value", MEANS[0])):
        weight = inputs[f"{name}_projection"]
        if len(weight) > 1:
            words = f"the {name} projection of the next head is taken"
            others = {f"{name}_projection": np.roll(weight, -1, 0)}
            yield f"{name}-projection-of-next-head", words, stage, called.with_inputs(**others)
            first = {f"{name}_projection": np.broadcast_to(weight[:1], weight.shape)}
            words = f"the {name} projection of the first head is taken for all"
            yield f"{name}-projection-of-first-head", words, stage, called.with_inputs(**first)
        if weight.shape[1] == weight.shape[2]:
            turned = {f"{name}_projection": weight.swapaxes(1, 2)}
            yield (
                f"{name}-projection-transposed",
                f"the {name} projection is transposed",
                stage,
                called.with_inputs(**turned),
            )
            same = {f"{name}_projection": np.broadcast_to(np.eye(weight.shape[1], dtype=weight.dtype), weight.shape)}
            words = f"latent vectors are taken for the {name}s: their projection is left out"
            yield f"{name}-projection-ignored", words, stage, called.with_inputs(**same)
    key, value = inputs["key_projection"], inputs["value_projection"]
    if key.shape == value.shape:
        swapped = called.with_inputs(key_projection=value, value_projection=key)
        yield "latent-projections-swapped", "the projections of keys and values are swapped", LOGITS[0], swapped


_OF_HEADS = ("heads", "kv_heads")


@dataclass(eq=False)
class Readings:
    """The readings of a case, with what they come to as far as anybody has asked."""

    truth: Truth
    problem: Problem
    _approximate: dict[Alternative, Approximation] = field(default_factory=dict)
    _truths: dict[tuple[Alternative, str, frozenset[str]], Truth | None] = field(default_factory=dict)
    _apart: dict[tuple[Alternative, frozenset[str]], float] = field(default_factory=dict)

    @classmethod
    def of(cls, truth: Truth, problem: Problem) -> Readings:
        """Return the readings of a truth, those that it has if it has any."""
        found: Readings = truth._readings.setdefault("all", cls(truth, problem))
        return found

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Conventions first, then mistakes and steps."""
        called = self.truth.called
        if called is not None:  # first, for what it was lowered to has options that nobody was asked for
            return (*readings_before_lowering(called), *_made_of(self.problem))
        return (*_made_of(self.problem), *_of_delivered_mask(self.problem))

    @cached_property
    def own(self) -> Approximation:
        """The case itself in float64."""
        return approximate(self.problem)

    def is_open(self, alternative: Alternative) -> bool:
        """Whether no distance says how near a reading is: float64 NumPy cannot do it."""
        return alternative.replacement is not None or "softcap_follows" in alternative.problem.options

    def residual(self, alternative: Alternative, returned: Stages) -> float:
        """Return how far stages are from a reading."""
        return residual(self.approximation(alternative), returned, alternative.stage_aliases)

    def approximation(self, alternative: Alternative) -> Approximation:
        """Return a reading in float64."""
        if alternative not in self._approximate:
            self._approximate[alternative] = approximate(alternative.problem)
        return self._approximate[alternative]

    def separation(self, alternative: Alternative, stages: frozenset[str]) -> float:
        """Return how far the exact answer itself is from a reading, at some stages."""
        key = alternative, stages
        if key not in self._apart:
            exact = {stage: self.truth.exact[stage].high for stage in stages}
            self._apart[key] = self.residual(alternative, exact)
        return self._apart[key]

    def truth_of(self, alternative: Alternative, rounding_model: str, failing: Stages) -> Truth | None:
        """Return the exact answer of a reading; None where it has none."""
        if alternative.replacement is None:
            key = alternative, "", frozenset[str]()
        else:
            key = alternative, rounding_model, frozenset(failing)
        if key not in self._truths:
            self._truths[key] = (
                truth_of(self.truth, alternative)
                if alternative.replacement is None
                else alternative.replacement(self.truth, rounding_model, failing)
            )
        return self._truths[key]


def _made_of(problem: Problem) -> Iterator[Alternative]:
    makers = (conventions_of, mistakes_of, replaced_steps_of)
    return (each for make in makers for each in make(problem))


def _of_delivered_mask(problem: Problem) -> Iterator[Alternative]:
    """Yield what may be done to a mask that only the call has: of queries, or of positions that no argument tells."""
    asked = problem.called()
    mask = asked.inputs.get("mask")
    if mask is None or mask is problem.inputs.get("mask"):
        return
    kept = {name: problem.options[name] for name in ("empty_rows", *_OF_HEADS) if name in problem.options}
    asked = asked.with_options(**kept)
    yield from (each for each in _made_of(asked) if each.name.startswith("mask-") and not each.replacement)


def truth_of(own: Truth, convention: Alternative) -> Truth:
    """Evaluate the exact answer of a reading, on the rows that are judged of the case."""
    whole, returned = own.query_rows is None, own.exact if own.inner else None
    found = find_truth(
        convention.problem,
        own.dtype,
        supports_statistics=own.supports_statistics,
        whole=whole,
        returned=returned,
        store=own.store,
    )
    return found.with_wide_statistics() if own.has_wide_statistics else found


def relative_bound(truth: Truth, stages: Collection[str], rounding_model: str) -> float:
    """Return the mean bound of stages over their mean size, the largest of them."""
    largest, bounds = 0.0, truth.bounds(rounding_model)
    for stage in stages:
        exact, max_error = truth.exact[stage].high, bounds[stage].max_error
        judged = np.isfinite(exact) & np.isfinite(max_error)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float64's range nothing is near
            size, allowed = np.abs(exact[judged]).sum(), max_error[judged].sum()
            if size > 0:
                largest = max(largest, float(np.nan_to_num(allowed / size, posinf=0.0)))
    return largest
