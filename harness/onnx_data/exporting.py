"""Cases written as ONNX's tests: inputs as stored in a dtype, and as outputs the exact answer, rounded to it once.

Outputs that a case takes from a file, as one that was imported does, are written as they are, so that the way there and
back loses nothing; the exact answer in their place where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attncheck.judging.truth import truth_of_case
from attncheck.onnx_data.attention_export import attention_test, check_said, extra_stage
from attncheck.onnx_data.files import BackendTest, NotACase, write_test
from attncheck.onnx_data.softmax import softmax_test
from attncheck.oracle.enclosure import Enclosure
from attncheck.plan import Plan
from attncheck.reading.case import Case
from attncheck.reading.dtypes import numpy_dtype, rounded_once
from attncheck.reading.inputs import Inputs
from attncheck.store import Store
from attncheck.vectors.export import lacks

Array = NDArray[Any]
_PREFIX = "test_"
_MAX_NAMED = 3


@dataclass
class Exported:
    """The tests that were written, the cases that were not by the reason, and how stored numbers compare.

    ``alike`` counts the arrays that cases take from files as expected ones and that are the exact answer bit for bit,
    and ``others`` the largest difference of each other one, in units in the last place.
    """

    is_exact: bool = False
    tests: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    alike: int = 0
    others: list[float] = field(default_factory=list)

    def compare(self, given: dict[str, Array], exact: dict[str, Array]) -> None:
        """Count the arrays that are the exact answer, and measure the others."""
        for stage, array in given.items():
            if array.tobytes() == exact[stage].tobytes():
                self.alike += 1
            else:
                self.others.append(_units_apart(exact[stage], array.astype(np.float64)))


def export_tests(
    cases: Sequence[Case], dtypes: Sequence[str], folder: Path, store: Store, *, exact: bool = False
) -> Exported:
    """Write cases as tests into a folder, one for each dtype. Raises ``OutputError`` and ``UsageError``.

    With ``exact`` all outputs are the exact answer, those too that a case takes from a file.
    """
    exported = Exported(exact)
    plan = Plan.of(cases, dtypes)
    for unit in plan:
        case = _as_stored(plan.case(unit))
        name = name_of(case, unit.dtype)
        try:
            if name in exported.tests:
                raise NotACase("another case of the same name")
            test = _test_of(name, case, unit.dtype, plan.inputs(unit), store, exported)
            write_test(folder / name, test)
        except NotACase as reason:
            exported.left_out.setdefault(str(reason), []).append(f"{case.id} in {unit.dtype}")
            continue
        exported.tests.append(name)
    return exported


def name_of(case: Case, dtype: str) -> str:
    """Return what a test is called: as the case, with its dtype where the case has several."""
    file, _, own = case.id.rpartition("/")
    name = own if own.startswith("test-") else f"{_PREFIX}{file}_{own}"
    name += f"_{dtype}" if len(case.dtypes) > 1 else ""
    return "".join(each if each.isalnum() else "_" for each in name)


def _as_stored(case: Case) -> Case:
    """Round what becomes an attribute to the float32 that holds it, so that the exact answer is that of the model."""
    scale, softcap = (_as_float32(case.options.get(name)) for name in ("scale", "softcap"))
    return replace(case, options=replace(case.options, scale=scale, softcap=softcap))


def _as_float32(number: float | None) -> float | None:
    return None if number is None else float(np.float32(number))


def _test_of(name: str, case: Case, dtype: str, inputs: Inputs, store: Store, exported: Exported) -> BackendTest:
    if case.operation not in ("attention", "softmax"):
        raise NotACase(f"{case.operation}, which is no operator of ONNX")
    is_softmax = case.operation == "softmax"
    if not is_softmax:
        check_said(case)
    extra = None if is_softmax else extra_stage(case)
    stages = ["weights"] if is_softmax else ["output", *([extra] if extra else [])]
    truth = truth_of_case(case, dtype, inputs, stages, store)
    if reason := lacks(truth, stages):
        raise NotACase(reason)
    outputs = {stage: rounded(truth.exact[stage], dtype) for stage in stages}
    given = _given(case, dtype, outputs)
    exported.compare(given, outputs)
    if not exported.is_exact:
        outputs |= given
    if is_softmax:
        return softmax_test(name, case, inputs.arrays, outputs["weights"])
    return attention_test(name, case, inputs.arrays, outputs)


def rounded(exact: Enclosure, dtype: str) -> Array:
    """Round the exact numbers to a dtype once, to the nearest, in the middle between two to the even one.

    What float64 cannot hold decides where its number would be in the middle: it is cut off, and the last bit set to 1
    instead (rounding to odd, as in ``reading/dtypes.py``).
    """
    if dtype == "float64":
        return exact.high
    high, low = exact.high, np.where(np.abs(exact.low) > exact.radius, exact.low, 0.0)
    inexact = (low != 0) & np.isfinite(high) & (high != 0)
    outwards = inexact & (np.signbit(low) != np.signbit(high))
    cut = np.where(outwards, np.nextafter(high, 0.0), high)
    odd = np.ascontiguousarray(cut).view(np.uint64) | inexact.astype(np.uint64)
    return rounded_once(odd.view(np.float64), dtype)


def _given(case: Case, dtype: str, outputs: dict[str, Array]) -> dict[str, Array]:
    """Return the outputs that a case takes from a file, by their stages; none in another dtype than they are of."""
    return {
        expected.of: expected.numbers.value.astype(numpy_dtype(dtype))
        for expected in case.expected
        if expected.stored and expected.numbers is not None and expected.of in outputs and case.computed_in == dtype
    }


def _units_apart(own: Array, stored: NDArray[np.float64]) -> float:
    """Return the largest difference in units in the last place of the exact number."""
    exact = own.astype(np.float64)
    info = ml_dtypes.finfo(numpy_dtype(own.dtype.name))
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
        units = np.abs(stored - exact) / (float(info.eps) * 2.0**exponent)
    return float(np.max(np.where(exact == stored, 0.0, units)))


def lines_of(exported: Exported) -> Iterator[str]:
    """Say what was written and what was not."""
    yield f"{len(exported.tests):,} tests: a case in a dtype each"
    if exported.alike or exported.others:
        yield f"outputs that cases take from files: {exported.alike:,} are the exact answer, rounded once, bit for bit"
    if exported.others:
        written = "the exact answer is written" if exported.is_exact else "they are written as they are"
        apart = f"{len(exported.others):,} differ from it by at most {max(exported.others):.3g} units in the last place"
        yield f"outputs that cases take from files: {apart}; {written}"
    for reason, names in exported.left_out.items():
        listed = ", ".join(names[:_MAX_NAMED])
        yield f"left out: {len(names):,} ({listed}{', ...' if len(names) > _MAX_NAMED else ''}): {reason}"
