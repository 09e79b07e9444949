"""Faults that show at the sizes of kernels, with two options at a time, or with values that have a meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.worker import Task
from attncheck.mutation.catalogue import CONTROLS, MUTANTS
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import Control, Mutant
from attncheck.mutation.narrow import RIGHT
from attncheck.mutation.sizes import WIDTHS
from attncheck.spec import STAGES

Arrays = dict[str, NDArray[Any]]
OF_KERNELS = ("sizes", "tiles", "decoding", "pairs", "gradients of pairs", "chosen products", "special values")
"""Topics of faults that show at the sizes of kernels or with two options."""
Stages = dict[str, NDArray[Any]]
Solve = Callable[[Backend, Task, str], Stages]
UNITS = 200.0
"""Units of eps of a stage's largest number that right implementations differ by on these problems, gradients too."""

OF_TOPICS = [mutant for mutant in MUTANTS if mutant.topic in OF_KERNELS]
IN_KERNELS = [mutant for mutant in MUTANTS if isinstance(mutant.backend, Kernel)]
WIDE = frozenset(
    {
        "fused_kernel_with_statistics_in_float32",
        "fused_kernel_in_base_two_with_statistics_in_float32",
        "log_sum_exp_widened_too_late",
        "log_sum_exp_of_exponentials_in_16_bits",
    }
)
"""Kernels that return log_sum_exp in float32, whatever their ends are."""
CONTROL_KERNELS = [honest for honest in CONTROLS if isinstance(honest.backend, Kernel) and "float64" in honest.dtypes]


@pytest.fixture(scope="session")  # ``solve`` remembers by identity: nothing may take their place
def kernel_problems() -> dict[str, Task]:
    return _problems()


