"""Attention as somebody writes it in NumPy, for tests in which a kernel stands in a file of its own."""

ATTENTION = """\
import numpy as np

def attention(query, key, value, *, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights / weights.sum(-1, keepdims=True) @ value
    return output
"""
"""Right, but that a query without a key gives NaN; without grouped heads."""


def kernel(returns: str = "output", *, first: str = "", before: str = "") -> str:
    """Return its source, with other lines before it and in it, and with something made of ``output`` returned."""
    text = ATTENTION.replace("return output", f"return {returns}")
    return before + (text.replace("    scores =", f"    {first}\n    scores =", 1) if first else text)
