"""Results folders made by hand, without a number that was computed.

Two hold every kind of row, verdict and note once; two more are a crowd, in which much fails and a run was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter, write_property_rows

RIGHT, OWN, OTHER = "numpy.eager", "kernel.attention", "other.eager"
"""An implementation that is right, one of the user's own that is wrong, and one that cannot do much."""

_EVALUATION: Mapping[str, Any] = {"tier": "within", "introduced_tier": "within", "elements": 12, "unjudged": 0}
_RIGHT: Mapping[str, Any] = {
    **_EVALUATION,
    "shape": "1x1x3x4",
    "index": "0,0,1,2",
    "value": 0.25,
    "reference": 0.2500000001,
    "difference": 1e-10,
    "allowed": 4e-10,
    "against": "exact",
    "ratio": 0.25,
    "introduced_ratio": 0.125,
    "largest_z": 1.5,
    "mean_z": 0.5,
}
_WRONG: Mapping[str, Any] = {
    **_RIGHT,
    "tier": "proven",
    "value": 0.75,
    "reference": 0.5,
    "difference": 0.25,
    "allowed": 1e-6,
    "ratio": 250000.0,
    "introduced_tier": "proven",
    "introduced_ratio": 250000.0,
    "message": "2.5e+05 times the largest error that is possible; at [0, 0, 1, 2] computed 0.75, exact 0.5",
}


def write_before(folder: Path) -> None:
    """Write the first of the two."""
    _write(folder, list(_rows()))


def write_after(folder: Path) -> None:
    """Write the second: one evaluation got worse, one better, one fails otherwise, one is no longer there."""
    rows = []
    for row in _rows():
        if (row.implementation, row.case) == (RIGHT, "attention/plain") and row.stage == "output":
            rows.append(replace(row, verdict="numeric", begins_at="output", **_WRONG))
        elif (row.implementation, row.case, row.comparison) == (OWN, "attention/plain", "stage"):
            rows.append(replace(row, verdict="agree", begins_at=None, diagnosis=None, **_RIGHT, message=""))
        elif (row.implementation, row.case) == (OTHER, "attention/crash"):
            rows.append(replace(row, verdict="timeout", message="it took longer than 60 s"))
        elif row.case != "attention/window":
            rows.append(row)
    _write(folder, rows, numpy="2.5")


def write_crowd(folder: Path) -> None:
    """Write a run that was interrupted, in which properties were asked, in a folder ``new``, and another in ``old``."""
    rows = list(_crowd())
    with_label: Mapping[str, Any] = {"label": "new", "missing": {"jax": "not installed"}, "faults": ["x.yaml:3: wrong"]}
    _write(folder / "new", rows, is_complete=False, **with_label)
    alike: Mapping[str, Any] = {"operation": "attention", "dtype": "float32", "implementation": RIGHT, "stage": ""}
    alike = {**alike, "case": "crowd/0", "comparison": "property", "elements": 4, "variant": "20 calls"}
    broken = {"index": "0,1,2", "value": 0.25, "reference": float("nan"), "differing": 1, "stage": "output"}
    broken |= {"message": "output[0, 1, 2] is 0.25, and nan with each batch entry alone", "exact": 0.2500001}
    properties = (
        {"property_name": "repeated", "verdict": "bitwise"},
        {"property_name": "repeated", "verdict": "within bounds", "dtype": "float64"},
        {"property_name": "batch_invariant", "verdict": "broken", "first_bound": 1e-6, "second_bound": 2e-6} | broken,
        {"property_name": "threads", "verdict": "unsupported", "message": "has none"},
    )
    write_property_rows(folder / "new", [Row(**{**alike, **fields}) for fields in properties])
    _write(folder / "old", [row for row in rows if row.verdict == "agree"], label="old")


