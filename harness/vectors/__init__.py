"""Vectors: cases with their inputs, exact answers and error bounds as files that any language reads, and back."""
