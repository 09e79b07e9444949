"""Turn a validator's errors into messages for the author of a case file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attncheck.common.errors import CaseError, Diagnostic
from attncheck.common.wording import LINES_PATTERN, MIN_SIMILARITY, ONE_LINE_PATTERN, WEB_ADDRESS
from attncheck.reading import array_kinds
from attncheck.reading import model as case_model
from attncheck.reading.shapes import FieldFault
from attncheck.reading.yaml_reader import FieldPath, YamlDocument, YamlFault

Result = TypeVar("Result")

# A choice: more faults fill the screen, and many of them often have one cause; fewer need more runs.
MAX_DIAGNOSTICS = 5
_MAX_NAME_LENGTH = 200
"""Letters of a case's name: as many as it may have."""

# pydantic's names for the two forms of an input
_KIND_LABEL = "tagged-union["
_NAME_LABEL = "constrained-str"

_FILE_EXAMPLE = "printed: {{file: {}}}"
_QUOTED_WORD = re.compile("'([^']*)'")
_TYPE_WORDS = {
    "string_type": "text",
    "string_unicode": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of fields",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
}
_PATTERN_WORDS = {
    ONE_LINE_PATTERN: "one line of text, without characters that control a terminal or hide others",
    LINES_PATTERN: "text without characters that control a terminal or hide others",
    r"^[A-Za-z][A-Za-z0-9_]*$": "a name of letters, digits and underscores that begins with a letter",
    r"^[a-z][a-z0-9-]*$": "a name of small letters, digits and hyphens that begins with a letter",
    r"^([\w.-]+/[\w.-]+#[0-9]+|https://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+)$": (
        "owner/name#number or a percent-encoded address that begins with https://"
    ),
    WEB_ADDRESS: "an address that begins with https:// or http://, without spaces, quotes and brackets",
}