def _crowd() -> Iterator[Row]:
    """Yield failures for one reason and for more reasons than a report lists, noise, and misprints."""
    for number in range(25):
        yield row(f"crowd/{number}", OWN, "", "error", message="TypeError: not | today")
    yield row("crowd/24", OWN, "", "error", message="TypeError: not | today", dtype="float64")
    for number in range(55):
        yield row(f"crowd/more-{number}", OWN, "", "error", message="ValueError: off | by <b>" + "x" * number)
    for number in range(12):
        for stage in ("scores", "output"):
            yield row(f"noisy/{number}", RIGHT, stage, tier="warning")
        yield row(f"noisy/{number}", OWN, "output")
    yield row("noisy/0", OTHER, "output", "numeric", xfail=True, reason="it always was", **_WRONG)
    yield row("noisy/1", OTHER, "output", padded="zero columns (D 5 to 8)", ratio=0.9)
    number = {
        "comparison": "printed",
        "reference_text": "0.27",
        "exact": 0.25,
        "index": "0,0,1,2",
        "ratio": None,
        "value": 0.25,
    }
    for implementation in (RIGHT, OTHER):
        for dtype in ("float64", "float32"):
            place: Mapping[str, Any] = {"dtype": dtype, "operation": "softmax", "tier": None}
            yield row("documents/paper/weights", implementation, "weights", **place)
            yield row("documents/paper/weights", implementation, "weights", "misprint", **{**place, **number})


def row(case: str, implementation: str, stage: str, verdict: str = "agree", **fields: Any) -> Row:
    """Make a row of attention in float32; what agrees has an error."""
    of_kind = _RIGHT if verdict == "agree" and stage else {}
    standard = {"operation": "attention", "dtype": "float32", "comparison": "stage"}
    return Row(case=case, implementation=implementation, stage=stage, verdict=verdict, **standard | of_kind | fields)


def _rows() -> Iterator[Row]:
    """Yield the rows in the order of cases and dtypes."""
    scale: Mapping[str, Any] = {
        **_WRONG,
        "begins_at": "scores",
        "diagnosis": "scale-one",
        "message": "the output is exactly that of scale 1 instead of 0.5; " + _WRONG["message"],
    }
    for dtype in ("float64", "float32"):
        yield row("attention/plain", RIGHT, "scores", dtype=dtype, seconds=0.5)
        yield row("attention/plain", RIGHT, "weights", dtype=dtype)
        yield row("attention/plain", RIGHT, "output", dtype=dtype)
        yield row("attention/plain", OWN, "output", "numeric", dtype=dtype, seconds=0.25, **scale)
        yield row("attention/plain", OTHER, "output", dtype=dtype)
        pair = {"comparison": "pair", "other": OTHER, "dtype": dtype, "seconds": None}
        yield row("attention/plain", RIGHT, "output", **pair)
        yield row("attention/plain", OWN, "output", "numeric", **pair, **{**_WRONG, "introduced_tier": None})
    yield row("attention/crash", RIGHT, "output", "unverified", unjudged=12, message="there is no exact answer: NaN")
    yield row(
        "attention/crash", OWN, "", "error", message="ValueError: not enough values to unpack (expected 4, got 3)"
    )
    yield row("attention/crash", OTHER, "", "crash", message="the process ended by signal 11 (SIGSEGV)")
    yield row("attention/causal", RIGHT, "output", tier="warning", largest_z=5.5, mean_z=0.75)
    yield row("attention/causal", OWN, "output", "semantic", begins_at="output", **{**_WRONG, **_SEMANTIC})
    yield row("attention/causal", OTHER, "output", "numeric", xfail=True, begins_at="output", **{**_WRONG, **_KNOWN})
    yield row("attention/window", RIGHT, "output", judged_rows=2, query_rows=3)
    yield row("attention/window", OWN, "", "unsupported", message="takes no window", lacks="window")
    yield row("attention/window", OTHER, "", "unsupported", message="takes no window, bias", lacks="window,bias")
    yield row("attention/widths", RIGHT, "output")
    yield row("attention/widths", OWN, "output", "nonfinite", begins_at="output", **{**_WRONG, **_NAN})
    yield row("attention/widths", OTHER, "output", padded="width 5 to 8")
    yield row("attention/forms", RIGHT, "output")
    yield row(
        "attention/forms", OWN, "output", "shape", message="expected shape 1x1x3x4, got 1x3x4", begins_at="output"
    )
    yield row("attention/forms", OTHER, "", "untried", message="not tried: three calls before it ended the process")
    yield row("attention/known", OTHER, "", "xpass", message="kernels.yaml:3: this expected failure no longer happens")
    numbers: Mapping[str, Any] = {"called": "the second row", "half_unit": 0.005, "propagated": 0.0}
    yield row("documents/paper/weights", RIGHT, "weights", operation="softmax")
    for comparison, verdict, text, hint in (
        ("printed", "agree", "0.25", None),
        ("printed", "misprint", "0.52", "digits 5 and 2 are swapped"),
        ("known", "agree", "0.25", None),
        ("exact", "agree", None, None),
    ):
        fields = {**_RIGHT, **numbers, "comparison": comparison, "reference_text": text, "hint": hint, "exact": 0.25}
        yield row("documents/paper/weights", RIGHT, "weights", verdict, **fields, operation="softmax")
    yield row("documents/paper/weights", OWN, "", "unsupported", message="has no softmax", lacks="softmax()")


