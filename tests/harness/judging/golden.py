"""The golden file: a fingerprint of every exact value and every error bound of the bundled corpus.

    python tests/harness/judging/golden.py                    # write golden.txt anew
    python tests/harness/judging/golden.py --check            # hold every line against golden.txt: three minutes
    python tests/harness/judging/golden.py --bits before.txt  # every bit, to hold two states of the code side by side

The tests hold the standard units of it, which have every option in 16 bits and in more and show every fault of the
catalogue, each in three of its rounding models, drawn from the case's name. Hold every line wherever nothing should
change.

Every line is a case in a dtype, then what is known of it: the fingerprint of its exact stages, and for each rounding
model that of what its bounds hold exactly (shapes, zeros, infinities, the exact values of the introduced steps), with
the level of all its bounds, accumulated and introduced, the largest error and sigma. Of an exact value the float64
number nearest to it counts, which is the same on every machine and in every arithmetic that is exact enough; where its
radius leaves that open, it does not count. Bounds are evaluated in float64, by functions that
differ in the last bits from processor to processor, so that no fingerprint of them is the same everywhere. Their level
is a number: the mean of their logarithms to base 2, each with a weight of its own between 1 and 2. It moves by as much
as the bounds do, whichever of them they are, and levels are compared within ``LEVEL_TOLERANCE``.

A bound that changes on purpose changes golden.txt in the same commit, and the commit says why it is still a bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound
from attncheck.attention.exact_array import Enclosure
from attncheck.common.processors import available_processors
from attncheck.execution.call import exit_when_parent_exits
from attncheck.judging import exact_stages
from attncheck.judging import truth as judging_truth
from attncheck.judging.truth import Truth
from attncheck.planning.plan import Plan, standard_unit_positions
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import count_scores
from attncheck.spec import ROUNDING_MODELS
from attncheck.spec.dtypes import round_to

GOLDEN_FILE: Final = Path(__file__).with_name("golden.txt")
LEVEL_TOLERANCE: Final = 1e-8
"""How far levels of the same bounds lie apart on two processors at most: 3e-11 has been seen."""
_CASES_AT_A_TIME: Final = 16
MAX_SCORES: Final = 1 << 11
"""Of cases with more scores, one rounding model in each dtype is recorded: all of them would take minutes."""


Units = Mapping[str, Collection[str]]
"""Dtypes by the ids of cases."""


def standard_part(cases: Sequence[Case]) -> Units:
    """Return the dtypes in which cases are standard ones, of those that are."""
    units = [(unit.case_index, unit.dtype) for unit in Plan.of(cases, [])]
    dtypes: dict[str, list[str]] = {}
    for number, dtype in (units[position] for position in standard_unit_positions(cases, units)):
        dtypes.setdefault(cases[number].id, []).append(dtype)
    return dtypes


def fingerprints(
    cases: Iterable[Case], *, every_bit: bool = False, part: Units | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name of each case in each dtype, and its fingerprints: with levels, or of every bit of bounds.

    Of a ``part`` alone, each has up to three rounding models, drawn from the case's name.
    """
    for case in cases:
        if part is not None and case.id not in part:
            continue
        inputs, draw = make_exact_inputs(case), crc32(case.id.encode())
        for number, dtype in enumerate(case.dtypes):
            if part is not None and dtype not in part.get(case.id, ()):
                continue
            stored = convert_inputs(case, inputs, dtype)
            truth = truth_of_case(case, stored)
            models = [name for name, dtypes in ROUNDING_MODELS.items() if dtype in dtypes]
            plain = truth.judged_problem.canonical
            if count_scores(case.operation, plain.options, plain.inputs) > MAX_SCORES:
                models = [models[(len(case.id) + number) % len(models)]]
            if part is not None:
                models = [models[place % len(models)] for place in range(draw, draw + min(3, len(models)))]
            yield f"{case.id} {dtype}", " ".join(_fingerprints_of(truth, models, every_bit=every_bit))


def fingerprints_on_all_cores(cases: Sequence[Case], *, every_bit: bool = False) -> dict[str, str]:
    """Return the same as ``fingerprints``, in the same order, worked out side by side."""
    parts = [cases[first : first + _CASES_AT_A_TIME] for first in range(0, len(cases), _CASES_AT_A_TIME)]
    with ProcessPoolExecutor(available_processors(), get_context("spawn"), exit_when_parent_exits) as processes:
        found = processes.map(partial(_of_part, every_bit=every_bit), parts)
        return dict(chain.from_iterable(found))


def _of_part(cases: Sequence[Case], *, every_bit: bool) -> list[tuple[str, str]]:
    return list(fingerprints(cases, every_bit=every_bit))


def changes(recorded: Mapping[str, str], found: Mapping[str, str], cases: Iterable[Case]) -> list[str]:
    """Say which of the cases came, went, or have other exact values or bounds, as far as these were found."""
    names = {f"{case.id} {dtype}" for case in cases for dtype in case.dtypes}
    lines = [f"{name}: not in the golden file" for name in sorted(names - recorded.keys())]
    lines += [f"{name}: no longer there" for name in sorted(recorded.keys() - names)]
    for name in sorted(recorded.keys() & found.keys()):
        if parts := differing(recorded[name], found[name]):
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def differing(recorded: str, found: str) -> list[str]:
    """Return what differs of a case in a dtype: its exact values, or the bounds of a rounding model."""
    old, new = (dict(part.split("=") for part in text.split(" ")) for text in (recorded, found))
    return [part for part in new if not is_same(old.get(part, ""), new[part])]


