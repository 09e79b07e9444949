"""What can be chosen: cases, backends, implementations and tags, as records for people and programs."""

from __future__ import annotations

from attncheck.backends import BACKENDS
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import device_implementations, every_implementation
from attncheck.execution.published import published
from attncheck.reading.selection import Selection

Record = dict[str, str | list[str]]


def list_cases(selection: Selection) -> list[Record]:
    """Return every selected case: its id and name."""
    return [{"id": case.id, "name": case.name} for case in selection.cases]


def list_backends() -> list[Record]:
    """Return every backend, with its version or that it is not installed."""
    return [
        {
            "name": entry.name,
            "version": (package_version(entry.packages[0]) or "") if entry.is_installed else "not installed",
        }
        for entry in BACKENDS.values()
    ]


def list_implementations() -> list[Record]:
    """Return every implementation with dtypes, rounding models and what it is; on devices, and published ones, too."""
    records: list[Record] = [
        {
            "name": item.name,
            "version": (package_version(item.package) or "") if item.entry.is_installed else "not installed",
            "classes": ", ".join(f"{dtype} {name}" for dtype, name in item.declared.classes.items()),
            "is": item.declared.description,
        }
        for item in (*every_implementation(), *device_implementations())
    ]
    for name, point in sorted(published().items()):
        version = point.dist.version if point.dist else ""
        records.append({"name": name, "version": version, "classes": "", "is": f"published as {point.value}"})
    return records


def list_tags(selection: Selection) -> list[Record]:
    """Return every tag with what it probes and the defect that it answers."""
    return [{"tag": name, "probes": tag.probes, "defect": tag.defect} for name, tag in sorted(selection.tags.items())]
