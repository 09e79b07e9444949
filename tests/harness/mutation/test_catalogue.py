"""The content of the catalogue: what an option or an input that nobody has thought of adds to it by its row, too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attncheck.mutation
from attncheck.backends.contract import Window
from attncheck.dtypes import numpy_dtype
from attncheck.execution.operations import Task, run_operation
from attncheck.judging.diagnosis import Decision, Fit
from attncheck.judging.readings import CATALOGUE
from attncheck.mutation.catalogue import (
    BY_HAND,
    CONTROLS,
    EQUIVALENT,
    MET,
    MUTANTS,
    SUBJECTS,
    TOPICS,
    arguments_of,
    faults_of,
    of_option,
    variant_named,
)
from attncheck.mutation.judgement import NOT_NAMED, RIGHTLY, WRONGLY, how_named, names_of
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import (
    WIDE,
    Control,
    subjects_of_module,
)
from attncheck.spec import OPERATIONS, OptionSpec
from attncheck.spec.inputs import optional

ALL_DTYPES = {*WIDE, "bfloat16", "float16"}
LOG_SUM_EXP_IN_FLOAT32 = {
    "fused_kernel_with_statistics_in_float32",
    "fused_kernel_in_base_two_with_statistics_in_float32",
    "log_sum_exp_widened_too_late",
    "log_sum_exp_of_exponentials_in_16_bits",
}


def test_names_are_unique_and_can_be_written_in_an_identifier() -> None:
    assert len(SUBJECTS) == len(MUTANTS) + len(CONTROLS) + len(EQUIVALENT)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]+", name) for name in SUBJECTS)
    assert variant_named("reference") == SUBJECTS["reference"].backend
    with pytest.raises(KeyError):
        variant_named("no_such_fault")


def test_every_variant_says_what_it_does_and_where_it_applies() -> None:
    texts = {each.name: (each.description,) for each in CONTROLS}
    texts |= {each.name: (each.description, each.topic) for each in MUTANTS}
    texts |= {each.name: (each.description, each.proof) for each in EQUIVALENT}
    silent = [name for name, said in texts.items() if not all(text.strip() for text in said)]
    nowhere = [name for name, each in SUBJECTS.items() if not each.dtypes or not set(each.dtypes) <= ALL_DTYPES]
    assert (silent, nowhere) == ([], [])


def test_every_module_that_registers_subjects_is_a_topic_of_the_catalogue() -> None:
    modules = {
        path.stem
        for path in Path(attncheck.mutation.__file__).parent.glob("*.py")
        if re.search(
            r"^from attncheck\.mutation\.mutant import [^)]*?\b(mutant|control)\b", path.read_text(), re.MULTILINE
        )
    }
    assert modules - {"catalogue"} == {topic.__name__.rpartition(".")[2] for topic in TOPICS}
    assert all(subjects_of_module(topic.__name__) for topic in TOPICS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_with_ends_in_16_bits_return_16_bits(dtype: str) -> None:
    rng = np.random.default_rng(20240711)
    shapes = {"query": (1, 1, 2, 64), "key": (1, 1, 3, 64), "value": (1, 1, 3, 64)}
    inputs = {name: rng.normal(size=shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}
    learned = inputs | {"mask": rng.random((1, 1, 2, 3)) < 0.8, "grad_output": inputs["query"]}
    tasks = Task("attention", {}, inputs), Task("attention_gradients", {"softcap": 1.3}, learned)
    kernels = [each for each in (*MUTANTS, *CONTROLS) if isinstance(each.backend, Kernel)]
    kernels = [each for each in kernels if not isinstance(each, Control) or "float64" in each.dtypes]
    offenders = []
    for subject in kernels:
        for task in tasks:
            with np.errstate(all="ignore"):
                stages = run_operation(subject.backend, task.operation, task.inputs, task.options)
            found = {name: str(stage.dtype) for name, stage in stages.items()}
            of_statistics = {found.pop("log_sum_exp")} - {dtype} if "log_sum_exp" in found else set()
            is_wide = subject.name in LOG_SUM_EXP_IN_FLOAT32 and "output" in found
            if not set(found.values()) <= {dtype} or of_statistics != ({"float32"} if is_wide else set()):
                offenders.append((subject.name, task.operation, found, of_statistics))
    assert not offenders


def test_what_is_told_of_a_fault_is_right_wrong_or_nothing() -> None:
    missing, honest = SUBJECTS["scale_missing"], CONTROLS[0]
    assert how_named(missing, ()) == NOT_NAMED
    assert how_named(missing, ("scale-one",)) == RIGHTLY
    assert how_named(missing, ("scale-twice or scale-one",)) == RIGHTLY
    assert how_named(missing, ("scale-one", "bias-twice")) == WRONGLY
    assert how_named(honest, ("scale-one",)) == WRONGLY
    fit = Fit("scale-one", "", "scores", "numeric", "1")
    assert names_of([Decision(fit), Decision(), Decision(fit)]) == ("scale-one",)


def test_names_that_faults_may_get_are_those_of_readings() -> None:
    names = {reading.name for readings in CATALOGUE.values() for reading in readings}
    assert {name for mutant in MUTANTS for name in mutant.diagnosis} <= names


def test_a_new_option_has_its_faults_by_its_row() -> None:
    temperature = OptionSpec("A number that divides the logits.", positive=True, type=float)
    assert [fault.name for fault in of_option(temperature)] == ["left_out", "taken_twice"]
    edges = [fault.change((2, None)) for fault in of_option(OptionSpec("A second window.", type=Window))]
    assert edges == [None, (3, None), (1, None), (2, None), (2, None), (None, 2)]


def test_an_operation_that_takes_one_more_argument_has_faults_of_it() -> None:
    attention = OPERATIONS["attention"]
    scales = optional("H", neutral=1)
    wider = replace(attention, inputs={**attention.inputs, "head_scales": scales})
    found = {fault.name for fault in faults_of(wider, "head_scales", scales)}
    assert found >= {"left_out", "neutral", "taken_twice", "negated", "in_bfloat16", "of_the_next_head"}
    assert "head_scales" not in dict(arguments_of(wider)), "the NumPy backend does not take it yet"


def test_every_operation_has_faults_and_none_has_two_of_a_name() -> None:
    generated = [fault for fault in MUTANTS if fault.of is not None]
    assert {fault.of[0] for fault in generated if fault.of} == set(OPERATIONS)
    met = [fault for fault in generated if fault in BY_HAND]
    assert {fault.name for fault in met} == MET.keys()
    assert len({fault.name for fault in MUTANTS}) == len(MUTANTS) == len(BY_HAND) + len(generated) - len(met)
