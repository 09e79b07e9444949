"""The processors that this process may use: their number, their flags, and how to compute as a lesser one does.

An emulation is a set of variables by which each library leaves out the instructions of newer processors. All have to
say the same: TensorFlow goes by the processor, oneDNN by its variable, and where one of them counts on more than the
other has, a product crashes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attncheck.common.errors import UsageError

_CPUINFO = Path("/proc/cpuinfo")

ISA = "ATTNCHECK_ISA"
"""The variable that names the emulated instruction set, in a command and in all that it starts."""


@dataclass(frozen=True)
class InstructionSet:
    """A generation of x86 processors.

    Attributes:
        adds: The flags by which Linux names what the set adds to the one before it (``/proc/cpuinfo``).
        variables: The environment by which libraries use no more than this.
    """

    adds: frozenset[str]
    variables: Mapping[str, str]


def _variables(blas: str, numpy: str, torch: str, onednn: str, mkl: str, xla: str) -> dict[str, str]:
    return {
        "OPENBLAS_CORETYPE": blas,
        "NPY_DISABLE_CPU_FEATURES": numpy,
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "XLA_FLAGS": f"--xla_cpu_max_isa={xla}",
    }


# NumPy's names for groups of features, of releases since 2.4 and before.
_ABOVE_AVX512 = "AVX512_ICL AVX512_SPR"
_ABOVE_AVX2 = f"X86_V4 AVX512F AVX512_SKX AVX512_CLX AVX512_CNL {_ABOVE_AVX512}"
_ABOVE_SSE = f"X86_V3 AVX F16C FMA3 AVX2 {_ABOVE_AVX2}"
# TensorFlow turns oneDNN on where it sees units for neural networks, VNNI the oldest of them.
_NO_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}

INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "sse4.1": InstructionSet(  # Penryn, 2008
        frozenset({"sse4_1"}), _variables("Nehalem", _ABOVE_SSE, "default", "SSE41", "SSE4_2", "SSE4_2") | _NO_ONEDNN
    ),
    "avx2": InstructionSet(  # Haswell, 2013
        frozenset({"sse4_2", "avx", "avx2", "fma", "f16c"}),
        _variables("Haswell", _ABOVE_AVX2, "avx2", "AVX2", "AVX2", "AVX2") | _NO_ONEDNN,
    ),
    "avx512": InstructionSet(  # Cascade Lake, 2019
        frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
        _variables("SkylakeX", _ABOVE_AVX512, "avx512", "AVX512_CORE_VNNI", "AVX512", "AVX512_VNNI"),
    ),
    "avx512_bf16": InstructionSet(  # Cooper Lake, 2020
        frozenset({"avx512_bf16"}),
        _variables("Cooperlake", _ABOVE_AVX512, "avx512", "AVX512_CORE_BF16", "AVX512", "AVX512_BF16"),
    ),
    "amx": InstructionSet(  # Sapphire Rapids, 2023
        frozenset({"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}),
        _variables("SapphireRapids", "", "avx512", "AVX512_CORE_AMX", "AVX512", "AMX"),
    ),
}
"""By name, each with all that the ones before it have."""

_VECTORS = ("avx", "amx", "fma", "f16c", "sse4_2")
"""Beginnings of the flags that an emulation takes away, unless its set has them."""


def available_processors() -> int:
    """Return how many processors this process may use: of a machine's, those that its affinity names."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_flags() -> frozenset[str] | None:
    """Return what the first processor can, in Linux's words (``amx_bf16``); None where the system does not say.

    Where a lesser one is emulated, what that one can.
    """
    flags, isa = _own_flags(), emulated_isa()
    return flags if flags is None or isa is None else _kept(flags, isa)


def emulated_isa() -> str | None:
    """Return the name of the instruction set that this process is limited to; None where it is not."""
    name = os.environ.get(ISA)
    return name if name in INSTRUCTION_SETS else None


def isas_of_this_processor() -> tuple[str, ...]:
    """Return the names of the instruction sets that this processor has, the smallest first."""
    return tuple(name for name in INSTRUCTION_SETS if not _missing(name))


def is_this_processor(isa: str) -> bool:
    """Return whether an instruction set is all that this processor has, so that emulating it takes nothing away."""
    flags = _own_flags()
    return flags is not None and not _missing(isa) and _kept(flags, isa) == flags


def limit_to_isa(isa: str, environment: MutableMapping[str, str]) -> None:
    """Set the variables by which libraries use no more than an instruction set, beside the user's own flags for XLA.

    They hold for processes that are started with them: libraries read them once.

    Raises:
        UsageError: If there is no such set, or this processor does not have it.
    """
    if isa not in INSTRUCTION_SETS:
        raise UsageError(f"--isa {isa}: one of {', '.join(INSTRUCTION_SETS)}")
    if missing := _missing(isa):
        has = ", ".join(isas_of_this_processor()) or "none of them"
        raise UsageError(f"--isa {isa}: this processor has no {', '.join(missing)}; it can be {has}")
    own = environment.get("XLA_FLAGS", "").split()
    kept = [flag for flag in own if not flag.startswith("--xla_cpu_max_isa=")]
    variables = dict(INSTRUCTION_SETS[isa].variables)
    variables["XLA_FLAGS"] = " ".join([*kept, variables["XLA_FLAGS"]])
    for name in {name for each in INSTRUCTION_SETS.values() for name in each.variables} - variables.keys():
        environment.pop(name, None)
    environment.update(variables, **{ISA: isa})


def emulation_variables() -> dict[str, str]:
    """Return the variables by which this process is limited to an instruction set; none where it is not."""
    isa = emulated_isa()
    names = [] if isa is None else [ISA, *INSTRUCTION_SETS[isa].variables]
    return {name: os.environ[name] for name in names if name in os.environ}


def _missing(isa: str) -> list[str]:
    """Return what a set needs that this processor does not have."""
    flags = _own_flags()
    if flags is None:
        return ["flags that Linux would list in /proc/cpuinfo"]
    return sorted(_of(isa) - flags)


def _of(isa: str) -> frozenset[str]:
    names = list(INSTRUCTION_SETS)
    return frozenset().union(*(INSTRUCTION_SETS[name].adds for name in names[: names.index(isa) + 1]))


def _kept(flags: frozenset[str], isa: str) -> frozenset[str]:
    return frozenset(flag for flag in flags if flag in _of(isa) or not flag.startswith(_VECTORS))


@lru_cache
def _own_flags() -> frozenset[str] | None:
    return _flags_of(_CPUINFO)


def _flags_of(path: Path) -> frozenset[str] | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((frozenset(text.split()) for name, _, text in fields if name.strip() in ("flags", "Features")), None)
