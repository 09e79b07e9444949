"""Matrices and errors as pictures."""
