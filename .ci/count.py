"""Fails where a run was green because something did not run: a test file, a case, a framework.

What has to be there follows from the tree: every file of tests has a test in a JUnit file, NumPy was judged in every
case of the golden file that is float32 or float64, and torch and JAX, which have everything, in the same cases. Nothing
is raised by hand when something is added.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
GOLDEN = ROOT / "tests" / "harness" / "judging" / "golden.txt"
FRAMEWORKS = ("numpy.eager", "torch.eager", "tensorflow.eager", "jax.jit")
_MOST = 20
ENVIRONMENTS = ("py311-numpy", "py311-all")


def missing_tests() -> Iterator[str]:
    """Yield what ran no test, and print how many ran of each environment."""
    files = set()
    for environment in ENVIRONMENTS:
        path = RESULTS / "tests" / f"{environment}.xml"
        if not path.is_file():
            yield f"{environment}: its tests did not run"
            continue
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
        failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
        skipped = sum(case.find("skipped") is not None for case in cases)
        print(f"{environment}: {len(cases) - failed - skipped} passed, {failed} failed, {skipped} skipped")
        if skipped == len(cases):
            yield f"{environment}: no test ran"
        files |= {case.get("classname") or case.get("name", "") for case in cases}  # a file that is skipped is a name
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not any(each == name or each.startswith(f"{name}.") for each in files):
            yield f"{path.relative_to(ROOT)}: none of its tests was collected"


def missing_cases() -> Iterator[str]:
    """Yield what was not judged, and print in how many cases each implementation was."""
    lines = [line.split(" ", 2)[:2] for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    corpus = len({case for case, dtype in lines if dtype in ("float32", "float64")})  # NumPy has no 16 bits
    judged = {}
    for environment in ENVIRONMENTS:
        path = RESULTS / "tox" / environment / "summary.json"
        if not path.is_file():
            yield f"{environment}: no case ran"
            continue
        judged[environment] = json.loads(path.read_text(encoding="utf-8"))["judged"]
        found = ", ".join(f"{name} in {number} cases" for name, number in judged[environment].items())
        print(f"{environment}: judged {found}")
    if (number := judged.get("py311-numpy", {}).get("numpy.eager", 0)) < corpus:
        yield f"NumPy was judged in {number} of the {corpus} cases of {GOLDEN.relative_to(ROOT)}"
    together = {name: judged.get("py311-all", {}).get(name, 0) for name in FRAMEWORKS}
    without = ("numpy.eager", "tensorflow.eager")  # no 16 bits, and no codes in blocks
    of_all_dtypes = {number for name, number in together.items() if name not in without}
    if not all(together.values()) or len(of_all_dtypes) > 1:
        yield f"the frameworks were not judged in the same cases: {together}"


def main() -> int:
    """Say what is missing; 1 if anything is."""
    missing = [*missing_tests(), *missing_cases()]
    for line in missing[:_MOST]:
        print(f"missing: {line}", file=sys.stderr)
    if len(missing) > _MOST:
        print(f"and {len(missing) - _MOST} more", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
