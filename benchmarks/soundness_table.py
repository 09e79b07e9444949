"""What a soundness campaign came to: tables over its rows, and every alarm with what reproduces it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attncheck.common.wording import format_element
from attncheck.judging.compare import MIN_ELEMENTS_FOR_MEAN, MIN_INDEPENDENT_CAUSES
from attncheck.spec.verdicts import Verdict

_TIERS = ("proven", "statistical", "warning")
_FORM = (Verdict.NONFINITE, Verdict.SHAPE, Verdict.DTYPE, Verdict.SEMANTIC)
"""Verdicts that are proof without a bound."""

_STRUCTURED_STEPS = ("capped", "biased")
"""Stages whose own step is one rounding: the judge applies no statistics to it."""

LEGEND = f"""\
- evaluations: one implementation in one dtype on one problem. tensors: the stages that they returned and that were
  judged; elements: the numbers in them.
- against *exact*: the exact answer from the problem's inputs (the accumulated error); against *step*: the exact step
  from the implementation's own previous stage (the introduced error).
- err/B: the largest error of a tensor over the largest that its class allows; median, 99th percentile and maximum are
  over tensors. Above 1 is impossible for the class: proven.
- z, rms: the largest, and the root mean square, of error over statistical scale in a tensor; rms over tensors of at
  least {MIN_ELEMENTS_FOR_MEAN} elements and {MIN_INDEPENDENT_CAUSES} rows and columns. They count where the inputs \
support statistics;
  *structured* is the largest z elsewhere, where no test rests on it.
- proven, statistical: failures, NaN, shape, dtype and undeclared conventions among the proven; warning:
  warnings. Counted in tensors.
- xfail: tensors that fail as expected, by a declared convention or an entry of a list of expected failures;
  they count nowhere else. open: tensors for which there is no such comparison.
"""


def read_rows(files: Sequence[Path]) -> pd.DataFrame:
    """Read the parts of a campaign."""
    texts = ("stage", "verdict", "message", "reason", "tier", "step_tier", "index", "asked")
    frames = [
        pd.read_csv(path, dtype=dict.fromkeys(texts, str), keep_default_na=False, na_values={"value": [""]})
        for path in files
    ]
    return pd.concat(frames, ignore_index=True)


def table(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the campaign's figures, two lines for each value of the columns ``by``."""
    lines: list[dict[str, Any]] = []
    for key, group in rows[rows["stage"] != ""].groupby(list(by), sort=True):
        names = dict(zip(by, key, strict=True))
        lines.append({**names, "against": "exact", **_figures(group, "")})
        lines.append({**names, "against": "step", **_figures(group, "step_")})
    return pd.DataFrame(lines)


