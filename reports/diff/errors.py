"""Errors that grew by more than rounding explains, between two results of the same cases.

Both results are of the same inputs and compared with the same exact answer, so a version, a processor or a BLAS that
sums in another order changes errors too, and none of that is worth a line. What is compared is therefore not the error,
and not its ratio to the bound B either: of a small tensor one rounding more or less moves that from 0.1 to 0.9. It is
z, the error over its statistical scale sigma (docs/numerics.md, sections 5 and 7), which rounding keeps small in
whatever order it happens. An error grew where, against the exact answer or in the step from the implementation's own
previous stage,

- it is beyond rounding noise now: the largest z exceeds max(3, lambda(N) / 2) over the N elements of the stage, the
  limit of a warning, or the tier is warning or worse now and was not before; and
- it is more than twice what it was: the largest z, or the root mean square of z.

It shrank where the same holds the other way round. What grew without failing is within its bound still: it is told and
fails nothing. On inputs that are not generic errors may add up in one direction, so that z says less there; the rule is
the same, as twice as much beyond noise is worth a look.

On the bundled corpus the rule tells nothing between any two of the four frameworks' eager modes, which sum in different
orders, call different BLAS and exponentials; a ratio that doubled and exceeds 0.1 would tell 13 to 29 stages of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pandas as pd

from attncheck.judging.tiers import Tier, noise_limit
from attncheck.reports.diff.frames import ERROR_CHANGES, typed

_KEYS = ["environment", "implementation", "case", "dtype", "stage"]
_GROWTH = 2.0
_MEASURES = {
    "accumulated": {"z": "largest_z", "mean": "mean_z", "ratio": "ratio", "tier": "tier"},
    "introduced": {"z": "introduced_z", "ratio": "introduced_ratio", "tier": "introduced_tier"},
}


def error_changes(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Return what grew and what shrank of two ``results`` frames whose environments have the same names."""
    parts = [
        _changes(one, other, change, measure)
        for measure in _MEASURES
        for change, one, other in (("grew", before, after), ("shrank", after, before))
    ]
    found = typed(pd.concat(parts), ERROR_CHANGES)
    if found.empty:
        return found
    # One line per stage: the measure in which it is larger.
    found = found.assign(largest=found[["before_z", "after_z"]].max(axis=1))
    found = found.sort_values(["change", "largest", *_KEYS, "measure"], ascending=[True, False, *[True] * 6])
    return found.drop_duplicates(["change", *_KEYS]).drop(columns="largest").reset_index(drop=True)


def _changes(lower: pd.DataFrame, higher: pd.DataFrame, change: str, measure: str) -> pd.DataFrame:
    names = _MEASURES[measure]
    noisy = higher[_beyond_noise(higher, names)]
    joined = _measured(noisy, names).merge(_measured(lower, names), on=_KEYS, suffixes=("_higher", "_lower"))
    known_limit = joined["z_higher"] > joined["limit_higher"]
    new_tier = joined["tier_higher"].ne(Tier.WITHIN) & joined["tier_lower"].eq(Tier.WITHIN)
    grown = joined["z_higher"] > _GROWTH * joined["z_lower"]
    if "mean" in names:
        grown |= joined["mean_higher"] > _GROWTH * joined["mean_lower"]
    joined = joined[(known_limit | new_tier) & grown].assign(change=change, measure=measure)
    first, second = ("lower", "higher") if change == "grew" else ("higher", "lower")
    return joined.rename(
        columns={
            f"{name}_{side}": f"{when}_{name}"
            for name in ("z", "ratio", "tier")
            for side, when in ((first, "before"), (second, "after"))
        }
    )


def _measured(rows: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return the keys and what is measured, where it is, under the same names for both measures."""
    kept = rows[rows[names["z"]].notna()]
    measured = kept[[*_KEYS, *names.values()]].rename(columns={own: name for name, own in names.items()})
    return measured.assign(limit=_limits(kept["shape"]))


def _beyond_noise(rows: pd.DataFrame, names: Mapping[str, str]) -> pd.Series[bool]:
    return rows[names["z"]].gt(_limits(rows["shape"])) | (
        rows[names["tier"]].notna() & rows[names["tier"]].ne(Tier.WITHIN)
    )


def _limits(shapes: pd.Series[str]) -> pd.Series[float]:
    """Return the limit of z for tensors of each shape, written 1x2x5x5."""
    limits = {shape: noise_limit(prod(_lengths(shape))) for shape in shapes.dropna().unique()}
    return shapes.map(limits).astype("float64")


def _lengths(shape: str) -> list[int]:
    return [int(length) for length in shape.split("x") if length.isdigit()]
