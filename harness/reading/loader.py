"""Read case files into cases; every fault names file, line, case, field and the expected value.

A printed number that shows fewer digits than its neighbours is probably rounded further back than it looks
(docs/cases.md, section 5). R gives every column decimals of its own, others every row: so a number is suspect if it
has fewer decimals than one in its row and than one in its column, or ends in a point, as NumPy alone writes. And a zero
that is missing by chance at the end of many digits costs nothing: a number is suspect if it has at most half as many
digits as others, or may be off by a thousandth of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from attncheck.common.errors import CaseError, Diagnostic
from attncheck.common.wording import slug
from attncheck.reading import array_kinds as kinds
from attncheck.reading import diagnostics, model
from attncheck.reading.array_kinds import (
    ARRAYS_CONTEXT_KEY,
    FOLDER_CONTEXT_KEY,
    PrintedRows,
    RoundingFields,
    StoredNumbers,
)
from attncheck.reading.arrays import NO_CHECKED_ARRAYS, CheckedArrays, check_named_arrays
from attncheck.reading.case import Case
from attncheck.reading.case_maker import CaseBudget, CaseLocation, CaseMaker, find_random_settings
from attncheck.reading.diagnostics import (
    CaseFileError,
    collect_results_or_faults,
    hide_linked_files,
    make_diagnostic_at,
)
from attncheck.reading.for_each import FOR_EACH, expand_cases
from attncheck.reading.inputs import make_printed_rounding
from attncheck.reading.printed import PrintedArray, parse_printed
from attncheck.reading.yaml_reader import DocumentWithoutFile, FieldPath, YamlDocument, YamlFault, read_yaml

FieldWarnings = Iterator[tuple[FieldPath, str]]
Counts = NDArray[np.int64]
_DIGITS_OF_NO_NUMBER = -(2**31)
"""Decimals and digits of what is no number."""
_MAX_SILENT_ERROR = 1e-3
"""Of the largest number: by what a number that shows too few digits may be off before anybody is told."""


def find_uneven_digit_warnings(
    entry: model.CaseEntry, arrays: Mapping[str, kinds.Array], where: FieldPath
) -> FieldWarnings:
    """Warn of the printed numbers of a case, its own arrays and the file's ``arrays`` that its inputs refer to."""
    for number, expectation in enumerate(entry.expect):
        for name in ("printed", "known"):
            rows = getattr(expectation, name)
            if rows is not None and not isinstance(rows, StoredNumbers):
                path = (*where, "expect", number, name)
                yield from _find_number_warnings(rows, expectation, path, declared=entry.digits is not None)
    for input_name, source in entry.inputs.items():
        yield from _find_array_warnings(
            kinds.array_or_reference(source), arrays, (*where, "inputs", input_name), (*where, "arrays"), entry
        )


def _find_array_warnings(
    source: kinds.Array,
    named: Mapping[str, kinds.Array],
    path: FieldPath,
    case_arrays: FieldPath,
    entry: model.CaseEntry,
) -> FieldWarnings:
    match source:
        case kinds.PrintedInput():
            yield from _find_number_warnings(source.printed, source, (*path, "printed"), declared=False)
        case kinds.Reference():
            top = case_arrays if source.ref in entry.arrays else ("arrays",)
            yield from _find_array_warnings(named[source.ref], named, (*top, source.ref), case_arrays, entry)
        case _:
            for place, part in kinds.array_parts_with_paths(source):
                yield from _find_array_warnings(part, named, (*path, *place), case_arrays, entry)


def _find_number_warnings(
    rows: PrintedRows, fields: RoundingFields, path: FieldPath, *, declared: bool
) -> FieldWarnings:
    says = fields.exact or fields.digits is not None or declared
    if says or fields.decimals is not None or fields.significant_digits is not None:
        return
    numbers = parse_printed(rows, make_printed_rounding(fields))
    uneven = _find_uneven_digits(numbers)
    if uneven is None:
        return
    short, decimals = uneven
    first = tuple(np.argwhere(short)[0])
    within = f"{numbers.half_unit[first]:.1g}"
    others = int(short.sum()) - 1
    shown = f"{numbers.text[first]} and {others} more show" if others else f"{numbers.text[first]} shows"
    yield (
        path,
        f"{shown} fewer digits than numbers beside, so that anything within {within} of it holds: say "
        f"`decimals: {decimals}` if all were rounded alike and NumPy left zeros out, `significant_digits` for those "
        "of R and %g, `exact: true`, or `digits: rounded` if each shows all the digits that it was rounded to",
    )


