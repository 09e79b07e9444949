"""Projections as ``nn.Linear`` of torch holds them: weights (out, in), and three of them packed in one.

A case of ``projections: linear`` is rewritten to one whose weights are (in, out) before anything else is read of it, so
that nobody else knows of the other layout. What is wrong is told in the file's own names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attncheck.reading import array_kinds as kinds
from attncheck.reading import model
from attncheck.reading.arrays import Arrays, named_arrays
from attncheck.reading.diagnostics import CaseFileError
from attncheck.reading.shapes import show
from attncheck.reading.yaml_scalars import FieldPath
from attncheck.spec import OPERATIONS, PACKED_PROJECTIONS, Shape

LINEAR = "linear"
_INLINE = "inputs."
"""Begins the name of a packed array that is written where it is used; no array of a file has a dot in its name."""
_WEIGHTS = frozenset(
    name
    for operation in OPERATIONS.values()
    if operation.has_projections
    for name in operation.inputs
    if name.endswith("_weight")
)


def read_linear(
    entry: model.CaseEntry,
    options: Mapping[str, Any],
    arrays: Arrays,
    random: model.Random | None,
    where: FieldPath,
) -> tuple[model.CaseEntry, Arrays]:
    """Return the case whose projections are (in, out), one for each input, and the arrays that it refers to.

    A packed array that is written where it is used is drawn before the other inputs. Raises ``CaseFileError`` for one
    that cannot be cut, and where the case does not say that its projections are linear.
    """
    packed = [name for name in PACKED_PROJECTIONS if name in entry.inputs]
    if options.get("projections") != LINEAR:
        if packed:
            message = "holds three projections as nn.Linear does; such a case has `options: {projections: linear}`"
            raise CaseFileError((*where, "inputs", packed[0]), message)
        return entry, arrays
    inputs: dict[str, kinds.Input] = {}
    for name, given in entry.inputs.items():
        if name in PACKED_PROJECTIONS:
            parts, arrays = _cut(name, given, entry, (options, arrays, random), where)
            inputs |= parts
        else:
            inputs[name] = _turned(given) if name in _WEIGHTS else given
    return entry.model_copy(update={"inputs": inputs}), arrays


def in_terms_of_file(error: CaseFileError, entry: model.CaseEntry, where: FieldPath) -> CaseFileError:
    """Return a fault of an input that was cut from a packed one as a fault of that."""
    if error.others:
        first, *others = (in_terms_of_file(each, entry, where) for each in (_alone(error), *error.others))
        return CaseFileError(first.path, str(first), others)
    field = error.path[len(where) :]
    if field[:1] != ("inputs",) or len(field) < 2 or field[1] in entry.inputs:
        return error
    for packed, names in PACKED_PROJECTIONS.items():
        if field[1] in names and packed in entry.inputs:
            return CaseFileError((*where, "inputs", packed, *field[2:]), f"{field[1]}: {error}")
    return error


def _alone(error: CaseFileError) -> CaseFileError:
    return CaseFileError(error.path, str(error))


def linear_note(name: str, given: Shape, options: Mapping[str, Any]) -> str:
    """Say which shape a weight has in the file, where messages have the other one."""
    if options.get("projections") != LINEAR or name not in _WEIGHTS or len(given) < 2:
        return ""
    return f"; projections are linear: {show((*given[:-2], given[-1], given[-2]))} in the file is (out, in)"


def _turned(given: kinds.Input) -> kinds.Array:
    """Swap the last two axes: of each head, where there is a matrix for each."""
    source = kinds.as_array(given)
    if isinstance(given, str):
        return source.model_copy(update={"transpose": True})
    return source.model_copy(update={"transpose": not source.transpose})


def _cut(
    name: str,
    given: kinds.Input,
    entry: model.CaseEntry,
    read: tuple[Mapping[str, Any], Arrays, model.Random | None],
    where: FieldPath,
) -> tuple[dict[str, kinds.Input], Arrays]:
    """Return the three inputs that a packed one holds, as rows of it."""
    options, arrays, random = read
    path = (*where, "inputs", name)
    for own in PACKED_PROJECTIONS[name]:
        if own in entry.inputs:
            raise CaseFileError((*where, "inputs", own), f"is given twice: {name} holds it, too")
    label = given if isinstance(given, str) else f"{_INLINE}{name}"
    if label not in arrays.sources:
        try:
            arrays = named_arrays({label: kinds.as_array(given)}, arrays, random, where)
        except CaseFileError as error:
            raise CaseFileError((*path, *error.path[len(where) + 2 :]), str(error)) from None
    shape, is_weight = arrays.shapes[label], name.endswith("_weight")
    limits = _limits(name, shape, options, path)
    cut = {
        own: kinds.Reference.model_construct(ref=label, rows=list(range(*each)), transpose=is_weight)
        for own, each in zip(PACKED_PROJECTIONS[name], pairwise(limits), strict=True)
    }
    return dict(cut), arrays


def _limits(name: str, shape: Shape, options: Mapping[str, Any], path: FieldPath) -> tuple[int, ...]:
    """Return where the rows of query, key and value begin and end."""
    heads = int(options.get("heads", 1))  # without which the case is refused
    shared = int(options.get("kv_heads", heads))
    together = heads + 2 * shared
    axes = "(3E, E)" if name.endswith("_weight") else "(3E)"
    if len(shape) != axes.count("E"):
        raise CaseFileError(path, f"expected {axes}, the rows of query, key and value, got shape {show(shape)}")
    if shape[0] % together:
        raise CaseFileError(
            path,
            f"shape {show(shape)}: {shape[0]} rows cannot be shared evenly by {heads} heads of queries, {shared} of "
            f"keys and {shared} of values",
        )
    width = shape[0] // together
    return 0, width * heads, width * (heads + shared), shape[0]
