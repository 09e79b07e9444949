"""The golden file: a fingerprint of every exact value and every error bound of the bundled corpus.

    python tests/harness/judging/golden.py                    # write golden.txt anew
    python tests/harness/judging/golden.py --bits before.txt  # every bit, to hold two states of the code side by side

Every line is a case in a dtype, then what is known of it: the fingerprint of its exact stages, and for each rounding
model that of its bounds, accumulated and introduced, the largest error and sigma. Exact values are integers of ball
arithmetic, the same on every machine, and every bit of them counts. Bounds are evaluated in float64, by functions that
differ in the last bits from processor to processor; 17 bits of each are kept, unless all are asked for.

A bound that changes on purpose changes golden.txt in the same commit, and the commit says why it is still a bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.oracle.enclosure import Enclosure
from attncheck.reading.case import Case
from attncheck.reading.dtypes import rounded_once
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import score_elements
from attncheck.spec import ROUNDING_MODELS

GOLDEN_FILE: Final = Path(__file__).with_name("golden.txt")
KEPT_BITS: Final = 17
MAX_SCORES: Final = 1 << 11
"""Of cases with more scores, one rounding model in each dtype is recorded: all of them would take minutes."""


def fingerprints(cases: Iterable[Case], bits: int | None = KEPT_BITS) -> Iterator[tuple[str, str]]:
    """Yield what each case in each dtype is called, and its fingerprints. ``bits`` of bounds are kept, None: all."""
    for case in cases:
        inputs = make_exact_inputs(case)
        for number, dtype in enumerate(case.dtypes):
            truth = truth_of_case(case, dtype, convert_inputs(case, inputs, dtype))
            models = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
            if score_elements(case.operation, truth.options, truth.inputs) > MAX_SCORES:
                models = [models[(len(case.id) + number) % len(models)]]
            yield f"{case.id} {dtype}", " ".join(_fingerprints_of(truth, models, bits))


def read_golden(path: Path = GOLDEN_FILE) -> dict[str, str]:
    """Return the fingerprints of a golden file by case and dtype."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {" ".join(words[:2]): " ".join(words[2:]) for words in (line.split(" ") for line in lines)}


def _fingerprints_of(truth: Truth, models: Iterable[str], bits: int | None) -> Iterator[str]:
    if truth.outside:
        yield f"outside={_digest([truth.outside.encode()])}"
        return
    returned = {stage: rounded_once(exact.high, truth.dtype_of(stage)) for stage, exact in truth.exact.items()}
    yield f"exact={_digest(_bytes_of_exact(truth.exact))}"
    for model in models:
        steps = {stage: truth.introduced(stage, returned, model) for stage in truth.exact}
        exact = {stage: step[0] for stage, step in steps.items() if step is not None}
        introduced = {stage: step[1] for stage, step in steps.items() if step is not None}
        parts = (
            _bytes_of_bounds(truth.bounds(model), bits),
            _bytes_of_exact(exact),
            _bytes_of_bounds(introduced, bits),
        )
        yield f"{model}={_digest(item for part in parts for item in part)}"


def _bytes_of_exact(stages: Mapping[str, Enclosure]) -> Iterator[bytes]:
    for stage in sorted(stages):
        yield stage.encode()
        for array in (stages[stage].high, stages[stage].low, stages[stage].radius):
            yield _bytes_of(array)


def _bytes_of_bounds(bounds: Mapping[str, Bound], bits: int | None) -> Iterator[bytes]:
    for stage in sorted(bounds):
        yield stage.encode()
        for array in (bounds[stage].max_error, bounds[stage].sigma):
            yield _bytes_of(array if bits is None else _rounded(array, bits))


def _rounded(array: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Round to so many significant bits."""
    fraction, exponent = np.frexp(array)
    with np.errstate(over="ignore"):
        rounded: NDArray[np.float64] = np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)
    return rounded


def _bytes_of(array: NDArray[Any]) -> bytes:
    plain = np.where(np.isnan(array), np.nan, array) + 0.0  # one NaN, one zero
    return str(array.shape).encode() + np.ascontiguousarray(plain).tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    state = blake2b(digest_size=6)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def main() -> None:
    """Write the golden file, or one with every bit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=Path, metavar="FILE", help="write every bit of the bounds to this file instead")
    options = parser.parse_args()
    path, bits = (options.bits, None) if options.bits else (GOLDEN_FILE, KEPT_BITS)
    lines = sorted(f"{name} {found}" for name, found in fingerprints(select_cases(()).cases, bits))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
