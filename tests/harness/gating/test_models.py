"""Pairs of a reference and a candidate: which operation a reference is, and how a candidate is called as it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from attncheck.common.errors import UsageError
from attncheck.gating.models import ReferenceOperation, identify_reference, write_adapter

REFERENCE = """
import torch


class Model(torch.nn.Module):
    def forward(self, {arguments}):
        return {result}


def get_inputs():
    return [torch.rand({shape}) for _ in range({count})]


def get_init_inputs():
    return []
"""
SDPA = "torch.nn.functional.scaled_dot_product_attention"


def write_reference(folder: Path, result: str, shape: str = "2, 4, 8, 16", count: int = 3) -> Path:
    arguments = ", ".join("qkv"[:count])
    path = folder / "reference.py"
    path.write_text(REFERENCE.format(arguments=arguments, result=result, shape=shape, count=count))
    return path


@pytest.mark.torch
@pytest.mark.parametrize(
    ("result", "shape", "count", "operation"),
    [
        (f"{SDPA}(q, k, v, is_causal=True)", "2, 4, 8, 16", 3, "attention with is_causal = True"),
        (f"{SDPA}(q, k, v, scale=1.0)", "8, 16", 3, "attention with scale = 1.0"),
        ("torch.softmax(q, -1)", "64, 512", 1, "softmax"),
    ],
)
def test_a_reference_is_the_operation_of_its_result(
    tmp_path: Path, result: str, shape: str, count: int, operation: str
) -> None:
    assert str(identify_reference(write_reference(tmp_path, result, shape, count), seed=1)) == operation


@pytest.mark.torch
def test_a_reference_that_is_no_operation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither attention nor softmax"):
        identify_reference(write_reference(tmp_path, "q + k + v"), seed=1)


@pytest.mark.torch
def test_a_reference_with_parameters_is_refused(tmp_path: Path) -> None:
    path = write_reference(tmp_path, "q")
    layers = "class Model(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
    path.write_text(path.read_text().replace("class Model(torch.nn.Module):\n", layers))
    with pytest.raises(UsageError, match="Model has parameters"):
        identify_reference(path, seed=1)


@pytest.mark.torch
def test_an_adapter_refuses_other_options_than_the_references(tmp_path: Path) -> None:
    import torch

    reference = write_reference(tmp_path, f"{SDPA}(q, k, v, is_causal=True)")
    candidate = tmp_path / "candidate.py"
    candidate.write_text(reference.read_text().replace("Model(", "ModelNew("))
    adapter = write_adapter(
        candidate, reference, ReferenceOperation("attention", {"is_causal": True}, 4), tmp_path / "adapter"
    )
    specification = importlib.util.spec_from_file_location("adapter_of_candidate", adapter)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    arrays = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    right = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)
    assert torch.equal(module.attention(*arrays, is_causal=True), right)
    with pytest.raises(NotImplementedError, match="is_causal"):
        module.attention(*arrays)


def test_a_candidate_without_its_module_is_refused(tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.py"
    candidate.write_text("class Model: ...")
    with pytest.raises(UsageError, match="expected a file with a module ModelNew"):
        write_adapter(candidate, candidate, ReferenceOperation("attention", {}, 4), tmp_path)
