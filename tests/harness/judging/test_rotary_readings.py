"""What is said of a rotary embedding that was done in another way, from the stages that it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import attncheck

pytestmark = pytest.mark.usefixtures("workers_here")

CASES = Path(__file__).parents[3] / "cases" / "rotary.yaml"
KERNEL = """
import numpy as np
from attncheck.backends import numpy_backend


def attention(query, key, value, *, rotary_cos=None, rotary_sin=None, rotary_interleaved=False, past_key=None,
              past_value=None, is_causal=False, window=None, sinks=None, mask=None, bias=None, scale=None):
    given = dict(is_causal=is_causal, window=window, sinks=sinks, mask=mask, bias=bias, scale=scale)
    past = 0 if past_key is None else past_key.shape[-2]
    tables = dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved)
    {fault}
    stages = numpy_backend.attention(query, key, value, past_key=past_key, past_value=past_value, **tables, **given)
    return stages["output"]
"""
FAULTS = {
    "rotary-pairs": "tables['rotary_interleaved'] = not rotary_interleaved",
    "rotary-ignored": "tables = {}",
    "rotary-backwards": "tables['rotary_sin'] = None if rotary_sin is None else -rotary_sin",
    "rotary-without-past": (
        "tables.update({} if rotary_cos is None else {n: np.concatenate([t[:past], t])[:len(t)] for n, t in "
        "(('rotary_cos', rotary_cos), ('rotary_sin', rotary_sin))})"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_was_done_instead_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.replace("{fault}", FAULTS[name]), encoding="utf-8")
    result = attncheck.check(f"{path}:attention", cases=[str(CASES)], dtypes=["float64"])
    assert not result.agrees
    assert set(result.frames.results["diagnosis"].dropna()) == {name}
