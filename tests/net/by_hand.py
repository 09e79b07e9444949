"""Results folders made by hand, without a number that was computed: ``by_hand.yaml`` has their rows.

Two hold every kind of row, verdict and note once; two more are a crowd, in which much fails and a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter, write_property_rows

RIGHT, OWN, OTHER = "numpy.eager", "kernel.attention", "other.eager"
"""An implementation that is right, one of the user's own that is wrong, and one that cannot do much."""

_DATA: Mapping[str, Any] = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
_RIGHT, _WRONG = _DATA["agreeing"], _DATA["wrong"]


def row(case: str, implementation: str, stage: str, verdict: str = "agree", **fields: Any) -> Row:
    """Make a row of attention in float32; what agrees has an error."""
    of_kind = _RIGHT if verdict == "agree" and stage else {}
    standard = {"operation": "attention", "dtype": "float32", "comparison": "stage"}
    return Row(case=case, implementation=implementation, stage=stage, verdict=verdict, **standard | of_kind | fields)


def _rows() -> Iterator[Row]:
    for *named, fields in _DATA["rows"]:
        others = {name: value for name, value in fields.items() if name != "dtypes"}
        yield from (row(*named, **others, dtype=dtype) for dtype in fields.get("dtypes", ["float32"]))


def write_before(folder: Path) -> None:
    """Write the first of the two."""
    _write(folder, list(_rows()))


def write_after(folder: Path) -> None:
    """Write the second, on another machine: one evaluation got worse, one better, one fails otherwise, one is gone."""
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
    versions = _DATA["environment"]["versions"] | {"numpy": "2.5"}
    _write(folder, rows, versions=versions, processors=4, cpu_features=["AVX2", "AMX"])


def write_crowd(folder: Path) -> None:
    """Write a run that was interrupted, in which properties were asked, in a folder ``new``, and another in ``old``."""
    rows = list(_crowd())
    with_label: Mapping[str, Any] = {"label": "new", "missing": {"jax": "not installed"}, "faults": ["x.yaml:3: wrong"]}
    _write(folder / "new", rows, is_complete=False, **with_label)
    alike: Mapping[str, Any] = {"operation": "attention", "dtype": "float32", "implementation": RIGHT, "stage": ""}
    alike = {**alike, "case": "crowd/0", "comparison": "property", "elements": 4, "variant": "20 calls"}
    write_property_rows(folder / "new", [Row(**{**alike, **fields}) for fields in _DATA["properties"]])
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
    printed = {"comparison": "printed", "reference_text": "0.27", "exact": 0.25, "index": "0,0,1,2", "value": 0.25}
    for implementation in (RIGHT, OTHER):
        for dtype in ("float64", "float32"):
            place: Mapping[str, Any] = {"dtype": dtype, "operation": "softmax", "tier": None}
            yield row("documents/paper/weights", implementation, "weights", **place)
            yield row("documents/paper/weights", implementation, "weights", "misprint", **place, **printed)


def _write(folder: Path, rows: Sequence[Row], *, is_complete: bool = True, **environment: Any) -> None:
    writer = ResultsWriter(folder)
    writer.write_json("environment.json", {**_DATA["environment"], **environment})
    writer.write_json("cases.json", {"cases": [_case(name) for name in sorted({row.case for row in rows})]})
    writer.add_rows(rows)
    writer.flush()
    if is_complete:
        writer.write_json("summary.json", {"exit_code": 1})


def _case(identity: str) -> dict[str, Any]:
    file, _, name = identity.rpartition("/")
    place = {"id": identity, "name": name.capitalize(), "file": f"cases/{file}.yaml", "line": 7 + len(name)}
    record = place | _DATA["case"] | (_DATA["document"] if file.startswith("documents") else {})
    if name == "causal":
        return {**record, "options": {"is_causal": True}, "tags": ["causal"]}
    return {**record, "options": {"softcap": 2.0}} if file == "crowd" else record