def is_near(got: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    largest = np.abs(np.where(np.isfinite(wanted), wanted, 0)).max(initial=0)
    unit = float(np.finfo(wanted.dtype).eps)
    return bool(np.allclose(got, wanted, rtol=UNITS * unit, atol=UNITS * unit * largest, equal_nan=True))


def first_wrong(backend: Backend, solve: Solve, task: Task, dtype: str) -> str | None:
    got, wanted = solve(backend, task, dtype), solve(numpy_backend, task, dtype)
    for stage in STAGES:
        if stage in got and not is_near(got[stage], wanted[stage]):
            return "context" if stage == "output" else stage
    return None


@pytest.mark.parametrize("mutant", OF_TOPICS, ids=lambda mutant: mutant.name)
def test_every_fault_goes_wrong_first_where_it_says(
    mutant: Mutant, kernel_problems: dict[str, Task], solve: Solve
) -> None:
    for dtype in (dtype for dtype in mutant.dtypes if dtype in ("float64", "float32")):
        wrong = {first_wrong(mutant.backend, solve, task, dtype) for task in kernel_problems.values()} - {None}
        assert wrong, f"no problem shows it in {dtype}"
        assert min(wrong, key=lambda stage: STAGES.index(str(stage))) == mutant.first_wrong_stage, dtype


@pytest.mark.parametrize("honest", CONTROL_KERNELS, ids=lambda honest: honest.name)
def test_every_right_kernel_is_near_the_reference_at_every_size(
    honest: Control, kernel_problems: dict[str, Task], solve: Solve
) -> None:
    # Where a log_sum_exp is stored, the number of keys is lost beside the least finite number.
    stores = honest.classes["float64"] == "native_lse"
    tasks = {name: task for name, task in kernel_problems.items() if not (stores and name.startswith("least"))}
    wrong = {name: first_wrong(honest.backend, solve, task, "float64") for name, task in tasks.items()}
    assert {name: stage for name, stage in wrong.items() if stage is not None} == {}


@pytest.mark.parametrize("honest", CONTROL_KERNELS, ids=lambda honest: honest.name)
def test_every_right_kernel_computes_in_a_way_of_its_own(
    honest: Control, kernel_problems: dict[str, Task], solve: Solve
) -> None:
    assert any(
        not np.array_equal(got, solve(RIGHT, task, dtype)[stage], equal_nan=True)
        for dtype in ("float32", "float16")
        for task in kernel_problems.values()
        for stage, got in solve(honest.backend, task, dtype).items()
        if stage not in RIGHT.hidden
    )


@pytest.mark.parametrize("subject", [*IN_KERNELS, *CONTROL_KERNELS], ids=lambda subject: subject.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_with_ends_in_16_bits_returns_16_bits(
    subject: Mutant | Control, dtype: str, kernel_problems: dict[str, Task], solve: Solve
) -> None:
    for task in (kernel_problems["width 64"], kernel_problems["gradients, mask and softcap"]):
        stages = solve(subject.backend, task, dtype)
        found = {name: str(stage.dtype) for name, stage in stages.items()}
        of_statistics = {found.pop("log_sum_exp")} - {dtype} if "log_sum_exp" in found else set()
        assert set(found.values()) <= {dtype}
        assert of_statistics == ({"float32"} if subject.name in WIDE and "output" in found else set())


@pytest.mark.parametrize("mutant", IN_KERNELS, ids=lambda mutant: mutant.name)
def test_a_fault_in_16_bits_is_told_from_the_same_kernel_without_it(
    mutant: Mutant, kernel_problems: dict[str, Task], solve: Solve
) -> None:
    assert mutant.without is not None
    dtype = mutant.dtypes[-1]
    assert any(
        not np.array_equal(solve(mutant.backend, task, dtype)[stage], right, equal_nan=True)
        for task in kernel_problems.values()
        for stage, right in solve(mutant.without, task, dtype).items()
    )


def _problems() -> dict[str, Task]:
    """Return problems of which each fault of the newer topics shows in at least one."""
    rng = np.random.default_rng(20240711)
    return _widths(rng) | _heads(rng) | _tiles(rng) | _decoding(rng) | _pairs(rng) | _gradients(rng) | _values(rng)


def _inputs(
    rng: np.random.Generator,
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    width: int = 8,
    value_width: int | None = None,
) -> Arrays:
    shared = heads if kv_heads is None else kv_heads
    return {
        "query": rng.normal(size=(batch, heads, queries, width)),
        "key": rng.normal(size=(batch, shared, keys, width)),
        "value": rng.normal(size=(batch, shared, keys, width if value_width is None else value_width)),
    }


def _attention(arrays: Arrays, **options: Any) -> Task:
    return Task("attention", options, arrays)


def _widths(rng: np.random.Generator) -> dict[str, Task]:
    made = {f"width {width}": _attention(_inputs(rng, 2, 3, width=width)) for width in WIDTHS}
    return made | {
        "width 11": _attention(_inputs(rng, 4, 5, width=11)),
        "widths 192 and 128": _attention(_inputs(rng, 2, 3, width=192, value_width=128)),
    }


def _heads(rng: np.random.Generator) -> dict[str, Task]:
    return {
        "forty heads": _attention(_inputs(rng, 2, 3, heads=40, batch=2)),
        "batch of seventeen": _attention(_inputs(rng, 2, 3, batch=17)),
        "groups of eight": _attention(_inputs(rng, 2, 3, heads=16, kv_heads=2)),
        "groups of four": _attention(_inputs(rng, 2, 3, heads=8, kv_heads=2)),
    }


def _tiles(rng: np.random.Generator) -> dict[str, Task]:
    made = {
        f"{queries} queries, {keys} keys": _attention(_inputs(rng, queries, keys))
        for queries, keys in ((2, 16), (2, 17), (2, 64), (2, 128), (129, 65), (2, 200))
    }
    wide = {"window": (20, None)}, {"window": (0, 70)}
    return made | {
        "causal, 130 queries": _attention(_inputs(rng, 130, 130), is_causal=True),
        "causal, more queries than keys": _attention(_inputs(rng, 40, 17), is_causal=True),
        **{f"window {number}": _attention(_inputs(rng, 70, 150), **each) for number, each in enumerate(wide)},
    }


def _decoding(rng: np.random.Generator) -> dict[str, Task]:
    decode = _inputs(rng, 1, 200, batch=2, heads=4, kv_heads=2)
    extend = _inputs(rng, 3, 3, batch=2, heads=2)
    extend |= {f"past_{name}": rng.normal(size=(2, 2, 5, 8)) for name in ("key", "value")}
    empty = np.arange(200) >= 120
    return {
        "decoding": _attention(decode),
        "decoding, masked": _attention(decode | {"mask": empty.reshape(1, 1, 1, 200)}),
        "decoding, biased": _attention(decode | {"bias": rng.normal(size=(1, 1, 1, 200))}),
        "decoding, lengths": _attention(decode | {"key_lengths": np.array([150, 40])}),
        "extending, masked": _attention(extend | {"mask": rng.random((2, 1, 3, 8)) < 0.7}),
        "extending, biased": _attention(extend | {"bias": rng.normal(size=(1, 1, 3, 8))}),
        "extending, lengths": _attention(extend | {"key_lengths": np.array([6, 4])}),
        "extending, capped": _attention(extend, softcap=1.2),
    }


def _two_options(rng: np.random.Generator, queries: int, keys: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and inputs that are combined with each other."""
    options = {"is_causal": True, "window": (2, 1), "softcap": 1.3}
    inputs = {
        "mask": rng.random((2, 4, queries, keys)) < 0.8,
        "bias": rng.normal(size=(1, 4, queries, keys)),
        "key_lengths": np.array([keys, keys - 3]),
    }
    return options, inputs


def _pairs(rng: np.random.Generator) -> dict[str, Task]:
    plain = _inputs(rng, 6, 9, batch=2, heads=4)
    grouped = _inputs(rng, 6, 9, batch=2, heads=4, kv_heads=2)
    options, inputs = _two_options(rng, 6, 9)
    every = [({name: value}, {}) for name, value in options.items()]
    every += [({}, {name: value}) for name, value in inputs.items()]
    made = {
        f"pair {number}, {other}": _attention(plain | one[1] | two[1], **one[0], **two[0])
        for number, one in enumerate(every)
        for other, two in enumerate(every[:number])
    }
    groups = {f"groups, {number}": _attention(grouped | more, **given) for number, (given, more) in enumerate(every)}
    shared = {"mask": rng.random((1, 4, 6, 9)) < 0.8}
    return made | groups | {"mask of each head": _attention(plain | shared)}


def _gradients(rng: np.random.Generator) -> dict[str, Task]:
    def task(arrays: Arrays, **options: Any) -> Task:
        shape = (*arrays["query"].shape[:3], arrays["value"].shape[-1])
        return Task("attention_gradients", options, arrays | {"grad_output": rng.normal(size=shape)})

    plain = _inputs(rng, 6, 9, batch=2, heads=4)
    grouped = _inputs(rng, 6, 9, batch=2, heads=4, kv_heads=2)
    options, inputs = _two_options(rng, 6, 9)
    bias, lengths, mask = ({name: inputs[name]} for name in ("bias", "key_lengths", "mask"))
    of_all = {"bias": rng.normal(size=(1, 1, 1, 9))}
    return {
        "gradients, groups and window": task(grouped, window=options["window"]),
        "gradients, groups and mask": task(grouped | mask),
        "gradients, groups and bias": task(grouped | bias),
        "gradients, groups and causal": task(grouped, is_causal=True),
        "gradients, bias and causal": task(plain | bias, is_causal=True),
        "gradients, shared bias and causal": task(plain | of_all, is_causal=True),
        "gradients, shared bias and lengths": task(plain | of_all | lengths),
        "gradients, bias and window": task(plain | bias, window=options["window"]),
        "gradients, lengths and softcap": task(plain | lengths, softcap=1.3),
        "gradients, bias and softcap": task(plain | bias, softcap=1.3),
        "gradients, mask and softcap": task(plain | mask, softcap=1.3),
        "gradients, 140 queries and keys": task(_inputs(rng, 140, 140, width=72), is_causal=True),
        "gradients, 9 queries and 200 keys": task(_inputs(rng, 9, 200)),
        "gradients, 600 nearly equal weights": task(_inputs(rng, 2, 600), scale=0.01),
        "gradients, low logits": task(plain | {"bias": np.full((1, 1, 1, 9), -900.0)}),
    }


def _values(rng: np.random.Generator) -> dict[str, Task]:
    arrays = _inputs(rng, 3, 40, width=4)
    zero_query, zero_key = (arrays | {name: arrays[name].copy()} for name in ("query", "key"))
    zero_query["query"][..., 1, :] = 0
    zero_key["key"][..., 5, :] = 0
    tied = arrays | {"key": np.concatenate([arrays["key"][..., :20, :]] * 2, axis=-2)}
    masked = np.arange(40) >= 17
    lost = arrays | {"query": arrays["query"].copy()}
    lost["query"][..., 1, 0] = np.nan
    return {
        "zero query": _attention(zero_query),
        "zero key": _attention(zero_key),
        "ties": _attention(tied),
        "negative zeros": _attention(arrays | {"bias": np.where(np.arange(40) % 3, 0.5, -0.0).reshape(1, 1, 1, 40)}),
        "first tile masked": _attention(arrays | {"mask": masked.reshape(1, 1, 1, 40)}),
        "first tile of 64 masked": _attention(
            _inputs(rng, 2, 70) | {"mask": (np.arange(70) > 64).reshape(1, 1, 1, 70)}
        ),
        **{f"least {dtype}": _attention(arrays | {"bias": _least_finite(dtype)}) for dtype in ("float64", "float32")},
        "tiny values": _attention(arrays | {"value": 1e-5 * arrays["value"]}),
        "NaN": _attention(lost),
    }


def _least_finite(dtype: str) -> NDArray[Any]:
    """Return a bias of the least finite number in whole rows and in half of one."""
    bias = np.full((1, 1, 3, 40), float(np.finfo(dtype).min))
    bias[..., 0, :20] = 0
    return bias
