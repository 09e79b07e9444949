"""Biases that follow from positions alone, as kinds of arrays. ``generated_arrays.py`` makes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from attncheck.reading.mask_kinds import Pattern


class Alibi(Pattern):
    """ALiBi: minus the slope of each head times the distance between query and key, (H, Lq, T)."""

    alibi: Annotated[PositiveInt, Field(le=4096)] = Field(
        description="How many heads there are, from which their slopes follow."
    )
