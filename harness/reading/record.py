"""What a report needs to know of a case, as plain data beside the results: no case file is read again."""

from __future__ import annotations

from typing import Any

from attncheck.harness.reading.case import Case, Expected


def case_record(case: Case) -> dict[str, Any]:
    """Return a case's names, source, notes and expectations for cases.json."""
    return {
        "id": case.id,
        "name": case.name,
        "file": case.file,
        "line": case.line,
        "title": case.title,
        "source": case.source.model_dump(exclude_none=True),
        "operation": case.operation,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in case.options.items()},
        "dtypes": list(case.dtypes),
        "storage": case.storage,
        "memory": dict(case.memory),
        "merged": sorted(case.merged),
        "inputs": {name: list(shape) for name, shape in case.input_shapes.items()},
        "tags": list(case.tags),
        "notes": list(case.notes),
        "expected": [_expected_record(expected) for expected in case.expected],
    }


def _expected_record(expected: Expected) -> dict[str, Any]:
    texts = {
        "called": expected.called,
        "because": expected.because,
        "erratum": expected.erratum,
        "note": expected.note,
    }
    return {
        "name": expected.name,
        "of": expected.of,
        "basis": expected.basis,
        "transpose": expected.transpose,
        "shape": list(expected.shape),
        **{name: text for name, text in texts.items() if text is not None},
    }
