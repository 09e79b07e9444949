"""Case files read into cases; every fault says file, line, case, field and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from attncheck.harness.errors import CaseError, Fault
from attncheck.harness.reading import model
from attncheck.harness.reading.arrays import MAX_ELEMENTS, named_arrays, resolve_inputs
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.expectations import read_expectation
from attncheck.harness.reading.faults import FieldFault, case_name, dotted, fault_at, faults_of
from attncheck.harness.reading.genericity import are_generic
from attncheck.harness.reading.number_checks import check_range
from attncheck.harness.reading.shapes import ShapeFault, bind_axes, show, stage_shapes
from attncheck.harness.reading.yaml_reader import YamlDocument, read_yaml
from attncheck.harness.reading.yaml_scalars import FieldPath, YamlFault
from attncheck.harness.vocabulary import OPERATIONS, Shape, inputs_of

TAG_FILE = "tags.yaml"


def load_case_file(path: Path, display_name: str, id_prefix: str, known_tags: Iterable[str]) -> list[Case]:
    """Read one file. Raises ``CaseError`` with every fault that can be told apart.

    ``display_name`` stands for the file in messages and reports; a case's id is ``id_prefix``/its name in lower case.
    """
    document = _read(path, display_name)
    try:
        file = model.CaseFile.model_validate(document.data)
    except ValidationError as error:
        raise CaseError(faults_of(error, display_name, document)) from None
    tags = frozenset(known_tags)
    faults: list[Fault] = []
    cases: list[Case] = []
    seen: dict[str, str] = {}
    for number, entry in enumerate(file.cases):
        where: FieldPath = ("cases", number)
        try:
            slug = _slug(entry.name)
            if not slug:
                raise FieldFault((*where, "name"), f"expected a name with letters or digits, got {entry.name!r}")
            if slug in seen:
                raise FieldFault((*where, "name"), f"duplicate name: {seen[slug]!r} is already there")
            seen[slug] = entry.name
            _check_tags(file.defaults.tags, tags, ("defaults",))
            _check_tags(entry.tags, tags, where)
            line = document.lines[where]
            cases.append(_make_case(file, entry, f"{id_prefix}/{slug}", display_name, line, where))
        except FieldFault as fault:
            faults.append(fault_at(fault.path, str(fault), display_name, document))
    if faults:
        # What is wrong at the top of the file is found again with each case.
        raise CaseError(list(dict.fromkeys(faults)))
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
        raise CaseError(faults_of(error, display_name, document)) from None


def _read(path: Path, display_name: str) -> YamlDocument:
    try:
        return read_yaml(path)
    except YamlFault as fault:
        place = case_name(fault.path, None), dotted(fault.path)
        raise CaseError([Fault(display_name, str(fault), fault.line, *place)]) from None


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _check_tags(tags: list[str], known_tags: frozenset[str], where: FieldPath) -> None:
    unknown = sorted(set(tags) - known_tags)
    if unknown:
        raise FieldFault((*where, "tags"), f"undefined tag {unknown[0]!r}; define it in {TAG_FILE} beside the cases")


def _make_case(
    file: model.CaseFile, entry: model.CaseEntry, case_id: str, display_name: str, line: int, where: FieldPath
) -> Case:
    operation = entry.operation or file.operation
    options = _options(file.defaults.options, entry.options, operation, where)
    specs = inputs_of(operation, str(options["score"]) if "score" in options else None)
    random = entry.random or file.defaults.random
    arrays = named_arrays(file, entry, random, where)
    inputs = resolve_inputs(entry, specs, arrays, random, operation, where)
    dtypes = tuple(dict.fromkeys(entry.dtypes or file.defaults.dtypes))
    for name, source in inputs.sources.items():
        check_range(source, arrays.sources, (*where, "inputs", name), dtypes)
    if operation == "masking" and set(inputs.sources) == {"scores"} and not options.get("is_causal"):
        raise FieldFault((*where, "inputs"), "masking needs a mask, a bias or options.is_causal")
    heads = options.get("heads")
    try:
        lengths = bind_axes(specs, inputs.shapes, int(heads) if heads is not None else None)
    except ShapeFault as fault:
        raise FieldFault((*where, "inputs", fault.field), str(fault)) from None
    shapes = stage_shapes(operation, lengths)
    _check_sizes(shapes, (*where, "inputs"))
    expected = tuple(
        read_expectation(source, operation, shapes, inputs.shapes, (*where, "expect", number))
        for number, source in enumerate(entry.expect)
    )
    generic = entry.generic
    if generic is None:
        generic = are_generic(specs, inputs.sources, arrays.sources, options)
    return Case(
        id=case_id,
        name=entry.name,
        file=display_name,
        line=line,
        title=file.title,
        source=file.source,
        operation=operation,
        random=random,
        arrays=arrays.sources,
        inputs=inputs.sources,
        input_shapes=inputs.shapes,
        stage_shapes=shapes,
        options=options,
        dtypes=dtypes,
        expected=expected,
        tags=tuple(dict.fromkeys([*file.defaults.tags, *entry.tags])),
        notes=tuple(entry.notes),
        allow_nonfinite=entry.allow_nonfinite,
        generic=generic,
    )


def _check_sizes(shapes: Mapping[str, Shape], path: FieldPath) -> None:
    for stage, shape in shapes.items():
        if math.prod(shape) > MAX_ELEMENTS:
            raise FieldFault(path, f"{stage} would be {show(shape)}; expected at most {MAX_ELEMENTS} elements")


def _options(
    defaults: model.Options, own: model.Options, operation: str, where: FieldPath
) -> dict[str, str | float | bool | int]:
    """Merge a case's options over the file's; the case's own must apply to its operation."""
    allowed = OPERATIONS[operation].options
    given = own.model_dump(exclude_none=True)
    for name in given:
        if name not in allowed:
            listed = ", ".join(sorted(allowed)) or "no options"
            raise FieldFault((*where, "options", name), f"does not apply to {operation}, which takes {listed}")
    shared = {name: value for name, value in defaults.model_dump(exclude_none=True).items() if name in allowed}
    options = shared | given
    if operation == "multi_head_attention" and "heads" not in options:
        raise FieldFault((*where, "options"), "multi_head_attention needs options.heads")
    scale: FieldPath = (*(where if "scale" in given else ("defaults",)), "options", "scale")
    if options.get("score") in ("general", "additive") and "scale" in options:
        raise FieldFault(scale, f"the {options['score']} score has no scale")
    if not math.isfinite(options.get("scale", 1.0)):
        raise FieldFault(scale, f"expected a finite number, got {options['scale']}")
    return options
