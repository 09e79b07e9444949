"""What the gate says of kernels that misbehave and of right ones that look suspicious (``gate_kernels/``).

python benchmarks/gate.py --kind numpy --budget 30s
python benchmarks/gate.py --name ring_of_two_buffers

Each kernel gets a line: whether the gate refused it, and the behaviours that it named. The exit code is 1 if a kernel
that misbehaves is not refused and named, or a right one is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gate_kernels"))
from catalogue import ILLUSIONS, MISBEHAVING, RIGHT_KERNELS, Kernel

NAMES: Mapping[str, frozenset[str]] = {
    behaviour: frozenset(names.split())
    for behaviour, names in {
        "reuses-output-buffer": "reuses-output-memory",
        "aliases-input": "returns-input-memory",
        "changes-input": "changes-inputs",
        "returns-before-finished": "returns-before-finished leaves-work-behind",
        "wrong-from-nth-call": "wrong-after-many-calls depends-on-earlier-calls",
        "intermittently-wrong": "wrong-now-and-then",
        "incomplete-cache-key": "depends-on-earlier-calls",
        "unwritten-memory": "leaves-memory-unwritten",
        "truncates-long-sequences": "wrong-beyond-a-size",
        "truncates-wide-heads": "wrong-beyond-a-size",
        "detects-attncheck": "recognises-tests",
        "depends-on-earlier-calls": "depends-on-earlier-calls",
        "depends-on-memory-layout": "depends-on-memory-layout",
        "depends-on-environment": "depends-on-environment depends-on-threads depends-on-time",
        "hard-coded-answers": "right-only-in-known-cases depends-on-earlier-calls wrong-after-many-calls wrong",
        "ignores-scores-of-random-inputs": "right-only-in-known-cases wrong",
        "delegates-to-framework": "delegates",
        "transcription-error": "wrong",
    }.items()
}
"""By behaviour of the catalogue: the names that the gate may give it, by what can be seen from outside."""
_NAMES_OF_PROGRAMS = {"returns-before-finished": {"wrong"}, "unwritten-memory": {"depends-on-earlier-calls"}}
"""Further names for programs, whose memory cannot be seen."""


def ask_gate(kernel: Kernel, budget: str) -> tuple[int, dict[str, object], float]:
    """Run the gate on a kernel; return its exit code, its document, and the seconds that it took."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "attncheck", "gate", kernel.target, "--budget", budget, "--no-delegation"]
        done = subprocess.run([*words, "--json", "-o", folder], capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {}
    document.setdefault("findings", [])
    document.setdefault("error", done.stderr[-500:])
    return done.returncode, document, time.monotonic() - begun


def main() -> int:
    """Ask the gate about the kernels that the arguments name, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", help="numpy, torch, jax or program")
    parser.add_argument("--name", action="append", help="only this kernel")
    parser.add_argument("--budget", default="90s", help="the budget of each kernel")
    parser.add_argument("--right", action="store_true", help="only right kernels")
    parser.add_argument("--misbehaving", action="store_true", help="only kernels that misbehave")
    parser.add_argument("--illusions", action="store_true", help="only the published transcription errors")
    arguments = parser.parse_args()
    if arguments.illusions:
        kernels = [*ILLUSIONS]
    else:
        kernels = [*(() if arguments.right else MISBEHAVING), *(() if arguments.misbehaving else RIGHT_KERNELS)]
    bad = 0
    for kernel in kernels:
        if arguments.kind not in (None, kernel.kind) or (arguments.name and kernel.name not in arguments.name):
            continue
        code, document, seconds = ask_gate(kernel, arguments.budget)
        named = list(dict.fromkeys(finding["behaviour"] for finding in document["findings"]))
        if kernel.is_right:
            outcome = "clean" if code == 0 else "REFUSED"
        else:
            names = NAMES[kernel.behaviour]
            names |= _NAMES_OF_PROGRAMS.get(kernel.behaviour, set()) if kernel.kind == "program" else set()
            outcome = "missed" if code == 0 else "named" if names & {*named} else "refused only"
        bad += outcome not in ("clean", "named")
        said = ", ".join(named) or document.get("error", "")
        print(
            f"{outcome:12} {code} {kernel.kind:8}{kernel.name:36} {kernel.behaviour:32} {said} ({seconds:.0f} s)",
            flush=True,
        )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
