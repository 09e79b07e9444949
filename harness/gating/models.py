"""Pairs of a reference and a candidate, as benchmarks of generated kernels have them: ``Model`` and ``ModelNew``.

KernelBench (Ouyang et al. 2025) and benchmarks like it state a task as a file with a module ``Model`` of torch, and
with the functions ``get_inputs`` and ``get_init_inputs``. A candidate is a file with a module ``ModelNew``. Here the
reference is called on small random inputs of the ranks that ``get_inputs`` has. The operation whose exact answer is its
result is the one that the candidate is judged by. An adapter calls the candidate as that operation.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attncheck.common.errors import OutputError, UsageError
from attncheck.execution.call import CallTimeout, RemoteError, WorkerDied, WorkerProcess
from attncheck.execution.signatures import INPUTS_BY_FUNCTION
from attncheck.judging.judge_stages import stage_agrees
from attncheck.judging.truth import find_truth
from attncheck.reading.lowering import Array
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_OPERATION, OPERATIONS, result_stages

_DTYPE, _ROUNDING_MODEL = "float32", "native"
_LENGTHS = ((2, 2, 6, 6), (1, 2, 40, 5))
"""Axes of two small inputs: batch entries, heads, queries and keys, D. A window may show only in the longer one."""
_OPTION_TEXTS = ("", "is_causal = true", "scale = 1.0", "is_causal = true\nscale = 1.0")
"""Options of the operations that a reference may be, as TOML: those that a module without arguments may have."""
_MAX_SECONDS = 120.0
ADAPTER_FILE = "candidate_adapter.py"


@dataclass(frozen=True)
class ReferenceCall:
    """A call of a reference: its inputs and its result, on small random numbers.

    ``ranks`` are those of the inputs that the reference's own ``get_inputs`` makes.
    """

    ranks: tuple[int, ...]
    inputs: tuple[Array, ...]
    result: Array


@dataclass(frozen=True)
class ReferenceOperation:
    """The operation that a reference is, with its options, and the rank of its inputs."""

    operation: str
    options: Mapping[str, Any]
    rank: int

    def __str__(self) -> str:
        """Return the operation as a text, such as ``attention with is_causal = True``."""
        options = ", ".join(f"{name} = {value}" for name, value in self.options.items())
        return f"{self.operation} with {options}" if options else self.operation


def call_reference(path: str, seed: int) -> list[ReferenceCall]:
    """Load a reference and call it on two inputs; runs in a process of its own, as the file may do anything."""
    import torch

    from attncheck.execution.user_call import import_user_module

    module = import_user_module(path)
    torch.manual_seed(seed)
    model = module.Model(*module.get_init_inputs())
    if next(iter(model.parameters()), None) is not None:
        raise ValueError("Model has parameters, such as projections")
    ranks = tuple(tensor.dim() for tensor in module.get_inputs())
    calls = []
    for lengths in _LENGTHS:
        tensors = [torch.randn(lengths[-rank:] if 0 < rank <= len(lengths) else (2,) * rank) for rank in ranks]
        with torch.no_grad():
            result = model.eval()(*tensors)
        calls.append(ReferenceCall(ranks, tuple(tensor.numpy() for tensor in tensors), result.numpy()))
    return calls


def identify_reference(path: Path, seed: int) -> ReferenceOperation:
    """Return the operation that a reference computes.

    Raises ``UsageError`` if it cannot be called, or is none of the operations that are tried.
    """
    worker = WorkerProcess()
    try:
        calls = worker.call(call_reference, str(path.resolve()), seed, seconds=_MAX_SECONDS)
    except (CallTimeout, WorkerDied, RemoteError) as error:
        raise UsageError(f"--model {path}: Model cannot be called: {error or 'it took too long'}") from None
    finally:
        worker.kill()
    tries = [list(possible_problems(call)) for call in calls]
    for number, (operation, _) in enumerate(tries[0]):
        if all(_is_result_of(tried[number][1], call) for tried, call in zip(tries, calls, strict=True)):
            return operation
    raise UsageError(
        f"--model {path}: Model is neither attention nor softmax; expected a module without parameters that is given "
        "query, key and value, or scores. Name the candidate's function instead: attncheck gate candidate.py:function"
    )


def _is_result_of(problem: Problem, call: ReferenceCall) -> bool:
    """Return whether the result of a call is the exact answer of a problem, within the bounds of its dtype."""
    truth = find_truth(problem, whole=True)
    (stage,) = result_stages(problem.operation, problem.options, problem.inputs)
    shape = truth.exact[stage].high.shape
    if call.result.size != np.prod(shape):
        return False
    result = call.result.reshape(shape)
    return stage_agrees(truth.stage_reference(stage, _ROUNDING_MODEL, result), result)


def possible_problems(called: ReferenceCall) -> Iterator[tuple[ReferenceOperation, Problem]]:
    """Yield the operations that a reference may be, each as a problem on its inputs."""
    rank = called.ranks[0] if len({*called.ranks}) == 1 else 0
    for function, name in ((DEFAULT_OPERATION, DEFAULT_OPERATION), ("softmax", "softmax")):
        inputs = INPUTS_BY_FUNCTION[function]
        if not 2 <= rank <= 4 or len(called.inputs) != len(inputs):
            continue
        arrays = [array.reshape((1,) * (4 - rank) + array.shape) for array in called.inputs]
        for text in _OPTION_TEXTS:
            options = tomllib.loads(text)
            if options.keys() <= OPERATIONS[name].options:
                problem = Problem(name, options, dict(zip(inputs, arrays, strict=True)), _DTYPE)
                yield ReferenceOperation(name, options, rank), problem


def adapt_candidate(candidate: Path, reference: Path, seed: int, folder: Path) -> tuple[str, str]:
    """Write an adapter that calls a candidate as the operation of a reference.

    Returns:
        The adapter as file.py:function, and a sentence about it.

    Raises:
        OutputError: If the adapter cannot be written.
        UsageError: If the candidate has no ``ModelNew``, or the reference is none of the operations that are tried.
    """
    identified = identify_reference(reference, seed)
    path = write_adapter(candidate, reference, identified, folder)
    return f"{path}:{identified.operation}", f"Model is {identified}; {path} calls ModelNew as {identified.operation}"


def write_adapter(candidate: Path, reference: Path, identified: ReferenceOperation, folder: Path) -> Path:
    """Write a file with a function that calls a candidate as an operation; return its path.

    Raises ``OutputError`` if it cannot be written, and ``UsageError`` if the candidate has no ``ModelNew``.
    """
    if not candidate.is_file() or "ModelNew" not in candidate.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"{candidate}: expected a file with a module ModelNew")
    path = folder / ADAPTER_FILE
    with OutputError.convert_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_adapter_lines(candidate, reference, identified)) + "\n", encoding="utf-8")
    return path


def _adapter_lines(candidate: Path, reference: Path, identified: ReferenceOperation) -> Iterator[str]:
    inputs = INPUTS_BY_FUNCTION[identified.operation]
    keywords = "".join(f", {name}=None" for name in identified.options)
    yield f'"""Calls ModelNew of {candidate.name} as {identified}, which Model of {reference.name} is."""'
    yield "import importlib.util"
    yield "import sys"
    yield "from pathlib import Path"
    yield ""
    yield "import torch"
    yield ""
    yield ""
    yield "def _load(path):"
    yield "    sys.path.insert(0, str(Path(path).parent))"
    yield "    specification = importlib.util.spec_from_file_location(Path(path).stem, path)"
    yield "    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)"
    yield "    specification.loader.exec_module(module)"
    yield "    return module"
    yield ""
    yield ""
    yield f"_init_inputs = _load({str(reference.resolve())!r}).get_init_inputs()"
    yield f"_model = _load({str(candidate.resolve())!r}).ModelNew(*_init_inputs)"
    yield "_model.eval()"
    yield ""
    yield ""
    yield f"def {identified.operation}({', '.join(inputs)}{', *' if keywords else ''}{keywords}):"
    for name, value in identified.options.items():
        yield f"    if {name} != {value!r}:"
        yield f'        raise NotImplementedError("computes only {name} = {value!r}")'
    dropped = 4 - identified.rank
    if dropped:
        yield f"    if any(tensor.shape[:{dropped}] != (1,) * {dropped} for tensor in ({', '.join(inputs)},)):"
        yield f'        raise NotImplementedError("takes inputs of rank {identified.rank}")'
        arguments = ", ".join(f"{name}[{', '.join(['0'] * dropped)}]" for name in inputs)
    else:
        arguments = ", ".join(inputs)
    yield "    with torch.no_grad():"
    yield f"        output = _model({arguments})"
    yield f"    return output.reshape({(1,) * dropped} + tuple(output.shape))" if dropped else "    return output"
    yield ""
    yield ""
    yield f'{identified.operation}.framework = "torch"'
    yield f'{identified.operation}.capabilities = {{"dtypes": ["float32"], "grouped_heads": False}}'
