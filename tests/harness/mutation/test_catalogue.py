"""The content of the catalogue, how subjects come into it, and that faults are named by what they are or not at all."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attncheck.mutation
from attncheck.dtypes import numpy_dtype
from attncheck.execution.operations import Task, run_operation
from attncheck.judging.diagnosis import Decision, Fit
from attncheck.judging.readings import CATALOGUE
from attncheck.mutation.catalogue import BY_HAND, CONTROLS, EQUIVALENT, MUTANTS, SUBJECTS, TOPICS, variant_named
from attncheck.mutation.judgement import NOT_NAMED, RIGHTLY, WRONGLY, how_named, names_of
from attncheck.mutation.kernel import Kernel
from attncheck.mutation.mutant import (
    EVERY,
    WIDE,
    Control,
    Equivalent,
    Mutant,
    Steps,
    Variant,
    control,
    equivalent,
    mutant,
    subjects_of_module,
)
from attncheck.mutation.score import run_mutants
from attncheck.reading.selection import select_cases

Array = NDArray[Any]

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


def test_at_least_nine_hundred_faults_are_spread_over_the_topics_and_fifty_variants_are_honest() -> None:
    topics = Counter(mutant.topic for mutant in MUTANTS)
    wanted = {"scale", "softmax", "precision", "masks", "causal", "blocks", "heads", "projections"}
    wanted |= {"gradients", "caches", "windows", "softcap", "grouped", "lengths", "layouts", "other scores"}
    assert len(BY_HAND) >= 710
    assert len(MUTANTS) >= 900
    assert min(topics[topic] for topic in wanted) >= 5
    assert len(CONTROLS) >= 50
    assert sum(set(honest.dtypes) == ALL_DTYPES for honest in CONTROLS) >= 20


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


# The decorators that put subjects into the catalogue

SCORES = np.array([[[[0.0, 1.0]]]])


@mutant("softcap", "_cap", at="capped", defect="no cap", diagnosis="softcap-ignored")
def uncapped(scores: Array, softcap: float) -> Array:
    return scores


def _doubled(step: Any) -> Steps:
    return {"_cap": lambda scores, softcap: step(scores, 2 * softcap)}


mutant("softcap", _doubled, at="capped", defect="another cap", dtypes=("float64",), name="cap_of_two")(np.minimum)
control(why="nothing is replaced", hidden=frozenset({"log_sum_exp"}), name="same")({})


@control(Kernel, why="nothing is replaced between the ends")
def widened(store: Any) -> Steps:
    return {}


equivalent(defect="none", proof="nothing is replaced", name="nothing")({})


def test_subjects_are_those_of_a_module_in_the_order_of_its_lines() -> None:
    found = subjects_of_module(__name__)
    assert [each.name for each in found] == ["uncapped", "cap_of_two", "same", "widened", "nothing"]
    assert [type(each) for each in found] == [Mutant, Mutant, Control, Control, Equivalent]
    assert subjects_of_module("no.such.module") == ()


def test_what_a_decorator_says_is_what_the_subject_says() -> None:
    first, second, *_ = subjects_of_module(__name__)
    assert isinstance(first, Mutant)
    assert isinstance(second, Mutant)
    assert (first.topic, first.first_wrong_stage, first.description) == ("softcap", "capped", "no cap")
    assert (first.dtypes, first.diagnosis) == (EVERY, ("softcap-ignored",))
    assert (second.dtypes, second.diagnosis) == (("float64",), ())


def test_a_form_is_a_steps_name_or_makes_steps_or_a_variant_or_is_left_out() -> None:
    first, second, same, kernel, _ = subjects_of_module(__name__)
    one = np.full((1, 1, 1, 1), 3.0)
    assert uncapped(SCORES, 1.0) is SCORES, "it stays what it is"
    assert first.backend.dot_scores(one, one, softcap=2.0)["capped"] == 9
    assert second.backend.dot_scores(one, one, softcap=2.0)["capped"] == 4
    assert list(same.backend.softmax(SCORES)) == ["weights"]
    assert isinstance(kernel.backend, Kernel)
    assert not isinstance(same.backend, Kernel)
    assert isinstance(same.backend, Variant)


# Names of faults


FEW = [
    "attention/a-bias-per-head-*",
    "attention/a-causal-row-sees-*",
    "attention/every-dimension-is-different-*",
    "attention/padding-of-different-length-*",
    "windows/a-window-alone-*",
]
SOME = {
    "scale_missing": "scale-one",
    "scores_squared": "scores-squared",
    "bias_scaled": "bias-scaled",
    "attention_bias_of_the_first_head": "bias-of-first-head",
    "softmax_over_queries": "softmax-over-queries",
    "log_sum_exp_in_base_two": "log-sum-exp-mixed-base",
    "mask_after_softmax": "weights-not-renormalised",
    "attention_mask_of_the_first_batch_entry": "mask-of-first-batch-entry",
    "causal_next_key": "causal-next-key",
    "attention_window_one_wider_before": "window-too-wide-left",
    "attention_weighted_sum_value_of_the_next_head": "value-of-next-head",
    "one_added_to_the_sum": "denominator-plus-1",
    "attention_weighted_sum_mean_without_the_last_feature": "last-value-column-dropped",
}
NOTHING = ("two_values_swapped", "causal_by_groups_of_four")


def test_a_fault_is_named_by_what_it_is_or_not_at_all() -> None:
    subjects = [SUBJECTS[name] for name in (*SOME, *NOTHING)]
    frames = run_mutants(select_cases(FEW).cases, subjects=[*subjects, *CONTROLS[:3]])
    assert frames.names_well
    assert frames.naming() == {RIGHTLY: len(SOME), WRONGLY: 0, NOT_NAMED: len(NOTHING)}
    names = dict(zip(frames.subjects["subject"], frames.subjects["named"], strict=True))
    assert names == SOME | dict.fromkeys((*NOTHING, *(honest.name for honest in CONTROLS[:3])), "")
    declared = {mutant.name: mutant.diagnosis for mutant in MUTANTS}
    assert [name for name, diagnosis in SOME.items() if diagnosis not in declared[name]] == []


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