def alarms(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that fail or warn and are not known, and the evaluations that gave nothing to judge.

    What an implementation does not support is none of them.
    """
    alarms = rows["tier"].isin(_TIERS) | rows["step_tier"].isin(_TIERS) | rows["verdict"].isin(_FORM)
    nothing = (rows["stage"] == "") & (rows["verdict"] != Verdict.UNSUPPORTED)
    return rows[(alarms | nothing) & ~rows["xfail"]]


def tightness(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many times the largest error of a tensor its bound is, by class, at generic problems."""
    generic = (
        rows["supports_statistics"] & ~rows["xfail"] & (rows["elements"] >= MIN_ELEMENTS_FOR_MEAN) & (rows["ratio"] > 0)
    )
    times = (1 / rows[generic]["ratio"]).groupby([rows["rounding_model"], rows["dtype"]])
    quantiles = {name: times.quantile(share) for name, share in (("median", 0.5), ("of nine in ten", 0.9))}
    return pd.DataFrame({"tensors": times.size(), **quantiles, "largest": times.max()}).reset_index()


def explained(rows: pd.DataFrame) -> pd.DataFrame:
    """Count what fails as expected and what is not supported, by implementation and reason."""
    aside = rows[rows["xfail"] | (rows["verdict"] == Verdict.UNSUPPORTED)]
    reasons = aside["reason"].where(aside["xfail"], aside["message"])
    counted = aside.assign(reason=reasons).groupby(["implementation", "verdict", "reason"])
    return counted.agg(
        dtypes=("dtype", lambda each: ", ".join(sorted(set(each)))), rows=("number", "size")
    ).reset_index()


def _figures(group: pd.DataFrame, prefix: str) -> dict[str, Any]:
    fresh = group[~group["xfail"]]
    judged = fresh[fresh[f"{prefix}elements"] > 0]
    ratio, z = judged[f"{prefix}ratio"], judged[f"{prefix}z"]
    supports_statistics = judged["supports_statistics"]
    if prefix:
        supports_statistics = supports_statistics & ~judged["stage"].isin(_STRUCTURED_STEPS)
    enough = (judged[f"{prefix}elements"] >= MIN_ELEMENTS_FOR_MEAN) & (
        judged[f"{prefix}causes"] >= MIN_INDEPENDENT_CAUSES
    )
    mean = judged.loc[supports_statistics & enough, f"{prefix}rms"]
    counts = {tier: int((fresh[f"{prefix}tier"] == tier).sum()) for tier in _TIERS}
    if not prefix:
        counts["proven"] += int((fresh["verdict"].isin(_FORM) & (fresh["tier"] != "proven")).sum())
    return {
        "evaluations": len(group[["number", "dtype", "implementation"]].drop_duplicates()),
        "tensors": len(judged),
        "elements": int(judged[f"{prefix}elements"].sum()),
        "err/B median": ratio.median(),
        "err/B p99": ratio[np.isfinite(ratio)].quantile(0.99),
        "err/B max": ratio.max(),
        "z max": z[supports_statistics].max(),
        "z max structured": z[~supports_statistics].max(),
        "rms median": mean.median(),
        "rms max": mean.max(),
        **counts,
        "xfail": int(group["xfail"].sum()),
        "open": int((fresh[f"{prefix}tier"] == "").sum()),
    }


def markdown(frame: pd.DataFrame) -> str:
    """Write a frame as a Markdown table; numbers to three digits, counts in full."""
    names = [str(name) for name in frame.columns]
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    lines = [names, ["---:" if number else "---" for number in numeric]]
    lines += [[_cell(value) for value in line] for line in frame.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value).replace("|", "\\|")


def report(rows: pd.DataFrame, facts: Mapping[str, str], command: str) -> str:
    """Write the whole report; ``command`` repeats one problem when ``--only N`` is added."""
    parts = ["# Soundness campaign", "Written by `benchmarks/soundness.py`; do not edit.", _facts(facts)]
    parts += [markdown(table(rows, ("dtype", "rounding_model"))), LEGEND]
    for column in ("implementation", "operation", "regime", "stage"):
        parts += [f"## By {column}", markdown(table(rows, ("dtype", column)))]
    parts += ["## Bound over largest error", markdown(tightness(rows))]
    parts += ["## Expected failures and what is not supported", _or_none(explained(rows), markdown)]
    parts += ["## Alarms", listed(alarms(rows), command)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def listed(alarms: pd.DataFrame, command: str) -> str:
    """List the alarms, one a line, with what reproduces each."""
    return _or_none(alarms, lambda frame: "\n".join(_alarm_lines(frame, command)))


def _or_none(frame: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    return "None." if frame.empty else write(frame)


def _alarm_lines(alarms: pd.DataFrame, command: str) -> Iterable[str]:
    for row in alarms.to_dict("records"):
        tiers = ", ".join(
            f"{row[prefix + 'tier']} against the {name} (err/B {row[prefix + 'ratio']:.3g}, z {row[prefix + 'z']:.3g}, "
            f"rms {row[prefix + 'rms']:.3g})"
            for prefix, name in (("", "exact answer"), ("step_", "exact step"))
            if row[f"{prefix}tier"] in _TIERS
        )
        where = format_element(str(row["index"]), str(row["stage"])) if row["stage"] else "no stages"
        yield (
            f"- {row['implementation']} {row['dtype']}, {row['operation']}, {row['regime']}, {row['asked']}, "
            f"scores {row['scores']}, {where}: {row['verdict']}{': ' if tiers else ''}{tiers} {row['message']} "
            f"`{command} --only {row['number']}`"
        )