_SEMANTIC: Mapping[str, Any] = {
    "diagnosis": "causal-bottom-right",
    "message": "the output is exactly that of causality aligned bottom right",
}
_KNOWN: Mapping[str, Any] = {
    "reason": "causality is aligned to the other corner",
    "thread": "owner/name#12",
    "message": "2.5e+05 times the largest error; expected failure: causality is aligned to the other corner",
}
_NAN: Mapping[str, Any] = {
    "value": float("nan"),
    "difference": None,
    "allowed": None,
    "ratio": None,
    "introduced_ratio": None,
    "message": "nan where the exact value is 0.5, at 3 of 12 elements",
}


def _write(
    folder: Path, rows: Sequence[Row], *, numpy: str = "2.4", is_complete: bool = True, **environment_fields: Any
) -> None:
    writer = ResultsWriter(folder)
    names = (RIGHT, OWN, OTHER)
    environment = {
        "label": "local",
        "command": "attncheck check attention -i kernel.py:attention",
        "asked": {"cases": ["attention/*", "documents/*"], "by_name": [OWN], "min_judged": "80%"},
        "python": "3.11.7",
        "platform": "Linux",
        "machine": "x86_64",
        "cpu_features": ["AVX2"],
        "processors": 2,
        "threads_per_worker": 1,
        "versions": {"attncheck": "0.0.0", "numpy": numpy, "other": "1.0"},
        "flags": {},
        "byte_order": "little",
        "implementations": {RIGHT: "numpy", OWN: "numpy", OTHER: "other"},
        "sources": {OWN: {"file": "kernel.py", "line": 3}},
        "classes": {name: {"float64": "native", "float32": "native"} for name in names},
        "again": {RIGHT: ["numpy.eager"], OWN: ["kernel.py:attention"], OTHER: ["other.eager"]},
        "left_out": {"torch": "not installed"},
        "missing": {},
        "faults": [],
        "backends": {},
        **environment_fields,
    }
    writer.write_json("environment.json", environment)
    writer.write_json("cases.json", {"cases": [_case(name) for name in sorted({row.case for row in rows})]})
    writer.add_rows(rows)
    writer.flush()
    if is_complete:
        writer.write_json("summary.json", {"exit_code": 1})


def _case(identity: str) -> dict[str, Any]:
    file, _, name = identity.rpartition("/")
    is_document = file.startswith("documents")
    source = {"kind": "document", "title": "A paper", "author": "Somebody 2017", "section": "3", "notes": ["A note."]}
    inputs = {"scores": [1, 1, 3, 4]} if is_document else {"query": [1, 1, 3, 4], "key": [1, 1, 4, 4]}
    printed = {"of": "weights", "transpose": False, "shape": [1, 1, 3, 4], "called": "the second row"}
    record = {
        "id": identity,
        "name": name.capitalize(),
        "file": f"cases/{file}.yaml",
        "line": 7 + len(name),
        "title": "A document" if is_document else "Attention",
        "source": source if is_document else {"kind": "derivation", "title": "Made by hand", "notes": []},
        "operation": "softmax" if is_document else "attention",
        "options": {"is_causal": True} if name == "causal" else {"softcap": 2.0} if file == "crowd" else {},
        "dtypes": ["float64", "float32"],
        "inputs": inputs,
        "tags": ["document"] if is_document else ["causal"] if name == "causal" else [],
        "probes": {},
        "notes": ["The paper prints one number wrongly."] if is_document else [],
        "expected": [{"name": "weights", "basis": "printed", **printed}] if is_document else [],
    }
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]