def _find_uneven_digits(numbers: PrintedArray) -> tuple[NDArray[np.bool_], int] | None:
    """Return which numbers show fewer digits than neighbours, and the largest number of decimals; None if none do."""
    text = numbers.text
    decimals, digits = _count_digits(text)
    if not text.size:
        return None
    short = (decimals > _DIGITS_OF_NO_NUMBER) & (decimals < decimals.max()) & (digits < digits.max())
    of_numpy = np.array([str(number).endswith(".") for number in text.ravel()]).reshape(text.shape)
    for axis in (-1, -2)[: text.ndim]:
        if text.shape[axis] > 1:
            short &= of_numpy | (decimals < decimals.max(axis=axis, keepdims=True))
    largest = np.abs(numbers.value[np.isfinite(numbers.value)]).max(initial=0.0)
    short &= (2 * digits <= digits.max()) | (numbers.half_unit > _MAX_SILENT_ERROR * largest)
    return (short, int(decimals.max())) if short.any() else None


def _count_digits(text: NDArray[np.object_]) -> tuple[Counts, Counts]:
    """Return every number's decimals and significant digits; a zero has none of these."""
    decimals, digits = np.full(text.shape, _DIGITS_OF_NO_NUMBER), np.full(text.shape, _DIGITS_OF_NO_NUMBER)
    for index in np.ndindex(text.shape):
        try:
            number = Decimal(str(text[index]))
        except InvalidOperation:  # a number that is not given
            continue
        if number.is_finite():
            decimals[index] = max(0, -int(number.as_tuple().exponent))
            digits[index] = len(number.as_tuple().digits) if number else 0
    return decimals, digits


_IS_FAILURE_LIST = (
    "expected a mapping of fields, got what looks like a list of expected failures; name such a list in pyproject.toml "
    "(tool.attncheck.expected_failures) or with --expected-failures"
)


def load_case_file(
    path: Path,
    display_name: str,
    id_prefix: str,
    known_tags: Iterable[str],
    *,
    for_each: Sequence[Mapping[str, Any]] = (),
) -> list[Case]:
    """Read one file. Raises ``CaseError`` with every fault that can be told apart.

    ``display_name`` stands for the file in messages and reports; a case's id is ``id_prefix``/its own, or its
    name in lower case.
    ``for_each`` are rows to be used in the place of the file's own.
    """
    with hide_linked_files(path, display_name):
        document, file, numbers, misread = _read_case_file(path, display_name, for_each)
        reader = _CaseReader(
            file, document, display_name, id_prefix, frozenset(known_tags), _make_shared_array_checker(file)
        )
        faults: list[CaseFileError] = []
        cases: list[Case] = []
        for number, entry in zip(numbers, file.cases, strict=True):
            try:
                cases.append(reader.read_case(entry, ("cases", number)))
            except CaseFileError as fault:
                faults += (fault, *fault.others)
        if faults or misread:
            raise CaseError([*misread, *diagnostics.merge_faults(faults, display_name, document)])
        return cases


def make_case_from_data(
    data: Mapping[str, Any], folder: Path, identity: str, arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})
) -> Case:
    """Return the one case of a file that was never written: ``data`` is what would stand in it, plain lists and texts.

    Arrays in files of their own lie in ``folder``, or are among ``arrays``, by the names of the files. Raises
    ``CaseError`` as for a file.
    """
    document = DocumentWithoutFile(data, {})
    prefix, _, case_id = identity.rpartition("/")
    try:
        context = {FOLDER_CONTEXT_KEY: str(folder), ARRAYS_CONTEXT_KEY: arrays}
        file = model.CaseFile.model_validate(data, context=context)
        reader = _CaseReader(file, document, identity, prefix, frozenset(), _make_shared_array_checker(file))
        [entry] = file.cases
        return reader.read_case(entry.model_copy(update={"id": case_id}), ("cases", 0))
    except ValidationError as error:
        raise CaseError(diagnostics.diagnostics_of_validation_error(error, identity, document)) from None
    except CaseFileError as fault:
        every = (fault, *fault.others)
        raise CaseError([make_diagnostic_at(item.path, str(item), identity, document) for item in every]) from None


_PLACEHOLDER_FIELDS: Mapping[str, Any] = {"title": "title", "source": {"kind": "derivation", "title": "source"}}
"""Values for a wrong title or source, which no other field depends on, so that the mistakes in cases are found too."""


def _read_case_file(
    path: Path, display_name: str, for_each: Sequence[Mapping[str, Any]]
) -> tuple[YamlDocument, model.CaseFile, Sequence[int], list[Diagnostic]]:
    """Return a file's data with its repeated cases written out, the checked fields, case numbers and faults.

    If only cases, the title or the source are at fault, the checked fields and numbers are those of the other cases.
    """
    document = _read_yaml_file(path, display_name)
    if for_each:
        document = replace(document, data={**document.data, FOR_EACH: [dict(row) for row in for_each]})
    entries = document.data if isinstance(document.data, list) else []
    if any(isinstance(entry, dict) and "verdict" in entry for entry in entries):
        raise CaseError([Diagnostic(display_name, _IS_FAILURE_LIST, 1)])
    document, misused = expand_cases(document)
    if misused:
        raise CaseError([make_diagnostic_at(fault.path, str(fault), display_name, document) for fault in misused])
    context = {FOLDER_CONTEXT_KEY: str(path.parent.resolve())}
    try:
        file = model.CaseFile.model_validate(document.data, context=context)
        return document, file, range(len(file.cases)), []
    except ValidationError as error:
        misread = diagnostics.diagnostics_of_validation_error(error, display_name, document)
        cases = document.data.get("cases") if isinstance(document.data, dict) else None
        wrong = {detail["loc"][:2] for detail in error.errors(include_url=False)}
        count = len(cases) if isinstance(cases, list) else 0
        numbers = [number for number in range(count) if ("cases", number) not in wrong]
    try:
        others = numbers and {
            **document.data,
            **{name: value for name, value in _PLACEHOLDER_FIELDS.items() if any(name == place[0] for place in wrong)},
            "cases": [document.data["cases"][number] for number in numbers],
        }
        return document, model.CaseFile.model_validate(others, context=context), numbers, misread
    except ValidationError:  # more than cases
        raise CaseError(misread) from None


