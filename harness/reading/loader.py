"""Case files read into cases; every fault says file, line, case, field and what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attncheck.harness.errors import CaseError, Fault
from attncheck.harness.reading import model
from attncheck.harness.reading.arrays import MAX_ELEMENTS, Arrays, is_too_large, named_arrays, resolve_inputs
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.expectations import read_expectations
from attncheck.harness.reading.faults import FieldFault, case_name, dotted, fault_at, faults_of
from attncheck.harness.reading.forms import check_form, memory_of, merged_heads, projected_heads
from attncheck.harness.reading.genericity import are_generic
from attncheck.harness.reading.number_checks import check_at_most, check_range
from attncheck.harness.reading.options import check_empty_rows, read_options
from attncheck.harness.reading.shapes import ShapeFault, bind_axes, show, stage_shapes
from attncheck.harness.reading.yaml_reader import YamlDocument, read_yaml
from attncheck.harness.reading.yaml_scalars import FieldPath, YamlFault
from attncheck.harness.vocabulary import InputSpec, Shape, computed_stages, inputs_of

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
    options = read_options(file.defaults.options, entry, operation, where)
    specs = inputs_of(operation, str(options["score"]) if "score" in options else None)
    random = entry.random or file.defaults.random
    dtypes = tuple(dict.fromkeys(entry.dtypes or file.defaults.dtypes))
    arrays = named_arrays(file, entry, random, where)
    merged = merged_heads(entry, operation, options, where)
    heads = merged | projected_heads(specs, options)
    inputs = resolve_inputs(entry, specs, arrays, random, operation, where, heads=heads)
    if not computed_stages(operation, options, inputs.sources):
        raise FieldFault(
            (*where, "inputs"),
            f"{operation} needs a mask, a bias, key_lengths, a query_mask, options.is_causal or a window",
        )
    lengths = _lengths(specs, inputs, options, where)
    _check_numbers(specs, inputs, arrays, (*dtypes, *filter(None, [entry.storage])), lengths["T"], where)
    check_empty_rows(entry, options, inputs.sources, arrays.sources, lengths["T"], where)
    generic = entry.generic
    if generic is None:
        generic = entry.storage is None and are_generic(specs, inputs.sources, arrays.sources, options)
    case = Case(
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
        stage_shapes=_stage_shapes(operation, lengths, inputs, where),
        options=options,
        dtypes=dtypes,
        tags=tuple(dict.fromkeys([*file.defaults.tags, *entry.tags])),
        notes=tuple(entry.notes),
        allow_nonfinite=entry.allow_nonfinite,
        generic=generic,
        storage=entry.storage,
        merged=frozenset(merged),
        memory=memory_of(entry, merged, where),
        judged_stages=tuple(entry.stages) if entry.stages else None,
    )
    check_form(case, where)
    return replace(case, expected=read_expectations(entry.expect, case, where))


def _lengths(
    specs: Mapping[str, InputSpec], inputs: Arrays, options: Mapping[str, Any], where: FieldPath
) -> dict[str, int]:
    try:
        return bind_axes(specs, inputs.shapes, options.get("heads"), options.get("kv_heads"))
    except ShapeFault as fault:
        raise FieldFault((*where, "inputs", fault.field), str(fault)) from None


def _check_numbers(
    specs: Mapping[str, InputSpec],
    inputs: Arrays,
    arrays: Arrays,
    dtypes: tuple[str, ...],
    keys: int,
    where: FieldPath,
) -> None:
    """Refuse what the narrowest dtype cannot hold, and counts of more keys than there are."""
    for name, source in inputs.sources.items():
        path = (*where, "inputs", name)
        if specs[name].is_number:
            check_range(source, arrays.sources, path, dtypes)
        if specs[name].whole:
            check_at_most(source, arrays.sources, path, keys, "keys")


def _stage_shapes(operation: str, lengths: Mapping[str, int], inputs: Arrays, where: FieldPath) -> dict[str, Shape]:
    shapes = stage_shapes(operation, lengths)
    if operation == "attention_gradients" and "bias" in inputs.shapes:
        shapes["grad_bias"] = inputs.shapes["bias"]
    for stage, shape in shapes.items():
        if is_too_large(shape):
            message = f"{stage} would be {show(shape)}; expected at most {MAX_ELEMENTS} elements"
            raise FieldFault((*where, "inputs"), message)
    return shapes