class CaseFileError(Exception):
    """A fault at a field of the file that is being read; ``others`` are further faults of the same file."""

    def __init__(self, path: FieldPath, message: str, others: Sequence[CaseFileError] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.others = tuple(others)


def collect_results_or_faults(makers: Iterable[Callable[[], Result]]) -> list[Result]:
    """Return the result of each maker. Raises ``CaseFileError`` for the first fault, with all others in ``others``."""
    made, faults = [], dict[str, CaseFileError]()
    for make in makers:
        try:
            made.append(make())
        except CaseFileError as fault:
            for nested in (fault, *fault.others):
                faults.setdefault(str(nested), nested)  # one array may be at fault wherever it is used
    if faults:
        first, *others = faults.values()
        raise CaseFileError(first.path, str(first), others)
    return made


@contextmanager
def locate_faults(path: FieldPath, field: str = "") -> Iterator[None]:
    """Turn a ``ValueError`` inside into a ``CaseFileError`` below a path, at its field or at ``field``."""
    try:
        yield
    except ValueError as error:
        inner = error.field if isinstance(error, FieldFault) else (field,) * bool(field)
        raise CaseFileError((*path, *inner), str(error)) from None


@contextmanager
def hide_linked_files(path: Path, file: str) -> Iterator[None]:
    """Hide the content of an unusable file if a link leads to it in another folder.

    A downloaded folder of cases may have a link to any file of the user.
    """
    try:
        yield
    except CaseError:
        is_inside = not path.is_symlink()
        with suppress(OSError, RuntimeError):  # a link that leads to itself
            is_inside = is_inside or path.resolve().is_relative_to(path.parent.resolve())
        if not is_inside:
            message = (
                "a link to a file in another folder, which cannot be used; name that file itself to see its faults"
            )
            raise CaseError([Diagnostic(file, message)]) from None
        raise


def diagnostics_of_validation_error(error: ValidationError, file: str, document: YamlDocument) -> list[Diagnostic]:
    """Turn a validator's errors into faults with file, line, case and field."""
    # One mistake can break several alternatives; each place is named once, by the first that broke.
    by_source: dict[FieldPath, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        if not _is_about_other_alternative(detail):
            path = _field_path(detail["loc"])
            missing = path[-1:] if detail["type"] == "missing" else ()
            by_source.setdefault((*document.find_place_in_file(path[:-1] if missing else path), *missing), detail)
    details = list(by_source.values())[:MAX_DIAGNOSTICS]
    faults = [
        make_diagnostic_at(_field_path(detail["loc"]), _validation_message(detail), file, document)
        for detail in details
    ]
    return [*faults, *_note_on_omitted_faults(len(by_source), file)]


def diagnostics_of_yaml_fault(fault: YamlFault, file: str) -> list[Diagnostic]:
    """Turn what is wrong with a file's YAML into faults with file, line, case and field."""
    every = (fault, *fault.others)
    faults = [
        Diagnostic(file, str(item), item.line, find_case_name(item.path, fault.data), format_field_path(item.path))
        for item in every[:MAX_DIAGNOSTICS]
    ]
    return [*faults, *_note_on_omitted_faults(len(every), file)]


def merge_faults(faults: Iterable[CaseFileError], file: str, document: YamlDocument) -> list[Diagnostic]:
    """Merge the faults at one place of a file, which every case that is made of that place repeats.

    A field that all cases share may have a different fault for each of them.
    """
    by_source: dict[tuple[FieldPath, str], list[CaseFileError]] = {}
    for fault in faults:
        of_case = fault.path[:1] == ("cases",)
        by_source.setdefault((document.find_place_in_file(fault.path), "" if of_case else str(fault)), []).append(fault)
    merged = []
    for first, *others in by_source.values():
        one = make_diagnostic_at(first.path, str(first), file, document)
        also = len({fault.path[:2] for fault in others if fault.path[:1] == ("cases",)})
        more = f"{one.message}; {also} more of the cases made of this one fail here"
        merged.append(replace(one, message=more) if also else one)
    return merged


def _note_on_omitted_faults(count: int, file: str) -> list[Diagnostic]:
    return [Diagnostic(file, f"and {count - MAX_DIAGNOSTICS} more faults")] if count > MAX_DIAGNOSTICS else []


def make_diagnostic_at(path: FieldPath, message: str, file: str, document: YamlDocument) -> Diagnostic:
    """Return a fault at a field of a file, or at the closest field around it that exists."""
    existing, line = document.locate(path)
    if path and isinstance(path[-1], str) and path[-1] not in existing and "missing" in message:
        existing = (*existing, path[-1])
    if value := document.referenced_value_at(path):
        message += f"; {value[0]} has its value from line {value[1]}"
    return Diagnostic(file, message, line, find_case_name(existing, document.data), format_field_path(existing))


def _is_about_other_alternative(detail: ErrorDetails) -> bool:
    """Return whether an error is about the alternative that was not meant: an input is an array or a name."""
    alternative = str(detail["loc"][-1]) if detail["loc"] else ""
    if isinstance(detail["input"], str):
        return detail["type"] == "array_kind" and alternative.startswith(_KIND_LABEL)
    return alternative == _NAME_LABEL


def _field_path(location: FieldPath) -> FieldPath:
    """Remove the parts that pydantic adds to a path: the alternatives that it tried, which may look like fields."""
    if "digits" in location[:-1]:  # pydantic adds the alternative: a word, or a mapping
        index = location.index("digits") + 1
        location = (*location[:index], *location[index + 1 :])
    for start in (0, 2):
        if location[start : start + 1] in (("inputs",), ("arrays",)):
            path, rest = location[: start + 2], _without_alternative(location[start + 2 :])
            # A combined array has a list of arrays, each again an array or a name.
            while inside := _part_path_length(rest):
                path, rest = (*path, *rest[:inside]), _without_alternative(rest[inside:])
            return (*path, *rest)
    return location


def _part_path_length(rest: FieldPath) -> int:
    """Return how many parts of a path lead to an array that another one is made of; 0 if none do."""
    if len(rest) > 1 and rest[0] in array_kinds.COMBINED_KINDS and isinstance(rest[1], int):
        return 2
    return 1 if len(rest) > 1 and rest[0] in array_kinds.WRAPPING_KINDS else 0


def _without_alternative(rest: FieldPath) -> FieldPath:
    if rest and str(rest[0]).startswith(_KIND_LABEL):
        rest = rest[1:]
    return rest[1:] if rest and rest[0] in (*array_kinds.ARRAY_KINDS, _NAME_LABEL) else rest


def find_case_name(path: FieldPath, data: Any) -> str | None:
    """Return the name of the case that a path leads into, or its number if it has no usable name."""
    match path:
        case ("cases", int(number), *_):
            entry = data["cases"][number] if data is not None else None
            name = entry.get("name") if isinstance(entry, dict) else None
            return (
                name[:_MAX_NAME_LENGTH]
                if isinstance(name, str) and name and name.isprintable()
                else f"number {number + 1}"
            )
    return None


def format_field_path(path: FieldPath) -> str | None:
    """Write a path as inputs.query.values[0]; the case itself is named apart.

    Example:
        >>> format_field_path(("cases", 3, "inputs", "query", "values", 0))
        'inputs.query.values[0]'
    """
    if path[:1] == ("cases",) and len(path) > 1:
        path = path[2:]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_printable_field_name(part)}" for part in path)
    return text.removeprefix(".") or None


def _printable_field_name(name: str) -> str:
    return (name if name.isprintable() else ascii(name))[:60]


def _validation_message(detail: ErrorDetails) -> str:
    got, context, because = shorten_value(detail["input"]), detail.get("ctx", {}), ""
    match detail["type"]:
        case "extra_forbidden" if detail["loc"][-1] == "file" and "expect" in detail["loc"]:
            return f"unknown field; write {_FILE_EXAMPLE.format(got)}"
        case "extra_forbidden":
            return f"unknown field{_similar_field_hint(str(detail['loc'][-1]))}"
        case "missing":
            return "this field is missing"
        case "array_kind" if isinstance(detail["input"], list):
            return f"expected a mapping, such as {{values: {got}}}, got {got}"
        case "array_kind":
            return f"{detail['msg']}, got {got}"
        case "literal_error":
            wanted, because = (
                context["expected"],
                _similar_name_hint(detail["input"], _QUOTED_WORD.findall(context["expected"])),
            )
        case "list_type" if isinstance(detail["input"], dict) and detail["loc"][-1] == "expect":
            file = shorten_value(detail["input"].get("file", "..."))
            wanted, because = "a list", f"; write [{{stage: output, {_FILE_EXAMPLE.format(file)}}}]"
        case "string_type" if isinstance(detail["input"], int | float):
            wanted = "text in quotes"
            because = ": a bare number would lose its last digits" if {"printed", "known"} & set(detail["loc"]) else ""
        case "string_pattern_mismatch":
            wanted = _PATTERN_WORDS.get(context["pattern"], f"text that matches {context['pattern']}")
        case "too_short" | "string_too_short":
            wanted = f"at least {_format_count_with_unit(context['min_length'], detail)}"
        case "too_long" | "string_too_long":
            wanted = f"at most {_format_count_with_unit(context['max_length'], detail)}"
        case kind:
            wanted = _TYPE_WORDS.get(kind, f"a value {detail['msg'].removeprefix('Input should be ')}")
    return f"expected {wanted}, got {got}{because}"


def _format_count_with_unit(number: int, detail: ErrorDetails) -> str:
    unit = "character" if detail["type"].startswith("string") else "item"
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _similar_field_hint(name: str) -> str:
    items = [*vars(case_model).values(), *vars(array_kinds).values()]
    models = [item for item in items if isinstance(item, type) and issubclass(item, BaseModel)]
    known = sorted({field for model in models for field in model.model_fields})
    if name in known:
        return " here; see `attncheck schema` for the fields that exist"
    return _similar_name_hint(name, known) or "; see `attncheck schema` for the fields that exist"


def _similar_name_hint(name: Any, known: Collection[str]) -> str:
    if not isinstance(name, str):
        return ""
    within = [field_name for field_name in known if field_name in name.split("_")]  # attention_weights
    close = difflib.get_close_matches(name[:60], known, n=1, cutoff=MIN_SIMILARITY) or within
    return f"; did you mean {close[0]}?" if close else ""


def shorten_value(value: Any) -> str:
    """Write a value of a file in a few words.

    Example:
        >>> shorten_value(None), shorten_value(True), shorten_value("true")
        ('nothing', 'true', "'true'")
    """
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
