"""Every question tells its meanings apart, in every dtype and for every rounding model that may be declared."""

from __future__ import annotations

import numpy as np
import pytest

from attncheck.conventions import QUESTIONS, ConventionQuestion, is_meant, truth_of_meaning
from attncheck.dtypes import rounded_once
from attncheck.spec import DTYPES, ROUNDING_MODELS

MODELS = [(dtype, model) for model, dtypes in ROUNDING_MODELS.items() for dtype in DTYPES if dtype in dtypes]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: each.name.replace(" ", "-"))
def test_the_answer_of_a_meaning_is_that_of_no_other(question: ConventionQuestion) -> None:
    for meaning in question.meanings:
        for dtype, model in MODELS if meaning.problem is not None else [("float64", "native")]:
            if meaning.problem is None:
                exact = np.zeros((1, 2, 3) if question.stage == "log_sum_exp" else (1, 2, 3, 4))
                exact[:, :, meaning.rows] = meaning.constant
            else:
                exact = truth_of_meaning(meaning, dtype).exact[question.stage].high / meaning.factor
            array = rounded_once(exact, dtype)
            found = [each.words for each in question.meanings if is_meant(question, each, array, dtype, model)]
            assert found == [meaning.words], (dtype, model)


def test_names_are_unique() -> None:
    names = [question.name for question in QUESTIONS]
    assert len({*names}) == len(names)
    assert all(len({meaning.words for meaning in each.meanings}) == len(each.meanings) for each in QUESTIONS)