def load_tags(folder: Path, display_name: str) -> dict[str, model.TagEntry]:
    """Read a folder's tags.yaml, if it has one. Raises ``CaseError``."""
    path = folder / model.TAG_FILE
    if not path.is_file():
        return {}
    with hide_linked_files(path, display_name):
        document = _read_yaml_file(path, display_name)
        try:
            return dict(model.TagFile.model_validate(document.data).tags)
        except ValidationError as error:
            raise CaseError(diagnostics.diagnostics_of_validation_error(error, display_name, document)) from None


def _read_yaml_file(path: Path, display_name: str) -> YamlDocument:
    try:
        return read_yaml(path)
    except YamlFault as fault:
        raise CaseError(diagnostics.diagnostics_of_yaml_fault(fault, display_name)) from None


def _check_tags(tags: list[str], known_tags: frozenset[str], where: FieldPath) -> None:
    unknown = sorted(set(tags) - known_tags)
    if unknown:
        raise CaseFileError(
            (*where, "tags"), f"undefined tag {unknown[0]!r}; define it in {model.TAG_FILE} beside the cases"
        )


def _make_shared_array_checker(file: model.CaseFile) -> Callable[[model.Random | None], CheckedArrays]:
    """Return a function that checks the arrays shared by the file's cases, once for each generator."""
    known: dict[str, CheckedArrays | CaseFileError] = {}

    def checked(random: model.Random | None) -> CheckedArrays:
        generator = random.generator if random else ""
        if generator not in known:
            try:
                known[generator] = check_named_arrays(file.arrays, NO_CHECKED_ARRAYS, random, ())
            except CaseFileError as fault:
                known[generator] = fault
        arrays = known[generator]
        if isinstance(arrays, CaseFileError):
            raise CaseFileError(arrays.path, str(arrays))
        return arrays

    return checked


@dataclass
class _CaseReader:
    """Reads the cases of one file, one after the other; ``names_of_earlier_cases`` are the names of those before."""

    file: model.CaseFile
    document: YamlDocument
    display_name: str
    id_prefix: str
    known_tags: frozenset[str]
    check_shared_arrays: Callable[[model.Random | None], CheckedArrays]
    budget: CaseBudget = field(default_factory=CaseBudget)
    names_of_earlier_cases: dict[str, str] = field(default_factory=dict)

    def read_case(self, entry: model.CaseEntry, where: FieldPath) -> Case:
        """Return a case. Raises ``CaseFileError`` for all of its faults that can be told apart."""
        location = self._locate_case(entry, where)
        random = find_random_settings(self.file, entry)

        def check_tags() -> None:
            _check_tags(self.file.defaults.tags, self.known_tags, ("defaults",))
            _check_tags(entry.tags, self.known_tags, where)

        def make_case() -> None:
            arrays = check_named_arrays(entry.arrays, self.check_shared_arrays(random), random, where)
            made.append((arrays, CaseMaker(self.file, entry, arrays, self.budget, location).make_case()))

        made: list[tuple[CheckedArrays, Case]] = []
        collect_results_or_faults([check_tags, make_case])
        [(arrays, case)] = made
        warned = find_uneven_digit_warnings(entry, arrays.sources, where)
        warnings = [
            str(make_diagnostic_at(path, message, self.display_name, self.document)) for path, message in warned
        ]
        return replace(case, warnings=tuple(dict.fromkeys(warnings)))

    def _locate_case(self, entry: model.CaseEntry, where: FieldPath) -> CaseLocation:
        """Name a case by its id, or by its name in lower case. Raises ``CaseFileError`` for one that is taken."""
        own_name, named_by = (slug(entry.name), "name") if entry.id is None else (entry.id, "id")
        if not own_name:
            raise CaseFileError((*where, "name"), f"expected a name with letters or digits, got {entry.name!r}")
        if own_name in self.names_of_earlier_cases:
            raise CaseFileError(
                (*where, named_by), f"duplicate {named_by}: {self.names_of_earlier_cases[own_name]!r} is already there"
            )
        self.names_of_earlier_cases[own_name] = entry.name
        line = self.document.locate(where)[1] or 1
        return CaseLocation(f"{self.id_prefix}/{own_name}", self.display_name, line, where)
