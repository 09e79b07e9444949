"""Small problems of every operation, with every input and option that a step of its own belongs to.

Shapes follow from the axes that the specification gives each input; ``problems.yaml`` says which there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml
from numpy.typing import NDArray

from attncheck.attention.problem import Computation
from attncheck.backends import numpy_backend
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.execution.operations import run_operation
from attncheck.judging.judge_implementation import JudgedStages, KnownEmptyRows
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.problem import Problem as BaseProblem
from attncheck.searching.concrete import input_axes
from attncheck.spec import InputSpec, input_specs, statistics_dtype
from attncheck.spec.dtypes import round_to
from attncheck.spec.verdicts import Verdict

Array = NDArray[Any]
Arrays = dict[str, Array]
Options = dict[str, Any]
INF = np.inf


class Problem(BaseProblem):
    """A problem with inputs in float64, counts, masks and codes of 8 bits apart."""

    def stored(self, dtype: str) -> Problem:
        """Return the same with numbers as a dtype stores them."""
        dtypes = {"log_sum_exps": statistics_dtype(dtype)}
        arrays = {
            name: round_to(array, dtypes.get(name, dtype)) if array.dtype == np.float64 else array
            for name, array in self.inputs.items()
        }
        return replace(self, inputs=arrays, dtype=dtype)

    def truth(self, dtype: str = "float64", *, supports_statistics: bool = True, **more: Any) -> Truth:
        """Return what is true of it; its inputs are stored already."""
        return find_truth(replace(self, dtype=dtype, supports_statistics=supports_statistics), **more)

    def returned(self) -> Arrays:
        """Return NumPy's stages."""
        called = self.as_call()
        with np.errstate(all="ignore"):
            return dict(run_operation(numpy_backend, self.operation, called.inputs, called.options))

    def judged(
        self,
        stages: Mapping[str, Array],
        dtype: str = "float64",
        model: str = "native",
        own: KnownEmptyRows | None = None,
        **options: Any,
    ) -> JudgedStages:
        """Judge and diagnose what was returned for it, with other options besides."""
        problem = Problem(self.operation, {**self.options, **options}, self.inputs)
        shapes = {stage: array.shape for stage, array in stages.items()}
        return judge_and_diagnose(problem.truth(dtype), dict(stages), shapes, model, own)

    def laid_out(self, rows: NDArray[np.intp] | None = None) -> Problem:
        """Return the canonical form, of some query rows or of all."""
        plain = self.without_layout().canonical(rows)
        return Problem(plain.operation, dict(plain.options), dict(plain.inputs))

    def on_walk(self) -> Computation:
        """Return what walks over the graph take."""
        return Computation.from_problem(self.without_layout().canonical()).in_float64()


def failing(judged: JudgedStages) -> dict[str, Verdict]:
    """Return the verdicts of the stages that are not right."""
    return {each.stage: each.verdict for each in judged.judgements if each.verdict.exit_code}


LENGTHS = {
    **{"B": 2, "H": 4, "Hkv": 2, "Lq": 5, "Lk": 6, "D": 4, "Dv": 3, "Dk": 3, "A": 3, "E": 5, "Ek": 5, "Ev": 5, "Eo": 7},
    **{"Lr": 9, "R": 2, "P": 3, "C": 5, "Dr": 2, "N": 4, "K": 3, "1": 1},
}
"""How long each axis is; keys are longer by those of the past. A width of ``H*D`` is that of all heads."""
LQ, LK, H = (LENGTHS[axis] for axis in ("Lq", "Lk", "H"))
_GIVEN: Mapping[str, Array] = {
    "sinks": np.array([0.5, -INF, 6.0, -3.0]),
    "query_mask": np.arange(2 * LQ).reshape(2, LQ) % 3 > 0,
    "key_lengths": np.array([6, 3]),
    "query_offsets": np.array([1, 3]),
    "head_scale": np.array([0.25, -1.3, 0.0, 2.0]),
}
_ROWS: Mapping[str, Mapping[str, Any]] = yaml.load(
    Path(__file__).with_name("problems.yaml").read_text("utf-8"), yaml.CSafeLoader
)
NAMES = tuple(_ROWS)
FORWARD = tuple(name for name, row in _ROWS.items() if not row["operation"].endswith("_gradients"))


def options_of(row: Mapping[str, Any]) -> Options:
    """Return options as they are written in a table: a window is a pair."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def draw(name: str, seed: int = 0, size: float = 1.0) -> Problem:
    """Draw the numbers of a problem."""
    operation, more = _ROWS[name]["operation"], _ROWS[name].get("inputs", "")
    options = options_of(_ROWS[name].get("options", {}))
    random = np.random.default_rng([seed, NAMES.index(name)])
    specs = input_specs(operation, options.get("score"))
    axes = {each: input_axes(spec, options) for each, spec in specs.items() if spec.required}
    for word in more.split():
        each, _, own = word.rstrip("]").partition("[")
        axes[each] = tuple(own.split(",")) if own else input_axes(specs[each], options)
    is_broadcast = "bias[" in more
    arrays = {each: _drawn(each, specs[each], _shape(letters, axes), size, random) for each, letters in axes.items()}
    if "bias" in arrays and not is_broadcast:
        bias = arrays["bias"][:1]
        arrays["bias"] = np.where(np.random.default_rng(2).random(bias.shape) < 0.15, -INF, bias)
    if name == "softmax, empty row":
        arrays["scores"] = np.where(_mask(arrays["scores"].shape), arrays["scores"], -INF)
    if name == "codes of float8":
        arrays |= {each: arrays[each].astype(ml_dtypes.float8_e4m3fn) for each in ("key", "value")}
    if name == "parts, empty":
        arrays["log_sum_exps"][1, 0], arrays["outputs"][1, 0] = -INF, 7.0
        arrays["log_sum_exps"][:, 1, 1, 2] = -INF
    return Problem(operation, options, arrays)


def _mask(shape: tuple[int, ...]) -> Array:
    """Forbid some keys, and a row altogether."""
    mask = np.random.default_rng(1).random((shape[0], 1, *shape[2:])) < 0.6
    mask[..., 0], mask[0, 0, 2] = True, False
    return mask


def _shape(letters: tuple[str, ...], given: Mapping[str, Any]) -> tuple[int, ...]:
    lengths = LENGTHS | {"T": LENGTHS["Lk"] + (LENGTHS["P"] if "past_key" in given else 0)}
    return tuple(int(np.prod([lengths[letter] for letter in product.split("*")])) for product in letters)


def _drawn(name: str, spec: InputSpec, shape: tuple[int, ...], size: float, random: np.random.Generator) -> Array:
    if name in _GIVEN:
        return _GIVEN[name]
    if name == "mask":
        return _mask(shape)
    if spec.is_index:  # of two blocks or more, none twice, and none at all for the third query
        rows = random.permuted(np.broadcast_to(np.arange(shape[-1]) - 1, shape), axis=-1)
        return np.where(np.arange(shape[-2])[:, np.newaxis] == 2, -1, rows)
    numbers = size * random.standard_normal(shape)
    if spec.scale_input and name in ("key", "value"):  # a query in codes has a scale, and so have pages
        return (20 * numbers).astype(np.int8)
    if name.endswith("_scale") and name != "head_scale":
        return np.abs(numbers) / 20
    return numbers * (3.0 if name in ("log_sum_exps", "gate") else 0.5 if name.endswith("_weight") else 1.0)
