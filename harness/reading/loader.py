"""Case files read into cases; every fault says file, line, case, field and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attncheck.errors import CaseError, Diagnostic
from attncheck.reading import model
from attncheck.reading.arrays import (
    MAX_ELEMENTS,
    NO_ARRAYS,
    Arrays,
    is_too_large,
    looked_at,
    named_arrays,
    resolve_inputs,
)
from attncheck.reading.case import Case
from attncheck.reading.diagnostics import CaseFileError, diagnostic_at, diagnostics_of, told_once, yaml_diagnostics
from attncheck.reading.expectations import read_expectations
from attncheck.reading.for_each import slug
from attncheck.reading.forms import check_form, heads_note, memory_layout_of, merged_heads, projected_heads
from attncheck.reading.number_checks import check_at_most, check_lowest, check_range
from attncheck.reading.options import check_empty_rows, read_options
from attncheck.reading.repetition import FOR_EACH, write_out
from attncheck.reading.shapes import ShapeFault, bind_axes, optional_gradients, show, stage_shapes
from attncheck.reading.statistics_support import support_statistics
from attncheck.reading.uneven_digits import uneven_digits
from attncheck.reading.yaml_reader import YamlDocument, read_yaml
from attncheck.reading.yaml_scalars import FieldPath, YamlFault
from attncheck.spec import InputSpec, Options, Shape, computed_stages, inputs_of

TAG_FILE = "tags.yaml"
MAX_LOOKED_AT = 2**17
"""Numbers that are looked at one by one for all cases of a file, counted again wherever a case refers to them."""

_EXPECTED_FAILURES = (
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
    document = _read(path, display_name)
    if for_each:
        document = replace(document, data={**document.data, FOR_EACH: [dict(row) for row in for_each]})
    if isinstance(document.data, list) and any(isinstance(each, dict) and "verdict" in each for each in document.data):
        raise CaseError([Diagnostic(display_name, _EXPECTED_FAILURES, 1)])
    document, misused = write_out(document)
    if misused:
        raise CaseError([diagnostic_at(fault.path, str(fault), display_name, document) for fault in misused])
    try:
        file = model.CaseFile.model_validate(document.data)
    except ValidationError as error:
        raise CaseError(diagnostics_of(error, display_name, document)) from None
    tags, shared, budget = frozenset(known_tags), _shared_arrays(file), _Budget()
    faults: list[CaseFileError] = []
    cases: list[Case] = []
    seen: dict[str, str] = {}
    for number, entry in enumerate(file.cases):
        where: FieldPath = ("cases", number)
        try:
            own_name, field = (slug(entry.name), "name") if entry.id is None else (entry.id, "id")
            if not own_name:
                raise CaseFileError((*where, "name"), f"expected a name with letters or digits, got {entry.name!r}")
            if own_name in seen:
                raise CaseFileError((*where, field), f"duplicate {field}: {seen[own_name]!r} is already there")
            seen[own_name] = entry.name
            _check_tags(file.defaults.tags, tags, ("defaults",))
            _check_tags(entry.tags, tags, where)
            location = _CaseLocation(f"{id_prefix}/{own_name}", display_name, document.locate(where)[1] or 1, where)
            random = _random_of(file, entry)
            arrays = named_arrays(entry.arrays, shared(random), random, where)
            case = _make_case(file, entry, arrays, budget, location)
            warned = uneven_digits(entry, arrays.sources, where)
            warnings = [str(diagnostic_at(path, message, display_name, document)) for path, message in warned]
            cases.append(replace(case, warnings=tuple(dict.fromkeys(warnings))))
        except CaseFileError as fault:
            faults.append(fault)
    if faults:
        raise CaseError(told_once(faults, display_name, document))
    return cases


def load_tags(folder: Path, display_name: str) -> dict[str, model.TagEntry]:
    """Read a folder's tags.yaml, if it has one. Raises ``CaseError``."""
    path = folder / TAG_FILE
    if not path.is_file():
        return {}
    document = _read(path, display_name)
    try:
        return dict(model.TagFile.model_validate(document.data).tags)
    except ValidationError as error:
        raise CaseError(diagnostics_of(error, display_name, document)) from None


def _read(path: Path, display_name: str) -> YamlDocument:
    try:
        return read_yaml(path)
    except YamlFault as fault:
        raise CaseError(yaml_diagnostics(fault, display_name)) from None


def _check_tags(tags: list[str], known_tags: frozenset[str], where: FieldPath) -> None:
    unknown = sorted(set(tags) - known_tags)
    if unknown:
        raise CaseFileError((*where, "tags"), f"undefined tag {unknown[0]!r}; define it in {TAG_FILE} beside the cases")


@dataclass
class _Budget:
    """What reading a file may cost, whatever its cases refer to."""

    left: int = MAX_LOOKED_AT

    def spend(self, numbers: int, path: FieldPath) -> None:
        """Raises ``CaseFileError`` where the cases read so far have used it up."""
        self.left -= numbers
        if self.left < 0:
            raise CaseFileError(
                path,
                f"the file's cases spell out or refer to more than {MAX_LOOKED_AT} numbers; draw large arrays instead "
                "of typing them, or write several files",
            )


def _random_of(file: model.CaseFile, entry: model.CaseEntry) -> model.Random | None:
    return entry.random or file.defaults.random


