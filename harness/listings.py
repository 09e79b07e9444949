"""What can be chosen: cases, backends, implementations and tags, as records for people and programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from attncheck.backends import BACKENDS, published
from attncheck.execution.environment import package_version
from attncheck.execution.implementations import device_implementations, every_implementation
from attncheck.reading.selection import Selection
from attncheck.reading.shapes import axis_lengths, lengths_text

Record = dict[str, str | list[str]]

_WIDTH = 100
_INDENT = "  "
_MAX_SHAPE = 30
"""Columns of most shapes; a longer one moves what follows it."""
_MIN_TAGS = 18
"""Columns for tags, whatever stands before them."""


def list_cases(selection: Selection) -> list[Record]:
    """Return every selected case: its id, name, operation, the lengths of its axes, its dtypes and its tags."""
    return [
        {
            "id": case.id,
            "name": case.name,
            "operation": case.operation,
            "shape": lengths_text(axis_lengths(case.operation, case.options, case.input_shapes)),
            "dtypes": list(case.dtypes),
            "tags": list(case.tags),
        }
        for case in selection.cases
    ]


def case_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of cases: the id, and below it what is computed, in columns.

    An id is as long as it is, to be copied; what stands below it fits into 100 columns, more tags in more lines.
    """
    cells = [(str(each["operation"]), str(each["shape"]), " ".join(_short_dtypes(each["dtypes"]))) for each in records]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[1:2] = [min(width, _MAX_SHAPE) for width in widths[1:2]]  # of no case there is none
    for each, row in zip(records, cells, strict=True):
        yield str(each["id"])
        columns = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        start = len(columns) + len(_INDENT) + 2
        tags = textwrap.wrap(
            ", ".join(each["tags"]),
            max(_WIDTH - start, _MIN_TAGS),
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
        yield f"{_INDENT}{columns}  {tags[0]}".rstrip()
        yield from (" " * start + more for more in tags[1:])


def _short_dtypes(dtypes: str | list[str]) -> list[str]:
    return [dtype.replace("bfloat", "bf").replace("float", "f") for dtype in dtypes]


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
    """Return every tag with what it probes and the bug that it is meant to catch."""
    return [{"tag": name, "probes": tag.probes, "defect": tag.defect} for name, tag in sorted(selection.tags.items())]
