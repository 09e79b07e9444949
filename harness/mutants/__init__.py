"""Faulty and honest variants of the NumPy reference, and how well the cases tell the two apart.

Nothing that imports NumPy may be imported here: a worker that unpickles an entry has not limited its threads yet.
"""
