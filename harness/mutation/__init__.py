"""Faulty and right variants of the NumPy backend, and how well the cases distinguish the two.

Nothing that imports NumPy may be imported here: a worker that unpickles an entry has not limited its threads yet.
"""
