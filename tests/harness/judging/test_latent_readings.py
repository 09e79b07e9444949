"""What implementations do instead of projecting latent vectors as a case means, as people are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.judge_implementation import diagnose_case
from attncheck.judging.truth import find_truth
from attncheck.mutation.catalogue import MUTANTS, variant_named
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS

Array = NDArray[Any]
OF_LATENTS = [mutant for mutant in MUTANTS if mutant.topic == "latents"]
NAMED = [
    (mutant.name, mutant.diagnosis[0])
    for mutant in OF_LATENTS
    if mutant.diagnosis and mutant.diagnosis != ACCURACY_OF_16_BITS
]


def drawn(*, is_square: bool) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    latent, width, wide = (6, 6, 6) if is_square else (11, 6, 5)
    return {
        "query": rng.standard_normal((2, 3, 5, width)),
        "latent": rng.standard_normal((2, 9, latent)),
        "key_projection": rng.standard_normal((3, latent, width)),
        "value_projection": rng.standard_normal((3, latent, wide)),
        "query_rotary": rng.standard_normal((2, 3, 5, 4)),
        "key_rotary": rng.standard_normal((2, 9, 4)),
    }


def posed(name: str, diagnosis: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Pose a problem that shows a fault: with square projections, or a scale of its own, where it is of those."""
    of_square = diagnosis.endswith(("-transposed", "-ignored", "-swapped")) and not diagnosis.startswith("rotated")
    return {"scale": 0.21} if diagnosis == "scale-default" else {}, drawn(is_square=of_square)


@pytest.mark.parametrize(("name", "diagnosis"), NAMED)
def test_a_fault_of_latent_attention_is_named(name: str, diagnosis: str) -> None:
    options, inputs = posed(name, diagnosis)
    truth = find_truth("latent_attention", options, inputs, "float64", supports_statistics=True)
    returned = variant_named(name).latent_attention(**inputs, **options)
    failed = {
        stage: array
        for stage, array in returned.items()
        if (np.abs(array - truth.exact[stage].high) > truth.bounds("native")[stage].max_error).any()
    }
    right = {stage: array for stage, array in returned.items() if stage not in failed}
    assert failed
    found = diagnose_case(truth, failed, "native", right)
    assert [each.name for each in found.fits] == [diagnosis]


def test_latent_vectors_that_were_rounded_are_told_from_wrong_ones() -> None:
    inputs = {name: array.astype(np.float32) for name, array in drawn(is_square=False).items()}
    truth = find_truth("latent_attention", {}, inputs, "float32", supports_statistics=True)
    returned = variant_named("latents_cached_in_bfloat16").latent_attention(**inputs)
    found = diagnose_case(truth, returned, "native")
    assert [each.name for each in found.fits] == list(ACCURACY_OF_16_BITS)
