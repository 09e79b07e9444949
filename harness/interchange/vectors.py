"""Vectors: cases with their inputs, exact answers and error bounds as files that any language reads, and back.

There is one line of JSON for each case and dtype, and one safetensors file with all arrays. A line contains the offset
of each array in that file, so that no library is necessary to read it: ``docs/vectors.md``. Inputs are rounded to their
dtype, and there is a bound for each element and rounding model.

Outputs that another program computed from such files are judged as an implementation: a call is looked up by its
digest, and the results are written to a results directory.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.common.errors import CaseError, OutputError, ResultsError, UsageError
from attncheck.common.store import Store, digest_of, user_store
from attncheck.execution.call import Limits
from attncheck.execution.implementation_selection import load_user_implementation
from attncheck.execution.implementations import ImplementationSelection
from attncheck.execution.operations import function_and_keywords
from attncheck.execution.signatures import CONTRACT_FUNCTIONS, INPUTS_BY_FUNCTION
from attncheck.execution.user_code import Target
from attncheck.judging.stage_bounds import StageReference
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.planning.plan import Plan
from attncheck.reading.case import Case
from attncheck.reading.inputs import make_problem_of_case
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.reading.selection import CaseSelection
from attncheck.reading.stored_arrays import SAFETENSORS_DTYPES
from attncheck.run import RunSummary, Settings, run_cases
from attncheck.settings.config import load_expected_failures_of
from attncheck.spec import ROUNDING_MODELS, result_stages

FORMAT_VERSION = 1
LINES_FILE, ARRAYS_FILE = "vectors.jsonl", "vectors.safetensors"
_SAFETENSORS_NAMES: Mapping[str, str] = {dtype.name: name for name, dtype in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 8


class VectorsWriter:
    """Writes vectors to a folder. The arrays are in a temporary file until their offsets are known."""

    def __init__(self, folder: Path, arrays: IO[bytes]) -> None:
        self._folder, self._arrays, self._size = folder, arrays, 0
        self._records: list[dict[str, Any]] = []
        self._entries: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[VectorsWriter]:
        """Yield a writer, and write its files at the end. Raises ``OutputError`` if they cannot be written."""
        with OutputError.convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as arrays:
                writer = cls(folder, arrays)
                yield writer
                writer._write_files()

    def add(self, record: dict[str, Any], arrays: Mapping[str, Array]) -> None:
        """Add a line; in ``record`` every ``Name`` of one of the ``arrays`` is replaced by its location."""
        for name, array in arrays.items():
            data = np.ascontiguousarray(array).tobytes()
            self._write_array(name, _SAFETENSORS_NAMES[str(array.dtype)], list(array.shape), data)
            if padding := -len(data) % _ALIGNMENT:  # aligned for readers that map the file; every byte needs a name
                self._write_array(f"{name}/padding", "U8", [padding], b"\0" * padding)
        self._records.append(record)

    def _write_array(self, name: str, kind: str, shape: list[int], data: bytes) -> None:
        self._entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [self._size, self._size + len(data)]}
        self._arrays.write(data)
        self._size += len(data)

    def _write_files(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        begin = 8 + len(header)
        self._arrays.seek(0)
        with (self._folder / ARRAYS_FILE).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(self._arrays, file)
        lines = (
            json.dumps(self._replace_names_by_locations(record, begin), separators=(",", ":"))
            for record in self._records
        )
        (self._folder / LINES_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

    def _replace_names_by_locations(self, value: Any, begin: int) -> Any:
        """Replace every name of an array in a record by its location."""
        if isinstance(value, ArrayName):
            first, end = self._entries[value]["data_offsets"]
            return {"tensor": str(value), "offset": begin + first, "bytes": end - first}
        if isinstance(value, dict):
            return {key: self._replace_names_by_locations(item, begin) for key, item in value.items()}
        return [self._replace_names_by_locations(item, begin) for item in value] if isinstance(value, list) else value


class ArrayName(str):
    """The name of an array, which is replaced by its location in the file."""

    __slots__ = ()


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of vectors. Raises ``ResultsError`` if there are none, or if they are damaged."""
    path = folder / LINES_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}; expected what `attncheck vectors export` wrote") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            known = record["attncheck_vectors"] == FORMAT_VERSION and isinstance(record["id"], str)
        except (ValueError, TypeError, KeyError) as error:
            raise ResultsError(f"{path}, line {number}: {error!r}; expected a line of vectors") from None
        if not known:
            raise ResultsError(f"{path}, line {number}: vectors of another version than {FORMAT_VERSION}")
        yield record


