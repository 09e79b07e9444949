"""The properties of attention: what must hold between two calls, each stated once.

How the second call is made from the first stands in ``attncheck.properties``; here is what case files, declarations
and documents need: the names, and what each says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Needs = Literal["calls", "one process", "fresh process", "threads"]
"""What a property needs: calls alone, calls one after the other in one process, or processes of their own."""
Claim = Literal["bitwise", "within bounds"]
CLAIMS: tuple[Claim, ...] = ("bitwise", "within bounds")
"""The claims that an implementation can make of a property, from strict to lenient."""


@dataclass(frozen=True)
class PropertySpec:
    """One property: what it ``says``, how many ``calls`` show it, and what it ``needs``."""

    name: str
    says: str
    calls: str
    needs: Needs = "calls"


PROPERTIES: Mapping[str, PropertySpec] = {
    each.name: each
    for each in (
        PropertySpec(
            "repeated", "The same call gives the same, with other work in between.", "20 calls", "one process"
        ),
        PropertySpec("fresh_process", "A process that did nothing else gives the same.", "1 call", "fresh process"),
        PropertySpec("threads", "One thread, two and three give the same.", "1 call for each number", "threads"),
        PropertySpec(
            "batch_invariant",
            "A batch entry gives the same alone as in a batch, wherever in the batch it stands.",
            "1 call for each entry, and 1 with the entries in another order",
        ),
        PropertySpec(
            "padding",
            "Keys that are masked, or beyond the lengths, and queries that nobody reads change nothing.",
            "1 call for each way of padding",
        ),
        PropertySpec("packed", "Sequences packed into one give what each gives alone.", "1 call for each sequence"),
        PropertySpec(
            "cached_prefix",
            "Queries after a cached prefix, computed in 1, 2 or 7 parts, give what they give without a cache.",
            "2, 3 and 8 calls",
        ),
        PropertySpec("decoding", "Tokens decoded one by one give what prefilling them gives.", "1 call for each token"),
        PropertySpec(
            "keys_permuted", "Keys in another order, with their values, mask and bias, give the same.", "2 calls"
        ),
        PropertySpec("heads_permuted", "Heads in another order give the same, in that order.", "1 call"),
        PropertySpec("values_scaled", "Values times a power of two give the output times that.", "2 calls"),
        PropertySpec("scores_shifted", "A number added to all scores of a row changes nothing.", "2 calls"),
        PropertySpec(
            "layout",
            "Inputs that lie otherwise in memory (strided, transposed, unaligned, reversed) give the same.",
            "1 call for each layout",
        ),
        PropertySpec("poison_large", "Huge numbers in what a query may not read change nothing.", "1 to 3 calls"),
        PropertySpec("poison_nan", "NaN in what a query may not read changes nothing.", "1 to 3 calls"),
        PropertySpec(
            "merged_parts", "Parts of the keys, merged by their log-sum-exps, give what all keys give.", "2 and 3 calls"
        ),
        PropertySpec(
            "output_buffer", "Memory that is full of NaN before the call changes nothing.", "3 calls", "one process"
        ),
        PropertySpec("inputs_unchanged", "A call leaves its inputs as they are.", "1 call", "one process"),
        PropertySpec(
            "outputs_independent",
            "What a call returned is no part of its inputs, and stays as it is through the next calls.",
            "3 calls",
            "one process",
        ),
        PropertySpec(
            "after_other_shapes", "A call gives the same after calls of other shapes.", "2 calls of each", "one process"
        ),
        PropertySpec(
            "after_a_thousand_calls", "A call gives the same after a thousand others.", "1,002 calls", "one process"
        ),
    )
}
"""Every property, in the order of reports."""