def _shared_arrays(file: model.CaseFile) -> Callable[[model.Random | None], Arrays]:
    """Return what checks the arrays that the file's cases share: once for each generator, not for each case."""
    known: dict[str, Arrays | CaseFileError] = {}

    def checked(random: model.Random | None) -> Arrays:
        generator = random.generator if random else ""
        if generator not in known:
            try:
                known[generator] = named_arrays(file.arrays, NO_ARRAYS, random, ())
            except CaseFileError as fault:
                known[generator] = fault
        found = known[generator]
        if isinstance(found, CaseFileError):
            raise CaseFileError(found.path, str(found))
        return found

    return checked


@dataclass(frozen=True)
class _CaseLocation:
    """What a case is called, and where it stands."""

    id: str
    file: str
    line: int
    path: FieldPath


def _make_case(
    file: model.CaseFile, entry: model.CaseEntry, arrays: Arrays, budget: _Budget, location: _CaseLocation
) -> Case:
    where = location.path
    operation = entry.operation or file.operation
    options = read_options(file.defaults.options, entry, operation, where)
    specs = inputs_of(operation, str(options["score"]) if "score" in options else None)
    random = _random_of(file, entry)
    dtypes = tuple(dict.fromkeys(entry.dtypes or file.defaults.dtypes))
    merged = merged_heads(entry, operation, options, where)
    heads = merged | projected_heads(specs, options)
    budget.spend(looked_at(entry, arrays), (*where, "inputs"))
    inputs = resolve_inputs(entry, specs, arrays, random, operation, where, heads=heads)
    if not computed_stages(operation, options, inputs.sources):
        raise CaseFileError(
            (*where, "inputs"),
            f"{operation} needs a mask, a bias, key_lengths, a query_mask, options.is_causal or a window",
        )
    lengths = _lengths(specs, inputs, options, where)
    computed_in = entry.computed_in or file.source.computed_in
    stored_in = tuple(filter(None, [entry.storage, computed_in]))
    _check_numbers(specs, inputs, arrays, (dtypes, stored_in), lengths["T"], where)
    check_empty_rows(entry, options, inputs.sources, arrays.sources, lengths["T"], where)
    supports_statistics = entry.supports_statistics
    if supports_statistics is None:
        supports_statistics = entry.storage is None and support_statistics(
            specs, inputs.sources, arrays.sources, options
        )
    case = Case(
        id=location.id,
        name=entry.name,
        file=location.file,
        line=location.line,
        title=file.title,
        source=file.source,
        operation=operation,
        random=random,
        arrays=arrays.sources,
        inputs=inputs.sources,
        input_shapes=inputs.shapes,
        stage_shapes=_stage_shapes(operation, lengths, inputs, entry.stages, where),
        options=Options(**options),
        dtypes=dtypes,
        tags=tuple(dict.fromkeys([*file.defaults.tags, *entry.tags])),
        notes=tuple(entry.notes),
        allow_nonfinite=entry.allow_nonfinite,
        supports_statistics=supports_statistics,
        storage=entry.storage,
        merged=frozenset(merged),
        memory_layout=memory_layout_of(entry, merged, where),
        judged_stages=tuple(entry.stages) if entry.stages else None,
        computed_in=computed_in,
    )
    if "broadcast" in entry.memory_layout.values():  # whose arrays are made here, and looked at
        budget.spend(inputs.numbers, (*where, "memory_layout"))
    check_form(case, where)
    return replace(case, expected=read_expectations(entry, case, where))


def _lengths(
    specs: Mapping[str, InputSpec], inputs: Arrays, options: Mapping[str, Any], where: FieldPath
) -> dict[str, int]:
    try:
        return bind_axes(specs, inputs.shapes, options.get("heads"), options.get("kv_heads"))
    except ShapeFault as fault:
        message = f"{fault}{heads_note(inputs.given[fault.field], inputs.shapes[fault.field])}"
        raise CaseFileError((*where, "inputs", fault.field), message) from None


def _check_numbers(
    specs: Mapping[str, InputSpec],
    inputs: Arrays,
    arrays: Arrays,
    dtypes: tuple[tuple[str, ...], tuple[str, ...]],
    keys: int,
    where: FieldPath,
) -> None:
    """Refuse what the narrowest dtype cannot hold, and counts of more keys than there are.

    ``dtypes`` are those that the case is computed in, and those that its inputs are rounded to before.
    """
    computed_in, stored_in = dtypes
    for name, source in inputs.sources.items():
        path = (*where, "inputs", name)
        if specs[name].is_number:
            check_range(source, arrays.sources, path, (*computed_in, *stored_in))
            check_lowest(source, arrays.sources, path, stored_in)
        if specs[name].whole:
            check_at_most(source, arrays.sources, path, keys, "keys")


def _stage_shapes(
    operation: str, lengths: Mapping[str, int], inputs: Arrays, judged: Collection[str] | None, where: FieldPath
) -> dict[str, Shape]:
    """Return every stage's shape; one that is judged is refused where it is too large, others nobody has to hold."""
    shapes = stage_shapes(operation, lengths)
    shapes |= {
        stage: inputs.shapes[name] for stage, name in optional_gradients(operation).items() if name in inputs.shapes
    }
    for stage, shape in shapes.items():
        if is_too_large(shape) and (judged is None or stage in judged):
            message = f"{stage} would be {show(shape)}; expected at most {MAX_ELEMENTS} elements"
            if judged is None and not is_too_large(shapes[list(shapes)[-1]]):
                message += f", or `stages: [{list(shapes)[-1]}]` to judge that alone"
            raise CaseFileError((*where, "inputs"), message)
    return shapes
