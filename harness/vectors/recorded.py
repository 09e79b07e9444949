"""Outputs that somebody computed elsewhere, as an implementation: a call is looked up by its digest.

Outputs that were computed elsewhere, run as an implementation: judged, and recorded in a folder of results.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.config import expected_failures_of
from attncheck.errors import ResultsError, UsageError
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import user_implementation
from attncheck.execution.implementations import ImplementationSelection
from attncheck.execution.signatures import FUNCTIONS, INPUTS
from attncheck.execution.user_code import Target
from attncheck.reading.selection import Selection
from attncheck.reading.stored_arrays import SAFETENSORS
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.store import user_store
from attncheck.vectors.export import digest_of_call, read_lines

Array = NDArray[Any]
SUFFIXES = (".npz", ".safetensors")


class RecordedFunction:
    """One function of the contract that gives what was computed elsewhere."""

    def __init__(self, outputs: RecordedOutputs, name: str) -> None:
        self._outputs, self.__name__ = outputs, name
        positional = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_ONLY) for each in INPUTS[name]]
        rest = inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = inspect.Signature([*positional, rest])

    def __call__(self, *positional: Any, **keywords: Any) -> dict[str, Array]:
        """Return the stages of a call. Raises ``NotImplementedError`` where nobody computed it."""
        named = dict(zip(INPUTS[self.__name__], positional, strict=True))
        arrays = {**named, **{name: each for name, each in keywords.items() if isinstance(each, np.ndarray)}}
        options = {name: each for name, each in keywords.items() if name not in arrays}
        return self._outputs.of_call(digest_of_call(self.__name__, options, arrays))


class RecordedOutputs:
    """All functions of the contract on outputs of ``file``, for the calls of the vectors in a folder.

    ``models`` are the rounding models by dtype, where they are not the usual ones.
    """

    def __init__(self, folder: Path, file: Path, models: Mapping[str, str]) -> None:
        self._file, self.classes = file, dict(models)
        lines = list(read_lines(folder))
        self._places = {line["call"]: f"{line['id']}/{line['dtype']}" for line in lines}
        self._dtypes = {
            f"{line['id']}/{line['dtype']}/{stage['name']}": stage["dtype"]
            for line in lines
            for stage in line["stages"]
        }
        self.capabilities = {"dtypes": sorted({line["dtype"] for line in lines})}
        self.cases = sorted({line["id"] for line in lines})
        self.names = sorted(set(names_in(file)) & self._dtypes.keys())
        for name in FUNCTIONS:
            setattr(self, name, RecordedFunction(self, name))

    def of_call(self, digest: str) -> dict[str, Array]:
        """Return the stages that were computed of a call. Raises ``NotImplementedError`` where there are none."""
        place = self._places.get(digest)
        if place is None:
            raise NotImplementedError("the vectors hold no such call: the case has changed since they were written")
        names = [name for name in self.names if name.rpartition("/")[0] == place]
        if not names:
            raise NotImplementedError("no output was handed in")
        return {
            name.rpartition("/")[2]: self._typed(read_array(self._file, name), self._dtypes[name]) for name in names
        }

    def _typed(self, array: Array, dtype: str) -> Array:
        """Return 16 bits without a type of NumPy's, as .npz holds bfloat16, in the dtype that they are of."""
        is_raw = dtype == "bfloat16" and array.dtype.itemsize == 2 and array.dtype.kind in "Vu"
        return array.view(ml_dtypes.bfloat16) if is_raw else array


def names_in(file: Path) -> list[str]:
    """Return the names of the arrays of a file. Raises ``ResultsError`` where it cannot be read."""
    if file.suffix not in SUFFIXES:
        raise ResultsError(f"{file}: expected outputs in a file that ends with {' or '.join(SUFFIXES)}")
    try:
        if file.suffix == ".safetensors":
            return [name for name in _header(file)[0] if name != "__metadata__"]
        with np.load(file, allow_pickle=False) as archive:
            return list(archive.files)
    except (OSError, ValueError, KeyError) as error:
        raise ResultsError(f"{file} cannot be read: {error}") from None


def read_array(file: Path, name: str) -> Array:
    """Return an array of a file, as it is stored."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            array: Array = archive[name]
            return array
    header, begin = _header(file)
    entry = header[name]
    first, end = entry["data_offsets"]
    with file.open("rb") as stream:
        stream.seek(begin + first)
        return np.frombuffer(stream.read(end - first), SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its numbers begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        return json.loads(stream.read(length)), 8 + length


NAME = "vectors.outputs"


def run_recorded(recorded: RecordedOutputs, selection: Selection, dtypes: Sequence[str], output: Path) -> RunSummary:
    """Judge recorded outputs in the selected cases of the vectors. Raises ``UsageError`` where there are none."""
    known = frozenset(recorded.cases)
    cases = tuple(case for case in selection.cases if case.id in known)
    if not cases:
        raise UsageError("the vectors hold none of these cases; name the cases that they were written of")
    if not recorded.names:
        raise UsageError("the outputs have no name of a stage of the vectors, such as attention/a-case/float32/output")
    limits = Limits(keep_going=True)
    chosen = user_implementation(Target("", "", cloudpickle.dumps(recorded)), None, limits, NAME)
    settings = Settings(
        output,
        dtypes=tuple(dtypes),
        limits=limits,
        command=sys.orig_argv,
        expected_failures=expected_failures_of([chosen.entry.name]),
        tags=selection.tags,
        picked={"cases": [case.id for case in cases]} if len(cases) < len(selection.cases) else {},
        store=user_store(),
    )
    return run_cases(cases, ImplementationSelection((chosen,)), settings, replace(selection, cases=cases).faults)
