"""The exact answer: every stage of attention evaluated to a proven radius, whole, by rows, or with keys in blocks."""
