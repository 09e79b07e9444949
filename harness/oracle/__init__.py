"""The exact answer: every stage of attention evaluated to a proven radius, whole, by rows, or with keys in blocks."""

from collections import Counter

SETTLED: Counter[str] = Counter()
"""How many questions double words settled in this process, and how many went on to balls, since it was cleared."""