def truth_of_case(case: Case, inputs: RoundedInputs) -> Truth:
    """Evaluate the oracle for a case on its inputs; every bit counts, also those that judging rounds off."""
    rounded = exact_stages._round_enclosures
    vars(exact_stages)["_round_enclosures"] = dict
    try:
        return judging_truth.truth_of_case(case, inputs)
    finally:
        vars(exact_stages)["_round_enclosures"] = rounded


def read_golden(path: Path = GOLDEN_FILE) -> dict[str, str]:
    """Return the fingerprints of a golden file by case and dtype."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {" ".join(words[:2]): " ".join(words[2:]) for words in (line.split(" ") for line in lines)}


def is_same(recorded: str, found: str) -> bool:
    """Whether two fingerprints are of the same values: equal, with levels of bounds that processors may differ by."""
    (digest, _, level), (digest_found, _, level_found) = (text.partition("@") for text in (recorded, found))
    if digest != digest_found or bool(level) != bool(level_found):
        return False
    return not level or abs(float(level) - float(level_found)) <= LEVEL_TOLERANCE


def _fingerprints_of(truth: Truth, models: Iterable[str], *, every_bit: bool) -> Iterator[str]:
    if truth.no_answer_reason:
        yield f"outside={_digest([truth.no_answer_reason.encode()])}"
        return
    returned = {stage: round_to(exact.high, truth.bounds.stage_dtype(stage)) for stage, exact in truth.exact.items()}
    yield f"exact={_digest(_bytes_of_exact(truth.exact))}"
    for model in models:
        steps = {stage: truth.step_reference(stage, returned, model) for stage in truth.exact}
        exact = {stage: step.exact for stage, step in steps.items() if step is not None}
        introduced = {stage: step.bound for stage, step in steps.items() if step is not None}
        bounds = [*_arrays_of(truth.bounds.bounds_by_stage(model)), *_arrays_of(introduced)]
        parts = (_bytes_of(array if every_bit else _undisputed(array)) for array in bounds)
        names = "".join([*sorted(truth.exact), "/", *sorted(exact)]).encode()
        digest = _digest([names, *_bytes_of_exact(exact), *parts])
        yield f"{model}={digest}" if every_bit else f"{model}={digest}@{_level(bounds):.11f}"


def _bytes_of_exact(stages: Mapping[str, Enclosure]) -> Iterator[bytes]:
    for stage in sorted(stages):
        yield stage.encode()
        yield _bytes_of(np.where(is_certain(stages[stage]), stages[stage].high, np.nan))


def is_certain(exact: Enclosure) -> NDArray[np.bool_]:
    """Whether no other float64 number can be the nearest to the truth."""
    with np.errstate(invalid="ignore", over="ignore"):
        reached = np.abs(exact.low) + exact.radius
        half = np.spacing(np.abs(exact.high)) / 2
    certain: NDArray[np.bool_] = (reached < half) | ((exact.radius == 0) & (exact.low == 0))
    return certain


def _arrays_of(bounds: Mapping[str, Bound]) -> Iterator[NDArray[np.float64]]:
    for stage in sorted(bounds):
        yield from (bounds[stage].max_error, bounds[stage].sigma)


def _has_level(array: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether bounds are positive and finite. What is near the smallest float64 has few bits that could agree."""
    return np.isfinite(array) & (array > np.finfo(np.float64).tiny)


def _undisputed(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what every processor agrees on: the shape, which bounds are zero, and which are not finite."""
    return np.where(_has_level(array), 1.0, np.where(np.isfinite(array), 0.0, array))


def _level(bounds: Iterable[NDArray[np.float64]]) -> float:
    """Return the mean of the logarithms to base 2, each with its own weight in [1, 2); 0 where there is none."""
    total, number = 0.0, 0
    for index, array in enumerate(bounds):
        weights, kept = _weights(index, array.shape), _has_level(array)
        total += float((weights[kept] * np.log2(array[kept])).sum())
        number += int(kept.sum())
    return total / max(number, 1)


@lru_cache(maxsize=128)
def _weights(index: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the weights of a bound; the rounding models of a case share them."""
    return 1 + np.random.default_rng(index).random(shape)


def _bytes_of(array: NDArray[Any]) -> bytes:
    plain = np.where(np.isnan(array), np.nan, array) + 0.0  # one NaN, one zero
    return str(array.shape).encode() + np.ascontiguousarray(plain).tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    state = blake2b(digest_size=6)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def main() -> None:
    """Write the golden file, hold every line against it, or write one with every bit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=Path, metavar="FILE", help="write every bit of the bounds to this file instead")
    parser.add_argument("--check", action="store_true", help="say what differs from the golden file, which stays")
    options = parser.parse_args()
    selection = select_cases(())
    if selection.faults:
        sys.exit("\n".join(map(str, selection.faults)))
    cases = selection.cases
    found = fingerprints_on_all_cores(cases, every_bit=bool(options.bits))
    if options.check:
        sys.exit("\n".join(changes(read_golden(), found, cases)) or 0)
    recorded = {} if options.bits else read_golden()
    # What is the same on another processor stays as it is recorded, so that a new case adds its own lines only.
    same = {name: text for name, text in recorded.items() if name in found and not differing(text, found[name])}
    lines = sorted(f"{name} {text}" for name, text in {**found, **same}.items())
    (options.bits or GOLDEN_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
