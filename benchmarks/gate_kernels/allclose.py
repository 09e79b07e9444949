"""Judge the kernels of this folder as common benchmarks do: random inputs of one shape, and a tolerance.

    python benchmarks/gate_kernels/allclose.py [--kind numpy torch jax program] [--verbose]

The settings are those of KernelBench (github.com/ScalingIntelligence/KernelBench, src/kernelbench/eval.py): five random
inputs of one shape, ``torch.allclose`` with rtol = atol = 1e-2 in its first version, and 1e-4 for float32 since
``get_tolerance_for_precision``. The inputs are uniform in [0, 1), as in its level1/97_ScaledDotProductAttention.py, but
in float32 and in the shape (1, 2, 512, 64) instead of (32, 32, 512, 1024), which takes too long without a GPU. The
reference is computed in float64. attncheck is not imported: some kernels would notice.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
from catalogue import BEHAVIOURS, FOLDER, MISBEHAVING, RIGHT_KERNELS, Kernel
from numpy.typing import NDArray

Array = NDArray[Any]
Call = Callable[[Array, Array, Array], Array]
TOLERANCES = (1e-2, 1e-4)
SHAPE = (1, 2, 512, 64)
TRIALS = 5


@cache
def load_module(file: str) -> ModuleType:
    """Return a module of this folder, loaded from its file."""
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), FOLDER / file)
    assert spec is not None, "the file has a loader"
    assert spec.loader is not None, "the file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call_of(kernel: Kernel, stack: ExitStack) -> Call:
    """Return a function of NumPy arrays that calls a kernel; the stack ends what the kernel needs."""
    if kernel.kind == "program":
        words = [sys.executable, str(FOLDER / kernel.file)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.stdin.close)
        return partial(call_program, process)
    function = getattr(load_module(kernel.file), kernel.name)
    if kernel.kind == "numpy":
        return function
    if kernel.kind == "torch":
        import torch

        return lambda *arrays: function(*map(torch.from_numpy, arrays)).numpy()
    import jax.numpy as jnp

    return lambda *arrays: np.asarray(function(*map(jnp.array, arrays)))


def call_program(process: subprocess.Popen[bytes], *arrays: Array) -> Array:
    """Send a call to a program by the protocol of docs/protocol.md, and return its output."""
    names = ("query", "key", "value")
    listed = [
        {"name": name, "dtype": str(array.dtype), "shape": array.shape}
        for name, array in zip(names, arrays, strict=True)
    ]
    request = {"attncheck": 1, "ask": "call", "function": "attention", "options": {}, "arrays": listed}
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    process.stdin.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
    for array in arrays:
        process.stdin.write(array.tobytes())
    process.stdin.flush()
    (stage,) = json.loads(process.stdout.readline())["stages"]
    output = np.empty(stage["shape"], stage["dtype"])
    return np.frombuffer(process.stdout.read(output.nbytes), output.dtype).reshape(output.shape)


def reference(query: Array, key: Array, value: Array) -> Array:
    """Return softmax(Q K^T / sqrt(D)) V in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def passed_tolerances(kernel: Kernel) -> list[float]:
    """Return the tolerances within which a kernel is in all trials."""
    passed = set(TOLERANCES)
    with ExitStack() as stack:
        call = call_of(kernel, stack)
        for seed in range(TRIALS):
            inputs = np.random.default_rng(seed).random((3, *SHAPE), dtype=np.float32)
            expected = reference(*inputs)
            try:
                output = call(*inputs)
            except Exception:  # a kernel that raises does not pass
                return []
            has_shape = output.shape == expected.shape
            passed = {limit for limit in passed if has_shape and np.allclose(output, expected, limit, limit)}
    return sorted(passed, reverse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many kernels pass; return the exit code, 1 if a right kernel does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = list(dict.fromkeys(kernel.kind for kernel in MISBEHAVING))
    parser.add_argument("--kind", nargs="*", choices=kinds, default=kinds, metavar="NAME")
    parser.add_argument("--verbose", action="store_true", help="also print a line for each kernel")
    options = parser.parse_args(arguments)
    kernels = [kernel for kernel in (*MISBEHAVING, *RIGHT_KERNELS) if kernel.kind in options.kind]
    counts: Counter[tuple[str, float]] = Counter()
    for kernel in kernels:
        passed = passed_tolerances(kernel)
        rows = (kernel.behaviour or "right", kernel.kind, "right" if kernel.is_right else "misbehaving")
        counts.update((row, limit) for row in dict.fromkeys(rows) for limit in (0.0, *passed))
        counts.update((f"{rows[-1]}, {kernel.kind}", limit) for limit in (0.0, *passed))
        if options.verbose:
            print(f"{kernel.kind:8} {kernel.name:36} {kernel.behaviour or 'right':30} {passed}", flush=True)
    print(f"{'passes':38} {'kernels':>8} " + " ".join(f"{limit:>8.0e}" for limit in TOLERANCES))
    sums = [f"{verdict}{of}" for verdict in ("misbehaving", "right") for of in ("", *(f", {kind}" for kind in kinds))]
    for row in [*BEHAVIOURS, *sums]:
        if counts[row, 0.0]:
            print(f"{row:38} {counts[row, 0.0]:>8} " + " ".join(f"{counts[row, limit]:>8}" for limit in TOLERANCES))
    return int(counts["right", TOLERANCES[-1]] < counts["right", 0.0])


if __name__ == "__main__":
    sys.exit(main())
