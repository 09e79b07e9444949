"""The standard cases as lesser processors compute them: the four frameworks, emulating one instruction set at a time.

    python benchmarks/processors.py               every instruction set that this processor has
    python benchmarks/processors.py sse4.1 avx2   these; one that this processor lacks is left out, and named

So is the one that this processor is as it is, which `make test` judges.

The results are in results/processors/ISA; the exit code is the largest of the runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attncheck.common.processors import covers_this_processor, isas_of_this_processor

RESULTS = Path(__file__).resolve().parent.parent / "results" / "processors"
BACKENDS = "numpy,torch,tensorflow,jax"
WITHOUT_AVX = "numpy,torch"
"""The wheels of TensorFlow and jaxlib are built with AVX and do not load without it."""


def main(wanted: Sequence[str]) -> int:
    """Check under each instruction set."""
    here = isas_of_this_processor()
    for isa in wanted:
        if isa not in here:
            print(f"{isa}: left out, this processor has {', '.join(here) or 'none'}")
    asked = [isa for isa in here if not wanted or isa in wanted]
    for isa in filter(covers_this_processor, asked):
        print(f"{isa}: left out, this processor is one as it is, and `make test` has the results")
    codes = [check(isa) for isa in asked if not covers_this_processor(isa)]
    if not codes:
        print("no instruction set was emulated")
    return max(codes, default=0 if wanted else 1)


def check(isa: str) -> int:
    """Check the standard cases under one instruction set."""
    print(f"== {isa}", flush=True)
    command = [
        "attncheck",
        "check",
        "--isa",
        isa,
        "--backend",
        WITHOUT_AVX if isa == "sse4.1" else BACKENDS,
        "--standard",
        "*",
        "--no-report",
    ]
    command += ["--label", isa, "--output", str(RESULTS / isa)]
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
