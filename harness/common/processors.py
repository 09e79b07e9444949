"""The processors that this process may use: their number, their flags, and the emulation of one with fewer features.

An emulation is a set of variables by which each library leaves out the instructions of newer processors. All variables
have to agree: TensorFlow reads the processor's flags, oneDNN its variable, and if one of them relies on a feature that
the other does not use, a product crashes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attncheck.common.errors import UsageError

_CPUINFO = Path("/proc/cpuinfo")

ISA_VARIABLE = "ATTNCHECK_ISA"
"""The variable with the name of the emulated instruction set, in a command and in all processes that it starts."""


@dataclass(frozen=True)
class InstructionSet:
    """A generation of x86 processors.

    Attributes:
        adds: The flags by which Linux names what the set adds to the one before it (``/proc/cpuinfo``).
        variables: The environment by which libraries use no more than this.
    """

    added_flags: frozenset[str]
    variables: Mapping[str, str]


def _library_variables(blas: str, numpy: str, torch: str, onednn: str, mkl: str, xla: str) -> dict[str, str]:
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
# TensorFlow turns oneDNN on if it sees units for neural networks, VNNI the oldest of them.
_NO_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}

INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "sse4.1": InstructionSet(  # Penryn, 2008
        frozenset({"sse4_1"}),
        _library_variables("Nehalem", _ABOVE_SSE, "default", "SSE41", "SSE4_2", "SSE4_2") | _NO_ONEDNN,
    ),
    "avx2": InstructionSet(  # Haswell, 2013
        frozenset({"sse4_2", "avx", "avx2", "fma", "f16c"}),
        _library_variables("Haswell", _ABOVE_AVX2, "avx2", "AVX2", "AVX2", "AVX2") | _NO_ONEDNN,
    ),
    "avx512": InstructionSet(  # Cascade Lake, 2019
        frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
        _library_variables("SkylakeX", _ABOVE_AVX512, "avx512", "AVX512_CORE_VNNI", "AVX512", "AVX512_VNNI"),
    ),
    "avx512_bf16": InstructionSet(  # Cooper Lake, 2020
        frozenset({"avx512_bf16"}),
        _library_variables("Cooperlake", _ABOVE_AVX512, "avx512", "AVX512_CORE_BF16", "AVX512", "AVX512_BF16"),
    ),
    "amx": InstructionSet(  # Sapphire Rapids, 2023
        frozenset({"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}),
        _library_variables("SapphireRapids", "", "avx512", "AVX512_CORE_AMX", "AVX512", "AMX"),
    ),
}
"""By name; each also has all flags of the sets before it."""

_VECTOR_FLAG_PREFIXES = ("avx", "amx", "fma", "f16c", "sse4_2")
"""Beginnings of the flags that an emulation takes away, unless its set has them."""


def available_processors() -> int:
    """Return the number of processors that this process may use, by its affinity."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_flags() -> frozenset[str] | None:
    """Return the flags of the first processor, by Linux's names (``amx_bf16``); None if the system does not list them.

    If a processor with fewer features is emulated, return the flags of that one.
    """
    flags, isa = _read_processor_flags(), emulated_isa()
    return flags if flags is None or isa is None else _flags_under_emulation(flags, isa)


def emulated_isa() -> str | None:
    """Return the name of the instruction set to which this process is limited; None without a limit."""
    name = os.environ.get(ISA_VARIABLE)
    return name if name in INSTRUCTION_SETS else None


def isas_of_this_processor() -> tuple[str, ...]:
    """Return the names of the instruction sets that this processor has, the smallest first."""
    return tuple(name for name in INSTRUCTION_SETS if not _missing_flags(name))


def covers_this_processor(isa: str) -> bool:
    """Return whether this processor has nothing beyond an instruction set, so that emulating it changes nothing."""
    flags = _read_processor_flags()
    return flags is not None and not _missing_flags(isa) and _flags_under_emulation(flags, isa) == flags


def limit_to_isa(isa: str, environment: MutableMapping[str, str]) -> None:
    """Set the variables that limit libraries to an instruction set, and keep the user's other flags for XLA.

    They limit processes that are started with them: libraries read them once.

    Raises:
        UsageError: If there is no such set, or this processor does not have it.
    """
    if isa not in INSTRUCTION_SETS:
        raise UsageError(f"--isa {isa}: one of {', '.join(INSTRUCTION_SETS)}")
    if missing := _missing_flags(isa):
        has = ", ".join(isas_of_this_processor()) or "none of them"
        raise UsageError(f"--isa {isa}: this processor has no {', '.join(missing)}; it can be {has}")
    user_flags = environment.get("XLA_FLAGS", "").split()
    kept = [flag for flag in user_flags if not flag.startswith("--xla_cpu_max_isa=")]
    variables = dict(INSTRUCTION_SETS[isa].variables)
    variables["XLA_FLAGS"] = " ".join([*kept, variables["XLA_FLAGS"]])
    for name in {
        name for instruction_set in INSTRUCTION_SETS.values() for name in instruction_set.variables
    } - variables.keys():
        environment.pop(name, None)
    environment.update(variables, **{ISA_VARIABLE: isa})


def emulation_variables() -> dict[str, str]:
    """Return the variables that limit this process to an instruction set; none without a limit."""
    isa = emulated_isa()
    names = [] if isa is None else [ISA_VARIABLE, *INSTRUCTION_SETS[isa].variables]
    return {name: os.environ[name] for name in names if name in os.environ}


def _missing_flags(isa: str) -> list[str]:
    """Return the flags of a set that this processor does not have."""
    flags = _read_processor_flags()
    if flags is None:
        return ["flags that Linux would list in /proc/cpuinfo"]
    return sorted(_flags_of_set(isa) - flags)


def _flags_of_set(isa: str) -> frozenset[str]:
    names = list(INSTRUCTION_SETS)
    return frozenset().union(*(INSTRUCTION_SETS[name].added_flags for name in names[: names.index(isa) + 1]))


def _flags_under_emulation(flags: frozenset[str], isa: str) -> frozenset[str]:
    return frozenset(flag for flag in flags if flag in _flags_of_set(isa) or not flag.startswith(_VECTOR_FLAG_PREFIXES))


@lru_cache
def _read_processor_flags() -> frozenset[str] | None:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((frozenset(text.split()) for name, _, text in fields if name.strip() in ("flags", "Features")), None)