def call_digest(function: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> str:
    """Return the digest that identifies a call: of its function, options, and the bits of its inputs."""
    return digest_of(function, dict(options), {name: np.ascontiguousarray(array) for name, array in inputs.items()})


DEFAULT_MODELS = ("native", "eager", "fused")


@dataclass(frozen=True)
class ExportedVectors:
    """The number of written cases, each in a dtype, and of omitted ones by reason."""

    written_count: int
    omitted_by_reason: dict[str, int]


def export_vectors(
    cases: Sequence[Case], dtypes: Sequence[str], models: Sequence[str], folder: Path, store: Store
) -> ExportedVectors:
    """Write cases as vectors into a folder. Raises ``OutputError`` and ``UsageError``."""
    written, left_out = 0, dict[str, int]()
    plan = Plan.of(cases, dtypes)
    with VectorsWriter.open(folder) as writer:
        for unit in plan:
            case, inputs = plan.case(unit), plan.inputs(unit)
            problem = make_problem_of_case(case, inputs).as_call()
            stages = result_stages(problem.operation, problem.options, problem.inputs)
            truth = truth_of_case(case, inputs, stages, store)
            if reason := missing_vectors_reason(truth, stages):
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            root = f"{case.id}/{unit.dtype}"
            arrays: dict[str, Array] = {}
            allowed_by = [model for model in models if unit.dtype in ROUNDING_MODELS[model]]
            record = _line_fields(case.id, unit.dtype, problem) | {
                "inputs": [
                    _input_entry(root, f"inputs/{name}", array, arrays) for name, array in problem.inputs.items()
                ],
                "stages": [
                    _stage_entry(truth, stage, f"{root}/stages/{stage}", allowed_by, arrays) for stage in stages
                ],
            }
            writer.add(record, arrays)
            written += 1
    return ExportedVectors(written, left_out)


def _line_fields(case: str, dtype: str, problem: Problem) -> dict[str, Any]:
    """Return the fields of a line other than inputs and stages."""
    function, options = function_and_keywords(problem.operation, problem.options)
    return {
        "attncheck_vectors": FORMAT_VERSION,
        "id": case,
        "dtype": dtype,
        "operation": problem.operation,
        "function": function,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "call": call_digest(function, options, problem.inputs),
    }


def _input_entry(root: str, place: str, array: Array, arrays: dict[str, Array]) -> dict[str, Any]:
    """Return the entry of an input in a line, and add it to the ``arrays``."""
    data = ArrayName(f"{root}/{place}")
    arrays[data] = array
    name = place.partition("/")[2]
    return {"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def missing_vectors_reason(truth: Truth, stages: Sequence[str]) -> str:
    """Return why a case has no vectors; empty if it has them."""
    if truth.no_answer_reason:
        return "without an exact answer"
    if truth.judged_problem.judged_rows is not None:
        return "so large that some rows stand for all"
    return "" if stages and all(stage in truth.exact for stage in stages) else "without an exact answer"


def _stage_entry(
    truth: Truth, stage: str, place: str, models: Sequence[str], arrays: dict[str, Array]
) -> dict[str, Any]:
    """Return a stage's entry in a line; add high and low of its exact value, and a bound for each model."""
    exact = truth.exact[stage]
    arrays |= {f"{place}/exact": exact.high, f"{place}/low": exact.low}
    arrays |= {f"{place}/bounds/{model}": max_allowed_errors(truth.stage_reference(stage, model)) for model in models}
    return {
        "name": stage,
        "dtype": truth.bounds.stage_dtype(stage),
        "shape": list(exact.shape),
        "exact": ArrayName(f"{place}/exact"),
        "low": ArrayName(f"{place}/low"),
        "bounds": {model: ArrayName(f"{place}/bounds/{model}") for model in models},
    }


def max_allowed_errors(reference: StageReference) -> NDArray[np.float64]:
    """Return the largest error of each element: 0 if it has to be equal, infinite without an exact answer."""
    measured, radius = reference.measured_elements, reference.exact.radius
    most = np.where(measured, reference.bound.max_error, np.inf) + np.where(measured, radius, 0.0)
    return np.where(reference.nonfinite_exact_elements, 0.0, most)


def describe_export(exported: ExportedVectors) -> Iterator[str]:
    """Yield the lines about an export."""
    yield f"{exported.written_count:,} vectors: a case in a dtype each"
    for reason, count in sorted(exported.omitted_by_reason.items()):
        yield f"left out: {count:,} {reason}"


SUFFIXES = (".npz", ".safetensors")


class RecordedFunction:
    """One function of the contract that returns outputs computed by another program."""

    def __init__(self, outputs: RecordedOutputs, name: str) -> None:
        self._outputs, self.__name__ = outputs, name
        positional = [
            inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_ONLY) for parameter in INPUTS_BY_FUNCTION[name]
        ]
        rest = inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = inspect.Signature([*positional, rest])

    def __call__(self, *positional: Any, **keywords: Any) -> dict[str, Array]:
        """Return the stages of a call. Raises ``NotImplementedError`` if there are none."""
        named = dict(zip(INPUTS_BY_FUNCTION[self.__name__], positional, strict=True))
        arrays = {**named, **{name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}}
        options = {name: value for name, value in keywords.items() if name not in arrays}
        return self._outputs.stages_of_call(call_digest(self.__name__, options, arrays))


class RecordedOutputs:
    """All functions of the contract on outputs of ``file``, for the calls of the vectors in a folder.

    ``models`` are the rounding models by dtype, if they are not the usual ones.
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
        self.names = sorted(set(array_names(file)) & self._dtypes.keys())
        for name in CONTRACT_FUNCTIONS:
            setattr(self, name, RecordedFunction(self, name))

    def stages_of_call(self, digest: str) -> dict[str, Array]:
        """Return the computed stages of a call. Raises ``NotImplementedError`` if there are none."""
        place = self._places.get(digest)
        if place is None:
            raise NotImplementedError("the vectors hold no such call: the case has changed since they were written")
        names = [name for name in self.names if name.rpartition("/")[0] == place]
        if not names:
            raise NotImplementedError("no output was handed in")
        stages = {}
        for name in names:
            array = read_array(self._file, name)
            # .npz stores bfloat16 as 16 bits without a dtype of NumPy.
            is_untyped = array.dtype.itemsize == 2 and array.dtype.kind in "Vu"
            is_bfloat16 = is_untyped and self._dtypes[name] == "bfloat16"
            stages[name.rpartition("/")[2]] = array.view(ml_dtypes.bfloat16) if is_bfloat16 else array
        return stages


def array_names(file: Path) -> list[str]:
    """Return the names of the arrays of a file. Raises ``ResultsError`` if it cannot be read."""
    if file.suffix not in SUFFIXES:
        raise ResultsError(f"{file}: expected outputs in a file that ends with {' or '.join(SUFFIXES)}")
    try:
        if file.suffix == ".safetensors":
            return [name for name in _read_header(file)[0] if name != "__metadata__"]
        with np.load(file, allow_pickle=False) as archive:
            return list(archive.files)
    except (OSError, ValueError, KeyError) as error:
        raise ResultsError(f"{file} cannot be read: {error}") from None


def read_array(file: Path, name: str) -> Array:
    """Return an array of a file, in its stored dtype."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            array: Array = archive[name]
            return array
    header, begin = _read_header(file)
    entry = header[name]
    first, end = entry["data_offsets"]
    with file.open("rb") as stream:
        stream.seek(begin + first)
        return np.frombuffer(stream.read(end - first), SAFETENSORS_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its arrays."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        return json.loads(stream.read(length)), 8 + length


IMPLEMENTATION_NAME = "vectors.outputs"


def judge_recorded(
    recorded: RecordedOutputs, selection: CaseSelection, dtypes: Sequence[str], output: Path
) -> RunSummary:
    """Judge recorded outputs in the selected cases of the vectors. Raises ``UsageError`` if there are none."""
    if selection.faults:
        raise CaseError(list(selection.faults))
    known = frozenset(recorded.cases)
    cases = tuple(case for case in selection.cases if case.id in known)
    if not cases:
        raise UsageError("the vectors hold none of these cases; name the cases that they were written of")
    if not recorded.names:
        raise UsageError("the outputs have no name of a stage of the vectors, such as attention/a-case/float32/output")
    limits = Limits(keep_going=True)
    chosen = load_user_implementation(Target("", "", cloudpickle.dumps(recorded)), None, limits, IMPLEMENTATION_NAME)
    settings = Settings(
        output,
        dtypes=tuple(dtypes),
        limits=limits,
        command=sys.orig_argv,
        expected_failures=load_expected_failures_of([chosen.entry.name]),
        tags=selection.tags,
        picked={"cases": [case.id for case in cases]} if len(cases) < len(selection.cases) else {},
        store=user_store(),
    )
    return run_cases(cases, ImplementationSelection((chosen,)), settings)
